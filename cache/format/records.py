"""Fixed-size records: one entity's prediction as bytes. Pure.

Every record starts with the same 16 bytes: fingerprint of the id (u64), scored-at (u32, Unix seconds), count (u16),
flags (u8: high nibble the format, bit 0 set when live inference wrote it), exponent (i8). Half-precision numbers are
stored as value * 2**-exponent, so that the largest of a record uses the upper end of float16: 11 bits each, fewer for
those below 2**-28 of the largest.
"""

import functools
import struct
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from cache.errors import ConfigError, CorruptArtefact, UnfitValue
from cache.format.keys import FORMAT

Kind = Literal["topk", "vector", "value"]
Precision = Literal["f2", "f4", "i1"]

NO_ITEM = 0xFFFFFFFF
"""Ordinal that marks an unused slot of a top-K record; never leaves the service."""

FLAG_LIVE = 1
ABSENT = 0xF0
"""Flags of a record without an answer: a format that no reader takes for an answer."""
_ABSENT = bytes([ABSENT])
DIGEST_BYTES = 16
_TOP_EXPONENT = (
    15  # float16 holds up to 65504 < 2**16, so a record's largest number lies in [2**14, 2**15)
)
_POWER_MAX = 127
"""Greatest power of two (exponent) in float32."""
SAFE_EXPONENT = 111
"""Greatest exponent at which any float16 times its record's power of two stays within float32."""

_HEADER: list[Any] = [
    ("fingerprint", "<u8"),
    ("scored_at", "<u4"),
    ("count", "<u2"),
    ("flags", "u1"),
    ("exponent", "i1"),
]
_UNPACK_HEADER = struct.Struct("<QIHBb").unpack_from
_HEADER_BYTES = 16
_ORDINAL = np.dtype("<u4")
_NUMBER: dict[str, np.dtype[Any]] = {name: np.dtype(f"<{name}") for name in ("f2", "f4", "i1")}


@dataclass(frozen=True, slots=True)
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

    @property
    def size_bytes(self) -> int:
        """Bytes per record."""
        return self.dtype.itemsize

    def to_json(self) -> dict[str, object]:
        """JSON object of the layout, as in the manifest."""
        return {"kind": self.kind, "width": self.width, "precision": self.precision}


@functools.cache
def _dtype(kind: Kind, width: int, precision: Precision) -> np.dtype[Any]:
    number = {"f2": "<f2", "f4": "<f4", "i1": "i1"}[precision]
    match kind:
        case "topk":
            return np.dtype([*_HEADER, ("items", "<u4", (width,)), ("numbers", number, (width,))])
        case _ if precision == "i1":
            return np.dtype([*_HEADER, ("scale", "<f4"), ("numbers", number, (width,))])
        case _:
            return np.dtype([*_HEADER, ("numbers", number, (width,))])


def encode_topk(
    layout: Layout,
    fingerprints: NDArray[np.uint64],
    items: NDArray[np.uint32],
    scores: NDArray[np.float32],
    scored_at: int,
    *,
    live: bool = False,
) -> NDArray[Any]:
    """Records[n] from ordinals uint32[n, m <= K] (NO_ITEM = unused, at the end) and their scores float32[n, m]."""
    records = _blank(layout, fingerprints, scored_at, live)
    used = items != NO_ITEM
    records["items"] = NO_ITEM
    records["items"][:, : items.shape[1]] = items
    records["count"] = used.sum(axis=1)
    numbers = np.zeros((len(items), layout.width), np.float32)
    numbers[:, : items.shape[1]] = np.where(used, scores, 0)
    _put_floats(layout, records, numbers, keep_small=True)
    return records


