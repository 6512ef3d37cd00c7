"""Items on a torch device: float32 for exact scores, half precision for the products that select candidates."""

from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from cache.model.ranking import score
from cache.model.tower import Histories
from cache.topk.compiled import scored_item_lengths
from cache.topk.flat import ComparableItems
from precompute.device.columns import Columns, Queries, choose_group_size, columns_by_rank
from precompute.device.hopper import ROUND_UP, ROUND_UP_SUMMAND, kernels_for

WORST = torch.iinfo(torch.int64).min
"""Key of a missing pair of user and item."""

SUM_LANES = 4
"""Number of parallel sums; each adds every fourth number."""

UNDERFLOW_ERROR = 2.0**-24

_DIMS_PER_GROUP = 16

_SMALLEST_NORMAL_BY_DTYPE = {torch.float16: 2.0**-14}
"""Smallest normal number by dtype; smaller numbers count as residual, since not every GPU multiplies them."""

_ROUNDING_BY_DTYPE = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0}

_SCALE_POWER_MAX = 126
"""Exponent of a scale with which subnormal float32 vectors stay short, and no number becomes infinite."""

_WIDTH_MULTIPLE = 8
_ITEMS_AT_ONCE = 1 << 16
_PROBE_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False)
class DeviceItems:
    """All items by falling length, as in `ordinals_by_length` int64 [items]: codes, scaled lengths, residual lengths.

    In the order of ordinals are `exact_vectors` float32 [items, steps, 4], the vectors after `arrange_in_sum_order`,
    and `cosine_lengths` float32 [items], the lengths for the metric cosine.
    """

    exact_vectors: torch.Tensor
    cosine_lengths: torch.Tensor | None
    ordinals_by_length: torch.Tensor
    item_codes: torch.Tensor
    scaled_lengths: torch.Tensor
    residual_lengths: torch.Tensor
    vector_scale: float
    relative_rounding_error: float
    """Rounding error of a product and of the exact score, relative to the product of both lengths."""
    fixed_group_size: int | None
    """Number of items that share a bound; None: chosen by the number of items."""
    all_columns: Columns

    @classmethod
    def of(
        cls,
        comparable_items: ComparableItems,
        device: torch.device,
        dtype: torch.dtype,
        fixed_group_size: int | None = None,
    ) -> Self:
        """Copy the items to the device; raise torch.OutOfMemoryError if they do not fit."""
        dims = comparable_items.vectors.shape[1]
        scale = float(np.ldexp(1.0, -int(np.frexp(comparable_items.longest_length)[1])))
        ordinals_by_length = np.argsort(-comparable_items.compared_lengths, kind="stable")
        group_size = fixed_group_size or choose_group_size(len(ordinals_by_length))
        exact = torch.empty((len(ordinals_by_length), -(-dims // SUM_LANES), SUM_LANES), device=device)
        encoded_parts = []
        # in parts, so that temporary copies stay small
        for first_index in range(0, len(ordinals_by_length), _ITEMS_AT_ONCE):
            part_ordinals = ordinals_by_length[first_index : first_index + _ITEMS_AT_ONCE]
            encoded_parts.append(
                encode_vectors(copy_to_device(comparable_items.compared_vectors[part_ordinals], device), scale, dtype)
            )
            exact[first_index : first_index + _ITEMS_AT_ONCE] = arrange_in_sum_order(
                copy_to_device(comparable_items.vectors[first_index : first_index + _ITEMS_AT_ONCE], device)
            )
        codes, length, residual = (torch.cat(chunks) for chunks in zip(*encoded_parts, strict=True))
        item_lengths = scored_item_lengths(comparable_items.vectors) if comparable_items.metric == "cosine" else None
        device_order = copy_to_device(ordinals_by_length, device)
        return cls(
            exact, None if item_lengths is None else copy_to_device(item_lengths, device), device_order,
            codes, length, residual, scale,
            _ROUNDING_BY_DTYPE[dtype] + (dims + 16) * (2.0**-22 + 2.0**-23) + 2.0**-20,
            fixed_group_size, columns_by_rank(codes, length, residual, device_order, len(ordinals_by_length),
            group_size),
        )  # fmt: skip

    def is_within_error_bound(self) -> bool:
        """True if this device's products stay within the allowed error: float32 sums without lost numbers.

        Tested on positive numbers, which have the largest partial sums, so that sums in half precision are detected.
        """
        device, dtype = self.item_codes.device, self.item_codes.dtype
        probe_users = np.random.default_rng(0).random((_PROBE_ROWS, self.item_codes.shape[1]), np.float32)
        probe_users /= self.item_codes.shape[1]  # the length is at most one
        codes, length, _ = encode_vectors(copy_to_device(probe_users, device), 1.0, dtype)
        sample_codes = self.item_codes[:: max(1, len(self.item_codes) // _PROBE_ROWS)].abs()
        exact_products = codes.double() @ sample_codes.double().T
        product_errors = (codes @ sample_codes.T).double() - exact_products
        allowed_errors = (
            self.relative_rounding_error * length[:, None] * sample_codes.double().square().sum(1).sqrt()
            + UNDERFLOW_ERROR
        )
        return bool((product_errors.abs() <= allowed_errors).all())

    def columns_of_allowed(self, is_allowed: torch.Tensor) -> Columns:
        """Return the columns of the items in the mask bool [items] by ordinal."""
        ranks = is_allowed[self.ordinals_by_length].nonzero()[:, 0]
        group_size = self.fixed_group_size or choose_group_size(len(ranks))
        return columns_by_rank(
            self.item_codes[ranks], self.scaled_lengths[ranks], self.residual_lengths[ranks],
            self.ordinals_by_length[ranks], len(self.ordinals_by_length),
            group_size,
        )  # fmt: skip

    def encode_queries(self, user_vectors: NDArray[np.float32], compared_vectors: NDArray[np.float32]) -> Queries:
        """Encode users float32 [n, dims] as scored and as compared (unit vectors for cosine)."""
        device = self.item_codes.device
        scored_users = copy_to_device(user_vectors, device)
        user_lengths = (
            None if self.cosine_lengths is None else copy_to_device(scored_item_lengths(user_vectors), device)
        )
        width = self.item_codes.shape[1]
        kernels = kernels_for(width, device) if self.item_codes.dtype == torch.float16 else None
        if kernels is not None:
            compared_users = (
                scored_users if compared_vectors is user_vectors else copy_to_device(compared_vectors, device)
            )
            exact, *code_tensors = kernels.encode_users(scored_users, compared_users, width)
            return Queries(exact, user_lengths, *code_tensors)
        user_sizes = scored_users.double().square().sum(1).sqrt()
        compared_users, length = scored_users, user_sizes
        if compared_vectors is not user_vectors:
            compared_users = copy_to_device(compared_vectors, device)
            length = compared_users.double().square().sum(1).sqrt()
        power = (-torch.frexp(length).exponent).clamp(max=_SCALE_POWER_MAX)
        scale = torch.ldexp(torch.ones_like(length), power).to(torch.float32)
        return Queries(
            arrange_in_sum_order(scored_users),
            user_lengths,
            *encode_vectors(compared_users, scale[:, None], self.item_codes.dtype),
            scale,
            user_sizes,
        )

    def exclusion_pairs(
        self, exclusions: Histories, user_rows: slice | NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (row, ordinal) int64 of all exclusions of some users; an invalid ordinal is the number of items."""
        if isinstance(user_rows, slice):  # histories of consecutive users are contiguous
            indptr = exclusions.indptr[user_rows.start : user_rows.stop + 1]
            indices = exclusions.indices[indptr[0] : indptr[-1]]
        else:
            selected_histories = exclusions.select_rows(user_rows)
            indptr, indices = selected_histories.indptr, selected_histories.indices
        device, item_count = self.item_codes.device, len(self.ordinals_by_length)
        counts, ordinals = (copy_to_device(array, device) for array in (np.diff(indptr), indices))
        pair_rows = torch.arange(len(counts), device=device)
        pair_rows = pair_rows.repeat_interleave(counts, output_size=len(indices))
        return pair_rows, torch.where((ordinals >= 0) & (ordinals < item_count), ordinals, item_count)

    def score_margins(
        self, columns: Columns, groups: slice, user_lengths: torch.Tensor, user_residuals: torch.Tensor
    ) -> torch.Tensor:
        """Return float32 [n, groups]: the largest difference between a product and its score, with both vectors scaled.

        `scaled_lengths` and `residual_lengths` [n] are the users'. With codes q, q' and residuals r, r' of the vectors
        u, v: |u v - q q'| <= |q| |r'| + |r| |v|, plus the rounding of the sums.
        """
        longest = columns.longest_by_group[groups]
        weight = self.margin_weights(longest, columns.residual_by_group[groups])
        return (user_lengths + user_residuals)[:, None] * weight + user_residuals[:, None] * longest + UNDERFLOW_ERROR

    def margin_weights(self, longest_lengths: torch.Tensor, longest_residuals: torch.Tensor) -> torch.Tensor:
        """Return float32, shaped like `longest_lengths`: the factor of a user's length plus residual in a margin."""
        return longest_residuals + self.relative_rounding_error * (longest_lengths + longest_residuals)


def encode_vectors(
    vectors: torch.Tensor, vector_scale: torch.Tensor | float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes [n, width], lengths and residual lengths float32 [n]) of float32 [n, dims] times `vector_scale`.

    Scales are powers of two, so only the code itself is rounded. Its rounding is measured, not estimated.
    """
    scaled = vectors * vector_scale
    codes = scaled.to(dtype)
    if (smallest_normal := _SMALLEST_NORMAL_BY_DTYPE.get(dtype)) is not None:
        codes = torch.where(codes.abs() < smallest_normal, torch.zeros_like(codes), codes)
    rounding_error = (scaled - codes.to(torch.float32)).double()
    length, residual = (_round_up(matrix.square().sum(1).sqrt()) for matrix in (scaled.double(), rounding_error))
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % _WIDTH_MULTIPLE)), length, residual


def copy_to_device(host_array: NDArray[np.float32] | NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copy an array to the device; to a GPU from pinned memory, so that the copy is asynchronous."""
    tensor = torch.from_numpy(np.require(host_array, requirements=("C", "W")))  # torch does not share read-only memory
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_to_host(device_tensor: torch.Tensor) -> torch.Tensor:
    """Start copying a tensor into pinned host memory; the values are valid after a synchronisation of the stream."""
    if device_tensor.device.type != "cuda":
        return device_tensor
    host_tensor = torch.empty(device_tensor.shape, dtype=device_tensor.dtype, pin_memory=True)
    return host_tensor.copy_(device_tensor, non_blocking=True)


def slice_if_consecutive(row_indexes: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Return consecutive ascending rows as a slice, which reads them without a copy; other rows unchanged."""
    is_consecutive = len(row_indexes) > 0 and bool((np.diff(row_indexes) == 1).all())
    return slice(int(row_indexes[0]), int(row_indexes[-1]) + 1) if is_consecutive else row_indexes


def _round_up(vector_lengths: torch.Tensor) -> torch.Tensor:
    return (vector_lengths * ROUND_UP + ROUND_UP_SUMMAND).to(torch.float32)


def arrange_in_sum_order(vectors: torch.Tensor) -> torch.Tensor:
    """Rearrange float32 [n, dims] to [n, steps, 4]: the order in which numpy's einsum adds products.

    A step is four numbers, one for each lane, padded with zeros. The steps of each full sixteen numbers are in reverse
    order. `native/exact.h` has the same order.
    """
    dims = vectors.shape[1]
    padded_vectors = torch.nn.functional.pad(vectors, (0, -dims % SUM_LANES))
    step_order = _sum_order(dims, vectors.device)
    return padded_vectors.view(len(padded_vectors), len(step_order), SUM_LANES)[:, step_order].contiguous()


@cache
def _sum_order(dims: int, device: torch.device) -> torch.Tensor:
    """Return the positions of the steps, int64; cached per device, since copying them waits for all pending work."""
    reversed_steps = [
        step
        for first_step in range(0, dims // _DIMS_PER_GROUP * SUM_LANES, SUM_LANES)
        for step in range(first_step + SUM_LANES - 1, first_step - 1, -1)
    ]
    return torch.tensor([*reversed_steps, *range(len(reversed_steps), -(-dims // SUM_LANES))], device=device)


def exact_dots(ordered_users: torch.Tensor, ordered_items: torch.Tensor) -> torch.Tensor:
    """Return float32 [n, c]: users [n, steps, 4] by their candidates [n, c, steps, 4], both in `arrange_in_sum_order`.

    Products and sums are separate operations: a fused multiply-add rounds once, numpy rounds twice.
    """
    lane_sums = torch.zeros((*ordered_items.shape[:2], SUM_LANES), device=ordered_items.device)
    for step in range(ordered_items.shape[2]):
        lane_sums += ordered_items[:, :, step] * ordered_users[:, None, step]
    return (lane_sums[..., 0] + lane_sums[..., 1]) + (lane_sums[..., 2] + lane_sums[..., 3])


def pack_keys(item_scores: torch.Tensor, item_ordinals: torch.Tensor) -> torch.Tensor:
    """Return `cache.model.ranking.pack_sort_keys` as int64, the highest bit flipped: torch compares signed numbers."""
    bits = (item_scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, so both zeros have one key
    ordered_bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered_bits.to(torch.int64) << 32) | (0xFFFFFFFF - item_ordinals)


def unpack_scores(sort_keys: torch.Tensor) -> torch.Tensor:
    """Return the float32 scores of `pack_keys`."""
    ordered_bits = (sort_keys >> 32).to(torch.int32)
    return (ordered_bits ^ ((ordered_bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def unpack_keys(sort_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `cache.model.ranking.unpack_sort_keys` of int64 [n, k]: (ordinals int32, NO_ITEM for WORST; scores)."""
    low = sort_keys.view(torch.int32).view(*sort_keys.shape, 2)[..., 0]  # little-endian: the lower half comes first
    return ~low, unpack_scores(sort_keys).masked_fill(sort_keys == WORST, 0.0)


def has_same_bits(dims: int, device: torch.device) -> bool:
    """True if this device's sums are bit-identical to numpy's."""
    rng = np.random.default_rng(dims)
    user_vectors = rng.standard_normal((3, dims), np.float32)
    item_vectors = rng.standard_normal((64, dims), np.float32)
    expected_scores = score(user_vectors, item_vectors, np.tile(np.arange(64), (3, 1)))
    ordered_items = arrange_in_sum_order(torch.from_numpy(item_vectors).to(device)).expand(3, -1, -1, -1)
    device_scores = (
        exact_dots(arrange_in_sum_order(torch.from_numpy(user_vectors).to(device)), ordered_items).cpu().numpy()
    )
    return bool(np.array_equal(device_scores.view(np.uint32), expected_scores.view(np.uint32)))
