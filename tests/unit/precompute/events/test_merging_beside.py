"""Merging beside nights that begin, erasures and damage: who reads a file keeps it, who was erased is in none."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from cache.config.events import EventsConfig
from cache.control.states import GenerationState
from cache.errors import CorruptArtefact
from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.erasures import all_erasures, request_erasure
from precompute.builds.build import settings_digest
from precompute.events import stream as merging
from precompute.events.files import last_taken_position, list_taken_files, superseded_files
from precompute.events.stream import EventStores, forget_in_files, merge_files
from precompute.events.taking import take_before_begin
from precompute.releases.release_log import open_releases
from precompute.sources.erasures import ErasedEntities
from tests.unit.precompute.events.merging_nights import FILES_PER_MERGE, Killed, erase, nights, published
from tests.unit.precompute.events.stream import Crash, Stream


@pytest.fixture(autouse=True)
def lower_files_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "FILES_PER_MERGE", FILES_PER_MERGE)


def test_who_was_erased_while_a_killed_merge_was_writing_goes_with_the_next_erasure_of_another(
    redis_url: str, tmp_path: Path
) -> None:
    stream = Stream.of(redis_url, tmp_path)
    nights(stream, FILES_PER_MERGE + 1)
    published(stream, last_taken_position(stream.store))
    killed = Killed(stream.store.url)
    killed.changes_left, killed.is_behind = 1, True

    def erased_whole() -> None:
        erase(stream, "u1")
        forget_in_files(stream.store, ErasedEntities.of(all_erasures(stream.store)))

    killed.on_change = erased_whole
    with suppress(Crash):
        merge_files(EventStores(killed, stream.keys.namespace))
    erased_event_ids = {event.id for event in stream.added.values() if event.user == b"u1"}
    assert erased_event_ids & {name for _, name in stream.rows()}
    unrelated_erasure = request_erasure(stream.store, b"somebody", "user", requested_at=0.0)  # in none of them

    forget_in_files(stream.store, ErasedEntities.of([unrelated_erasure]))

    assert superseded_files(stream.store) == [] and not erased_event_ids & {name for _, name in stream.rows()}


def test_a_night_that_begins_during_a_merge_keeps_the_files_that_it_reads(redis_url: str, tmp_path: Path) -> None:
    stream = Stream.of(redis_url, tmp_path)
    nights(stream, FILES_PER_MERGE + 1)
    published(stream, last_taken_position(stream.store))
    paths = [file.path for file in list_taken_files(stream.store)]
    begin_path = generation_path("20260201T000000Z-0123456789ab", "work/begin.json")

    class ConcurrentNightStore(ArtefactStore):
        """Store beside whose merge another night begins, once nobody was seen."""

        def write_once(self, path: str, data: bytes) -> bool:
            super().write(begin_path, b"{}")
            return super().write_once(path, data)

    assert merge_files(EventStores(ConcurrentNightStore(stream.store.url), stream.keys.namespace)) == FILES_PER_MERGE

    assert all(stream.store.read(path) for path in paths) and stream.rows() == stream.all_rows()
    stream.store.delete(generation_path("20260201T000000Z-0123456789ab"))
    assert merge_files(stream.stores) == 0
    assert superseded_files(stream.store) == [] and stream.rows() == stream.all_rows()


def test_a_night_whose_files_were_merged_since_is_no_one_to_go_on_with(redis_url: str, tmp_path: Path) -> None:
    """One of an arm that no experiment names yet: who merges does not know of it."""
    stream = Stream.of(redis_url, tmp_path)
    ends = nights(stream, FILES_PER_MERGE + 1)
    published(stream, last_taken_position(stream.store))
    events = EventsConfig(enabled=True, namespace=stream.keys.namespace)
    control_config = stream.config(redis_url)
    arm = replace(control_config, namespace=f"{control_config.namespace}-b", events=events)
    begin_report = {
        "cut": "2026-02-01",
        "settings": settings_digest(arm),
        "inputs": [],
        "events": {"until": str(ends[0])},
    }
    begun_generation = "20260201T000000Z-0123456789ab"
    arm.store().write(generation_path(begun_generation, "work/begin.json"), orjson.dumps(begin_report))
    with open_releases(arm) as releases:
        releases.note(begun_generation, GenerationState.BEGUN)
    assert merge_files(stream.stores) == FILES_PER_MERGE

    assert take_before_begin(arm, "2026-02-01")[0] == str(ends[-1])


@pytest.mark.parametrize("damage", [b"\0" * 300, None])
def test_a_damaged_file_is_named(redis_url: str, tmp_path: Path, damage: bytes | None) -> None:
    """With and without its end, where the position lies."""
    stream = Stream.of(redis_url, tmp_path)
    nights(stream, FILES_PER_MERGE + 1)
    published(stream, last_taken_position(stream.store))
    erase(stream, "u1")
    path = list_taken_files(stream.store)[1].path
    raw = stream.store.read(path) or b""
    stream.store.write(path, raw[:100] if damage is None else damage + raw[len(damage) :])

    with pytest.raises(CorruptArtefact, match=path):
        merge_files(stream.stores)
    with pytest.raises(CorruptArtefact, match=path):
        forget_in_files(stream.store, ErasedEntities(frozenset({b"u1"})))
