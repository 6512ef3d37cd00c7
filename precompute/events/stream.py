"""Event stream at night: events are written to files, which are merged and erased from; then the stream is trimmed."""

import io
import logging
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
from cache.store.erasures import Erasure, all_erasures
from cache.traffic.experiments import latest_experiments
from precompute.config.settings import NightConfig
from precompute.events.files import (
    END_POSITION_KEY,
    EVENT_FILE_SCHEMA,
    TakenFile,
    encode_events,
    encode_table,
    last_taken_position,
    list_taken_files,
    read_end_position,
    read_event_table,
    superseded_files,
    taken_file_path,
)
from precompute.events.stores import connect_events
from precompute.partitions.night_input import EventFields
from precompute.releases.release_log import Releases
from precompute.sources.erasures import NO_ERASURES, ErasedEntities

_log = logging.getLogger(__name__)

ENTRIES_AT_ONCE: Final = 1_000
"""Entries of a batch, for which Redis needs a millisecond or two."""

FILE_EVENTS_MAX: Final = 200_000
"""Maximum number of events in a file."""

FILE_BYTES_MAX: Final = 64 << 20
"""Maximum size of a file's events, in bytes as stored in the stream."""

FILES_PER_MERGE: Final = 24
"""Number of files merged into one: a day of hourly nights. The next night copies no partition, as its files differ."""

MERGED_BYTES_MAX: Final = 32 << 20
"""Maximum size of files merged into one; larger files stay separate, since their rows dominate the cost of reading."""

_GROUPS_PER_NIGHT_MAX: Final = 2
"""Maximum number of groups that a night tries to merge, newest first: so old groups that are too large are not read
again."""

