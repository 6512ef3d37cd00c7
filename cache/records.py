"""Records: the one description of their bytes, the rounding of their numbers, and the codec made from both. Pure.

All that knows a record's bytes follows `Layout` and the header here, the C sources included.
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
"""Bits of the low nibble, of all records or of each."""

RECORD_FORMAT: Final = FORMATS[RECORD].written
"""Format of a record, the high nibble of its flags: 1 to 14."""

HEADER_BYTES: Final = 16
"""Size of the header; the payload follows at once."""

FORMAT_SHIFT: Final = 4

FLAG_LIVE: Final = 1
"""Flag of a record that live inference wrote."""

FLAG_APPROXIMATE: Final = 2
"""Flag of a live record whose list was found by the index, where a night would have searched exactly."""

BIT_BY_ANSWER_FLAG: Final[dict[str, int]] = {"approximate": FLAG_APPROXIMATE}
"""Bits that an answer reports, by field; a record with any of them is never rendered unparsed."""

NIGHTLY_FLAGS: Final = RECORD_FORMAT << FORMAT_SHIFT
"""Flags of a record that the night wrote."""

WRITER_BITS: Final = 0xF << FORMAT_SHIFT | FLAG_LIVE
"""Mask of the flag bits for format and writer: under it, every record of a night equals NIGHTLY_FLAGS."""

ABSENT_FLAGS: Final = 0xF0
"""Flags of a record without an answer: a format that no reader takes for an answer."""

NO_ITEM: Final = 0xFFFFFFFF
"""Ordinal that marks an unused slot of a top-K record; never leaves the service."""

NUMBER_DTYPE_BY_PRECISION: Final[dict[Precision, np.dtype[Any]]] = {
    name: np.dtype(name).newbyteorder("<") for name in get_args(Precision)
}

ORDINAL_DTYPE: Final = np.dtype("<u4")
SCALE_DTYPE: Final = np.dtype("<f4")

NUMBER_STEP_BY_PRECISION: Final[dict[Precision, float]] = {"f2": 2.0**-10, "f4": 2.0**-22, "i1": 1 / 127}
"""Spacing of stored numbers, as a share of the largest of their record."""

SAFE_EXPONENT: Final = 111
"""Greatest exponent at which any float16 times its record's power of two stays within float32."""

DIGEST_BYTES: Final = 16
"""Size of the digest of an input, which follows the record in an overlay."""

_TOP_EXPONENT: Final = 15
"""Exponent of the largest number: float16 holds up to 65504 < 2**16, so a record's largest is in [2**14, 2**15)."""

_FLOAT32_EXPONENT_MAX: Final = 127
"""Greatest power of two (exponent) in float32."""

_INT8_STEPS: Final = np.float32(127)
"""Steps of int8 from zero to the largest of a record."""


class HeaderField(NamedTuple):
    """A number in the header: numpy's dtype, struct's code, and the offset in bytes."""

    name: str
    dtype: str
    code: str
    offset: int


HEADER_FIELDS: Final = (
    HeaderField("fingerprint", "<u8", "Q", 0),  # of the id, see `cache.format.ids`
    HeaderField("scored_at", "<u4", "I", 8),  # Unix seconds
    HeaderField("count", "<u2", "H", 12),  # numbers that are used
    HeaderField("flags", "u1", "B", 14),  # high nibble: the format; low nibble: FLAG_...
    HeaderField("exponent", "i1", "b", 15),  # power of two of float16 numbers
)

HEADER_DTYPE: Final = np.dtype([(header_field.name, header_field.dtype) for header_field in HEADER_FIELDS])

OFFSET_BY_FIELD: Final = {header_field.name: header_field.offset for header_field in HEADER_FIELDS} | {
    "payload": HEADER_BYTES,
    "format_shift": FORMAT_SHIFT,
}
"""Offsets by name, in bytes, and the shift of the format in the flags, which the C sources have to agree with."""

unpack_header = struct.Struct("<" + "".join(header_field.code for header_field in HEADER_FIELDS)).unpack_from
"""Function from a record to the header's numbers, in their order."""

_FLAGS_OFFSET: Final = OFFSET_BY_FIELD["flags"]
_FINGERPRINT_SLICE: Final = slice(OFFSET_BY_FIELD["fingerprint"], OFFSET_BY_FIELD["fingerprint"] + 8)


@dataclass(frozen=True)  # no slots: what follows from the fields is kept beside them
class Layout:
    """Shape and precision of a table's records; `width` is K, the dimensions or the number of labels.

    Half-precision numbers are stored as value * 2**-exponent, so that the largest of a record uses the upper end of
    float16: 11 bits each, fewer for those below 2**-28 of the largest.
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
            raise ConfigError(f"a record holds 1 to 65535 numbers, not {self.width}", width=self.width)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy structured dtype, packed and little-endian."""
        return _layout_dtype(self.kind, self.width, self.precision)

    @functools.cached_property
    def size_bytes(self) -> int:
        """Bytes per record."""
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
    """The fingerprint, without decoding the rest."""
    return int.from_bytes(record[_FINGERPRINT_SLICE], "little")


