"""Pages back into Redis: what is missing or damaged is streamed from the artefact store, the rest is left alone."""

from itertools import islice

import redis

from cache.artefacts import ArtefactStore, check, generation_path, read_manifest
from cache.errors import Conflict, CorruptArtefact, StoreError
from cache.keys import Keyspace
from cache.manifest import Artefact, Manifest
from precompute.control import Control
from precompute.load import Part, Progress, load_part, parts_of, total_bytes, verify_part

CHUNK_BYTES = 1 << 20
EXISTS_BATCH = 1_000


def reload(
    control: Control,
    keys: Keyspace,
    store: ArtefactStore,
    generation: str,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress = lambda _bytes: None,
) -> int:
    """Read a generation's pages back from Redis and stream the parts that are not right; bytes of pages.

    Only checksums are fetched for parts that are right, so this costs a remote store little.
    """
    manifest = read_manifest(store, generation)
    for part in parts_of(manifest):
        _fetch(store, generation, part.pages.sums)
        root = store.local(generation_path(generation))
        if is_marked(control.client, keys, manifest, part):
            try:
                verify_part(control.client, keys, manifest, root, part, chunk_bytes=chunk_bytes)
                continue
            except CorruptArtefact:
                pass  # the mark survived, the pages did not
        _stream(control, keys, store, manifest, part, chunk_bytes=chunk_bytes, progress=progress)
    return total_bytes(manifest)


def load_missing(
    control: Control,
    keys: Keyspace,
    store: ArtefactStore,
    generation: str,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> int:
    """Stream the parts of which a mark or a page is missing; how many. What is there was verified before."""
    manifest, streamed = read_manifest(store, generation), 0
    for part in parts_of(manifest):
        if not is_marked(control.client, keys, manifest, part) or not _is_there(
            control.client, keys, manifest, part
        ):
            _fetch(store, generation, part.pages.sums)
            _stream(control, keys, store, manifest, part, chunk_bytes=chunk_bytes)
            streamed += 1
    return streamed


def is_marked(client: "redis.Redis", keys: Keyspace, manifest: Manifest, part: Part) -> bool:
    """Whether the loader marked exactly this part as wholly loaded."""
    mark = client.hget(keys.loaded(manifest.generation), part.name)
    return bool(mark == part.pages.sums.sha256.encode())


def _is_there(client: "redis.Redis", keys: Keyspace, manifest: Manifest, part: Part) -> bool:
    first = part.pages.first_page
    names = (
        keys.page(manifest.generation, part.table.name, page)
        for page in range(first, first + part.pages.pages)
    )
    while batch := list(islice(names, EXISTS_BATCH)):
        pipeline = client.pipeline(transaction=False)
        for name in batch:
            pipeline.exists(name)
        if not all(pipeline.execute()):
            return False
    return True


def _stream(
    control: Control,
    keys: Keyspace,
    store: ArtefactStore,
    manifest: Manifest,
    part: Part,
    *,
    chunk_bytes: int,
    progress: Progress = lambda _bytes: None,
) -> None:
    generation = manifest.generation
    _fetch(store, generation, part.pages.file)
    root, client = store.local(generation_path(generation)), control.client
    client.hdel(keys.loaded(generation), part.name)
    load_part(client, keys, manifest, root, part, chunk_bytes=chunk_bytes, progress=progress)
    verify_part(client, keys, manifest, root, part, chunk_bytes=chunk_bytes)


def _fetch(store: ArtefactStore, generation: str, artefact: Artefact) -> None:
    gone = (
        f"{artefact.path} of {generation} is gone from {store.url}, so its pages cannot be loaded"
    )
    try:
        path = store.fetch(generation_path(generation, artefact.path))
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise Conflict(gone, generation=generation) from error
        raise
    if not path.is_file():
        raise Conflict(gone, generation=generation)
    check(store.local(generation_path(generation)), artefact)
