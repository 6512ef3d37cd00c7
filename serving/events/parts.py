"""The parts that take events in, put together for one namespace."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from cache.errors import LarderError
from cache.events.accept import SCRIPT_AT_MAXMEMORY, StreamBounds
from cache.events.new_item_tower import NewItemInputs
from cache.events.position import Position
from cache.process.background_loops import BackgroundLoops
from cache.store.blocklist import Blocklist
from serving.config.settings import ServingConfig
from serving.events.acceptor import Acceptor
from serving.events.connection import EventsRedis
from serving.events.counts import EventCounts
from serving.events.inbox import Inbox
from serving.events.intake import EventIntake
from serving.events.reading import EventReader
from serving.events.rejections import FLUSH_S, Rejections
from serving.replica.background import Refresher

log = logging.getLogger(__name__)

_START_S = 2.0
"""Seconds that a start waits for the Redis of events: lookups need none."""

_MAY_EVICT = "maxmemory-policy %s of the Redis of events may evict ids, and repetitions count: set noeviction there"


@dataclass(frozen=True, slots=True)
class EventParts:
    """The intake, and what runs in the background of it."""

    redis: EventsRedis
    intake: EventIntake
    inbox: Inbox

    @classmethod
    def of(
        cls,
        config: ServingConfig,
        name: str,
        blocklist: Callable[[], Blocklist],
        newest_position: Callable[[], Position],
        new_item_inputs: Callable[[], NewItemInputs | None] = lambda: None,
        loops: BackgroundLoops | None = None,
    ) -> Self:
        """All parts, `name` for the consumer of the inbox; nothing is connected yet. Raises ConfigError.

        New events get positions behind the `newest_position` that is known. `new_item_inputs` tells what the live
        generation can answer with of an item that it does not know.
        """
        events, keyspace = config.events, config.of_events().keyspace()
        redis = EventsRedis(config.events_redis, events.durability)
        counts = EventCounts(redis, keyspace, events.stream_bytes)
        bounds = StreamBounds(events.stream_bytes, round(events.keep_s * 1000), events.of_one)
        intake = EventIntake(
            redis, EventReader(keyspace, events, new_item_inputs),
            Acceptor(redis, keyspace, bounds, newest_position, loops=loops),
            Acceptor(redis, keyspace, bounds, newest_position, SCRIPT_AT_MAXMEMORY, loops),
            Rejections(redis, keyspace, counts, events.rejected), counts, blocklist, time.time, time.monotonic,
        )  # fmt: skip
        return cls(redis, intake, Inbox(redis, keyspace, intake, name, loops))

    def also(self, refresher: Refresher, figures_s: float) -> None:
        """Has the replica's background write rejected events, and look at stream and inbox."""
        refresher.add_periodic("event_rejections", FLUSH_S, self.intake.rejections.step)
        refresher.add_periodic("event_figures", figures_s, self.intake.counts.refresh)

    async def start(self) -> None:
        """Looks at the Redis of events, says in the log what is wrong with it, and begins to empty the inbox."""
        try:
            async with asyncio.timeout(_START_S):
                await self.redis.demand_durability()
                await self.intake.counts.refresh()
                policy = await self.redis.eviction_policy()
                if self.redis.demanded != "any" and policy.startswith(("volatile", "allkeys")):
                    log.warning(_MAY_EVICT, policy)
        except LarderError as error:  # whatever is wrong with events, lookups are answered
            log.warning("no events are accepted for now: %s", error.message)
        except TimeoutError:
            log.warning("no events are accepted for now: their Redis does not answer")
        self.inbox.start()

    async def aclose(self) -> None:
        """Ends what is under way, writes what was rejected, and closes the connections."""
        await self.inbox.aclose()
        await self.intake.acceptor.aclose()
        await self.intake.inbox_acceptor.aclose()
        await self.intake.rejections.step()
        await self.redis.aclose()
