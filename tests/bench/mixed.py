"""Mixed traffic in open loop: known users drawn by Zipf 1.0, and 5 % who are new and bring a history.

Saturation is the rate of a closed loop. Then Poisson arrivals at 50, 70 and 90 % of it: latency from when each request
was due, by percentiles. At 150 % for a while, then 50 %: what was answered in time, refused, left without inference,
and how long after the load's end the last of these was due.

- `l1_p99_vs_bare_asgi`: p99 of the L1 hits at 70 % over that of a bare ASGI app at the same arrivals (at most 2 is
  wanted).
- `goodput_150_vs_max`: answers with 200 within the deadline per second at 150 % of the saturation measured just before,
  over that (at least 0.9).

The service and the bare app are on the first core, the model's thread with them; callers and Redis on the last.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from tests.bench.read_path import Case, body_of, make_case
from tests.bench.tools.harness import Options, Report, alternate, parse
from tests.bench.tools.http_load import Program, pin_programs, program
from tests.bench.tools.mix import CONNECTIONS, DEADLINE_S, Stream, path_of
from tests.bench.tools.open_loop import SOURCES, Arrivals, Outcomes, caller, drive
from tests.bench.tools.place import own_server
from tests.bench.tools.sockets import request
from tests.integration.nights import environment

CALM_S = 2.2
P99_TOLERANCE = 0.1
LIVE, L1 = SOURCES.index("live"), SOURCES.index("l1")


@dataclass(slots=True)
class Bench:
    """State that all runs share."""

    report: Report
    stream: Stream
    larder: Program
    bare: Program
    callers: ProcessPoolExecutor
    seconds: float
    overload_s: float
    rate: float = 0.0
    """The saturation that was found last."""
    busiest: float = 0.0

    def run(self, arrivals: Arrivals) -> Outcomes:
        """Run the arrivals in the callers' process."""
        outcomes = self.callers.submit(drive, arrivals).result()
        if len(np.unique(arrivals.due)) > 1:
            self.busiest = max(self.busiest, outcomes.busy)
        return outcomes

    def saturation(self, count: int) -> float:
        """Answers per second in a closed loop; RuntimeError if one is missing."""
        outcomes = self.run(self.stream.closed(self.larder.url, count))
        if not (outcomes.status == 200).all():
            raise RuntimeError(f"{(outcomes.status != 200).sum()} of {count} were not answered")
        self.rate = count / outcomes.elapsed_s
        return self.rate

    def steady(self, rate: float, load_share: float) -> None:
        """Report percentiles at a share of saturation."""
        outcomes = self.run(self.stream.arrivals(self.larder.url, (rate * load_share, 2 * self.seconds)))
        name = f"{load_share:.0%}"
        for percent in (50, 99, 99.9):
            self.report.figures[f"{name}: p{percent} ms"] = _ms(outcomes.seconds, percent)
            hits = outcomes.seconds[outcomes.source == L1]
            self.report.figures[f"{name}: p{percent} ms of L1 hits"] = _ms(hits, percent)
        in_time = outcomes.good(DEADLINE_S)
        self.report.figures[f"{name}: requests"] = len(in_time)
        self.report.figures[f"{name}: not answered within the deadline"] = int((~in_time).sum())
        self.report.figures[f"{name}: left without inference"] = int(outcomes.is_shed.sum())

    def l1_p99(self, rate: float) -> Callable[[], float]:
        """Return p99 of L1 hits in the mix, in milliseconds."""

        def measure_p99_ms() -> float:
            outcomes = self.run(self.stream.arrivals(self.larder.url, (rate, self.seconds)))
            return _ms(outcomes.seconds[outcomes.source == L1], 99)

        return measure_p99_ms

    def bare_p99(self, rate: float) -> Callable[[], float]:
        """Return p99 of the bare app, in milliseconds."""

        def measure_p99_ms() -> float:
            mix = self.stream.arrivals(self.bare.url, (rate, self.seconds))
            bare_arrivals = Arrivals(
                mix.url, [request("/")], np.zeros_like(mix.request_indexes), mix.due, CONNECTIONS, DEADLINE_S
            )
            return _ms(self.run(bare_arrivals).seconds, 99)

        return measure_p99_ms

    def overload(self, overload_outcomes: list[Outcomes]) -> Callable[[], float]:
        """Good answers per second at 150 %; the calm after it is in what was seen."""

        def measure_goodput() -> float:
            parts = (1.5 * self.rate, self.overload_s), (0.5 * self.rate, CALM_S)
            outcomes = self.run(self.stream.arrivals(self.larder.url, *parts))
            overload_outcomes.append(outcomes)
            during = outcomes.due < self.overload_s
            return float(outcomes.good(DEADLINE_S)[during].sum()) / self.overload_s

        return measure_goodput