def peek_format(record: bytes | memoryview) -> int:
    """The record's format number."""
    return record[_FLAGS_OFFSET] >> FORMAT_SHIFT


def is_live(record: bytes | memoryview) -> bool:
    """True if live inference wrote the record."""
    return bool(record[_FLAGS_OFFSET] & FLAG_LIVE)


def are_nightly(flags: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Mask bool[n] of the records that the night wrote in this program's format, from their flags[n]."""
    nightly_mask: NDArray[np.bool_] = flags & WRITER_BITS == NIGHTLY_FLAGS
    return nightly_mask


def plain_answer_bits() -> int:
    """Bits of the flags in which a record that may be rendered unread equals NIGHTLY_FLAGS."""
    return functools.reduce(operator.or_, BIT_BY_ANSWER_FLAG.values(), WRITER_BITS)


def is_answer_of(record: bytes | memoryview, fingerprint: int) -> bool:
    """True if the record is of the format that this program reads, and of the entity with that fingerprint."""
    return (
        record[_FLAGS_OFFSET] >> FORMAT_SHIFT == RECORD_FORMAT
        and int.from_bytes(record[_FINGERPRINT_SLICE], "little") == fingerprint
    )


def are_answers_of(records: NDArray[Any], fingerprints: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Mask bool[n] of `is_answer_of`, from records[n] and as many fingerprints."""
    readable_mask = records["flags"] >> FORMAT_SHIFT == RECORD_FORMAT
    sound_mask: NDArray[np.bool_] = readable_mask & (records["fingerprint"] == fingerprints)
    return sound_mask


def is_absent(record: bytes | memoryview, fingerprint: int) -> bool:
    """True if this is the record of that entity and marks it as without an answer."""
    return (
        len(record) > _FLAGS_OFFSET
        and record[_FLAGS_OFFSET] == ABSENT_FLAGS
        and peek_fingerprint(record) == fingerprint
    )


def quantize(layout: Layout, records: NDArray[Any], numbers: NDArray[np.float32]) -> None:
    """Write numbers float32[n, width] into records[n]; raise UnfitValue for a number that the precision cannot hold.

    Of a vector some numbers may become zero, as long as one does not: that is rounding, far under the precision of
    the others.
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


def unfit_rows(layout: Layout, numbers: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Mask bool[n] of the rows that `quantize` refuses with UnfitValue for this layout."""
    finite_mask = np.asarray(np.isfinite(numbers).all(axis=1))
    unfit_mask: NDArray[np.bool_] = ~finite_mask
    if layout.precision == "f4":
        return unfit_mask
    finite_numbers = np.where(finite_mask[:, None], numbers, 0)
    largest_numbers = np.abs(finite_numbers).max(axis=1, initial=0)
    if layout.precision == "i1":
        unfit_mask |= (largest_numbers / _INT8_STEPS == 0) & finite_numbers.any(axis=1)
        return unfit_mask
    exponents = np.frexp(largest_numbers)[1] - _TOP_EXPONENT
    beyond_mask = (exponents < -128) | (exponents > 127)
    halves = _halves(finite_numbers, np.where(beyond_mask, 0, -exponents))
    unfit_mask |= beyond_mask | _underflow_mask(layout, finite_numbers, halves).any(axis=1)
    return unfit_mask


def dequantize(layout: Layout, records: NDArray[Any], dtype: type[np.floating[Any]]) -> NDArray[Any]:
    """Numbers[n, width] of records[n], unused slots included, in float32 or float64."""
    numbers = records["numbers"].astype(dtype)
    if layout.precision == "f2":
        numbers *= np.ldexp(dtype(1), records["exponent"].astype(np.int32))[:, None]
    elif layout.precision == "i1":
        numbers *= records["scale"].astype(dtype)[:, None]
    return numbers


def _check_finite(numbers: NDArray[np.float32]) -> None:
    if not np.isfinite(numbers).all():
        row = int(np.flatnonzero(~np.isfinite(numbers).all(axis=1))[0])
        raise UnfitValue(f"row {row} holds a non-finite number", rule="non_finite", row=row)


def _store_as_float16(layout: Layout, records: NDArray[Any], numbers: NDArray[np.float32]) -> None:
    # frexp: largest = fraction * 2**e with fraction in [0.5, 1), so value * 2**(15 - e) lies in [2**14, 2**15).
    exponents = np.frexp(np.abs(numbers).max(axis=1, initial=0))[1] - _TOP_EXPONENT
    if exponents.size and (int(exponents.min()) < -128 or int(exponents.max()) > 127):
        raise UnfitValue("a record's numbers need an exponent outside -128..127", rule="overflow")
    halves = _halves(numbers, -exponents)
    # Of truths: numbers are counted slowly, and hold the interpreter's lock.
    if np.count_nonzero(halves.view(np.uint16) & 0x7FFF != 0) != np.count_nonzero(numbers != 0):
        _check_no_underflow(layout, numbers, halves)
    records["exponent"] = exponents
    records["numbers"] = halves


def _halves(numbers: NDArray[np.float32], exponents: NDArray[np.int32]) -> NDArray[np.float16]:
    """`numbers * 2**powers` per row, rounded once: to float16.

    The product is exact in float32 where the power itself is one: all that falls below its normal numbers is zero in
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
            f"row {row} spans more than float16 holds: a non-zero number would become zero (store it as f4)",
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
    items: NDArray[np.uint32],
    scores: NDArray[np.float32],
    scored_at: int,
    *,
    flags: Flags = 0,
) -> NDArray[Any]:
    """Records[n] from ordinals uint32[n, m <= K] (NO_ITEM = unused, at the end) and their scores float32[n, m]."""
    records = _blank_records(layout, fingerprints, scored_at, flags)
    used_mask = items != NO_ITEM
    records["items"] = NO_ITEM
    records["items"][:, : items.shape[1]] = items
    records["count"] = used_mask.sum(axis=1)
    numbers = np.zeros((len(items), layout.width), np.float32)
    numbers[:, : items.shape[1]] = np.where(used_mask, scores, 0)
    quantize(layout, records, numbers)
    return records


def encode_numbers(
    layout: Layout, fingerprints: NDArray[np.uint64], numbers: NDArray[np.float32], scored_at: int, *, flags: Flags = 0
) -> NDArray[Any]:
    """Records[n] from vectors float32[n, dims], or from one number per label, float32[n, labels].

    A component of a vector below half of the smallest number of its record's range (2**-39 of the largest) becomes
    zero: that is rounding, far under the precision of the others. A vector whose numbers would *all* vanish is refused.
    """
    records = _blank_records(layout, fingerprints, scored_at, flags)
    records["count"] = layout.width
    quantize(layout, records, numbers)
    return records


def absent_records(layout: Layout, fingerprints: NDArray[np.uint64], scored_at: int) -> NDArray[Any]:
    """Records[n] of entities that have one in another table of their directory, but no answer in this one."""
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
    """Decoded record; arrays hold only used slots, `items` is None unless it is a top-K record."""

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


def decode_record(layout: Layout, record: bytes | memoryview, item_count: int | None = None) -> Record:
    """The record in `record`; raises CorruptArtefact for a wrong length, format or count and for damaged numbers.

    Who knows the catalogue says how many items it has: no ordinal may reach that.
    """
    if len(record) != layout.size_bytes:
        raise CorruptArtefact(f"a record has {layout.size_bytes} bytes, this one {len(record)}", size_bytes=len(record))
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
        items = np.frombuffer(record, ORDINAL_DTYPE, layout.width, HEADER_BYTES)[:count]
        if count and item_count is not None and np.maximum.reduce(items) >= item_count:
            raise CorruptArtefact(f"a record names item {int(items.max())} of {item_count}", rule="ordinal")
    return Record(fingerprint=fingerprint, scored_at=scored_at, flags=flags, numbers=numbers, items=items)


def _numbers_of(layout: Layout, record: bytes | memoryview, count: int, exponent: int) -> NDArray[np.float32]:
    """The first `count` numbers of one record, float32[count]; infinite where they exceed float32."""
    width, precision = layout.width, layout.precision
    number_dtype = NUMBER_DTYPE_BY_PRECISION[precision]
    numbers_offset = len(record) - width * number_dtype.itemsize
    numbers = np.frombuffer(record, number_dtype, width, numbers_offset)[:count].astype(np.float32)
    if precision == "f2" and exponent <= SAFE_EXPONENT:
        return np.ldexp(numbers, exponent)
    if precision == "f4":
        return numbers
    with np.errstate(over="ignore", invalid="ignore"):  # who asked judges what overflows
        if precision == "f2":
            return np.ldexp(numbers, exponent)
        scaled_numbers: NDArray[np.float32] = numbers * np.frombuffer(record, SCALE_DTYPE, 1, HEADER_BYTES)[0]
        return scaled_numbers


def pack_overlay(record: bytes, digest: bytes) -> bytes:
    """An overlay value: the record, then the 16-byte digest of the input it was computed from."""
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"an input digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    return record + digest


def unpack_overlay(layout: Layout, overlay_value: bytes) -> tuple[bytes, bytes] | None:
    """(record, input digest), or None when the value is not an overlay of this layout."""
    if len(overlay_value) != layout.size_bytes + DIGEST_BYTES:
        return None
    return overlay_value[: layout.size_bytes], overlay_value[layout.size_bytes :]
