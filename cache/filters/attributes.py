"""Attributes of a generation's items: typed columns by ordinal, mapped from its files."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from cache.format.directory import map_file
from cache.format.iso_times import iso_time
from cache.format.manifest import Manifest
from cache.format.manifest_files import AttributeKind

NO_CODE: Final = np.uint32(0xFFFF_FFFF)
"""Code of a text that an item does not have."""
NO_FLAG: Final = 2
"""Value of a flag that an item does not have."""
NO_TIME: Final = np.iinfo(np.int64).min
"""Value of a time that an item does not have; of a number it is NaN."""

_MICROSECONDS: Final = 1_000_000
_SECONDS_MAX: Final = 1e11
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

DTYPES: Final[Mapping[AttributeKind, str]] = {
    "text": "<u4", "texts": "<u4", "number": "<f8", "flag": "u1", "time": "<i8",
}  # fmt: skip
"""Kind -> dtype of its values: codes of texts, numbers, 0 or 1, microseconds since 1970."""


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """Texts of a column, each once, in the order of their UTF-8: code c is bytes `offsets[c]` to `offsets[c + 1]`."""

    data: NDArray[np.uint8]
    offsets: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, code: int) -> bytes:
        """UTF-8 of a code's text."""
        return self.data[int(self.offsets[code]) : int(self.offsets[code + 1])].tobytes()

    def code_of(self, text: str) -> int:
        """Code of a text, -1 if no item has it; found by halving."""
        encoded_text, low, high = text.encode(errors="replace"), 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.raw(middle) < encoded_text:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self.raw(low) == encoded_text else -1


@dataclass(frozen=True, slots=True, eq=False)
class AttributeColumn:
    """Column of one attribute: a value for each item, or with `texts` codes between an item's offsets."""

    kind: AttributeKind
    values: NDArray[Any]
    offsets: NDArray[np.uint64] | None = None
    names: Names | None = None

    def have(self, text: str, ordinals: NDArray[Any]) -> NDArray[np.bool_]:
        """Mask of the items of a list that have a text, in a column of one or several."""
        code = -1 if self.names is None else self.names.code_of(text)
        if code < 0:
            return np.zeros(len(ordinals), np.bool_)
        if self.offsets is None:
            return np.asarray(self.values[ordinals] == np.uint32(code), np.bool_)
        spans = [self.offsets[ordinal : ordinal + 2].tolist() for ordinal in ordinals.tolist()]
        has_text = [bool((self.values[first:last] == code).any()) for first, last in spans]
        return np.array(has_text, np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class ItemAttributes:
    """Columns of all attributes by name, for `count` items."""

    count: int
    columns: Mapping[str, AttributeColumn]

    @classmethod
    def open(cls, root: Path, manifest: Manifest) -> Self:
        """Maps the columns that a manifest lists."""
        return cls.of_files(
            root,
            {
                name: (
                    attribute.kind,
                    {part: file.path for part, file in attribute.parts().items()},
                )
                for name, attribute in manifest.items.attributes.items()
            },
            manifest.items.count,
        )

    @classmethod
    def of_files(
        cls, root: Path, files: Mapping[str, tuple[AttributeKind, Mapping[str, str]]], count: int
    ) -> Self:
        """Maps columns from the kind of each and the paths of its files, by their names in `Attribute`."""
        return cls(
            count,
            {name: _open(root, *kind_and_files, count) for name, kind_and_files in files.items()},
        )

    @property
    def kinds(self) -> dict[str, str]:
        """Kind of each attribute, as refusals tell them."""
        return {name: column.kind for name, column in sorted(self.columns.items())}


def _open(root: Path, kind: AttributeKind, files: Mapping[str, str], count: int) -> AttributeColumn:
    dtype = DTYPES[kind]
    names = offsets = None
    if "names" in files:
        names = Names(
            map_file(root / files["names"], "u1"), map_file(root / files["name_offsets"], "<u8")
        )
    if "offsets" in files:
        offsets = map_file(root / files["offsets"], "<u8", (count + 1,))
        values = map_file(root / files["values"], dtype)
    else:
        values = map_file(root / files["values"], dtype, (count,))
    return AttributeColumn(kind, values, offsets, names)


def moment_us(value: object) -> int | None:
    """Microseconds since 1970 of ISO 8601 (UTC without a zone) or Unix seconds; None for anything else."""
    if isinstance(value, str):
        try:
            moment = iso_time(value)
        except ValueError:
            return None
        return (moment - _EPOCH) // timedelta(microseconds=1)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return round(value * _MICROSECONDS) if abs(value) <= _SECONDS_MAX else None
