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
from serving.events.reading import DETAIL_CHARS_MAX, EventReader, ParsedEvents, RejectedEvent, UnreadableEvent
from serving.generations.refresher import Refresher
from serving.requests.errors import Problem

log = logging.getLogger(__name__)

EVENTS_PER_CALL: Final = 250
"""Events in one call of Redis, which takes about 2 ms."""

WAITING_BYTES_MAX: Final = 16 << 20
"""Bytes of events that may wait for their call; further events are refused."""

INLINE_EVENTS_MAX: Final = 100
"""Number of a request's events up to which they are parsed on the event loop: 100 take about 1 ms."""

FULL_RETRY_AFTER_S: Final = 30.0
"""Seconds in `Retry-After` if the stream is full."""

_TOO_MANY_DETAIL: Final = "its user, or its item, has as many events as [events] of_one allows"

REJECTIONS_FLUSH_S: Final = 1.0
"""Seconds between writes of rejected events from HTTP; a killed process loses at most those of this time."""

EXCERPT_BYTES_MAX: Final = 1_024
"""Number of bytes of a rejected event that are stored."""

REJECTIONS_WAITING_MAX: Final = 1_000
INBOX_GROUP: Final = "larder"
INBOX_BLOCK_MS: Final = 1_000
CLAIM_EVERY_S: Final = 10.0

CLAIM_AFTER_MS: Final = 30_000
"""Milliseconds after which another consumer claims an unfinished entry."""

FORGET_CONSUMER_AFTER_MS: Final = 3_600_000
"""Milliseconds of silence after which an idle consumer is deleted: each start of a process creates a new one."""

INBOX_PAUSE_S: Final = 1.0
"""Seconds until the next attempt if Redis is unreachable or the stream is full."""

_CURSOR_BEGIN: Final = b"0-0"

