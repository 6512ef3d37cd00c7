"""Follower of the event stream, its metrics, and the newest known position."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from cache.errors import CorruptArtefact, InvalidInput, LarderError
from cache.events.event import Event
from cache.events.event_predictor import GenerationEvents
from cache.events.stream import event_of_entry, read_taken_position
from cache.format.redis_keys import Keyspace
from cache.format.stream_position import STREAM_BEGINNING, Position
from cache.l2.resp import ASYNC_BOUNDED_POOL_SETTINGS, check_replies, refusing_unreadable
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist
from serving.events.newer_events import NO_LIMIT, NewerEvents
from serving.generations.heartbeat import RedisClock
from serving.generations.holder import GenerationHolder
from serving.generations.snapshot import Snapshot
from serving.process.resources import StoreThreads
from serving.requests.reasons import StaleReason

log = logging.getLogger(__name__)

EVENTS_BEHIND: Final = StaleReason.EVENTS_BEHIND
"""Reason why answers may lag: events were accepted that are not counted here."""

NoteStale = Callable[[str | None], None]
"""Callback that sets a reason why answers may lag behind, None to clear it."""

_LAG_MAX_S = 1.0
"""Lag in seconds between acceptance and counting from which answers report it."""

_ENTRIES_AT_ONCE = 256
"""Events added, or users checked, before yielding to the event loop."""

_READ_WAIT_MS = 1_000

_SOCKET_TIMEOUT_S = 5.0
"""Seconds without a reply after which the connection counts as lost."""

_IDLE_PAUSE_S = 0.2
_RECONNECT_PAUSE_S = 0.5

_STORE_WAIT_S: Final = 2.0
"""Seconds that the start waits for the store, which answers do not need."""


class EventFollower:
    """Follower that keeps `newer_events` complete since the oldest held generation, for one event loop.

    Beyond `held_bytes_max` no more events are added until a night has taken some over. `note_stale` is called while
    that lasts, while Redis is unreachable, and until the stream has been read completely once; `recheck_values` is
    called when older values of items were added.
    """

    def __init__(
        self,
        redis_url: str,
        keyspace: Keyspace,
        newer_events: NewerEvents,
        holder: GenerationHolder,
        note_stale: NoteStale,
        *,
        recheck_values: Callable[[], None],
        held_bytes_max: int,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.unreadable_count = 0
        """Number of stream entries that are not events."""
        self._redis_url = redis_url
        self._stream_key = keyspace.events
        self.newer_events = newer_events
        self._holder = holder
        self._note_stale = note_stale
        self._recheck_values = recheck_values
        self.held_bytes_max = held_bytes_max
        self._monotonic_clock = monotonic_clock
        self._clock = RedisClock(monotonic_clock)
        self._floor_position_number: int | None = None
        self._unread_since: float | None = None
        """Time of `monotonic_clock` since which there are unread events; None if all were read."""
        self._blocklist = Blocklist()
        # Built once per blocklist: 6 ms for 100,000 entries.
        self._blocked_owners, self._unblocked_owners = _EventOwners(), _EventOwners()
        self._is_at_end, self._caught_up_at = False, 0.0
        self._entries_added = 0
        """Number of entries that were ever added to the stream, as of the last connection."""
        self._lost_until_number = 0
        """Newest counted event that Redis came back without; 0 if it lost none."""

    async def run(self) -> None:
        """Follow the stream; reconnect after errors of Redis. Any other exception ends the follower."""
        self._fall_behind()
        while True:
            try:
                async with self.connect() as client:
                    while True:
                        if not await self.step(client, _READ_WAIT_MS):
                            await asyncio.sleep(_IDLE_PAUSE_S)
            except (RedisError, OSError) as error:
                log.warning("events cannot be followed: %s", type(error).__name__)
                self._fall_behind()
            except Exception:
                self._fall_behind()
                raise
            await asyncio.sleep(_RECONNECT_PAUSE_S)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Redis]:
        """Open a separate connection, whose reads may block."""
        client = check_replies(
            Redis.from_url(
                self._redis_url,
                protocol=2,
                socket_timeout=_SOCKET_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                **ASYNC_BOUNDED_POOL_SETTINGS,
            )
        )
        try:
            asked_at = self._monotonic_clock()
            seconds, microseconds = await client.time()
            self._clock.set(seconds + microseconds / 1e6, asked_at)
            await self._note_lost_events(client)
            yield client
        finally:
            await client.aclose()

    async def _note_lost_events(self, client: Redis) -> None:
        """Note the newest counted event if the stream ends before it, or began again since the last connection."""
        try:
            with refusing_unreadable("XINFO STREAM", "the fields of a stream"):
                stream_fields: dict[str, Any] = await client.xinfo_stream(self._stream_key)
                stream_end = Position.parse(stream_fields["last-generated-id"])
                entries_added = int(stream_fields.get("entries-added", 0))  # 0 before Redis 7
        except (ResponseError, InvalidInput) as error:
            if "no such key" not in str(error):  # no right to ask, or a reply of another server
                return
            stream_end, entries_added = STREAM_BEGINNING, 0
        counted_number = self.newer_events.users.last_number
        if stream_end.number < counted_number or entries_added < self._entries_added:
            self._lost_until_number = counted_number
        self._entries_added = entries_added

    def lost_since(self) -> Position | None:
        """Return the end of the newest held generation's events if Redis lost later ones; None if it lost none."""
        served = self._holder.served
        published_number = max(_until_position_numbers(served.snapshots), default=0) if served else 0
        return Position.from_number(published_number) if self._lost_until_number > published_number else None

    async def step(self, client: Redis, wait_ms: int | None = None) -> bool:
        """Add new events, waiting up to `wait_ms` for one; return False if there is nothing to follow, or no room."""
        floor_position_number = self._find_floor_position_number()
        if floor_position_number is None:
            self._catch_up()
            return False
        await self._apply_blocklist(client, self._holder.blocklist)
        if self._floor_position_number is None:
            is_read_again = self.newer_events.users.last_number > 0
            await self._read_all_since(client, floor_position_number)
            if is_read_again:
                self._recheck_values()
        elif floor_position_number < self._floor_position_number:
            await self._read_earlier(client, floor_position_number, self._floor_position_number)
        elif floor_position_number > self._floor_position_number:
            await self._drop_until(floor_position_number)
        if self.newer_events.size_bytes >= self.held_bytes_max:
            self._fall_behind()
            return False
        wait_ms = wait_ms if self._is_at_end else None
        if await self._add_entries(client, self.newer_events, wait_ms) < _ENTRIES_AT_ONCE:
            self._catch_up()
        else:
            self._is_at_end = False
            if self.lag_s() > _LAG_MAX_S:
                self._fall_behind()
        return True

    def lag_s(self) -> float:
        """Return the seconds since all accepted events were counted; 0 if no event is known to be missing.

        Until the stream has been read once: the seconds since there is something to read.
        """
        if self._is_at_end:
            return 0.0
        if self._floor_position_number is None:
            return 0.0 if self._unread_since is None else self._monotonic_clock() - self._unread_since
        latest_event_at = Position.from_number(self.newer_events.users.last_number).ms / 1000
        return max(0.0, self._clock() - max(latest_event_at, self._caught_up_at))

    def count_new_items_without_vector(self) -> int:
        """Return the number of new items of which the live generation has no vector, since its item tower fails."""
        served = self._holder.served
        return 0 if served is None else len(served.live.new_items.left_out_ids)

    def _find_floor_position_number(self) -> int | None:
        """Return the oldest position up to which a held generation has events; None if no generation has events."""
        served = self._holder.served
        if served is None:
            return None
        return min(_until_position_numbers(served.snapshots), default=None)

    async def _add_entries(
        self,
        client: Redis,
        newer_events: NewerEvents,
        wait_ms: int | None,
        *,
        until_position_number: int = NO_LIMIT,
        only_owners: "_EventOwners | None" = None,
    ) -> int:
        """Add the next entries up to a position, of all or some owners; return the number of entries read."""
        last_entry_id = str(Position.from_number(newer_events.users.last_number))
        stream_replies: Any = await client.xread(
            {self._stream_key: last_entry_id}, count=_ENTRIES_AT_ONCE, block=wait_ms
        )
        stream_entries: list[tuple[bytes, dict[bytes, bytes]]] = stream_replies[0][1] if stream_replies else []
        for entry_id, entry_fields in stream_entries:
            position = Position.parse(entry_id)
            if position.number > until_position_number:
                return 0
            try:
                event = event_of_entry(entry_fields)
            except CorruptArtefact:
                self.unreadable_count += 1
                log.warning("entry %s of the stream is not an event", position)
                newer_events.users.last_number = position.number
                continue
            if self._blocked_owners.owns_event(event) or (
                only_owners is not None and not only_owners.owns_event(event)
            ):
                newer_events.users.last_number = position.number
            else:
                newer_events.add(position, event)
        return len(stream_entries)

    async def _apply_blocklist(self, client: Redis, blocklist: Blocklist) -> None:
        """Forget the events of newly blocked owners, and read again those of unblocked ones."""
        newer_events = self.newer_events
        if blocklist is not self._blocklist:
            previous_owners, self._blocked_owners = (self._blocked_owners, _owners_in_blocklist(blocklist))
            if self._blocklist.erased_items - blocklist.erased_items:  # the stream has lost events on them
                self._floor_position_number = None
            self._blocklist = blocklist
            self._unblocked_owners = _EventOwners(
                (self._unblocked_owners.user_ids | previous_owners.user_ids) - self._blocked_owners.user_ids,
                (self._unblocked_owners.item_ids | previous_owners.item_ids) - self._blocked_owners.item_ids,
            )
            newer_events.forget(
                self._blocked_owners.user_ids & newer_events.packed_input_by_id.keys(), self._blocked_owners.item_ids
            )
        if self._floor_position_number is not None and (
            self._unblocked_owners.user_ids or self._unblocked_owners.item_ids
        ):
            newer_events.forget(*self._unblocked_owners)  # remains of an earlier attempt that an outage interrupted
            await self._reread(
                client, self._floor_position_number, newer_events.users.last_number, self._unblocked_owners
            )
            if self._unblocked_owners.item_ids:
                self._recheck_values()
        self._unblocked_owners = _EventOwners()

    async def _read_earlier(self, client: Redis, floor_position_number: int, known_position_number: int) -> None:
        """Read the events between a new, earlier floor and the known events."""
        if await self._reread(client, floor_position_number, known_position_number):
            self.newer_events.users.complete_after_number = self.newer_events.values.complete_after_number = (
                floor_position_number
            )
            self._floor_position_number = floor_position_number

    async def _reread(
        self,
        client: Redis,
        after_position_number: int,
        until_position_number: int,
        only_owners: "_EventOwners | None" = None,
    ) -> bool:
        """Read a range of the stream again and prepend its events, while new events are added as usual.

        If both do not fit into memory, read the stream again from `after_position_number` as far as memory allows;
        return False.
        """
        self._fall_behind()
        reread_events = _empty_events_since(after_position_number)
        while await self._add_entries(
            client, reread_events, None, until_position_number=until_position_number, only_owners=only_owners
        ):
            if reread_events.size_bytes + self.newer_events.size_bytes >= self.held_bytes_max:
                await self._read_all_since(client, after_position_number)
                return False
            await self._add_entries(client, self.newer_events, None)
        user_ids = list(reread_events.packed_input_by_id)
        for first_index in range(0, len(user_ids), _ENTRIES_AT_ONCE):
            self.newer_events.users.prepend(reread_events.users, user_ids[first_index : first_index + _ENTRIES_AT_ONCE])
            await asyncio.sleep(0)
        for _ in self.newer_events.values.prepend_in_turns(reread_events.values):
            await asyncio.sleep(0)
        self.newer_events.items.prepend(reread_events.items)
        return True

    async def _read_all_since(self, client: Redis, floor_position_number: int) -> None:
        """Read the stream from a position on; the previous events stay in use meanwhile."""
        self._fall_behind()
        reread_events = _empty_events_since(floor_position_number)
        while await self._add_entries(client, reread_events, None) and reread_events.size_bytes < self.held_bytes_max:
            pass
        for _ in self.newer_events.become_in_turns(reread_events):
            await asyncio.sleep(0)
        self._floor_position_number = floor_position_number

    async def _drop_until(self, floor_position_number: int) -> None:
        """Forget the events that all held generations include, yielding after some users."""
        user_ids = list(self.newer_events.packed_input_by_id)
        for first_index in range(0, len(user_ids), _ENTRIES_AT_ONCE):
            self.newer_events.users.drop_until(
                floor_position_number, user_ids[first_index : first_index + _ENTRIES_AT_ONCE]
            )
            await asyncio.sleep(0)
        has_more = True
        while has_more:
            has_more = self.newer_events.values.drop_until(floor_position_number, _ENTRIES_AT_ONCE) == _ENTRIES_AT_ONCE
            await asyncio.sleep(0)
        self.newer_events.items.drop_until(floor_position_number)
        self.newer_events.users.last_number = max(self.newer_events.users.last_number, floor_position_number)
        self.newer_events.users.complete_after_number = floor_position_number
        self._floor_position_number = floor_position_number

    def _fall_behind(self) -> None:
        if self._floor_position_number is not None or self._find_floor_position_number() is not None:
            self._is_at_end = False
            if self._unread_since is None:
                self._unread_since = self._monotonic_clock()
            self._note_stale(EVENTS_BEHIND)

    def _catch_up(self) -> None:
        self._is_at_end, self._caught_up_at, self._unread_since = True, self._clock(), None
        self._note_stale(None)


