"""Loading while somebody reads: the reader's p99 with the governor, without it, and with no load at all.

Redis has one core, a reader and the loader share another (with two cores there is no third). The reader asks for one
616-byte record at a time, 2,000 times a second, over a plain socket; each round it reads alone, under a governed load,
under one that runs flat out, and alone again. A p99 is the median of those of its seconds, so that one burst of a
restless host is not the figure. Its A/A compares what lies before the loads in two rounds and behind them in the next
two with the rest, so that a drift of the host, and which load came last, count on both sides. Loads write generation
after generation and remove the last but one, as nights do. A governed load is watched once its slow start is over; its
rate stands beside flat out (no reader, no governor) and beside pipelines of 1,000 `SET`, both measured shortly before
and after each loaded stretch.

On a virtual machine a core at rest halts and takes long to wake, so that a load may make a reader faster. `awake` rows
(not with `--quick`) say the same of cores that never halt: Redis' own, and the reader's while no loader keeps it awake.
`--sweep` prints rate and p99 over page and piece sizes instead.
"""

import multiprocessing
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

from cache.releases import Pointer
from precompute.bulk.load import load_part
from precompute.config import NightConfig
from tests.bench.bulk_load import GENERATION, KEYS, LAYOUT, Case, make_case
from tests.bench.harness import Ratio, Report, parse
from tests.bench.load_rates import Baselines, flat_out, loaded
from tests.bench.place import awake, own_server, pin, unpin

KIB = 1024
READS_S = 2_000.0
WARM_S = {"closed": 5.0, "open": 0.3, "idle": 0.1}
QUICK_WARM_S = 2.5
READER_CORE = 1
P99_TOLERANCE = 0.10


@dataclass(frozen=True, slots=True)
class Watched:
    """A reader's round trips in seconds, those of each second apart, and what was loaded meanwhile in bytes/s."""

    round_trips: list[NDArray[np.float64]]
    rate: float

    @classmethod
    def of(cls, found: NDArray[np.float64], rate: float) -> "Watched":
        """From (time, round trip) of each read in order."""
        count = max(1, round(float(found[-1, 0] - found[0, 0])))
        return cls([each[:, 1] for each in np.array_split(found, count)], rate)


def read(url: str, size: int, pages: int, seconds: float, answer: Connection) -> None:
    """The reader: (time, round trip) of each read."""
    pin(0, READER_CORE)
    place = urlsplit(url)
    rng = np.random.default_rng(0)
    records = size // LAYOUT.size_bytes
    asked = []
    for _ in range(1_000):
        name = KEYS.page(GENERATION, "user_topk", int(rng.integers(pages))).encode()
        at = int(rng.integers(records)) * LAYOUT.size_bytes
        first, last = b"%d" % at, b"%d" % (at + LAYOUT.size_bytes - 1)
        asked.append(
            b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n"
            % (len(name), name, len(first), first, len(last), last)
        )
    due = len(b"$%d\r\n\r\n" % LAYOUT.size_bytes) + LAYOUT.size_bytes
    found: list[tuple[float, float]] = []
    with socket.create_connection((str(place.hostname), int(place.port or 0))) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        next_at = began
        while (now := time.perf_counter()) < began + seconds:
            if now < next_at:
                time.sleep(next_at - now)
            next_at = max(next_at + 1 / READS_S, time.perf_counter() - 5 / READS_S)
            sent = time.perf_counter()
            wire.sendall(asked[len(found) % len(asked)])
            got = 0
            while got < due:
                got += len(wire.recv(due))
            found.append((sent, time.perf_counter() - sent))
    answer.send(np.array(found))


def load(
    url: str, case: Case, config: NightConfig, governed: bool, seconds: float, answer: Connection
) -> None:
    """The loader: (time, bytes so far) as Redis confirms them."""
    pin(0, READER_CORE)
    answer.send(loaded(url, case, config, governed, seconds))


@contextmanager
def process(run: Any, *arguments: Any) -> Iterator[Connection]:
    """A process that answers once."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.bench.load_rates"])  # so that none imports for a second
    running = context.Process(target=run, args=(*arguments, there))
    running.start()
    try:
        yield here
        running.join(30.0)
    finally:
        if running.is_alive():
            running.kill()


def watch(
    url: str, case: Case, config: NightConfig, how: str, seconds: float, *, halts: bool = True
) -> Watched:
    """One stretch of reading, loaded as `how` says, on cores that may halt or not."""
    size, pages = case.part.table.page_bytes, case.part.pages.pages - 1
    starting_s = (
        0.0 if how == "idle" else 1.5
    )  # the loader begins after the reader, imports included
    whole = starting_s + WARM_S[how] + seconds
    with ExitStack() as stack:
        for core in () if halts else (0, READER_CORE) if how == "idle" else (0,):
            stack.enter_context(awake(core))
        reader = stack.enter_context(process(read, url, size, pages, whole))
        if how == "idle":
            found = reader.recv()
            taken = found[found[:, 0] > found[-1, 0] - seconds]
            return Watched.of(taken, 0.0)
        with process(load, url, case, config, how == "closed", WARM_S[how] + seconds) as loader:
            steps, found = loader.recv(), reader.recv()
    began, ended = steps[0, 0] + WARM_S[how], min(steps[-1, 0], found[-1, 0])
    inside = (found[:, 0] >= began) & (found[:, 0] < ended)
    bytes_then = np.interp([began, ended], steps[:, 0], steps[:, 1])
    rate = (bytes_then[1] - bytes_then[0]) / max(1e-9, ended - began)
    return Watched.of(found[inside], float(rate))


def p99(stretches: list[Watched]) -> float:
    """The median of their seconds' own."""
    return statistics.median(
        float(np.percentile(second, 99)) for each in stretches for second in each.round_trips
    )


