"""Reading a long history: as few requests after years as after weeks, and the files themselves stay the truth."""

import time
from pathlib import Path
from typing import Any

import pytest

from cache.errors import CorruptArtefact
from cache.store.artefacts import ArtefactStore
from cache.store.audit import audit_records, audited
from cache.store.erasures import all_erasures, mark_done, request_erasure
from cache.store.releases import Release, all_releases, done_path, intent_path
from cache.store.write_once import MISSING_NUMBERS_MAX, PACKED_FILES_MIN
from precompute.erasure.erasing import begin_erasing
from precompute.releases.release_log import Releases
from tests.object_stores import Counting, requests, store_of


def record(number: int) -> Release:
    return Release(number, "publish", f"g{number}", None, f"attempt-{number}", 1.0, number=number)


def write(store: ArtefactStore, numbers: range) -> None:
    for number in numbers:
        store.write(intent_path(number), record(number).to_bytes())
        store.write(done_path(number), b"")


def test_a_thousand_releases_cost_a_listing_and_two_rounds_of_a_hundred_reads(tmp_path):
    store = store_of(Counting, tmp_path)
    for first in range(1, 1001, 37):  # a step now and then, as nights go by
        write(store, range(first, min(first + 37, 1001)))
        all_releases(store, should_pack=True)

    with requests() as request_counts:
        releases = all_releases(store)

    assert [release.number for release in releases] == list(range(1, 1001))
    assert all(release.is_done and release.generation == f"g{release.number}" for release in releases)
    assert request_counts["list"] == 1 and request_counts["rounds"] <= 2
    assert request_counts["get"] <= 1000 // PACKED_FILES_MIN + PACKED_FILES_MIN


def test_many_that_came_at_once_are_read_singly_once(tmp_path):
    store = store_of(Counting, tmp_path)
    write(store, range(1, 1001))
    first = all_releases(store, should_pack=True)

    with requests() as request_counts:
        assert all_releases(store, should_pack=True) == first

    assert (request_counts["list"], request_counts["get"], request_counts["put"]) == (1, 1, 0)


def test_a_release_log_that_read_many_leaves_a_pack_to_the_next_reader(tmp_path):
    store = store_of(Counting, tmp_path)
    write(store, range(1, 301))
    unasked: Any = object()
    Releases(store, unasked, time.time).history()
    assert [name for name in store.names("releases") if name.startswith("pack-")]

    with requests() as request_counts:
        assert len(Releases(store, unasked, time.time).history()) == 300

    assert request_counts["get"] <= 300 // PACKED_FILES_MIN + PACKED_FILES_MIN


def test_who_only_reads_a_store_writes_no_pack(tmp_path):
    store = store_of(Counting, tmp_path)
    write(store, range(1, 301))

    with requests() as request_counts:
        all_releases(store)

    assert not request_counts["put"] and len(store.names("releases")) == 600


def test_a_pack_that_is_damaged_or_cannot_be_written_costs_reads_and_nothing_else(tmp_path, monkeypatch):
    store = store_of(Counting, tmp_path)
    write(store, range(1, 301))
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_once", pytest.fail)
        patch.setattr("cache.store.write_once.PACKED_FILES_MIN", 1000)
        expected = all_releases(store, should_pack=True)
    all_releases(store, should_pack=True)
    (pack,) = (name for name in store.names("releases") if name.startswith("pack-"))
    for damage in (b"", b"[]", b'{"1.json":'):
        store.write(f"releases/{pack}", damage)
        assert all_releases(store) == expected


def test_a_record_that_went_missing_is_missed_although_a_pack_holds_it(tmp_path):
    store = store_of(Counting, tmp_path)
    write(store, range(1, 301))
    all_releases(store, should_pack=True)
    store.delete(intent_path(7))

    with pytest.raises(CorruptArtefact, match=r"releases/7\.json"):
        all_releases(store)


def test_a_damaged_record_is_reported_and_never_packed(tmp_path):
    store = store_of(Counting, tmp_path)
    write(store, range(1, 301))
    store.write(intent_path(200), b"damaged")

    with pytest.raises(CorruptArtefact, match=r"releases/200\.json"):
        all_releases(store, should_pack=True)

    assert not [name for name in store.names("releases") if name.startswith("pack-")]


def test_erasing_blocks_before_it_reads_a_thousand_erasures_once(tmp_path):
    store = store_of(Counting, tmp_path)
    begin_erasing(store, b"u0", "user", requested_at=1.0)
    for number in range(2, 1001):
        body = b'{"number": %d, "entity": "u%d", "kind": "user", "at": 1.0}' % (number, number)
        store.write(f"erasures/{number:012d}.json", body)
        if number < 900:
            store.write(f"erasures/{number:012d}.done", b'{"at": 2.0}')
    assert sum(listed_erasure.is_pending for listed_erasure in all_erasures(store)) == 102

    with requests() as request_counts:
        erasure, is_new = begin_erasing(store, b"somebody", "user", requested_at=3.0)

    assert is_new and erasure.number == 1001
    puts = [path for operation, path in Counting.log if operation == "put"]
    assert "/blocklist/" in puts[0] and "/erasures/" in puts[1] and len(puts) == 2
    blocked = Counting.log.index(("put", puts[0]))
    assert not [path for _, path in Counting.log[:blocked] if "/erasures" in path]
    read = [path for operation, path in Counting.log if "/erasures" in path and operation == "get"]
    assert len(read) == 2  # the pack, and back what was written
    assert request_counts["list"] <= 4


def test_marks_written_after_a_pack_are_seen(tmp_path):
    store = store_of(Counting, tmp_path)
    for number in range(PACKED_FILES_MIN):
        request_erasure(store, b"u%d" % number, "user", requested_at=1.0)
    erasures = all_erasures(store)
    assert [name for name in store.names("erasures") if name.startswith("pack-")]

    assert mark_done(store, erasures[3], done_at=9.0) == all_erasures(store)[3]

    assert [erasure.number for erasure in all_erasures(store) if erasure.done_at == 9.0] == [4]


def test_a_stray_file_with_a_huge_number_is_refused_or_passed_over_at_once(tmp_path: Path) -> None:
    store = ArtefactStore(str(tmp_path / "store"))
    request_erasure(store, b"u1", "user", requested_at=1.0)
    with audited(store, "block", "item i1"):
        pass
    for folder in ("erasures", "audit"):
        store.write(f"{folder}/202612010000.json", b"{}")

    with pytest.raises(CorruptArtefact, match=r"000000000002\.json .* although 202612010000\.json is there"):
        all_erasures(store)
    records = audit_records(store)

    assert len(records) == 2 + MISSING_NUMBERS_MAX
    assert [record.outcome for record in records[:2]] == ["done", "missing"]
