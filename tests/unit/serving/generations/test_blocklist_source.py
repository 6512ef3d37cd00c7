"""The blocklist that is put in force: the newest that can be read, and what a store put back from a copy has lost."""

import shutil
from pathlib import Path

import pytest

from cache.errors import StoreError
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist, change_blocklist
from cache.store.erasures import mark_forgotten, request_erasure
from serving.generations.blocklist_source import BlocklistSource
from tests.fakes import FakeClock


@pytest.fixture
def store(tmp_path: Path) -> ArtefactStore:
    store = ArtefactStore(str(tmp_path / "store"))
    store.write("generations/some", b"")
    return store


@pytest.fixture
def timer() -> FakeClock:
    return FakeClock()


@pytest.fixture
def source(store: ArtefactStore, timer: FakeClock) -> BlocklistSource:
    return BlocklistSource(store, timer)


def write(store: ArtefactStore, version: int, *, calls_itself: int | None = None) -> Blocklist:
    """A version of the list, as the store has it."""
    blocklist = Blocklist(calls_itself or version, frozenset({b"i%d" % version}))
    store.write(f"blocklist/{version:012d}.json", blocklist.to_bytes())
    return blocklist


def test_the_newest_version_is_taken_and_stays_the_same_object(store: ArtefactStore, source: BlocklistSource) -> None:
    write(store, 9)
    tenth = write(store, 10)

    first, error = source.read()
    again, error_again = source.read()
    eleventh = write(store, 11)

    assert (first, error) == (tenth, None) and again is first and error_again is None
    assert source.read() == (eleventh, None)


def test_other_files_in_the_folder_are_no_versions(store: ArtefactStore, source: BlocklistSource) -> None:
    written_blocklist = write(store, 3)
    for name in ("7.json", "abcdefghijkl.json", "000000000008.txt", "000000000009.json.part"):
        store.write(f"blocklist/{name}", b"{}")

    assert source.read() == (written_blocklist, None)


def test_a_newest_version_that_cannot_be_read_leaves_the_one_below_it_and_says_why(
    store: ArtefactStore, source: BlocklistSource
) -> None:
    readable = write(store, 4)
    write(store, 5, calls_itself=4)
    store.write("blocklist/000000000006.json", b"damaged")

    for _ in range(2):
        blocklist, error = source.read()
        assert blocklist == readable and error is not None and error.startswith("version 6: ")


def test_a_version_that_calls_itself_another_is_told(store: ArtefactStore, source: BlocklistSource) -> None:
    write(store, 5, calls_itself=4)

    assert source.read() == (None, "version 5: calls itself 4")


def test_a_store_in_which_nothing_was_ever_blocked_blocks_nothing(source: BlocklistSource) -> None:
    assert source.read() == (Blocklist(), None)


def test_an_empty_store_is_taken_for_one_that_is_not_there(tmp_path: Path) -> None:
    source = BlocklistSource(ArtefactStore(str(tmp_path / "unmounted")))

    with pytest.raises(StoreError, match="is empty"):
        source.read()


def put_back(store: ArtefactStore, copy: Path) -> None:
    """Replace the store by a copy of it."""
    shutil.rmtree(store.url)
    shutil.copytree(copy, store.url)


@pytest.mark.parametrize("blocks_after", [0, 1, 2, 3])
def test_what_a_store_put_back_has_lost_stays_blocked_beside_what_is_blocked_there(
    store: ArtefactStore, source: BlocklistSource, timer: FakeClock, tmp_path: Path, blocks_after: int
) -> None:
    # Given a copy of the store with one version, two more that a replica obeys, and the copy put back
    change_blocklist(store, block_items=[b"before"])
    shutil.copytree(store.url, tmp_path / "copy")
    change_blocklist(store, block_items=[b"lost"])
    change_blocklist(store, block_users=[b"erased"])
    source.read()
    put_back(store, tmp_path / "copy")

    # When ids are blocked there: fewer versions, as many, or more
    added_ids = [b"after %d" % number for number in range(blocks_after)]
    for id_ in added_ids:
        change_blocklist(store, block_items=[id_])
    timer.tick(10)

    # Then all of them are blocked, and it is said that the store lacks some
    for _ in range(2):
        blocklist, error = source.read()
        assert blocklist is not None and blocklist.items == {b"before", b"lost", *added_ids}
        assert blocklist.users == {b"erased"} and blocklist.version == max(3, 1 + blocks_after)
        assert error is not None and "2 ids" in error

    # And once the store blocks them as well, it is obeyed alone
    change_blocklist(store, block_items=[b"lost"], block_users=[b"erased"])
    blocklist, error = source.read()
    assert error is None and blocklist is not None and blocklist.version == 2 + blocks_after
    change_blocklist(store, unblock_items=[b"lost"])
    blocklist, error = source.read()
    assert error is None and blocklist is not None and b"lost" not in blocklist.items


