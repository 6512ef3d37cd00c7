"""Tiles of the kernels of the top-K on this GPU: product rates of several shapes, then each stage by itself.

`python -m tests.bench.tools.tiles [seconds]`: Gaussian users by a million items, 128 numbers each and 256; shapes are
tried until the seconds (50) are over. Rates are users/s of the product with what is kept of it, and their part of a
large square bfloat16 product. The fastest belong into `precompute.device.fused.tiles_of`.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from precompute.config.devices import devices

USERS, ITEMS, K, FETCH = 16_896, 1_000_000, 100, 157
HISTORY = 30
CAPACITY = 256
TRIED = {  # users and items of a tile, warps, stages, programs of a multiprocessor
    128: (
        (128, 64, 4, 3, 2), (256, 128, 8, 3, 1), (128, 128, 8, 2, 2), (256, 128, 16, 3, 1), (128, 64, 4, 2, 3),
        (128, 64, 8, 3, 2), (256, 64, 8, 2, 2), (128, 128, 8, 3, 1), (256, 64, 8, 4, 1), (128, 128, 4, 2, 2),
    ),
    256: (
        (128, 64, 8, 3, 1), (128, 64, 4, 3, 1), (256, 64, 8, 3, 1), (128, 128, 8, 2, 1), (256, 64, 8, 2, 1),
        (128, 32, 4, 3, 2), (64, 128, 4, 2, 1),
    ),
}  # fmt: skip


def seconds(run: Callable[[], object], rounds: int = 3) -> float:
    """Median of some rounds, after one that compiles."""
    import torch

    durations_s = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        durations_s.append(time.perf_counter() - started)
    return sorted(durations_s[1:])[rounds // 2]


def load_items(items: Any, device: Any, group: int) -> Any:
    """Items on the device in groups of some size."""
    import torch

    from cache.topk.flat import ComparableItems
    from precompute.device.items import DeviceItems

    return DeviceItems.of(ComparableItems.of(items, "inner_product"), device, torch.float16, group)


def times_of(items: Any, users: Any, device: Any) -> dict[str, float]:
    """Microseconds for each user of each stage, run by itself on what the one before gave; nothing if not used."""
    import torch

    from precompute.device import fused

    on = load_items(items, device, fused.GROUP)
    users = users[:USERS]
    count, columns = len(users), on.whole
    if not fused.supports_search(on, columns, FETCH):
        return {}
    queries = on.encode_queries(users, users)
    tiles = fused.choose_tiles(count, queries.user_codes.shape[1], device)
    rows = torch.arange(count, device=device).repeat_interleave(HISTORY)
    pairs = rows, torch.randint(len(items), (count * HISTORY,), device=device)
    hidden = fused.sort_hidden_ordinals(pairs, count, len(items))
    required_counts = torch.full((count,), FETCH, dtype=torch.int32, device=device)
    compute_bounds = partial(
        fused.select_entries, on, columns, queries, required_counts, CAPACITY, tiles, estimating=True
    )
    kept_entries, left_out = compute_bounds()
    keys = fused.compute_exact_keys(on, columns, queries, hidden, kept_entries, left_out, tiles)
    runs: dict[str, Callable[[], object]] = {
        "copies": lambda: on.encode_queries(users, users),
        "histories": lambda: fused.sort_hidden_ordinals(pairs, count, len(items)),
        "bounds": compute_bounds,
        "exact": lambda: fused.compute_exact_keys(on, columns, queries, hidden, kept_entries, left_out, tiles),
        "best": lambda: fused.select_leading_keys(keys, K, tiles),
    }
    return {stage: seconds(run) * 1e6 / count for stage, run in runs.items()}


def square_users_per_s(dims: int, device: Any) -> float:
    """Users per second at the rate of a large square bfloat16 product."""
    import torch

    left_matrix, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_buffer = torch.empty_like(left_matrix)
    took_s = seconds(lambda: [torch.mm(left_matrix, right, out=product_buffer) for _ in range(10)])
    return 10 * 8192**3 / took_s / (ITEMS * dims)


def main() -> None:
    """Try shapes while there is time, and print what each reaches."""
    gpu_devices = [device_name for device_name in devices("auto") if device_name.startswith("cuda")]
    if not gpu_devices:
        raise SystemExit("no GPU here, or no torch that sees it: nothing was tried")
    import torch

    from precompute.device import fused

    device = torch.device(gpu_devices[0])
    ends_at = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 50)
    rng = np.random.default_rng(0)
    for dims in (128, 256):
        items = rng.standard_normal((ITEMS, dims), np.float32)
        users = rng.standard_normal((USERS, dims), np.float32)
        square = square_users_per_s(dims, device)
        print(f"{dims} numbers: {square:,.0f} users/s at the rate of a square product", flush=True)
        for stage, us in times_of(items, users, device).items():
            print(f"  {stage:10} {us:8.4f} us a user", flush=True)
        on = load_items(items, device, fused.GROUP)
        units = fused.count_multiprocessors(device)
        for rows, wide, warps, stages, resident in TRIED[dims]:
            if time.monotonic() > ends_at - (25 if dims == 128 else 0):
                break
            count = rows * max(1, units * resident // 4)
            queries = on.encode_queries(users[:count], users[:count])
            required_counts = torch.full((count,), FETCH, dtype=torch.int32, device=device)
            tiles = fused.Tiles(rows, wide, warps, stages, resident)
            try:
                took_s = seconds(partial(fused.select_entries, on, on.whole, queries, required_counts, CAPACITY, tiles))
            except Exception as error:
                print(f"  {tiles}: {type(error).__name__} {str(error)[:80]}", flush=True)
                continue
            rate = count / took_s
            print(f"  {tiles}: {rate:,.0f} users/s, {rate / square:.3f}", flush=True)


if __name__ == "__main__":
    main()
