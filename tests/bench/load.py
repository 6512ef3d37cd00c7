"""Loading while somebody reads: the reader's p99 with the governor, without it, and with no load at all.

Redis has one core, a reader and the loader share another (with two cores there is no third). The reader asks for one
616-byte record at a time, 2,000 times a second, over a plain socket. Once a load's slow start is over, its process is
stopped and goes on in turns of a second; each turn's p99 is held against those of the two turns at rest around it, so
that a host that drifts or stalls slows both. The figure is the median of those ratios, its A/A that of two turns at
rest after each other. Loads write generation after generation and remove the last but one, as nights do. Their rate
while they run stands beside flat out (no reader, no governor) and beside pipelines of 1,000 `SET`, both measured right
before and after each loaded stretch.

On a virtual machine a core at rest halts and takes long to wake, so that a load may make a reader faster. `awake` rows
(not with `--quick`) say the same of cores that never halt. `--sweep` prints rate and p99 over page and piece sizes
instead.
"""

import multiprocessing
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import redis
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from cache.store.releases import Pointer
from precompute.bulk.load import load_part
from precompute.config.settings import NightConfig
from tests.bench.bulk_load import GENERATION, KEYS, LAYOUT, Case, make_case
from tests.bench.tools.harness import Promise, Ratio, Report, parse
from tests.bench.tools.load_rates import Baselines, flat_out, loaded
from tests.bench.tools.place import awake, own_server, pin, unpin

KIB = 1024
READS_S = 2_000.0
STARTING_S = 0.5
SPARE_S = 2.0
"""Of both processes, for a host that stalls."""
WARM_S = {"closed": 5.0, "open": 0.3}
QUICK_WARM_S = 2.5
TURN_S = 1.0
EDGE_S = 0.05
"""Left out at both ends of a turn."""
READER_CORE = 1
P99_TOLERANCE = 0.10


@dataclass(frozen=True, slots=True)
class Watched:
    """What the reader saw in each turn, as its p99 in seconds, and bytes per second while the load ran.

    There is one more turn at rest than there are loaded ones: before, between and behind them.
    """

    loaded: list[float]
    rested: list[float]
    trips: dict[str, NDArray[np.float64]]
    rate: float

    @property
    def slowed(self) -> list[float]:
        """Ratio of each loaded turn to the mean of the idle turns around it."""
        around = zip(self.rested, self.rested[1:], strict=False)
        return [p99 / ((a + b) / 2) for p99, (a, b) in zip(self.loaded, around, strict=True)]

    @property
    def drifted(self) -> list[float]:
        """Ratio of each idle turn to the one before."""
        return [b / a for a, b in zip(self.rested, self.rested[1:], strict=False)]


def read(url: str, size: int, pages: int, seconds: float, answer: Connection) -> None:
    """Read in a loop, and send back (time, round trip) of each read."""
    pin(0, READER_CORE)
    parsed_url = urlsplit(url)
    rng = np.random.default_rng(0)
    records = size // LAYOUT.size_bytes
    raw_commands = []
    for _ in range(1_000):
        name = KEYS.page(GENERATION, "user_topk", int(rng.integers(pages))).encode()
        at = int(rng.integers(records)) * LAYOUT.size_bytes
        first, last = b"%d" % at, b"%d" % (at + LAYOUT.size_bytes - 1)
        raw_commands.append(
            b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n"
            % (len(name), name, len(first), first, len(last), last)
        )
    due = len(b"$%d\r\n\r\n" % LAYOUT.size_bytes) + LAYOUT.size_bytes
    round_trips: list[tuple[float, float]] = []
    with socket.create_connection((str(parsed_url.hostname), int(parsed_url.port or 0))) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        started_at = time.perf_counter()
        next_at = started_at
        while (now_s := time.perf_counter()) < started_at + seconds:
            if now_s < next_at:
                time.sleep(next_at - now_s)
            next_at = max(next_at + 1 / READS_S, time.perf_counter() - 5 / READS_S)
            sent_at = time.perf_counter()
            wire.sendall(raw_commands[len(round_trips) % len(raw_commands)])
            received_bytes = 0
            while received_bytes < due:
                received_bytes += len(wire.recv(due))
            round_trips.append((sent_at, time.perf_counter() - sent_at))
    answer.send(np.array(round_trips))


