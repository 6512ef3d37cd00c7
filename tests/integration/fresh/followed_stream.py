"""A stream of events, and a follower of it that runs step by step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import redis

from cache.events.event import Event
from cache.events.stream import ACCEPT_SCRIPT, StreamBounds, accept_script_arguments, pack_event, read_outcomes
from cache.format.redis_keys import Keyspace
from cache.format.stream_position import STREAM_BEGINNING, Position
from cache.model.new_items import NO_NEW_ITEMS
from cache.process.redis_server import RedisServer
from cache.store.blocklist import Blocklist
from serving.events.follower import EventFollower
from serving.events.newer_events import NewerEvents

BOUNDS = StreamBounds(256 << 20, 86_400_000, 100_000)


@dataclass
class Held:
    """A snapshot whose night took events up to a position, or took none."""

    until_position_number: int | None

    def part(self, _kind: type) -> Any:
        """Return the snapshot's part about events."""
        return None if self.until_position_number is None else self


@dataclass
class Stream:
    """A stream, its follower, and the generations held, by the positions up to which they have events."""

    server: RedisServer
    keyspace: Keyspace
    limit_bytes: int = 1 << 20
    timer: Callable[[], float] = time.monotonic
    url: str = ""
    """Where the follower looks for the stream, if elsewhere than `server`."""
    newer_events: NewerEvents = field(default_factory=NewerEvents)
    notes: list[str | None] = field(default_factory=list)
    recheck_count: int = 0
    """Times that the shelf was asked to look at all values again."""

    def __post_init__(self) -> None:
        holder: Any = SimpleNamespace(served=None, blocklist=Blocklist())
        self.holder = holder
        self.client = redis.Redis.from_url(self.server.url, protocol=2)
        self.follower = EventFollower(
            self.url or self.server.url, self.keyspace, self.newer_events, holder, self.notes.append,
            recheck_values=self._look_again, held_bytes_max=self.limit_bytes, monotonic_clock=self.timer,
        )  # fmt: skip
        self._count = 0

    def _look_again(self) -> None:
        self.recheck_count += 1

    def hold_generations(self, *untils: Position) -> None:
        """Hold generations with events up to these positions, and one without events."""
        self.holder.served = SimpleNamespace(
            snapshots=[Held(position.number) for position in untils] + [Held(None)],
            live=SimpleNamespace(new_items=NO_NEW_ITEMS),
        )

    def click(self, user: str, item: str = "i") -> Position:
        """Accept one more click."""
        self._count += 1
        return self.accept(Event(f"e{self._count}", self._count, user.encode(), item.encode()))

    def accept(self, event: Event) -> Position:
        """Accept an event."""
        keys, args = accept_script_arguments(self.keyspace, BOUNDS, [pack_event(self.keyspace, event)])
        (outcome,) = read_outcomes(self.client.eval(ACCEPT_SCRIPT, len(keys), *keys, *args))
        assert outcome.position is not None
        return outcome.position

    async def steps(self, count: int = 1) -> bool:
        """Run some steps of the follower that do not block."""
        async with self.follower.connect() as client:
            return all([await self.follower.step(client, 1) for _ in range(count)])

    def items(self, user: str, after: Position = STREAM_BEGINNING) -> list[bytes]:
        """Return the items of a user's events in memory."""
        return [event.item for event in self.newer_events.users.list_events_after(user.encode(), after.number)]
