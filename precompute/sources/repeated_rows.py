"""Rows of interactions that come more than once, within a file or in two files, counted in bounded memory."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from precompute.sources.columns import Ids
from precompute.sources.files import SourceFile

ROWS_KEPT: Final = 1 << 20
"""Rows up to which all are compared, by 20 bytes each; of more, all rows of a share of the users."""

SHARED_LEAST: Final = 5
SHARED_SHARE: Final = 0.02
"""Rows with a time that two files share, and their share of the smaller file, from which on the files overlap."""

COPIED_LEAST: Final = 20
COPIED_SHARE: Final = 0.9
"""The same for rows without times, which repeat now and then: the share is that of the larger file."""

REPEATED_SHARE: Final = 0.01
"""Share of rows with a time that repeat another one of their file, from which on this is odd."""

_ITEM_FACTOR, _TIME_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_ALL_HASHES: Final = np.uint64(2**64 - 1)


class RepeatedRows:
    """Counts of rows with the user, item and time of another row, of all users or of those with the lowest hashes."""

    def __init__(self, rows_kept: int = ROWS_KEPT) -> None:
        self._rows_kept, self._limit = rows_kept, _ALL_HASHES
        self._users, self._rows = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        self._files = [np.empty(0, np.int32)]
        self._paths: list[SourceFile] = []
        self._kept_rows = self._all_rows = 0
        self._oldest_us, self._newest_us = 0, 0

    def add(self, path: SourceFile, users: Ids, items: Ids, times: NDArray[np.int64]) -> None:
        """Add the next rows of a file; those of one file come one after the other."""
        if not self._paths or self._paths[-1] != path:
            self._paths.append(path)
        if not len(times):
            return
        user_hashes = users.hashes(0)
        codes, item_codes, row_times = users.codes, items.codes, times
        if self._limit < _ALL_HASHES:
            rows = np.flatnonzero((user_hashes <= self._limit)[codes])
            codes, item_codes, row_times = codes[rows], item_codes[rows], times[rows]
        row_users = user_hashes[codes]
        # Both hashes are random, so a product and a sum of bits keep rows apart.
        row_hashes = row_users ^ (items.hashes(0) * _ITEM_FACTOR)[item_codes]
        row_hashes ^= row_times.astype(np.uint64) * _TIME_FACTOR
        if not self._all_rows:
            self._oldest_us = self._newest_us = int(times[0])
        self._oldest_us = min(self._oldest_us, int(times.min()))
        self._newest_us = max(self._newest_us, int(times.max()))
        self._all_rows += len(times)
        self._kept_rows += len(row_hashes)
        self._users.append(row_users)
        self._rows.append(row_hashes)
        self._files.append(np.full(len(row_hashes), len(self._paths) - 1, np.int32))
        if self._kept_rows > self._rows_kept:
            self._keep_fewer()

    def _keep_fewer(self) -> None:
        users, rows = np.concatenate(self._users), np.concatenate(self._rows)
        files = np.concatenate(self._files)
        is_kept = users <= self._limit
        while np.count_nonzero(is_kept) > self._rows_kept // 2 and self._limit:
            self._limit >>= np.uint64(1)
            is_kept = users <= self._limit
        self._users, self._rows, self._files = [users[is_kept]], [rows[is_kept]], [files[is_kept]]
        self._kept_rows = len(self._users[0])

    def remarks(self) -> list[str]:
        """Return remarks on files that hold the same rows, and on rows that repeat within their file."""
        hashes, files = np.concatenate(self._rows), np.concatenate(self._files)
        if not len(hashes):
            return []
        order = np.argsort(hashes, kind="stable")  # files ascend among equal rows
        hashes, files = hashes[order], files[order]
        is_same = np.append(False, hashes[1:] == hashes[:-1])
        is_repeat = is_same & np.append(False, files[1:] == files[:-1])
        is_timed = self._oldest_us < self._newest_us
        return [
            *self._shared_in_words(hashes[~is_repeat], files[~is_repeat], is_timed=is_timed),
            *self._repeated_in_words(is_repeat, is_timed=is_timed),
        ]

    def _shared_in_words(
        self, hashes: NDArray[np.uint64], files: NDArray[np.int32], *, is_timed: bool
    ) -> list[str]:
        """Return a remark on the two files with the most rows in common, if they are many; rows come once a file."""
        is_first = np.append(True, hashes[1:] != hashes[:-1])
        first_files = files[is_first][np.cumsum(is_first) - 1]
        count = len(self._paths)
        pair_codes, shared = np.unique(
            first_files[~is_first].astype(np.int64) * count + files[~is_first], return_counts=True
        )
        one, other = pair_codes // count, pair_codes % count
        rows_of_files = np.bincount(files, minlength=count)
        smaller = np.minimum(rows_of_files[one], rows_of_files[other])
        larger = np.maximum(rows_of_files[one], rows_of_files[other])
        is_odd = (
            (shared >= SHARED_LEAST) & (shared >= SHARED_SHARE * smaller)
            if is_timed
            else (shared >= COPIED_LEAST) & (shared >= COPIED_SHARE * larger)
        )
        if not is_odd.any():
            return []
        pair = int(np.argmax(np.where(is_odd, shared, 0)))
        names = " and ".join(self._name_of(int(file)) for file in (one[pair], other[pair]))
        is_all = shared[pair] == rows_of_files[one[pair]] == rows_of_files[other[pair]]
        rows_text = self._count_in_words(int(shared[pair]))
        same = f"the same {rows_text} rows" if is_all else f"{rows_text} rows in common"
        more = f" (and {others} more pairs of files)" if (others := int(is_odd.sum()) - 1) else ""
        remedy = "leave one of them" if is_all else "leave these out of one of them"
        return [
            f"{names}{more} hold {same} ({_columns(is_timed=is_timed)}), which count twice: {remedy}"
        ]

    def _repeated_in_words(self, is_repeat: NDArray[np.bool_], *, is_timed: bool) -> list[str]:
        count = int(is_repeat.sum())
        if is_timed:
            is_odd = count >= max(SHARED_LEAST, REPEATED_SHARE * len(is_repeat))
        else:  # a user may click an item again, but hardly everybody on everything
            repeated = int((~is_repeat[:-1] & is_repeat[1:]).sum())
            is_odd = count >= COPIED_LEAST and repeated >= COPIED_SHARE * (len(is_repeat) - count)
        if not is_odd:
            return []
        remark = (
            f"{self._count_in_words(count)} of {self._all_rows:,} rows repeat another row of their file "
            f"({_columns(is_timed=is_timed)}), and count once more each: if they are copies, leave them out"
        )
        return [remark]

    def _count_in_words(self, kept_rows: int) -> str:
        if self._limit == _ALL_HASHES:
            return f"{kept_rows:,}"
        return f"about {round(kept_rows * self._all_rows / max(1, self._kept_rows)):,}"

    def _name_of(self, file: int) -> str:
        path = self._paths[file]
        is_alone = [other.name for other in self._paths].count(path.name) == 1
        return path.name if is_alone else str(path)


def _columns(*, is_timed: bool) -> str:
    return "user, item and time" if is_timed else "user and item"
