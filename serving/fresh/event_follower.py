"""Follower of the stream of events: what was accepted is counted by answers as soon as it is read."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cache.errors import CorruptArtefact
from cache.events.accept import entry_of
from cache.events.attribute_events import AttributeEvents
from cache.events.position import Position
from cache.events.user_events import UserEvents
from cache.format.redis_keys import Keyspace
from cache.store.blocklist import Blocklist
from serving.fresh.newer_events import NewerEvents
from serving.generations.holder import Shelf
from serving.generations.redis_clock import RedisClock

log = logging.getLogger(__name__)

BEHIND: Final = "events_behind"
"""Reason why answers may lag: events were accepted that are not counted here."""

_AT_ONCE = 256
"""Events taken in, or users looked through, before others may use the event loop."""
_WAIT_MS = 1_000
_SILENT_S = 5.0
"""Seconds without a reply after which the connection counts as lost."""
_IDLE_S = 0.2
_AGAIN_S = 0.5
_LAG_MAX_S = 1.0
"""Seconds that counting may be behind acceptance before answers say so."""

Note = Callable[[str | None], None]
"""Takes a reason why answers may lag behind, None when it has passed."""


class EventFollower:
    """Keeps `newer` complete from the oldest generation held on, within `limit_bytes`; for one event loop only.

    Beyond that nothing more is taken in until a night has taken some over: then, while Redis is out of reach, and until
    the stream was read through for the first time, `note` is told.
    """

    def __init__(
        self,
        url: str,
        keyspace: Keyspace,
        newer: NewerEvents,
        shelf: Shelf,
        note: Note,
        *,
        limit_bytes: int,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.unreadable = 0
        """Entries of the stream that are no events."""
        self._url = url
        self._stream = keyspace.events
        self._newer = newer
        self._shelf = shelf
        self._note = note
        self._limit_bytes = limit_bytes
        self._timer = timer
        self._clock = RedisClock(timer)
        self._floor: int | None = None
        self._blocklist = Blocklist()
        self._is_at_end, self._at_end_at = False, 0.0

    async def run(self) -> None:
        """Follows until it is cancelled."""
        self._fall_behind()
        while True:
            try:
                async with self.connected() as client:
                    while True:
                        if not await self.step(client, _WAIT_MS):
                            await asyncio.sleep(_IDLE_S)
            except (RedisError, OSError) as error:
                log.warning("events cannot be followed: %s", type(error).__name__)
                self._fall_behind()
            except Exception:  # one that ended silently would leave answers behind for ever
                log.exception("following events failed; trying again in %s s", _AGAIN_S)
                self._fall_behind()
            await asyncio.sleep(_AGAIN_S)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Redis]:
        """A connection of its own, whose reads may wait."""
        client = Redis.from_url(
            self._url, protocol=2, socket_timeout=_SILENT_S, retry=Retry(NoBackoff(), 0)
        )
        try:
            asked_at = self._timer()
            seconds, microseconds = await client.time()
            self._clock.set(seconds + microseconds / 1e6, asked_at)
            yield client
        finally:
            await client.aclose()

    async def step(self, client: Redis, wait_ms: int | None = None) -> bool:
        """Takes in what has come, waiting so long for it; False where there is nothing to follow, or no room."""
        floor = self._wanted_floor()
        if floor is None:
            self._catch_up()
            return False
        users, blocklist = self._newer.users, self._shelf.blocklist
        if self._floor is None or floor < self._floor or not _blocks_as_before(
            blocklist, self._blocklist
        ):  # fmt: skip
            await self._read_again(client, floor, blocklist)
        elif floor > self._floor:
            await self._drop(floor)
        if blocklist is not self._blocklist:
            for raw in _blocked(blocklist) & users.packed.keys():
                users.forget(raw)
                self._newer.values.forget("user", raw)
            self._blocklist = blocklist
        if self._newer.size_bytes >= self._limit_bytes:
            self._fall_behind()
            return False
        wait_ms = wait_ms if self._is_at_end else None
        if await self._read(client, self._newer, wait_ms) < _AT_ONCE:
            self._catch_up()
        else:
            self._is_at_end = False
            if self.lag_s() > _LAG_MAX_S:
                self._fall_behind()
        return True

    def lag_s(self) -> float:
        """Seconds since everything was counted that had been accepted; 0 while nothing is known to be missing."""
        if self._is_at_end or self._floor is None:
            return 0.0
        newest = Position.of_number(self._newer.users.last).ms / 1000
        return max(0.0, self._clock() - max(newest, self._at_end_at))

    def _wanted_floor(self) -> int | None:
        """Oldest position that generations held were made at; None where none tells of any."""
        held = self._shelf.holding
        if held is None:
            return None
        return min([each.events.until for each in held.snapshots if each.events], default=None)

    async def _read(self, client: Redis, newer: NewerEvents, wait_ms: int | None) -> int:
        """Takes the next entries in; how many there were."""
        users = newer.users
        last = str(Position.of_number(users.last))
        streams: Any = await client.xread({self._stream: last}, count=_AT_ONCE, block=wait_ms)
        entries: list[tuple[bytes, dict[bytes, bytes]]] = streams[0][1] if streams else []
        blocked = _blocked(self._blocklist)
        for id_, fields in entries:
            position = Position.parse(id_)
            try:
                event = entry_of(fields)
            except CorruptArtefact:
                self.unreadable += 1
                log.warning("entry %s of the stream is no event", position)
                users.last = position.number
                continue
            if event.user in blocked:
                users.last = position.number
            else:
                users.add(position, event)
                newer.values.add(position, event)
        return len(entries)

    async def _read_again(self, client: Redis, floor: int, blocklist: Blocklist) -> None:
        """Reads the stream from an earlier position on; what was known is counted until that is done."""
        self._fall_behind()
        self._blocklist = blocklist
        aside = NewerEvents(UserEvents(), AttributeEvents())
        aside.users.last = aside.users.since = aside.values.since = floor
        while await self._read(client, aside, None) and aside.size_bytes < self._limit_bytes:
            pass
        self._newer.users.become(aside.users)
        self._newer.values.become(aside.values)
        self._floor = floor

    async def _drop(self, floor: int) -> None:
        """Forgets what all generations held have, some users at a time."""
        users = list(self._newer.packed)
        for start in range(0, len(users), _AT_ONCE):
            self._newer.users.drop_until(floor, users[start : start + _AT_ONCE])
            await asyncio.sleep(0)
        more = True
        while more:
            more = self._newer.values.drop_until(floor, _AT_ONCE) == _AT_ONCE
            await asyncio.sleep(0)
        self._newer.users.last = max(self._newer.users.last, floor)
        self._newer.users.since = floor
        self._floor = floor

    def _fall_behind(self) -> None:
        if self._floor is not None or self._wanted_floor() is not None:
            self._is_at_end = False
            self._note(BEHIND)

    def _catch_up(self) -> None:
        self._is_at_end, self._at_end_at = True, self._clock()
        self._note(None)


def _blocked(blocklist: Blocklist) -> frozenset[bytes]:
    return frozenset(blocklist.entities) | frozenset(blocklist.users)


def _blocks_as_before(blocklist: Blocklist, before: Blocklist) -> bool:
    """True unless somebody is free again whose events were dropped."""
    return blocklist is before or _blocked(before) <= _blocked(blocklist)
