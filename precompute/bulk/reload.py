"""Reload of pages into Redis: missing or damaged ones are streamed from the artefact store, intact ones are kept."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import redis

from cache.control.control_keys import Control
from cache.errors import Conflict, StoreError
from cache.format.manifest import Artefact, Manifest
from cache.store.artefacts import ArtefactStore, check_file, generation_path, read_manifest
from precompute.bulk.governor import Governor
from precompute.bulk.load import BytesProgress, Part, load_part, parts_of, total_bytes
from precompute.bulk.readback import find_bad_pages, read_page_lengths, value_sizes, verify_part

CHUNK_BYTES = 1 << 20
REPAIR_BYTES = 32 * 1024
PROBED_PAGES_MAX = 500
"""Pages that a roll back checks before it moves the pointer."""


def reload(
    control: Control,
    store: ArtefactStore,
    generation: str,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    progress: BytesProgress = lambda _bytes: None,
    governor: Governor | None = None,
) -> int:
    """Stream the parts that Redis lacks, and repair damaged pages; return the bytes of all pages.

    Only checksums are fetched for intact parts, so this needs little data from a remote store.
    """
    manifest = read_manifest(store, generation)
    for part in parts_of(manifest):
        if is_marked_loaded(control, manifest, part):
            _repair_part(control, store, manifest, part, chunk_bytes=chunk_bytes, governor=governor)
        else:
            _stream_part(
                control, store, manifest, part,
                chunk_bytes=chunk_bytes, progress=progress, governor=governor,
            )  # fmt: skip
    return total_bytes(manifest)


def load_missing(
    control: Control,
    store: ArtefactStore,
    generation: str,
    *,
    governor: Governor | None = None,
    is_urgent: bool = False,
) -> int:
    """Stream the parts that lack their mark, a page or a part of a page; return their number.

    No page is read: one short command per page asks for its length, since pages in Redis were verified before. With
    `is_urgent` only `PROBED_PAGES_MAX` pages are checked, however large the generation, and all pages only if one of
    these is not whole.
    """
    manifest, streamed_part_count = read_manifest(store, generation), 0
    is_sound = is_urgent and _has_sampled_pages(control, manifest)
    for part in _incomplete_parts(control, manifest, are_marked_whole=is_sound):
        _stream_part(control, store, manifest, part, governor=governor)
        streamed_part_count += 1
    return streamed_part_count


def is_missing(control: Control, store: ArtefactStore, generation: str) -> bool:
    """True if Redis lacks a mark, a page or a part of a page of a generation; no page is read."""
    return any(_incomplete_parts(control, read_manifest(store, generation)))


def _incomplete_parts(control: Control, manifest: Manifest, *, are_marked_whole: bool = False) -> Iterator[Part]:
    """Yield parts without their mark or, unless `are_marked_whole`, with a page of the wrong length."""
    mark_by_part_name: Any = control.client.hgetall(control.keyspace.loaded_parts(manifest.generation))
    for part in parts_of(manifest):
        page_lengths = read_page_lengths(control.client, control.keyspace, manifest, part)
        if mark_by_part_name.get(part.loaded_field.encode()) != part.loaded_digest or not (
            are_marked_whole
            or all(size_bytes == part.page_size_bytes(page_number) for page_number, size_bytes in page_lengths)
        ):
            yield part


def _has_sampled_pages(control: Control, manifest: Manifest) -> bool:
    """True if pages spread evenly over the generation have their length: a lost node takes its share of them."""
    parts = parts_of(manifest)
    part_ends = np.cumsum([part.pages.pages for part in parts])
    page_count = int(part_ends[-1]) if parts else 0
    sample_positions = np.unique(np.linspace(0, max(0, page_count - 1), PROBED_PAGES_MAX).astype(np.int64))[:page_count]
    sampled_pages = []
    for position, part_index in zip(
        sample_positions, np.searchsorted(part_ends, sample_positions, "right"), strict=True
    ):
        part = parts[part_index]
        sampled_pages.append((part, int(position - part_ends[part_index]) + part.pages.pages))
    sampled_keys = [part.page_key(control.keyspace, manifest.generation, page).encode() for part, page in sampled_pages]
    return value_sizes(control.client, sampled_keys) == [part.page_size_bytes(page) for part, page in sampled_pages]


def repair_pages(
    control: Control, store: ArtefactStore, generation: str, *, governor: Governor | None = None
) -> list[str]:
    """Read every page of a generation back and repair damaged ones, also of the live one; return the keys repaired.

    A page of the right length is overwritten in pieces, any other in one command: a page is never shorter than before,
    and an existing one is never missing.
    """
    manifest, mended_keys = read_manifest(store, generation), []
    for part in parts_of(manifest):
        mended_keys += _repair_part(control, store, manifest, part, governor=governor)
    return mended_keys


def find_damaged_pages(
    control: Control, store: ArtefactStore, generation: str, *, governor: Governor | None = None
) -> list[str]:
    """Return the keys of pages that are missing or differ from the artefact store; every page is read."""
    manifest, root = read_manifest(store, generation), store.local(generation_path(generation))
    damaged_keys = []
    for part in parts_of(manifest):
        _fetch(store, generation, part.pages.sums)
        damaged_pages = find_bad_pages(control.client, control.keyspace, manifest, root, part, governor=governor)
        damaged_keys += [part.page_key(control.keyspace, generation, page) for page, _ in damaged_pages]
    return damaged_keys


def is_marked_loaded(control: Control, manifest: Manifest, part: Part) -> bool:
    """True if the loader marked this very part as completely loaded."""
    stored_mark = control.client.hget(control.keyspace.loaded_parts(manifest.generation), part.loaded_field)
    return bool(stored_mark == part.loaded_digest)


def _repair_part(
    control: Control,
    store: ArtefactStore,
    manifest: Manifest,
    part: Part,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    governor: Governor | None,
) -> list[str]:
    client, keys, generation = control.client, control.keyspace, manifest.generation
    _fetch(store, generation, part.pages.sums)
    root = store.local(generation_path(generation))
    with _conflict_if_files_missing(store, manifest, part):
        damaged_pages = [
            page
            for page, _ in find_bad_pages(
                client, keys, manifest, root, part, chunk_bytes=chunk_bytes, governor=governor
            )
        ]
        if damaged_pages:
            _fetch(store, generation, part.pages.file)
            with (
                (root / part.pages.file.path).open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
            ):
                for page in damaged_pages:
                    page_start = page * part.table.page_bytes
                    sound_page = pages[page_start : page_start + part.page_size_bytes(page)]
                    _rewrite_page(client, part.page_key(keys, generation, page), sound_page, governor)
    if not is_marked_loaded(control, manifest, part):
        client.hset(keys.loaded_parts(generation), part.loaded_field, part.loaded_digest.decode())
    return [part.page_key(keys, generation, page) for page in damaged_pages]


def _rewrite_page(client: "redis.Redis", page_key: str, sound_page: bytes, governor: Governor | None) -> None:
    if client.strlen(page_key) != len(sound_page):
        if governor is not None:
            governor.pace(len(sound_page))
        client.set(page_key, sound_page)
        return
    piece_bytes = (governor.piece_bytes if governor is not None else None) or REPAIR_BYTES
    for piece_start in range(0, len(sound_page), piece_bytes):
        if governor is not None:
            governor.pace(min(piece_bytes, len(sound_page) - piece_start))
        client.setrange(page_key, piece_start, sound_page[piece_start : piece_start + piece_bytes])


def _stream_part(
    control: Control,
    store: ArtefactStore,
    manifest: Manifest,
    part: Part,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    progress: BytesProgress = lambda _bytes: None,
    governor: Governor | None = None,
) -> None:
    client, keys, generation = control.client, control.keyspace, manifest.generation
    root = store.local(generation_path(generation))
    for artefact in (part.pages.sums, part.pages.file):
        _fetch(store, generation, artefact)
    client.hdel(keys.loaded_parts(generation), part.loaded_field, part.progress_field)
    with _conflict_if_files_missing(store, manifest, part):
        load_part(
            client, keys, manifest, root, part,
            chunk_bytes=chunk_bytes, progress=progress, governor=governor,
        )  # fmt: skip
        verify_part(client, keys, manifest, root, part, chunk_bytes=chunk_bytes, governor=governor)


@contextmanager
def _conflict_if_files_missing(store: ArtefactStore, manifest: Manifest, part: Part) -> Iterator[None]:
    """Raise Conflict for a missing file: a retire may remove files while another program reads them."""
    try:
        yield
    except FileNotFoundError as error:
        is_sums_file = str(error.filename).endswith(part.pages.sums.path)
        missing_artefact = part.pages.sums if is_sums_file else part.pages.file
        raise _missing_artefact_error(store, manifest.generation, missing_artefact) from error


def _missing_artefact_error(store: ArtefactStore, generation: str, artefact: Artefact) -> Conflict:
    return Conflict(
        f"{artefact.path} of {generation} is missing from {store.url}, so its pages cannot be loaded",
        generation=generation,
    )


def _fetch(store: ArtefactStore, generation: str, artefact: Artefact) -> Path:
    try:
        path = store.fetch(generation_path(generation, artefact.path))
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise _missing_artefact_error(store, generation, artefact) from error
        raise
    if not path.is_file():
        raise _missing_artefact_error(store, generation, artefact)
    check_file(store.local(generation_path(generation)), artefact)
    return path
