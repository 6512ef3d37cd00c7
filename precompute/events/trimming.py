"""Trimming of the stream: events go that no generation, no night and no repetition needs any more."""

from collections.abc import Iterator

import orjson
import redis

from cache.errors import CorruptArtefact, UnknownGeneration
from cache.events.position import BEGINNING, Position
from cache.format.manifest import GENERATION
from cache.format.redis_keys import Keyspace
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from precompute.events.files import last_taken


def trim(
    store: ArtefactStore, client: "redis.Redis", keys: Keyspace, *, keep_s: float, stream_bytes: int
) -> int:
    """Remove events that files have, that all generations in the store have, and that are older than `keep_s`.

    Returns how many. What cannot be told keeps all of them. A stream that takes more than half of its `stream_bytes`
    keeps none for their age: once it is full, it refuses all that is new.
    """
    bounds = [last_taken(store), *held(store)]
    if int(client.memory_usage(keys.events) or 0) <= stream_bytes // 2:
        seconds, micros = client.time()
        bounds.append(Position(max(0, int((seconds + micros / 1e6 - keep_s) * 1000)), 0))
    bound = min(bounds)
    if bound == BEGINNING:
        return 0
    # What is below the id goes, and the bound itself is had.
    behind = Position.of_number(bound.number + 1)
    return int(client.xtrim(keys.events, minid=str(behind), approximate=False))


def held(store: ArtefactStore) -> Iterator[Position]:
    """Positions that the generations of the store go up to; one that knows of no events asks for none."""
    for generation in filter(GENERATION.fullmatch, store.names("generations")):
        until: str | None
        try:
            events = read_manifest(store, generation).events
            until = None if events is None else events.until
        except UnknownGeneration:  # in the making
            raw = store.read(generation_path(generation, "work/begin.json"))
            until = None if raw is None else (orjson.loads(raw).get("events") or {}).get("until")
        except CorruptArtefact:
            yield BEGINNING
            continue
        if until is not None:
            yield Position.parse(until)
