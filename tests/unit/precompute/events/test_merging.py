"""Merged files have every event once, whatever is killed and whoever else merges, takes or erases."""

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import ConfigError, CorruptArtefact
from cache.format.stream_position import Position
from cache.store.artefacts import ArtefactStore, generation_path
from precompute.events import stream as merging
from precompute.events.files import (
    TakenFile,
    event_files,
    last_taken_position,
    list_taken_files,
    superseded_files,
    taken_file_path,
)
from precompute.events.stream import EventStores, forget_in_files, merge_files
from precompute.sources.erasures import ErasedEntities
from tests.unit.precompute.events.merging_nights import FILES_PER_MERGE, Killed, erase, nights, published
from tests.unit.precompute.events.stream import Crash, Stream


@pytest.fixture(autouse=True)
def lower_files_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "FILES_PER_MERGE", FILES_PER_MERGE)


KILLS = (st.integers(1, 12), st.booleans(), st.integers(0, 2 * FILES_PER_MERGE), st.integers(0, 3))
"""At which change, before or behind it, and how many nights were before and come after."""


@settings(max_examples=12, deadline=None)
@given(*KILLS)
def test_a_kill_at_any_point_loses_nothing_and_takes_nothing_twice(
    redis_url: str, at: int, is_behind: bool, before: int, others: int
) -> None:
    killed_and_gone_on(redis_url, at, is_behind, before, others)


@pytest.mark.storm
@settings(max_examples=300, deadline=None)
@given(*KILLS)
def test_many_kills_lose_nothing_and_take_nothing_twice(
    redis_url: str, at: int, is_behind: bool, before: int, others: int
) -> None:
    killed_and_gone_on(redis_url, at, is_behind, before, others)


