"""Stream of accepted events in Redis, deduplicated and bounded, and the position up to which nights took it over."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson
import xxhash

from cache.errors import CorruptArtefact, InvalidInput
from cache.events.event import EVENT_FIELD, Event
from cache.format.redis_keys import Keyspace
from cache.format.stream_position import STREAM_BEGINNING, Position
from cache.store.artefacts import ArtefactStore

STREAM_FULL_PREFIX: Final = "FULL"
"""Prefix of the error for a full stream."""

TAKEN_POSITION_PATH: Final = "events/taken.json"
"""Store path of the position up to which nights have taken events over."""

ACCEPT_SCRIPT: Final = """
local stream, limit, life, most = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local known, known_sequence = string.match(ARGV[4], '(%d+)-(%d+)')
known, known_sequence = tonumber(known), tonumber(known_sequence)
local used = redis.call('MEMORY', 'USAGE', stream, 'SAMPLES', '5')
if used and used >= limit then return redis.error_reply('FULL ' .. used) end
local last = '0-0'
if used then
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then last = info[i + 1] end
  end
end
-- While Redis' clock stands still the sequence grows, and a position holds 20 bits of it: the next millisecond begins
-- before they are used up. And where a stream was lost, and the clock is behind what it had, a position of now would be
-- one that nights and followers have passed.
local function place()
  local ms, sequence = string.match(last, '(%d+)-(%d+)')
  ms, sequence = tonumber(ms), tonumber(sequence)
  if ms < known or (ms == known and sequence < known_sequence) then
    local now = redis.call('TIME')
    if now[1] * 1000 + math.floor(now[2] / 1000) > known then return '*' end
    return string.format('%.0f-0', known + 1)
  end
  if sequence < 524288 then return '*' end
  return string.format('%.0f-0', ms + 1)
end
local told, again = {}, {}
for i = 1, (#KEYS - 1) / 2 do
  local id, source, body = KEYS[2 * i], KEYS[2 * i + 1], ARGV[4 + i]
  if redis.call('EXISTS', id) == 1 then
    again[#again + 1] = id
    told[i] = 'repeated'
  elseif tonumber(redis.call('GET', source) or '0') >= most then
    told[i] = 'too_many'
  else
    last = redis.call('XADD', stream, place(), 'e', body)
    redis.call('SET', id, last, 'PX', life)
    if redis.call('INCR', source) == 1 then redis.call('PEXPIRE', source, life) end
    told[i] = last
  end
end
-- Writes, so that WAITAOF waits for repetitions, too: their events may not be on disk yet. Last: after a write Redis no
-- longer looks whether its memory is full.
for _, id in ipairs(again) do redis.call('PEXPIRE', id, life) end
return told
"""
"""Script that accepts events. Redis logs its effects as one transaction, so that after a crash both an event and its id
exist, or neither."""

ACCEPT_SCRIPT_AT_MAXMEMORY: Final = "#!lua flags=allow-oom" + ACCEPT_SCRIPT
"""ACCEPT_SCRIPT for the inbox, which runs even at Redis' maxmemory: otherwise the inbox could never be emptied. The
stream's bound still holds, and accepted entries are deleted from the inbox right after."""


class StreamBounds(NamedTuple):
    """Bounds: bytes of the stream, milliseconds of an id's life, and events of one user (or item) within that life."""

    stream_bytes_max: int
    event_id_life_ms: int
    events_per_entity_max: int


class AcceptOutcome(NamedTuple):
    """Outcome for one event: its position, or why it has none: `repeated` or `too_many`."""

    position: Position | None
    rejection_reason: str | None = None


class PackedEvent(NamedTuple):
    """Event as the script's arguments: keys of its id and of its source, and its bytes."""

    event_id_key: bytes
    event_source_key: bytes
    event_bytes: bytes


def pack_event(keyspace: Keyspace, event: Event) -> PackedEvent:
    """Pack an event for the stream; callable in any thread, since packing a batch takes milliseconds."""
    # A user and an item may have the same id, and an id may contain any byte: include kind and length.
    kind_byte = b"i" if event.user is None else b"u"
    kind_and_source = kind_byte + len(event.source_id).to_bytes(2, "big") + event.source_id
    return PackedEvent(
        keyspace.event_ids + xxhash.xxh3_128_digest(kind_and_source + event.id.encode()),
        keyspace.event_sources + xxhash.xxh3_128_digest(kind_and_source),
        event.to_bytes(),
    )


def accept_script_arguments(
    keyspace: Keyspace, bounds: StreamBounds, events: Sequence[PackedEvent], known_position: Position = STREAM_BEGINNING
) -> tuple[list[bytes], list[Any]]:
    """Return the script's (KEYS, ARGV) for events in order, to be added after `known_position`."""
    keys, argv = [keyspace.events.encode()], [*map(str, (*bounds, known_position))]
    for event in events:
        keys += event[:2]
    return keys, [*argv, *(event.event_bytes for event in events)]


def read_outcomes(script_replies: Sequence[bytes]) -> list[AcceptOutcome]:
    """Parse the script's replies to outcomes."""
    return [
        AcceptOutcome(None, reply.decode()) if reply in (b"repeated", b"too_many")
        else AcceptOutcome(Position.parse(reply))
        for reply in script_replies
    ]  # fmt: skip


def event_of_entry(entry_fields: dict[bytes, bytes]) -> Event:
    """Parse the event of a stream entry; raise CorruptArtefact."""
    return Event.from_bytes(entry_fields.get(EVENT_FIELD, b""))


def write_taken_position(store: ArtefactStore, position: Position) -> None:
    """Write the position up to which nights have taken events over, if it has changed."""
    position_json = orjson.dumps({"until": str(position)})
    if store.read(TAKEN_POSITION_PATH) != position_json:
        store.write(TAKEN_POSITION_PATH, position_json)


def read_taken_position(store: ArtefactStore) -> Position:
    """Return the position up to which nights have taken events over, `STREAM_BEGINNING` before the first.

    Raises StoreError, and CorruptArtefact for a malformed file.
    """
    position_json = store.read(TAKEN_POSITION_PATH)
    try:
        return STREAM_BEGINNING if position_json is None else Position.parse(orjson.loads(position_json)["until"])
    except (orjson.JSONDecodeError, InvalidInput, KeyError, TypeError) as error:
        raise CorruptArtefact(
            f"{TAKEN_POSITION_PATH} does not contain a position: {error}", path=TAKEN_POSITION_PATH
        ) from error