def test_a_version_that_was_replaced_under_its_number_is_noticed_after_a_while(
    store: ArtefactStore, source: BlocklistSource, timer: FakeClock
) -> None:
    # Given versions that a replica obeys, and others put in their place between two reads, under the same names
    obeyed = write(store, 1)
    assert source.read() == (obeyed, None)
    other = Blocklist(1, frozenset({b"other"}))
    store.write("blocklist/000000000001.json", other.to_bytes())
    assert source.read() == (obeyed, None)

    # When ten seconds have passed
    timer.tick(10)
    blocklist, error = source.read()

    # Then both are obeyed
    assert blocklist is not None and blocklist.items == {b"i1", b"other"} and error is not None


def lose_versions(store: ArtefactStore, count: int) -> None:
    """Remove the newest versions of the list."""
    for name in store.names("blocklist")[-count:]:
        store.delete(f"blocklist/{name}")


@pytest.mark.parametrize("lost_count", [1, 2])
def test_an_erased_id_stays_blocked_though_the_versions_that_block_it_are_lost(
    store: ArtefactStore, source: BlocklistSource, lost_count: int
) -> None:
    # given an erased user and item, whose versions of the blocklist were lost before the service started
    change_blocklist(store, block_users=[b"u1"])
    change_blocklist(store, block_items=[b"i1"])
    erasures = [
        request_erasure(store, b"u1", "user", requested_at=1.0),
        request_erasure(store, b"i1", "item", requested_at=1.0),
    ]
    lose_versions(store, lost_count)

    # when the service reads the blocklist
    blocklist, error = source.read()

    # then both are blocked, until they are re-admitted
    assert error is None and blocklist is not None
    assert blocklist.users == {b"u1"} and blocklist.items == {b"i1"}
    assert source.read()[0] is blocklist
    for erasure in erasures:
        mark_forgotten(store, erasure, forgotten_at=2.0, reason="asked to")
    change_blocklist(store, unblock_users=[b"u1"], unblock_items=[b"i1"])
    blocklist, error = source.read()
    assert error is None and blocklist is not None and not blocklist.users and not blocklist.items


def test_an_item_whose_blocklist_is_of_an_older_larder_counts_as_erased_until_it_is_readmitted(
    store: ArtefactStore, source: BlocklistSource, timer: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given an erased item that the blocklist only blocks
    change_blocklist(store, block_items=[b"i1", b"i2"])
    erasure = request_erasure(store, b"i1", "item", requested_at=1.0)
    listings: list[str] = []
    list_names = store.names

    def names(folder: str) -> list[str]:
        listings.append(folder)
        return list_names(folder)

    monkeypatch.setattr(store, "names", names)

    blocklist, error = source.read()
    listing_count = listings.count("erasures")
    assert source.read()[0] is blocklist

    # then it is erased as well, which the store is asked once a minute
    assert listings.count("erasures") == listing_count > 0

    assert error is None and blocklist is not None
    assert blocklist.items == {b"i1", b"i2"} and blocklist.erased_items == {b"i1"}
    mark_forgotten(store, erasure, forgotten_at=2.0, reason="asked to")
    change_blocklist(store, readmit_items=[b"i1"])
    timer.tick(60)
    blocklist, error = source.read()
    assert error is None and blocklist is not None
    assert blocklist.items == {b"i1", b"i2"} and not blocklist.erased_items


def test_an_id_erased_meanwhile_is_blocked_within_a_minute_whatever_the_list_says(
    store: ArtefactStore, source: BlocklistSource, timer: FakeClock
) -> None:
    source.read()
    request_erasure(store, b"u1", "user", requested_at=1.0)

    timer.tick(60)

    blocklist, _ = source.read()
    assert blocklist is not None and blocklist.users == {b"u1"}


def test_erasures_that_cannot_be_read_are_told_and_block_nothing_less(
    store: ArtefactStore, source: BlocklistSource, timer: FakeClock
) -> None:
    written_blocklist = write(store, 3)
    store.write("erasures/000000000001.json", b"{")

    blocklist, error = source.read()

    assert blocklist == written_blocklist and error is not None and "erasures/000000000001.json" in error
    store.delete("erasures/000000000001.json")
    assert source.read() == (written_blocklist, None)
