"""What 1,000 slow or hostile peers cost callers that behave well, beside 1,000 idle connections.

- `p99_vs_idle`: 99th percentile of the server-side time from a request's arrival to its answer's write, all requests of
  the mix (known users by Zipf 1.0 as GETs, 5 % new ones as POSTs with a history), with hostile peers over idle ones
  (at most 1.1 is wanted).
- `l1_p99_vs_idle`: the same of the GETs alone, told beside it: nearly all of them are ready answers of 0.05 ms, so
  their slowest hundredth is whoever waited for anybody's turn.

Hostile, in equal parts: header lines without an end; half a head that trickles; 500 pipelined GETs whose answers are
never read; a body that trickles; silence. A peer that is ended comes back after five seconds or so. The service asks
for no token, so that a peer may use it as far as a caller may.
Arrival is when the caller sent, on the same machine, so waiting for a busy service counts. Rounds of idle, hostile and
idle peers, each beside the same requests, which were all asked once before, alternate in one service until the 95 %
interval of the median of `p99_vs_idle` is within half the margin, or up to `ROUNDS_MAX` or `MINUTES_MAX`; every round
is in the figures, and told as it ends. Also: the service's largest memory (300 MB are allowed), and requests that had
no 200 within the deadline (none are).
"""

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from tests.bench.read_path import make_case
from tests.bench.tools.harness import Options, Promise, Ratio, Report, parse
from tests.bench.tools.hostile_calls import Answered, call
from tests.bench.tools.hostile_peers import HOSTILE, peers
from tests.bench.tools.hostile_server import FILE, Times
from tests.bench.tools.http_load import Program, program
from tests.bench.tools.mix import DEADLINE_S, Stream
from tests.bench.tools.open_loop import caller
from tests.bench.tools.place import awake, own_server
from tests.integration.nights import environment

PEERS = 1_000
RATE = 400.0
"""Requests per second: far from saturation, so that it is the peers that are seen."""
MARGIN = 0.1
MEMORY_MB = 300
ROUNDS_MAX = 40
MINUTES_MAX = 30.0
"""What is seen until then is reported, agreed or not."""
_SEED = 0
TOKEN = "bench"
AUTHORIZED = f"\r\nAuthorization: Bearer {TOKEN}\r\n".encode()


class Block(NamedTuple):
    """One run of callers with peers of one kind."""

    all_ms: float
    l1_ms: float
    answered: Answered


@dataclass(slots=True)
class Bench:
    """The service, its callers and the measurements of both."""

    larder: Program
    times: Times
    path: Path
    stream: Stream
    callers: ProcessPoolExecutor
    seconds: float
    settle_s: float
    memory_mb: float = 0.0
    blocks_by_sort: dict[str, list[Block]] = field(default_factory=lambda: {"idle": [], "hostile": []})

    def block(self, sort: str) -> Block:
        """Return the 99th percentiles with these peers."""
        kinds = ["idle"] if sort == "idle" else HOSTILE
        with peers(self.larder.url, list(itertools.islice(itertools.cycle(kinds), PEERS))):
            self._call(self.settle_s)
            self.times.drain_times()
            answered = self._call(self.seconds)
            durations_ns, is_get = self.times.drain_times()
            self.memory_mb = max(self.memory_mb, _memory_mb(self.larder.pid))
        block = Block(_p99_ms(durations_ns), _p99_ms(durations_ns[is_get]), answered)
        self.blocks_by_sort[sort].append(block)
        time.sleep(0.5)  # the service sees its peers go
        return block

    def warm(self) -> None:
        """Send a block's requests without peers, uncounted, so that their answers are in L1."""
        self._call(self.settle_s)
        self._call(self.seconds)

    def _call(self, seconds: float) -> Answered:
        arrivals = self.stream.arrivals(self.larder.url, (RATE, seconds))
        with_token = [raw_request.replace(b"\r\n", AUTHORIZED, 1) for raw_request in arrivals.requests]
        requests = [with_token[request_index] for request_index in arrivals.request_indexes]
        where = urlsplit(self.larder.url)
        address = where.hostname or "", where.port or 0
        due = arrivals.due.tolist()
        return self.callers.submit(call, address, self.path, requests, due, DEADLINE_S).result()


def _p99_ms(durations_ns: NDArray[np.int64]) -> float:
    return round(float(np.percentile(durations_ns, 99, method="higher")) / 1e6, 4)


