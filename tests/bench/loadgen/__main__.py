"""The service, driven by LoadGen, MLPerf's load generator; a run of it here is no MLPerf result.

Users are drawn by Zipf 1.0, and 5 % are strangers who bring a history. Scenarios and clocks are LoadGen's:

- Server: Poisson arrivals, 99 % within 10 ms of when they were due. A bisection looks for the highest rate of which its
  log says VALID and of which every answer was 200; the last run, a little below, is the long one.
  `server_vs_bare_asgi`: the rate of the search over that of a bare ASGI app.
- Offline: everything is there at once. `offline_vs_bare_asgi`: samples per second over the bare app's.
- MultiStream: eight samples, one request for all of them, then the next eight. `multistream_p99_vs_bare_asgi`: its 99th
  percentile over that of a bare app which sends as many bytes.

Service and bare app are on the first core, the model's thread with them; driver and Redis on the last. `--long` makes
the last run 600 s, as LoadGen's rules for Server want it; otherwise it takes one minute, with `--quick` seconds.
`--logs FOLDER` is where LoadGen's logs stay (`build/loadgen`). `make judges-env` installs LoadGen; without it the bench
says so and ends.
"""

import argparse
import json
import sys
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.judges.environment import ABSENT, is_there
from tests.bench.loadgen.runs import Judged, Target, highest_valid
from tests.bench.loadgen.samples import PATH, K, write_samples
from tests.bench.read_path import Case, body_of, make_case
from tests.bench.tools.harness import Report, Run, alternate, parse
from tests.bench.tools.http_load import pin_programs, program
from tests.bench.tools.mix import path_of
from tests.bench.tools.place import own_server, unpin
from tests.integration.nights import environment

LOGS = Path("build/loadgen")
SAMPLES_PER_QUERY = 8
BELOW = 0.95
"""The long run's rate over the search's: what a short run lets through a long one may not."""
GUESS = 10_000.0
TRIES = 4


@dataclass(frozen=True, slots=True)
class Lengths:
    """Seconds of runs, and how often the search halves its range."""

    probe_s: float
    scenario_s: float
    last_s: float
    steps: int
    rounds: int
    samples: int


QUICK = Lengths(1.5, 1.5, 4.0, 4, 1, 5_000)
STANDARD = Lengths(6.0, 4.0, 60.0, 6, 2, 50_000)
LONG = Lengths(10.0, 10.0, 600.0, 7, 3, 50_000)


def offline(target: Target, seconds: float) -> Callable[[], float]:
    """Samples per second; what LoadGen prepares is as much as the last run would have needed."""
    guess = [GUESS]

    def measure_rate() -> float:
        judged = target.run("Offline", guess[0], seconds)
        guess[0] = judged.per_s
        return judged.per_s

    return measure_rate


def multistream(target: Target, seconds: float) -> Callable[[], float]:
    """Milliseconds of the 99th percentile."""

    def measure_p99_ms() -> float:
        return target.run("MultiStream", GUESS, seconds, per_query=SAMPLES_PER_QUERY).latency_ms("99.00")

    return measure_p99_ms


def server(target: Target, rate_max: float, lengths: Lengths) -> Callable[[], float]:
    """The highest valid rate; 0 if none was."""

    def find_highest_rate() -> float:
        def is_valid(rate: float) -> bool:
            return target.run("Server", rate, lengths.probe_s).is_valid

        return highest_valid(is_valid, rate_max, steps=lengths.steps)

    return find_highest_rate


def last(target: Target, rate: float, seconds: float) -> tuple[float, Judged]:
    """The long run: a little slower each time until LoadGen says VALID."""
    for _ in range(TRIES):
        rate *= BELOW
        judged = target.run("Server", rate, seconds)
        if judged.is_valid:
            break
    return rate, judged


def describe_others(report: Report, target: Target) -> None:
    """Version, what LoadGen says of Offline and MultiStream, and answers that it counted although they were not 200."""
    report.figures["LoadGen"] = target.runs[0].driven["version"]
    runs: defaultdict[str, list[Judged]] = defaultdict(list)
    for judged_run in target.runs:
        runs[judged_run.lines.get("Scenario", "no scenario")].append(judged_run)
    for scenario, judged in runs.items():
        report.figures[f"{target.name}: {scenario}, runs that LoadGen calls VALID"] = (
            f"{sum(judged_run.is_valid for judged_run in judged)} of {len(judged)}"
        )
        error_counts = sum((Counter(judged_run.driven["bad"]) for judged_run in judged), Counter[str]())
        if error_counts:
            report.absent.append(f"{target.name}, {scenario}: not 200: {dict(error_counts)}")


def describe(report: Report, name: str, rate: float, judged: Judged) -> None:
    """Figures of a long run, its log's own words among them."""
    figures, driven = report.figures, judged.driven
    figures[f"{name}: Server, LoadGen says"] = f"{judged.lines.get('Result is', 'nothing')} at {rate:,.0f} queries/s"
    figures[f"{name}: Server, completed samples/s"] = judged.per_s
    for percentile in ("50.00", "90.00", "99.00", "99.90"):
        figures[f"{name}: Server, p{float(percentile):g} ms"] = round(judged.latency_ms(percentile), 3)
    figures[f"{name}: Server, seconds"] = round(driven["seconds"], 1)
    figures[f"{name}: not 200"] = json.dumps(driven["bad"])
    figures[f"{name}: strangers, answered by the model"] = f"{driven['strangers']:,}, {driven['live']:,}"
    figures[f"{name}: share of its core that the driver used"] = round(driven["busy"], 2)
    figures[f"{name}: log"] = str(judged.log)


