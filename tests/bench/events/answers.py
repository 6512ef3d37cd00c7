"""Ready answers with newer events beside those without, in one process.

- `l1_with_events`: ready answers/s of users with newer events over those of users without, while 100,000 others have
  some (at least 0.8 is wanted). What the feature costs users without events is told by `l1_hits`, over HTTP; what a
  first answer after an event takes, by `vs_live`.
"""

import asyncio
import itertools
import time
from collections.abc import Callable

from cache.events.event import Event
from cache.format.stream_position import Position
from serving.access.callers import Callers
from serving.engine.hot_route import FastLookups
from serving.http.routes import Service
from serving.requests.request_record import CALLER_KEY
from tests.attached import newer_events_of
from tests.bench.events.in_process import in_process
from tests.bench.tools.harness import Options, Report, alternate, parse
from tests.integration.fresh.events_world import EventWorld

TABLE = "user_topk"
OTHER_USERS = 100_000


class Bench:
    """A running service with clicks that are in memory only."""

    def __init__(self, world: EventWorld, service: Service, runner: asyncio.Runner) -> None:
        self.world, self.service, self.runner = world, service, runner
        self._numbers = itertools.count(1)
        known_users, self._items = world.known_users, world.items
        self.without, self.clicking = (known_users[: len(known_users) // 2], known_users[len(known_users) // 2 :])

    def click(self, user: str) -> None:
        """Add one event of a user, which counts at once."""
        number = next(self._numbers)
        item = self._items[number % len(self._items)]
        event = Event(str(number), number, user.encode(), item.encode())
        at = Position(int(time.time() * 1000) + number, 0)
        newer_events_of(self.service).users.add(at, event)

    def keep_ready(self, fast_lookups: FastLookups, users: list[str]) -> list[bytes]:
        """Return paths whose answers are ready in L1."""
        paths = [f"/v1/lookup/{TABLE}/{user}".encode() for user in users]
        for _ in range(3):
            for path in paths:
                self.runner.run(self._require_fast_answer(fast_lookups, path))
        if any(fast_lookups.answer(path) is None for path in paths):
            raise RuntimeError("an answer is not ready")
        return paths

    async def _require_fast_answer(self, fast_lookups: FastLookups, path: bytes) -> None:
        caller = Callers(answers_without_token=True).identify([])
        get = fast_lookups.parse_get({"raw_path": path, "query_string": b"", "headers": [], CALLER_KEY: caller})
        if get is None or await fast_lookups.get(get) is None:
            raise RuntimeError(f"{path!r} is not answered on the fast way")

    def ready(self, fast_lookups: FastLookups, paths: list[bytes], count: int) -> Callable[[], float]:
        """Return ready answers per second of processor time."""

        def run() -> float:
            # The bench blocks the loop for seconds, which the follower of events takes for an outage: clear that
            # concern.
            self.service.follower.note_concern("events", None)
            if any(fast_lookups.answer(path) is None for path in paths):
                raise RuntimeError("an answer is not ready")
            answer, cpu_start_s = fast_lookups.answer, time.process_time()
            for path in itertools.islice(itertools.cycle(paths), count):
                answer(path)
            return count / (time.process_time() - cpu_start_s)

        return run


def measure(bench: Bench, report: Report, options: Options) -> None:
    """Measure in this process, on one thread."""
    fast_lookups = FastLookups(bench.service)
    paths = bench.keep_ready(fast_lookups, bench.without[:200])
    for number in range(OTHER_USERS):
        bench.click(f"another-{number}")
    count = 20_000 if options.quick else 100_000
    for user in bench.clicking[:200]:
        bench.click(user)
    paths_with_events = bench.keep_ready(fast_lookups, bench.clicking[:200])
    report.ratios["l1_with_events"] = alternate(
        bench.ready(fast_lookups, paths, count), {"events": bench.ready(fast_lookups, paths_with_events, count)},
        rounds=options.rounds,
    )["events"]  # fmt: skip


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("events", ("onnxruntime", "faiss-cpu", "uvloop"))
    report.figures["others with events"] = OTHER_USERS
    with in_process(report, options) as (world, service, runner):
        measure(Bench(world, service, runner), report, options)
    report.show(options)


if __name__ == "__main__":
    main()
