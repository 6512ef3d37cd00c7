"""Rates of the exact top-K on GPUs: found here in a short rehearsal, or those of a GPU that was measured elsewhere."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache.model.ranking import Metric
from precompute.device.cards import CARDS, DEFAULT_CARD

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class DeviceRate:
    """Lists per second of the GPUs that a night scores on, and in words how that is known."""

    users_per_s: float
    how: str


def by_table(items: int, dims: int, k: int) -> DeviceRate:
    """Rate of one GPU that was measured, for lists of so many items and dimensions.

    What another K costs was not measured: it counts for nothing, and `how` says so.
    """
    card = CARDS[DEFAULT_CARD]
    return DeviceRate(1 / card.list_seconds(items, dims), f"a table: {card.how(k)}")


def by_rehearsal(
    device: str,
    users: NDArray[np.float32],
    items: NDArray[np.float32],
    metric: Metric,
    k: int,
) -> DeviceRate | None:
    """Rate of a device of torch for some real users and all items; None where it cannot hold them, or without users."""
    if not len(users):
        return None
    import torch

    from precompute.device.scorer import DeviceScorer

    scorer = DeviceScorer.of(items, metric, device)
    if scorer is None:
        return None
    measured_rates = []
    for _ in range(_REPEATS):  # the first warms it
        started = time.perf_counter()
        scorer.top(users, min(k, len(items)))
        measured_rates.append(len(users) / (time.perf_counter() - started))
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return DeviceRate(max(measured_rates), f"a rehearsal on {name} here, {len(users):,} users")
