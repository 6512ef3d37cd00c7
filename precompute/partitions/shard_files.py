"""Files of a partition: one Arrow stream per shard and kind of data."""

import os
import resource
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.errors import ConfigError
from cache.store.artefacts import sync_folder

BASE_FILE_KINDS = ("rows", "ids", "features")
"""Kinds of files, each with a HASH_COLUMN: interactions; users' ids, once per batch of the sources; features."""

PARTITION_FOLDER = "work/partition"
"""Folder of the partition, relative to the generation's folder."""

USER_VECTORS_KIND = "vectors"
"""Kind of file with users' vectors."""

TOUCHED_KIND = "touched"
"""Kind of file in a partition that took over an earlier one: hashes of the users whose inputs changed since."""

SPARE_DESCRIPTORS = 512
"""File descriptors reserved for other uses: sources, artefacts, Redis, libraries."""

OPEN_FILES_MAX = 1 << 20

RANGES_PER_SHARD_MAX = 256
"""Most hash ranges by which the rows of a shard's batches are ordered, so that a slice is one piece of each batch."""

RANGES_MAX = 1 << 16
"""Most hash ranges of all shards together: their numbers are uint16, for which numpy has a radix sort."""

HASH_COLUMN = "xxh3(user)"
"""Column with the hash of the row's user under the partition's seed."""

POSITION_COLUMN = "position"
"""Column with the position of the row's event, if events are read; 0 for a row of a source file."""


