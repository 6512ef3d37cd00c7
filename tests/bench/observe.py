"""What observing costs an L1 hit: the same service with everything that watches it, and with all of it switched off.

- `l1_throughput_on_vs_off`: requests per second of the server's processor time of `GET /v1/lookup/user_topk/{id}?k=20`,
  each a ready answer in L1, 32 keep-alive connections; on: as installed; off: `LARDER_OBSERVE=false` (no counting of
  ready answers, no size advisor and nothing else that the setting switches off).

Both are driven until the advisor has found its sampling rate before anything is measured. The figure is the median over
several pairs of processes.
"""

import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.read_path import Case, make_case
from tests.bench.tools.harness import Options, Ratio, Report, alternate, parse
from tests.bench.tools.http_load import Program, pin_programs, program
from tests.bench.tools.mix import path_of
from tests.bench.tools.place import own_server
from tests.bench.tools.sockets import per_cpu_s, request
from tests.integration.nights import environment

TOLERANCE = 0.02
"""Of the A/A ratio: a few per cent are to be told from none."""
SETTLE = 400_000
"""Requests before the first round."""
COUNT = 20_000
"""Requests in each part of a round."""
PAIRS = 12
"""Of processes, on and off: two that run the same differ by a few per cent for as long as they live."""
ROUNDS = 5
"""Of each pair, at least."""


@contextmanager
def served(case: Case, name: str, settings: Mapping[str, str]) -> Iterator[Program]:
    """The service with these settings, on the first core."""
    command = [sys.executable, "-m", "serving", "--port", "0", "--log-level", "warning"]
    env = environment(case.night, **settings)
    with program(command, case.folder / f"{name}.log", env) as running:
        pin_programs(running)
        yield running


def on_vs_off(case: Case, off: Mapping[str, str], options: Options) -> Ratio:
    """Rates of L1 hits as installed, over those with the settings that switch something off."""
    users = random.Random(0).sample(case.users, len(case.users))
    lookups = [request(path_of(user)) for user in users]

    def run(target: Program) -> Callable[[], float]:
        return lambda: per_cpu_s(target, lookups, COUNT)

    pair_ratios = []
    for _ in range(5 if options.quick else PAIRS):
        with served(case, "on", {}) as on, served(case, "off", off) as without:
            for running_server in (on, without):
                per_cpu_s(running_server, lookups, SETTLE)
            rounds = max(ROUNDS, options.rounds // PAIRS)
            (ratio,) = alternate(run(without), {"on": run(on)}, rounds=rounds, tolerance=TOLERANCE).values()
            pair_ratios.append(ratio)
    return merge_ratios(pair_ratios)


def merge_ratios(ratios: Sequence[Ratio]) -> Ratio:
    """The ratios of several pairs of processes as one: medians."""

    def middle(of: Callable[[Ratio], float]) -> float:
        return statistics.median(map(of, ratios))

    return Ratio(
        middle(lambda ratio: ratio.value), middle(lambda ratio: ratio.aa), sum(ratio.rounds for ratio in ratios),
        middle(lambda ratio: ratio.candidate), middle(lambda ratio: ratio.baseline), TOLERANCE,
    )  # fmt: skip


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("observe", ("fastapi", "uvicorn", "uvloop", "httptools"))
    report.figures["unit"] = "requests per second of the server's processor time"
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        case = make_case(Path(folder), server.url, options.quick)
        off = {"LARDER_OBSERVE": "false"}
        report.ratios["l1_throughput_on_vs_off"] = on_vs_off(case, off, options)
    report.show(options)


if __name__ == "__main__":
    main()
