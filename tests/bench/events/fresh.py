"""Time from an accepted event to answers that have it, on three replicas under load.

Three services share a Redis of pages and one of events (`appendonly yes`, `appendfsync always`), and follow a night of
their own data with `[events] enabled`. 1,000 requests/s in all come in open loop, mixed as in `mixed`. 50 events/s go
to replicas at random, each of a user of its own and of an item that stands in the user's list. From the 202 on the user
is asked for on all three replicas at once, and again 5 ms after an answer without it, until each has answered with it:
`events` counts it, and the item is gone.

- `p50_ms`: milliseconds from the 202 until the last of the three has answered with it, of half of the events (at most
  50 is wanted); A/A: every other event over those between.
- `p99_ms`: the same, of 99 in 100 (at most 1,000).

All of it shares the machine's cores: replicas on hosts of their own are quicker.
"""

import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import orjson
import uvloop
from numpy.typing import NDArray

from cache.config.events import EventsConfig
from precompute.config.settings import NightConfig
from tests.bench.mixed import L1, LIVE
from tests.bench.read_path import DATA_UNTIL, TABLE, Case
from tests.bench.tools.harness import Options, Promise, Ratio, Report, parse
from tests.bench.tools.mix import Stream, path_of
from tests.bench.tools.open_loop import Outcomes, caller, drive
from tests.bench.tools.place import own_server, pin
from tests.http_connection import HttpConnection
from tests.integration.events.durable_redis import DurableRedis, durable_redis
from tests.integration.fleet import fleet
from tests.integration.nights import histories, prepare, publish_night

REPLICAS: Final = 3
RATE: Final = 1_000
"""Requests per second in the background, of all replicas together."""
EVENTS_RATE: Final = 50
POLL_S: Final = 0.005
GIVE_UP_S: Final = 10.0
"""Seconds after which an event counts as never seen, and its time is infinite."""
CONNECTIONS: Final = 64
"""Connections of the background to each replica."""
WARM_S: Final = 3.0
"""Seconds of load, and of events, that are not counted."""
K: Final = 20
AA_TOLERANCE: Final = 0.15
SETTINGS: Final = '[events]\nenabled = true\ndurability = "always"\n'


