"""Event stream at night: taken over into files, which are merged and erased from, and trimmed."""

import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple, Self, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import redis

from cache.errors import CorruptArtefact, InvalidInput, UnknownGeneration
from cache.events.event import EVENT_FIELD, Event
from cache.events.stream import event_of_entry, write_taken_position
from cache.format.ids import canonical_id
from cache.format.manifest import GENERATION_PATTERN
from cache.format.redis_keys import Keyspace
from cache.format.stream_position import STREAM_BEGINNING, Position
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from cache.traffic.experiments import latest_experiments
from precompute.config.settings import NightConfig
from precompute.events.files import (
    END_KEY,
    SCHEMA,
    TakenFile,
    last_taken,
    list_taken_files,
    parquet,
    path_of,
    superseded,
    table_of,
    to_bytes,
    until_of,
)
from precompute.events.stores import connect_events
from precompute.partitions.night_input import EventFields
from precompute.releases.release_log import Releases
from precompute.sources.erasures import NO_ERASURES, ErasedEntities, Erasure, all_erasures

ENTRIES_AT_ONCE: Final = 1_000
"""Entries of a batch: a millisecond or two of Redis' time."""

FILE_EVENTS: Final = 200_000
"""Events of a file; further ones go into another file."""

FILE_BYTES: Final = 64 << 20
"""Bytes of events, as stored in the stream, of a file."""

FILES_MERGED: Final = 24
"""Number of files merged into one: a day of hourly nights. The next night copies no partition, as its files differ."""

MERGED_BYTES: Final = 32 << 20
"""Bytes of files merged into one; larger ones, whose rows dominate the cost of reading, stay separate."""

_GROUPS_PER_NIGHT: Final = 2
"""Groups that a night tries to merge, the newest first: a too large one is not read again by each night."""