def encode_vectors(
    layout: Layout,
    fingerprints: NDArray[np.uint64],
    vectors: NDArray[np.float32],
    scored_at: int,
    *,
    live: bool = False,
) -> NDArray[Any]:
    """Records[n] from vectors float32[n, dims].

    A component below half of the smallest number of its record's range (2**-39 of the largest) becomes zero: that is
    rounding, far under the precision of the others. A vector whose numbers would *all* vanish is refused.
    """
    records = _blank(layout, fingerprints, scored_at, live)
    records["count"] = layout.width
    if layout.precision != "i1":
        _put_floats(layout, records, vectors, keep_small=False)
        return records
    _check_finite(vectors)
    scale = np.abs(vectors).max(axis=1, initial=0) / np.float32(127)
    if np.any((scale == 0) & vectors.any(axis=1)):
        raise UnfitValue("a vector is too small for its int8 scale", rule="underflow")
    records["scale"] = scale
    records["numbers"] = np.rint(vectors / np.where(scale == 0, 1, scale)[:, None])
    return records


def encode_values(
    layout: Layout,
    fingerprints: NDArray[np.uint64],
    values: NDArray[np.float32],
    scored_at: int,
    *,
    live: bool = False,
) -> NDArray[Any]:
    """Records[n] from one number per label, float32[n, labels]."""
    records = _blank(layout, fingerprints, scored_at, live)
    records["count"] = layout.width
    _put_floats(layout, records, values, keep_small=True)
    return records


def absent(layout: Layout, fingerprints: NDArray[np.uint64], scored_at: int) -> NDArray[Any]:
    """Records[n] of entities that have one in another table of their directory, but no answer in this one."""
    records = _blank(layout, fingerprints, scored_at, False)
    records["flags"] = ABSENT
    if layout.kind == "topk":
        records["items"] = NO_ITEM
    return records


def is_absent(record: bytes | memoryview, fingerprint: int) -> bool:
    """True if this is the record of that entity and marks it as without an answer."""
    return record[14:15] == _ABSENT and peek_fingerprint(record) == fingerprint