class ReplicaCalls:
    """Connections to one replica, opened as they are needed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[HttpConnection] = []

    async def send_request(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        """(status, JSON); a connection that the service has closed meanwhile is replaced once."""
        connection = self._idle.pop() if self._idle else HttpConnection(self._url)
        try:
            status, response_body = await connection.request(method, path, body)
        except (OSError, EOFError):
            status, response_body = await connection.request(method, path, body)
        self._idle.append(connection)
        return status, orjson.loads(response_body)

    def close(self) -> None:
        """Hangs up."""
        for connection in self._idle:
            connection.close()


@dataclass(slots=True, eq=False)
class FollowedEvents:
    """Events that are sent at given moments, each of another user, and when each replica has answered with it."""

    replicas: Sequence[ReplicaCalls]
    lists: dict[str, list[str]]
    rng: random.Random
    accepted_s: list[float] = field(default_factory=list)
    """Seconds from sending to the 202."""
    seen_s: list[list[float]] = field(default_factory=list)
    """Seconds from the 202 until each replica has answered with it; the one that accepted it comes first."""
    answers: Counter[str] = field(default_factory=Counter)
    """Sources of the answers that had the event; `approximate` beside."""
    lookup_count: int = 0

    async def send(self, due: Sequence[float]) -> None:
        """Sends an event at each of these moments, seconds from now, and waits until all are seen."""
        users = iter(self.rng.sample(sorted(self.lists), len(due)))
        started_at = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for moment, user in zip(due, users, strict=True):
                await asyncio.sleep(max(0.0, started_at + moment - time.monotonic()))
                tasks.create_task(self._click(user))

    def forget(self) -> None:
        """Forgets what was measured, and whose lists events have changed."""
        for measurements in (self.accepted_s, self.seen_s, self.answers):
            measurements.clear()
        self.lookup_count = 0

    async def _click(self, user: str) -> None:
        item = self.rng.choice(self.lists.pop(user))
        event = {"user": user, "item": item, "id": f"click-{user}", "type": "click"}
        order = self.rng.sample(self.replicas, len(self.replicas))
        sent_at = time.monotonic()
        status, receipt = await order[0].send_request("POST", "/v1/events", orjson.dumps({"events": [event]}))
        accepted = time.monotonic()
        if status != 202 or receipt["accepted"] != 1:
            raise RuntimeError(f"an event was not accepted: {status} {receipt}")
        self.accepted_s.append(accepted - sent_at)
        delays_s = await asyncio.gather(
            *(self._measure_event_delay(replica, user, item, accepted) for replica in order)
        )
        self.seen_s.append(delays_s)

    async def _measure_event_delay(self, replica: ReplicaCalls, user: str, item: str, accepted_at: float) -> float:
        while True:
            status, answer = await replica.send_request("GET", path_of(user))
            elapsed_s = time.monotonic() - accepted_at
            self.lookup_count += 1
            if status == 200 and answer.get("events", 0) >= 1 and item not in answer["items"]:
                self.answers[answer["source"]] += 1
                self.answers["approximate"] += bool(answer.get("approximate"))
                return elapsed_s
            if elapsed_s > GIVE_UP_S:
                return float("inf")
            await asyncio.sleep(POLL_S)


@contextmanager
def load(urls: Sequence[str], stream: Stream, seconds: float) -> Iterator[list["Future[Outcomes]"]]:
    """Open loop to all replicas for so many seconds, from a process for each."""
    with ExitStack() as stack:
        futures = []
        for url in urls:
            arrivals = stream.arrivals(url, (RATE / len(urls), seconds))
            pool = stack.enter_context(caller())
            futures.append(pool.submit(drive, replace(arrivals, connections=CONNECTIONS)))
        yield futures


async def measured(urls: Sequence[str], users: Sequence[str], seconds: float) -> FollowedEvents:
    """All events of one run; the load is under way."""
    rng = random.Random(1)
    replicas = [ReplicaCalls(url) for url in urls]
    count = round(EVENTS_RATE * seconds)
    warm = round(EVENTS_RATE * WARM_S)
    clicking_users = rng.sample(list(users), count + warm)
    clicks = FollowedEvents(replicas, await lists_of(replicas[0], clicking_users), rng)
    gc.freeze()
    gc.disable()  # a pause of this process would look like one of a service
    try:
        await clicks.send(_moments(rng, warm))
        clicks.forget()
        await clicks.send(_moments(rng, count))
    finally:
        gc.enable()
        for replica in replicas:
            replica.close()
    return clicks


async def lists_of(replica: ReplicaCalls, users: Sequence[str]) -> dict[str, list[str]]:
    """Stored lists by user."""
    items_by_user: dict[str, list[str]] = {}
    for start in range(0, len(users), 100):
        user_batch = users[start : start + 100]
        body = orjson.dumps({"entities": list(user_batch), "k": K})
        status, lookup_reply = await replica.send_request("POST", f"/v1/lookup/{TABLE}", body)
        if status != 200:
            raise RuntimeError(f"no lists: {status} {lookup_reply}")
        items_by_user |= {
            user: answer["items"] for user, answer in zip(user_batch, lookup_reply["answers"], strict=True)
        }
    return items_by_user


def _moments(rng: random.Random, count: int) -> list[float]:
    """Poisson arrivals."""
    at, moments_s = 0.0, []
    for _ in range(count):
        at += rng.expovariate(EVENTS_RATE)
        moments_s.append(at)
    return moments_s


def report_delays(report: Report, clicks: FollowedEvents, outcomes: Sequence[Outcomes]) -> None:
    """Ratios and figures."""
    delays_s = np.array(clicks.seen_s)
    last = delays_s.max(axis=1)
    halves = _ms(last[::2], 50), _ms(last[1::2], 50)
    middle, slow = _ms(last, 50), _ms(last, 99)
    report.ratios["p50_ms"] = Ratio(middle, halves[0] / halves[1], len(last), middle, 1.0, AA_TOLERANCE)
    report.ratios["p99_ms"] = Ratio(slow, 1.0, len(last), slow, 1.0)
    shared = "all replicas, callers and both Redis share few cores"
    report.promises = {"p50_ms": Promise(maximum=50.0, quick=shared), "p99_ms": Promise(maximum=1_000.0, quick=shared)}
    figures = report.figures
    figures["events"], figures["never seen"] = len(last), int(np.isinf(last).sum())
    for name, values in (
        ("202 to the last replica", last),
        ("202 to the replica that accepted it", delays_s[:, 0]),
        ("202 to another replica", delays_s[:, 1:].ravel()),
        ("sent to 202", np.array(clicks.accepted_s)),
    ):
        for percent in (50, 90, 99, 100):
            figures[f"{name}: p{percent} ms"] = _ms(values, percent)
    figures["lookups until all replicas had it, per event"] = round(clicks.lookup_count / len(last), 2)
    figures["sources of answers that had it"] = ", ".join(
        f"{name} {count}" for name, count in sorted(clicks.answers.items())
    )
    status = np.concatenate([replica_outcomes.status for replica_outcomes in outcomes])
    durations_s = np.concatenate([replica_outcomes.seconds for replica_outcomes in outcomes])
    source = np.concatenate([replica_outcomes.source for replica_outcomes in outcomes])
    figures["background: requests"] = len(status)
    figures["background: without a 200"] = int((status != 200).sum())
    figures["background: never sent"] = sum(replica_outcomes.given_up for replica_outcomes in outcomes)
    for name, request_mask in (("all", status > 0), ("L1", source == L1), ("live", source == LIVE)):
        for percent in (50, 99):
            if request_mask.any():
                figures[f"background, {name}: p{percent} ms"] = _ms(durations_s[request_mask], percent)


def _ms(seconds: NDArray[np.float64], percent: float) -> float:
    return round(float(np.percentile(seconds, percent, method="higher")) * 1000, 3)


def make_case(folder: Path, pages: str, events: str, *, users: int) -> Case:
    """A published night of the team's own data, whose answers count events."""
    night = prepare(folder, pages, users=users, items=2_000)
    night = replace(
        night, tables={TABLE: night.tables[TABLE]}, page_bytes=NightConfig().page_bytes,
        events=EventsConfig(enabled=True), events_url=events,
    )  # fmt: skip
    generation = publish_night(night, DATA_UNTIL)
    history_by_user = histories(night, DATA_UNTIL)
    items = sorted({item for history in history_by_user.values() for item in history})
    return Case(folder, night, generation, sorted(history_by_user), items)


