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
from tests.bench.tools.http_load import place, program
from tests.bench.tools.mix import path_of
from tests.bench.tools.place import own_server, unpin
from tests.integration.nights import environment

LOGS = Path("build/loadgen")
TOGETHER = 8
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
PLAIN = Lengths(6.0, 4.0, 60.0, 6, 2, 50_000)
LONG = Lengths(10.0, 10.0, 600.0, 7, 3, 50_000)


def offline(target: Target, seconds: float) -> Callable[[], float]:
    """Samples per second; what LoadGen prepares is as much as the last run would have needed."""
    guess = [GUESS]

    def once() -> float:
        judged = target.run("Offline", guess[0], seconds)
        guess[0] = judged.per_s
        return judged.per_s

    return once


def multistream(target: Target, seconds: float) -> Callable[[], float]:
    """Milliseconds of the 99th percentile."""

    def once() -> float:
        return target.run("MultiStream", GUESS, seconds, per_query=TOGETHER).latency_ms("99.00")

    return once


def server(target: Target, most: float, lengths: Lengths) -> Callable[[], float]:
    """The highest valid rate; 0 if none was."""

    def once() -> float:
        def is_valid(rate: float) -> bool:
            return target.run("Server", rate, lengths.probe_s).is_valid

        return highest_valid(is_valid, most, steps=lengths.steps)

    return once


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
    for each in target.runs:
        runs[each.lines.get("Scenario", "no scenario")].append(each)
    for scenario, judged in runs.items():
        report.figures[f"{target.name}: {scenario}, runs that LoadGen calls VALID"] = (
            f"{sum(each.is_valid for each in judged)} of {len(judged)}"
        )
        bad = sum((Counter(each.driven["bad"]) for each in judged), Counter[str]())
        if bad:
            report.absent.append(f"{target.name}, {scenario}: not 200: {dict(bad)}")


def describe(report: Report, name: str, rate: float, judged: Judged) -> None:
    """Figures of a long run, its log's own words among them."""
    found, driven = report.figures, judged.driven
    found[f"{name}: Server, LoadGen says"] = (
        f"{judged.lines.get('Result is', 'nothing')} at {rate:,.0f} queries/s"
    )
    found[f"{name}: Server, completed samples/s"] = judged.per_s
    for percentile in ("50.00", "90.00", "99.00", "99.90"):
        found[f"{name}: Server, p{float(percentile):g} ms"] = round(
            judged.latency_ms(percentile), 3
        )
    found[f"{name}: Server, seconds"] = round(driven["seconds"], 1)
    found[f"{name}: not 200"] = json.dumps(driven["bad"])
    found[f"{name}: strangers, answered by the model"] = (
        f"{driven['strangers']:,}, {driven['live']:,}"
    )
    found[f"{name}: share of its core that the driver used"] = round(driven["busy"], 2)
    found[f"{name}: log"] = str(judged.log)


def body_of_many(url: str, users: list[str]) -> bytes:
    """An answer to as many as MultiStream asks for at once."""
    body = json.dumps({"entities": users[:TOGETHER], "k": K}).encode()
    asked = urllib.request.Request(url + PATH, body, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(asked, timeout=30.0) as response:  # noqa: S310 - our own loopback
        found: bytes = response.read()
    return found


def measure(report: Report, case: Case, lengths: Lengths, logs: Path, stack: ExitStack) -> None:
    """All scenarios; the bare app before and after the service in each round."""
    samples = case.folder / "samples.jsonl"
    strangers = write_samples(case, samples, lengths.samples)
    report.figures["samples, share of strangers"] = f"{lengths.samples:,}, {strangers:.3f}"
    # Connections are opened ahead, and asked nothing for a while.
    env = environment(case.night, LARDER_HEAD_TIMEOUT_S="60")
    serve = [sys.executable, "-m", "serving", "--port", "0", "--log-level", "warning"]
    larder = stack.enter_context(program(serve, case.folder / "serving.log", env))
    one, many = case.folder / "one.json", case.folder / "many.json"
    one.write_bytes(body_of(larder, [path_of(user) for user in case.users[:100]]))
    many.write_bytes(body_of_many(larder.url, case.users))
    bare, bare_many = (
        stack.enter_context(
            program(
                [sys.executable, "-m", "tests.bench.tools.bare_asgi", each],
                case.folder / f"{each.stem}.log",
            )
        )
        for each in (one, many)
    )
    report.figures["placement"] = (
        f"servers on {place(larder, bare, bare_many)}, the rest on the last"
    )
    report.figures["bytes of an answer, of one to eight"] = (
        f"{one.stat().st_size:,}, {many.stat().st_size:,}"
    )

    def target(name: str, url: str) -> Target:
        return Target(name, url, samples, logs, PATH, K)

    ours, floor = target("larder", larder.url), target("bare", bare.url)
    floor_of_many = target("bare-many", bare_many.url)

    def beside(baseline: Run, candidate: Run, rounds: int, *, tolerance: float = 0.05) -> None:
        found = alternate(
            baseline,
            {"": candidate},
            rounds=rounds,
            rounds_max=rounds,
            tolerance=tolerance,
            warm=False,
        )
        report.ratios[name] = found[""]

    name = "offline_vs_bare_asgi"
    beside(offline(floor, lengths.scenario_s), offline(ours, lengths.scenario_s), lengths.rounds)
    most = {each.name: 1.1 * max(run.per_s for run in each.runs) for each in (ours, floor)}
    name = "multistream_p99_vs_bare_asgi"
    beside(
        multistream(floor_of_many, lengths.scenario_s),
        multistream(ours, lengths.scenario_s),
        lengths.rounds,
        tolerance=0.1,
    )
    for each in (ours, floor, floor_of_many):
        describe_others(report, each)
    name = "server_vs_bare_asgi"
    beside(
        server(floor, most["bare"], lengths),
        server(ours, most["larder"], lengths),
        1,
        tolerance=0.1,
    )
    found = report.ratios[name]
    if not (found.baseline and found.candidate):
        del report.ratios[name]
    for each, rate in ((floor, found.baseline), (ours, found.candidate)):
        if rate:
            describe(report, each.name, *last(each, rate, lengths.last_s))
        else:
            report.absent.append(f"{each.name}: no rate up to {most[each.name]:,.0f}/s was VALID")


def main() -> None:
    """Measure and report, or say what is missing."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--logs", type=Path, default=LOGS)
    given, sys.argv[1:] = parser.parse_known_args()
    options = parse(__doc__ or "")
    lengths = QUICK if options.quick else LONG if given.long else PLAIN
    report = Report(
        "loadgen", ("fastapi", "uvicorn", "uvloop", "redis", "onnxruntime", "faiss-cpu")
    )
    if is_there():
        with (
            own_server() as redis,
            TemporaryDirectory(prefix="larder-bench-") as folder,
            ExitStack() as stack,
        ):
            case = make_case(Path(folder), redis.url, options.quick)
            measure(report, case, lengths, given.logs, stack)
        unpin()
    else:
        report.figures["LoadGen"] = ABSENT
    report.show(options)


if __name__ == "__main__":
    main()
