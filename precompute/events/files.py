"""Files of the events that nights took over: their names, their rows, and the values that they set for entities.

`<store>/events/<begin>.parquet` has the events after the position `begin`, and is written once. The next file begins
where the newest one ends, so the store alone shows which events were taken. A merged file has its end in its name, too
(`<begin>_<end>.parquet`): files within that range are ignored.
"""

import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache.errors import ConfigError, CorruptArtefact, LarderError
from cache.events.event import Event
from cache.events.new_items import brings_item
from cache.events.newer_events import AttributeEvents
from cache.format.manifest import EntityKind
from cache.format.stream_position import STREAM_BEGINNING, Position
from cache.store.artefacts import ArtefactStore
from precompute.config.settings import NightConfig
from precompute.sources.columns import Ids
from precompute.sources.features import NO_ENTITY_VALUES, EntityValues
from precompute.sources.files import SourceFile, open_for_arrow, source_file
from precompute.sources.readers import BATCH_ROWS_MAX, EVENT_INTERACTIONS_SOURCE, Interactions, translate_read_errors
from precompute.sources.unusable import UnusableRows

EVENTS_FOLDER: Final = "events"

END_POSITION_KEY: Final = b"larder.until"
"""Key of a file's metadata with the position of its last event."""

EVENT_FILE_SCHEMA: Final = pa.schema([
    ("user", pa.string()), ("item", pa.string()), ("time", pa.timestamp("us", tz="UTC")), ("id", pa.string()),
    ("type", pa.string()), ("weight", pa.float64()), ("position", pa.int64()), ("event", pa.string()),
])  # fmt: skip
"""Columns of a file; `position` is `Position.number`, `event` the JSON of an event that is not an interaction."""

_INTERACTION_COLUMNS: Final = ["user", "item", "time", "weight", "position"]

_POSITION_PATTERN = r"([0-9]{13})-([0-9]{7})"

_FILE_NAME_PATTERN = re.compile(rf"{_POSITION_PATTERN}(?:_{_POSITION_PATTERN})?\.parquet")


class TakenFile(NamedTuple):
    """File of events after a position; a merged file's name has `until_position`, other files store it inside."""

    after_position: Position
    until_position: Position | None = None

    @property
    def path(self) -> str:
        """Path in the store."""
        end_suffix = "" if self.until_position is None else f"_{_format_position(self.until_position)}"
        return f"{EVENTS_FOLDER}/{_format_position(self.after_position)}{end_suffix}.parquet"

    def is_within(self, merged: "TakenFile") -> bool:
        """True if a merged file has all events of this one."""
        if merged.until_position is None or merged == self or self.after_position < merged.after_position:
            return False
        return self.after_position < merged.until_position and (
            self.until_position is None or self.until_position <= merged.until_position
        )


def _format_position(position: Position) -> str:
    return f"{position.ms:013d}-{position.sequence:07d}"


def taken_file_path(after: Position) -> str:
    """Return the path of the file that nights write for the events after a position."""
    return TakenFile(after).path


def list_taken_files(store: ArtefactStore) -> list[TakenFile]:
    """Return the files in use, in order; each ends where the next one begins."""
    return [file for file, is_counted in _list_all_files(store) if is_counted]


def superseded_files(store: ArtefactStore) -> list[TakenFile]:
    """Return the files whose events a merged file has."""
    return [file for file, is_counted in _list_all_files(store) if not is_counted]


def _list_all_files(store: ArtefactStore) -> list[tuple[TakenFile, bool]]:
    """Return every file in order, with whether it is in use: no merged file has all of its events."""
    name_matches = filter(None, map(_FILE_NAME_PATTERN.fullmatch, store.names(EVENTS_FOLDER)))
    taken_files = sorted(
        (
            TakenFile(
                Position(int(name_match[1]), int(name_match[2])),
                None if name_match[3] is None else Position(int(name_match[3]), int(name_match[4])),
            )
            for name_match in name_matches
        ),
        key=lambda file: (file.after_position, file.until_position or file.after_position),
    )
    merged_files = [file for file in taken_files if file.until_position is not None]
    files_with_validity = [
        (file, not any(file.is_within(merged_file) for merged_file in merged_files)) for file in taken_files
    ]
    for earlier_file, later_file in pairwise([file for file, is_counted in files_with_validity if is_counted]):
        if earlier_file.until_position is not None and later_file.after_position < earlier_file.until_position:
            raise CorruptArtefact(
                f"{earlier_file.path} and {later_file.path} overlap, and neither has all events of the other: restore "
                "the files from which they were merged, and remove both",
                path=later_file.path,
            )
    return files_with_validity


def last_taken_position(store: ArtefactStore) -> Position:
    """Return the position up to which the files have all events."""
    taken_files = list_taken_files(store)
    return _end_position_of(store, taken_files[-1]) if taken_files else STREAM_BEGINNING