# One script: an entry that a consumer took between XINFO and DELCONSUMER would be lost.
_FORGET_CONSUMERS_SCRIPT = """
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

# Both or neither: an entry that is acknowledged but not deleted would count as lag for ever. No MULTI, because Redis at
# its maxmemory refuses to queue commands.
_FINISH_ENTRIES_SCRIPT = """
local ids = {unpack(ARGV, 2)}
redis.call('XACK', KEYS[1], ARGV[1], unpack(ids))
return redis.call('XDEL', KEYS[1], unpack(ids))
"""

_START_WAIT_S = 2.0
"""Seconds that the start waits for the Redis of events, which lookups do not need."""

_EVICTION_WARNING = (
    "maxmemory-policy %s of the Redis of events may evict ids, so that repeated events count twice: set noeviction "
    "there"
)


class _EventChunk(NamedTuple):
    events: Sequence[PackedEvent]
    size_bytes: int
    outcomes_future: asyncio.Future[list[AcceptOutcome]]


class EventsBusy(LarderError):
    """Too many events are waiting; no event of this request was sent."""

    code = "overloaded"


class Acceptor:
    """Acceptor of one process; makes one call at a time, so that events keep the order of their arrival.

    While a call is under way the events of all requests gather for the next one.
    """

    def __init__(
        self,
        redis: EventsRedis,
        keyspace: Keyspace,
        bounds: StreamBounds,
        get_newest_position: Callable[[], Position],
        accept_script: str = ACCEPT_SCRIPT,
        loops: BackgroundLoops | None = None,
    ) -> None:
        """`get_newest_position` returns the newest known position, even if the stream has been lost since."""
        self._redis, self._keyspace, self._bounds, self._accept_script = redis, keyspace, bounds, accept_script
        self._get_newest_position = get_newest_position
        self._loops = BackgroundLoops() if loops is None else loops
        self._waiting_chunks: deque[_EventChunk] = deque()
        self._waiting_bytes = 0
        self._sending_task: asyncio.Task[None] | None = None

    async def accept(self, events: Sequence[PackedEvent]) -> list[AcceptOutcome]:
        """Return the outcome of each event, once the events are as durable as demanded.

        Raises EventsFull, EventsUnavailable and EventsBusy. After an error some events may have been accepted; if they
        are sent again with their ids, they are `repeated`.
        """
        if not events:
            return []
        body_sizes = [len(event.event_bytes) for event in events]
        if self._waiting_bytes + sum(body_sizes) > WAITING_BYTES_MAX and self._waiting_chunks:
            raise EventsBusy(f"{self._waiting_bytes} bytes of events wait already")
        loop = asyncio.get_running_loop()
        chunks = [
            _EventChunk(
                events[first_index : first_index + EVENTS_PER_CALL],
                sum(body_sizes[first_index : first_index + EVENTS_PER_CALL]),
                loop.create_future(),
            )
            for first_index in range(0, len(events), EVENTS_PER_CALL)
        ]
        self._waiting_chunks.extend(chunks)
        self._waiting_bytes += sum(body_sizes)
        if self._sending_task is None or self._sending_task.done():
            # A task starts in the next iteration of the event loop, so that all requests of this one are included.
            self._sending_task = self._loops.start(
                "event_acceptor", self._send, is_due=lambda: bool(self._waiting_chunks)
            )
        # Await all chunks, even if one fails: asyncio logs errors that are never retrieved.
        chunk_outcomes = await asyncio.gather(*(chunk.outcomes_future for chunk in chunks), return_exceptions=True)
        event_outcomes: list[AcceptOutcome] = []
        for outcome in chunk_outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            event_outcomes += outcome
        return event_outcomes

    async def aclose(self) -> None:
        """Wait for the call under way; refuse the waiting events."""
        self._refuse(self._take_all_chunks(), EventsUnavailable("this service stops"))
        if self._sending_task is not None:
            await asyncio.wait([self._sending_task])

    async def _send(self) -> None:
        if chunks := self._take_next_chunks():
            await self._accept_chunks(chunks)

    async def _accept_chunks(self, chunks: list[_EventChunk]) -> None:
        events = [event for piece in chunks for event in piece.events]
        try:
            keys, arguments = accept_script_arguments(self._keyspace, self._bounds, events, self._get_newest_position())
            replies = await self._redis.accept(keys, arguments, self._accept_script)
            outcomes = _parse_outcomes(replies, len(events))
        except Exception as error:
            # During an outage the waiting events would only fail later.
            waiting_chunks = self._take_all_chunks() if isinstance(error, EventsUnavailable) else []
            self._refuse(chunks + waiting_chunks, error)
        else:
            first_index = 0
            for chunk in chunks:
                if not chunk.outcomes_future.done():
                    chunk.outcomes_future.set_result(outcomes[first_index : first_index + len(chunk.events)])
                first_index += len(chunk.events)

    def _take_next_chunks(self) -> list[_EventChunk]:
        chunks, remaining_event_count = [], EVENTS_PER_CALL
        while self._waiting_chunks and len(self._waiting_chunks[0].events) <= remaining_event_count:
            chunk = self._waiting_chunks.popleft()
            self._waiting_bytes -= chunk.size_bytes
            remaining_event_count -= len(chunk.events)
            if not chunk.outcomes_future.cancelled():
                chunks.append(chunk)
        return chunks

    def _take_all_chunks(self) -> list[_EventChunk]:
        chunks = list(self._waiting_chunks)
        self._waiting_chunks.clear()
        self._waiting_bytes = 0
        return chunks

    def _refuse(self, chunks: Sequence[_EventChunk], error: Exception) -> None:
        for chunk in chunks:
            if not chunk.outcomes_future.done():
                chunk.outcomes_future.set_exception(error)


def _parse_outcomes(outcome_replies: Sequence[bytes], event_count: int) -> list[AcceptOutcome]:
    """Parse the outcomes of `event_count` events; raise EventsUnavailable for malformed or missing replies."""
    try:
        outcomes = read_outcomes(outcome_replies)
    except InvalidInput as error:
        raise EventsUnavailable(f"the Redis of events: {error.message}") from error
    if len(outcomes) != event_count:
        raise EventsUnavailable(
            f"the Redis of events reported the outcome of {len(outcomes)} events instead of {event_count}"
        )
    return outcomes


class _Rejection(NamedTuple):
    rejection_reason: str
    rejection_detail: str
    event_excerpt: bytes


class RejectionQueue:
    """Queue of rejected events that are written to Redis; beyond a bound they are only counted."""

    def __init__(self, redis: EventsRedis, keyspace: Keyspace, counts: EventCounts, rejected_entries_max: int) -> None:
        """Create an empty queue; `rejected_entries_max`: number of the newest rejected events that Redis keeps."""
        self._redis, self._rejected_events_key, self._counts, self._entries_max = (
            redis, keyspace.rejected_events, counts, rejected_entries_max,
        )  # fmt: skip
        self._waiting_rejections: deque[_Rejection] = deque()
        self._write_lock = asyncio.Lock()

    def add(self, rejection_reason: str, rejection_detail: str, raw_event: Any) -> None:
        """Count and queue a rejected event; `raw_event` is its original content."""
        self._counts.count_by_result[rejection_reason] += 1
        if len(self._waiting_rejections) >= REJECTIONS_WAITING_MAX:
            self._counts.dropped_count += 1
            return
        event_excerpt = b"" if rejection_reason == ERASED else _event_excerpt(raw_event)
        self._waiting_rejections.append(_Rejection(rejection_reason, rejection_detail, event_excerpt))

    async def flush(self) -> None:
        """Write the queued events. If Redis is at its maxmemory, drop them; on EventsUnavailable keep them queued."""
        async with self._write_lock:
            rejection_count = len(self._waiting_rejections)
            if not rejection_count:
                return
            try:
                await self._redis.execute_all([
                    ("XADD", self._rejected_events_key, "MAXLEN", "~", self._entries_max, "*",
                     "reason", rejection.rejection_reason, "detail", rejection.rejection_detail,
                     "event", rejection.event_excerpt)
                    for rejection in self._waiting_rejections
                ])  # fmt: skip
            except EventsFull:  # otherwise the inbox would wait for its rejected events, and fill Redis further
                self._counts.dropped_count += rejection_count
            for _ in range(rejection_count):
                self._waiting_rejections.popleft()

    async def step(self) -> None:
        """Write the queued events; if Redis does not accept them, they stay queued."""
        try:
            await self.flush()
        except EventsUnavailable:
            return  # the next step tries again


def _event_excerpt(raw_event: Any) -> bytes:
    if isinstance(raw_event, UnreadableEvent):
        return b""
    if isinstance(raw_event, dict) and all(isinstance(field_name, bytes) for field_name in raw_event):
        raw_event = {
            name.decode(errors="replace"): field_value.decode(errors="replace")
            for name, field_value in raw_event.items()
        }
    try:
        return orjson.dumps(raw_event)[:EXCERPT_BYTES_MAX]
    except orjson.JSONEncodeError:  # orjson parses deeper nesting than it can write
        return b""


@dataclass(frozen=True, slots=True)
class EventIntake:
    """Intake of events into the stream of one namespace; `clock` returns Unix seconds."""

    redis: EventsRedis
    reader: EventReader
    acceptor: Acceptor
    inbox_acceptor: Acceptor
    """Acceptor of the inbox: also works at maxmemory, so that an inbox that fills Redis can be emptied."""
    rejections: RejectionQueue
    counts: EventCounts
    get_blocklist: Callable[[], Blocklist]
    clock: Callable[[], float]
    monotonic_clock: Callable[[], float]

    async def accept_events(self, raw_events: Sequence[Any]) -> dict[str, Any]:
        """Accept a request's list of events; return the response. Raise Problem if no event can be accepted now.

        After a Problem some events may still have been accepted: sent again with their ids they count once.
        """
        began_at = self.monotonic_clock()
        parse_events, parse_arguments = (
            self.reader.parse_body_events,
            (raw_events, self.clock(), self.get_blocklist()),
        )
        read_events = (
            await asyncio.to_thread(parse_events, *parse_arguments)
            if len(raw_events) > INLINE_EVENTS_MAX
            else parse_events(*parse_arguments)
        )
        try:
            outcomes = await self.acceptor.accept(read_events.packed_events)
        except EventsFull as error:
            self.counts.refusal_count_by_reason[error.code] += 1
            raise Problem(
                429, error.code, f"{error.message}: send the events again later, with the same ids",
                retry_after_seconds=FULL_RETRY_AFTER_S,
            ) from error  # fmt: skip
        except (EventsUnavailable, EventsBusy) as error:
            self.counts.refusal_count_by_reason[error.code] += 1
            message = error.message
            if isinstance(error, EventsUnavailable) and (message := error.public_message) != error.message:
                log.warning("no events are accepted: %s", error.message)
            raise Problem(503, error.code, f"{message}: send the events again, with the same ids") from error
        self.counts.accept_seconds.observe("http", self.monotonic_clock() - began_at)
        return self._build_receipt(raw_events, read_events, outcomes)

    async def accept_entries(self, inbox_entries: Sequence[tuple[str, Mapping[bytes, bytes]]]) -> None:
        """Accept or reject entries of the inbox, given by their ids; rejected entries are stored on return.

        Raises EventsFull, EventsUnavailable and EventsBusy, and counts them: producers do not see them.
        """
        began_at, now_s, blocklist = self.monotonic_clock(), self.clock(), self.get_blocklist()
        packed_events: list[PackedEvent] = []
        packed_entry_fields: list[Mapping[bytes, bytes]] = []
        rejected_entries: list[tuple[Problem, Mapping[bytes, bytes]]] = []
        for entry_id, entry_fields in inbox_entries:
            try:
                packed_events.append(self.reader.parse_inbox_entry(entry_fields, entry_id, now_s, blocklist))
            except Problem as read_problem:
                rejected_entries.append((read_problem, entry_fields))
            else:
                packed_entry_fields.append(entry_fields)
        try:
            outcomes = await self.inbox_acceptor.accept(packed_events)
        except (EventsFull, EventsUnavailable, EventsBusy) as error:
            self.counts.refusal_count_by_reason[error.code] += 1
            raise
        for problem, entry_fields in rejected_entries:
            self.rejections.add(problem.reason, problem.message[:DETAIL_CHARS_MAX], entry_fields)
        for entry_fields, outcome in zip(packed_entry_fields, outcomes, strict=True):
            self._count_outcome(outcome, entry_fields)
        await self.rejections.flush()
        self.counts.accept_seconds.observe("inbox", self.monotonic_clock() - began_at)

    def _build_receipt(
        self, raw_events: Sequence[Any], read_events: ParsedEvents, outcomes: Sequence[AcceptOutcome]
    ) -> dict[str, Any]:
        for rejected_event in read_events.rejected_events:
            self.rejections.add(
                rejected_event.rejection_reason, rejected_event.rejection_detail, raw_events[rejected_event.event_index]
            )
        rejected_events, newest_position = list(read_events.rejected_events), Position(0, 0)
        count_by_result: Counter[str] = Counter()
        for event_index, outcome in zip(read_events.event_indices, outcomes, strict=True):
            count_by_result[outcome.rejection_reason or ACCEPTED] += 1
            self._count_outcome(outcome, raw_events[event_index])
            if outcome.position is not None:
                newest_position = max(newest_position, outcome.position)
            elif outcome.rejection_reason == TOO_MANY:
                rejected_events.append(RejectedEvent(event_index, TOO_MANY, _TOO_MANY_DETAIL))
        durability = self.redis.found_durability
        return {
            ACCEPTED: count_by_result[ACCEPTED],
            REPEATED: count_by_result[REPEATED],
            "rejected": [
                {
                    "index": rejected_event.event_index,
                    "reason": rejected_event.rejection_reason,
                    "detail": rejected_event.rejection_detail,
                }
                for rejected_event in sorted(rejected_events)
            ],
            "durability": "unknown" if durability is None else durability.persistence,
            "position": str(newest_position) if count_by_result[ACCEPTED] else None,
        }

    def _count_outcome(self, outcome: AcceptOutcome, raw_event: Any) -> None:
        if outcome.rejection_reason == TOO_MANY:
            self.rejections.add(TOO_MANY, _TOO_MANY_DETAIL, raw_event)
        else:
            self.counts.count_by_result[outcome.rejection_reason or ACCEPTED] += 1


class InboxEntry(NamedTuple):
    """Entry of the inbox: its id, and its fields as its producer wrote them."""

    entry_id: bytes
    entry_fields: dict[bytes, bytes]


class Inbox:
    """Consumer of the inbox, one in each process.

    An entry is removed once its event was accepted, or rejected and stored. If a consumer dies before that, another one
    takes the entry, and the event's id prevents it from counting twice.
    """

    def __init__(
        self,
        redis: EventsRedis,
        keyspace: Keyspace,
        intake: EventIntake,
        consumer_name: str,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self._loops = BackgroundLoops() if loops is None else loops
        self._redis, self._inbox_key, self._intake, self._consumer_name = (redis, keyspace.inbox, intake, consumer_name)
        self._has_unfinished = True
        """True while this consumer may have taken entries that it did not finish."""
        self._claimed_at = float("-inf")
        self._claim_cursor: bytes = _CURSOR_BEGIN
        self._consume_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to consume entries."""
        self._consume_task = self._loops.start("event_inbox", self.consume)

    async def aclose(self) -> None:
        """Stop; after a while another consumer claims the unfinished entries."""
        await cancel_and_wait([self._consume_task])

    async def consume(self) -> None:
        """Consume entries until an error occurs; return after a pause if Redis is full or unreachable."""
        try:
            await self._redis.execute("XGROUP CREATE", self._inbox_key, INBOX_GROUP, "0", "MKSTREAM")
        except EventsFull:
            pass  # at maxmemory a group cannot be created; use an existing one to empty the inbox
        except EventsUnavailable as error:
            if "BUSYGROUP" not in str(error):
                await asyncio.sleep(INBOX_PAUSE_S)
                return
        try:
            while True:
                await self._take_in_entries(await self._fetch_entries())
        except LarderError as error:  # Redis is full, unreachable, or was emptied including the group
            log.warning("the inbox of events is paused: %s", error.message)
        finally:
            self._has_unfinished = True
        await asyncio.sleep(INBOX_PAUSE_S)

    async def _fetch_entries(self) -> list[InboxEntry]:
        """Return this consumer's unfinished entries, else those of silent consumers, else new ones."""
        if self._has_unfinished:
            if unfinished_entries := await self._read_entries("0"):
                return unfinished_entries
            self._has_unfinished = False
        now_s = asyncio.get_running_loop().time()
        if now_s - self._claimed_at >= CLAIM_EVERY_S:
            claim_arguments = (
                self._inbox_key,
                INBOX_GROUP,
                self._consumer_name,
                CLAIM_AFTER_MS,
                self._claim_cursor,
                "COUNT",
                EVENTS_PER_CALL,
            )
            self._claim_cursor, claimed_entries = (await self._redis.execute("XAUTOCLAIM", *claim_arguments))[:2]
            if claimed_entries or self._claim_cursor != _CURSOR_BEGIN:
                return _inbox_entries(claimed_entries)
            self._claimed_at = now_s
            await self._redis.execute(
                "EVAL", _FORGET_CONSUMERS_SCRIPT, 1, self._inbox_key, INBOX_GROUP, FORGET_CONSUMER_AFTER_MS
            )
        return await self._read_entries(">", "BLOCK", INBOX_BLOCK_MS)

    async def _read_entries(self, after_entry_id: str, *options: Any) -> list[InboxEntry]:
        reply = await self._redis.execute(
            "XREADGROUP", "GROUP", INBOX_GROUP, self._consumer_name, "COUNT", EVENTS_PER_CALL, *options,
            "STREAMS", self._inbox_key, after_entry_id,
        )  # fmt: skip
        return _inbox_entries(reply[0][1]) if reply else []

    async def _take_in_entries(self, entries: list[InboxEntry]) -> None:
        if not entries:
            return
        present_entries = [(entry.entry_id.decode(), entry.entry_fields) for entry in entries if entry.entry_fields]
        await self._intake.accept_entries(present_entries)
        entry_ids = [entry.entry_id for entry in entries]
        await self._redis.execute("EVAL", _FINISH_ENTRIES_SCRIPT, 1, self._inbox_key, INBOX_GROUP, *entry_ids)


