"""Compiled top-K (`native/topk.c`): the layout of items, the search for the library, its checks and its calls."""

import ctypes
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache.errors import ConfigError
from cache.model.ranking import score
from cache.model.tower import Histories
from cache.topk.flat import ComparableItems, Top, lengths

K_MAX = 1000
"""Largest k of a list."""

LANES = 16
TILE_GROUPS = 32
TILE = LANES * TILE_GROUPS
_PADDED_GROUPS = 4
_STEP_TILES = 2
_BOUND_SLACK = 1e-5

_LENGTH_FLOOR = 1e-12
"""Length relative to the longest item; a shorter item is within the error of its codes."""

_DIMS_MAX = 16_384  # sums of code products stay within 32 bits
_ITEMS_MAX = 1 << 31
_PORTABLE, _AVX2, _AMX = 0, 1, 3

# A pair of products fits 16 bits; VNNI needs no such care.
_LARGEST_CODES = {_PORTABLE: 127, _AVX2: 63}

# Between these nothing overflows, and what underflows is far below the rounding of the rest.
_PRODUCT_LIMITS = (1e-25, 1e37)

_LENGTH_LIMITS = (1e-15, 1e18)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PackedItems:
    """Items in the layout of `native/state.h`: longest first, in groups of 16, as 8-bit codes with certified errors.

    Places are positions by falling length, -1 and 0 pad the last group.
    """

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
        """Pack the vectors for scores and those for comparison (unit vectors for cosine), float32 [items, dims].

        `sizes` float64 [items] are the lengths of `compared`; `lengths` float32 [items] divide a score.
        Codes are -largest_code to largest_code; a multiple of `multiple` per item.
        """
        items, dims = compared.shape
        unit = 1.0 if lengths is not None else float(sizes.max(initial=0)) or 1.0
        order = _packing_order(compared, sizes)
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
            longest[step] = _upper_bounds(_group_lengths(grouped_vectors))
            rounded = np.rint(grouped_vectors / steps)
            np.clip(rounded, -largest_code, largest_code, out=rounded)
            grouped_vectors -= rounded * steps
            residual[step] = _upper_bounds(_group_lengths(grouped_vectors))
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
        """Return a bit mask of the places whose items are allowed, uint16 [groups]; `allowed` is by ordinal."""
        bits = np.zeros(len(self.ordinals), np.bool_)
        bits[: len(self.rank_by_ordinal)] = (
            True if allowed is None else allowed[self.ordinals[: len(self.rank_by_ordinal)]]
        )
        return np.packbits(bits, bitorder="little").view("<u2").astype(np.uint16)


