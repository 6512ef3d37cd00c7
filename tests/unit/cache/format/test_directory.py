"""Finding positions in sorted hashes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import CorruptArtefact
from cache.format.directory import Directory
from cache.format.manifest import Artefact, DirectoryPart, EntitySet

hashes = st.lists(st.integers(0, 2**64 - 1), max_size=40, unique=True)


def directory(values: list[int], shards: int) -> Directory:
    firsts = [-((-shard << 64) // shards) for shard in range(shards)]
    ordered = np.array(sorted(values), np.uint64)
    bounds = [*np.searchsorted(ordered, np.array(firsts, np.uint64)).tolist(), len(ordered)]
    parts = [ordered[bounds[shard] : bounds[shard + 1]] for shard in range(shards)]
    return Directory(0, firsts, parts)


@given(hashes, hashes, st.integers(1, 5))
def test_every_hash_is_found_at_its_rank_and_no_other_is(present, absent, shards):
    hash_directory = directory(present, shards)
    ranks = {value: rank for rank, value in enumerate(sorted(present))}
    queried_hashes = present + absent

    one_by_one = [hash_directory.find_position(value) for value in queried_hashes]

    assert one_by_one == [ranks.get(value, -1) for value in queried_hashes]
    assert hash_directory.find_positions(np.array(queried_hashes, np.uint64)).tolist() == one_by_one
    assert hash_directory.count == len(present)


@pytest.mark.parametrize("value", [2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1])
def test_neighbours_that_float64_cannot_distinguish_are_distinguished(value):
    """numpy compares uint64 with a Python int in float64."""
    neighbours = [neighbour for neighbour in (value - 1, value + 1) if neighbour < 2**64]
    hash_directory = directory(neighbours, 2)
    assert hash_directory.find_position(value) == -1
    assert [hash_directory.find_position(neighbour) for neighbour in neighbours] == list(range(len(neighbours)))


def test_positions_are_placed_in_their_part_across_empty_shards():
    hash_directory = directory([1, 2, 2**63, 2**64 - 1], 4)
    assert [hash_directory.locate_in_part(position) for position in range(4)] == [(0, 0), (0, 1), (2, 0), (3, 0)]


def test_hashes_of_another_dtype_are_a_mistake():
    with pytest.raises(TypeError):
        directory([1], 1).find_positions(np.array([1]))


def test_a_file_of_the_wrong_length_is_refused(tmp_path):
    (tmp_path / "part").write_bytes(b"\0" * 12)
    part = DirectoryPart(0, 2, Artefact("part", 16, ""))
    with pytest.raises(CorruptArtefact, match="2 hashes need 16"):
        Directory.open(tmp_path, EntitySet("user", 0, 2, (part,)))
