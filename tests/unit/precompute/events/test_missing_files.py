"""A file of events that the store lost is told by night, check and status."""

from pathlib import Path

import pytest

from cache.errors import CorruptArtefact
from cache.format.stream_position import STREAM_BEGINNING, Position
from cache.store.artefacts import ArtefactStore
from precompute.events.files import TakenFile, demand_all_files, encode_events

ENDS = (Position(10, 0), Position(20, 3), Position(30, 0))


@pytest.fixture
def store(tmp_path: Path) -> ArtefactStore:
    """Three files, each from where the one before ends."""
    store, begin = ArtefactStore(str(tmp_path / "store")), STREAM_BEGINNING
    for end in ENDS:
        store.write(TakenFile(begin).path, encode_events([], end))
        begin = end
    return store


def test_files_that_follow_each_other_are_all_files(store: ArtefactStore) -> None:
    demand_all_files(store)
    store.write(TakenFile(ENDS[0], ENDS[2]).path, encode_events([], ENDS[2]))  # merged of the last two
    demand_all_files(store)
    for name in store.names("events"):
        store.delete(f"events/{name}")
    demand_all_files(store)


@pytest.mark.parametrize(("lost", "begin", "end"), [(0, "0-0", "10-0"), (1, "10-0", "20-3")])
def test_a_lost_file_is_told_with_its_positions_and_a_way_on(
    store: ArtefactStore, lost: int, begin: str, end: str
) -> None:
    begins = (STREAM_BEGINNING, *ENDS)
    store.delete(TakenFile(begins[lost]).path)

    with pytest.raises(CorruptArtefact, match=f"the events from {begin} to {end} is missing") as refusal:
        demand_all_files(store)

    # and the way on that it names leads on
    source, target = refusal.value.message.split("rename ")[1].split(" to ")
    store.local(source).rename(store.local(target))
    demand_all_files(store)


def test_a_merged_file_shows_a_gap_also_in_a_remote_store(tmp_path: Path) -> None:
    store = ArtefactStore("memory://missing-events", tmp_path / "copies")
    store.write(TakenFile(STREAM_BEGINNING, ENDS[0]).path, encode_events([], ENDS[0]))
    store.write(TakenFile(ENDS[1]).path, encode_events([], ENDS[2]))

    with pytest.raises(CorruptArtefact, match="from 10-0 to 20-3 is missing"):
        demand_all_files(store)
