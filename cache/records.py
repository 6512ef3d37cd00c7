"""Records: the only description of their bytes, the rounding of their numbers, and the codec for both. Pure.

All other code, the C sources included, takes the byte layout from `Layout` and the header here.
"""

import functools
import operator
import struct
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from cache.errors import ConfigError, CorruptArtefact, UnfitValue
from cache.formats import FORMATS, RECORD

Kind = Literal["topk", "vector", "value"]
Precision = Literal["f2", "f4", "i1"]

Flags = int | NDArray[np.uint8]
"""Flag bits (the low nibble): of one record or an array of them."""

RECORD_FORMAT: Final = FORMATS[RECORD].written_version
"""Format of a record, the high nibble of its flags: 1 to 14."""

HEADER_BYTES: Final = 16
"""Size of the header in bytes; the payload follows directly."""

FORMAT_SHIFT: Final = 4

FLAG_LIVE: Final = 1
"""Flag of a record written by live inference."""

FLAG_APPROXIMATE: Final = 2
"""Flag of a live record whose list came from the index, where a night would search exactly."""

BIT_BY_ANSWER_FLAG: Final[dict[str, int]] = {"approximate": FLAG_APPROXIMATE}
"""Bits that answers report, by answer field; a record with any of them is decoded before it is rendered."""

NIGHTLY_FLAGS: Final = RECORD_FORMAT << FORMAT_SHIFT
"""Flags of a record written by the night."""

WRITER_BITS: Final = 0xF << FORMAT_SHIFT | FLAG_LIVE
"""Mask of the flag bits for format and writer; all nightly records equal NIGHTLY_FLAGS under this mask."""

ABSENT_FLAGS: Final = 0xF0
"""Flags of a record without an answer: readers do not accept its format as an answer."""

NO_ITEM: Final = 0xFFFFFFFF
"""Ordinal of an unused slot in a top-K record; never part of an answer."""

NUMBER_DTYPE_BY_PRECISION: Final[dict[Precision, np.dtype[Any]]] = {
    name: np.dtype(name).newbyteorder("<") for name in get_args(Precision)
}

ORDINAL_DTYPE: Final = np.dtype("<u4")
SCALE_DTYPE: Final = np.dtype("<f4")

NUMBER_STEP_BY_PRECISION: Final[dict[Precision, float]] = {"f2": 2.0**-10, "f4": 2.0**-22, "i1": 1 / 127}
"""Step between stored numbers, as a share of the largest number in the record."""

SAFE_EXPONENT: Final = 111
"""Largest exponent with which every float16 times the record's power of two fits float32."""

DIGEST_BYTES: Final = 16
"""Size in bytes of an input's digest, which follows the record in an overlay."""

_TOP_EXPONENT: Final = 15
"""Exponent of the largest number: float16 holds up to 65504 < 2**16, so a record's largest number is scaled to [2**14,
2**15)."""

_FLOAT32_EXPONENT_MAX: Final = 127
"""Largest exponent of a power of two in float32."""

_INT8_STEPS: Final = np.float32(127)
"""Number of int8 steps from zero to the largest number of a record."""


class HeaderField(NamedTuple):
    """Number in the header: numpy's dtype, struct's code, and the offset in bytes."""

    name: str
    dtype: str
    struct_code: str
    byte_offset: int


HEADER_FIELDS: Final = (
    HeaderField("fingerprint", "<u8", "Q", 0),  # of the id, see `cache.format.ids.fingerprint`
    HeaderField("scored_at", "<u4", "I", 8),  # Unix seconds
    HeaderField("count", "<u2", "H", 12),  # number of used slots
    HeaderField("flags", "u1", "B", 14),  # high nibble: the format; low nibble: FLAG_...
    HeaderField("exponent", "i1", "b", 15),  # exponent of the power of two by which float16 numbers are multiplied
)

HEADER_DTYPE: Final = np.dtype([(header_field.name, header_field.dtype) for header_field in HEADER_FIELDS])

OFFSET_BY_FIELD: Final = {header_field.name: header_field.byte_offset for header_field in HEADER_FIELDS} | {
    "payload": HEADER_BYTES,
    "format_shift": FORMAT_SHIFT,
}
"""Offsets in bytes by field name, and the shift of the format in the flags; the C sources must have the same
numbers."""

unpack_header = struct.Struct("<" + "".join(header_field.struct_code for header_field in HEADER_FIELDS)).unpack_from
"""Function from a record to the header's numbers, in the order of the fields."""

_FLAGS_OFFSET: Final = OFFSET_BY_FIELD["flags"]
_FINGERPRINT_SLICE: Final = slice(OFFSET_BY_FIELD["fingerprint"], OFFSET_BY_FIELD["fingerprint"] + 8)


