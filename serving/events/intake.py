"""Intake of events from requests and the inbox: accepted in order, or rejected and stored with a reason."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import orjson

from cache.errors import InvalidInput, LarderError
from cache.events.new_items import NewItemInputs
from cache.events.stream import (
    ACCEPT_SCRIPT,
    ACCEPT_SCRIPT_AT_MAXMEMORY,
    AcceptOutcome,
    PackedEvent,
    StreamBounds,
    accept_script_arguments,
    read_outcomes,
)
from cache.format.redis_keys import Keyspace
from cache.format.stream_position import Position
from cache.process.background_loops import BackgroundLoops, cancel_and_wait
from cache.store.blocklist import Blocklist
from serving.config.settings import ServingConfig
from serving.events.connection import EventsFull, EventsRedis, EventsUnavailable
from serving.events.counts import ACCEPTED, ERASED, REPEATED, TOO_MANY, EventCounts
from serving.events.reading import (
    DETAIL_CHARS,
    EventReader,
    ReadEvents,
    RejectedEvent,
    UnreadableEvent,
)
from serving.generations.refresher import Refresher
from serving.requests.errors import Problem

log = logging.getLogger(__name__)

EVENTS_PER_CALL: Final = 250
"""Events in one call, which takes Redis about 2 ms."""

WAITING_BYTES_MAX: Final = 16 << 20
"""Bytes of events that wait for their call; more are refused."""

INLINE_EVENTS_MAX: Final = 100
"""Events of one request up to which they are parsed on the event loop: 100 take about 1 ms."""

FULL_WAIT_S: Final = 30.0
"""Seconds in `Retry-After` if the stream is full."""

_TOO_MANY_DETAIL: Final = "its user, or the item alone, has sent as many as [events] of_one allows"

REJECTIONS_FLUSH_S: Final = 1.0
"""Seconds between writes of rejected events from HTTP; a killed process loses at most this much of them."""

EXCERPT_BYTES: Final = 1_024
"""Bytes of a rejected event that are stored."""

REJECTIONS_WAITING_MAX: Final = 1_000
INBOX_GROUP: Final = "larder"
INBOX_BLOCK_MS: Final = 1_000
CLAIM_EVERY_S: Final = 10.0

CLAIM_AFTER_MS: Final = 30_000
"""Milliseconds after which an entry that a consumer did not finish is claimed by another one."""

FORGET_AFTER_MS: Final = 3_600_000
"""Milliseconds of silence after which a consumer without entries is forgotten: each start is a new one."""

INBOX_PAUSE_S: Final = 1.0
"""Seconds until the next attempt if Redis is away or the stream is full."""

_CURSOR_BEGIN: Final = b"0-0"

# In one script: an entry that a consumer took between a look and DELCONSUMER would be lost with it.
_FORGET_CONSUMERS = """
local gone = 0
for _, each in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local told = {}
  for i = 1, #each, 2 do told[each[i]] = each[i + 1] end
  if told['pending'] == 0 and told['idle'] > tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], told['name'])
    gone = gone + 1
  end
