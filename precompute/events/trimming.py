"""Trimming of the stream: events go that no generation, no night and no repetition needs any more."""

import redis

from cache.events.position import BEGINNING, Position
from cache.format.redis_keys import Keyspace
from precompute.events.files import last_taken
from precompute.events.stores import EventStores


def trim(
    stores: EventStores, client: "redis.Redis", keys: Keyspace, *, keep_s: float, stream_bytes: int
) -> int:
    """Remove events that files have, that all generations in the stores have, and that are older than `keep_s`.

    Returns how many. What cannot be told keeps all of them. A stream that takes more than half of its `stream_bytes`
    keeps none for their age: once it is full, it refuses all that is new.
    """
    bounds = [last_taken(stores.home_store), *stores.iter_generation_positions()]
    if int(client.memory_usage(keys.events) or 0) <= stream_bytes // 2:
        seconds, micros = client.time()
        bounds.append(Position(max(0, int((seconds + micros / 1e6 - keep_s) * 1000)), 0))
    bound = min(bounds)
    if bound == BEGINNING:
        return 0
    # What is below the id goes, and the bound itself is had.
    behind = Position.of_number(bound.number + 1)
    return int(client.xtrim(keys.events, minid=str(behind), approximate=False))