def body_of_many(url: str, users: list[str]) -> bytes:
    """An answer to as many as MultiStream asks for at once."""
    body = json.dumps({"entities": users[:SAMPLES_PER_QUERY], "k": K}).encode()
    http_request = urllib.request.Request(url + PATH, body, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(http_request, timeout=30.0) as response:  # noqa: S310 - our own loopback
        response_body: bytes = response.read()
    return response_body


def measure(report: Report, case: Case, lengths: Lengths, logs: Path, stack: ExitStack) -> None:
    """All scenarios; the bare app before and after the service in each round."""
    samples = case.folder / "samples.jsonl"
    strangers = write_samples(case, samples, lengths.samples)
    report.figures["samples, share of strangers"] = f"{lengths.samples:,}, {strangers:.3f}"
    # Connections are opened in advance and carry no request for a while.
    env = environment(case.night, LARDER_HEAD_TIMEOUT_S="60")
    serve = [sys.executable, "-m", "serving", "--port", "0", "--log-level", "warning"]
    larder = stack.enter_context(program(serve, case.folder / "serving.log", env))
    single_body_path, batch_body_path = case.folder / "one.json", case.folder / "many.json"
    single_body_path.write_bytes(body_of(larder, [path_of(user) for user in case.users[:100]]))
    batch_body_path.write_bytes(body_of_many(larder.url, case.users))
    bare, bare_many = (
        stack.enter_context(
            program(
                [sys.executable, "-m", "tests.bench.tools.bare_asgi", body_path], case.folder / f"{body_path.stem}.log"
            )
        )
        for body_path in (single_body_path, batch_body_path)
    )
    report.figures["placement"] = f"servers on {pin_programs(larder, bare, bare_many)}, the rest on the last"
    report.figures["bytes of an answer, of one to eight"] = (
        f"{single_body_path.stat().st_size:,}, {batch_body_path.stat().st_size:,}"
    )

    def target(name: str, url: str) -> Target:
        return Target(name, url, samples, logs, PATH, K)

    larder_target, floor = target("larder", larder.url), target("bare", bare.url)
    floor_of_many = target("bare-many", bare_many.url)

    def record_ratio(baseline: Run, candidate: Run, rounds: int, *, tolerance: float = 0.05) -> None:
        ratio_by_name = alternate(
            baseline, {"": candidate}, rounds=rounds, rounds_max=rounds, tolerance=tolerance, warm=False
        )
        report.ratios[name] = ratio_by_name[""]

    name = "offline_vs_bare_asgi"
    record_ratio(offline(floor, lengths.scenario_s), offline(larder_target, lengths.scenario_s), lengths.rounds)
    rate_max_by_target = {
        server_target.name: 1.1 * max(run.per_s for run in server_target.runs)
        for server_target in (larder_target, floor)
    }
    name = "multistream_p99_vs_bare_asgi"
    record_ratio(
        multistream(floor_of_many, lengths.scenario_s),
        multistream(larder_target, lengths.scenario_s),
        lengths.rounds,
        tolerance=0.1,
    )
    for server_target in (larder_target, floor, floor_of_many):
        describe_others(report, server_target)
    name = "server_vs_bare_asgi"
    record_ratio(
        server(floor, rate_max_by_target["bare"], lengths),
        server(larder_target, rate_max_by_target["larder"], lengths),
        1,
        tolerance=0.1,
    )
    server_ratio = report.ratios[name]
    if not (server_ratio.baseline and server_ratio.candidate):
        del report.ratios[name]
    for server_target, rate in ((floor, server_ratio.baseline), (larder_target, server_ratio.candidate)):
        if rate:
            describe(report, server_target.name, *last(server_target, rate, lengths.last_s))
        else:
            report.absent.append(
                f"{server_target.name}: no rate up to {rate_max_by_target[server_target.name]:,.0f}/s was VALID"
            )


def main() -> None:
    """Measure and report, or say what is missing."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--logs", type=Path, default=LOGS)
    arguments, sys.argv[1:] = parser.parse_known_args()
    options = parse(__doc__ or "")
    lengths = QUICK if options.quick else LONG if arguments.long else STANDARD
    report = Report("loadgen", ("fastapi", "uvicorn", "uvloop", "redis", "onnxruntime", "faiss-cpu"))
    if is_there():
        with own_server() as redis, TemporaryDirectory(prefix="larder-bench-") as folder, ExitStack() as stack:
            case = make_case(Path(folder), redis.url, options.quick)
            measure(report, case, lengths, arguments.logs, stack)
        unpin()
    else:
        report.figures["LoadGen"] = ABSENT
    report.show(options)


if __name__ == "__main__":
    main()
