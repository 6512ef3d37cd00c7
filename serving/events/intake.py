"""Intake of events: a request's or the inbox's are read, accepted or rejected, and counted."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cache.events.accept import Accepted, PackedEvent
from cache.events.position import Position
from cache.store.blocklist import Blocklist
from serving.events.acceptor import Acceptor, EventsBusy
from serving.events.connection import EventsFull, EventsRedis, EventsUnavailable
from serving.events.counts import ACCEPTED, REPEATED, TOO_MANY, EventCounts
from serving.events.reading import DETAIL_CHARS, EventReader, ReadEvents, RejectedEvent
from serving.events.rejections import Rejections
from serving.requests.errors import Problem

log = logging.getLogger(__name__)

INLINE_EVENTS_MAX: Final = 100
"""Events of one request beyond which they are read in a thread: 100 take about 1 ms."""
FULL_WAIT_S: Final = 30.0
"""Seconds that whoever meets a full stream is told to wait."""


@dataclass(frozen=True, slots=True)
class EventIntake:
    """The way of events into the stream of one namespace; `clock` is Unix seconds, `timer` monotonic ones."""

    redis: EventsRedis
    reader: EventReader
    acceptor: Acceptor
    inbox_acceptor: Acceptor
    """Its own: it accepts at Redis' maxmemory, too, or the inbox that fills Redis could never be emptied."""
    rejections: Rejections
    counts: EventCounts
    blocklist: Callable[[], Blocklist]
    clock: Callable[[], float]
    timer: Callable[[], float]

    async def accept_events(self, events: Sequence[Any]) -> dict[str, Any]:
        """Takes a request's list of events; the answer to it. Raises Problem where none can be accepted now.

        After that some may have been accepted all the same: sent again under their ids they count once.
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
        """Takes entries of the inbox, by their ids; each is accepted, or rejected and kept, when this returns.

        Raises EventsFull, EventsUnavailable and EventsBusy, and counts them: producers hear of none.
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
        self, events: Sequence[Any], read_events: ReadEvents, outcomes: Sequence[Accepted]
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
                rejected.append(RejectedEvent(index, TOO_MANY, _TOO_MANY))
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

    def _count(self, outcome: Accepted, raw_event: Any) -> None:
        if outcome.reason == TOO_MANY:
            self.rejections.add(TOO_MANY, _TOO_MANY, raw_event)
        else:
            self.counts.results[outcome.reason or ACCEPTED] += 1


_TOO_MANY: Final = "its user, or the item alone, has sent as many as [events] of_one allows"
