"""Exact top-100 of all items on a GPU, history excluded: from users in host memory to lists in host memory.

Beside one large square bfloat16 product on the same device (`matrix_rate_128`, `matrix_rate_256`: the part of its rate
that the whole top-K reaches), the bare half-precision product in the same tiles (which selects nothing), torch's
product with topk end to end (over-fetching nothing: it does not even exclude), and FlashLib, FAISS or cuVS where they
are installed and see the GPU; then each stage of the kernels by itself, in microseconds for each user. `million` is
400,000 Gaussian users by a million items, 128 numbers each, or 256; `skewed` has item lengths as real ones have, and
100,000 users; `real128` and `real256` as in the bench `topk`. What only makes lists to compare with (torch, FlashLib,
FAISS, cuVS) gets the first 50,000 of the users: it takes longer for each, and has no pipeline that has to fill.

FlashLib searches `million` and `million256` by squared L2 distance in half precision and excludes nothing: the work is
that of an inner product, the lists are others. `<case>_flashlib` says which of its paths ran (named by us, so it takes
no other; it takes CuteDSL by itself only up to 20 neighbours on Hopper), and `<case>_flashlib_recall` the share of the
exact lists of its own distance that it finds. `<case>_tenth_users_per_s` is our rate among a tenth of the items, for
the table that `plan --card` goes by. LARDER_DEVICE chooses another device than the first GPU; without any, nothing is
measured. The night on the same device is the bench `night`, its baseline the kernel there.
"""

import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cache.model.tower import Histories
from precompute.config.devices import devices
from tests.bench.tools.harness import Options, Report, compare, parse
from tests.bench.tools.tiles import times_of
from tests.bench.tools.topk_cases import Case, random_case, real_case, real_file
from tests.bench.topk import exact_scores, recall_of, recall_of_lists

K = 100
ROWS = 1024


@dataclass(frozen=True, slots=True)
class CaseSizes:
    """Number of users of `million` and `million256`, of users of `skewed`, and of items."""

    users: int
    skewed_users: int
    items: int


SIZES = {
    "gpu": CaseSizes(400_000, 100_000, 1_000_000),
    "gpu quick": CaseSizes(65_536, 65_536, 262_144),
    "processor": CaseSizes(2048, 2048, 8192),
}
LISTED_USERS = 50_000
"""Users whose lists the baselines make."""
FLASHLIB_TRIED_USERS = 4096
"""Users that FlashLib is tried with: it compiles a kernel for each number of users."""
FLASHLIB_RUN_S = 1.0
"""Seconds that a run of FlashLib may take: a longer one would be of FLASHLIB_TRIED_USERS only."""
RECALL_ROWS = 16
SQUARE = {"cuda": 8192, "cpu": 512}
RATES = {("million", "square_product"): "matrix_rate_128", ("million256", "square_product"): "matrix_rate_256"}


def draw_case(users: int, items: int, dims: int, *, skewed: bool = False) -> Case:
    """Gaussian vectors; `skewed` gives items lengths as the reference model's are (log-normal)."""
    base_case = random_case(4096, items, dims)
    rng = np.random.default_rng(1)
    vectors = base_case.items
    if skewed:
        vectors = vectors * np.exp(0.9 * rng.standard_normal((items, 1))).astype(np.float32)
    rows = np.arange(users) % 4096
    return Case(rng.standard_normal((users, dims), np.float32), vectors, base_case.histories.select_rows(rows))


def cases(options: Options, kind: str) -> Iterator[tuple[str, Case]]:
    """(name, case); real ones only where the data is."""
    size = SIZES["gpu quick" if kind == "gpu" and options.quick else kind]
    yield "million", draw_case(size.users, size.items, 128)
    if kind != "processor":
        yield "million256", draw_case(size.users, size.items, 256)
    yield "skewed", draw_case(size.skewed_users, size.items, 128, skewed=True)
    if (file := real_file()) is not None and kind == "gpu":
        for dims in (128,) if options.quick else (128, 256):
            with tempfile.TemporaryDirectory() as folder:
                yield f"real{dims}", real_case(file, Path(folder), 1 << 30, dims)


def first_users(case: Case, count: int) -> Case:
    """The case with its first users only."""
    if len(case.users) <= count:
        return case
    return Case(case.users[:count], case.items, case.histories.select_rows(np.arange(count)))


def timed(users: int, run: Callable[[], object], device: Any) -> float:
    """Return users per second."""
    settle(device)
    started = time.perf_counter()
    run()
    settle(device)
    return users / (time.perf_counter() - started)