def _ms(seconds: NDArray[np.float64], percent: float) -> float:
    return round(float(np.percentile(seconds, percent, method="higher")) * 1000, 3)


def _tell_overload(report: Report, overload_outcomes: list[Outcomes], seconds: float) -> None:
    """Figures of all rounds at 150 % together."""
    figures = report.figures
    status = np.concatenate([outcomes.status[outcomes.due < seconds] for outcomes in overload_outcomes])
    source = np.concatenate([outcomes.source[outcomes.due < seconds] for outcomes in overload_outcomes])
    in_time = np.concatenate([outcomes.good(DEADLINE_S)[outcomes.due < seconds] for outcomes in overload_outcomes])
    durations_s = np.concatenate([outcomes.seconds[outcomes.due < seconds] for outcomes in overload_outcomes])
    figures["150%: requests"] = len(status)
    figures["150%: in time"] = round(float(in_time.mean()), 4)
    figures["150%: 503"] = int((status == 503).sum())
    figures["150%: other errors"] = int(((status != 200) & (status != 503) & (status > 0)).sum())
    figures["150%: late or without an answer"] = int(((status == 200) & ~in_time).sum()) + int((status == 0).sum())
    figures["150%: left without inference"] = sum(
        int(outcomes.is_shed[outcomes.due < seconds].sum()) for outcomes in overload_outcomes
    )
    figures["150%: live answers"] = int((source == LIVE).sum())
    for percent in (50, 99):
        figures[f"150%: p{percent} ms"] = _ms(durations_s, percent)
    figures["150%: never sent"] = sum(outcomes.given_up for outcomes in overload_outcomes)
    recovery = []
    for outcomes in overload_outcomes:
        after = outcomes.due >= seconds
        unrecovered_mask = after & (~outcomes.good(DEADLINE_S) | outcomes.is_shed)
        recovery.append(float(outcomes.due[unrecovered_mask].max(initial=seconds)) - seconds)
    figures["recovery s, median"] = round(median(recovery), 3)
    figures["recovery s, worst"] = round(max(recovery), 3)


def measure(report: Report, case: Case, options: Options) -> None:
    """Saturation, then everything at shares of it."""
    stream = Stream(case)
    serve = [sys.executable, "-m", "serving", "--port", "0", "--log-level", "warning"]
    settings = {"LARDER_DEADLINE_MS": f"{DEADLINE_S * 1000}", "LARDER_L2_DEADLINE_MS": "75"}
    settings["LARDER_HEAD_TIMEOUT_S"] = "60"  # most connections are opened ahead, and asked nothing for a while
    body = case.folder / "body.json"
    with program(serve, case.folder / "serving.log", environment(case.night, **settings)) as larder:
        body.write_bytes(body_of(larder, [path_of(user) for user in case.users[:100]]))
        bare_app: list[str | Path] = [sys.executable, "-m", "tests.bench.tools.bare_asgi", body]
        with program(bare_app, case.folder / "bare.log") as bare, caller() as callers:
            where = pin_programs(larder, bare)
            report.figures["placement"] = f"servers on {where}, callers and redis on the last core"
            seconds = (1.0, 1.5) if options.quick else (5.0, 5.0)
            bench = Bench(report, stream, larder, bare, callers, *seconds)
            bench.run(stream.all_known(larder.url))
            _measure(bench, options)


def _measure(bench: Bench, options: Options) -> None:
    report = bench.report
    count = 6_000 if options.quick else 40_000
    rate = median(bench.saturation(count) for _ in range(3))
    report.figures["saturation, requests/s"] = round(rate)
    for load_share in (0.5, 0.7, 0.9):
        bench.steady(rate, load_share)
    report.ratios["l1_p99_vs_bare_asgi"] = alternate(
        bench.bare_p99(0.7 * rate),
        {"": bench.l1_p99(0.7 * rate)},
        rounds=options.rounds,
        rounds_max=6 if options.quick else None,
        tolerance=P99_TOLERANCE,
    )[""]
    overload_outcomes: list[Outcomes] = []
    report.ratios["goodput_150_vs_max"] = alternate(
        lambda: bench.saturation(count),
        {"": bench.overload(overload_outcomes)},
        rounds=options.rounds,
        rounds_max=5 if options.quick else None,
    )[""]
    _tell_overload(report, overload_outcomes, bench.overload_s)
    report.figures["callers: share of a core used, at most"] = round(bench.busiest, 2)


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("mixed", ("fastapi", "uvicorn", "uvloop", "redis", "onnxruntime", "faiss-cpu"))
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        measure(report, make_case(Path(folder), server.url, options.quick), options)
    report.show(options)


if __name__ == "__main__":
    main()
