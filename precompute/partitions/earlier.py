"""Partition of an earlier night: its rows are taken over, and only source files that came after them are read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.store.artefacts import take_file, write_atomically
from precompute.partitions.shard_files import (
    HASH,
    ShardFiles,
    kinds_in,
    read_batches,
    shard_paths,
)
from precompute.sources.plausibility import RowCounts

POPULARITY = "work/popularity.i64"
"""Number of interactions with each item, int64 [items]."""
UNKNOWN = "work/unknown_items.u64"
"""Hashes of the item ids that interactions named and the catalogue did not have, sorted uint64."""
UNKNOWN_SEED = 0


@dataclass(frozen=True, slots=True, eq=False)
class InteractionCounts:
    """Counts of interactions: all before the cut, those with unknown items, those of each item; and those after it.

    `unknown` are the hashes of the unknown items' ids, sorted. `rows` are None where an older release counted none.
    """

    interactions: int
    unknown_items: int
    popularity: NDArray[np.int64]
    unknown: NDArray[np.uint64]
    late: int
    rows: RowCounts | None


def write_counts(root: Path, interaction_counts: InteractionCounts) -> list[str]:
    """Counts of interactions by item, and which unknown ones there were, for a night that takes this one over."""
    write_atomically(root / POPULARITY, interaction_counts.popularity.astype("<i8").tobytes())
    write_atomically(root / UNKNOWN, interaction_counts.unknown.astype("<u8").tobytes())
    return [POPULARITY, UNKNOWN]


@dataclass(frozen=True, slots=True, eq=False)
class EarlierPartition:
    """Partition of an earlier night, made of the first `files` of the team's interactions and `event_files` of events.

    `new_ordinals` int64 [its items] are their ordinals now, -1 for one that is gone, None where all stayed;
    `lost_item_hashes` are hashes of the ids of those. The counts, and `unusable` by source, are of its rows.
    """

    folder: Path
    seed: int
    files: int
    new_ordinals: NDArray[np.int64] | None
    lost_item_hashes: NDArray[np.uint64]
    popularity: NDArray[np.int64]
    unknown: NDArray[np.uint64]
    interactions: int
    unknown_items: int
    unusable: Mapping[str, Any]
    event_files: int = 0
    row_counts: RowCounts | None = None

    def rows(self, shard: int) -> Iterator[tuple[Any, NDArray[np.uint64]]]:
        """Batches of a shard's rows as this night numbers the items, with the users who lost one."""
        (path,) = shard_paths(self.folder, shard, ("rows",))
        for batch in read_batches(path):
            if self.new_ordinals is None:
                yield batch, np.empty(0, np.uint64)
                continue
            ordinals = np.asarray(batch.column("ordinal"))
            is_known = ordinals >= 0
            new_ordinals = np.where(
                is_known, self.new_ordinals[np.where(is_known, ordinals, 0)], -1
            ).astype(np.int32)
            affected_hashes = np.asarray(batch.column(HASH))[is_known & (new_ordinals < 0)]
            columns = [batch.column(HASH), pa.array(new_ordinals), *batch.columns[2:]]
            yield pa.record_batch(columns, schema=batch.schema), np.unique(affected_hashes)

    def batches(self, shard: int, kind: str) -> Iterator[Any]:
        """Batches of another file of a shard, as they are."""
        (path,) = shard_paths(self.folder, shard, (kind,))
        yield from read_batches(path)

    def remap_counts(self, items: int) -> tuple[NDArray[np.int64], int, NDArray[np.uint64]]:
        """(popularity int64 [items], rows without a known item, ids of unknown items): all as it is now."""
        if self.new_ordinals is None:
            return self.popularity.copy(), self.unknown_items, self.unknown
        popularity = np.zeros(items, np.int64)
        is_kept = self.new_ordinals >= 0
        popularity[self.new_ordinals[is_kept]] = self.popularity[is_kept]
        lost_interaction_count = int(self.popularity[~is_kept].sum())
        return (
            popularity,
            self.unknown_items + lost_interaction_count,
            np.union1d(self.unknown, self.lost_item_hashes),
        )

    def take_over(
        self, shards: int, folder: Path, rows: ShardFiles, ids: ShardFiles, touched: ShardFiles
    ) -> None:
        """Puts its rows, ids and whatever else it has into the files of this night's partition."""
        for shard in range(shards):
            for batch, affected_hashes in self.rows(shard):
                rows.extend(shard, [batch])
                if len(affected_hashes):
                    touched.extend(shard, [pa.record_batch([affected_hashes], names=[HASH])])
            ids.extend(shard, self.batches(shard, "ids"))
            for kind in kinds_in(self.folder, shard)[2:]:
                target_path, theirs = (
                    shard_paths(partition_folder, shard, (kind,))[0]
                    for partition_folder in (folder, self.folder)
                )
                take_file(theirs, target_path)
