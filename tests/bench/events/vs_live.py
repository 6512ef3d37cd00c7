"""First answers after an event beside today's live answers, in one process.

A round is three blocks in an order that a seed draws: first answers after an event (merged history, fp32, exact
search), and twice live answers from the same histories, sent by strangers (int8, index). All three ask for the same
users.

- `vs_live`: rate of the former over that of the latter, 32 at once (at least 0.9 is wanted).
- `vs_live_alone`: the same of 8 requests, one after another.
- `vs_live_processor`, `vs_live_alone_processor`: the same by this process' processor time, with the overlays' writes.

The A/A (live over live) has to be within 3 %.
"""

import asyncio
import gc
import itertools
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

from cache.events.event import Event
from cache.format.stream_position import Position
from serving.http.routes import Service
from serving.requests.models import LookupRequest, RequestedEntity
from serving.requests.options import RequestOptions
from tests.attached import newer_events_of
from tests.bench.events.in_process import in_process
from tests.bench.events.paired import Block, Cost, interleave
from tests.bench.tools.harness import Report, parse
from tests.integration.fresh.events_world import EventWorld
from tests.integration.nights import DATA_UNTIL

TABLE: Final = "user_topk"
BLOCKS: Final = {"vs_live": (32, 32), "vs_live_alone": (8, 1)}
"""Requests of a block, and how many of them are under way at a time."""
ROUNDS, QUICK_ROUNDS = 600, 150
SEED: Final = 24


class Clicks:
    """A running service whose users click, in memory alone."""

    def __init__(self, world: EventWorld, service: Service, runner: asyncio.Runner) -> None:
        self._service, self._runner = service, runner
        self._items, self._users = world.items, world.known_users
        self._histories = {user: list[bytes]() for user in self._users}
        cut_us = datetime.fromisoformat(DATA_UNTIL).timestamp() * 1e6
        for user, item, at_us in sorted(world.rows, key=lambda row: row[2]):
            if at_us < cut_us and user in self._histories:
                self._histories[user].append(item.encode())
        self._number, self._strangers, self._round = 0, itertools.count(), -1

    def events(self, users: int, at_once: int) -> Block:
        """Get the first answer after an event for each user of the round."""
        return self._block(users, at_once, self._known_entity)

    def live(self, users: int, at_once: int) -> Block:
        """Get live answers for unknown users who send the histories of the round's users."""
        return self._block(users, at_once, self._stranger)

    def _block(self, users: int, at_once: int, of: Callable[[str], RequestedEntity]) -> Block:
        def run(number: int) -> Cost:
            round_users = [self._users[(number * users + offset) % len(self._users)] for offset in range(users)]
            if number != self._round:
                self._round = number
                for user in round_users:
                    self._click(user)
            return self._runner.run(self._lookups([of(user) for user in round_users], at_once))

        return run

    def _click(self, user: str) -> None:
        self._number += 1
        item = self._items[self._number % len(self._items)].encode()
        at_us = int(time.time() * 1e6)
        at = Position(at_us // 1000 + self._number, 0)
        newer_events_of(self._service).users.add(at, Event(str(at), at_us, user.encode(), item))
        self._histories[user].append(item)

    @staticmethod
    def _known_entity(user: str) -> RequestedEntity:
        return RequestedEntity(TABLE, user, user.encode(), "id")

    def _stranger(self, user: str) -> RequestedEntity:
        id_ = f"s-{next(self._strangers)}"
        return RequestedEntity(TABLE, id_, id_.encode(), "id", tuple(self._histories[user]))

    async def _lookups(self, entities: list[RequestedEntity], at_once: int) -> Cost:
        waiting, ladder = iter(entities), self._service.ladder
        writes = self._service.tiers.write_behind
        stored_before = writes.stored_count

        async def caller() -> None:
            for entity in waiting:
                lookup = LookupRequest((entity,), RequestOptions(10.0))
                served = self._service.capture_served()
                (answer,) = await ladder.lookup(served, lookup, time.monotonic())
                if answer["source"] != "live" or "approximate" in answer:
                    raise RuntimeError(f"not a live answer: {answer}")

        started_at, processor = time.perf_counter(), time.process_time()
        await asyncio.gather(*(caller() for _ in range(at_once)))
        wall_s = time.perf_counter() - started_at
        while writes.stored_count < stored_before + len(entities):  # noqa: ASYNC110 - else they weigh on the next block
            await asyncio.sleep(0.0002)
        return Cost(wall_s, time.process_time() - processor)


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("events", ("onnxruntime", "faiss-cpu", "uvloop"))
    with in_process(report, options) as (world, service, runner):
        clicks = Clicks(world, service, runner)
        rounds = max(options.rounds, QUICK_ROUNDS if options.quick else ROUNDS)
        report.figures["rounds"], report.figures["seed"] = rounds, SEED
        gc.collect()
        gc.freeze()
        for name, (requests, at_once) in BLOCKS.items():
            paired = interleave(
                clicks.live(requests, at_once), clicks.events(requests, at_once),
                rounds=rounds, requests=requests, seed=SEED,
            )  # fmt: skip
            report.ratios[name] = paired.ratio()
            report.ratios[f"{name}_processor"] = paired.ratio(cost=1)
            report.figures |= paired.figures(name, "events")
    report.show(options)


if __name__ == "__main__":
    main()