def demand_all_files(store: ArtefactStore) -> None:
    """Raise CorruptArtefact if a file of events is missing before another one.

    In a remote store only what file names show is compared: other ends are known to those who read the files.
    """
    end_position: Position | None = STREAM_BEGINNING
    for file in list_taken_files(store):
        if end_position is not None and file.after_position != end_position:
            renamed_file = file._replace(after_position=end_position)
            raise CorruptArtefact(
                f"the file with the events from {end_position} to {file.after_position} is missing in {store.url}: "
                f"restore it from a copy of the store; to go on without these events, rename {file.path} to "
                f"{renamed_file.path}",
                path=file.path,
            )
        end_position = file.until_position
        if end_position is None and store.local_folder is not None:
            with _translate_damage(file.path), store.local(file.path).open("rb") as parquet_file:
                end_position = Position.parse((pq.read_schema(parquet_file).metadata or {})[END_POSITION_KEY])


def encode_events(positions_and_events: Iterable[tuple[Position, Event]], end_position: Position) -> bytes:
    """Encode events as a file that ends at a position."""
    values_by_column: dict[str, list[Any]] = {column_name: [] for column_name in EVENT_FILE_SCHEMA.names}
    for position, event in positions_and_events:
        is_interaction = event.kind == "interaction"
        row_values = (
            None if event.user is None else event.user.decode(),
            None if event.item is None else event.item.decode(),
            event.at_us, event.id, event.type, event.weight, position.number,
            None if is_interaction else event.to_bytes().decode(),
        )  # fmt: skip
        for column_name, column_value in zip(EVENT_FILE_SCHEMA.names, row_values, strict=True):
            values_by_column[column_name].append(column_value)
    return encode_table(pa.table(values_by_column, schema=EVENT_FILE_SCHEMA), end_position)


def encode_table(event_table: Any, end_position: Position) -> bytes:
    """Encode a table as a file that ends at a position."""
    buffer = io.BytesIO()
    pq.write_table(event_table.replace_schema_metadata({END_POSITION_KEY: str(end_position).encode()}), buffer)
    return buffer.getvalue()


def read_end_position(raw_parquet: bytes, path: str) -> Position:
    """Return the position of a file's last event; raise CorruptArtefact for a file of another kind."""
    with _translate_damage(path):
        return Position.parse((pq.read_schema(io.BytesIO(raw_parquet)).metadata or {})[END_POSITION_KEY])


def read_event_table(raw_parquet: bytes, path: str) -> Any:
    """Return the rows of a file; raise CorruptArtefact for a file of another kind."""
    with _translate_damage(path):
        return pq.read_table(io.BytesIO(raw_parquet))


@contextmanager
def _translate_damage(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, LarderError) as error:
        raise CorruptArtefact(
            f"{path} is no file of events ({error}): restore it from a copy of the store; without it no night has its "
            "events",
            path=path,
        ) from error


def _end_position_of(store: ArtefactStore, file: TakenFile) -> Position:
    return file.until_position or read_end_position(store.read(file.path) or b"", file.path)


@dataclass(frozen=True, slots=True)
class EventFiles:
    """Files of events that a night reads in addition to the team's files, and the position at which they end.

    Without events both are empty.
    """

    files: tuple[SourceFile, ...] = ()
    until_position: Position | None = None


def event_files(config: NightConfig, end_position_text: str | None = None) -> EventFiles:
    """Return the files with all events up to a position (by default all files).

    Raises ConfigError for a position at which no file ends.
    """
    if not config.events.enabled:
        if end_position_text is not None:
            raise ConfigError("[events] enabled is false, so a night reads no events", field="events")
        return EventFiles()
    config = config.of_events()
    store = config.store()
    demand_all_files(store)
    taken_files = list_taken_files(store)
    end_positions = (
        [*(file.after_position for file in taken_files), _end_position_of(store, taken_files[-1])]
        if taken_files
        else [STREAM_BEGINNING]
    )
    end_position = end_positions[-1] if end_position_text is None else Position.parse(end_position_text)
    if end_position not in end_positions:
        raise ConfigError(
            f"no file of {store.url}/{EVENTS_FOLDER} ends at {end_position}, they go up to {end_positions[-1]}: run "
            "`take-events` first, and give the position that it prints",
            field="events_until",
        )
    file_paths = [file.path for file in taken_files[: end_positions.index(end_position)]]
    return EventFiles(tuple(_source_file_of(config, store, path) for path in file_paths), end_position)


def _source_file_of(config: NightConfig, store: ArtefactStore, path: str) -> SourceFile:
    if store.local_folder is not None:
        return store.local_folder / path
    # Read from the store: a copy on this host would also have to be erased from.
    return source_file(f"{config.artifacts.rstrip('/')}/{config.namespace}/{path}", Path())