Entry = tuple[bytes, dict[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class EventStores:
    """Store of the namespace to which the events belong, and those of its arms."""

    namespace_store: ArtefactStore
    event_namespace: str
    arm_stores: tuple[ArtefactStore, ...] = ()

    @classmethod
    def of(cls, config: NightConfig) -> Self:
        """Open the stores of the newest record of the experiments."""
        config = config.of_events()
        home_store = config.store()
        arm_namespaces = latest_experiments(home_store).namespaces(config.namespace)
        arm_stores = tuple(replace(config, namespace=arm_namespace).store() for arm_namespace in arm_namespaces)
        return cls(home_store, config.namespace, arm_stores)

    def iter_generation_positions(self) -> Iterator[Position]:
        """Yield the positions up to which generations have events of this stream; other generations are left out."""
        for store in (self.namespace_store, *self.arm_stores):
            for generation in filter(GENERATION_PATTERN.fullmatch, store.names("generations")):
                end_position_text: str | None
                try:
                    manifest = read_manifest(store, generation)
                    events_entry = manifest.events
                    is_of_this_stream = (
                        events_entry and (events_entry.namespace or manifest.namespace) == self.event_namespace
                    )
                    end_position_text = events_entry.until if events_entry and is_of_this_stream else None
                except UnknownGeneration:  # its night is still running
                    raw_report = store.read(generation_path(generation, "work/begin.json"))
                    begin_fields: EventFields = {} if raw_report is None else orjson.loads(raw_report)
                    begin_events = begin_fields.get("events")
                    end_position_text = None if begin_events is None else begin_events["until"]
                except CorruptArtefact:
                    yield STREAM_BEGINNING
                    continue
                if end_position_text is not None:
                    yield Position.parse(end_position_text)

    def is_any_in_the_making(self) -> bool:
        """True if a generation has no manifest yet."""
        return any(
            "manifest.json" not in store.names(generation_path(generation))
            for store in (self.namespace_store, *self.arm_stores)
            for generation in filter(GENERATION_PATTERN.fullmatch, store.names("generations"))
        )


class TakenEvents(NamedTuple):
    """Events of the stream taken into files: the position up to which files have all, and numbers of this attempt.

    `left_out_count` counts events of erased entities, `unreadable_count` entries that are no events.
    """

    until_position: Position
    event_count: int = 0
    left_out_count: int = 0
    unreadable_count: int = 0


def take_events(
    store: ArtefactStore, client: "redis.Redis", keys: Keyspace, *, erased_entities: ErasedEntities = NO_ERASURES
) -> TakenEvents:
    """Write the events of the stream that are not in files yet as further files.

    Safe to repeat after a crash at any point, and concurrently with another process, whose files are kept.
    """
    newest_id = read_newest_id(client, keys.events)
    taken_events = TakenEvents(last_taken_position(store))
    end_position = taken_events.until_position if newest_id is None else Position.parse(newest_id)
    while taken_events.until_position < end_position:
        stream_read = _read_stream(client, keys.events, taken_events.until_position, end_position, erased_entities)
        if store.write_once(
            taken_file_path(taken_events.until_position),
            encode_events(stream_read.positions_and_events, stream_read.until_position),
        ):
            taken_events = TakenEvents(
                stream_read.until_position,
                taken_events.event_count + len(stream_read.positions_and_events),
                taken_events.left_out_count + stream_read.left_out_count,
                taken_events.unreadable_count + stream_read.unreadable_count,
            )
        else:  # another process did, perhaps with more of the events
            taken_events = taken_events._replace(until_position=last_taken_position(store))
    write_taken_position(store, taken_events.until_position)
    return taken_events


class _StreamRead(NamedTuple):
    positions_and_events: list[tuple[Position, Event]]
    until_position: Position
    left_out_count: int
    unreadable_count: int


def _read_stream(
    client: "redis.Redis", stream_key: str, after: Position, end_position: Position, erased_entities: ErasedEntities
) -> _StreamRead:
    """Read events after `after` up to `end_position`, but only as many as fit a file."""
    positions_and_events: list[tuple[Position, Event]] = []
    left_out_count = unreadable_count = size_bytes = 0
    while len(positions_and_events) < FILE_EVENTS_MAX and size_bytes < FILE_BYTES_MAX:
        entries = read_entries(client, stream_key, behind_id=str(after), end_id=str(end_position))
        if not entries:  # the last entry was removed meanwhile
            return _StreamRead(positions_and_events, end_position, left_out_count, unreadable_count)
        for entry_id, entry_fields in entries:
            after = Position.parse(entry_id)
            size_bytes += sum(map(len, entry_fields.values()))
            try:
                event = event_of_entry(entry_fields)
            except CorruptArtefact:
                unreadable_count += 1
                continue
            if event.user in erased_entities.users or event.item in erased_entities.items:
                left_out_count += 1
            else:
                positions_and_events.append((after, event))
    return _StreamRead(positions_and_events, after, left_out_count, unreadable_count)


def merge_files(stores: EventStores) -> int:
    """Merge old unmerged files, `FILES_PER_MERGE` of them into one; return the number of merged files.

    A merged file's name has both of its ends: once it exists, the files within its range are ignored, and are removed.
    Only files before the positions of all generations in the stores are merged, since a file must end at the position
    of each generation. Nothing is merged while a generation is being built: its retry needs the same files. Safe to
    repeat after a crash at any point, and concurrently: groups follow from the names of files, so all hosts form the
    same ones. Erased entities are left out.
    """
    merged_count, store = 0, stores.namespace_store
    if not stores.is_any_in_the_making():
        erased_entities = ErasedEntities.of(all_erasures(store))
        for file_group in _mergeable_groups(stores)[: -_GROUPS_PER_NIGHT_MAX - 1 : -1]:
            if (merged := _merge_group(store, file_group, erased_entities)) is not None:
                file, merged_bytes = merged
                store.write_once(file.path, merged_bytes)
                merged_count += len(file_group)
    if superseded_files(store):  # also left by a killed merge, which may hold entities that were erased meanwhile
        # Checked again: a night that began during the merge reads these files.
        is_read = stores.is_any_in_the_making()
        forget_in_files(store, ErasedEntities.of(all_erasures(store)), keep_superseded=is_read)
    return merged_count


def _mergeable_groups(stores: EventStores) -> list[list[TakenFile]]:
    """Return groups of consecutive files that may be merged, by position.

    Files are counted from the end of a merged file, so that all hosts find the same groups. The newest file is never
    merged: it shows where the next begins.
    """
    if (oldest_position := min(stores.iter_generation_positions(), default=None)) is None:
        return []
    file_groups: list[list[TakenFile]] = []
    file_pairs = pairwise(list_taken_files(stores.namespace_store))  # a file ends where the next one begins
    for is_old, pair_run in groupby(
        file_pairs, lambda pair: pair[0].until_position is None and pair[1].after_position <= oldest_position
    ):
        files = [file for file, _ in pair_run] if is_old else []
        grouped_count = len(files) // FILES_PER_MERGE * FILES_PER_MERGE
        file_groups += [
            files[group_start : group_start + FILES_PER_MERGE]
            for group_start in range(0, grouped_count, FILES_PER_MERGE)
        ]
    return file_groups


def _merge_group(
    store: ArtefactStore, files: Sequence[TakenFile], erased_entities: ErasedEntities
) -> tuple[TakenFile, bytes] | None:
    """Merge files; return the new file and its bytes; None if they are too large, or another host has merged them."""
    raw_files, size_bytes = [], 0
    for file in files:
        raw_file = store.read(file.path)
        size_bytes += 0 if raw_file is None else len(raw_file)
        if raw_file is None or size_bytes > MERGED_BYTES_MAX:
            return None
        raw_files.append(raw_file)
    end_position, buffer = read_end_position(raw_files[-1], files[-1].path), io.BytesIO()
    with pq.ParquetWriter(
        buffer, EVENT_FILE_SCHEMA.with_metadata({END_POSITION_KEY: str(end_position).encode()})
    ) as writer:
        for file, raw_file in zip(files, raw_files, strict=True):
            if len(remaining_rows := without_erased(read_event_table(raw_file, file.path), erased_entities)):
                writer.write_table(remaining_rows.replace_schema_metadata(writer.schema.metadata))
    return TakenFile(files[0].after_position, end_position), buffer.getvalue()


def forget_events(config: NightConfig, erasures: Iterable[Erasure], *, in_night: bool = False) -> None:
    """Remove the events of erased entities, from the stream first: a night that takes it over then has none of them.

    If entries were removed, and in each night (`in_night`), Redis is asked to rewrite its append-only file, which has
    them until then.

    This is also done if events are disabled or those of another namespace are used: earlier events may still be stored
    in this one. Events of the other namespace are never removed: it has its own erasures.
    """
    erased_entities, store = ErasedEntities.of(erasures), config.store()
    if config.events.enabled or config.events_url or list_taken_files(store):
        with connect_events(config) as client:
            removed_count = forget_in_stream(client, config.keyspace(), erased_entities)
            if removed_count or in_night:
                start_log_rewrite(client)
    forget_in_files(store, erased_entities)


def forget_in_stream(client: "redis.Redis", keys: Keyspace, erased_entities: ErasedEntities) -> int:
    """Remove entries of erased entities from the stream, the inbox and the rejected events; return their number.

    Unreadable entries are removed, too. If a service takes an entry out of the inbox meanwhile, its blocklist refuses
    it.
    """
    removed_count, stream_checks = (
        0,
        (
            (keys.events, _is_event_of_erased),
            (keys.inbox, _is_inbox_entry_of_erased),
            (keys.rejected_events, _is_event_of_erased),
        ),
    )
    for stream_key, is_to_remove in stream_checks:
        behind_id = None
        while entries := read_entries(client, stream_key, behind_id=behind_id):
            entry_ids = [entry_id for entry_id, fields in entries if is_to_remove(fields, erased_entities)]
            removed_count += int(client.xdel(stream_key, *entry_ids)) if entry_ids else 0
            behind_id = entries[-1][0].decode()
    return removed_count


def start_log_rewrite(client: "redis.Redis") -> bool:
    """Have Redis rewrite its append-only file without the removed entries; return True if it began.

    Redis goes on in the background. A server without such a file is left alone, and a refusal is logged: the next night
    tries again.
    """
    try:
        if not client.info("persistence").get("aof_enabled"):
            return False
        client.bgrewriteaof()
    except redis.ResponseError as error:
        right_hint = (
            "; give the user of nights +bgrewriteaof, as infra/redis-events.conf does"
            if isinstance(error, redis.exceptions.NoPermissionError)
            else ""
        )
        _log.warning(
            "the append-only file of the Redis of events keeps removed events until it is rewritten, which Redis did "
            "not begin (%s); the next night tries again%s", error, right_hint,
        )  # fmt: skip
        return False
    if _keeps_removed_entries(client):
        _log.warning(
            "the Redis of events rewrites its append-only file, but keeps removed events in blocks with others: "
            "set aof-use-rdb-preamble no in its file, as in infra/redis-events.conf, and restart it"
        )
    return True


def _keeps_removed_entries(client: "redis.Redis") -> bool:
    """True if a rewritten file begins with a snapshot: Redis copies blocks of a stream into it with removed entries."""
    try:
        redis_settings: Any = client.config_get("aof-use-rdb-preamble")
    except redis.ResponseError:  # this user may not read settings
        return False
    return bool(redis_settings.get("aof-use-rdb-preamble") == "yes")


def _is_event_of_erased(entry_fields: dict[bytes, bytes], erased: ErasedEntities) -> bool:
    """True if an entry is of an erased entity, or is unreadable and may be."""
    try:
        event = event_of_entry(entry_fields)
    except CorruptArtefact:
        return True
    return event.user in erased.users or event.item in erased.items


def _is_inbox_entry_of_erased(entry_fields: dict[bytes, bytes], erased: ErasedEntities) -> bool:
    """True if an entry of the inbox names an erased entity, in texts or in JSON, or cannot be read."""
    if (raw_event := entry_fields.get(EVENT_FIELD)) is None:
        return entry_fields.get(b"user") in erased.users or entry_fields.get(b"item") in erased.items
    try:
        payload = orjson.loads(raw_event)
        user_id, item_id = (
            b"" if payload.get(field_name) is None else canonical_id(payload[field_name])
            for field_name in ("user", "item")
        )
    except (AttributeError, InvalidInput, ValueError):
        return True
    return user_id in erased.users or item_id in erased.items


def forget_in_files(
    store: ArtefactStore, erased_entities: ErasedEntities, *, newest_alone: bool = False, keep_superseded: bool = False
) -> int:
    """Rewrite the files that name erased entities until there is no new erasure; return the number of writes.

    If two hosts write a file at the same time, the later write restores entities that only the other one left out; the
    later host finds them by reading all erasures again after writing. Superseded files are removed, unless a night
    reads them (`keep_superseded`).
    """
    write_count, applied_erased = 0, None
    while erased_entities != applied_erased:
        removable_files = [] if newest_alone else superseded_files(store)
        if removable_files:  # a killed merge may have kept entities that were erased before it wrote
            erased_entities = ErasedEntities.of(all_erasures(store))
        files = list_taken_files(store)[-1 if newest_alone else 0 :]
        written_count = _rewrite_without_erased(store, erased_entities, files)
        write_count, applied_erased = write_count + written_count, erased_entities
        if written_count:
            erased_entities = ErasedEntities.of(all_erasures(store))
        for superseded_file in () if keep_superseded else removable_files:
            store.delete(superseded_file.path)
        if not newest_alone and list_taken_files(store)[: len(files)] != files:
            applied_erased = None  # merged meanwhile, perhaps from files before their rewrite
    return write_count


def _rewrite_without_erased(store: ArtefactStore, erased_entities: ErasedEntities, files: Sequence[TakenFile]) -> int:
    write_count = 0
    for file in files if erased_entities.users or erased_entities.items else ():
        if (raw_file := store.read(file.path)) is None:
            continue
        end_position, table = (read_end_position(raw_file, file.path), read_event_table(raw_file, file.path))
        remaining_rows = without_erased(table, erased_entities)
        if len(remaining_rows) < len(table):
            store.write(file.path, encode_table(remaining_rows, end_position))
            write_count += 1
    return write_count


def without_erased(event_table: Any, erased_entities: ErasedEntities) -> Any:
    """Return the rows of a file that name no erased entity."""
    remaining_mask = pc.and_(
        _mask_not_erased(event_table, "user", erased_entities.users),
        _mask_not_erased(event_table, "item", erased_entities.items),
    )
    return event_table.filter(remaining_mask)


def _mask_not_erased(event_table: Any, id_column: str, erased_ids: Collection[bytes]) -> Any:
    erased_texts = pa.array(sorted(raw_id.decode() for raw_id in erased_ids), pa.string())
    return pc.invert(pc.is_in(event_table.column(id_column), value_set=erased_texts))


def trim_stream(stores: EventStores, client: "redis.Redis", keys: Keyspace, *, keep_s: float, stream_bytes: int) -> int:
    """Remove events older than `keep_s` that files and all generations in the stores have; return their number.

    If it is uncertain which events they have, all are kept. In a stream larger than half of `stream_bytes` the age does
    not matter: a full stream refuses all new events.
    """
    trim_positions = [last_taken_position(stores.namespace_store), *stores.iter_generation_positions()]
    if int(client.memory_usage(keys.events) or 0) <= stream_bytes // 2:
        seconds, micros = client.time()
        trim_positions.append(Position(max(0, int((seconds + micros / 1e6 - keep_s) * 1000)), 0))
    trim_position = min(trim_positions)
    if trim_position == STREAM_BEGINNING:
        return 0
    # XTRIM removes entries below the id, so the id must be after the position itself.
    first_kept_position = Position.from_number(trim_position.number + 1)
    return int(client.xtrim(keys.events, minid=str(first_kept_position), approximate=False))


def trim_in_night(config: NightConfig, _releases: Releases, _needed_generations: Collection[str]) -> dict[str, int]:
    """Trim the night's own stream, if events are enabled; return `events_trimmed` for the report."""
    if not config.events.enabled:
        return {"events_trimmed": 0}
    # The own stream, even if another namespace's is used now: that one is trimmed by its own nights.
    own_events_config = replace(config, events=replace(config.events, namespace=""))
    with connect_events(own_events_config) as client:
        trimmed_count = trim_stream(
            EventStores.of(own_events_config), client, own_events_config.keyspace(),
            keep_s=config.events.keep_s, stream_bytes=config.events.stream_bytes,
        )  # fmt: skip
    return {"events_trimmed": trimmed_count}


def read_entries(
    client: "redis.Redis", stream_key: str, *, behind_id: str | None = None, end_id: str = "+"
) -> list[Entry]:
    """Return the next entries after a position (default: the first), up to another; empty at the end."""
    first_id = "-" if behind_id is None else f"({behind_id}"
    reply = client.xrange(stream_key, first_id, end_id, count=ENTRIES_AT_ONCE)
    return cast(list[Entry], reply)


def read_newest_id(client: "redis.Redis", stream_key: str) -> bytes | None:
    """Return the id of the newest entry; None for an empty stream."""
    last_entries = cast(list[Entry], client.xrevrange(stream_key, count=1))
    return last_entries[0][0] if last_entries else None