def unfit(layout: Layout, numbers: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Mask bool[n] of the rows that `encode_...` refuses with UnfitValue for this layout."""
    finite = np.asarray(np.isfinite(numbers).all(axis=1))
    bad: NDArray[np.bool_] = ~finite
    if layout.precision == "f4":
        return bad
    kept = np.where(finite[:, None], numbers, 0)
    largest = np.abs(kept).max(axis=1, initial=0)
    if layout.precision == "i1":
        bad |= (largest / np.float32(127) == 0) & kept.any(axis=1)
        return bad
    exponents = np.frexp(largest)[1] - _TOP_EXPONENT
    beyond = (exponents < -128) | (exponents > 127)
    halves = _halves(kept, np.where(beyond, 0, -exponents))
    bad |= beyond | _lost(kept, halves, layout.kind != "vector").any(axis=1)
    return bad


def _blank(
    layout: Layout, fingerprints: NDArray[np.uint64], scored_at: int, live: bool
) -> NDArray[Any]:
    records = np.zeros(len(fingerprints), layout.dtype)
    records["fingerprint"] = fingerprints
    records["scored_at"] = scored_at
    records["flags"] = FORMAT << 4 | (FLAG_LIVE if live else 0)
    return records


def _check_finite(numbers: NDArray[np.float32]) -> None:
    if not np.isfinite(numbers).all():
        row = int(np.flatnonzero(~np.isfinite(numbers).all(axis=1))[0])
        raise UnfitValue(f"row {row} holds a non-finite number", rule="non_finite", row=row)


def _put_floats(
    layout: Layout, records: NDArray[Any], numbers: NDArray[np.float32], *, keep_small: bool
) -> None:
    _check_finite(numbers)
    if layout.precision == "f4":
        records["numbers"] = numbers
        return
    # frexp: largest = fraction * 2**e with fraction in [0.5, 1), so value * 2**(15 - e) lies in [2**14, 2**15).
    exponents = np.frexp(np.abs(numbers).max(axis=1, initial=0))[1] - _TOP_EXPONENT
    if exponents.size and (int(exponents.min()) < -128 or int(exponents.max()) > 127):
        raise UnfitValue("a record's numbers need an exponent outside -128..127", rule="overflow")
    halves = _halves(numbers, -exponents)
    if np.count_nonzero(halves.view(np.uint16) & 0x7FFF) != np.count_nonzero(numbers):
        _check_kept(numbers, halves, keep_small)
    records["exponent"] = exponents
    records["numbers"] = halves


def _halves(numbers: NDArray[np.float32], powers: NDArray[np.int32]) -> NDArray[np.float16]:
    """`numbers * 2**powers` per row, rounded once: to float16.

    The product is exact in float32 where the power itself is one: all that falls below its normal numbers is zero in
    float16 as well.
    """
    if powers.max(initial=0) <= _POWER_MAX:
        return (numbers * np.ldexp(np.float32(1), powers)[:, None]).astype(np.float16)
    return np.ldexp(numbers.astype(np.float64), powers[:, None]).astype(np.float16)


def _check_kept(
    numbers: NDArray[np.float32], halves: NDArray[np.float16], keep_small: bool
) -> None:
    lost = _lost(numbers, halves, keep_small)
    if lost.any():
        row = int(np.flatnonzero(lost.any(axis=1))[0])
        raise UnfitValue(
            f"row {row} spans more than float16 holds: a non-zero number would become zero (store it as f4)",
            rule="underflow",
            row=row,
        )


def _lost(
    numbers: NDArray[np.float32], halves: NDArray[np.float16], keep_small: bool
) -> NDArray[np.bool_]:
    lost: NDArray[np.bool_] = (halves == 0) & (numbers != 0)
    if not keep_small:
        lost &= (halves == 0).all(axis=1)[:, None]
    return lost


class Record(NamedTuple):
    """Decoded record; arrays hold only what is used, `items` is None unless it is a top-K record."""

    fingerprint: int
    scored_at: int
    live: bool
    numbers: NDArray[np.float32]
    items: NDArray[np.uint32] | None


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
    fingerprint, scored_at, count, flags, exponent = _UNPACK_HEADER(record)
    if flags >> 4 != FORMAT or count > layout.width:
        raise CorruptArtefact(
            f"a record of format {flags >> 4} with {count} numbers cannot be read",
            format=flags >> 4,
            count=count,
        )
    width, precision = layout.width, layout.precision
    at = len(record) - width * _NUMBER[precision].itemsize
    numbers = np.frombuffer(record, _NUMBER[precision], width, at)[:count].astype(np.float32)
    if precision == "f2" and exponent <= SAFE_EXPONENT:
        numbers = np.ldexp(numbers, exponent)
    elif precision != "f4":
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
            if precision == "f2":
                numbers = np.ldexp(numbers, exponent)
            else:
                numbers = numbers * np.frombuffer(record, "<f4", 1, _HEADER_BYTES)[0]
    if not np.logical_and.reduce(np.isfinite(numbers)):
        raise CorruptArtefact("a record holds a number that is not finite", rule="non_finite")
    items = None
    if layout.kind == "topk":
        items = np.frombuffer(record, _ORDINAL, width, _HEADER_BYTES)[:count]
    if (
        items is not None
        and count
        and item_count is not None
        and np.maximum.reduce(items) >= item_count
    ):
        raise CorruptArtefact(
            f"a record names item {int(items.max())} of {item_count}", rule="ordinal"
        )
    return Record(
        fingerprint=fingerprint,
        scored_at=scored_at,
        live=bool(flags & FLAG_LIVE),
        numbers=numbers,
        items=items,
    )


def peek_fingerprint(record: bytes | memoryview) -> int:
    """The fingerprint, without decoding the rest."""
    return int.from_bytes(record[:8], "little")


def peek_format(record: bytes | memoryview) -> int:
    """The record's format number."""
    return record[14] >> 4


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
