"""Reading pages back from Redis: what is not as its checksum says is found, and can be repaired where readers look."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import redis
import xxhash

from cache.errors import CorruptArtefact
from cache.keys import Keyspace
from cache.manifest import Manifest
from cache.servers import by_server
from precompute.bulk.governor import Governor
from precompute.bulk.parts import Part

Progress = Callable[[int], None]
AT_ONCE_MAX = 500


class BadPage(CorruptArtefact):
    """A page that is missing from Redis or differs from its checksum; loading again repairs it."""


def verify_part(
    client: "redis.Redis",
    keys: Keyspace,
    manifest: Manifest,
    root: Path,
    part: Part,
    *,
    chunk_bytes: int = 1 << 20,
    progress: Progress = lambda _bytes: None,
    governor: Governor | None = None,
) -> int:
    """Read every page back from Redis and compare checksums; pages checked. Raises CorruptArtefact naming the page.

    A bad page takes its part's `loaded` mark along, so that the next `load` sends the part again.
    """
    for page, complaint in bad_pages(
        client, keys, manifest, root, part,
        chunk_bytes=chunk_bytes, progress=progress, governor=governor,
    ):  # fmt: skip
        client.hdel(keys.loaded(manifest.generation), part.name, part.progress)
        name = part.key(keys, manifest.generation, page)
        raise BadPage(f"page {name} {complaint}; run load again", page=name)
    return part.pages.pages


def bad_pages(
    client: "redis.Redis",
    keys: Keyspace,
    manifest: Manifest,
    root: Path,
    part: Part,
    *,
    chunk_bytes: int = 1 << 20,
    progress: Progress = lambda _bytes: None,
    governor: Governor | None = None,
) -> Iterator[tuple[int, str]]:
    """(number within the part, complaint) of each page that is not as its checksum says."""
    sums = part.read_sums(root)
    at_once = max(1, chunk_bytes // part.table.page_bytes)
    page = 0
    while page < part.pages.pages:
        piece = None if governor is None else governor.piece_bytes
        numbers = range(page, min(page + (at_once if piece is None else 1), part.pages.pages))
        names = [part.key(keys, manifest.generation, each) for each in numbers]
        if governor is not None and piece is not None:
            found = [_read_in_pieces(client, names[0], part.size_of(page), piece, governor)]
        else:
            found = _read_whole(client, names, governor, part.table.page_bytes)
        for each, (digest, size_bytes) in zip(numbers, found, strict=True):
            if digest is None:
                yield each, "is not in Redis"
            elif digest != int(sums[each]):
                yield each, "differs from its checksum"
            progress(size_bytes)
        page = numbers.stop


def _read_whole(
    client: "redis.Redis", names: list[str], governor: Governor | None, page_bytes: int
) -> list[tuple[int | None, int]]:
    if governor is not None:
        governor.pace(len(names) * page_bytes)
        governor.own_reads(len(names))
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.get(name)
    values: list[Any] = pipeline.execute()
    return [
        (None, 0) if value is None else (xxhash.xxh3_64_intdigest(value), len(value))
        for value in values
    ]


def _read_in_pieces(
    client: "redis.Redis", name: str, size_bytes: int, piece: int, governor: Governor
) -> tuple[int | None, int]:
    """Digest and length of a page; one that is longer or shorter than it should be has a digest of nothing."""
    found_bytes: Any = client.strlen(name)
    if not found_bytes:
        return None, 0
    digest = xxhash.xxh3_64()
    if found_bytes != size_bytes:
        return digest.intdigest(), found_bytes
    for at in range(0, size_bytes, piece):
        governor.pace(min(piece, size_bytes - at))
        governor.own_reads(1)
        value: Any = client.getrange(name, at, min(at + piece, size_bytes) - 1)
        digest.update(value)
    return digest.intdigest(), size_bytes


def lengths(
    client: "redis.Redis", keys: Keyspace, manifest: Manifest, part: Part
) -> Iterator[tuple[int, int]]:
    """(number within the part, bytes in Redis) of every page; 0 for one that is not there."""
    for first in range(0, part.pages.pages, AT_ONCE_MAX):
        numbers = range(first, min(first + AT_ONCE_MAX, part.pages.pages))
        names = [part.key(keys, manifest.generation, each).encode() for each in numbers]
        found = dict.fromkeys(numbers, 0)
        for server, places in by_server(client, names):
            sizes = _strlens(client, server, [names[place] for place in places])
            found.update(zip([numbers[place] for place in places], sizes, strict=True))
        yield from found.items()


def _strlens(client: "redis.Redis", server: "redis.Redis", names: list[bytes]) -> list[int]:
    """Packed and read as they are: through redis-py's pipeline a large generation would take seconds."""
    pool = server.connection_pool
    connection: Any = pool.get_connection()
    try:
        packed = b"".join(
            b"*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names
        )
        connection.send_packed_command([packed], check_health=False)
        replies = [_reply(connection) for _ in names]
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)
    return [
        int(cast(Any, client.strlen(name))) if reply is None else reply
        for name, reply in zip(names, replies, strict=True)
    ]


def _reply(connection: Any) -> int | None:
    """None where another node of the cluster has to be asked."""
    try:
        return int(connection.read_response())
    except redis.exceptions.AskError:  # MOVED is one, too
        return None
