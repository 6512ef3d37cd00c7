"""The service of this tree beside that of another one, on the same night: `python -m tests.bench.beside --tree PATH`.

- `l1`: `GET /v1/lookup/user_topk/{id}?k=20` of answers that are ready in L1.
- `l2`: the same where L1 holds nothing; `batch_json`, `batch_arrow`: 100 ids of a POST, JSON and Arrow IPC streams.
- `live`: a stranger's history, computed for each request.

The figure is requests per second of the server's processor time. Both services run at the same time on the first core
and are asked in turns: on a shared machine the same commit differs from itself by half when one runs after the other.
How a process lies in memory makes six percent as well, whatever the turns: so many pairs of processes with few turns
each are what is measured. Printed is the mean of the pairs' ratios, this tree over the other, with its 95 % interval
(Student's t). With `--tree .` the interval shows what the machine alone makes.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from scipy import stats

from precompute.config.settings import NightConfig
from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.client.calls import write_arrow_ids
from tests.bench.read_path import TABLE, Case, make_case
from tests.bench.tools.harness import machine, versions
from tests.bench.tools.http_load import Program, pin_programs, program
from tests.bench.tools.place import own_server
from tests.bench.tools.sockets import per_cpu_s, request
from tests.integration.nights import environment

OURS = Path(__file__).parents[2]
BATCH = 100
NAMES = ("l1", "l2", "batch_json", "batch_arrow", "live")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that one of a tree's two services gets, `count` of them in a turn."""

    has_l1: bool
    requests: list[bytes]
    count: int
    connections: int = 32


def workloads(case: Case, scale: float) -> dict[str, Workload]:
    """All five by name."""
    rng = random.Random(0)
    path = f"/v1/lookup/{TABLE}"
    gets = [request(f"{path}/{quote(user, safe='')}?k=20") for user in case.users]
    batches = [rng.sample(case.users, BATCH) for _ in range(64)]
    texts = [request(path, json.dumps({"entities": ids, "k": 20}).encode()) for ids in batches]
    streams = [request(path, write_arrow_ids(ids, {"k": "20"}), ARROW_MEDIA_TYPE) for ids in batches]
    histories = [
        request(path, json.dumps({
            "entities": [{"id": f"stranger-{number}", "history": rng.sample(case.items, 8)}], "k": 20, "fresh": True,
        }).encode())
        for number in range(2_000)
    ]  # fmt: skip
    return {
        "l1": Workload(True, rng.sample(gets, 200), int(20_000 * scale)),
        "l2": Workload(False, gets, int(8_000 * scale)),
        "batch_json": Workload(False, texts, int(600 * scale), connections=4),
        "batch_arrow": Workload(False, streams, int(600 * scale), connections=4),
        "live": Workload(False, histories, int(1_500 * scale)),
    }


@contextmanager
def services(name: str, tree: Path, night: NightConfig, folder: Path) -> Iterator[dict[bool, Program]]:
    """Run two services of a tree: with L1 (True) and without (False)."""
    serve = [sys.executable, "-P", "-m", "serving", "--port", "0", "--log-level", "warning"]
    with ExitStack() as stack:
        programs = {}
        for has_l1 in (True, False):
            variables = {"PYTHONPATH": str(tree)} | ({} if has_l1 else {"LARDER_L1_BYTES": "1"})
            log = folder / f"{name}-{has_l1}.log"
            programs[has_l1] = stack.enter_context(program(serve, log, environment(night, **variables)))
        pin_programs(*programs.values())
        yield programs


def measure_pair(
    case: Case, trees: dict[str, Path], names: Sequence[str], turns: int, scale: float, first: str
) -> dict[str, float]:
    """Ratio of each named workload, from processes of their own: the median of the turns."""
    loads = {name: load for name, load in workloads(case, scale).items() if name in names}
    order = sorted(trees, key=lambda name: name != first)
    with ExitStack() as stack:
        programs = {name: stack.enter_context(services(name, trees[name], case.night, case.folder)) for name in order}

        def rate_of(name: str, load: Workload) -> Callable[[], float]:
            target = programs[name][load.has_l1]
            return lambda: per_cpu_s(target, load.requests, load.count, load.connections)

        ratio_by_load = {}
        for load_name, load in loads.items():
            rates = {name: rate_of(name, load) for name in order}
            for rate in rates.values():
                rate()  # warm: what L1 holds is ready after it
            ratios = []
            for turn in range(turns):
                measured = {name: rates[name]() for name in (order if turn % 2 else order[::-1])}
                ratios.append(measured["ours"] / measured["theirs"])
            ratio_by_load[load_name] = statistics.median(ratios)
        return ratio_by_load


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval."""
    mean = statistics.fmean(ratios)
    half = stats.t.ppf(0.975, len(ratios) - 1) * statistics.stdev(ratios) / len(ratios) ** 0.5
    return mean, mean - half, mean + half


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tree", type=Path, required=True, help="root of the other tree, its C code built; this one: A/A"
    )
    parser.add_argument("--pairs", type=int, default=40, help="pairs of processes, at least 2 (default: 40)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each pair (default: 3)")
    parser.add_argument("--scale", type=float, default=0.5, help="factor of requests of a turn (default: 0.5)")
    parser.add_argument(
        "--only", default=",".join(NAMES), metavar="NAMES", help="workloads, with commas between them (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error(f"--pairs is {options.pairs}: an interval needs at least 2")
    if not (options.tree / "serving").is_dir():
        parser.error(f"--tree is {options.tree}: there is no serving/ below it")
    names = options.only.split(",")
    if unknown_names := sorted(set(names) - set(NAMES)):
        parser.error(f"--only names {', '.join(unknown_names)}; there are {', '.join(NAMES)}")
    trees = {"ours": OURS, "theirs": options.tree.resolve()}
    about = {
        "bench": "beside",
        "tree": str(options.tree),
        "versions": versions(("uvicorn", "uvloop", "httptools", "onnxruntime")),
        "machine": machine(),
    }
    print(json.dumps(about))
    ratios: dict[str, list[float]] = {}
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        case = make_case(Path(folder), server.url, quick=True)
        for pair in range(options.pairs):
            first = "ours" if pair % 2 else "theirs"
            pair_ratios = measure_pair(case, trees, names, options.turns, options.scale, first)
            print(pair + 1, {name: round(ratio, 3) for name, ratio in pair_ratios.items()}, flush=True)
            for name, ratio in pair_ratios.items():
                ratios.setdefault(name, []).append(ratio)
    intervals = {name: interval(values) for name, values in ratios.items()}
    for name, (mean, lower, upper) in intervals.items():
        print(f"{name:12} {mean:.3f} [{lower:.3f}, {upper:.3f}], {options.pairs} pairs")
    if options.json:
        print(json.dumps(about | {"ratios": intervals}))


if __name__ == "__main__":
    main()