def product(case: Case, device: Any, columns: int) -> Callable[[], object]:
    """The bare product on the device, users and items there already."""
    import torch

    dtype = torch.float32 if device.type == "cpu" else torch.float16
    users, items = (torch.from_numpy(vectors).to(device, dtype) for vectors in (case.users, case.items))
    product_buffer = torch.empty((ROWS, min(columns, len(items))), dtype=dtype, device=device)

    def run() -> None:
        for row in range(0, len(users), ROWS):
            user_batch = users[row : row + ROWS]
            for start in range(0, len(items), product_buffer.shape[1]):
                part = items[start : start + product_buffer.shape[1]]
                torch.mm(user_batch, part.T, out=product_buffer[: len(user_batch), : len(part)])

    return run


def square_product(case: Case, device: Any) -> float:
    """Users per second, could a device multiply them by all items like one large square matrix."""
    import torch

    side, dtype = SQUARE[device.type], torch.float32 if device.type == "cpu" else torch.bfloat16
    rng = torch.Generator().manual_seed(0)
    left_matrix, right = (torch.randn(side, side, generator=rng).to(device, dtype) for _ in range(2))
    product_buffer = torch.empty_like(left_matrix)

    def run() -> None:
        for _ in range(10):
            torch.mm(left_matrix, right, out=product_buffer)

    run()
    products_per_s = timed(10, run, device)
    return products_per_s * side**3 / case.items.size


def settle(device: Any) -> None:
    """Wait for the device."""
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
            user_batch = torch.from_numpy(case.users[row : row + rows]).to(device, dtype)
            top_lists = torch.topk(user_batch @ items.T, K)
            top_lists.values.cpu(), top_lists.indices.cpu()

    return run


def faiss_gpu(case: Case) -> Callable[[], object] | None:
    """FAISS on the GPU, nothing excluded; None where this FAISS has none."""
    import faiss

    if not getattr(faiss, "get_num_gpus", lambda: 0)():
        return None
    index = faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), case.items.shape[1])
    index.add(case.items)
    return lambda: [index.search(case.users[row : row + 16_384], K) for row in range(0, len(case.users), 16_384)]


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
            for search_output in brute_force.search(index, queries, K):
                cupy.asnumpy(cupy.asarray(search_output))

    return run


@dataclass(frozen=True, slots=True)
class FlashlibSearch:
    """FlashLib's exact search of the items for each user of a case; copies of users in and lists out are part of it."""

    case: Case
    device: Any
    items: Any
    """The items on the device, in the precision that is searched in."""
    backend: str

    @classmethod
    def of(cls, case: Case, device: Any) -> "FlashlibSearch":
        """Search of a case's items by the path for this device: Triton's on a GPU, torch's elsewhere."""
        import torch

        is_gpu = device.type == "cuda"
        dtype = torch.float16 if is_gpu else torch.float32
        items = torch.from_numpy(case.items).to(device, dtype)
        return cls(case, device, items, "triton" if is_gpu else "torch")

    @property
    def path(self) -> str:
        """What was searched, in words."""
        return f"{self.backend}, {str(self.items.dtype).removeprefix('torch.')}, squared L2"

    def lists(self, count: int) -> Any:
        """Ordinals of the nearest items of the first users, with their distances copied out as well."""
        import torch

        flash_knn = importlib.import_module("flashlib.primitives.knn").flash_knn
        users = torch.from_numpy(self.case.users[:count]).to(self.device, self.items.dtype)
        # With a named backend, FlashLib uses that one or fails, and chooses no other.
        distances, ordinals = flash_knn(users, self.items, K, backend=self.backend)
        distances.cpu()
        return ordinals.cpu().numpy()

    def affordable_users(self) -> int:
        """Users of the case whose lists take no longer than FLASHLIB_RUN_S, by a run over a few of them."""
        tried = min(FLASHLIB_TRIED_USERS, len(self.case.users))
        self.lists(tried)  # compiles
        rate = timed(tried, partial(self.lists, tried), self.device)
        users = len(self.case.users)
        return users if users <= rate * FLASHLIB_RUN_S else tried

    def recall(self) -> float:
        """Share of the exact 100 nearest of some users that are found."""
        ordinals = self.lists(min(FLASHLIB_TRIED_USERS, len(self.case.users)))[:RECALL_ROWS]
        lengths = np.einsum("ij,ij->i", self.case.items, self.case.items, dtype=np.float64)
        return recall_of_lists(2 * exact_scores(self.case, RECALL_ROWS) - lengths, ordinals)


def flashlib(report: Report, name: str, case: Case, device: Any) -> tuple[int, Callable[[], object]] | None:
    """(users, run) of FlashLib, its path and recall among the figures; None if it is not installed or fails here."""
    if importlib.util.find_spec("flashlib") is None:
        return None
    try:
        search = FlashlibSearch.of(case, device)
        users = search.affordable_users()
        run = partial(search.lists, users)
        run()
        report.figures[f"{name}_flashlib_recall"] = round(search.recall(), 6)
    except Exception as error:  # the other baselines are measured all the same
        report.figures[f"{name}_flashlib"] = f"failed: {type(error).__name__}: {str(error)[:200]}"
        print(f"{name}: FlashLib failed: {error!r}", file=sys.stderr, flush=True)
        return None
    report.figures[f"{name}_flashlib"] = search.path
    report.figures[f"{name}_flashlib_users"] = users
    return users, run