def measure(report: Report, folder: Path, pages: str, events: DurableRedis, options: Options) -> None:
    """One run."""
    seconds = 10.0 if options.quick else 60.0
    case = make_case(folder, pages, events.url, users=2_000 if options.quick else 10_000)
    (folder / "larder.toml").write_text(SETTINGS)
    settings = {"LARDER_CONFIG": str(folder / "larder.toml"), "LARDER_EVENTS_URL": events.url}
    report.figures["replicas"], report.figures["users"] = REPLICAS, len(case.users)
    report.figures["requests/s"], report.figures["events/s"] = RATE, EVENTS_RATE
    report.figures["placement"] = "both Redis and the background's callers on the last core"
    with fleet(case.night, folder / "logs", count=REPLICAS, **settings) as services:
        urls = [service.url for service in services]
        stream = Stream(case)
        with load(urls, stream, seconds + 2 * WARM_S + 2.0) as under_way:
            time.sleep(WARM_S)  # the callers open their connections
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                clicks = runner.run(measured(urls, case.users, seconds))
            outcomes = [future.result() for future in under_way]
    report_delays(report, clicks, outcomes)


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("fresh", ("redis", "hiredis", "uvicorn", "uvloop", "onnxruntime"))
    with own_server() as pages, TemporaryDirectory(prefix="larder-bench-") as name:
        folder = Path(name)
        with durable_redis(folder / "events") as events:
            with events.client() as client:
                report.figures["redis"] = str(client.info("server")["redis_version"])
                pin(int(client.info("server")["process_id"]), -1)
            measure(report, folder, pages.url, events, options)
    report.show(options)


if __name__ == "__main__":
    main()