def _packing_order(compared: NDArray[np.float32], sizes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return ordinals by falling length; within a tile by largest component, so that a group shares its scale well."""
    order = np.argsort(-sizes, kind="stable")
    peaks = np.abs(compared).max(axis=1)[order]
    tiles = np.arange(len(order)) // TILE
    return order[np.lexsort((-peaks, tiles))]


def _group_lengths(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the length of the longest vector of each group, [groups]."""
    longest_lengths: NDArray[np.float64] = np.sqrt(
        np.einsum("glw,glw->gl", vectors, vectors).max(axis=1)
    )
    return longest_lengths


def _upper_bounds(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values * (1 + _BOUND_SLACK) + _LENGTH_FLOOR


class _LarderItems(ctypes.Structure):
    """`larder_items` of native/state.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in
          ("vectors", "lengths", "codes", "ordinals", "places", "scale", "residual", "longest",
           "reach", "allowed")),
        *((name, ctypes.c_int64) for name in ("items", "groups", "dims", "width", "offset")),
        ("unit", ctypes.c_double),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Compiled library at one instruction level: 0 any processor, 1 AVX2, 2 AVX-512 VNNI, 3 AMX.

    It is called without the GIL.
    """

    library: ctypes.CDLL
    level: int

    def pack(self, compared: ComparableItems) -> PackedItems | None:
        """Pack the items; None if they exceed the limits within which the kernel is exact."""
        items, dims = compared.vectors.shape
        cosine = compared.metric == "cosine"
        score_lengths = own_lengths(compared.vectors) if cosine else None
        sizes = lengths(compared.vectors) if cosine else compared.sizes
        if not 0 < items < _ITEMS_MAX or dims > _DIMS_MAX or not self.same_bits(dims):
            return None
        if cosine and not _within(sizes, _LENGTH_LIMITS).all():
            return None
        largest = _LARGEST_CODES.get(self.level, 127)
        multiple = 64 if self.level == _AMX else 4
        return PackedItems.of(
            compared.vectors, compared.filtering, compared.sizes, score_lengths, largest, multiple
        )

    def top(
        self,
        packed: PackedItems,
        users: NDArray[np.float32],
        k: int,
        excluded: Histories,
        allowed: NDArray[np.uint16],
        rows: slice,
        top_arrays: Top,
    ) -> None:
        """Fill `rows` of `top_arrays`; shapes are checked by `Scorer.top`, all arrays contiguous."""
        arrays = ("vectors", "lengths", "codes", "ordinals", "rank_by_ordinal", "scale", "residual",
                  "longest", "reach")  # fmt: skip
        items = _LarderItems(
            *(_address(getattr(packed, name)) for name in arrays),
            _address(allowed),
            len(packed.vectors),
            len(packed.scale),
            packed.vectors.shape[1],
            packed.width,
            packed.largest_code + 1,
            packed.unit,
        )
        starts = np.ascontiguousarray(excluded.indptr[rows.start : rows.stop + 1])
        excluded_ordinals = np.ascontiguousarray(excluded.indices)
        failed = self.library.larder_topk(
            ctypes.byref(items),
            _address(users[rows]),
            rows.stop - rows.start,
            _address(starts),
            _address(excluded_ordinals),
            k,
            self.level,
            _address(top_arrays[0][rows]),
            _address(top_arrays[1][rows]),
        )
        if failed:
            raise MemoryError(f"no memory for the candidates of {rows.stop - rows.start} users")

    def same_bits(self, dims: int) -> bool:
        """True if the kernel sums in the same order as this numpy, so that both give the same scores."""
        rng = np.random.default_rng(dims)
        users = rng.standard_normal((1, dims), np.float32)
        items = rng.standard_normal((64, dims), np.float32)
        kernel_scores = np.empty(64, np.float32)
        self.library.larder_dots(
            _address(users), _address(items), 64, dims, _address(kernel_scores)
        )
        numpy_scores = score(users, items, np.arange(64)[None])[0]
        is_equal = np.array_equal(kernel_scores.view(np.uint32), numpy_scores.view(np.uint32))
        if not is_equal:
            _log.warning("the top-K kernel adds in another order than this numpy: not used")
        return is_equal


@functools.cache
def kernel() -> Kernel | None:
    """Return the kernel for this processor; None if it was not built, is switched off or has no use."""
    loaded_kernel = load(os.environ)
    if loaded_kernel is not None and loaded_kernel.level > _PORTABLE:
        return loaded_kernel
    _log.info("top-K without the compiled kernel: FAISS and numpy, several times slower")
    return None


def load(environ: Mapping[str, str], folder: Path = Path(__file__).parent) -> Kernel | None:
    """Load the kernel in a folder at its best level; LARDER_KERNEL=off skips it, =0 to =3 sets the highest level."""
    level_setting = environ.get("LARDER_KERNEL", "auto")
    if level_setting not in ("auto", "off", "0", "1", "2", "3"):
        raise ConfigError(f"LARDER_KERNEL must be auto, off or 0 to 3, not {level_setting!r}")
    library = None if level_setting == "off" else _library(folder)
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.larder_topk.argtypes = [
        ctypes.POINTER(_LarderItems), pointer, number, pointer, pointer, number, ctypes.c_int, pointer,
        pointer,
    ]  # fmt: skip
    library.larder_dots.argtypes = [pointer, pointer, number, number, pointer]
    library.larder_dots.restype = None
    level = library.larder_level()
    return Kernel(library, level if level_setting == "auto" else min(level, int(level_setting)))


def _library(folder: Path) -> ctypes.CDLL | None:
    """Load the first library that this machine can load: a copied tree may also hold one of another machine."""
    for path in [folder / f"_topk{suffix}" for suffix in EXTENSION_SUFFIXES]:
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                _log.warning("%s cannot be loaded (%s): install again", path.name, error)
    return None


def fits(compared: ComparableItems, users: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return a mask of users float32 [n, dims] whose scores neither overflow nor underflow."""
    return long_enough(compared, lengths(users))


def long_enough(compared: ComparableItems, sizes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask of users with these lengths [n] whose scores neither overflow nor underflow."""
    if compared.metric == "cosine":
        return _within(sizes, _LENGTH_LIMITS)
    longest = compared.longest or 1.0
    return _within(sizes * longest, _PRODUCT_LIMITS)


def own_lengths(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return item lengths as `cache.model.ranking.score` computes them, float32 [items]."""
    item_lengths: NDArray[np.float32] = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    return item_lengths


def _within(values: NDArray[np.float64], limits: tuple[float, float]) -> NDArray[np.bool_]:
    """Return a mask of the values that are inside the limits, or 0."""
    inside: NDArray[np.bool_] = ((values > limits[0]) & (values < limits[1])) | (values == 0)
    return inside


def _address(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data
