"""L1 hits over HTTP of users without events, beside the same service without the feature.

- `l1_without_events`: requests per second of the server's processor time of `GET /v1/lookup/user_topk/{id}?k=20`, each
  a ready answer in L1, 32 keep-alive connections; `[events] enabled`, while 100,000 other users have events, over the
  same with it off (at least 0.97 is wanted). Both answer from one generation, whose night takes events.

Two processes that run the same differ by a few per cent for as long as they live. So several times three are started:
with the feature, and two without, which are the A/A; each is driven until the size advisor has found its sampling rate,
then they take turns, in every order once. The figure is the median over these times; its interval is of 10,000
resamples of them.
"""

import random
from itertools import permutations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import redis

from cache.events.event import Event
from cache.events.stream import ACCEPT_SCRIPT, StreamBounds, accept_script_arguments, pack_event
from tests.bench.events.fresh import SETTINGS, make_case
from tests.bench.hostile import interval
from tests.bench.observe import served
from tests.bench.read_path import Case
from tests.bench.tools.harness import Options, Promise, Ratio, Report, parse
from tests.bench.tools.http_load import Program
from tests.bench.tools.mix import path_of
from tests.bench.tools.place import own_server
from tests.bench.tools.sockets import per_cpu_s, request
from tests.polling import poll_until

TIMES, QUICK_TIMES = 12, 3
OTHER_USERS = 100_000
"""Users with an event each, none of whom is asked for."""
SETTLE, QUICK_SETTLE = 400_000, 40_000
"""Requests before the first round."""
COUNT, QUICK_COUNT = 20_000, 10_000
"""Requests in each part of a round."""
TOLERANCE = 0.02
"""Of the A/A ratio: a few per cent are to be told from none."""


def accept(case: Case, count: int) -> None:
    """Accept events of so many other users, as a service does."""
    keyspace, bounds = case.night.keyspace(), StreamBounds(256 << 20, 86_400_000, 1)
    with redis.Redis.from_url(case.night.events_redis_url, protocol=2) as client:
        for start in range(0, count, 1_000):
            events = [
                Event(f"{number}", 1, b"another-%d" % number, case.items[number % len(case.items)].encode())
                for number in range(start, start + 1_000)
            ]  # fmt: skip
            keys, arguments = accept_script_arguments(
                keyspace, bounds, [pack_event(keyspace, event) for event in events]
            )
            client.eval(ACCEPT_SCRIPT, len(keys), *keys, *arguments)


def counts_others(target: Program) -> bool:
    """True once the service has read the whole stream."""
    with urlopen(f"{target.url}/metrics") as response:  # noqa: S310 - our own loopback server
        lines = response.read().decode().splitlines()
    user_count_lines = [line for line in lines if line.startswith("larder_events_users")]
    return bool(user_count_lines) and float(user_count_lines[0].split()[-1]) >= OTHER_USERS


def one_time(case: Case, settle: int, count: int) -> list[tuple[float, float, float]]:
    """Return rates of three fresh processes in each round: with the feature, without, without again."""
    users = random.Random(0).sample(case.users, min(2_000, len(case.users)))
    lookups = [request(path_of(user)) for user in users]
    on = {"LARDER_CONFIG": str(case.folder / "larder.toml")}
    with served(case, "on", on) as with_events, served(case, "off", {}) as off, served(case, "again", {}) as second_off:
        if not poll_until(lambda: counts_others(with_events), 60.0, every_s=0.2):
            raise RuntimeError("the events of others are not counted")
        targets = with_events, off, second_off
        for target in targets:
            per_cpu_s(target, lookups, settle)
        rates = []
        # Use each order once: a target that runs after itself, or always after the same other one, finds warmer caches.
        for order in permutations(range(len(targets))):
            rate_by_target = {number: per_cpu_s(targets[number], lookups, count) for number in order}
            rates.append((rate_by_target[0], rate_by_target[1], rate_by_target[2]))
    return rates


def measure(report: Report, case: Case, options: Options) -> None:
    """Measure fresh processes repeatedly."""
    times, settle, count = (QUICK_TIMES, QUICK_SETTLE, QUICK_COUNT) if options.quick else (TIMES, SETTLE, COUNT)
    accept(case, OTHER_USERS)
    rates_by_run = [one_time(case, settle, count) for _ in range(times)]
    ratios = [median(2 * on / (off + second_off) for on, off, second_off in rates) for rates in rates_by_run]
    aa_ratios = [median(second_off / off for _, off, second_off in rates) for rates in rates_by_run]
    every = [round_rates for rates in rates_by_run for round_rates in rates]
    report.ratios["l1_without_events"] = Ratio(
        median(ratios), median(aa_ratios), len(every), median(on for on, _, _ in every),
        median((off + second_off) / 2 for _, off, second_off in every), TOLERANCE,
    )  # fmt: skip
    report.promises["l1_without_events"] = Promise(
        0.97, quick=f"{QUICK_TIMES} times three processes, which differ by a few per cent"
    )
    for name, run_ratios in (("with over without", ratios), ("A/A", aa_ratios)):
        low, high = interval(run_ratios)
        report.figures[f"{name}: 95 % interval"] = f"{low:.3f} to {high:.3f}"
        report.figures[f"{name}: all"] = " ".join(f"{ratio:.3f}" for ratio in run_ratios)
    report.figures["others with events"] = OTHER_USERS
    report.figures["times three processes"] = times
    report.figures["unit"] = "requests per second of the server's processor time"


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("events", ("fastapi", "uvicorn", "uvloop", "httptools"))
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as name:
        folder = Path(name)
        users = 2_000 if options.quick else 10_000
        case = make_case(folder, server.url, server.url, users=users)
        (folder / "larder.toml").write_text(SETTINGS.replace("always", "any"))
        measure(report, case, options)
    report.show(options)


if __name__ == "__main__":
    main()
