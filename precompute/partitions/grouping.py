"""Grouping of a shard's rows by entity, by the hashes that name it. Pure."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from precompute.partitions.shard_files import HASH


def distinct(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """(each of them once, sorted; a row of each): as `np.unique`, whose sort is stable and five times slower."""
    order = np.argsort(hashes)
    placed = hashes[order]
    first = np.ones(len(placed), np.bool_)
    first[1:] = placed[1:] != placed[:-1]
    return placed[first], order[first]


def places_of(hashes: NDArray[np.uint64], query_hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Places of `query_hashes` in the sorted `hashes`, int64; raises CorruptArtefact for one that is not among them.

    Hashes are spread evenly, so their leading bits say nearly where: an interpolation search, all of them at once.
    """
    if not len(query_hashes):
        return np.empty(0, np.int64)
    if not len(hashes) or query_hashes.min() < hashes[0] or query_hashes.max() > hashes[-1]:
        raise _nameless()
    first, reach = hashes[0], int(hashes[-1] - hashes[0])
    shift = np.uint64(max(0, reach.bit_length() - len(hashes).bit_length() - 1))
    buckets = np.arange((reach >> int(shift)) + 1, dtype=np.uint64)
    starts = ((hashes - first) >> shift).searchsorted(buckets)
    positions: NDArray[np.int64] = starts[(query_hashes - first) >> shift]
    lagging_indexes = np.flatnonzero(hashes[positions] < query_hashes)
    while len(lagging_indexes):
        positions[lagging_indexes] += 1
        lagging_indexes = lagging_indexes[
            hashes[positions[lagging_indexes]] < query_hashes[lagging_indexes]
        ]
    if (hashes[positions] != query_hashes).any():
        raise _nameless()
    return positions


def _nameless() -> CorruptArtefact:
    return CorruptArtefact(
        "the partition has rows of users that it does not name: begin the night again"
    )


def sort_unique(hashes: NDArray[np.uint64]) -> NDArray[np.int64] | None:
    """The order that sorts the hashes of distinct ids, or None when two of them share one (take the next seed)."""
    order = np.argsort(hashes, kind="stable")
    placed = hashes[order]
    return None if (placed[1:] == placed[:-1]).any() else order


def by_time(
    users: NDArray[np.int64], times: NDArray[np.int64], positions: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return the order of `np.lexsort((times, users))`: the users are numbered, for which numpy has a radix sort.

    Rows of one time are in the order of their positions, if they have any: the team's come first, then events.
    """
    if positions is None or not positions.any():
        order = np.argsort(times, kind="stable")
    else:
        order = np.lexsort((positions, times))
    placed = users[order]
    for shift in range(0, int(users.max(initial=0)).bit_length(), 16):
        digits = (placed >> shift).astype(np.uint16)
        digit_order = np.argsort(digits, kind="stable")
        order, placed = order[digit_order], placed[digit_order]
    return order


def last_occurrence_mask(
    users: NDArray[np.int64], ordinals: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Mask of the rows that are the last occurrence of their (user, item) pair.

    Values alone are sorted several times faster than an order is found: that is for the rows whose pair comes again.
    """
    pairs = users * (int(ordinals.max(initial=0)) + 1) + ordinals
    placed = np.sort(pairs)
    repeated = placed[1:][placed[1:] == placed[:-1]]
    keep = np.ones(len(pairs), np.bool_)
    if len(repeated):
        rows = np.arange(len(pairs))
        if len(repeated) < len(pairs) // 8:
            at = np.minimum(np.searchsorted(repeated, pairs), len(repeated) - 1)
            rows = np.flatnonzero(repeated[at] == pairs)
        order = rows[np.argsort(pairs[rows], kind="stable")]
        last = np.ones(len(order), np.bool_)
        last[:-1] = pairs[order[1:]] != pairs[order[:-1]]
        keep[order] = last
    return keep


def first_rows(hashes: NDArray[np.uint64], table: Any) -> NDArray[np.int64]:
    """Return the first row of each of the sorted hashes in a table, -1 for a hash without one."""
    positions = places_of(hashes, np.asarray(table.column(HASH)))
    rows = np.full(len(hashes), -1)
    rows[positions[::-1]] = np.arange(len(positions))[::-1]
    return rows


class DistinctHashes:
    """Distinct hashes, brought together now and then."""

    def __init__(self) -> None:
        self._distinct = np.empty(0, np.uint64)
        self._new: list[NDArray[np.uint64]] = []

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Takes some in."""
        self._new.append(hashes)
        if sum(map(len, self._new)) > max(1 << 16, len(self._distinct)):
            self.all()

    def all(self) -> NDArray[np.uint64]:
        """Each of them once, sorted."""
        self._distinct = np.unique(np.concatenate([self._distinct, *self._new]))
        self._new = []
        return self._distinct
