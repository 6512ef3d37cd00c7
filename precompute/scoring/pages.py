"""Pages: answers encoded as records of a table, and records written as one file of pages per shard."""

import hashlib
import os
import secrets
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.errors import UnfitValue
from cache.format.manifest import Artefact
from cache.records import Flags, Layout, absent_records, encode_numbers, encode_topk, unfit_rows
from cache.store.artefacts import disk_errors, sync_folder, write_atomically
from precompute.builds.build import Build
from precompute.builds.reports import PagesEntry, file_entry
from precompute.builds.tables import records_per_page

Answers = tuple[NDArray[np.uint32], NDArray[np.float32]] | NDArray[np.float32]
"""(ordinals, scores) of lists, or the numbers of vectors and values; a row for each entity."""

RECORDS_AT_ONCE = 2048
"""Records encoded at once."""

PIECES_BEHIND = 2
"""Pieces of a page file that wait for their checksums at most."""


def encode_records(
    layout: Layout,
    fingerprints: NDArray[np.uint64],
    answers: Answers,
    has_answer: NDArray[np.bool_],
    at: int,
    flags: Flags = 0,
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return (records[n], mask of answers that do not fit the precision); these and missing ones are absent records.

    An absent one has an answer in another table of the same entities only, and none of the `flags`.
    """
    if has_answer.all():
        try:
            return _encode(layout, fingerprints, answers, at, flags), np.zeros(
                len(fingerprints), np.bool_
            )
        except UnfitValue:
            pass
    numbers = answers[1] if isinstance(answers, tuple) else answers
    is_unfit = unfit_rows(layout, numbers) & has_answer
    rows = np.flatnonzero(has_answer & ~is_unfit)
    row_answers = (answers[0][rows], numbers[rows]) if isinstance(answers, tuple) else numbers[rows]
    records = absent_records(layout, fingerprints, at)
    some_flags = flags if isinstance(flags, int) else flags[rows]
    records[rows] = _encode(layout, fingerprints[rows], row_answers, at, some_flags)
    return records, is_unfit


def _encode(
    layout: Layout, fingerprints: NDArray[np.uint64], answers: Answers, at: int, flags: Flags
) -> NDArray[Any]:
    """Encode rows that all have answers, RECORDS_AT_ONCE at a time, so that intermediates stay in a core's caches."""
    if len(fingerprints) <= RECORDS_AT_ONCE:
        return _encode_some(layout, fingerprints, answers, at, flags)
    records = np.empty(len(fingerprints), layout.dtype)
    for start in range(0, len(fingerprints), RECORDS_AT_ONCE):
        rows = slice(start, start + RECORDS_AT_ONCE)
        row_answers = (
            (answers[0][rows], answers[1][rows]) if isinstance(answers, tuple) else answers[rows]
        )
        some_flags = flags if isinstance(flags, int) else flags[rows]
        row_records = _encode_some(layout, fingerprints[rows], row_answers, at, some_flags)
        # As bytes: numpy copies records field by field.
        records[rows].view(np.uint8)[:] = row_records.view(np.uint8)
    return records


def _encode_some(
    layout: Layout, fingerprints: NDArray[np.uint64], answers: Answers, at: int, flags: Flags
) -> NDArray[Any]:
    if isinstance(answers, tuple):
        return encode_topk(layout, fingerprints, *answers, at, flags=flags)
    return encode_numbers(layout, fingerprints, answers, at, flags=flags)


def finite_rows(numbers: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return bool [n]; a sum is finite only if all are, so only a rare row without a finite sum is checked closely."""
    with np.errstate(over="ignore", invalid="ignore"):
        finite: NDArray[np.bool_] = np.isfinite(numbers.sum(axis=1))
    suspects = np.flatnonzero(~finite)
    finite[suspects] = np.isfinite(numbers[suspects]).all(axis=1)
    return finite


class GrowingFile:
    """Writer of a draft file, piece by piece, which is renamed when complete and dropped if the block fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: a task that was given up on may still be writing while its retry runs.
        self._temporary_path = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        self._file = self._temporary_path.open("wb")

    def __enter__(self) -> Self:
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; raise StoreError on a full disk."""
        with disk_errors(self.path):
            self._file.write(data)

    def write_array(self, values: NDArray[Any]) -> None:
        """Append the bytes of an array [n]; it is not copied, which would hold up other threads."""
        self.write(np.ascontiguousarray(values).view(np.uint8).data)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._drop()
            return
        try:
            with disk_errors(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._temporary_path.replace(self.path)
                sync_folder(self.path.parent)
        finally:
            self._drop()

    def _drop(self) -> None:
        # Closing writes what is buffered, which fails once more where the disk is full.
        with suppress(OSError):
            self._file.close()
        self._temporary_path.unlink(missing_ok=True)


class PageFile(GrowingFile):
    """Writer of all pages of one shard of one table.

    A page is a slice of the file: records are appended back to back, and every `records_per_page` of them a
    checksum (xxh3-64) is kept for the `.sums` file. Background threads compute the checksums of pages and of the
    file, and flush written data to disk; they keep at most PIECES_BEHIND pieces.
    """

    def __init__(self, path: Path, layout: Layout, page_bytes: int) -> None:
        super().__init__(path)
        self.layout = layout
        self.count = 0
        self._page_bytes = records_per_page(layout, page_bytes) * layout.size_bytes
        self._sums: list[int] = []
        self._tail = bytearray()
        self._sha256 = hashlib.sha256()
        self._size_bytes = 0
        self._summing, self._syncing = ThreadPoolExecutor(1, "sums"), ThreadPoolExecutor(1, "sync")
        self._unsummed: deque[Future[None]] = deque()
        self._synced: Future[None] | None = None

    def append(self, records: NDArray[Any]) -> None:
        """Append records (dtype of the layout) in hash order; they must not change afterwards."""
        self.count += len(records)
        data = np.ascontiguousarray(records).view(np.uint8).data
        self.write(data)
        self._size_bytes += len(data)
        while len(self._unsummed) >= PIECES_BEHIND:
            self._unsummed.popleft().result()
        self._unsummed.append(self._summing.submit(self._add_to_sums, data))
        if self._synced is None or self._synced.done():
            self._demand_synced()
            # Left to the end, the disk would begin to write when the last record is there.
            self._synced = self._syncing.submit(os.fdatasync, self._file.fileno())

    def _demand_synced(self) -> None:
        """Raise StoreError if a flush to disk failed, which the system reports only once."""
        if self._synced is not None:
            with disk_errors(self.path):
                self._synced.result()

    def describe(self, name: str) -> Artefact:
        """Return the manifest entry of the finished file under this name, of the written bytes."""
        return Artefact(name, self._size_bytes, self._sha256.hexdigest())

    def _add_to_sums(self, data: memoryview) -> None:
        self._sha256.update(data)
        start = min(-len(self._tail) % self._page_bytes, len(data))  # where the page under way ends
        self._tail += data[:start]
        if len(self._tail) == self._page_bytes:
            self._sums.append(xxhash.xxh3_64_intdigest(self._tail))
            self._tail.clear()
        while start + self._page_bytes <= len(data):
            self._sums.append(xxhash.xxh3_64_intdigest(data[start : start + self._page_bytes]))
            start += self._page_bytes
        self._tail += data[start:]

    def __exit__(self, kind: object, *_: object) -> None:
        # Nobody may use the file's descriptor once it is closed.
        for pool in (self._summing, self._syncing):
            pool.shutdown(cancel_futures=kind is not None)
        if kind is not None:
            super().__exit__(kind)
            return
        try:
            self._demand_synced()
            while self._unsummed:
                self._unsummed.popleft().result()
        except BaseException as error:
            super().__exit__(type(error))
            raise
        super().__exit__(None)
        if self._tail:
            self._sums.append(xxhash.xxh3_64_intdigest(self._tail))
        write_atomically(sums_path(self.path), np.array(self._sums, "<u8").tobytes())


def sums_path(pages: Path) -> Path:
    """Return the path of the checksums of a page file."""
    return pages.with_suffix(".sums")


def describe_pages(build: Build, pages: PageFile) -> PagesEntry:
    """Return the manifest entries of a finished page file of the build and its checksums."""
    file, sums = (str(path.relative_to(build.root)) for path in (pages.path, sums_path(pages.path)))
    return {
        "count": pages.count,
        "file": file_entry(pages.describe(file)),
        "sums": file_entry(build.describe(sums)),
    }
