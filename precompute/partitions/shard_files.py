"""Partition on disk: one Arrow stream per hash range."""

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

KINDS = ("rows", "ids", "features")
"""Kinds of files, each with a HASH: interactions, users' ids once per batch of the sources, and features."""

PARTITION = "work/partition"
"""Folder of the partition in the generation's folder."""

USER_VECTORS = "vectors"
"""Kind of file of a partition with vectors of users."""

TOUCHED = "touched"
"""Kind of file of a partition that took an earlier one over: hashes of users whose inputs differ from then."""

SPARE_FILES = 512
"""Descriptors for all other uses: sources, artefacts, Redis, libraries."""

OPEN_MAX = 1 << 20

SHARD_RANGES = 256
"""Most hash ranges in whose order the rows of a shard's batches are: a slice is then a piece of each batch."""

RANGES_MAX = 1 << 16
"""Most hash ranges of all shards: their numbers are uint16, for which numpy has a radix sort."""

HASH = "xxh3(user)"
"""Column with the hash of a row's user under the partition's seed."""

POSITION = "position"
"""Column of rows with the position of their event, if events are taken in; 0 for a row of the team's own files."""


def first_hash(shard: int, shards: int) -> int:
    """Return the first hash of a shard's range of the 64-bit hash."""
    return -((-shard << 64) // shards)


def shard_of(hashes: NDArray[np.uint64], shards: int) -> NDArray[np.int64]:
    """Return int64[n], the shard whose range holds each hash."""
    firsts = np.array([first_hash(shard, shards) for shard in range(shards)], np.uint64)
    # The upper half of a hash names its range, or the one before it: no search, however many ranges there are.
    guessed_shards = ((hashes >> np.uint64(32)) * np.uint64(shards) >> np.uint64(32)).astype(
        np.int64
    )
    after = np.minimum(guessed_shards + 1, shards - 1)
    return np.where(hashes >= firsts[after], after, guessed_shards)


def ranges_of_a_shard(shards: int) -> int:
    """Return the number of hash ranges that order each shard's batches, a power of two."""
    range_limit = max(1, min(SHARD_RANGES, RANGES_MAX // max(1, shards)))
    return 1 << (range_limit.bit_length() - 1)


def range_of(hashes: NDArray[np.uint64], shards: int) -> NDArray[np.uint16]:
    """Return uint16[n], the hash range of each hash; `ranges_of_a_shard` of them form a shard."""
    return shard_of(hashes, shards * ranges_of_a_shard(shards)).astype(np.uint16)


def shard_paths(folder: Path, shard: int, kinds: Sequence[str] = KINDS) -> list[Path]:
    """Return the paths of a shard's files of these kinds, in their order."""
    return [folder / f"{shard:04d}.{kind}" for kind in kinds]


def kinds_of(has_user_vectors: bool) -> tuple[str, ...]:
    """Return the kinds of files of a partition."""
    return (*KINDS, USER_VECTORS) if has_user_vectors else KINDS


def kinds_in(folder: Path, shard: int) -> tuple[str, ...]:
    """Return the kinds of files that a shard has here."""
    return kinds_of(shard_paths(folder, shard, (USER_VECTORS,))[0].exists())


def naming(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds that identify users: all but their interactions."""
    return tuple(kinds[1:])


def read_stream(path: Path) -> Any:
    """Read the Arrow table of a file; its columns stay memory-mapped."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


def read_batches(path: Path, *, fields: Sequence[int] | None = None) -> Iterator[Any]:
    """Yield the Arrow batches of a file, one in memory at a time; `fields` selects columns by index."""
    options = pa.ipc.IpcReadOptions(included_fields=None if fields is None else list(fields))
    with pa.OSFile(str(path)) as source:  # a map would count as ours, once it is read
        yield from pa.ipc.open_stream(source, options=options)


def count_rows(path: Path) -> int:
    """Return the number of rows of a file without reading them."""
    with pa.memory_map(str(path)) as source:
        return sum(batch.num_rows for batch in pa.ipc.open_stream(source))


def allow_files(count: int) -> None:
    """Raise the limit so that `count` + SPARE_FILES files may be open; raise ConfigError if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_descriptors, descriptor_limit = (
        count + SPARE_FILES,
        OPEN_MAX if hard == resource.RLIM_INFINITY else hard,
    )
    if soft != resource.RLIM_INFINITY and soft < needed_descriptors <= descriptor_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed_descriptors, hard))
    elif soft != resource.RLIM_INFINITY and soft < needed_descriptors:
        raise ConfigError(
            f"{needed_descriptors} files would be open at once, this process may open {descriptor_limit}: raise "
            "`ulimit -n`, or set fewer "
            "shards",
            field="shards",
        )


class ShardFiles:
    """Writer of Arrow streams, one per hash range, to drafts that are renamed when all are complete."""

    def __init__(
        self, paths: Sequence[Path], schema: Any, *, lasting: bool = True, ranges: int = 1
    ) -> None:
        """Open the drafts; each file holds so many consecutive `ranges` of hashes.

        `lasting`: sync files to disk before renaming, since a truncated stream reads like a complete one.
        """
        self._paths, self._lasting, self._ranges = paths, lasting, ranges
        # Names of its own: a task that was given up on may still be writing while its retry runs.
        token = secrets.token_hex(4)
        self._besides = [path.with_name(f".{path.name}.{token}.part") for path in paths]
        self._schema = schema
        self._stack = ExitStack()
        self._writers: list[Any] = []

    def __enter__(self) -> "ShardFiles":
        for part_path in self._besides:
            sink = self._stack.enter_context(pa.OSFile(str(part_path), "wb"))
            self._writers.append(self._stack.enter_context(pa.ipc.new_stream(sink, self._schema)))
        return self

    def write(self, table: Any, numbers: NDArray[np.integer]) -> None:
        """Write each row of `table` to the file of its range number; rows of one range keep their order.

        Rows of numbers that have no file are left out.
        """
        numbers = numbers.astype(np.uint16, copy=False)  # for which numpy has a radix sort
        order = np.argsort(numbers, kind="stable")
        sorted_rows = table.take(pa.array(order))
        firsts = np.arange(len(self._paths), dtype=np.int64) * self._ranges
        lasts = (firsts + self._ranges - 1).astype(np.uint16)
        numbers = numbers[order]
        starts = np.searchsorted(numbers, firsts.astype(np.uint16))
        ends = np.searchsorted(numbers, lasts, "right")
        for writer, start, end in zip(self._writers, starts, ends, strict=True):
            if end > start:
                writer.write_table(sorted_rows.slice(start, end - start))

    def extend(self, number: int, batches: Iterable[Any]) -> None:
        """Append all rows of Arrow batches to the file of this number."""
        for batch in batches:
            self._writers[number].write_batch(batch)

    def __exit__(self, kind: object, *exception_details: object) -> None:
        try:
            self._stack.close()
            if kind is None:
                for part_path, path in zip(self._besides, self._paths, strict=True):
                    if self._lasting:
                        with part_path.open("rb") as file:
                            os.fsync(file.fileno())
                    part_path.replace(path)
                for folder in {path.parent for path in self._paths} if self._lasting else ():
                    sync_folder(folder)
        finally:
            for part_path in self._besides:
                part_path.unlink(missing_ok=True)
