"""Taking over of the stream: what it has behind the last file becomes files in the store, each event in one."""

from typing import Final, NamedTuple

import redis

from cache.errors import CorruptArtefact
from cache.events.accept import entry_of
from cache.events.event import Event
from cache.events.position import Position
from cache.events.taken import note_taken
from cache.format.redis_keys import Keyspace
from cache.store.artefacts import ArtefactStore
from precompute.erasures.erasure import NO_ERASURES, ErasedEntities
from precompute.events.files import last_taken, path_of, to_bytes
from precompute.events.stream import entries, read_newest_id

FILE_EVENTS: Final = 200_000
"""Events of a file; what is more goes into another one."""
FILE_BYTES: Final = 64 << 20
"""Bytes of events, as they lie in the stream, of a file."""


class TakenEvents(NamedTuple):
    """Events of the stream that are in files now: up to which position, and how many of them this time.

    `left_out` are those of who was erased, `unreadable` what is no event.
    """

    until_position: Position
    events: int = 0
    left_out: int = 0
    unreadable: int = 0


class _StreamRead(NamedTuple):
    rows: list[tuple[Position, Event]]
    until_position: Position
    left_out: int
    unreadable: int


def take_events(
    store: ArtefactStore,
    client: "redis.Redis",
    keys: Keyspace,
    *,
    erased: ErasedEntities = NO_ERASURES,
) -> TakenEvents:
    """Write what the stream has now, behind what the files have, as further files.

    Safe to repeat after a crash anywhere, and side by side with another: a file that another one wrote stands.
    """
    last = read_newest_id(client, keys.events)
    taken_events = TakenEvents(last_taken(store))
    end_position = taken_events.until_position if last is None else Position.parse(last)
    while taken_events.until_position < end_position:
        read = _read(client, keys.events, taken_events.until_position, end_position, erased)
        if store.write_once(
            path_of(taken_events.until_position), to_bytes(read.rows, read.until_position)
        ):
            taken_events = TakenEvents(
                read.until_position,
                taken_events.events + len(read.rows),
                taken_events.left_out + read.left_out,
                taken_events.unreadable + read.unreadable,
            )
        else:  # another one did, perhaps of more of them
            taken_events = taken_events._replace(until_position=last_taken(store))
    note_taken(store, taken_events.until_position)
    return taken_events


def _read(
    client: "redis.Redis",
    stream: str,
    after: Position,
    end_position: Position,
    erased: ErasedEntities,
) -> _StreamRead:
    """Events behind `after` up to `end_position`, or as many as a file takes."""
    rows: list[tuple[Position, Event]] = []
    left_out = unreadable = size_bytes = 0
    while len(rows) < FILE_EVENTS and size_bytes < FILE_BYTES:
        batch = entries(client, stream, behind=str(after), end_id=str(end_position))
        if not batch:  # the last one was removed since
            return _StreamRead(rows, end_position, left_out, unreadable)
        for raw, fields in batch:
            after = Position.parse(raw)
            size_bytes += sum(map(len, fields.values()))
            try:
                event = entry_of(fields)
            except CorruptArtefact:
                unreadable += 1
                continue
            if event.user in erased.users or event.item in erased.items:
                left_out += 1
            else:
                rows.append((after, event))
    return _StreamRead(rows, after, left_out, unreadable)