@dataclass(frozen=True)  # no slots: cached properties need a __dict__
class Layout:
    """Shape and precision of a table's records; `width` is K, the number of dimensions or the number of labels.

    Half-precision numbers are stored as value * 2**-exponent, so that the largest number of a record uses the upper end
    of float16: 11 bits per number, fewer for numbers below 2**-28 of the largest.
    """

    kind: Kind
    width: int
    precision: Precision

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.precision not in get_args(Precision):
            raise ConfigError(f"unknown record layout {self.kind}/{self.precision}")
        if self.precision == "i1" and self.kind != "vector":
            raise ConfigError(f"a {self.kind} record is stored as f2 or f4, not i1")
        if not 1 <= self.width <= 65535:
            raise ConfigError(f"a record must have 1 to 65535 numbers, not {self.width}", width=self.width)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy structured dtype, packed and little-endian."""
        return _layout_dtype(self.kind, self.width, self.precision)

    @functools.cached_property
    def size_bytes(self) -> int:
        """Size of a record in bytes."""
        return self.dtype.itemsize


@functools.cache
def _layout_dtype(kind: Kind, width: int, precision: Precision) -> np.dtype[Any]:
    header: list[Any] = HEADER_DTYPE.descr
    leading_fields: list[Any] = []
    if kind == "topk":
        leading_fields = [("items", ORDINAL_DTYPE, (width,))]
    elif precision == "i1":
        leading_fields = [("scale", SCALE_DTYPE)]
    return np.dtype([*header, *leading_fields, ("numbers", NUMBER_DTYPE_BY_PRECISION[precision], (width,))])


def peek_fingerprint(record: bytes | memoryview) -> int:
    """Return the fingerprint without decoding the rest of the record."""
    return int.from_bytes(record[_FINGERPRINT_SLICE], "little")


def peek_format(record: bytes | memoryview) -> int:
    """Return the record's format number."""
    return record[_FLAGS_OFFSET] >> FORMAT_SHIFT


def is_live(record: bytes | memoryview) -> bool:
    """Return whether live inference wrote the record."""
    return bool(record[_FLAGS_OFFSET] & FLAG_LIVE)