def publish_live(client: "redis.Redis", case: Case, config: NightConfig) -> None:
    """What the reader reads, where probes look for it."""
    client.flushall(asynchronous=False)
    load_part(
        client, KEYS, case.manifest, case.root, case.part, chunk_bytes=config.load_chunk_bytes
    )
    client.set(KEYS.live, Pointer(GENERATION, 1, None, "bench", 0.0).to_bytes())


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "", [each for each in sys.argv[1:] if each != "--sweep"])
    config = NightConfig()
    count = 60_000 if options.quick else 200_000
    seconds = 1.5 if options.quick else 5.0
    if options.quick:
        WARM_S["closed"] = QUICK_WARM_S
    report = Report("load", ("redis", "hiredis"))
    with own_server(0) as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        report.figures["placement"] = (
            f"redis on {pin(server.pid, 0)}, reader and loader on {pin(0, READER_CORE)}"
        )
        with redis.Redis.from_url(server.url, protocol=3) as client:
            if "--sweep" in sys.argv:
                sweep(server.url, client, Path(folder), config, count, seconds)
                return
            case = make_case(Path(folder), count, config)
            report.figures["page bytes"] = case.part.table.page_bytes
            report.figures["piece bytes"] = config.governor.piece_bytes
            publish_live(client, case, config)
            measure(
                report, server.url, client, case, config, options.rounds, seconds, options.quick
            )
        unpin()
    report.show(options)


def measure(
    report: Report,
    url: str,
    client: "redis.Redis",
    case: Case,
    config: NightConfig,
    rounds: int,
    seconds: float,
    quick: bool,
) -> None:
    """Alternating rounds; every other one runs backwards."""
    states = ("", ", awake")[: 1 if quick else 2]
    order = ("open", *(f"closed{state}" for state in states))
    idles = [f"{when}{state}" for when in ("before", "after") for state in states]
    seen: dict[str, list[Watched]] = {how: [] for how in (*idles, *order)}

    def look(how: str) -> None:
        kind, _, state = how.partition(", ")
        kind = "idle" if kind in ("before", "after") else kind
        seen[how].append(watch(url, case, config, kind, seconds, halts=not state))

    base = Baselines(url, client, case, config, seconds / 5)
    for number in range(rounds):
        for state in states:
            look(f"before{state}")
        base.measure()
        for how in order if number % 2 else reversed(order):
            look(how)
            base.measure()
            base.around(how)
        for state in reversed(states):
            look(f"after{state}")
    for state in states:
        before, after = seen[f"before{state}"], seen[f"after{state}"]
        idle, suffix = p99(before + after), state.replace(", ", "_")
        pairs = list(enumerate(zip(before, after, strict=True)))
        aa = p99([pair[number // 2 % 2] for number, pair in pairs]) / p99(
            [pair[1 - number // 2 % 2] for number, pair in pairs]
        )
        for how in ("closed",) if state else ("closed", "open"):
            found = p99(seen[f"{how}{state}"])
            report.ratios[f"p99_{how}_loop_vs_idle{suffix}"] = Ratio(
                found / idle, aa, rounds, found * 1e6, idle * 1e6, P99_TOLERANCE
            )
        rates = [each.rate for each in seen[f"closed{state}"]]
        for name, ratio in base.ratios(f"closed{state}", rates).items():
            report.ratios[f"rate_vs_{name}{suffix}"] = ratio
        report.figures[f"loaded beside a reader{state}, MB/s"] = round(
            statistics.median(rates) / 1e6, 1
        )
    for how, stretches in seen.items():
        report.figures[f"reads, {how}"] = sum(
            len(second) for each in stretches for second in each.round_trips
        )
        trips = np.concatenate([second for each in stretches for second in each.round_trips])
        report.figures[f"p50 / p99 / p99.9 us, {how}"] = " / ".join(
            f"{value * 1e6:.0f}" for value in np.percentile(trips, [50, 99, 99.9])
        )
    report.figures["loaded beside a reader, open loop, MB/s"] = round(
        statistics.median(each.rate for each in seen["open"]) / 1e6, 1
    )
    report.figures["p99 means"] = "microseconds in the ratios' columns; rates are MB/s"


def sweep(
    url: str,
    client: "redis.Redis",
    folder: Path,
    config: NightConfig,
    count: int,
    seconds: float,
) -> None:
    """Rate and the reader's p99 against idle, over page and piece sizes."""
    table = Table(
        "page KiB", "piece KiB", "MB/s beside a reader", "p99 us", "idle p99 us", "ratio", "flat out MB/s",
        title="load --sweep",
    )  # fmt: skip
    for page in (32, 64, 128, 256, 1024):
        chosen = replace(config, page_bytes=page * KIB)
        root = folder / str(page)
        root.mkdir()
        case = make_case(root, count, chosen)
        publish_live(client, case, chosen)
        flat = flat_out(url, case, chosen, seconds)
        for piece in (16, 32, 64, 256):
            if piece > page:
                continue
            governed = replace(chosen, governor=replace(config.governor, piece_bytes=piece * KIB))
            idle = watch(url, case, governed, "idle", seconds)
            closed = watch(url, case, governed, "closed", seconds)
            table.add_row(
                str(page), str(piece), f"{closed.rate / 1e6:.0f}", f"{p99([closed]) * 1e6:.0f}",
                f"{p99([idle]) * 1e6:.0f}", f"{p99([closed]) / p99([idle]):.2f}", f"{flat / 1e6:.0f}",
            )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
