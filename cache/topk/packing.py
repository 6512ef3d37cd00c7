"""Items laid out for the compiled top-K: longest first, in groups of 16 as 8-bit codes with certified errors."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

LANES = 16
TILE_GROUPS = 32
TILE = LANES * TILE_GROUPS

_PADDED_GROUPS = 4
_STEP_TILES = 2
_SLACK = 1e-5
_LENGTH_FLOOR = 1e-12
"""Relative to the longest item; shorter ones are all error, no code."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedItems:
    """Items as `native/state.h` lays them out; places are positions by falling length, -1 and 0 pad the last group."""

    vectors: NDArray[np.float32]
    lengths: NDArray[np.float32] | None
    codes: NDArray[np.uint8]
    ordinals: NDArray[np.uint32]
    rank_by_ordinal: NDArray[np.uint32]
    scale: NDArray[np.float32]
    residual: NDArray[np.float32]
    longest: NDArray[np.float32]
    reach: NDArray[np.float32]
    unit: float
    largest_code: int

    @property
    def width(self) -> int:
        """Codes per item, padding included."""
        return int(self.codes.shape[1]) * 4

    @classmethod
    def of(
        cls,
        vectors: NDArray[np.float32],
        compared: NDArray[np.float32],
        sizes: NDArray[np.float64],
        lengths: NDArray[np.float32] | None,
        largest_code: int,
        multiple: int = 4,
    ) -> Self:
        """Packs what is scored and what is compared (unit vectors for cosine), float32 [items, dims].

        `sizes` float64 [items] are the lengths of `compared`; `lengths` float32 [items] divide a score.
        Codes are -largest_code to largest_code; a multiple of `multiple` per item.
        """
        items, dims = compared.shape
        unit = 1.0 if lengths is not None else float(sizes.max(initial=0)) or 1.0
        order = _order(compared, sizes)
        groups = -(-items // (LANES * _PADDED_GROUPS)) * _PADDED_GROUPS
        width = -(-dims // multiple) * multiple
        codes = np.full((groups, width // 4, LANES, 4), largest_code + 1, np.uint8)
        scale, residual, longest = np.ones((3, groups), np.float32)
        for start in range(0, groups, TILE_GROUPS * _STEP_TILES):
            step = slice(start, min(start + TILE_GROUPS * _STEP_TILES, groups))
            part = order[step.start * LANES : step.stop * LANES]
            flat = np.zeros(((step.stop - step.start) * LANES, width))
            np.divide(compared[part], unit, out=flat[: len(part), :dims], dtype=np.float64)
            grouped_vectors = flat.reshape(-1, LANES, width)
            peaks = np.maximum(grouped_vectors.max(axis=(1, 2)), -grouped_vectors.min(axis=(1, 2)))
            scale[step] = np.maximum(peaks, _LENGTH_FLOOR) / largest_code
            steps = scale[step].astype(np.float64)[:, None, None]
            longest[step] = _above(_lengths(grouped_vectors))
            rounded = np.rint(grouped_vectors / steps)
            np.clip(rounded, -largest_code, largest_code, out=rounded)
            grouped_vectors -= rounded * steps
            residual[step] = _above(_lengths(grouped_vectors))
            rounded += largest_code + 1
            shifted = rounded.astype(np.uint8)
            codes[step] = shifted.reshape(-1, LANES, width // 4, 4).swapaxes(1, 2)
        ordinals = np.zeros(groups * LANES, np.uint32)
        ordinals[:items] = order
        position_by_ordinal = np.empty(items, np.uint32)
        position_by_ordinal[order] = np.arange(items, dtype=np.uint32)
        tiles = np.maximum.reduceat(longest, np.arange(0, groups, TILE_GROUPS))
        reach = np.maximum.accumulate(tiles[::-1])[::-1].copy()
        return cls(
            vectors, lengths, codes, ordinals, position_by_ordinal, scale, residual, longest, reach, unit,
            largest_code,
        )  # fmt: skip

    def allowed(self, allowed: NDArray[np.bool_] | None) -> NDArray[np.uint16]:
        """Bit mask of the places, set for an item that is allowed by its ordinal; uint16 [groups]."""
        bits = np.zeros(len(self.ordinals), np.bool_)
        bits[: len(self.rank_by_ordinal)] = (
            True if allowed is None else allowed[self.ordinals[: len(self.rank_by_ordinal)]]
        )
        return np.packbits(bits, bitorder="little").view("<u2").astype(np.uint16)


def _order(compared: NDArray[np.float32], sizes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Ordinals by falling length; within a tile by largest component, so that a group shares its scale well."""
    order = np.argsort(-sizes, kind="stable")
    peaks = np.abs(compared).max(axis=1)[order]
    tiles = np.arange(len(order)) // TILE
    return order[np.lexsort((-peaks, tiles))]


def _lengths(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Length of the longest vector of each group, [groups]."""
    longest_lengths: NDArray[np.float64] = np.sqrt(
        np.einsum("glw,glw->gl", vectors, vectors).max(axis=1)
    )
    return longest_lengths


def _above(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values * (1 + _SLACK) + _LENGTH_FLOOR
