"""Compiled top-K (`native/topk.c`): the layout of items, the loading of the library, its checks and its calls."""

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
from cache.topk.flat import ComparableItems, TopLists, row_lengths_of

K_MAX = 1000
"""Largest supported k."""

LANES = 16
TILE_GROUPS = 32
TILE_ITEMS = LANES * TILE_GROUPS
_PADDED_GROUPS = 4
_TILES_PER_STEP = 2
_BOUND_SLACK = 1e-5

_LENGTH_FLOOR = 1e-12
"""Smallest relevant length, relative to the longest item's: a shorter item is within the rounding error of its
codes."""

_DIMS_MAX = 16_384  # sums of code products stay within 32 bits
_ITEMS_MAX = 1 << 31
_PORTABLE_LEVEL, _AVX2_LEVEL, _AMX_LEVEL = 0, 1, 3

# A sum of two products must fit 16 bits; VNNI has no such limit.
_LARGEST_CODE_BY_LEVEL = {_PORTABLE_LEVEL: 127, _AVX2_LEVEL: 63}

# Within these limits nothing overflows, and terms that underflow are far below the rounding errors of the others.
_PRODUCT_LIMITS = (1e-25, 1e37)

_LENGTH_LIMITS = (1e-15, 1e18)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PackedItems:
    """Items in the layout of `native/state.h`: longest first, in groups of 16, as 8-bit codes with error bounds.

    A place is an item's position in this order; empty places pad the last groups.
    """

    vectors: NDArray[np.float32]
    score_divisors: NDArray[np.float32] | None
    item_codes: NDArray[np.uint8]
    ordinal_by_place: NDArray[np.uint32]
    place_by_ordinal: NDArray[np.uint32]
    group_scales: NDArray[np.float32]
    group_residual_bounds: NDArray[np.float32]
    group_length_bounds: NDArray[np.float32]
    tile_reach_bounds: NDArray[np.float32]
    length_unit: float
    largest_code: int

    @property
    def codes_per_item(self) -> int:
        """Number of codes per item, padding included."""
        return int(self.item_codes.shape[1]) * 4

    @classmethod
    def of(
        cls,
        vectors: NDArray[np.float32],
        compared_vectors: NDArray[np.float32],
        compared_lengths: NDArray[np.float64],
        score_divisors: NDArray[np.float32] | None,
        largest_code: int,
        width_multiple: int = 4,
    ) -> Self:
        """Pack vectors for exact scores and for comparison (unit vectors for cosine), both float32 [items, dims].

        `compared_lengths` float64 [items] are the lengths of `compared_vectors`; scores are divided by `score_divisors`
        float32 [items]. Codes range from -largest_code to largest_code; their number per item is a multiple of
        `width_multiple`.
        """
        item_count, dims = compared_vectors.shape
        length_unit = 1.0 if score_divisors is not None else float(compared_lengths.max(initial=0)) or 1.0
        packing_order = _packing_order(compared_vectors, compared_lengths)
        group_count = -(-item_count // (LANES * _PADDED_GROUPS)) * _PADDED_GROUPS
        padded_dims = -(-dims // width_multiple) * width_multiple
        item_codes = np.full((group_count, padded_dims // 4, LANES, 4), largest_code + 1, np.uint8)
        group_scales, group_residual_bounds, group_length_bounds = np.ones((3, group_count), np.float32)
        for start in range(0, group_count, TILE_GROUPS * _TILES_PER_STEP):
            group_slice = slice(start, min(start + TILE_GROUPS * _TILES_PER_STEP, group_count))
            step_ordinals = packing_order[group_slice.start * LANES : group_slice.stop * LANES]
            step_vectors = np.zeros(((group_slice.stop - group_slice.start) * LANES, padded_dims))
            np.divide(
                compared_vectors[step_ordinals],
                length_unit,
                out=step_vectors[: len(step_ordinals), :dims],
                dtype=np.float64,
            )
            grouped_vectors = step_vectors.reshape(-1, LANES, padded_dims)
            peaks = np.maximum(grouped_vectors.max(axis=(1, 2)), -grouped_vectors.min(axis=(1, 2)))
            group_scales[group_slice] = np.maximum(peaks, _LENGTH_FLOOR) / largest_code
            code_steps = group_scales[group_slice].astype(np.float64)[:, None, None]
            group_length_bounds[group_slice] = _upper_bounds(_group_lengths(grouped_vectors))
            rounded_codes = np.rint(grouped_vectors / code_steps)
            np.clip(rounded_codes, -largest_code, largest_code, out=rounded_codes)
            grouped_vectors -= rounded_codes * code_steps
            group_residual_bounds[group_slice] = _upper_bounds(_group_lengths(grouped_vectors))
            rounded_codes += largest_code + 1
            shifted_codes = rounded_codes.astype(np.uint8)
            item_codes[group_slice] = shifted_codes.reshape(-1, LANES, padded_dims // 4, 4).swapaxes(1, 2)
        ordinal_by_place = np.zeros(group_count * LANES, np.uint32)
        ordinal_by_place[:item_count] = packing_order
        place_by_ordinal = np.empty(item_count, np.uint32)
        place_by_ordinal[packing_order] = np.arange(item_count, dtype=np.uint32)
        longest_by_tile = np.maximum.reduceat(group_length_bounds, np.arange(0, group_count, TILE_GROUPS))
        tile_reach_bounds = np.maximum.accumulate(longest_by_tile[::-1])[::-1].copy()
        return cls(
            vectors, score_divisors, item_codes, ordinal_by_place, place_by_ordinal, group_scales,
            group_residual_bounds, group_length_bounds, tile_reach_bounds, length_unit,
            largest_code,
        )  # fmt: skip

    def allowed_bits(self, allowed_mask: NDArray[np.bool_] | None) -> NDArray[np.uint16]:
        """Return a bit mask uint16 [groups] of the places with allowed items; `allowed_mask` is by ordinal."""
        allowed_places = np.zeros(len(self.ordinal_by_place), np.bool_)
        allowed_places[: len(self.place_by_ordinal)] = (
            True if allowed_mask is None else allowed_mask[self.ordinal_by_place[: len(self.place_by_ordinal)]]
        )
        return np.packbits(allowed_places, bitorder="little").view("<u2").astype(np.uint16)


def _packing_order(compared_vectors: NDArray[np.float32], compared_lengths: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return ordinals by descending length, within a tile by largest component, so that groups share a scale."""
    length_order = np.argsort(-compared_lengths, kind="stable")
    peaks = np.abs(compared_vectors).max(axis=1)[length_order]
    tile_numbers = np.arange(len(length_order)) // TILE_ITEMS
    return length_order[np.lexsort((-peaks, tile_numbers))]


def _group_lengths(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the length of the longest vector of each group, [groups]."""
    longest_lengths: NDArray[np.float64] = np.sqrt(np.einsum("glw,glw->gl", vectors, vectors).max(axis=1))
    return longest_lengths


def _upper_bounds(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    return lengths * (1 + _BOUND_SLACK) + _LENGTH_FLOOR


class _LarderItems(ctypes.Structure):
    """ctypes form of `larder_items` in native/state.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in
          ("vectors", "lengths", "codes", "ordinals", "places", "scale", "residual", "longest",
           "reach", "allowed")),
        *((name, ctypes.c_int64) for name in ("items", "groups", "dims", "width", "offset")),
        ("unit", ctypes.c_double),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Compiled library at one instruction set level: 0: any processor, 1: AVX2, 2: AVX-512 VNNI, 3: AMX.

    ctypes releases the GIL during calls.
    """

    library: ctypes.CDLL
    level: int

    def pack(self, compared: ComparableItems) -> PackedItems | None:
        """Pack the items; return None if they exceed the limits within which the kernel is exact."""
        item_count, dims = compared.vectors.shape
        is_cosine = compared.metric == "cosine"
        score_lengths = scored_item_lengths(compared.vectors) if is_cosine else None
        user_like_lengths = row_lengths_of(compared.vectors) if is_cosine else compared.compared_lengths
        if not 0 < item_count < _ITEMS_MAX or dims > _DIMS_MAX or not self.same_bits(dims):
            return None
        if is_cosine and not _within_mask(user_like_lengths, _LENGTH_LIMITS).all():
            return None
        largest_code = _LARGEST_CODE_BY_LEVEL.get(self.level, 127)
        width_multiple = 64 if self.level == _AMX_LEVEL else 4
        return PackedItems.of(
            compared.vectors,
            compared.compared_vectors,
            compared.compared_lengths,
            score_lengths,
            largest_code,
            width_multiple,
        )

    def top(
        self,
        packed: PackedItems,
        user_vectors: NDArray[np.float32],
        k: int,
        exclusions: Histories,
        allowed_bits: NDArray[np.uint16],
        user_rows: slice,
        top_arrays: TopLists,
    ) -> None:
        """Fill `user_rows` of `top_arrays`; `Scorer.top` checks the shapes; all arrays must be contiguous."""
        array_names = (
            "vectors", "score_divisors", "item_codes", "ordinal_by_place", "place_by_ordinal", "group_scales",
            "group_residual_bounds", "group_length_bounds", "tile_reach_bounds",
        )  # fmt: skip
        items = _LarderItems(
            *(_address(getattr(packed, name)) for name in array_names),
            _address(allowed_bits),
            len(packed.vectors),
            len(packed.group_scales),
            packed.vectors.shape[1],
            packed.codes_per_item,
            packed.largest_code + 1,
            packed.length_unit,
        )
        starts = np.ascontiguousarray(exclusions.indptr[user_rows.start : user_rows.stop + 1])
        excluded_ordinals = np.ascontiguousarray(exclusions.indices)
        status_code = self.library.larder_topk(
            ctypes.byref(items),
            _address(user_vectors[user_rows]),
            user_rows.stop - user_rows.start,
            _address(starts),
            _address(excluded_ordinals),
            k,
            self.level,
            _address(top_arrays[0][user_rows]),
            _address(top_arrays[1][user_rows]),
        )
        if status_code:
            raise MemoryError(f"no memory for the candidates of {user_rows.stop - user_rows.start} users")

    def same_bits(self, dims: int) -> bool:
        """Return whether the kernel sums in the same order as this numpy, so that both compute the same scores."""
        rng = np.random.default_rng(dims)
        users = rng.standard_normal((1, dims), np.float32)
        items = rng.standard_normal((64, dims), np.float32)
        kernel_scores = np.empty(64, np.float32)
        self.library.larder_dots(_address(users), _address(items), 64, dims, _address(kernel_scores))
        numpy_scores = score(users, items, np.arange(64)[None])[0]
        is_equal = np.array_equal(kernel_scores.view(np.uint32), numpy_scores.view(np.uint32))
        if not is_equal:
            _log.warning("the top-K kernel is not used, because it sums in another order than this numpy")
        return is_equal


@functools.cache
def find_kernel() -> Kernel | None:
    """Return the kernel for this processor; None without one, or if it has no faster code for it."""
    loaded_kernel = load_kernel(os.environ)
    if loaded_kernel is not None and loaded_kernel.level > _PORTABLE_LEVEL:
        return loaded_kernel
    _log.info("top-K runs without the compiled kernel, with FAISS and numpy, which is several times slower")
    return None


def load_kernel(environ: Mapping[str, str], folder: Path = Path(__file__).parent) -> Kernel | None:
    """Load the kernel in a folder at its best level; LARDER_KERNEL=off disables it, =0 to =3 sets the highest level."""
    level_setting = environ.get("LARDER_KERNEL", "auto")
    if level_setting not in ("auto", "off", "0", "1", "2", "3"):
        raise ConfigError(f"LARDER_KERNEL must be auto, off or 0 to 3, not {level_setting!r}")
    library = None if level_setting == "off" else _load_library(folder)
    if library is None:
        return None
    pointer_type, int64_type = ctypes.c_void_p, ctypes.c_int64
    library.larder_topk.argtypes = [
        ctypes.POINTER(_LarderItems), pointer_type, int64_type, pointer_type, pointer_type, int64_type, ctypes.c_int,
        pointer_type,
        pointer_type,
    ]  # fmt: skip
    library.larder_dots.argtypes = [pointer_type, pointer_type, int64_type, int64_type, pointer_type]
    library.larder_dots.restype = None
    level = library.larder_level()
    return Kernel(library, level if level_setting == "auto" else min(level, int(level_setting)))


def _load_library(folder: Path) -> ctypes.CDLL | None:
    """Load the first library that this machine can load: a copied folder may also contain another machine's library."""
    for path in [folder / f"_topk{suffix}" for suffix in EXTENSION_SUFFIXES]:
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                _log.warning("cannot load %s (%s): install again", path.name, error)
    return None


def scores_fit_mask(compared: ComparableItems, user_vectors: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return a mask of the users float32 [n, dims] whose scores neither overflow nor underflow."""
    return lengths_fit_mask(compared, row_lengths_of(user_vectors))


def lengths_fit_mask(compared: ComparableItems, user_lengths: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask of the users, by their lengths [n], whose scores neither overflow nor underflow."""
    if compared.metric == "cosine":
        return _within_mask(user_lengths, _LENGTH_LIMITS)
    longest = compared.longest_length or 1.0
    return _within_mask(user_lengths * longest, _PRODUCT_LIMITS)


def scored_item_lengths(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return lengths of items as `cache.model.ranking.score` computes them, float32 [items]."""
    item_lengths: NDArray[np.float32] = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    return item_lengths


def _within_mask(magnitudes: NDArray[np.float64], lower_and_upper_limit: tuple[float, float]) -> NDArray[np.bool_]:
    """Return a mask of the values that are within the limits, or 0."""
    inside_mask: NDArray[np.bool_] = (
        (magnitudes > lower_and_upper_limit[0]) & (magnitudes < lower_and_upper_limit[1])
    ) | (magnitudes == 0)
    return inside_mask


def _address(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data
