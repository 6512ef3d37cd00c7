"""Bulk load: stream page files into Redis, resumable per page; and the way out, page by page."""

import mmap
from pathlib import Path

import redis

from cache.errors import CorruptArtefact
from cache.format.manifest import Manifest
from cache.format.redis_keys import Keyspace
from cache.resp.reply_shapes import refusing
from precompute.bulk.governor import Governor
from precompute.bulk.page_stream import PageStream
from precompute.bulk.parts import Part, page_keys, parts_of, total_bytes
from precompute.bulk.readback import BadPage, Progress, verify_part

__all__ = [
    "BadPage",
    "Part",
    "Progress",
    "load_part",
    "loaded_pages",
    "mark_loaded",
    "page_keys",
    "parts_of",
    "total_bytes",
    "unlink_pages",
    "verify_part",
]

RETIRE_BATCH = 64
NOTED_BYTES = 16 << 20
"""Bytes loaded between two notes of how far it is: what a crash costs at most, with what was under way."""


def load_part(
    client: "redis.Redis",
    keys: Keyspace,
    manifest: Manifest,
    root: Path,
    part: Part,
    *,
    chunk_bytes: int = 1 << 20,
    progress: Progress = lambda _bytes: None,
    governor: Governor | None = None,
) -> bool:
    """Stream a part's pages, then mark it loaded; False when it was wholly there. `root` is the generation's folder.

    Whole or in pieces, a page can be written again without harm, since the generation is not live. The mark is written
    last; pages that an earlier try has noted as there are not sent again.
    """
    loaded_key = keys.loaded(manifest.generation)
    if client.hget(loaded_key, part.name) == part.loaded_digest:
        return False
    client.hdel(loaded_key, part.read)
    entry = part.pages
    if not entry.count:
        client.hset(loaded_key, part.name, part.loaded_digest.decode())
        return True
    loaded_count = loaded_pages(client, keys, manifest, part)
    noted_at, unnoted = loaded_count, 0
    progress(sum(part.size_of(page) for page in range(loaded_count)))

    def landed(pages: int, size_bytes: int) -> None:
        nonlocal loaded_count, noted_at, unnoted
        loaded_count, unnoted = loaded_count + pages, unnoted + size_bytes
        progress(size_bytes)
        if unnoted >= NOTED_BYTES and loaded_count > noted_at:
            client.hset(loaded_key, part.progress, f"{part.loaded_digest.decode()} {loaded_count}")
            noted_at, unnoted = loaded_count, 0

    with (
        (root / entry.file.path).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
    ):
        if len(pages) != entry.count * part.table.layout.size_bytes:
            raise CorruptArtefact(
                f"{entry.file.path} has {len(pages)} bytes for {entry.count} records"
            )
        names = [part.key(keys, manifest.generation, page).encode() for page in range(entry.pages)]
        with (
            memoryview(pages) as view,
            PageStream(client, governor, chunk_bytes=chunk_bytes, landed=landed) as stream,
        ):
            stream.send(names, view, loaded_count, part.table.page_bytes)
    mark_loaded(client, loaded_key, part)
    return True


def mark_loaded(client: "redis.Redis", noted: str, part: Part) -> None:
    """Mark a part loaded in place of the note of how far it is."""
    with client.pipeline(transaction=True) as pipeline:
        pipeline.hset(noted, part.name, part.loaded_digest.decode())
        pipeline.hdel(noted, part.progress)
        with refusing("EXEC", "a list of replies"):
            pipeline.execute()


def loaded_pages(client: "redis.Redis", keys: Keyspace, manifest: Manifest, part: Part) -> int:
    """Number of pages of an unfinished part that are known to be in Redis, from its first on."""
    progress_note = client.hget(keys.loaded(manifest.generation), part.progress)
    if not isinstance(progress_note, bytes):
        return 0
    part_mark, _, count = progress_note.partition(b" ")
    return (
        min(int(count), part.pages.pages)
        if part_mark == part.loaded_digest and count.isdigit()
        else 0
    )


def unlink_pages(
    client: "redis.Redis", keys: Keyspace, manifest: Manifest, *, governor: Governor | None = None
) -> int:
    """Remove a generation's pages in small batches, so that no reader waits long; keys removed.

    Redis frees a string where it stands, however big, so with readers around the pages go one at a time, each at the
    price of a piece: about as long does it take Redis.
    """
    removed = 0
    batch: list[str] = []
    for part in parts_of(manifest):
        for page in range(part.pages.pages):
            batch.append(part.key(keys, manifest.generation, page))
            piece = None if governor is None else governor.piece_bytes
            if governor is not None:
                size = part.size_of(page)
                governor.pace(size if piece is None else min(size, piece))
            if piece is not None or len(batch) == RETIRE_BATCH:
                removed += int(client.unlink(*batch))
                batch.clear()
    removed += int(client.unlink(*batch, keys.loaded(manifest.generation)))
    return removed
