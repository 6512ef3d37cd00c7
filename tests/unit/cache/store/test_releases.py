"""Release records and the pointer: read as they are written, and refused where a reader could not follow them."""

from dataclasses import replace
from typing import Any

import orjson
import pytest

from cache.errors import CorruptArtefact
from cache.store.artefacts import ArtefactStore
from cache.store.releases import (
    Canary,
    Pointer,
    Release,
    all_releases,
    done_path,
    intent_path,
    manifest_digest,
    newest_move,
    released_manifest_digest,
)

G1, G2 = (f"2026010{day}T000000Z-{'0' * 11}{day}" for day in (1, 2))
FIRST = Release(1, "publish", G1, None, "run-1", 100.0, manifest_sha256="a", number=1)
POINTER = Pointer(G2, 7, G1, "run-2", 200.0, Canary(G2, 25.0, 150.0, "click"))


@pytest.mark.parametrize("is_done", [True, False])
def test_a_record_is_read_as_it_was_written(is_done: bool) -> None:
    record = Release(
        5, "retire", G1, G2, "run-1", 100.5, reason="old", pages={"user_topk": 3}, expected=4, number=6, is_done=is_done
    )  # fmt: skip

    assert Release.from_bytes(record.to_bytes(), is_done=is_done) == record
    assert record.stored_number == 6 and replace(record, number=0).stored_number == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": "1"}, {"number": 1.5}, {"generation": 7}, {"action": "explode"}, {"at": "yesterday"},
        {"at": -1.0}, {"at": True}, {"unknown": 1},
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_one_is_refused(changes: dict[str, Any]) -> None:
    raw = orjson.dumps({**orjson.loads(FIRST.to_bytes()), **changes})

    with pytest.raises(CorruptArtefact, match="not a release record"):
        Release.from_bytes(raw, is_done=True)


def test_a_pointer_is_read_as_it_was_written() -> None:
    assert Pointer.from_bytes(POINTER.to_bytes()) == POINTER
    pointer_without_canary = replace(POINTER, canary=None, previous=None)
    assert Pointer.from_bytes(pointer_without_canary.to_bytes()) == pointer_without_canary


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": "../x"}, {"generation": None}, {"previous": "x"}, {"epoch": -1}, {"epoch": 2**53},
        {"epoch": 1.0}, {"attempt": None}, {"published_at": "now"}, {"published_at": -0.5},
        {"canary": {"generation": "x", "percent": 1.0, "since": 1.0}},
        {"canary": {"generation": G2, "percent": 100.5, "since": 1.0}},
        {"canary": {"generation": G2, "percent": 1.0, "since": None}},
        {"canary": {"generation": G2, "percent": 1.0, "since": 1.0, "event": 3}},
    ],
)  # fmt: skip
def test_a_pointer_that_no_replica_could_follow_is_refused(changes: dict[str, Any]) -> None:
    raw = orjson.dumps({**orjson.loads(POINTER.to_bytes()), **changes})

    with pytest.raises(CorruptArtefact, match="not a pointer"):
        Pointer.from_bytes(raw)


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 0}, {"epoch": 2**53 - 1}, {"published_at": 0},
        {"canary": {"generation": G2, "percent": 100, "since": 0.0}},
        {"canary": {"generation": G2, "percent": 0, "since": 0}},
    ],
)  # fmt: skip
def test_a_pointer_at_its_bounds_is_taken(changes: dict[str, Any]) -> None:
    raw = orjson.dumps({**orjson.loads(POINTER.to_bytes()), **changes})

    assert Pointer.from_bytes(raw).generation == G2


def written(store: ArtefactStore, *records: Release) -> None:
    """Records, and the marks of those that are done."""
    for record in records:
        store.write(intent_path(record.stored_number), record.to_bytes())
        if record.is_done:
            store.write(done_path(record.stored_number), b"")


def test_the_history_is_read_in_order_and_done_by_its_marks(tmp_path: Any) -> None:
    store = ArtefactStore(str(tmp_path))
    records = [
        replace(FIRST, is_done=True), replace(FIRST, epoch=3, number=2, generation=G2),
        replace(FIRST, epoch=4, number=3, action="refuse", generation=G2),
    ]  # fmt: skip
    written(store, *records)

    assert all_releases(store) == records
    release_by_number = {2: records[1]}
    store.write(done_path(2), b"")
    assert [record.is_done for record in all_releases(store, release_by_number)] == [True, True, False]
    assert release_by_number[2].is_done


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([FIRST, replace(FIRST, epoch=3, number=3)], r"releases/2\.json in .* is missing"),
        ([replace(FIRST, epoch=2, number=2)], r"releases/1\.json in .* is missing"),
        ([FIRST, replace(FIRST, epoch=1, number=2)], "its epoch 1 is not above that of the record before, 1"),
    ],
)
def test_a_history_with_a_gap_or_out_of_order_is_refused(tmp_path: Any, records: list[Release], reason: str) -> None:
    store = ArtefactStore(str(tmp_path))
    written(store, *records)

    with pytest.raises(CorruptArtefact, match=reason):
        all_releases(store)


def test_a_record_under_anothers_name_is_refused(tmp_path: Any) -> None:
    store = ArtefactStore(str(tmp_path))
    store.write(intent_path(1), replace(FIRST, number=2).to_bytes())

    with pytest.raises(CorruptArtefact, match="the record 2 is stored under another number") as refused:
        all_releases(store)
    assert refused.value.details["path"] == "releases/1.json"


def test_the_newest_move_is_the_last_that_was_completed() -> None:
    history = [
        replace(FIRST, is_done=True), replace(FIRST, epoch=2, action="roll_back", is_done=True),
        replace(FIRST, epoch=3, action="publish"), replace(FIRST, epoch=4, action="refuse", is_done=True),
    ]  # fmt: skip

    assert newest_move(history) == history[1] and newest_move(history[2:]) is None


def test_the_manifest_of_a_generation_is_that_last_released_or_verified_again() -> None:
    history = [
        replace(FIRST, is_done=True), replace(FIRST, action="verify", manifest_sha256="b"),
        replace(FIRST, manifest_sha256="c"), replace(FIRST, generation=G2, manifest_sha256="d", is_done=True),
    ]  # fmt: skip

    assert released_manifest_digest(history, G1) == "b" and released_manifest_digest(history[:1], G1) == "a"
    assert released_manifest_digest(history[2:3], G1) == "" == released_manifest_digest([], G1)


def test_verdicts_and_timings_are_no_part_of_a_manifests_digest() -> None:
    says = {"generation": G1, "tables": {}}

    digest = manifest_digest(orjson.dumps(says))

    assert digest == manifest_digest(orjson.dumps({"tables": {}, **says, "gates": [1], "timings": 2}))
    assert digest != manifest_digest(orjson.dumps({**says, "models": {}}))
    for damaged in (b"", b"[]", b"3"):
        with pytest.raises(CorruptArtefact, match="not a manifest"):
            manifest_digest(damaged)