end
return gone
"""

# Both or neither: an entry that is no longer pending and still there would count as lag for ever. No MULTI: at its
# maxmemory Redis refuses whatever is queued.
_FINISH_ENTRIES = """
local ids = {unpack(ARGV, 2)}
redis.call('XACK', KEYS[1], ARGV[1], unpack(ids))
return redis.call('XDEL', KEYS[1], unpack(ids))
"""

_START_WAIT_S = 2.0
"""Seconds that a start waits for the Redis of events, which lookups do not need."""

_EVICTION_WARNING = (
    "maxmemory-policy %s of the Redis of events may evict ids, and repetitions count: "
    "set noeviction there"
)


class _Piece(NamedTuple):
    events: Sequence[PackedEvent]
    size_bytes: int
    outcome: asyncio.Future[list[AcceptOutcome]]


class EventsBusy(LarderError):
    """Too many events are waiting; none of these was sent."""

    code = "overloaded"


class Acceptor:
    """Acceptor of one process, with one call at a time, so events keep the order in which they came.

    While a call is under way the events of all requests gather for the next one.
    """

    def __init__(
        self,
        redis: EventsRedis,
        keyspace: Keyspace,
        bounds: StreamBounds,
        newest_position: Callable[[], Position],
        script: str = ACCEPT_SCRIPT,
        loops: BackgroundLoops | None = None,
    ) -> None:
        """`newest_position` returns the newest known position, even if the stream has been lost since."""
        self._redis, self._keyspace, self._bounds, self._script = redis, keyspace, bounds, script
        self._get_newest_position = newest_position
        self._loops = BackgroundLoops() if loops is None else loops
        self._waiting: deque[_Piece] = deque()
        self._waiting_bytes = 0
        self._sending: asyncio.Task[None] | None = None

    async def accept(self, events: Sequence[PackedEvent]) -> list[AcceptOutcome]:
        """Return the outcome of each event, once they are as durable as demanded.

        Raises EventsFull, EventsUnavailable and EventsBusy. After an error some may have been accepted: sent again
        under their ids they are `repeated`.
        """
        if not events:
            return []
        sizes = [len(event.body) for event in events]
        if self._waiting_bytes + sum(sizes) > WAITING_BYTES_MAX and self._waiting:
            raise EventsBusy(f"{self._waiting_bytes} bytes of events wait already")
        loop = asyncio.get_running_loop()
        pieces = [
            _Piece(
                events[at : at + EVENTS_PER_CALL],
                sum(sizes[at : at + EVENTS_PER_CALL]),
                loop.create_future(),
            )
            for at in range(0, len(events), EVENTS_PER_CALL)
        ]
        self._waiting.extend(pieces)
        self._waiting_bytes += sum(sizes)
        if self._sending is None or self._sending.done():
            # A task begins in the next turn: all requests of this one go along.
            self._sending = self._loops.start(
                "event_acceptor", self._send, is_due=lambda: bool(self._waiting)
            )
        # Each is awaited, whatever came of the others: an error that nobody took would be logged as lost.
        piece_outcomes = await asyncio.gather(
            *(piece.outcome for piece in pieces), return_exceptions=True
        )
        accepted: list[AcceptOutcome] = []
        for outcome in piece_outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            accepted += outcome
        return accepted

    async def aclose(self) -> None:
        """Wait for the call under way; refuse the waiting events."""
        self._refuse(self._take_all(), EventsUnavailable("this service stops"))
        if self._sending is not None:
            await asyncio.wait([self._sending])

    async def _send(self) -> None:
        if pieces := self._next():
            await self._call(pieces)

    async def _call(self, pieces: list[_Piece]) -> None:
        events = [event for piece in pieces for event in piece.events]
        try:
            keys, arguments = accept_script_arguments(
                self._keyspace, self._bounds, events, self._get_newest_position()
            )
            replies = await self._redis.accept(keys, arguments, self._script)
            found = _parse_outcomes(replies, len(events))
        except Exception as error:
            # What waits behind an outage would wait as long in vain.
            behind = self._take_all() if isinstance(error, EventsUnavailable) else []
            self._refuse(pieces + behind, error)
        else:
            at = 0
            for piece in pieces:
                if not piece.outcome.done():
                    piece.outcome.set_result(found[at : at + len(piece.events)])
                at += len(piece.events)

    def _next(self) -> list[_Piece]:
        pieces, room = [], EVENTS_PER_CALL
        while self._waiting and len(self._waiting[0].events) <= room:
            piece = self._waiting.popleft()
            self._waiting_bytes -= piece.size_bytes
            room -= len(piece.events)
            if not piece.outcome.cancelled():
                pieces.append(piece)
        return pieces

    def _take_all(self) -> list[_Piece]:
        pieces = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        return pieces

    def _refuse(self, pieces: Sequence[_Piece], error: Exception) -> None:
        for piece in pieces:
            if not piece.outcome.done():
                piece.outcome.set_exception(error)


def _parse_outcomes(replies: Sequence[bytes], count: int) -> list[AcceptOutcome]:
    """Parse the outcomes of `count` events; raise EventsUnavailable for malformed or missing replies."""
    try:
        found = read_outcomes(replies)
    except InvalidInput as error:
        raise EventsUnavailable(f"the Redis of events: {error.message}") from error
    if len(found) != count:
        raise EventsUnavailable(
            f"the Redis of events told the outcome of {len(found)} events, not of {count}"
        )
    return found


class _Rejection(NamedTuple):
    reason: str
    detail: str
    event: bytes


class Rejections:
    """Queue of this process's rejected events on their way into Redis; beyond a bound they are only counted."""

    def __init__(
        self, redis: EventsRedis, keyspace: Keyspace, counts: EventCounts, kept_max: int
    ) -> None:
        """Create an empty queue; `kept_max`: number of rejected events that Redis keeps, the newest."""
        self._redis, self._key, self._counts, self._entries_max = (
            redis, keyspace.rejected_events, counts, kept_max,
        )  # fmt: skip
        self._waiting: deque[_Rejection] = deque()
        self._writing = asyncio.Lock()

    def add(self, reason: str, detail: str, event: Any) -> None:
        """Count and queue a rejected event; `event` is its original content."""
        self._counts.results[reason] += 1
        if len(self._waiting) >= REJECTIONS_WAITING_MAX:
            self._counts.dropped_count += 1
            return
        event_excerpt = b"" if reason == ERASED else _event_excerpt(event)
        self._waiting.append(_Rejection(reason, detail, event_excerpt))

    async def flush(self) -> None:
        """Write the queued events; drop them at Redis' maxmemory, keep them queued on EventsUnavailable."""
        async with self._writing:
            count = len(self._waiting)
            if not count:
                return
            try:
                await self._redis.execute_all([
                    ("XADD", self._key, "MAXLEN", "~", self._entries_max, "*",
                     "reason", rejection.reason, "detail", rejection.detail, "event", rejection.event)
                    for rejection in self._waiting
                ])  # fmt: skip
            except EventsFull:  # the inbox would wait for its rejected ones, and fill Redis further
                self._counts.dropped_count += count
            for _ in range(count):
                self._waiting.popleft()

    async def step(self) -> None:
        """Write the queued events; if Redis does not accept them, they stay queued."""
        try:
            await self.flush()
        except EventsUnavailable:
            return  # the next step tries again


