"""A step whose generation was retired under its hands says by whom, in place of the file that it misses."""

from pathlib import Path

import pytest

from cache.errors import Refused
from cache.store.artefacts import ArtefactStore
from cache.store.releases import Release, done_path, intent_path
from precompute.builds.build import demand_not_retired

G1, G2 = (f"2026010{day}T000000Z-{'0' * 11}{day}" for day in (1, 2))
PUBLISHED = Release(1, "publish", G1, None, "run-1", 100.0, number=1, is_done=True)
VERIFIED = Release(2, "verify", G1, None, "run-1", 101.0, number=2, is_done=True)


def store_of(folder: Path, *records: Release) -> ArtefactStore:
    """A store with this history."""
    store = ArtefactStore(str(folder))
    for record in records:
        store.write(intent_path(record.stored_number), record.to_bytes())
        store.write(done_path(record.stored_number), b"")
    return store


def retired(generation: str, attempt: str) -> Release:
    """The record that a generation was retired."""
    return Release(3, "retire", generation, None, attempt, 102.0, number=3, is_done=True)


def test_a_generation_that_a_newer_night_retired_is_refused(tmp_path: Path) -> None:
    store = store_of(tmp_path, PUBLISHED, VERIFIED, retired(G1, G2))
    missed = FileNotFoundError("work/begin.json")

    with pytest.raises(Refused, match=f"{G1} was retired during this step by {G2}") as refused:
        demand_not_retired(store, G1, missed)

    assert refused.value.__cause__ is missed
    assert refused.value.details == {"rule": "retired", "value": G1, "threshold": G2}


@pytest.mark.parametrize(
    "records",
    [(), (PUBLISHED, VERIFIED), (PUBLISHED, VERIFIED, retired(G2, G2)), (PUBLISHED, VERIFIED, retired(G1, "ana"))],
    ids=["nothing was released", "it is not retired", "another one is", "a person retired it"],
)
def test_otherwise_the_error_itself_is_all_that_is_reported(tmp_path: Path, records: tuple[Release, ...]) -> None:
    demand_not_retired(store_of(tmp_path, *records), G1, FileNotFoundError("work/begin.json"))
