"""Where the time of a top-K on a GPU goes: kernels and copies in microseconds a user, and when the device is idle.

Gaussian users by a million items of 128 numbers, histories excluded, K = 100; profiled by torch. LARDER_DEVICE chooses
another device than the first GPU; without a GPU nothing is measured.
"""

import os
from collections import Counter

import numpy as np

from cache.model.tower import Histories
from precompute.config.devices import devices
from tests.bench.tools.harness import Report, parse

USERS, ITEMS, DIMS, K, HISTORY = 200_000, 1_000_000, 128, 100, 32
KERNELS_REPORTED = 12
"""Kernels and copies that took longest."""


def main() -> None:
    """Profile one search and report; without a GPU only say so."""
    options = parse(__doc__.splitlines()[0])
    report = Report("profile", ("torch",))
    gpus = [device for device in devices("auto") if device.startswith("cuda")]
    device = os.environ.get("LARDER_DEVICE", gpus[0] if gpus else "")
    report.figures["device"] = device or "none: nothing is measured"
    if device.startswith("cuda"):
        import torch
        from torch.profiler import ProfilerActivity, profile

        from precompute.device.scorer import DeviceScorer

        rng = np.random.default_rng(0)
        users = rng.standard_normal((USERS, DIMS), np.float32)
        histories = Histories(np.arange(USERS + 1) * HISTORY, rng.integers(0, ITEMS, USERS * HISTORY))
        scorer = DeviceScorer.of(rng.standard_normal((ITEMS, DIMS), np.float32), "inner_product", device)
        if scorer is None:
            raise SystemExit(f"{device} cannot be used: the log says why")
        scorer.top(users, K, histories)  # compiles, and fills torch's caches of memory
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            scorer.top(users, K, histories)
        events = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiled.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        spent_us: Counter[str] = Counter()
        busy_us, ended_us = 0.0, events[0][0]
        for start_us, end_us, name in events:
            spent_us[name[:60]] += end_us - start_us
            busy_us += max(0.0, end_us - max(start_us, ended_us))
            ended_us = max(ended_us, end_us)
        report.figures |= {
            "users": USERS,
            "span_us": round((ended_us - events[0][0]) / USERS, 4),
            "busy_us": round(busy_us / USERS, 4),
            **{name: round(us / USERS, 4) for name, us in spent_us.most_common(KERNELS_REPORTED)},
        }
    report.show(options)


if __name__ == "__main__":
    main()
