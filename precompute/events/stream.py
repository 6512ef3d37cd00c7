"""Entries of a stream, read in batches."""

from typing import Final, cast

import redis

AT_ONCE: Final = 1_000
"""Entries of a batch: a millisecond or two of Redis' time."""

Entry = tuple[bytes, dict[bytes, bytes]]


def entries(
    client: "redis.Redis", stream: str, *, behind: str | None = None, until: str = "+"
) -> list[Entry]:
    """The next entries behind a position (from the first one on without), up to another; none at the end."""
    first = "-" if behind is None else f"({behind}"
    found = client.xrange(stream, first, until, count=AT_ONCE)
    return cast(list[Entry], found)


def newest(client: "redis.Redis", stream: str) -> bytes | None:
    """Position of the newest entry, None of an empty stream."""
    found = cast(list[Entry], client.xrevrange(stream, count=1))
    return found[0][0] if found else None