Entry = tuple[bytes, dict[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class EventStores:
    """Store of the namespace that the events are of, and those of its arms."""

    home_store: ArtefactStore
    namespace: str
    arms: tuple[ArtefactStore, ...] = ()

    @classmethod
    def of(cls, config: NightConfig) -> Self:
        """Open the stores of the newest record of the experiments."""
        config = config.of_events()
        own_store = config.store()
        named = latest_experiments(own_store).namespaces(config.namespace)
        arms = tuple(replace(config, namespace=arm_namespace).store() for arm_namespace in named)
        return cls(own_store, config.namespace, arms)

    def iter_generation_positions(self) -> Iterator[Position]:
        """Yield the positions up to which generations have events; ones without events of this stream have none."""
        for store in (self.home_store, *self.arms):
            for generation in filter(GENERATION_PATTERN.fullmatch, store.names("generations")):
                end_text: str | None
                try:
                    manifest = read_manifest(store, generation)
                    events = manifest.events
                    is_own_namespace = (
                        events and (events.namespace or manifest.namespace) == self.namespace
                    )
                    end_text = events.until if events and is_own_namespace else None
                except UnknownGeneration:  # in the making
                    raw = store.read(generation_path(generation, "work/begin.json"))
                    begin_fields: EventFields = {} if raw is None else orjson.loads(raw)
                    begin_events = begin_fields.get("events")
                    end_text = None if begin_events is None else begin_events["until"]
                except CorruptArtefact:
                    yield STREAM_BEGINNING
                    continue
                if end_text is not None:
                    yield Position.parse(end_text)

    def is_any_in_the_making(self) -> bool:
        """True while a generation has no manifest yet."""
        return any(
            "manifest.json" not in store.names(generation_path(generation))
            for store in (self.home_store, *self.arms)
            for generation in filter(GENERATION_PATTERN.fullmatch, store.names("generations"))
        )


class TakenEvents(NamedTuple):
    """Events of the stream taken into files: up to which position, and how many of them this time.

    `left_out` counts those of erased entities, `unreadable` entries that are no events.
    """

    until_position: Position
    events: int = 0
    left_out: int = 0
    unreadable: int = 0


def take_events(
    store: ArtefactStore,
    client: "redis.Redis",
    keys: Keyspace,
    *,
    erased: ErasedEntities = NO_ERASURES,
) -> TakenEvents:
    """Write the events of the stream that the files lack as further files.

    Safe to repeat after a crash anywhere, and concurrently with another process, whose files are kept.
    """
    last = read_newest_id(client, keys.events)
    taken_events = TakenEvents(last_taken(store))
    end_position = taken_events.until_position if last is None else Position.parse(last)
    while taken_events.until_position < end_position:
        read = _read_stream(client, keys.events, taken_events.until_position, end_position, erased)
        if store.write_once(
            path_of(taken_events.until_position), to_bytes(read.rows, read.until_position)
        ):
            taken_events = TakenEvents(
                read.until_position,
                taken_events.events + len(read.rows),
                taken_events.left_out + read.left_out,
                taken_events.unreadable + read.unreadable,
            )
        else:  # another one did, perhaps of more of them
            taken_events = taken_events._replace(until_position=last_taken(store))
    write_taken_position(store, taken_events.until_position)
    return taken_events


class _StreamRead(NamedTuple):
    rows: list[tuple[Position, Event]]
    until_position: Position
    left_out: int
    unreadable: int


def _read_stream(
    client: "redis.Redis",
    stream: str,
    after: Position,
    end_position: Position,
    erased: ErasedEntities,
) -> _StreamRead:
    """Read events after `after` up to `end_position`, or as many as fit a file."""
    rows: list[tuple[Position, Event]] = []
    left_out = unreadable = size_bytes = 0
    while len(rows) < FILE_EVENTS and size_bytes < FILE_BYTES:
        batch = read_entries(client, stream, behind=str(after), end_id=str(end_position))
        if not batch:  # the last one was removed since
            return _StreamRead(rows, end_position, left_out, unreadable)
        for raw, fields in batch:
            after = Position.parse(raw)
            size_bytes += sum(map(len, fields.values()))
            try:
                event = event_of_entry(fields)
            except CorruptArtefact:
                unreadable += 1
                continue
            if event.user in erased.users or event.item in erased.items:
                left_out += 1
            else:
                rows.append((after, event))
    return _StreamRead(rows, after, left_out, unreadable)


def merge_files(stores: EventStores) -> int:
    """Merge old unmerged files, `FILES_MERGED` of them into one; return how many were merged.

    A merged file's name has both its ends: from the moment it exists, the files within count no more, and are
    removed. Only files before every generation in the stores are merged: a file has to end where any generation's
    events do. None is merged while a generation is in the making: its retry finds its work by its files. Safe to
    repeat after a crash anywhere, and concurrently: groups follow from the names of files, so all hosts make the
    same. Erased entities are left out.
    """
    merged_count, store = 0, stores.home_store
    if not stores.is_any_in_the_making():
        erased = ErasedEntities.of(all_erasures(store))
        for group in _mergeable_groups(stores)[: -_GROUPS_PER_NIGHT - 1 : -1]:
            if (merged := _merge_group(store, group, erased)) is not None:
                file, data = merged
                store.write_once(file.path, data)
                merged_count += len(group)
    if superseded(store):  # of one that was killed, too, and whoever was erased beside it
        # Looked at again: a night that began while files were being merged reads those.
        is_read = stores.is_any_in_the_making()
        forget_in_files(store, ErasedEntities.of(all_erasures(store)), keep_superseded=is_read)
    return merged_count


def _mergeable_groups(stores: EventStores) -> list[list[TakenFile]]:
    """Return groups of consecutive files that may be merged, by position.

    Counted from where a merged file ends, so that all hosts find the same; never with the newest file, which says
    where the next begins.
    """
    if (bound := min(stores.iter_generation_positions(), default=None)) is None:
        return []
    groups: list[list[TakenFile]] = []
    pairs = pairwise(list_taken_files(stores.home_store))  # a file ends where the next one begins
    for is_old, run in groupby(
        pairs, lambda pair: pair[0].until_position is None and pair[1].after <= bound
    ):
        files = [file for file, _ in run] if is_old else []
        grouped_count = len(files) // FILES_MERGED * FILES_MERGED
        groups += [
            files[start : start + FILES_MERGED] for start in range(0, grouped_count, FILES_MERGED)
        ]
    return groups


def _merge_group(
    store: ArtefactStore, files: Sequence[TakenFile], erased: ErasedEntities
) -> tuple[TakenFile, bytes] | None:
    """Merge files; return the new file and its bytes, None if they are too large, or another host merges them."""
    raws, size_bytes = [], 0
    for file in files:
        raw = store.read(file.path)
        size_bytes += 0 if raw is None else len(raw)
        if raw is None or size_bytes > MERGED_BYTES:
            return None
        raws.append(raw)
    end_position, buffer = until_of(raws[-1], files[-1].path), io.BytesIO()
    with pq.ParquetWriter(
        buffer, SCHEMA.with_metadata({END_KEY: str(end_position).encode()})
    ) as writer:
        for file, raw in zip(files, raws, strict=True):
            if len(rows := without_erased(table_of(raw, file.path), erased)):
                writer.write_table(rows.replace_schema_metadata(writer.schema.metadata))
    return TakenFile(files[0].after, end_position), buffer.getvalue()


def forget_events(config: NightConfig, erasures: Iterable[Erasure]) -> None:
    """Remove the events of erased entities, from the stream first: a night that takes it over leaves them out.

    Also if no events are taken in any more, or another namespace's are used: earlier events may still be stored there.
    Never those of the other namespace, whose erasures are its own.
    """
    erased, store = ErasedEntities.of(erasures), config.store()
    if config.events.enabled or config.events_url or list_taken_files(store):
        with connect_events(config) as client:
            forget_in_stream(client, config.keyspace(), erased)
    forget_in_files(store, erased)


def forget_in_stream(client: "redis.Redis", keys: Keyspace, erased: ErasedEntities) -> int:
    """Remove entries of erased entities from the stream, the inbox, and the rejected events; return the number.

    Also unreadable entries. A service that takes an entry out of the inbox meanwhile refuses it by its blocklist.
    """
    removed_count, streams = (
        0,
        (
            (keys.events, _names_erased),
            (keys.inbox, _is_sent_of),
            (keys.rejected_events, _names_erased),
        ),
    )
    for stream, is_of in streams:
        behind = None
        while batch := read_entries(client, stream, behind=behind):
            entry_ids = [entry_id for entry_id, fields in batch if is_of(fields, erased)]
            removed_count += int(client.xdel(stream, *entry_ids)) if entry_ids else 0
            behind = batch[-1][0].decode()
    return removed_count


def _names_erased(fields: dict[bytes, bytes], erased: ErasedEntities) -> bool:
    """True if an entry is of an erased entity, or is unreadable and so may be."""
    try:
        event = event_of_entry(fields)
    except CorruptArtefact:
        return True
    return event.user in erased.users or event.item in erased.items


def _is_sent_of(fields: dict[bytes, bytes], erased: ErasedEntities) -> bool:
    """True if an entry of the inbox names an erased entity, in texts or in JSON, or cannot be read."""
    if (raw := fields.get(EVENT_FIELD)) is None:
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
    """Rewrite the files that name erased entities until no new erasure came meanwhile; return the number of writes.

    If two hosts write a file at a time, the later one brings back the entities that only the other left out; it finds
    them by reading all erasures again after writing. Superseded files are removed, unless a night reads them
    (`keep_superseded`).
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
        remaining_rows = without_erased(table, erased)
        if len(remaining_rows) < len(table):
            store.write(file.path, parquet(remaining_rows, end_position))
            write_count += 1
    return write_count


def without_erased(table: Any, erased: ErasedEntities) -> Any:
    """Return the rows of a file that name no erased entity."""
    stays = pc.and_(_stays(table, "user", erased.users), _stays(table, "item", erased.items))
    return table.filter(stays)


def _stays(table: Any, column: str, without: Collection[bytes]) -> Any:
    texts = pa.array(sorted(raw_id.decode() for raw_id in without), pa.string())
    return pc.invert(pc.is_in(table.column(column), value_set=texts))


def trim_stream(
    stores: EventStores, client: "redis.Redis", keys: Keyspace, *, keep_s: float, stream_bytes: int
) -> int:
    """Remove events that files and all generations in the stores have, and that are older than `keep_s`.

    Returns how many. If that is uncertain, all are kept. In a stream of more than half of `stream_bytes` age does not
    count: a full stream refuses all new events.
    """
    bounds = [last_taken(stores.home_store), *stores.iter_generation_positions()]
    if int(client.memory_usage(keys.events) or 0) <= stream_bytes // 2:
        seconds, micros = client.time()
        bounds.append(Position(max(0, int((seconds + micros / 1e6 - keep_s) * 1000)), 0))
    bound = min(bounds)
    if bound == STREAM_BEGINNING:
        return 0
    # What is below the id goes, and the bound itself is had.
    behind = Position.from_number(bound.number + 1)
    return int(client.xtrim(keys.events, minid=str(behind), approximate=False))


def trim_in_night(
    config: NightConfig, _releases: Releases, _needed_generations: Collection[str]
) -> dict[str, int]:
    """Trim the night's own stream, if events are enabled; return `events_trimmed` for the report."""
    if not config.events.enabled:
        return {"events_trimmed": 0}
    # Its own stream, also where another namespace's counts since: that one is trimmed by its own nights.
    own_events_config = replace(config, events=replace(config.events, namespace=""))
    with connect_events(own_events_config) as client:
        trimmed = trim_stream(
            EventStores.of(own_events_config), client, own_events_config.keyspace(),
            keep_s=config.events.keep_s, stream_bytes=config.events.stream_bytes,
        )  # fmt: skip
    return {"events_trimmed": trimmed}


def read_entries(
    client: "redis.Redis", stream: str, *, behind: str | None = None, end_id: str = "+"
) -> list[Entry]:
    """Return the next entries after a position (by default from the first), up to another; none at the end."""
    first = "-" if behind is None else f"({behind}"
    reply = client.xrange(stream, first, end_id, count=ENTRIES_AT_ONCE)
    return cast(list[Entry], reply)


def read_newest_id(client: "redis.Redis", stream: str) -> bytes | None:
    """Return the id of the newest entry, None of an empty stream."""
    last_entries = cast(list[Entry], client.xrevrange(stream, count=1))
    return last_entries[0][0] if last_entries else None
