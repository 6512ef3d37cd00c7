"""Layout of a record's bytes: the header that all have in common, and the payload by kind and precision. Pure.

Half-precision numbers are stored as value * 2**-exponent, so that the largest of a record uses the upper end of
float16: 11 bits each, fewer for those below 2**-28 of the largest.
"""

import functools
import operator
import struct
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from cache.errors import ConfigError
from cache.formats import FORMATS, RECORD

Kind = Literal["topk", "vector", "value"]
Precision = Literal["f2", "f4", "i1"]

RECORD_FORMAT: Final = FORMATS[RECORD].written
"""Format of a record, the high nibble of its flags: 1 to 14."""


class HeaderField(NamedTuple):
    """A number in the header: numpy's dtype, struct's code, and the offset in bytes."""

    name: str
    dtype: str
    code: str
    offset: int


HEADER: Final = (
    HeaderField("fingerprint", "<u8", "Q", 0),  # of the id, see `cache.format.ids`
    HeaderField("scored_at", "<u4", "I", 8),  # Unix seconds
    HeaderField("count", "<u2", "H", 12),  # numbers that are used
    HeaderField("flags", "u1", "B", 14),  # high nibble: the format; low nibble: FLAG_...
    HeaderField("exponent", "i1", "b", 15),  # power of two of float16 numbers
)
HEADER_BYTES: Final = 16
"""Size of the header; the payload follows at once."""
HEADER_DTYPE: Final = np.dtype([(header_field.name, header_field.dtype) for header_field in HEADER])
FORMAT_SHIFT: Final = 4
FLAG_LIVE: Final = 1
"""Flag of a record that live inference wrote."""
NIGHTLY: Final = RECORD_FORMAT << FORMAT_SHIFT
"""Flags of a record that the night wrote."""
WRITER_BITS: Final = 0xF << FORMAT_SHIFT | FLAG_LIVE
"""Bits of the flags in which every record that the night wrote equals NIGHTLY: format, and who wrote it."""
FLAG_APPROXIMATE: Final = 2
"""Flag of a live record whose list was found by the index, where a night would have searched exactly."""
BIT_BY_ANSWER_FLAG: Final[dict[str, int]] = {"approximate": FLAG_APPROXIMATE}
"""Bits that an answer tells of, by the field that is then true; a record with any of them is never rendered unread."""
ABSENT: Final = 0xF0
"""Flags of a record without an answer: a format that no reader takes for an answer."""
NO_ITEM: Final = 0xFFFFFFFF
"""Ordinal that marks an unused slot of a top-K record; never leaves the service."""

NUMBER: Final[dict[Precision, np.dtype[Any]]] = {
    name: np.dtype(name).newbyteorder("<") for name in get_args(Precision)
}
ORDINAL: Final = np.dtype("<u4")
SCALE: Final = np.dtype("<f4")
OFFSETS: Final = {header_field.name: header_field.offset for header_field in HEADER} | {
    "payload": HEADER_BYTES,
    "format_shift": FORMAT_SHIFT,
}
"""Offsets by name, in bytes, and the shift of the format in the flags: what the C sources have to agree with."""

unpack_header = struct.Struct(
    "<" + "".join(header_field.code for header_field in HEADER)
).unpack_from
"""Function from a record to the header's numbers, in their order."""
_FLAGS_AT: Final = OFFSETS["flags"]
_FINGERPRINT: Final = slice(OFFSETS["fingerprint"], OFFSETS["fingerprint"] + 8)


@dataclass(frozen=True)  # no slots: what follows from the fields is kept beside them
class Layout:
    """Shape and precision of a table's records; `width` is K, the dimensions or the number of labels."""

    kind: Kind
    width: int
    precision: Precision

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.precision not in get_args(Precision):
            raise ConfigError(f"unknown record layout {self.kind}/{self.precision}")
        if self.precision == "i1" and self.kind != "vector":
            raise ConfigError(f"a {self.kind} record is stored as f2 or f4, not i1")
        if not 1 <= self.width <= 65535:
            raise ConfigError(
                f"a record holds 1 to 65535 numbers, not {self.width}", width=self.width
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy structured dtype, packed and little-endian."""
        return _dtype(self.kind, self.width, self.precision)

    @functools.cached_property
    def size_bytes(self) -> int:
        """Bytes per record."""
        return self.dtype.itemsize


@functools.cache
def _dtype(kind: Kind, width: int, precision: Precision) -> np.dtype[Any]:
    header: list[Any] = HEADER_DTYPE.descr
    leading_fields: list[Any] = []
    if kind == "topk":
        leading_fields = [("items", ORDINAL, (width,))]
    elif precision == "i1":
        leading_fields = [("scale", SCALE)]
    return np.dtype([*header, *leading_fields, ("numbers", NUMBER[precision], (width,))])


def peek_fingerprint(record: bytes | memoryview) -> int:
    """The fingerprint, without decoding the rest."""
    return int.from_bytes(record[_FINGERPRINT], "little")


def peek_format(record: bytes | memoryview) -> int:
    """The record's format number."""
    return record[_FLAGS_AT] >> FORMAT_SHIFT


def is_live(record: bytes | memoryview) -> bool:
    """True if live inference wrote the record."""
    return bool(record[_FLAGS_AT] & FLAG_LIVE)


def are_nightly(flags: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Mask bool[n] of the records that the night wrote in this program's format, from their flags[n]."""
    is_nightly: NDArray[np.bool_] = flags & WRITER_BITS == NIGHTLY
    return is_nightly


def plain_bits() -> int:
    """Bits of the flags in which a record that may be rendered unread equals NIGHTLY."""
    return functools.reduce(operator.or_, BIT_BY_ANSWER_FLAG.values(), WRITER_BITS)


def is_answer_of(record: bytes | memoryview, fingerprint: int) -> bool:
    """True if the record is of the format that this program reads, and of the entity with that fingerprint."""
    return (
        record[_FLAGS_AT] >> FORMAT_SHIFT == RECORD_FORMAT
        and int.from_bytes(record[_FINGERPRINT], "little") == fingerprint
    )


def are_answers_of(records: NDArray[Any], fingerprints: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Mask bool[n] of `is_answer_of`, from records[n] and as many fingerprints."""
    is_read = records["flags"] >> FORMAT_SHIFT == RECORD_FORMAT
    sound: NDArray[np.bool_] = is_read & (records["fingerprint"] == fingerprints)
    return sound


def is_absent(record: bytes | memoryview, fingerprint: int) -> bool:
    """True if this is the record of that entity and marks it as without an answer."""
    return (
        len(record) > _FLAGS_AT
        and record[_FLAGS_AT] == ABSENT
        and peek_fingerprint(record) == fingerprint
    )