def first_hash(shard: int, shard_count: int) -> int:
    """Return the first 64-bit hash of a shard's range."""
    return -((-shard << 64) // shard_count)


def shard_of(hashes: NDArray[np.uint64], shard_count: int) -> NDArray[np.int64]:
    """Return int64[n], the shard of each hash."""
    first_hashes = np.array([first_hash(shard, shard_count) for shard in range(shard_count)], np.uint64)
    # The upper half of a hash gives its range or the range before it, so no search is needed.
    guessed_shards = ((hashes >> np.uint64(32)) * np.uint64(shard_count) >> np.uint64(32)).astype(np.int64)
    next_shards = np.minimum(guessed_shards + 1, shard_count - 1)
    return np.where(hashes >= first_hashes[next_shards], next_shards, guessed_shards)


def range_count_per_shard(shard_count: int) -> int:
    """Return the number of hash ranges by which each shard's batches are ordered, a power of two."""
    range_limit = max(1, min(RANGES_PER_SHARD_MAX, RANGES_MAX // max(1, shard_count)))
    return 1 << (range_limit.bit_length() - 1)


def range_of(hashes: NDArray[np.uint64], shard_count: int) -> NDArray[np.uint16]:
    """Return uint16[n], the hash range of each hash; a shard consists of `range_count_per_shard` ranges."""
    return shard_of(hashes, shard_count * range_count_per_shard(shard_count)).astype(np.uint16)


def shard_paths(folder: Path, shard: int, file_kinds: Sequence[str] = BASE_FILE_KINDS) -> list[Path]:
    """Return the paths of a shard's files of these kinds, in their order."""
    return [folder / f"{shard:04d}.{file_kind}" for file_kind in file_kinds]


def partition_file_kinds(has_user_vectors: bool) -> tuple[str, ...]:
    """Return the kinds of files of a partition, with or without users' vectors."""
    return (*BASE_FILE_KINDS, USER_VECTORS_KIND) if has_user_vectors else BASE_FILE_KINDS


def file_kinds_in(folder: Path, shard: int) -> tuple[str, ...]:
    """Return the kinds of files that a shard has in this folder."""
    return partition_file_kinds(shard_paths(folder, shard, (USER_VECTORS_KIND,))[0].exists())


def user_naming_kinds(file_kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of files with users' ids: all but interactions."""
    return tuple(file_kinds[1:])


def read_stream(path: Path) -> Any:
    """Read the Arrow table of a file; its columns stay memory-mapped."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


def read_batches(path: Path, *, column_indexes: Sequence[int] | None = None) -> Iterator[Any]:
    """Yield the Arrow batches of a file, one in memory at a time; `column_indexes` selects columns by index."""
    options = pa.ipc.IpcReadOptions(included_fields=None if column_indexes is None else list(column_indexes))
    with pa.OSFile(str(path)) as source:  # a map would count as this process's memory
        yield from pa.ipc.open_stream(source, options=options)


def count_rows(path: Path) -> int:
    """Return the number of rows of a file from its batches' metadata."""
    with pa.memory_map(str(path)) as source:
        return sum(batch.num_rows for batch in pa.ipc.open_stream(source))


def allow_open_files(file_count: int) -> None:
    """Raise the limit of open files to `file_count` + SPARE_DESCRIPTORS; raise ConfigError if that is not allowed."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_descriptors, descriptor_limit = (
        file_count + SPARE_DESCRIPTORS,
        OPEN_FILES_MAX if hard_limit == resource.RLIM_INFINITY else hard_limit,
    )
    if soft_limit != resource.RLIM_INFINITY and soft_limit < needed_descriptors <= descriptor_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed_descriptors, hard_limit))
    elif soft_limit != resource.RLIM_INFINITY and soft_limit < needed_descriptors:
        raise ConfigError(
            f"{needed_descriptors} files would be open at once, but this process may open {descriptor_limit}: raise "
            "`ulimit -n`, or set fewer "
            "shards",
            field="shards",
        )


class ShardFiles:
    """Writer of Arrow streams, one per hash range or several; drafts are renamed when all are complete."""

    def __init__(
        self, paths: Sequence[Path], arrow_schema: Any, *, is_synced: bool = True, ranges_per_file: int = 1
    ) -> None:
        """Open the drafts; each file holds `ranges_per_file` consecutive hash ranges.

        `is_synced`: sync files to disk before renaming, since a truncated stream reads like a complete one.
        """
        self._paths, self._is_synced, self._ranges_per_file = paths, is_synced, ranges_per_file
        # Drafts have unique names: a task that timed out may still be writing while its retry runs.
        draft_token = secrets.token_hex(4)
        self._draft_paths = [path.with_name(f".{path.name}.{draft_token}.part") for path in paths]
        self._schema = arrow_schema
        self._exit_stack = ExitStack()
        self._writers: list[Any] = []

    def __enter__(self) -> "ShardFiles":
        for draft_path in self._draft_paths:
            draft_file = self._exit_stack.enter_context(pa.OSFile(str(draft_path), "wb"))
            self._writers.append(self._exit_stack.enter_context(pa.ipc.new_stream(draft_file, self._schema)))
        return self

    def write(self, rows_table: Any, range_numbers: NDArray[np.integer]) -> None:
        """Write each row of `rows_table` to the file of its range number; rows of one range keep their order.

        Rows whose range number has no file are dropped.
        """
        range_numbers = range_numbers.astype(np.uint16, copy=False)  # numpy has a radix sort for uint16
        range_order = np.argsort(range_numbers, kind="stable")
        sorted_rows = rows_table.take(pa.array(range_order))
        first_ranges = np.arange(len(self._paths), dtype=np.int64) * self._ranges_per_file
        last_ranges = (first_ranges + self._ranges_per_file - 1).astype(np.uint16)
        range_numbers = range_numbers[range_order]
        file_starts = np.searchsorted(range_numbers, first_ranges.astype(np.uint16))
        file_ends = np.searchsorted(range_numbers, last_ranges, "right")
        for writer, first_row, end_row in zip(self._writers, file_starts, file_ends, strict=True):
            if end_row > first_row:
                writer.write_table(sorted_rows.slice(first_row, end_row - first_row))

    def extend(self, file_index: int, batches: Iterable[Any]) -> None:
        """Append all rows of Arrow batches to the file of this index."""
        for batch in batches:
            self._writers[file_index].write_batch(batch)

    def __exit__(self, exception_type: object, *exception_details: object) -> None:
        try:
            self._exit_stack.close()
            if exception_type is None:
                for draft_path, path in zip(self._draft_paths, self._paths, strict=True):
                    if self._is_synced:
                        with draft_path.open("rb") as file:
                            os.fsync(file.fileno())
                    draft_path.replace(path)
                for folder in {path.parent for path in self._paths} if self._is_synced else ():
                    sync_folder(folder)
        finally:
            for draft_path in self._draft_paths:
                draft_path.unlink(missing_ok=True)
