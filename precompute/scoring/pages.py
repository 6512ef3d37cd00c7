"""Pages: answers encoded as records of a table, and records written as one page file per shard."""

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
from cache.records import Flags, Layout, absent_records, encode_numbers, encode_topk, unfit_row_mask
from cache.store.artefacts import disk_errors, sync_folder, write_atomically
from precompute.builds.build import Build
from precompute.builds.reports import PagesEntry, file_entry
from precompute.builds.tables import records_per_page

Answers = tuple[NDArray[np.uint32], NDArray[np.float32]] | NDArray[np.float32]
"""(ordinals, scores) of lists, or the numbers of vectors and values; one row per entity."""

RECORDS_AT_ONCE = 2048
"""Records encoded at once, so that intermediates stay in a core's caches."""

UNSUMMED_PIECES_MAX = 2
"""Most pieces of a page file that wait for their checksums."""


def encode_records(
    layout: Layout,
    fingerprints: NDArray[np.uint64],
    answers: Answers,
    has_answer: NDArray[np.bool_],
    cut_s: int,
    flags: Flags = 0,
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return (records [n], mask of answers that do not fit the precision).

    Entities with such an answer, or with none, get an absent record, which has none of the `flags`: another table has
    the entity's answer.
    """
    if has_answer.all():
        try:
            return _encode(layout, fingerprints, answers, cut_s, flags), np.zeros(len(fingerprints), np.bool_)
        except UnfitValue:
            pass
    numbers = answers[1] if isinstance(answers, tuple) else answers
    is_unfit = unfit_row_mask(layout, numbers) & has_answer
    answered_rows = np.flatnonzero(has_answer & ~is_unfit)
    row_answers = (
        (answers[0][answered_rows], numbers[answered_rows]) if isinstance(answers, tuple) else numbers[answered_rows]
    )
    records = absent_records(layout, fingerprints, cut_s)
    some_flags = flags if isinstance(flags, int) else flags[answered_rows]
    records[answered_rows] = _encode(layout, fingerprints[answered_rows], row_answers, cut_s, some_flags)
    return records, is_unfit


def _encode(
    layout: Layout, fingerprints: NDArray[np.uint64], answers: Answers, cut_s: int, flags: Flags
) -> NDArray[Any]:
    """Encode rows that all have answers, RECORDS_AT_ONCE at a time."""
    if len(fingerprints) <= RECORDS_AT_ONCE:
        return _encode_some(layout, fingerprints, answers, cut_s, flags)
    records = np.empty(len(fingerprints), layout.dtype)
    for first_row in range(0, len(fingerprints), RECORDS_AT_ONCE):
        rows = slice(first_row, first_row + RECORDS_AT_ONCE)
        row_answers = (answers[0][rows], answers[1][rows]) if isinstance(answers, tuple) else answers[rows]
        some_flags = flags if isinstance(flags, int) else flags[rows]
        row_records = _encode_some(layout, fingerprints[rows], row_answers, cut_s, some_flags)
        # Copied as bytes, since numpy copies records field by field.
        records[rows].view(np.uint8)[:] = row_records.view(np.uint8)
    return records


def _encode_some(
    layout: Layout, fingerprints: NDArray[np.uint64], answers: Answers, cut_s: int, flags: Flags
) -> NDArray[Any]:
    if isinstance(answers, tuple):
        return encode_topk(layout, fingerprints, *answers, cut_s, flags=flags)
    return encode_numbers(layout, fingerprints, answers, cut_s, flags=flags)


def find_finite_rows(output_rows: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return bool [n]: rows whose numbers are all finite.

    A finite sum proves it; only rows with a non-finite sum, which are rare, are checked number by number.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite: NDArray[np.bool_] = np.isfinite(output_rows.sum(axis=1))
    suspect_rows = np.flatnonzero(~is_finite)
    is_finite[suspect_rows] = np.isfinite(output_rows[suspect_rows]).all(axis=1)
    return is_finite


class GrowingFile:
    """Writer of a draft file, which is renamed when complete and removed if the `with` block fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unique name: a task that timed out may still be writing while its retry runs.
        self._temporary_path = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        self._file = self._temporary_path.open("wb")

    def __enter__(self) -> Self:
        return self

    def write(self, appended_bytes: bytes | memoryview) -> None:
        """Append bytes; raise StoreError on a full disk."""
        with disk_errors(self.path):
            self._file.write(appended_bytes)

    def write_array(self, appended_array: NDArray[Any]) -> None:
        """Append the bytes of an array [n] without a copy, which would hold the GIL."""
        self.write(np.ascontiguousarray(appended_array).view(np.uint8).data)

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is not None:
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
        # Closing writes the buffer, which fails again on a full disk.
        with suppress(OSError):
            self._file.close()
        self._temporary_path.unlink(missing_ok=True)


class PageFile(GrowingFile):
    """Writer of all pages of one shard of one table.

    A page is a slice of the file: records are appended back to back, and a checksum (xxh3-64) of every
    `records_per_page` records goes into the `.sums` file. Background threads compute the checksums of pages and file,
    and flush written data to disk; at most UNSUMMED_PIECES_MAX pieces wait for them.
    """

    def __init__(self, path: Path, record_layout: Layout, page_bytes: int) -> None:
        super().__init__(path)
        self.layout = record_layout
        self.count = 0
        self._page_bytes = records_per_page(record_layout, page_bytes) * record_layout.size_bytes
        self._page_checksums: list[int] = []
        self._partial_page = bytearray()
        self._sha256 = hashlib.sha256()
        self._size_bytes = 0
        self._checksum_pool, self._sync_pool = (ThreadPoolExecutor(1, "sums"), ThreadPoolExecutor(1, "sync"))
        self._checksum_futures: deque[Future[None]] = deque()
        self._sync_future: Future[None] | None = None

    def append(self, table_records: NDArray[Any]) -> None:
        """Append records (dtype of the layout) in hash order; the array must not change afterwards."""
        self.count += len(table_records)
        data = np.ascontiguousarray(table_records).view(np.uint8).data
        self.write(data)
        self._size_bytes += len(data)
        while len(self._checksum_futures) >= UNSUMMED_PIECES_MAX:
            self._checksum_futures.popleft().result()
        self._checksum_futures.append(self._checksum_pool.submit(self._add_to_checksums, data))
        if self._sync_future is None or self._sync_future.done():
            self._demand_synced()
            # Without early flushes, the disk would start writing only after the last record.
            self._sync_future = self._sync_pool.submit(os.fdatasync, self._file.fileno())

    def _demand_synced(self) -> None:
        """Raise StoreError if a flush to disk failed, which the system reports only once."""
        if self._sync_future is not None:
            with disk_errors(self.path):
                self._sync_future.result()

    def describe(self, artefact_path: str) -> Artefact:
        """Return the manifest entry of the finished file under this name, from the bytes written."""
        return Artefact(artefact_path, self._size_bytes, self._sha256.hexdigest())

    def _add_to_checksums(self, appended_bytes: memoryview) -> None:
        self._sha256.update(appended_bytes)
        offset = min(-len(self._partial_page) % self._page_bytes, len(appended_bytes))  # end of the page begun before
        self._partial_page += appended_bytes[:offset]
        if len(self._partial_page) == self._page_bytes:
            self._page_checksums.append(xxhash.xxh3_64_intdigest(self._partial_page))
            self._partial_page.clear()
        while offset + self._page_bytes <= len(appended_bytes):
            self._page_checksums.append(xxhash.xxh3_64_intdigest(appended_bytes[offset : offset + self._page_bytes]))
            offset += self._page_bytes
        self._partial_page += appended_bytes[offset:]

    def __exit__(self, error_type: object, *_: object) -> None:
        # No thread may use the file descriptor once it is closed.
        for pool in (self._checksum_pool, self._sync_pool):
            pool.shutdown(cancel_futures=error_type is not None)
        if error_type is not None:
            super().__exit__(error_type)
            return
        try:
            self._demand_synced()
            while self._checksum_futures:
                self._checksum_futures.popleft().result()
        except BaseException as error:
            super().__exit__(type(error))
            raise
        super().__exit__(None)
        if self._partial_page:
            self._page_checksums.append(xxhash.xxh3_64_intdigest(self._partial_page))
        write_atomically(checksums_path(self.path), np.array(self._page_checksums, "<u8").tobytes())


def checksums_path(pages_path: Path) -> Path:
    """Return the path of the checksums of a page file."""
    return pages_path.with_suffix(".sums")


def describe_pages(build: Build, page_file: PageFile) -> PagesEntry:
    """Return the manifest entries of a finished page file of the build and its checksums."""
    pages_name, checksums_name = (
        str(path.relative_to(build.root)) for path in (page_file.path, checksums_path(page_file.path))
    )
    return {
        "count": page_file.count,
        "file": file_entry(page_file.describe(pages_name)),
        "sums": file_entry(build.describe(checksums_name)),
    }
