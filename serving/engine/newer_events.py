"""Newer events of users, as answers count them."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

import xxhash

from cache.events.event import Event
from cache.events.event_predictor import EventInput
from cache.events.new_items import NewItemEvents
from cache.events.newer_events import AttributeEvents, UserEvent, UserEvents, takes_any_attribute
from cache.format.manifest import Table
from cache.format.stream_position import Position
from cache.model.input_preparation import LiveInput
from serving.generations.snapshot import Snapshot

NO_LIMIT = (1 << 64) - 1
"""Number that is above every position's."""


class CountedEvents(NamedTuple):
    """Newer events that an answer counts, the newest last; `digest` is that of all inputs of the answer.

    Unless it `is_whole` some may be missing, and nothing is computed from the known ones. An `is_past` one is for a
    requested earlier position: computed, and not kept; `is_approximate` if attributes are newer than it.
    """

    input: EventInput
    digest: bytes
    is_whole: bool = True
    is_past: bool = False
    is_approximate: bool = False

    @property
    def events(self) -> int:
        """Number of events."""
        return len(self.input.events)

    @property
    def as_of(self) -> str:
        """Time when the newest was accepted, RFC 3339, UTC."""
        return iso_of(Position.of_number(self.input.events[-1].number).ms / 1000)

    @property
    def items(self) -> tuple[bytes, ...]:
        """Items of the events, by their ids."""
        return tuple([event.item for event in self.input.events if event.item])


@dataclass(frozen=True, slots=True, eq=False)
class NewerEvents:
    """Events of users since the oldest generation that is held; for the event loop of one process only."""

    users: UserEvents = field(default_factory=UserEvents)
    values: AttributeEvents = field(default_factory=AttributeEvents)
    """Attributes that events set."""
    items: NewItemEvents = field(default_factory=NewItemEvents)
    """Items that events brought."""

    @property
    def size_bytes(self) -> int:
        """Memory that they take, about."""
        return self.users.size_bytes + self.values.size_bytes + self.items.size_bytes

    @property
    def packed(self) -> dict[bytes, bytes]:
        """Events by user, the same dictionary for good: a user whom it lacks has none.

        With each event the user gets another object: while it is the same, an answer still counts all events.
        """
        return self.users.packed

    def add(self, position: Position, event: Event) -> None:
        """Add the next event."""
        self.users.add(position, event)
        self.values.add(position, event)
        self.items.add(position, event)

    def become_in_turns(self, replacement: "NewerEvents") -> Iterator[None]:
        """Take over the contents of `replacement`, which is then given up; a few users between two yields."""
        yield from self.users.become_in_turns(replacement.users)
        self.values.become(replacement.values)
        self.items.become(replacement.items)

    def forget(self, users: Iterable[bytes], items: frozenset[bytes]) -> None:
        """Forget the events of users, and new items and item values, of items of a night as of those of events."""
        for raw in users:
            self.users.forget(raw)
            self.values.forget("user", raw)
        for raw in items:
            if raw in self.items:
                self.items.forget(raw)
        for raw in self.values.items_among(items):
            self.values.forget("item", raw)

    def changes(self, snapshot: Snapshot, table: Table, raw: bytes) -> bool:
        """True if the user has events that the generation lacks, and that change the answers of this table."""
        events = snapshot.events
        if events is None or (features := events.tables.get(table.name)) is None:
            return False
        if not self.users.has_newer(raw, events.until_number):
            return False
        return self.users.has_newer_item(raw, events.until_number) or takes_any_attribute(
            self.values.of_user(raw, events.until_number), features
        )

    def find_counted_events(
        self,
        snapshot: Snapshot,
        table: Table,
        raw: bytes,
        position: int,
        sent_input: tuple[LiveInput, bytes] | None = None,
        as_of: int = NO_LIMIT,
    ) -> CountedEvents | None:
        """Events of the user that an answer of the table counts, up to a position's number; None without any.

        `position` is the user's in the directory (-1: the night did not know it). `sent_input` is what the caller sent,
        with its digest: it counts for users of whom the night and these events have no input that the model takes. Of a
        user with a record in the table it is None.
        """
        events_of_night = snapshot.events
        if events_of_night is None or not events_of_night.changes(
            table, position, snapshot.seen_items
        ):
            return None
        if snapshot.blocks(table, raw):
            return None
        features = events_of_night.tables[table.name]
        newer_events = self.users.list_events_after(raw, events_of_night.until_number)
        values = self.values.of_user(raw, events_of_night.until_number)
        is_of_values = takes_any_attribute(values, features)
        events = tuple(
            [
                event
                for event in newer_events
                if event.number <= as_of and (event.item or is_of_values)
            ]
        )
        if not events:
            return None
        event_input, digest = EventInput(position, events, None, values), b""
        if sent_input is not None and not events_of_night.has_input(table, event_input):
            source, digest = sent_input
            event_input = event_input._replace(caller_input=source)
        is_whole = events_of_night.until_number >= self.users.complete_after_number
        is_past = as_of < NO_LIMIT
        is_approximate = is_of_values and self.values.newest_of_user(raw) > as_of
        return CountedEvents(
            event_input, _digest(raw, events, digest), is_whole, is_past, is_approximate
        )


def iso_of(at: float) -> str:
    """Time in Unix seconds as RFC 3339 in UTC, to the millisecond."""
    text = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _digest(raw: bytes, events: Sequence[UserEvent], sent_digest: bytes) -> bytes:
    # All of them: with the newest alone an answer that lacked some would be taken for the whole one.
    numbers = struct.pack(
        f"<II{len(events)}Q", len(raw), len(events), *[event.number for event in events]
    )
    return xxhash.xxh3_128_digest(numbers + raw + sent_digest)