def _inbox_entries(raw_entries: list[Any]) -> list[InboxEntry]:
    """Convert a reply to entries; a deleted entry has no fields, and is finished like the others."""
    return [
        InboxEntry(entry_id, dict(zip(flat_fields[::2], flat_fields[1::2], strict=True)) if flat_fields else {})
        for entry_id, flat_fields in filter(None, raw_entries)
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
        consumer_name: str,
        get_blocklist: Callable[[], Blocklist],
        get_newest_position: Callable[[], Position],
        get_new_item_inputs: Callable[[], NewItemInputs | None] = lambda: None,
        loops: BackgroundLoops | None = None,
    ) -> Self:
        """Create all parts without connecting; `consumer_name` names the consumer of the inbox. Raise ConfigError.

        New events get positions after `get_newest_position()`. `get_new_item_inputs` returns the inputs with which the
        live generation can answer for an unknown item.
        """
        events_config, keyspace = config.events, config.of_events().keyspace()
        redis = EventsRedis(config.events_redis_url, events_config.durability)
        counts = EventCounts(redis, keyspace, events_config.stream_bytes)
        bounds = StreamBounds(events_config.stream_bytes, round(events_config.keep_s * 1000), events_config.of_one)
        intake = EventIntake(
            redis, EventReader(keyspace, events_config, get_new_item_inputs),
            Acceptor(redis, keyspace, bounds, get_newest_position, loops=loops),
            Acceptor(redis, keyspace, bounds, get_newest_position, ACCEPT_SCRIPT_AT_MAXMEMORY, loops),
            RejectionQueue(redis, keyspace, counts, events_config.rejected), counts, get_blocklist, time.time,
            time.monotonic,
        )  # fmt: skip
        return cls(redis, intake, Inbox(redis, keyspace, intake, consumer_name, loops))

    def add_periodic_tasks(self, refresher: Refresher, figures_interval_s: float) -> None:
        """Add writes of rejected events, and measurements of stream and inbox, to the replica's background tasks."""
        refresher.add_periodic("event_rejections", REJECTIONS_FLUSH_S, self.intake.rejections.step)
        refresher.add_periodic("event_figures", figures_interval_s, self.intake.counts.refresh)

    async def start(self) -> None:
        """Check the Redis of events, log its problems, and start to consume the inbox."""
        try:
            async with asyncio.timeout(_START_WAIT_S):
                await self.redis.demand_durability()
                await self.intake.counts.refresh()
                if self.intake.counts.write_refusal is not None:
                    raise self.intake.counts.write_refusal
                policy = await self.redis.eviction_policy()
                if self.redis.demanded_durability != "any" and policy.startswith(("volatile", "allkeys")):
                    log.warning(_EVICTION_WARNING, policy)
        except LarderError as error:  # lookups are answered even if events fail
            log.warning("no events are accepted for now: %s", error.message)
        except TimeoutError:
            log.warning("no events are accepted for now: the Redis of events does not answer")
        self.inbox.start()

    async def aclose(self) -> None:
        """Finish the calls under way, write rejected events, and close the connections."""
        await self.inbox.aclose()
        await self.intake.acceptor.aclose()
        await self.intake.inbox_acceptor.aclose()
        await self.intake.rejections.step()
        await self.redis.aclose()
