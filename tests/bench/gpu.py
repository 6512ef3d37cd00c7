"""Exact top-100 of all items on a GPU, history excluded: from users in host memory to lists in host memory.

Beside one large square bfloat16 product on the same device (`matrix_rate_128`, `matrix_rate_256`: the part of its rate
that the whole top-K reaches), the bare half-precision product in the same tiles (which selects nothing), torch's
product with topk end to end (over-fetching nothing: it does not even exclude), and FAISS or cuVS where they see the
GPU; then each stage of the kernels by itself, in microseconds for each user. `million` is 100,000 Gaussian users by a
million items, 128 numbers each, or 256; `skewed` has item lengths as real ones have; `real128` and `real256` as in the
bench `topk`. LARDER_DEVICE chooses another device than the first GPU; without any, nothing is measured. The night on
the same device is the bench `night`, its baseline the kernel there.
"""

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cache.model.tower import Histories
from precompute.config.devices import devices
from tests.bench.tools.harness import Options, Report, compare, parse
from tests.bench.tools.tiles import times_of
from tests.bench.tools.topk_cases import Case, random_case, real_case, real_file
from tests.bench.topk import recall_of

K = 100
ROWS = 1024
SIZES = {"gpu": (100_000, 1_000_000), "gpu quick": (65_536, 262_144), "processor": (2048, 8192)}
SQUARE = {"cuda": 8192, "cpu": 512}
RATES = {
    ("million", "square_product"): "matrix_rate_128",
    ("million256", "square_product"): "matrix_rate_256",
}


def made(users: int, items: int, dims: int, *, skewed: bool = False) -> Case:
    """Gaussian vectors; `skewed` gives items lengths as the reference model's are (log-normal)."""
    few = random_case(4096, items, dims)
    rng = np.random.default_rng(1)
    vectors = few.items
    if skewed:
        vectors = vectors * np.exp(0.9 * rng.standard_normal((items, 1))).astype(np.float32)
    rows = np.arange(users) % 4096
    return Case(rng.standard_normal((users, dims), np.float32), vectors, few.histories.take(rows))


def cases(options: Options, kind: str) -> Iterator[tuple[str, Case]]:
    """(name, case); real ones only where the data is."""
    size = SIZES["gpu quick" if kind == "gpu" and options.quick else kind]
    yield "million", made(*size, 128)
    if kind != "processor":
        yield "million256", made(*size, 256)
    yield "skewed", made(*size, 128, skewed=True)
    if (file := real_file()) is not None and kind == "gpu":
        for dims in (128,) if options.quick else (128, 256):
            with tempfile.TemporaryDirectory() as folder:
                yield f"real{dims}", real_case(file, Path(folder), 1 << 30, dims)


def timed(users: int, run: Callable[[], object], device: Any) -> float:
    """Users per second."""
    settle(device)
    started = time.perf_counter()
    run()
    settle(device)
    return users / (time.perf_counter() - started)


def product(case: Case, device: Any, columns: int) -> Callable[[], object]:
    """The bare product on the device, users and items there already."""
    import torch

    dtype = torch.float32 if device.type == "cpu" else torch.float16
    users, items = (torch.from_numpy(each).to(device, dtype) for each in (case.users, case.items))
    out = torch.empty((ROWS, min(columns, len(items))), dtype=dtype, device=device)

    def run() -> None:
        for row in range(0, len(users), ROWS):
            some = users[row : row + ROWS]
            for start in range(0, len(items), out.shape[1]):
                part = items[start : start + out.shape[1]]
                torch.mm(some, part.T, out=out[: len(some), : len(part)])

    return run


def square_product(case: Case, device: Any) -> float:
    """Users per second, could a device multiply them by all items like one large square matrix."""
    import torch

    side, dtype = SQUARE[device.type], torch.float32 if device.type == "cpu" else torch.bfloat16
    rng = torch.Generator().manual_seed(0)
    left, right = (torch.randn(side, side, generator=rng).to(device, dtype) for _ in range(2))
    out = torch.empty_like(left)

    def run() -> None:
        for _ in range(10):
            torch.mm(left, right, out=out)

    run()
    products_per_s = timed(10, run, device)
    return products_per_s * side**3 / case.items.size