def _event_excerpt(event: Any) -> bytes:
    if isinstance(event, UnreadableEvent):
        return b""
    if isinstance(event, dict) and all(isinstance(field_name, bytes) for field_name in event):
        event = {
            name.decode(errors="replace"): field_value.decode(errors="replace")
            for name, field_value in event.items()
        }
    try:
        return orjson.dumps(event)[:EXCERPT_BYTES]
    except orjson.JSONEncodeError:  # it reads JSON that is nested deeper than what it writes
        return b""


@dataclass(frozen=True, slots=True)
class EventIntake:
    """Intake of events into the stream of one namespace; `clock` returns Unix seconds, `timer` monotonic ones."""

    redis: EventsRedis
    reader: EventReader
    acceptor: Acceptor
    inbox_acceptor: Acceptor
    """Acceptor of the inbox alone: it works at maxmemory, too, or an inbox that fills Redis could never be emptied."""
    rejections: Rejections
    counts: EventCounts
    blocklist: Callable[[], Blocklist]
    clock: Callable[[], float]
    timer: Callable[[], float]

    async def accept_events(self, events: Sequence[Any]) -> dict[str, Any]:
        """Accept a request's list of events; return the response. Raise Problem if none can be accepted now.

        After a Problem some may have been accepted all the same: sent again under their ids they count once.
        """
        began_at = self.timer()
        read, args = self.reader.of_body, (events, self.clock(), self.blocklist())
        read_events = (
            await asyncio.to_thread(read, *args) if len(events) > INLINE_EVENTS_MAX else read(*args)
        )
        try:
            outcomes = await self.acceptor.accept(read_events.packed)
        except EventsFull as error:
            self.counts.refusals[error.code] += 1
            raise Problem(
                429, error.code, f"{error.message}: send them again later, under the same ids",
                retry_after_seconds=FULL_WAIT_S,
            ) from error  # fmt: skip
        except (EventsUnavailable, EventsBusy) as error:
            self.counts.refusals[error.code] += 1
            message = error.message
            if isinstance(error, EventsUnavailable) and (message := error.outside) != error.message:
                log.warning("no events are accepted: %s", error.message)
            raise Problem(
                503, error.code, f"{message}: send them again, under the same ids"
            ) from error
        self.counts.seconds.observe("http", self.timer() - began_at)
        return self._answer(events, read_events, outcomes)

    async def accept_entries(self, entries: Sequence[tuple[str, Mapping[bytes, bytes]]]) -> None:
        """Accept or reject entries of the inbox, given by their ids; rejected ones are stored on return.

        Raises EventsFull, EventsUnavailable and EventsBusy, and counts them: producers do not see them.
        """
        began_at, now_s, blocklist = self.timer(), self.clock(), self.blocklist()
        packed: list[PackedEvent] = []
        packed_fields: list[Mapping[bytes, bytes]] = []
        rejected: list[tuple[Problem, Mapping[bytes, bytes]]] = []
        for entry, fields in entries:
            try:
                packed.append(self.reader.of_inbox(fields, entry, now_s, blocklist))
            except Problem as read_problem:
                rejected.append((read_problem, fields))
            else:
                packed_fields.append(fields)
        try:
            outcomes = await self.inbox_acceptor.accept(packed)
        except (EventsFull, EventsUnavailable, EventsBusy) as error:
            self.counts.refusals[error.code] += 1
            raise
        for problem, fields in rejected:
            self.rejections.add(problem.reason, problem.message[:DETAIL_CHARS], fields)
        for fields, outcome in zip(packed_fields, outcomes, strict=True):
            self._count(outcome, fields)
        await self.rejections.flush()
        self.counts.seconds.observe("inbox", self.timer() - began_at)

    def _answer(
        self, events: Sequence[Any], read_events: ReadEvents, outcomes: Sequence[AcceptOutcome]
    ) -> dict[str, Any]:
        for rejected_event in read_events.rejected:
            self.rejections.add(
                rejected_event.reason, rejected_event.detail, events[rejected_event.event_index]
            )
        rejected, last = list(read_events.rejected), Position(0, 0)
        counts: Counter[str] = Counter()
        for index, outcome in zip(read_events.event_indices, outcomes, strict=True):
            counts[outcome.reason or ACCEPTED] += 1
            self._count(outcome, events[index])
            if outcome.position is not None:
                last = max(last, outcome.position)
            elif outcome.reason == TOO_MANY:
                rejected.append(RejectedEvent(index, TOO_MANY, _TOO_MANY_DETAIL))
        durability = self.redis.found_durability
        return {
            ACCEPTED: counts[ACCEPTED],
            REPEATED: counts[REPEATED],
            "rejected": [
                {
                    "index": rejected_event.event_index,
                    "reason": rejected_event.reason,
                    "detail": rejected_event.detail,
                }
                for rejected_event in sorted(rejected)
            ],
            "durability": "unknown" if durability is None else durability.persistence,
            "position": str(last) if counts[ACCEPTED] else None,
        }

    def _count(self, outcome: AcceptOutcome, raw_event: Any) -> None:
        if outcome.reason == TOO_MANY:
            self.rejections.add(TOO_MANY, _TOO_MANY_DETAIL, raw_event)
        else:
            self.counts.results[outcome.reason or ACCEPTED] += 1