class _EventOwners(NamedTuple):
    """Users and items whose events are skipped, or read again."""

    user_ids: frozenset[bytes] = frozenset()
    item_ids: frozenset[bytes] = frozenset()

    def owns_event(self, event: Event) -> bool:
        return event.user in self.user_ids or (event.kind == "item" and event.item in self.item_ids)


def _owners_in_blocklist(blocklist: Blocklist) -> _EventOwners:
    """Return the users and items that answers must not use."""
    return _EventOwners(frozenset(blocklist.entities) | frozenset(blocklist.users), frozenset(blocklist.items))


def _empty_events_since(position_number: int) -> NewerEvents:
    empty_events = NewerEvents()
    empty_events.users.last_number = empty_events.users.complete_after_number = (
        empty_events.values.complete_after_number
    ) = position_number
    return empty_events


def _until_position_numbers(snapshots: Iterable[Snapshot]) -> list[int]:
    """Return the number of the position up to which each generation with events has them."""
    snapshot_events = [snapshot.part(GenerationEvents) for snapshot in snapshots]
    return [generation_events.until_position_number for generation_events in snapshot_events if generation_events]


class EventMetrics(Collector):
    """Collector of the follower's metrics."""

    def __init__(self, follower: EventFollower) -> None:
        self._follower = follower

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the metric families."""
        follower, newer_events = self._follower, self._follower.newer_events
        items_without_vector = follower.count_new_items_without_vector()
        for gauge_name, help_text, gauge_value in (
            ("lag_seconds", "Seconds since all accepted events were counted", follower.lag_s()),
            ("users", "Users with events in memory", len(newer_events.users)),
            ("held_bytes", "Bytes of events in memory", newer_events.size_bytes),
            ("new_items", "New items in memory", len(newer_events.items)),
            (
                "new_items_without_vector",
                "New items for which the live item tower fails, so that no list names them",
                items_without_vector,
            ),
            ("held_max_bytes", "Limit of the bytes of events in a worker's memory", follower.held_bytes_max),
        ):
            yield GaugeMetricFamily(f"larder_events_{gauge_name}", help_text, gauge_value)
        yield CounterMetricFamily(
            "larder_event_values_refused",
            "Events whose values were ignored: their item or user has too many attributes",
            newer_events.values.refusal_count,
        )
        yield CounterMetricFamily(
            "larder_event_new_items_evicted",
            "New items that were replaced by newer ones",
            newer_events.items.evicted_count,
        )


class NewestPosition:
    """Newest position known from the followed stream, the held generations, and what nights took over.

    A Redis that lost its stream, and whose clock is behind, would otherwise assign earlier positions.
    """

    def __init__(self, newer_events: NewerEvents, holder: GenerationHolder, store: ArtefactStore) -> None:
        self._newer_events, self._holder, self._store = newer_events, holder, store
        self._taken_position = STREAM_BEGINNING

    async def load_taken_position(self, in_thread: StoreThreads) -> None:
        """Read the position up to which nights took events over, once at the start; the follower sees later ones."""
        try:
            async with asyncio.timeout(_STORE_WAIT_S):
                self._taken_position = await in_thread(read_taken_position, self._store)
        except (LarderError, TimeoutError) as error:
            log.warning("the position up to which nights took events over is unknown: %s", error)

    def __call__(self) -> Position:
        snapshots = () if self._holder.served is None else self._holder.served.snapshots
        until_numbers = _until_position_numbers(snapshots)
        return max(
            self._taken_position, Position.from_number(max([self._newer_events.users.last_number, *until_numbers]))
        )
