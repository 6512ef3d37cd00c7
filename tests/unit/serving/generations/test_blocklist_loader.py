"""The blocklist that is put in force: the newest that can be read, and never an older one than that in force."""

from pathlib import Path

import pytest

from cache.errors import StoreError
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist
from serving.generations.refresher import newest_blocklist


@pytest.fixture
def store(tmp_path: Path) -> ArtefactStore:
    store = ArtefactStore(str(tmp_path))
    store.write("generations/some", b"")
    return store


def write(store: ArtefactStore, version: int, *, calls_itself: int | None = None) -> Blocklist:
    """A version of the list, as the store has it."""
    blocklist = Blocklist(calls_itself or version, frozenset({b"i%d" % version}))
    store.write(f"blocklist/{version:012d}.json", blocklist.to_bytes())
    return blocklist


def test_the_newest_version_above_the_one_in_force_is_taken(store: ArtefactStore) -> None:
    write(store, 9)
    written_blocklist = write(store, 10)

    assert newest_blocklist(store, -1) == (written_blocklist, None)
    assert newest_blocklist(store, 9) == (written_blocklist, None)
    assert newest_blocklist(store, 10) == (None, None)


def test_other_files_in_the_folder_are_no_versions(store: ArtefactStore) -> None:
    written_blocklist = write(store, 3)
    for name in ("7.json", "abcdefghijkl.json", "000000000008.txt", "000000000009.json.part"):
        store.write(f"blocklist/{name}", b"{}")

    assert newest_blocklist(store, -1) == (written_blocklist, None)


def test_a_newest_version_that_cannot_be_read_leaves_the_one_below_it_and_says_why(store: ArtefactStore) -> None:
    readable = write(store, 4)
    write(store, 5, calls_itself=4)
    store.write("blocklist/000000000006.json", b"damaged")

    loaded_blocklist, trouble = newest_blocklist(store, 3)

    assert loaded_blocklist == readable and trouble is not None and trouble.startswith("version 6: ")
    assert newest_blocklist(store, 4) == (None, trouble)


def test_a_version_that_calls_itself_another_is_told(store: ArtefactStore) -> None:
    write(store, 5, calls_itself=4)

    assert newest_blocklist(store, -1) == (None, "version 5: calls itself 4")


def test_a_store_whose_newest_version_is_older_is_another_one(store: ArtefactStore) -> None:
    write(store, 4)

    with pytest.raises(StoreError, match="version 4 is the newest in the store, 5 is in force"):
        newest_blocklist(store, 5)


def test_a_store_in_which_nothing_was_ever_blocked_blocks_nothing(store: ArtefactStore) -> None:
    assert newest_blocklist(store, -1) == (Blocklist(), None)
    assert newest_blocklist(store, 0) == (None, None)


def test_an_empty_store_is_taken_for_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is empty"):
        newest_blocklist(ArtefactStore(str(tmp_path / "unmounted")), -1)
