"""Codec of records: one entity's prediction as bytes, of a fixed size in each table. Pure."""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from cache.format.records.layout import (
    ABSENT,
    BIT_BY_ANSWER_FLAG,
    FLAG_LIVE,
    FORMAT_SHIFT,
    HEADER_BYTES,
    NIGHTLY,
    NO_ITEM,
    NUMBER,
    ORDINAL,
    RECORD_FORMAT,
    SCALE,
    Layout,
    unpack_header,
)
from cache.format.records.quantization import SAFE_EXPONENT, quantize

DIGEST_BYTES: Final = 16
Flags = int | NDArray[np.uint8]
"""Bits of the low nibble, of all records or of each."""


def encode_topk(
    layout: Layout,
    fingerprints: NDArray[np.uint64],
    items: NDArray[np.uint32],
    scores: NDArray[np.float32],
    scored_at: int,
    *,
    flags: Flags = 0,
) -> NDArray[Any]:
    """Records[n] from ordinals uint32[n, m <= K] (NO_ITEM = unused, at the end) and their scores float32[n, m]."""
    records = _blank(layout, fingerprints, scored_at, flags)
    used = items != NO_ITEM
    records["items"] = NO_ITEM
    records["items"][:, : items.shape[1]] = items
    records["count"] = used.sum(axis=1)
    numbers = np.zeros((len(items), layout.width), np.float32)
    numbers[:, : items.shape[1]] = np.where(used, scores, 0)
    quantize(layout, records, numbers)
    return records


def encode_numbers(
    layout: Layout,
    fingerprints: NDArray[np.uint64],
    numbers: NDArray[np.float32],
    scored_at: int,
    *,
    flags: Flags = 0,
) -> NDArray[Any]:
    """Records[n] from vectors float32[n, dims], or from one number per label, float32[n, labels].

    A component of a vector below half of the smallest number of its record's range (2**-39 of the largest) becomes
    zero: that is rounding, far under the precision of the others. A vector whose numbers would *all* vanish is refused.
    """
    records = _blank(layout, fingerprints, scored_at, flags)
    records["count"] = layout.width
    quantize(layout, records, numbers)
    return records


def absent(layout: Layout, fingerprints: NDArray[np.uint64], scored_at: int) -> NDArray[Any]:
    """Records[n] of entities that have one in another table of their directory, but no answer in this one."""
    records = _blank(layout, fingerprints, scored_at, 0)
    records["flags"] = ABSENT
    if layout.kind == "topk":
        records["items"] = NO_ITEM
    return records


def _blank(
    layout: Layout, fingerprints: NDArray[np.uint64], scored_at: int, flags: Flags
) -> NDArray[Any]:
    records = np.zeros(len(fingerprints), layout.dtype)
    records["fingerprint"] = fingerprints
    records["scored_at"] = scored_at
    records["flags"] = NIGHTLY | flags
    return records


class Record(NamedTuple):
    """Decoded record; arrays hold only what is used, `items` is None unless it is a top-K record."""

    fingerprint: int
    scored_at: int
    flags: int
    numbers: NDArray[np.float32]
    items: NDArray[np.uint32] | None

    @property
    def live(self) -> bool:
        """True if live inference wrote it."""
        return bool(self.flags & FLAG_LIVE)

    @property
    def answer_flags(self) -> dict[str, bool]:
        """Fields of the answer that its flags say are true."""
        return {name: True for name, bit in BIT_BY_ANSWER_FLAG.items() if self.flags & bit}


def decode(layout: Layout, record: bytes | memoryview, item_count: int | None = None) -> Record:
    """The record in `record`; raises CorruptArtefact for a wrong length, format or count and for damaged numbers.

    Who knows the catalogue says how many items it has: no ordinal may reach that.
    """
    if len(record) != layout.size_bytes:
        raise CorruptArtefact(
            f"a record has {layout.size_bytes} bytes, this one {len(record)}",
            size_bytes=len(record),
        )
    # Field by field: a structured scalar costs more than everything else here.
    fingerprint, scored_at, count, flags, exponent = unpack_header(record)
    if flags >> FORMAT_SHIFT != RECORD_FORMAT or count > layout.width:
        raise CorruptArtefact(
            f"a record of format {flags >> FORMAT_SHIFT} with {count} numbers cannot be read",
            format=flags >> FORMAT_SHIFT,
            count=count,
        )
    numbers = _numbers_of(layout, record, count, exponent)
    if not np.logical_and.reduce(np.isfinite(numbers)):
        raise CorruptArtefact("a record holds a number that is not finite", rule="non_finite")
    items = None
    if layout.kind == "topk":
        items = np.frombuffer(record, ORDINAL, layout.width, HEADER_BYTES)[:count]
        if count and item_count is not None and np.maximum.reduce(items) >= item_count:
            raise CorruptArtefact(
                f"a record names item {int(items.max())} of {item_count}", rule="ordinal"
            )
    return Record(
        fingerprint=fingerprint,
        scored_at=scored_at,
        flags=flags,
        numbers=numbers,
        items=items,
    )


def _numbers_of(
    layout: Layout, record: bytes | memoryview, count: int, exponent: int
) -> NDArray[np.float32]:
    """The first `count` numbers of one record, float32[count]; infinite where they exceed float32."""
    width, precision = layout.width, layout.precision
    number_dtype = NUMBER[precision]
    at = len(record) - width * number_dtype.itemsize
    numbers = np.frombuffer(record, number_dtype, width, at)[:count].astype(np.float32)
    if precision == "f2" and exponent <= SAFE_EXPONENT:
        return np.ldexp(numbers, exponent)
    if precision == "f4":
        return numbers
    with np.errstate(over="ignore", invalid="ignore"):  # who asked judges what overflows
        if precision == "f2":
            return np.ldexp(numbers, exponent)
        scaled_numbers: NDArray[np.float32] = (
            numbers * np.frombuffer(record, SCALE, 1, HEADER_BYTES)[0]
        )
        return scaled_numbers


def pack_overlay(record: bytes, digest: bytes) -> bytes:
    """An overlay value: the record, then the 16-byte digest of the input it was computed from."""
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"an input digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    return record + digest


def unpack_overlay(layout: Layout, value: bytes) -> tuple[bytes, bytes] | None:
    """(record, input digest), or None when the value is not an overlay of this layout."""
    if len(value) != layout.size_bytes + DIGEST_BYTES:
        return None
    return value[: layout.size_bytes], value[layout.size_bytes :]
