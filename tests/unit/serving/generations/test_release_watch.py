"""What the release records tell of the nights, and what is told of it when they cannot be read."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.releases import Release, done_path, intent_path
from serving.dashboard.generation_history import GenerationHistory
from serving.generations.nights import UNKNOWN_GATE, ReleaseWatch, open_refusal
from tests.fakes import THREADS
from tests.unit.serving.world import World

MANIFEST = World().snapshot().manifest
A, B = "20260101T000000Z-aaaaaaaaaaaa", "20260102T000000Z-bbbbbbbbbbbb"


@pytest.fixture
def store(tmp_path: Path) -> ArtefactStore:
    return ArtefactStore(str(tmp_path / "store"))


def write(store: ArtefactStore, *moves: tuple[Any, str], is_done: bool = True) -> None:
    """Adds records in order, each of them later than the one before."""
    for action, generation in moves:
        number = len([name for name in store.names("releases") if name.endswith(".json")]) + 1
        release = Release(number, action, generation, None, "a", 100.0 * number, number=number)
        store.write_once(intent_path(number), release.to_bytes())
        if is_done:
            store.write_once(done_path(number), b"")


def judged(store: ArtefactStore, generation: str, **rules: bool) -> None:
    """A manifest with these verdicts."""
    gates = tuple({"rule": rule, "passed": passed} for rule, passed in rules.items())
    manifest = dataclasses.replace(MANIFEST, generation=generation, gates=gates)
    store.write(generation_path(generation, "manifest.json"), manifest.to_bytes())


async def test_the_newest_of_each_action_is_told_and_an_intent_is_none(store: ArtefactStore) -> None:
    write(store, ("publish", A), ("pin", A), ("publish", B))
    write(store, ("roll_back", A), is_done=False)
    watch = ReleaseWatch(store, THREADS)

    await watch.refresh()

    assert watch.last_time_by_action == {"publish": 300.0, "pin": 200.0} and not watch.failed_gate_rules


async def test_a_refusal_names_its_gates_once_they_can_be_read_and_until_something_is_published(
    store: ArtefactStore,
) -> None:
    watch = ReleaseWatch(store, THREADS)
    write(store, ("publish", A), ("refuse", B))
    await watch.refresh()
    assert watch.failed_gate_rules == {UNKNOWN_GATE}

    judged(store, B, score_psi=False, finite=True, skew=False)
    await watch.refresh()
    assert watch.failed_gate_rules == {"score_psi", "skew"}

    write(store, ("publish", B))
    await watch.refresh()
    assert watch.failed_gate_rules == frozenset()


@pytest.mark.parametrize(
    ("moves", "is_open"),
    [
        ([("refuse", B), ("roll_back", A)], True),
        ([("refuse", B), ("verify", A)], True),
        ([("refuse", B), ("verify", B)], False),
        ([("refuse", B), ("abandon", B)], False),
        ([("refuse", A), ("publish", B), ("refuse", B)], True),
        ([("publish", B)], False),
    ],
)
def test_a_refusal_is_open_until_it_is_lifted_given_up_or_overtaken(
    moves: list[tuple[Any, str]], is_open: bool
) -> None:
    records = [Release(n, action, of, None, "a", 1.0, is_done=True) for n, (action, of) in enumerate(moves)]

    refusal = open_refusal(records)

    assert (refusal is not None) == is_open


async def test_records_that_cannot_be_read_leave_what_is_known_and_are_told_once(
    store: ArtefactStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = ReleaseWatch(store, THREADS)
    write(store, ("publish", A))
    await watch.refresh()
    (tmp_path / "store" / intent_path(2)).write_bytes(b"no record")

    await watch.refresh()
    await watch.refresh()

    assert watch.last_time_by_action == {"publish": 100.0}
    assert caplog.text.count("the release records cannot be read") == 1


async def test_whoever_reads_records_of_a_replica_reads_none_a_second_time(
    store: ArtefactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, ("publish", A), ("pin", A))
    watch = ReleaseWatch(store, THREADS)
    history = GenerationHistory(store, watch.read_records)
    await watch.refresh()
    write(store, ("publish", B))
    read_paths: list[str] = []
    read_many = store.read_many

    def note_and_read(paths: Sequence[str]) -> Mapping[str, bytes]:
        read_paths.extend(paths)
        return read_many(paths)

    monkeypatch.setattr(store, "read_many", note_and_read)
    generations, _ = history.read_generations_and_nights(None)

    assert read_paths == [intent_path(3)]
    assert [generation["state"] for generation in generations] == ["live", "superseded"]
    assert watch.last_time_by_action["publish"] == 100.0  # until the next look