def are_nightly(flags: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return bool[n]: which records the night wrote in this program's format, from their flags[n]."""
    nightly_mask: NDArray[np.bool_] = flags & WRITER_BITS == NIGHTLY_FLAGS
    return nightly_mask


def plain_answer_bits() -> int:
    """Return the flag bits in which a record must equal NIGHTLY_FLAGS to be rendered without decoding."""
    return functools.reduce(operator.or_, BIT_BY_ANSWER_FLAG.values(), WRITER_BITS)


def is_answer_of(record: bytes | memoryview, fingerprint: int) -> bool:
    """Return whether the record has the current format and belongs to the entity with that fingerprint."""
    return (
        record[_FLAGS_OFFSET] >> FORMAT_SHIFT == RECORD_FORMAT
        and int.from_bytes(record[_FINGERPRINT_SLICE], "little") == fingerprint
    )


def are_answers_of(records: NDArray[Any], fingerprints: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return bool[n], `is_answer_of` for records[n] and their fingerprints."""
    readable_mask = records["flags"] >> FORMAT_SHIFT == RECORD_FORMAT
    sound_mask: NDArray[np.bool_] = readable_mask & (records["fingerprint"] == fingerprints)
    return sound_mask


def is_absent(record: bytes | memoryview, fingerprint: int) -> bool:
    """Return whether the record belongs to that entity and marks it as without an answer."""
    return (
        len(record) > _FLAGS_OFFSET
        and record[_FLAGS_OFFSET] == ABSENT_FLAGS
        and peek_fingerprint(record) == fingerprint
    )


def quantize(layout: Layout, records: NDArray[Any], numbers: NDArray[np.float32]) -> None:
    """Write numbers float32[n, width] into records[n]; raise UnfitValue for a number that the precision cannot hold.

    In a vector some numbers may become zero, unless all do: that is rounding, far below the precision of the others.
    """
    _check_finite(numbers)
    if layout.precision == "f4":
        records["numbers"] = numbers
    elif layout.precision == "f2":
        _store_as_float16(layout, records, numbers)
    else:
        scale = np.abs(numbers).max(axis=1, initial=0) / _INT8_STEPS
        if np.any((scale == 0) & numbers.any(axis=1)):
            raise UnfitValue("a vector is too small for its int8 scale", rule="underflow")
        records["scale"] = scale
        records["numbers"] = np.rint(numbers / np.where(scale == 0, 1, scale)[:, None])


def unfit_row_mask(layout: Layout, numbers: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return bool[n]: the rows for which `quantize` raises UnfitValue with this layout."""
    finite_mask = np.asarray(np.isfinite(numbers).all(axis=1))
    unfit_row_mask: NDArray[np.bool_] = ~finite_mask
    if layout.precision == "f4":
        return unfit_row_mask
    finite_numbers = np.where(finite_mask[:, None], numbers, 0)
    largest_numbers = np.abs(finite_numbers).max(axis=1, initial=0)
    if layout.precision == "i1":
        unfit_row_mask |= (largest_numbers / _INT8_STEPS == 0) & finite_numbers.any(axis=1)
        return unfit_row_mask
    exponents = np.frexp(largest_numbers)[1] - _TOP_EXPONENT
    beyond_mask = (exponents < -128) | (exponents > 127)
    halves = _halves(finite_numbers, np.where(beyond_mask, 0, -exponents))
    unfit_row_mask |= beyond_mask | _underflow_mask(layout, finite_numbers, halves).any(axis=1)
    return unfit_row_mask


def dequantize(layout: Layout, records: NDArray[Any], number_dtype: type[np.floating[Any]]) -> NDArray[Any]:
    """Return the numbers[n, width] of records[n], unused slots included, in float32 or float64."""
    numbers = records["numbers"].astype(number_dtype)
    if layout.precision == "f2":
        numbers *= np.ldexp(number_dtype(1), records["exponent"].astype(np.int32))[:, None]
    elif layout.precision == "i1":
        numbers *= records["scale"].astype(number_dtype)[:, None]
    return numbers


def _check_finite(numbers: NDArray[np.float32]) -> None:
    if not np.isfinite(numbers).all():
        row = int(np.flatnonzero(~np.isfinite(numbers).all(axis=1))[0])
        raise UnfitValue(f"row {row} holds a non-finite number", rule="non_finite", row=row)


def _store_as_float16(layout: Layout, records: NDArray[Any], numbers: NDArray[np.float32]) -> None:
    # frexp: largest = fraction * 2**e with fraction in [0.5, 1), so value * 2**(15 - e) lies in [2**14, 2**15).
    exponents = np.frexp(np.abs(numbers).max(axis=1, initial=0))[1] - _TOP_EXPONENT
    if exponents.size and (int(exponents.min()) < -128 or int(exponents.max()) > 127):
        raise UnfitValue("a record's numbers would need an exponent outside -128..127", rule="overflow")
    halves = _halves(numbers, -exponents)
    # Count booleans: counting non-zero numbers is slow and holds the interpreter's lock.
    if np.count_nonzero(halves.view(np.uint16) & 0x7FFF != 0) != np.count_nonzero(numbers != 0):
        _check_no_underflow(layout, numbers, halves)
    records["exponent"] = exponents
    records["numbers"] = halves


def _halves(numbers: NDArray[np.float32], exponents: NDArray[np.int32]) -> NDArray[np.float16]:
    """Return `numbers * 2**powers` per row, rounded once, to float16.

    The product is exact in float32 if the power itself fits float32: results below its normal numbers are zero in
    float16 as well.
    """
    if exponents.max(initial=0) <= _FLOAT32_EXPONENT_MAX:
        return (numbers * np.ldexp(np.float32(1), exponents)[:, None]).astype(np.float16)
    return np.ldexp(numbers.astype(np.float64), exponents[:, None]).astype(np.float16)


def _check_no_underflow(layout: Layout, numbers: NDArray[np.float32], halves: NDArray[np.float16]) -> None:
    lost_mask = _underflow_mask(layout, numbers, halves)
    if lost_mask.any():
        row = int(np.flatnonzero(lost_mask.any(axis=1))[0])
        raise UnfitValue(
            f"row {row} spans a larger range than float16 holds: a non-zero number would become zero (store it as f4)",
            rule="underflow",
            row=row,
        )


def _underflow_mask(layout: Layout, numbers: NDArray[np.float32], halves: NDArray[np.float16]) -> NDArray[np.bool_]:
    lost_mask: NDArray[np.bool_] = (halves == 0) & (numbers != 0)
    if layout.kind == "vector":
        lost_mask &= (halves == 0).all(axis=1)[:, None]
    return lost_mask


def encode_topk(
    layout: Layout,
    fingerprints: NDArray[np.uint64],
    item_ordinals: NDArray[np.uint32],
    scores: NDArray[np.float32],
    scored_at: int,
    *,
    flags: Flags = 0,
) -> NDArray[Any]:
    """Encode records[n] from ordinals uint32[n, m <= K] (at the end NO_ITEM: unused) and scores float32[n, m]."""
    records = _blank_records(layout, fingerprints, scored_at, flags)
    used_mask = item_ordinals != NO_ITEM
    records["items"] = NO_ITEM
    records["items"][:, : item_ordinals.shape[1]] = item_ordinals
    records["count"] = used_mask.sum(axis=1)
    numbers = np.zeros((len(item_ordinals), layout.width), np.float32)
    numbers[:, : item_ordinals.shape[1]] = np.where(used_mask, scores, 0)
    quantize(layout, records, numbers)
    return records


def encode_numbers(
    layout: Layout, fingerprints: NDArray[np.uint64], numbers: NDArray[np.float32], scored_at: int, *, flags: Flags = 0
) -> NDArray[Any]:
    """Encode records[n] from vectors float32[n, dims], or from one number per label, float32[n, labels].

    A component of a vector below half of the smallest number in its record's range (2**-39 of the largest) becomes
    zero: that is rounding, far below the precision of the others. Raises UnfitValue for a vector of which *all* numbers
    would become zero.
    """
    records = _blank_records(layout, fingerprints, scored_at, flags)
    records["count"] = layout.width
    quantize(layout, records, numbers)
    return records


def absent_records(layout: Layout, fingerprints: NDArray[np.uint64], scored_at: int) -> NDArray[Any]:
    """Return records[n] for entities that have an answer in another table of their directory, but none in this one."""
    records = _blank_records(layout, fingerprints, scored_at, 0)
    records["flags"] = ABSENT_FLAGS
    if layout.kind == "topk":
        records["items"] = NO_ITEM
    return records


def _blank_records(layout: Layout, fingerprints: NDArray[np.uint64], scored_at: int, flags: Flags) -> NDArray[Any]:
    records = np.zeros(len(fingerprints), layout.dtype)
    records["fingerprint"] = fingerprints
    records["scored_at"] = scored_at
    records["flags"] = NIGHTLY_FLAGS | flags
    return records


class Record(NamedTuple):
    """Decoded record; arrays contain only used slots, `item_ordinals` is None unless it is a top-K record."""

    fingerprint: int
    scored_at: int
    flags: int
    numbers: NDArray[np.float32]
    item_ordinals: NDArray[np.uint32] | None

    @property
    def is_live(self) -> bool:
        """Whether live inference wrote the record."""
        return bool(self.flags & FLAG_LIVE)

    @property
    def answer_flags(self) -> dict[str, bool]:
        """Answer fields that the record's flags set to true."""
        return {name: True for name, bit in BIT_BY_ANSWER_FLAG.items() if self.flags & bit}


def decode_record(layout: Layout, record: bytes | memoryview, item_count: int | None = None) -> Record:
    """Decode a record; raise CorruptArtefact for a wrong size, format or count and for damaged numbers.

    With `item_count`, the number of items in the catalogue, also checks that all ordinals are smaller.
    """
    if len(record) != layout.size_bytes:
        raise CorruptArtefact(
            f"a record must have {layout.size_bytes} bytes, this one has {len(record)}", size_bytes=len(record)
        )
    # Read each field separately: a structured scalar would take longer than all other work here.
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
        items = np.frombuffer(record, ORDINAL_DTYPE, layout.width, HEADER_BYTES)[:count]
        if count and item_count is not None and np.maximum.reduce(items) >= item_count:
            raise CorruptArtefact(f"a record contains item {int(items.max())} of {item_count}", rule="ordinal")
    return Record(fingerprint=fingerprint, scored_at=scored_at, flags=flags, numbers=numbers, item_ordinals=items)


def _numbers_of(layout: Layout, record: bytes | memoryview, number_count: int, exponent: int) -> NDArray[np.float32]:
    """Return the first `number_count` numbers of one record, float32[count]; infinite if they exceed float32."""
    width, precision = layout.width, layout.precision
    number_dtype = NUMBER_DTYPE_BY_PRECISION[precision]
    numbers_offset = len(record) - width * number_dtype.itemsize
    numbers = np.frombuffer(record, number_dtype, width, numbers_offset)[:number_count].astype(np.float32)
    if precision == "f2" and exponent <= SAFE_EXPONENT:
        return np.ldexp(numbers, exponent)
    if precision == "f4":
        return numbers
    with np.errstate(over="ignore", invalid="ignore"):  # callers check for overflow
        if precision == "f2":
            return np.ldexp(numbers, exponent)
        scaled_numbers: NDArray[np.float32] = numbers * np.frombuffer(record, SCALE_DTYPE, 1, HEADER_BYTES)[0]
        return scaled_numbers


def pack_overlay(record: bytes, input_digest: bytes) -> bytes:
    """Return an overlay's value: the record, then the 16-byte digest of the input from which it was computed."""
    if len(input_digest) != DIGEST_BYTES:
        raise ValueError(f"an input digest must have {DIGEST_BYTES} bytes, not {len(input_digest)}")
    return record + input_digest


def unpack_overlay(layout: Layout, overlay_value: bytes) -> tuple[bytes, bytes] | None:
    """Return (record, input digest), or None if the value is not an overlay of this layout."""
    if len(overlay_value) != layout.size_bytes + DIGEST_BYTES:
        return None
    return overlay_value[: layout.size_bytes], overlay_value[layout.size_bytes :]