def measure(report: Report, options: Options, device: Any, name: str, case: Case) -> None:
    """One case: ours beside everything that is there."""
    from precompute.device.scorer import DeviceScorer

    started = time.perf_counter()
    scorer = DeviceScorer.of(case.items, "inner_product", str(device))
    if scorer is None:
        raise SystemExit(f"{device} cannot be used for {name}: the log says why")
    settle(device)
    report.figures[f"{name}_users"], report.figures[f"{name}_items"] = (len(case.users), len(case.items))
    report.figures[f"{name}_prepare_s"] = round(time.perf_counter() - started, 3)
    report.figures[f"{name}_recall"] = recall_of(case, scorer, RECALL_ROWS)
    without_histories = partial(scorer.top, case.users, K, empty_histories(case))
    without_histories()  # compiles, and takes the memory that it will use
    report.figures[f"{name}_without_histories_users_per_s"] = round(timed(len(case.users), without_histories, device))
    columns = 1 << 20 if device.type == "cuda" else 1 << 12
    listed_case = first_users(case, LISTED_USERS)
    report.figures[f"{name}_listed_users"] = len(listed_case.users)
    baselines: dict[str, tuple[int, Callable[[], object]]] = {
        "matrix_product": (len(case.users), product(case, device, columns)),
        "matmul_topk": (len(listed_case.users), matmul_topk(listed_case, device, columns)),
    }
    for label, run in (("faiss_gpu", faiss_gpu(listed_case)), ("cuvs", cuvs(listed_case))):
        if run is not None:
            baselines[label] = len(listed_case.users), run
    if name.startswith("million") and (searched := flashlib(report, name, listed_case, device)):
        baselines["flashlib"] = searched
    ratio_by_pair = compare(
        {
            "square_product": partial(square_product, case, device),
            **{label: partial(timed, users, run, device) for label, (users, run) in baselines.items()},
        },
        {"larder": partial(timed, len(case.users), partial(scorer.top, case.users, K, case.histories), device)},
        rounds=options.rounds,
        rounds_max=options.rounds + 2,
    )
    for (baseline, _), ratio in ratio_by_pair.items():
        label = RATES.get((name, baseline), f"{name}_vs_{baseline}")
        report.ratios[label] = ratio
        report.figures[f"{name}_users_per_s"] = round(ratio.candidate)
    if name.startswith("million") and (rate := tenth_users_per_s(case, device)) is not None:
        report.figures[f"{name}_tenth_users_per_s"] = round(rate)
    if device.type == "cuda":
        for stage, us in times_of(case.items, case.users, device).items():
            report.figures[f"{name}_{stage}_us"] = round(us, 4)
    if scorer.has_failed:
        raise SystemExit(f"{device} failed while {name} was measured: the log says why")


def tenth_users_per_s(case: Case, device: Any) -> float | None:
    """Lists a second among the first tenth of the items, None if the device cannot hold them beside all of them.

    By both rates a plan knows what does not grow with the items.
    """
    from precompute.device.scorer import DeviceScorer

    items = case.items[: len(case.items) // 10]
    histories = Histories(case.histories.indptr, case.histories.indices % len(items))
    scorer = DeviceScorer.of(items, "inner_product", str(device))
    if scorer is None:
        return None
    run = partial(scorer.top, case.users, K, histories)
    run()
    return statistics.median(timed(len(case.users), run, device) for _ in range(3))


def empty_histories(case: Case) -> Histories:
    """Return empty histories for all users."""
    return Histories(np.zeros(len(case.users) + 1, np.int64), np.empty(0, np.int64))


def main() -> None:
    """Measure and report; without a device only say so."""
    options = parse(__doc__.splitlines()[0])
    report = Report("gpu", ("torch", "triton", "flashlib", "faiss-cpu", "faiss-gpu", "cuvs-cu12"))
    device_names = devices(os.environ.get("LARDER_DEVICE", "auto"))
    report.figures["device"] = device_names[0] if device_names else "none: nothing is measured"
    if device_names:
        import torch

        device = torch.device(device_names[0])
        with suppress(AssertionError, RuntimeError):  # of the processor there is no name
            report.figures["device_name"] = torch.cuda.get_device_name(device)
        for name, case in cases(options, "gpu" if device.type == "cuda" else "processor"):
            measure(report, options, device, name, case)
            if options.json:  # so that a session that ends early has what was measured
                print(json.dumps(report.to_json(quick=options.quick)), flush=True)
    report.show(options)


if __name__ == "__main__":
    main()