def load(url: str, case: Case, config: NightConfig, governed: bool, seconds: float, answer: Connection) -> None:
    """Load in a loop, and send back (time, bytes so far) as Redis confirms them."""
    pin(0, READER_CORE)
    answer.send(loaded(url, case, config, governed, seconds))


@contextmanager
def process(run: Any, *arguments: Any) -> Iterator[tuple[int, Connection]]:
    """Run a process that gives one result."""
    parent_connection, child_connection = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.bench.tools.load_rates"])  # so that none imports for a second
    running = context.Process(target=run, args=(*arguments, child_connection))
    running.start()
    assert running.pid is not None
    try:
        yield running.pid, parent_connection
        running.join(30.0)
    finally:
        if running.is_alive():
            running.kill()


@contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    """Stop a process within the block; with None, do nothing."""
    if pid is None:
        yield
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def watch(
    url: str, case: Case, config: NightConfig, how: str, load_period_count: int, *, halts: bool = True
) -> Watched:
    """A reader beside a load that is stopped every other turn, on cores that may halt or not."""
    size, pages = case.part.table.page_bytes, case.part.pages.pages - 1
    total_s = STARTING_S + WARM_S[how] + (2 * load_period_count + 1) * TURN_S + SPARE_S
    spans: dict[str, list[tuple[float, float]]] = {"loaded": [], "rested": []}

    def record_period(name: str) -> None:
        started_at = time.perf_counter()
        time.sleep(TURN_S)
        spans[name].append((started_at + EDGE_S, time.perf_counter() - EDGE_S))

    with ExitStack() as stack:
        if not halts:
            stack.enter_context(awake(0))
        spinner = None if halts else stack.enter_context(awake(READER_CORE))
        _, reader = stack.enter_context(process(read, url, size, pages, total_s))
        pid, loader = stack.enter_context(process(load, url, case, config, how == "closed", total_s))
        with stopped(spinner):  # beside a load its core does not halt
            time.sleep(STARTING_S + WARM_S[how])
        for number in range(load_period_count + 1):
            with stopped(pid):
                record_period("rested")
            if number < load_period_count:
                with stopped(spinner):
                    record_period("loaded")
        steps, round_trips = loader.recv(), reader.recv()
    inside = {
        name: [round_trips[(round_trips[:, 0] >= a) & (round_trips[:, 0] < b), 1] for a, b in periods]
        for name, periods in spans.items()
    }
    p99s = {name: [float(np.percentile(trips_s, 99)) for trips_s in of] for name, of in inside.items()}
    loaded_bytes = sum(float(np.diff(np.interp(span, steps[:, 0], steps[:, 1]))[0]) for span in spans["loaded"])
    return Watched(
        p99s["loaded"], p99s["rested"],
        {name: np.concatenate(period_trips) for name, period_trips in inside.items()},
        loaded_bytes / sum(b - a for a, b in spans["loaded"]),
    )  # fmt: skip


def publish_live(client: "redis.Redis", case: Case, config: NightConfig) -> None:
    """Write what the reader reads, where probes find it."""
    client.flushall(asynchronous=False)
    load_part(client, KEYS, case.manifest, case.root, case.part, chunk_bytes=config.load_chunk_bytes)
    client.set(KEYS.live, Pointer(GENERATION, 1, None, "bench", 0.0).to_bytes())


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "", [argument for argument in sys.argv[1:] if argument != "--sweep"])
    config = NightConfig()
    count = 60_000 if options.quick else 200_000
    load_period_count = 2 if options.quick else 5
    if options.quick:
        WARM_S["closed"] = QUICK_WARM_S
    report = Report("load", ("redis", "hiredis"))
    with own_server(0) as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        report.figures["placement"] = f"redis on {pin(server.pid, 0)}, reader and loader on {pin(0, READER_CORE)}"
        with redis.Redis.from_url(server.url, protocol=3) as client:
            if "--sweep" in sys.argv:
                sweep(server.url, client, Path(folder), config, count, load_period_count)
                return
            case = make_case(Path(folder), count, config)
            report.figures["page bytes"] = case.part.table.page_bytes
            report.figures["piece bytes"] = config.governor.piece_bytes
            publish_live(client, case, config)
            measure(report, server.url, client, case, config, options.rounds, load_period_count, options.quick)
        unpin()
    report.promises = {
        "p99_closed_loop_vs_idle": Promise(maximum=1.3),
        "rate_vs_flat_out": Promise(0.1, quick="the governor has half the time to find its pace"),
        "rate_vs_set_pipeline": Promise(3.0, quick="the governor has half the time to find its pace"),
    }
    report.show(options)


