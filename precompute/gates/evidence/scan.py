"""A scan of all records of a table: every page file read once, a chunk at a time, each fault counted."""

import os
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.format.manifest import Manifest, Table, TablePart
from cache.format.records.layout import ABSENT, NO_ITEM, are_nightly

CHUNK_BYTES: Final = 16 << 20
MARKS_AT_ONCE: Final = 1 << 22


class FingerprintFile:
    """The fingerprints of a table's records in their order, in a file without a name: 8 bytes each on disk."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long-lived as the scan
        self.count = 0

    def append(self, fingerprints: NDArray[np.uint64]) -> None:
        """Add the fingerprints of the next records."""
        self._file.write(np.ascontiguousarray(fingerprints, np.uint64).data)
        self.count += len(fingerprints)

    def read(self, start: int, count: int) -> NDArray[np.uint64]:
        """uint64[count] from a record on."""
        self._file.flush()
        return np.frombuffer(os.pread(self._file.fileno(), 8 * count, 8 * start), np.uint64)

    def repeated(self) -> int:
        """Number of repeated fingerprints, counted in ranges of the 64 bits, so that few are in memory at a time."""
        ranges = -(-self.count // MARKS_AT_ONCE)
        return sum(self._repeated_in(number, ranges) for number in range(ranges))

    def _repeated_in(self, number: int, ranges: int) -> int:
        first, last = (np.uint64(bound) for bound in _bounds(number, ranges))
        parts_in_range = [np.empty(0, np.uint64)]
        for start in range(0, self.count, MARKS_AT_ONCE):
            fingerprints = self.read(start, min(MARKS_AT_ONCE, self.count - start))
            parts_in_range.append(fingerprints[(fingerprints >= first) & (fingerprints <= last)])
        fingerprints = np.sort(np.concatenate(parts_in_range))
        return int((fingerprints[1:] == fingerprints[:-1]).sum())


def _bounds(number: int, ranges: int) -> tuple[int, int]:
    return (number << 64) // ranges, ((number + 1) << 64) // ranges - 1


@dataclass(slots=True, eq=False)
class Scan:
    """Findings of a scan of one table; `faults` counts by kind, `first_location_by_fault` is where each was first seen.

    `absent`: records that answer nothing, for entities with an answer in another table of their directory.

    For lists: `slots` int64[items] counts how often an item is in one, `empty` the lists without an item, `counts`
    int64[K + 1] the lists by length.
    """

    table: Table
    slots: NDArray[np.int64]
    counts: NDArray[np.int64]
    records: int = 0
    absent: int = 0
    empty: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    first_location_by_fault: dict[str, str] = field(default_factory=dict)
    fingerprints: FingerprintFile = field(default_factory=FingerprintFile)

    def note(self, kind: str, faults: Any, where: str) -> None:
        """Count what is bad: bool[n] of a chunk's records, or a number of cases."""
        count = int(np.count_nonzero(faults)) if isinstance(faults, np.ndarray) else int(faults)
        if count:
            first = (
                f", record {int(np.argmax(faults))} of the chunk"
                if isinstance(faults, np.ndarray)
                else ""
            )
            self.faults[kind] += count
            self.first_location_by_fault.setdefault(kind, f"{where}{first}")


def depth_of(width: int, items: int) -> int:
    """Slots of a list that are compared: 20, fewer where a list would hold most of a small catalogue anyway."""
    return max(1, min(width, 20, items // 8))


def scan_table(root: Path, manifest: Manifest, table: Table) -> Scan:
    """Read all page files of a table; memory stays at a chunk, whatever the number of records."""
    items = manifest.items.count
    scan = Scan(
        table,
        np.zeros(items, np.int64),
        np.zeros(table.layout.width + 1, np.int64),
        fingerprints=FingerprintFile(root),
    )
    for part in table.parts:
        _part(root, manifest, part, scan)
    return scan


def read_records(
    root: Path, table: Table, parts: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[Any]:
    """Records at `positions` within `parts`, from the page files."""
    records = np.zeros(len(parts), table.layout.dtype)
    for part in np.unique(parts).tolist():
        rows = np.flatnonzero(parts == part)
        file = np.memmap(root / table.parts[part].file.path, table.layout.dtype, "r")
        records[rows] = file[positions[rows]]
    return records


def _part(root: Path, manifest: Manifest, part: TablePart, scan: Scan) -> None:
    table, path = scan.table, root / part.file.path
    size, sums = table.layout.size_bytes, np.fromfile(root / part.sums.path, "<u8")
    found_bytes = path.stat().st_size
    if found_bytes != part.count * size or part.pages != -(-part.count // table.records_per_page):
        scan.note("pages", 1, f"{part.file.path}: {found_bytes} bytes for {part.count} records")
        return
    if len(sums) != part.pages:
        scan.note("sums", 1, f"{part.sums.path}: {len(sums)} checksums for {part.pages} pages")
        return
    if not part.count:
        return
    data = np.memmap(path, np.uint8, "r")
    pages_at_once = max(1, CHUNK_BYTES // table.page_bytes)
    for first in range(0, part.pages, pages_at_once):
        chunk = np.array(
            data[first * table.page_bytes : (first + pages_at_once) * table.page_bytes]
        )
        for page, start in enumerate(range(0, len(chunk), table.page_bytes), first):
            if xxhash.xxh3_64_intdigest(chunk[start : start + table.page_bytes].data) != int(
                sums[page]
            ):
                scan.note("sums", 1, f"{part.file.path}, page {page}")
        _records(
            chunk.view(table.layout.dtype), manifest, f"{part.file.path} from page {first}", scan
        )


def _records(records: NDArray[Any], manifest: Manifest, where: str, scan: Scan) -> None:
    layout = scan.table.layout
    scan.records += len(records)
    scan.fingerprints.append(records["fingerprint"])
    if (is_absent := records["flags"] == ABSENT).any():
        scan.note("headers", is_absent & (records["count"] != 0), f"{where}: count")
        scan.absent += int(is_absent.sum())
        records = records[~is_absent]
    flags, counts = records["flags"], records["count"].astype(np.int64)
    scan.note("headers", ~are_nightly(flags), f"{where}: flags")
    scan.note(
        "headers", records["scored_at"] != manifest.data_until, f"{where}: scored at another cut"
    )
    numbers = records["numbers"]
    finite = np.isfinite(numbers).all(axis=1)
    if layout.precision == "i1":
        finite &= np.isfinite(records["scale"])
    scan.note("finite", ~finite, where)
    if layout.kind != "topk":
        scan.note("headers", counts != layout.width, f"{where}: count")
        return
    items, used = records["items"], np.arange(layout.width) < counts[:, None]
    scan.note("headers", counts > layout.width, f"{where}: count")
    scan.note("slots", ((items != NO_ITEM) != used).any(axis=1), f"{where}: unused slots")
    scan.note("ordinals", ((items >= manifest.items.count) & used).any(axis=1), where)
    ordered = np.sort(items, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_ITEM)
    scan.note("twice", twice.any(axis=1), where)
    # Records of one exponent: the stored numbers sort as the scores do.
    rising = (numbers[:, 1:] > numbers[:, :-1]) & used[:, 1:]
    scan.note("order", rising.any(axis=1), where)
    scan.empty += int((counts == 0).sum())
    scan.counts += np.bincount(counts.clip(0, layout.width), minlength=layout.width + 1)
    used_items = items[used]
    scan.slots += np.bincount(used_items[used_items < len(scan.slots)], minlength=len(scan.slots))