def settle(device: Any) -> None:
    """Waits for the device."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_topk(case: Case, device: Any, columns: int) -> Callable[[], object]:
    """torch's product and topk, copies of users and lists included, nothing excluded."""
    import torch

    dtype = torch.float32 if device.type == "cpu" else torch.float16
    items = torch.from_numpy(case.items).to(device, dtype)
    rows = max(1, ROWS * columns // len(items)) if len(items) > columns else ROWS

    def run() -> None:
        for row in range(0, len(case.users), rows):
            some = torch.from_numpy(case.users[row : row + rows]).to(device, dtype)
            found = torch.topk(some @ items.T, K)
            found.values.cpu(), found.indices.cpu()

    return run


def faiss_gpu(case: Case) -> Callable[[], object] | None:
    """FAISS on the GPU, nothing excluded; None where this FAISS has none."""
    import faiss

    if not getattr(faiss, "get_num_gpus", lambda: 0)():
        return None
    index = faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), case.items.shape[1])
    index.add(case.items)
    return lambda: [
        index.search(case.users[row : row + 16_384], K) for row in range(0, len(case.users), 16_384)
    ]


def cuvs(case: Case) -> Callable[[], object] | None:
    """cuVS brute force, nothing excluded; None where it is not installed."""
    if importlib.util.find_spec("cuvs") is None or importlib.util.find_spec("cupy") is None:
        return None
    cupy = importlib.import_module("cupy")
    brute_force = importlib.import_module("cuvs.neighbors.brute_force")
    index = brute_force.build(cupy.asarray(case.items), metric="inner_product")

    def run() -> None:
        for row in range(0, len(case.users), 16_384):
            queries = cupy.asarray(case.users[row : row + 16_384])
            for found in brute_force.search(index, queries, K):
                cupy.asnumpy(cupy.asarray(found))

    return run


def measure(report: Report, options: Options, device: Any, name: str, case: Case) -> None:
    """One case: ours beside everything that is there."""
    from precompute.device.scorer import DeviceScorer

    started = time.perf_counter()
    scorer = DeviceScorer.of(case.items, "inner_product", str(device))
    if scorer is None:
        raise SystemExit(f"{device} cannot be used for {name}: the log says why")
    settle(device)
    report.figures[f"{name}_users"], report.figures[f"{name}_items"] = (
        len(case.users),
        len(case.items),
    )
    report.figures[f"{name}_prepare_s"] = round(time.perf_counter() - started, 3)
    report.figures[f"{name}_recall"] = recall_of(case, scorer, 16)
    report.figures[f"{name}_without_histories_users_per_s"] = round(
        timed(len(case.users), partial(scorer.top, case.users, K, nothing(case)), device)
    )
    columns = 1 << 20 if device.type == "cuda" else 1 << 12
    baselines: dict[str, Callable[[], object] | None] = {
        "matrix_product": product(case, device, columns),
        "matmul_topk": matmul_topk(case, device, columns),
        "faiss_gpu": faiss_gpu(case),
        "cuvs": cuvs(case),
    }
    found = compare(
        {
            "square_product": partial(square_product, case, device),
            **{
                label: partial(timed, len(case.users), run, device)
                for label, run in baselines.items()
                if run is not None
            },
        },
        {
            "larder": partial(
                timed, len(case.users), partial(scorer.top, case.users, K, case.histories), device
            )
        },
        rounds=options.rounds,
        rounds_max=options.rounds + 2,
    )
    for (baseline, _), ratio in found.items():
        label = RATES.get((name, baseline), f"{name}_vs_{baseline}")
        report.ratios[label] = ratio
        report.figures[f"{name}_users_per_s"] = round(ratio.candidate)
    if device.type == "cuda":
        for stage, us in times_of(case.items, case.users, device).items():
            report.figures[f"{name}_{stage}_us"] = round(us, 4)
    if scorer.has_failed:
        raise SystemExit(f"{device} failed while {name} was measured: the log says why")


def nothing(case: Case) -> Histories:
    """Nobody has anything."""
    return Histories(np.zeros(len(case.users) + 1, np.int64), np.empty(0, np.int64))


def main() -> None:
    """Measure and report; without a device only say so."""
    options = parse(__doc__.splitlines()[0])
    report = Report("gpu", ("torch", "faiss-cpu", "faiss-gpu", "cuvs-cu12"))
    found = devices(os.environ.get("LARDER_DEVICE", "auto"))
    report.figures["device"] = found[0] if found else "none: nothing is measured"
    if found:
        import torch

        device = torch.device(found[0])
        with suppress(AssertionError, RuntimeError):  # of the processor there is no name
            report.figures["device_name"] = torch.cuda.get_device_name(device)
        for name, case in cases(options, "gpu" if device.type == "cuda" else "processor"):
            measure(report, options, device, name, case)
    report.show(options)


if __name__ == "__main__":
    main()