def killed_and_gone_on(redis_url: str, at: int, is_behind: bool, earlier_nights: int, later_nights: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(merging, "FILES_PER_MERGE", FILES_PER_MERGE)
        stream = Stream.of(redis_url, Path(folder))
        ends = nights(stream, FILES_PER_MERGE + 2 + earlier_nights)
        published(stream, ends[-1])
        killed = Killed(stream.store.url)
        killed.changes_left, killed.is_behind = at, is_behind

        with suppress(Crash):
            merge_files(EventStores(killed, stream.keys.namespace))

        assert stream.rows() == stream.all_rows() and last_taken_position(stream.store) == ends[-1]
        nights(stream, later_nights)
        merge_files(stream.stores)
        assert stream.rows() == stream.all_rows() and superseded_files(stream.store) == []
        assert any(file.until_position for file in list_taken_files(stream.store))
        assert stream.store.names("events") == sorted(
            [Path(file.path).name for file in list_taken_files(stream.store)] + ["taken.json"]
        )


def test_files_up_to_the_oldest_generation_become_one(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    ends = nights(stream, FILES_PER_MERGE)
    assert merge_files(stream.stores) == 0  # nobody says that a night had them
    published(stream, ends[-2])
    assert merge_files(stream.stores) == 0  # one of them has to be told from those before
    published(stream, ends[-1])
    assert merge_files(stream.stores) == 0  # the newest is never among them: it says where the next begins
    later = nights(stream, 1)

    assert merge_files(stream.stores) == FILES_PER_MERGE

    assert [file.until_position for file in list_taken_files(stream.store)] == [ends[-1], None]
    config = stream.config(redis_url)
    for until_position in (ends[-1], later[-1]):
        assert event_files(config, str(until_position)).until_position == until_position
    with pytest.raises(ConfigError, match="no file of"):
        event_files(config, str(ends[0]))
    assert merge_files(stream.stores) == 0
    nights(stream, FILES_PER_MERGE)
    published(stream, last_taken_position(stream.store))
    assert merge_files(stream.stores) == FILES_PER_MERGE  # merged ones stay as they are
    assert [file.until_position is None for file in list_taken_files(stream.store)] == [False, False, True]
    assert stream.rows() == stream.all_rows()


def test_who_is_erased_is_in_no_merged_file(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    nights(stream, FILES_PER_MERGE + 1)
    published(stream, last_taken_position(stream.store))
    all_event_rows = stream.rows()

    erase(stream, "u1")
    merge_files(stream.stores)

    erased_event_ids = {event.id for event in stream.added.values() if event.user == b"u1"}
    assert stream.rows() == [row for row in all_event_rows if row[1] not in erased_event_ids] != all_event_rows
    assert forget_in_files(stream.store, ErasedEntities(frozenset({b"u2"}), frozenset())) > 0
    erased_event_ids |= {event.id for event in stream.added.values() if event.user == b"u2"}
    assert stream.rows() == [row for row in all_event_rows if row[1] not in erased_event_ids]
    assert list_taken_files(stream.store)[0].until_position is not None


def test_an_erasure_during_a_merge_reaches_the_merged_file(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    nights(stream, FILES_PER_MERGE + 1)
    published(stream, last_taken_position(stream.store))

    class ConcurrentMergeStore(ArtefactStore):
        """Store in which another host merges once files were listed."""

        is_done = False

        def read(self, path: str) -> bytes | None:
            if path.startswith("events/") and not self.is_done:
                self.is_done = True
                assert merge_files(stream.stores) == FILES_PER_MERGE
            return super().read(path)

    forget_in_files(ConcurrentMergeStore(stream.store.url), ErasedEntities(frozenset({b"u1"}), frozenset()))

    assert not {event.id for event in stream.added.values() if event.user == b"u1"} & {
        name for _, name in stream.rows()
    }


def test_an_erasure_while_a_killed_merge_was_writing_reaches_both_forms(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    nights(stream, FILES_PER_MERGE + 1)
    published(stream, last_taken_position(stream.store))
    erased_event_ids = {event.id for event in stream.added.values() if event.user == b"u1"}
    killed = Killed(stream.store.url)
    killed.changes_left, killed.is_behind = 1, True
    killed.on_change = lambda: erase(stream, "u1")
    with suppress(Crash):
        merge_files(EventStores(killed, stream.keys.namespace))
    assert len(superseded_files(stream.store)) == FILES_PER_MERGE and erased_event_ids & {
        name for _, name in stream.rows()
    }

    merge_files(stream.stores)  # as the next `take-events` does, and an erasure that is still under way

    assert superseded_files(stream.store) == [] and not erased_event_ids & {name for _, name in stream.rows()}


def test_while_a_night_is_in_the_making_its_files_stay(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    nights(stream, FILES_PER_MERGE + 1)
    published(stream, last_taken_position(stream.store))
    begin_path = generation_path("20260201T000000Z-0123456789ab", "work/begin.json")
    stream.store.write(begin_path, b"{}")

    assert merge_files(stream.stores) == 0

    stream.store.delete(generation_path("20260201T000000Z-0123456789ab"))
    assert merge_files(stream.stores) == FILES_PER_MERGE


def test_two_that_merge_make_the_same_file_though_one_of_them_sees_more(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    nights(stream, FILES_PER_MERGE + 2)
    published(stream, last_taken_position(stream.store))
    merged_counts: list[int] = []

    class Beside(ArtefactStore):
        """Store beside whose merge another night begins, ends and merges, once its groups are known."""

        def read(self, path: str) -> bytes | None:
            if path.startswith("events/") and not merged_counts:
                merged_counts.append(0)
                published(stream, nights(stream, FILES_PER_MERGE)[-2])
                merged_counts.append(merge_files(stream.stores))
            return super().read(path)

    merge_files(EventStores(Beside(stream.store.url), stream.keys.namespace))

    assert merged_counts == [0, 2 * FILES_PER_MERGE] and superseded_files(stream.store) == []
    assert stream.rows() == stream.all_rows()


def test_large_files_stay_and_cost_no_night_more_than_two_looks(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream.of(redis_url, tmp_path)
    nights(stream, 4 * FILES_PER_MERGE + 1)
    published(stream, last_taken_position(stream.store))
    monkeypatch.setattr(merging, "MERGED_BYTES_MAX", 1)
    read: list[str] = []

    class Counting(ArtefactStore):
        """Store that notes which files of events were read."""

        def read(self, path: str) -> bytes | None:
            read.extend([path] if path.startswith("events/") else [])
            return super().read(path)

    assert merge_files(EventStores(Counting(stream.store.url), stream.keys.namespace)) == 0

    assert len(read) == 2


def test_files_that_overlap_are_refused_and_none_is_removed(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    ends = nights(stream, 4)
    raw = stream.store.read(taken_file_path(ends[0])) or b""
    for file in (TakenFile(Position(0, 0), ends[1]), TakenFile(ends[0], ends[2])):
        stream.store.write(file.path, raw)
    initial_names = stream.store.names("events")

    with pytest.raises(CorruptArtefact, match="overlap"):
        merge_files(stream.stores)

    assert stream.store.names("events") == initial_names
