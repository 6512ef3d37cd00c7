"""Files of the events that nights took over: each begins behind a position and says in itself where it ends.

`<store>/events/<position that it begins behind>.parquet`, written once: the end of the newest is where the next begins,
so the store alone says what was taken. The name of a merged one tells its end, too (`<begin>_<end>.parquet`): files
within it count no more.
"""

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from cache.errors import ConfigError, CorruptArtefact, LarderError
from cache.events.event import Event
from cache.events.position import BEGINNING, Position
from cache.store.artefacts import ArtefactStore
from precompute.config.settings import NightConfig
from precompute.sources.files import SourceFile, source_file

FOLDER: Final = "events"
END: Final = b"larder.until"
"""Key of a file's metadata that holds the position of its last event."""
SCHEMA: Final = pa.schema([
    ("user", pa.string()), ("item", pa.string()), ("time", pa.timestamp("us", tz="UTC")), ("id", pa.string()),
    ("type", pa.string()), ("weight", pa.float64()), ("position", pa.int64()), ("event", pa.string()),
])  # fmt: skip
"""Columns of a file; `position` is `Position.number`, `event` the JSON of what is no interaction."""

_POSITION = r"([0-9]{13})-([0-9]{7})"
_NAME = re.compile(rf"{_POSITION}(?:_{_POSITION})?\.parquet")


class TakenFile(NamedTuple):
    """File of events that begins behind a position; a merged one's name tells `until_position`, else the file does."""

    after: Position
    until_position: Position | None = None

    @property
    def path(self) -> str:
        """Path in the store."""
        end_suffix = (
            "" if self.until_position is None else f"_{_format_position(self.until_position)}"
        )
        return f"{FOLDER}/{_format_position(self.after)}{end_suffix}.parquet"

    def is_within(self, merged: "TakenFile") -> bool:
        """True if another file has all of its events."""
        if merged.until_position is None or merged == self or self.after < merged.after:
            return False
        return self.after < merged.until_position and (
            self.until_position is None or self.until_position <= merged.until_position
        )


def _format_position(position: Position) -> str:
    return f"{position.ms:013d}-{position.sequence:07d}"


def path_of(after: Position) -> str:
    """Path of the file that nights write of what lies behind a position."""
    return TakenFile(after).path


def list_taken_files(store: ArtefactStore) -> list[TakenFile]:
    """Files that count, in order; each ends where the next one begins."""
    return [file for file, counts in _all_files(store) if counts]


def superseded(store: ArtefactStore) -> list[TakenFile]:
    """Files whose events a merged one has."""
    return [file for file, counts in _all_files(store) if not counts]


def _all_files(store: ArtefactStore) -> list[tuple[TakenFile, bool]]:
    """Every file in order, and if it counts: where no longer one has its events."""
    names = filter(None, map(_NAME.fullmatch, store.names(FOLDER)))
    files = sorted(
        (
            TakenFile(
                Position(int(name_match[1]), int(name_match[2])),
                None if name_match[3] is None else Position(int(name_match[3]), int(name_match[4])),
            )
            for name_match in names
        ),
        key=lambda file: (file.after, file.until_position or file.after),
    )
    merged = [file for file in files if file.until_position is not None]
    files_with_validity = [
        (file, not any(file.is_within(merged_file) for merged_file in merged)) for file in files
    ]
    for earlier_file, later_file in pairwise(
        [file for file, counts in files_with_validity if counts]
    ):
        if (
            earlier_file.until_position is not None
            and later_file.after < earlier_file.until_position
        ):
            raise CorruptArtefact(
                f"{earlier_file.path} and {later_file.path} overlap, and neither has all events of the other: put the "
                "files "
                "back that they were merged of, and remove both",
                path=later_file.path,
            )
    return files_with_validity


def last_taken(store: ArtefactStore) -> Position:
    """Position up to which the files have all events."""
    files = list_taken_files(store)
    return _end_of(store, files[-1]) if files else BEGINNING


def to_bytes(rows: Iterable[tuple[Position, Event]], end_position: Position) -> bytes:
    """File of some events, which ends at a position."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for position, event in rows:
        is_whole = event.kind == "interaction"
        row_values = (
            None if event.user is None else event.user.decode(),
            None if event.item is None else event.item.decode(),
            event.at_us, event.id, event.type, event.weight, position.number,
            None if is_whole else event.to_bytes().decode(),
        )  # fmt: skip
        for name, value in zip(SCHEMA.names, row_values, strict=True):
            columns[name].append(value)
    return parquet(pa.table(columns, schema=SCHEMA), end_position)


def parquet(table: Any, end_position: Position) -> bytes:
    """Bytes of a file with these rows."""
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({END: str(end_position).encode()}), buffer)
    return buffer.getvalue()


def until_of(raw: bytes, path: str) -> Position:
    """Position of a file's last event; raises CorruptArtefact for what is no such file."""
    with _translate_damage(path):
        return Position.parse((pq.read_schema(io.BytesIO(raw)).metadata or {})[END])


def table_of(raw: bytes, path: str) -> Any:
    """Rows of a file; raises CorruptArtefact for what is no such file."""
    with _translate_damage(path):
        return pq.read_table(io.BytesIO(raw))


@contextmanager
def _translate_damage(path: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, LarderError) as error:
        raise CorruptArtefact(
            f"{path} is no file of events ({error}): put it back from a copy of the store; without it the events "
            "behind it are in no night",
            path=path,
        ) from error


def _end_of(store: ArtefactStore, file: TakenFile) -> Position:
    return file.until_position or until_of(store.read(file.path) or b"", file.path)


@dataclass(frozen=True, slots=True)
class EventFiles:
    """Files of events that a night reads behind the team's own, and the position that they go up to.

    None of either where no events are taken in.
    """

    files: tuple[SourceFile, ...] = ()
    until_position: Position | None = None


def event_files(config: NightConfig, end_text: str | None = None) -> EventFiles:
    """Files with all events up to a position (all files there are without one).

    Raises ConfigError for a position at which no file ends.
    """
    if not config.events.enabled:
        if end_text is not None:
            raise ConfigError(
                "[events] enabled is false, so a night reads no events", field="events"
            )
        return EventFiles()
    config = config.of_events()
    store = config.store()
    files = list_taken_files(store)
    ends = [*(file.after for file in files), _end_of(store, files[-1])] if files else [BEGINNING]
    end_position = ends[-1] if end_text is None else Position.parse(end_text)
    if end_position not in ends:
        raise ConfigError(
            f"no file of {store.url}/{FOLDER} ends at {end_position}, they go up to {ends[-1]}: run `take-events` "
            "first, and "
            "give the position that it tells",
            field="events_until",
        )
    names = [file.path for file in files[: ends.index(end_position)]]
    return EventFiles(tuple(_source(config, store, path) for path in names), end_position)


def _source(config: NightConfig, store: ArtefactStore, path: str) -> SourceFile:
    if store.folder is not None:
        return store.folder / path
    # Read where it lies: a copy on this host would have to be erased from as well.
    return source_file(f"{config.artifacts.rstrip('/')}/{config.namespace}/{path}", Path())