class InboxEntry(NamedTuple):
    """Entry of the inbox: its id, and its fields as written."""

    id: bytes
    fields: dict[bytes, bytes]


class Inbox:
    """Consumer of the inbox, one in each process.

    An entry is removed once its event was accepted, or rejected and stored: if a consumer dies before that, another one
    takes the entry, and the event's id makes the repetition harmless.
    """

    def __init__(
        self,
        redis: EventsRedis,
        keyspace: Keyspace,
        intake: EventIntake,
        name: str,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self._loops = BackgroundLoops() if loops is None else loops
        self._redis, self._key, self._intake, self._name = redis, keyspace.inbox, intake, name
        self._has_unfinished = True
        """True while this consumer may have entries that it took and did not finish."""
        self._claimed_at = float("-inf")
        self._cursor: bytes = _CURSOR_BEGIN
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to consume entries."""
        self._task = self._loops.start("event_inbox", self.consume)

    async def aclose(self) -> None:
        """Stop; after a while another consumer claims the unfinished entries."""
        await cancel_and_wait([self._task])

    async def consume(self) -> None:
        """Consume entries until that fails; return after a pause if Redis is full or away."""
        try:
            await self._redis.execute("XGROUP CREATE", self._key, INBOX_GROUP, "0", "MKSTREAM")
        except EventsFull:
            pass  # at maxmemory no group is made, nor looked for: the one that may be there empties the inbox
        except EventsUnavailable as error:
            if "BUSYGROUP" not in str(error):
                await asyncio.sleep(INBOX_PAUSE_S)
                return
        try:
            while True:
                await self._take_in(await self._next())
        except LarderError as error:  # full, away, or the group is gone with all of Redis
            log.warning("the inbox of events waits: %s", error.message)
        finally:
            self._has_unfinished = True
        await asyncio.sleep(INBOX_PAUSE_S)

    async def _next(self) -> list[InboxEntry]:
        """Return this consumer's unfinished entries, else those of silent consumers, else new ones."""
        if self._has_unfinished:
            if unfinished_entries := await self._read("0"):
                return unfinished_entries
            self._has_unfinished = False
        now_s = asyncio.get_running_loop().time()
        if now_s - self._claimed_at >= CLAIM_EVERY_S:
            claim = (
                self._key,
                INBOX_GROUP,
                self._name,
                CLAIM_AFTER_MS,
                self._cursor,
                "COUNT",
                EVENTS_PER_CALL,
            )
            self._cursor, claimed = (await self._redis.execute("XAUTOCLAIM", *claim))[:2]
            if claimed or self._cursor != _CURSOR_BEGIN:
                return _inbox_entries(claimed)
            self._claimed_at = now_s
            await self._redis.execute(
                "EVAL", _FORGET_CONSUMERS, 1, self._key, INBOX_GROUP, FORGET_AFTER_MS
            )
        return await self._read(">", "BLOCK", INBOX_BLOCK_MS)

    async def _read(self, after: str, *options: Any) -> list[InboxEntry]:
        reply = await self._redis.execute(
            "XREADGROUP", "GROUP", INBOX_GROUP, self._name, "COUNT", EVENTS_PER_CALL, *options,
            "STREAMS", self._key, after,
        )  # fmt: skip
        return _inbox_entries(reply[0][1]) if reply else []

    async def _take_in(self, entries: list[InboxEntry]) -> None:
        if not entries:
            return
        present_entries = [(entry.id.decode(), entry.fields) for entry in entries if entry.fields]
        await self._intake.accept_entries(present_entries)
        ids = [entry.id for entry in entries]
        await self._redis.execute("EVAL", _FINISH_ENTRIES, 1, self._key, INBOX_GROUP, *ids)


def _inbox_entries(raw_entries: list[Any]) -> list[InboxEntry]:
    """Convert a reply to entries; an entry that was deleted has no fields, and is finished with the others."""
    return [
        InboxEntry(entry, dict(zip(flat[::2], flat[1::2], strict=True)) if flat else {})
        for entry, flat in filter(None, raw_entries)
    ]


@dataclass(frozen=True, slots=True)
class EventParts:
    """Parts of the intake and its background tasks."""

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
        """Create all parts without connecting, `name` for the consumer of the inbox. Raises ConfigError.

        New events get positions after the `newest_position`. `new_item_inputs` returns which inputs make an unknown
        item answerable by the live generation.
        """
        events, keyspace = config.events, config.of_events().keyspace()
        redis = EventsRedis(config.events_redis, events.durability)
        counts = EventCounts(redis, keyspace, events.stream_bytes)
        bounds = StreamBounds(events.stream_bytes, round(events.keep_s * 1000), events.of_one)
        intake = EventIntake(
            redis, EventReader(keyspace, events, new_item_inputs),
            Acceptor(redis, keyspace, bounds, newest_position, loops=loops),
            Acceptor(redis, keyspace, bounds, newest_position, ACCEPT_SCRIPT_AT_MAXMEMORY, loops),
            Rejections(redis, keyspace, counts, events.rejected), counts, blocklist, time.time, time.monotonic,
        )  # fmt: skip
        return cls(redis, intake, Inbox(redis, keyspace, intake, name, loops))

    def also(self, refresher: Refresher, figures_s: float) -> None:
        """Add writes of rejected events, and measurements of stream and inbox, to the replica's background tasks."""
        refresher.add_periodic("event_rejections", REJECTIONS_FLUSH_S, self.intake.rejections.step)
        refresher.add_periodic("event_figures", figures_s, self.intake.counts.refresh)

    async def start(self) -> None:
        """Check the Redis of events, log its problems, and start to consume the inbox."""
        try:
            async with asyncio.timeout(_START_WAIT_S):
                await self.redis.demand_durability()
                await self.intake.counts.refresh()
                policy = await self.redis.eviction_policy()
                if self.redis.demanded != "any" and policy.startswith(("volatile", "allkeys")):
                    log.warning(_EVICTION_WARNING, policy)
        except LarderError as error:  # whatever is wrong with events, lookups are answered
            log.warning("no events are accepted for now: %s", error.message)
        except TimeoutError:
            log.warning("no events are accepted for now: their Redis does not answer")
        self.inbox.start()

    async def aclose(self) -> None:
        """End what is under way, write rejected events, and close the connections."""
        await self.inbox.aclose()
        await self.intake.acceptor.aclose()
        await self.intake.inbox_acceptor.aclose()
        await self.intake.rejections.step()
        await self.redis.aclose()