def read_event_interactions(
    files: Sequence[SourceFile], first_file_index: int, unusable: UnusableRows
) -> Iterator[Interactions]:
    """Yield batches of interactions with positive weight, from one file on; the position decides, not the cut.

    Their ids were checked when they were accepted. They are counted as rows of events, so that they do not lower the
    share of bad rows of the sources. Raises SourceError naming a file that cannot be read.
    """
    for event_file in files[first_file_index:]:
        with (
            translate_read_errors(event_file),
            open_for_arrow(event_file) as opened_file,
            pq.ParquetFile(opened_file) as parquet_file,
        ):
            for batch in parquet_file.iter_batches(BATCH_ROWS_MAX, columns=_INTERACTION_COLUMNS):
                unusable.count_checked(EVENT_INTERACTIONS_SOURCE, len(batch))
                yield _to_interactions(batch)


def _to_interactions(event_batch: Any) -> Interactions:
    has_both = pc.and_(event_batch.column("user").is_valid(), event_batch.column("item").is_valid())
    positive_rows = event_batch.filter(pc.and_(has_both, pc.greater(event_batch.column("weight"), 0.0)))
    return Interactions(
        Ids.of(positive_rows.column("user")),
        Ids.of(positive_rows.column("item")),
        np.asarray(positive_rows.column("time").cast(pa.int64())),
        np.asarray(positive_rows.column("position")),
    )


class EventValues(NamedTuple):
    """Attribute values that events set for users and items; the newest position wins, also over table values.

    Items in `event_item_ids`, for which events set features or a vector, get a row if no table has one.
    """

    users: EntityValues = NO_ENTITY_VALUES
    items: EntityValues = NO_ENTITY_VALUES
    event_item_ids: frozenset[bytes] = frozenset()

    @classmethod
    def read(
        cls,
        event_files: Sequence[SourceFile],
        erased_ids_by_kind: Mapping[EntityKind, Iterable[bytes]],
        attributes_by_kind: Mapping[EntityKind, Collection[str]],
        oldest_counted_number: int = 0,
    ) -> Self:
        """Read files of events in the order of their positions, without events of erased entities.

        Only values after the position number `oldest_counted_number` count, and only attributes in
        `attributes_by_kind`: other values take no memory, and displace none. Raises SourceError naming a file that
        cannot be read, CorruptArtefact for a malformed event.
        """
        attribute_events, event_item_ids = AttributeEvents(), set()
        for position, event in _read_value_events(event_files):
            if event.item is not None and position.number > oldest_counted_number and brings_item(event):
                event_item_ids.add(event.item)
            if position.number > oldest_counted_number:  # older values are ignored, so they take no memory
                attribute_events.add(position, _only_attributes(event, attributes_by_kind))
        for kind, erased_ids in erased_ids_by_kind.items():
            for erased_id in erased_ids:
                attribute_events.forget(kind, erased_id)
        present_item_ids = frozenset(event_item_ids.difference(erased_ids_by_kind.get("item", ())))
        return cls(
            attribute_events.values_set_after("user", oldest_counted_number),
            attribute_events.values_set_after("item", oldest_counted_number),
            present_item_ids,
        )


def counted_behind_number(keep_values_days: float, cut_s: float) -> int:
    """Return the position number after which values set by events count in a night with this cut (Unix seconds)."""
    return Position(max(0, int((cut_s - keep_values_days * 86_400) * 1000)), 0).number


def newest_vector_by_item(
    event_files: Sequence[SourceFile], oldest_counted_number: int = 0
) -> dict[bytes, tuple[float, ...]]:
    """Return the newest vector that events after a position set for each item, in the order of the ids.

    Raises SourceError naming a file that cannot be read, CorruptArtefact for a malformed event.
    """
    vector_by_item = {
        event.item: event.vector
        for position, event in _read_value_events(event_files)
        if event.item is not None and event.vector is not None and position.number > oldest_counted_number
    }
    return dict(sorted(vector_by_item.items()))


def _read_value_events(files: Sequence[SourceFile]) -> Iterator[tuple[Position, Event]]:
    """Yield the events that are not interactions, in the order of their positions."""
    for event_file in files:
        with (
            translate_read_errors(event_file),
            open_for_arrow(event_file) as opened_file,
            pq.ParquetFile(opened_file) as parquet_file,
        ):
            for batch in parquet_file.iter_batches(BATCH_ROWS_MAX, columns=["position", "event"]):
                event_batch = batch.filter(batch.column("event").is_valid())
                position_numbers, event_texts = (
                    event_batch.column(column_name).to_pylist() for column_name in ("position", "event")
                )
                for position_number, event_text in zip(position_numbers, event_texts, strict=True):
                    yield (Position.from_number(position_number), Event.from_bytes(event_text.encode()))


def _only_attributes(event: Event, attributes_by_kind: Mapping[EntityKind, Collection[str]]) -> Event:
    """Return a copy of the event with only these attributes, features included."""
    kind = event.kind
    if kind == "interaction" or not (attribute_values := event.set_value_by_attribute):
        return event
    value_by_attribute = {
        attribute_name: attribute_value
        for attribute_name, attribute_value in attribute_values.items()
        if attribute_name in attributes_by_kind[kind]
    }
    return replace(event, attributes=value_by_attribute, features=None)
