"""A log of interactions with times, as numbers: by user, then as they happened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache.errors import ConfigError, SourceError
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.erasures.erasure import ErasedEntities, all_erasures
from precompute.partitions.grouping import by_time
from precompute.sources.interactions import HashedIds, NumberedIds
from precompute.sources.readers import read_interactions


@dataclass(frozen=True, slots=True, eq=False)
class TimedLog:
    """Rows ordered by user, then time (int64 microseconds since 1970), rows of one time as they came.

    Users are numbered from 0, of all rows; items are places in a list of ids.
    """

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    times: NDArray[np.int64]

    @classmethod
    def of(
        cls, users: NDArray[np.int64], items: NDArray[np.int64], times: NDArray[np.int64]
    ) -> Self:
        """Orders rows that came in any order."""
        order = by_time(users, times)
        return cls(users[order], items[order], times[order])

    def __len__(self) -> int:
        return len(self.users)

    def only(self, rows: NDArray[np.bool_]) -> Self:
        """Some of the rows, in their order."""
        return type(self)(self.users[rows], self.items[rows], self.times[rows])

    def renamed(self, index_by_item: NDArray[np.int64]) -> Self:
        """The rows whose items are known by other places, [ids] with -1 for none, with these."""
        item_indices = index_by_item[self.items]
        return type(self)(self.users, item_indices, self.times).only(item_indices >= 0)


def read_log(config: NightConfig, progress: Progress = quiet) -> tuple[TimedLog, Any]:
    """(the configured interactions with a time, less what was erased; the item ids, as Arrow strings).

    Raises SourceError for a log without times.
    """
    if not config.sources.interactions:
        raise ConfigError("sources.interactions is empty: name the log there, or with --data")
    users, items, times, rows = HashedIds(), NumberedIds(), [], 0
    erased = ErasedEntities.of(all_erasures(config.store()))
    for batch in map(erased.leave_out, read_interactions(config.sources, Path(config.base))):
        users.add(batch.users)
        items.add(batch.items)
        times.append(batch.times)
        rows += len(batch.times)
        progress("read the log", rows, 0)
    when = np.concatenate([np.empty(0, np.int64), *times])
    if not (when != when[:1]).any():
        raise SourceError(
            f"the log has no times to replay it by: its {rows:,} rows have none, or all the same one; name the column "
            "in sources.timestamp_column"
        )
    timed = when != 0
    return TimedLog.of(users.codes()[0][timed], items.codes()[timed], when[timed]), items.names