def _memory_mb(pid: int) -> float:
    """Return the peak resident memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


class Round(NamedTuple):
    """Blocks of idle, hostile and idle peers or, in every other round, of hostile, idle and hostile ones."""

    first: Block
    middle: Block
    last: Block
    is_idle_first: bool


def ratio_of(rounds: Sequence[Round], figure: Callable[[Block], float]) -> Ratio:
    """Return hostile over idle, and the last block of a kind over its first."""
    ratios, aa, idle, hostile = [], [], [], []
    for round_ in rounds:
        ends = (figure(round_.first) + figure(round_.last)) / 2
        middle = figure(round_.middle)
        calm, stormy = (ends, middle) if round_.is_idle_first else (middle, ends)
        ratios.append(stormy / calm)
        aa.append(figure(round_.last) / figure(round_.first))
        idle.append(calm)
        hostile.append(stormy)
    middle_of = statistics.median
    return Ratio(
        middle_of(ratios), middle_of(aa), len(rounds), middle_of(hostile), middle_of(idle), MARGIN / 2
    )  # fmt: skip


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, from 10,000 resamples."""
    rng = np.random.default_rng(_SEED)
    drawn = rng.choice(np.array(ratios), (10_000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def per_round(rounds: Sequence[Round], figure: Callable[[Block], float]) -> list[float]:
    """Return the ratio of each round."""
    return [round(ratio_of([round_], figure).value, 3) for round_ in rounds]


def measure(report: Report, bench: Bench, options: Options) -> None:
    """Run rounds until the interval is narrow enough."""
    rounds: list[Round] = []
    limit = options.rounds if options.quick else max(options.rounds, ROUNDS_MAX)
    bench.block("idle")  # what is asked most is in L1 after it
    bench.block("hostile")
    for blocks in bench.blocks_by_sort.values():
        blocks.clear()
    ends_at = time.monotonic() + 60 * MINUTES_MAX
    while len(rounds) < options.rounds or (len(rounds) < limit and time.monotonic() < ends_at and not _agree(rounds)):
        rounds.append(_round(bench, len(rounds)))
        ratios = (per_round(rounds[-1:], figure)[0] for figure in FIGURES.values())
        p99_texts = (f"{block.all_ms:.2f}" for block in rounds[-1][:3])
        line = f"round {len(rounds)}: {', '.join(map(str, ratios))} (p99 {', '.join(p99_texts)} ms)"
        print(line, file=sys.stderr, flush=True)
    for name, figure in FIGURES.items():
        round_ratios = per_round(rounds, figure)
        low, high = interval(round_ratios)
        report.ratios[f"{name}_vs_idle"] = ratio_of(rounds, figure)
        report.figures[f"{name}: 95 % of the ratio"] = f"{low:.3f} to {high:.3f}"
        report.figures[f"{name}: ratios of all rounds"] = " ".join(map(str, round_ratios))
    quick_reason = "the p99 of a block of two seconds is that of eight requests"
    report.promises["p99_vs_idle"] = Promise(maximum=1 + MARGIN, quick=quick_reason)
    report.figures["95 % intervals within half the margin"] = "yes" if _agree(rounds) else "NO"
    report_memory_and_callers(report, bench)


def _round(bench: Bench, number: int) -> Round:
    """Send equal requests at equal times in each block (new ids have other names): only the peers differ."""

    def begin() -> None:
        bench.stream.rng = np.random.default_rng([_SEED, number])

    def block(sort: str) -> Block:
        begin()
        return bench.block(sort)

    begin()
    bench.warm()  # else the first block reads from Redis what the others find in L1
    is_idle_first = number % 2 == 0
    ends, middle = ("idle", "hostile") if is_idle_first else ("hostile", "idle")
    return Round(block(ends), block(middle), block(ends), is_idle_first)


FIGURES: dict[str, Callable[[Block], float]] = {"p99": lambda block: block.all_ms, "l1_p99": lambda block: block.l1_ms}


def _agree(rounds: Sequence[Round]) -> bool:
    low, high = interval(per_round(rounds, FIGURES["p99"]))
    return high - low <= MARGIN


def report_memory_and_callers(report: Report, bench: Bench) -> None:
    """What became of memory and of callers: `missed` is the share of requests without a 200 in the deadline."""
    for sort, blocks in bench.blocks_by_sort.items():
        answered = [block.answered for block in blocks]
        request_count, missed = (
            sum(getattr(answered_calls, name) for answered_calls in answered) for name in ("requests", "missed")
        )
        report.ratios[f"{sort}_missed"] = Ratio(missed / request_count, 1.0, 1, missed, request_count)
        report.figures[f"{sort}: slowest as callers saw it, ms"] = max(
            answered_calls.slowest_ms for answered_calls in answered
        )
    peak_memory_mb = bench.memory_mb
    report.ratios["memory_vs_bound"] = Ratio(peak_memory_mb / MEMORY_MB, 1.0, 1, peak_memory_mb, MEMORY_MB)
    report.promises["memory_vs_bound"] = Promise(maximum=1.0)
    report.promises["hostile_missed"] = Promise(maximum=0)


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("hostile", ("fastapi", "uvicorn", "uvloop", "httptools"))
    random.seed(_SEED)
    with (
        awake(0), own_server() as redis, TemporaryDirectory(prefix="larder-bench-") as name, caller() as callers,
    ):  # fmt: skip
        folder = Path(name)
        case = make_case(folder, redis.url, options.quick)
        path = folder / "times"
        times = Times(path)
        # Idle connections must stay open for the length of a block; all other settings are the defaults.
        env = {**environment(case.night), "LARDER_IDLE_TIMEOUT_S": "600", "LARDER_TOKEN": "", FILE: str(path)}
        serve = [sys.executable, "-m", "tests.bench.tools.hostile_server", "--port", "0", "--log-level", "error"]
        with program(serve, folder / "serving.log", env) as larder:
            seconds, settle_s = (2.0, 1.0) if options.quick else (15.0, 3.0)
            report.figures["peers"] = PEERS
            report.figures["requests per second"] = RATE
            report.figures["seconds of a block"] = seconds
            report.figures["seed"] = _SEED
            measure(report, Bench(larder, times, path, Stream(case), callers, seconds, settle_s), options)
    report.show(options)


if __name__ == "__main__":
    main()