def measure(
    report: Report,
    url: str,
    client: "redis.Redis",
    case: Case,
    config: NightConfig,
    rounds: int,
    load_period_count: int,
    quick: bool,
) -> None:
    """Alternating rounds; every other one runs backwards."""
    states = ("", ", awake")[: 1 if quick else 2]
    order = ("open", *(f"closed{state}" for state in states))
    stretches_by_load: dict[str, list[Watched]] = {how: [] for how in order}
    base = Baselines(url, client, case, config, 0.3 if quick else 1.0)
    base.measure()
    for number in range(rounds):
        for how in order if number % 2 else reversed(order):
            kind, _, state = how.partition(", ")
            stretches_by_load[how].append(watch(url, case, config, kind, load_period_count, halts=not state))
            base.measure()
            base.around(how)
    for how, stretches in stretches_by_load.items():
        kind, _, state = how.partition(", ")
        suffix = state and f"_{state}"
        slowed = [slowdown for stretch in stretches for slowdown in stretch.slowed]
        report.ratios[f"p99_{kind}_loop_vs_idle{suffix}"] = Ratio(
            statistics.median(slowed),
            statistics.median(drift for stretch in stretches for drift in stretch.drifted), len(slowed),
            statistics.median(p99_s for stretch in stretches for p99_s in stretch.loaded) * 1e6,
            statistics.median(p99_s for stretch in stretches for p99_s in stretch.rested) * 1e6, P99_TOLERANCE,
        )  # fmt: skip
        rates = [stretch.rate for stretch in stretches]
        if kind == "closed":
            for name, ratio in base.ratios(how, rates).items():
                report.ratios[f"rate_vs_{name}{suffix}"] = ratio
        report.figures[f"MB/s, {how}"] = round(statistics.median(rates) / 1e6, 1)
        report.figures[f"p99 over idle, {how}, quartiles"] = " / ".join(
            f"{value:.2f}" for value in np.percentile(slowed, [25, 50, 75])
        )
        for name in ("rested", "loaded"):
            trips = np.concatenate([stretch.trips[name] for stretch in stretches])
            report.figures[f"p50 / p99 / p99.9 us of {len(trips):,}, {how}, {name}"] = " / ".join(
                f"{value * 1e6:.0f}" for value in np.percentile(trips, [50, 99, 99.9])
            )
    report.figures["p99 means"] = "microseconds in the ratios' columns; rates are MB/s"


def sweep(
    url: str, client: "redis.Redis", folder: Path, config: NightConfig, count: int, load_period_count: int
) -> None:
    """Rate and the reader's p99 against idle, over page and piece sizes."""
    table = Table(
        "page KiB", "piece KiB", "MB/s beside a reader", "p99 us", "idle p99 us", "ratio", "flat out MB/s",
        title="load --sweep",
    )  # fmt: skip
    for page in (32, 64, 128, 256, 1024):
        page_config = replace(config, page_bytes=page * KIB)
        root = folder / str(page)
        root.mkdir()
        case = make_case(root, count, page_config)
        publish_live(client, case, page_config)
        flat = flat_out(url, case, page_config, 5.0)
        for piece in (16, 32, 64, 256):
            if piece > page:
                continue
            governed = replace(page_config, governor=replace(config.governor, piece_bytes=piece * KIB))
            closed = watch(url, case, governed, "closed", load_period_count)
            p99s = (statistics.median(p99_series) * 1e6 for p99_series in (closed.loaded, closed.rested))
            table.add_row(
                str(page), str(piece), f"{closed.rate / 1e6:.0f}", *(f"{p99_us:.0f}" for p99_us in p99s),
                f"{statistics.median(closed.slowed):.2f}", f"{flat / 1e6:.0f}",
            )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
