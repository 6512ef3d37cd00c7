"""The stream of accepted events in Redis: each once and within bounds, and how far nights have taken it over."""

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
"""Beginning of the error when the stream takes no more."""

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
"""Script that accepts events: its effects are one transaction in Redis' log, so a crash leaves an event with its id, or
neither."""

ACCEPT_SCRIPT_AT_MAXMEMORY: Final = "#!lua flags=allow-oom" + ACCEPT_SCRIPT
"""ACCEPT_SCRIPT for the inbox, run even at Redis' maxmemory: otherwise nothing would ever empty the inbox. The stream's
bound still holds, and accepted entries are deleted right after."""


class StreamBounds(NamedTuple):
    """Bounds of the stream in bytes, of an id's life in milliseconds, and on events of one user (or item) within it."""

    stream_bytes_max: int
    life_ms: int
    events_of_one_max: int


class AcceptOutcome(NamedTuple):
    """Outcome for one event: its position, or why it has none: `repeated` or `too_many`."""

    position: Position | None
    reason: str | None = None


class PackedEvent(NamedTuple):
    """Event as the script takes it: keys of its id and of its source, and its bytes."""

    id_key: bytes
    source_key: bytes
    body: bytes


def pack_event(keyspace: Keyspace, event: Event) -> PackedEvent:
    """Return an event packed for the stream; may run in any thread, as packing a batch takes milliseconds."""
    # A user and an item may have one id, and an id may hold any byte: the kind and the length tell them apart.
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
    """(KEYS, ARGV) of the script for some events, in their order; they follow the `known_position`."""
    keys, argv = [keyspace.events.encode()], [*map(str, (*bounds, known_position))]
    for event in events:
        keys += event[:2]
    return keys, [*argv, *(event.body for event in events)]


def read_outcomes(replies: Sequence[bytes]) -> list[AcceptOutcome]:
    """Parse the script's replies to outcomes."""
    return [
        AcceptOutcome(None, reply.decode()) if reply in (b"repeated", b"too_many")
        else AcceptOutcome(Position.parse(reply))
        for reply in replies
    ]  # fmt: skip


def event_of_entry(fields: dict[bytes, bytes]) -> Event:
    """The event of a stream entry; raises CorruptArtefact."""
    return Event.from_bytes(fields.get(EVENT_FIELD, b""))


def write_taken_position(store: ArtefactStore, position: Position) -> None:
    """Writes the position up to which nights have taken events over, unless it is there."""
    position_json = orjson.dumps({"until": str(position)})
    if store.read(TAKEN_POSITION_PATH) != position_json:
        store.write(TAKEN_POSITION_PATH, position_json)


def read_taken_position(store: ArtefactStore) -> Position:
    """Return the position up to which nights have taken events over, `STREAM_BEGINNING` before any.

    Raises StoreError, and CorruptArtefact for a malformed file.
    """
    position_json = store.read(TAKEN_POSITION_PATH)
    try:
        return STREAM_BEGINNING if position_json is None else Position.parse(orjson.loads(position_json)["until"])
    except (orjson.JSONDecodeError, InvalidInput, KeyError, TypeError) as error:
        raise CorruptArtefact(f"{TAKEN_POSITION_PATH} names no position: {error}", path=TAKEN_POSITION_PATH) from error
