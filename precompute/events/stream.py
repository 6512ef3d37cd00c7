"""Entries of a stream, read in batches."""

from typing import Final, cast

import redis

AT_ONCE: Final = 1_000
"""Entries of a batch: a millisecond or two of Redis' time."""

Entry = tuple[bytes, dict[bytes, bytes]]


def entries(
    client: "redis.Redis", stream: str, *, behind: str | None = None, end_id: str = "+"
) -> list[Entry]:
    """The next entries behind a position (from the first one on without), up to another; none at the end."""
    first = "-" if behind is None else f"({behind}"
    reply = client.xrange(stream, first, end_id, count=AT_ONCE)
    return cast(list[Entry], reply)


def read_newest_id(client: "redis.Redis", stream: str) -> bytes | None:
    """Position of the newest entry, None of an empty stream."""
    last_entries = cast(list[Entry], client.xrevrange(stream, count=1))
    return last_entries[0][0] if last_entries else None
