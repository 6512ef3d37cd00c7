"""Exact scores on a torch device: the sums of `cache.model.ranking.score`, in its order, so with its bits."""

from functools import cache

import numpy as np
import torch

from cache.model.ranking import score

SUMS = 4
"""Sums beside each other, of every fourth number."""
_DIMS_PER_GROUP = 16
WORST = torch.iinfo(torch.int64).min
"""The key of no pair at all."""


def in_order(vectors: torch.Tensor) -> torch.Tensor:
    """float32 [n, dims] as [n, steps, 4]: the numbers in the order in which numpy's einsum adds their products.

    Four lanes; of each sixteen numbers the last four first, then what is left, padded with zeros. The same order stands
    in `native/exact.h`.
    """
    dims = vectors.shape[1]
    padded = torch.nn.functional.pad(vectors, (0, -dims % SUMS))
    order = _order(dims, vectors.device)
    return padded.view(len(padded), len(order), SUMS)[:, order].contiguous()


@cache
def _order(dims: int, device: torch.device) -> torch.Tensor:
    """Places of the steps, int64: on the device once, as copying them there waits for all that is under way."""
    turned = [
        step
        for start in range(0, dims // _DIMS_PER_GROUP * SUMS, SUMS)
        for step in range(start + SUMS - 1, start - 1, -1)
    ]
    return torch.tensor([*turned, *range(len(turned), -(-dims // SUMS))], device=device)


def dots(users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """float32 [n, c]: users [n, steps, 4] by their candidates [n, c, steps, 4], both `in_order`.

    Products and sums are steps of their own: a multiply-add that is fused rounds once where numpy rounds twice.
    """
    sums = torch.zeros((*items.shape[:2], SUMS), device=items.device)
    for step in range(items.shape[2]):
        sums += items[:, :, step] * users[:, None, step]
    return (sums[..., 0] + sums[..., 1]) + (sums[..., 2] + sums[..., 3])


def keys_of(scores: torch.Tensor, ordinals: torch.Tensor) -> torch.Tensor:
    """`cache.model.ranking.pack` as int64, its highest bit turned over: torch compares signed numbers."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(torch.int64) << 32) | (0xFFFFFFFF - ordinals)


def scores_of(keys: torch.Tensor) -> torch.Tensor:
    """The float32 scores of `keys_of`."""
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def unpacked(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`cache.model.ranking.unpack` of keys int64 [n, k]: (ordinals int32, the bits of NO_ITEM for WORST; scores)."""
    low = keys.view(torch.int32).view(*keys.shape, 2)[..., 0]  # of two halves the lower comes first
    return ~low, scores_of(keys).masked_fill(keys == WORST, 0.0)


def same_bits(dims: int, device: torch.device) -> bool:
    """True if this device's sums have the bits of this numpy."""
    rng = np.random.default_rng(dims)
    users = rng.standard_normal((3, dims), np.float32)
    items = rng.standard_normal((64, dims), np.float32)
    expected_scores = score(users, items, np.tile(np.arange(64), (3, 1)))
    ordered_items = in_order(torch.from_numpy(items).to(device)).expand(3, -1, -1, -1)
    device_scores = dots(in_order(torch.from_numpy(users).to(device)), ordered_items).cpu().numpy()
    return bool(np.array_equal(device_scores.view(np.uint32), expected_scores.view(np.uint32)))
