"""Repeated rows of interactions, within a file or in two files, counted in bounded memory."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from precompute.sources.columns import Ids
from precompute.sources.files import SourceFile

ROWS_COMPARED_MAX: Final = 1 << 20
"""Rows up to which all are compared, at 20 bytes each; of more rows, those of a sample of the users."""

SHARED_ROWS_MIN: Final = 5
SHARED_ROWS_SHARE_MIN: Final = 0.02
"""Rows with a time that two overlapping files share, at least, and their least share of the smaller file."""

COPIED_ROWS_MIN: Final = 20
COPIED_ROWS_SHARE_MIN: Final = 0.9
"""The same for rows without times, which may repeat; the share is that of the larger file."""

REPEATED_ROWS_SHARE_MIN: Final = 0.01
"""Share of rows with a time that repeat a row of their file, from which on a remark is made."""

_ITEM_HASH_FACTOR, _TIME_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_NO_HASH_LIMIT: Final = np.uint64(2**64 - 1)


class RepeatedRows:
    """Counts of rows with the user, item and time of another row, for all users or those with the lowest hashes."""

    def __init__(self, rows_compared_max: int = ROWS_COMPARED_MAX) -> None:
        self._rows_compared_max, self._user_hash_limit = rows_compared_max, _NO_HASH_LIMIT
        self._user_hash_parts, self._row_hash_parts = ([np.empty(0, np.uint64)], [np.empty(0, np.uint64)])
        self._file_index_parts = [np.empty(0, np.int32)]
        self._source_files: list[SourceFile] = []
        self._compared_row_count = self._all_row_count = 0
        self._oldest_us, self._newest_us = 0, 0

    def add(self, path: SourceFile, users: Ids, items: Ids, times_us: NDArray[np.int64]) -> None:
        """Add the next rows of a file; all rows of a file must be added before those of the next file."""
        if not self._source_files or self._source_files[-1] != path:
            self._source_files.append(path)
        if not len(times_us):
            return
        user_hashes = users.distinct_hashes(0)
        user_codes, item_codes, row_times = users.id_codes, items.id_codes, times_us
        if self._user_hash_limit < _NO_HASH_LIMIT:
            compared_rows = np.flatnonzero((user_hashes <= self._user_hash_limit)[user_codes])
            user_codes, item_codes, row_times = (
                user_codes[compared_rows],
                item_codes[compared_rows],
                times_us[compared_rows],
            )
        row_user_hashes = user_hashes[user_codes]
        # The hashes are random, so combining products and sums of them keeps rows distinct.
        row_hashes = row_user_hashes ^ (items.distinct_hashes(0) * _ITEM_HASH_FACTOR)[item_codes]
        row_hashes ^= row_times.astype(np.uint64) * _TIME_HASH_FACTOR
        if not self._all_row_count:
            self._oldest_us = self._newest_us = int(times_us[0])
        self._oldest_us = min(self._oldest_us, int(times_us.min()))
        self._newest_us = max(self._newest_us, int(times_us.max()))
        self._all_row_count += len(times_us)
        self._compared_row_count += len(row_hashes)
        self._user_hash_parts.append(row_user_hashes)
        self._row_hash_parts.append(row_hashes)
        self._file_index_parts.append(np.full(len(row_hashes), len(self._source_files) - 1, np.int32))
        if self._compared_row_count > self._rows_compared_max:
            self._lower_hash_limit()

    def _lower_hash_limit(self) -> None:
        user_hashes, row_hashes = (np.concatenate(self._user_hash_parts), np.concatenate(self._row_hash_parts))
        file_indexes = np.concatenate(self._file_index_parts)
        is_kept = user_hashes <= self._user_hash_limit
        while np.count_nonzero(is_kept) > self._rows_compared_max // 2 and self._user_hash_limit:
            self._user_hash_limit >>= np.uint64(1)
            is_kept = user_hashes <= self._user_hash_limit
        self._user_hash_parts, self._row_hash_parts, self._file_index_parts = (
            [user_hashes[is_kept]],
            [row_hashes[is_kept]],
            [file_indexes[is_kept]],
        )
        self._compared_row_count = len(self._user_hash_parts[0])

    def remarks(self) -> list[str]:
        """Return remarks on files that share rows, and on rows that repeat within their file."""
        row_hashes, file_indexes = (np.concatenate(self._row_hash_parts), np.concatenate(self._file_index_parts))
        if not len(row_hashes):
            return []
        order = np.argsort(row_hashes, kind="stable")  # stable: equal rows are in the order of files
        row_hashes, file_indexes = row_hashes[order], file_indexes[order]
        is_same = np.append(False, row_hashes[1:] == row_hashes[:-1])
        is_repeat = is_same & np.append(False, file_indexes[1:] == file_indexes[:-1])
        is_timed = self._oldest_us < self._newest_us
        return [
            *self._shared_in_words(row_hashes[~is_repeat], file_indexes[~is_repeat], is_timed=is_timed),
            *self._repeated_in_words(is_repeat, is_timed=is_timed),
        ]

    def _shared_in_words(
        self, row_hashes: NDArray[np.uint64], file_indexes: NDArray[np.int32], *, is_timed: bool
    ) -> list[str]:
        """Return a remark on the two files that share the most rows, if many; each row counts once per file."""
        is_first = np.append(True, row_hashes[1:] != row_hashes[:-1])
        first_file_indexes = file_indexes[is_first][np.cumsum(is_first) - 1]
        file_count = len(self._source_files)
        pair_codes, shared_row_counts = np.unique(
            first_file_indexes[~is_first].astype(np.int64) * file_count + file_indexes[~is_first], return_counts=True
        )
        first_of_pairs, second_of_pairs = pair_codes // file_count, pair_codes % file_count
        row_count_by_file = np.bincount(file_indexes, minlength=file_count)
        smaller_row_counts = np.minimum(row_count_by_file[first_of_pairs], row_count_by_file[second_of_pairs])
        larger_row_counts = np.maximum(row_count_by_file[first_of_pairs], row_count_by_file[second_of_pairs])
        is_odd = (
            (shared_row_counts >= SHARED_ROWS_MIN) & (shared_row_counts >= SHARED_ROWS_SHARE_MIN * smaller_row_counts)
            if is_timed
            else (shared_row_counts >= COPIED_ROWS_MIN)
            & (shared_row_counts >= COPIED_ROWS_SHARE_MIN * larger_row_counts)
        )
        if not is_odd.any():
            return []
        top_pair_index = int(np.argmax(np.where(is_odd, shared_row_counts, 0)))
        names = " and ".join(
            self._file_name_of(int(file_index))
            for file_index in (first_of_pairs[top_pair_index], second_of_pairs[top_pair_index])
        )
        is_same_content = (
            shared_row_counts[top_pair_index]
            == row_count_by_file[first_of_pairs[top_pair_index]]
            == row_count_by_file[second_of_pairs[top_pair_index]]
        )
        rows_text = self._count_in_words(int(shared_row_counts[top_pair_index]))
        shared_text = f"the same {rows_text} rows" if is_same_content else f"{rows_text} rows in common"
        more_pairs_text = (
            f" (and {other_pair_count} more pairs of files)" if (other_pair_count := int(is_odd.sum()) - 1) else ""
        )
        remedy = "keep one of them" if is_same_content else "remove these from one of them"
        return [
            (
                f"{names}{more_pairs_text} hold {shared_text} ({_compared_columns_text(is_timed=is_timed)}), which "
                f"count twice: {remedy}"
            )
        ]

    def _repeated_in_words(self, is_repeat: NDArray[np.bool_], *, is_timed: bool) -> list[str]:
        repeat_count = int(is_repeat.sum())
        if is_timed:
            is_odd = repeat_count >= max(SHARED_ROWS_MIN, REPEATED_ROWS_SHARE_MIN * len(is_repeat))
        else:  # a user may click an item again, but users rarely repeat all their clicks
            repeated_row_count = int((~is_repeat[:-1] & is_repeat[1:]).sum())
            is_odd = repeat_count >= COPIED_ROWS_MIN and repeated_row_count >= COPIED_ROWS_SHARE_MIN * (
                len(is_repeat) - repeat_count
            )
        if not is_odd:
            return []
        remark = (
            f"{self._count_in_words(repeat_count)} of {self._all_row_count:,} rows repeat another row of their file "
            f"({_compared_columns_text(is_timed=is_timed)}), and each counts again: if they are copies, remove "
            "them"
        )
        return [remark]

    def _count_in_words(self, compared_row_count: int) -> str:
        if self._user_hash_limit == _NO_HASH_LIMIT:
            return f"{compared_row_count:,}"
        return f"about {round(compared_row_count * self._all_row_count / max(1, self._compared_row_count)):,}"

    def _file_name_of(self, file_index: int) -> str:
        path = self._source_files[file_index]
        is_unique_name = [other_path.name for other_path in self._source_files].count(path.name) == 1
        return path.name if is_unique_name else str(path)


def _compared_columns_text(*, is_timed: bool) -> str:
    return "user, item and time" if is_timed else "user and item"
