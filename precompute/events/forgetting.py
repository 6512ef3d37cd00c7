"""Erasing from events: from the files that nights took over, and from the stream."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import redis

from cache.errors import CorruptArtefact, InvalidInput
from cache.events.accept import entry_of
from cache.events.event import FIELD
from cache.format.ids import canonical_id
from cache.format.redis_keys import Keyspace
from cache.store.artefacts import ArtefactStore
from precompute.config.settings import NightConfig
from precompute.control.connection import connect_events
from precompute.erasures.erasure import ErasedEntities, Erasure, all_erasures
from precompute.events.files import (
    TakenFile,
    list_taken_files,
    parquet,
    superseded,
    table_of,
    until_of,
)
from precompute.events.stream import entries


def forget_events(config: NightConfig, erasures: Iterable[Erasure]) -> None:
    """Remove the events of erased entities, from the stream first: a night that takes it over leaves them out.

    Also where no events are taken in any more, or another namespace's count: what came before may lie there still.
    Never those of the other one, whose erasures are its own.
    """
    erased, store = ErasedEntities.of(erasures), config.store()
    if config.events.enabled or config.events_url or list_taken_files(store):
        with connect_events(config) as client:
            forget_in_stream(client, config.keyspace(), erased)
    forget_in_files(store, erased)


def forget_in_stream(client: "redis.Redis", keys: Keyspace, erased: ErasedEntities) -> int:
    """Remove entries of the stream, of the inbox, and of what was rejected, that name somebody; how many.

    Also what is no event. Who takes an entry out of the inbox meanwhile refuses it: by then the blocklist has them.
    """
    removed_count, streams = (
        0,
        ((keys.events, _names), (keys.inbox, _is_sent_of), (keys.rejected_events, _names)),
    )
    for stream, is_of in streams:
        behind = None
        while batch := entries(client, stream, behind=behind):
            entry_ids = [entry_id for entry_id, fields in batch if is_of(fields, erased)]
            removed_count += int(client.xdel(stream, *entry_ids)) if entry_ids else 0
            behind = batch[-1][0].decode()
    return removed_count


def _names(fields: dict[bytes, bytes], erased: ErasedEntities) -> bool:
    """True if an entry is of an erased entity; one without an event may be, whoever reads it."""
    try:
        event = entry_of(fields)
    except CorruptArtefact:
        return True
    return event.user in erased.users or event.item in erased.items


def _is_sent_of(fields: dict[bytes, bytes], erased: ErasedEntities) -> bool:
    """True if an entry of the inbox names an erased entity, in texts or in JSON, or cannot be read."""
    if (raw := fields.get(FIELD)) is None:
        return fields.get(b"user") in erased.users or fields.get(b"item") in erased.items
    try:
        payload = orjson.loads(raw)
        user, item = (
            b"" if payload.get(name) is None else canonical_id(payload[name])
            for name in ("user", "item")
        )
    except (AttributeError, InvalidInput, ValueError):
        return True
    return user in erased.users or item in erased.items


def forget_in_files(
    store: ArtefactStore,
    erased: ErasedEntities,
    *,
    newest_alone: bool = False,
    keep_superseded: bool = False,
) -> int:
    """Write the files that name somebody again, without, until nobody else was erased meanwhile; how many writes.

    Of two hosts that write one file at a time the later brings those back whom only the other one left out; whom that
    was, it sees by looking at all erasures behind its own writing. Files that a merged one has the events of go, unless
    a night reads them (`keep_superseded`).
    """
    write_count, applied_erased = 0, None
    while erased != applied_erased:
        old = [] if newest_alone else superseded(store)
        if old:  # a merge that was killed may have brought back who was erased before it wrote
            erased = ErasedEntities.of(all_erasures(store))
        files = list_taken_files(store)[-1 if newest_alone else 0 :]
        written = _write_without(store, erased, files)
        write_count, applied_erased = write_count + written, erased
        if written:
            erased = ErasedEntities.of(all_erasures(store))
        for superseded_file in () if keep_superseded else old:
            store.delete(superseded_file.path)
        if not newest_alone and list_taken_files(store)[: len(files)] != files:
            applied_erased = None  # merged meanwhile, perhaps of what was not written yet
    return write_count


def _write_without(store: ArtefactStore, erased: ErasedEntities, files: Sequence[TakenFile]) -> int:
    write_count = 0
    for file in files if erased.users or erased.items else ():
        if (raw := store.read(file.path)) is None:
            continue
        end_position, table = until_of(raw, file.path), table_of(raw, file.path)
        remaining_rows = without(table, erased)
        if len(remaining_rows) < len(table):
            store.write(file.path, parquet(remaining_rows, end_position))
            write_count += 1
    return write_count


def without(table: Any, erased: ErasedEntities) -> Any:
    """Rows of a file that name nobody who was erased."""
    stays = pc.and_(_stays(table, "user", erased.users), _stays(table, "item", erased.items))
    return table.filter(stays)


def _stays(table: Any, column: str, without: Collection[bytes]) -> Any:
    texts = pa.array(sorted(raw_id.decode() for raw_id in without), pa.string())
    return pc.invert(pc.is_in(table.column(column), value_set=texts))
