"""A stream of events in a real Redis, and the files that nights made of it."""

import io
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
import redis

from cache.config.events import EventsConfig
from cache.events.event import Event
from cache.format.redis_keys import Keyspace
from cache.format.stream_position import Position
from cache.store.artefacts import ArtefactStore
from precompute.config.settings import NightConfig
from precompute.events.files import list_taken_files, read_end_position
from precompute.events.stream import EventStores


class Crash(Exception):
    """A simulated kill."""


class TroubledStore(ArtefactStore):
    """Store in which something happens before or after the next write."""

    before_write: Callable[[], object] | None = None
    behind: Callable[[], object] | None = None

    def write_once(self, path: str, data: bytes) -> bool:
        hook, self.before_write = self.before_write, None
        if hook is not None:
            hook()
        is_written = super().write_once(path, data)
        hook, self.behind = self.behind, None
        if hook is not None:
            hook()
        return is_written


@dataclass
class Stream:
    """Stream of a namespace of its own; `added` are its events by position, in order."""

    client: "redis.Redis"
    store: TroubledStore
    keys: Keyspace
    added: dict[Position, Event] = field(default_factory=dict)

    @classmethod
    def of(cls, redis_url: str, folder: Path) -> "Stream":
        """Make a stream with an empty store."""
        keys = Keyspace(f"events-{uuid.uuid4().hex[:12]}")
        client = redis.Redis.from_url(redis_url, protocol=3)
        return cls(client, TroubledStore(str(folder / keys.namespace)), keys)

    @property
    def stores(self) -> EventStores:
        """The store, as that of a namespace without arms."""
        return EventStores(self.store, self.keys.namespace)

    def add(self, event: Event | None = None) -> Position:
        """Add one more event with an id of its own; user and item are arbitrary if not given."""
        number = len(self.added)
        event = event or Event(f"e{number}", 1_000_000 * number, b"u%d" % (number % 5), b"i%d" % number)
        position = Position.parse(self.client.xadd(self.keys.events, {"e": event.to_bytes()}))
        self.added[position] = event
        return position

    def config(self, redis_url: str) -> NightConfig:
        """Settings of nights that take events into this store."""
        assert self.store.local_folder is not None
        return NightConfig(
            namespace=self.keys.namespace, artifacts=str(self.store.local_folder.parent),
            redis_url=redis_url, events=EventsConfig(enabled=True),
        )  # fmt: skip

    def rows(self) -> list[tuple[int, str]]:
        """Return position and id of every event in the files, in the order of files and rows."""
        event_rows: list[tuple[int, str]] = []
        for file in list_taken_files(self.store):
            table = pq.read_table(io.BytesIO(self.store.read(file.path) or b""))
            event_rows += zip(table["position"].to_pylist(), table["id"].to_pylist(), strict=True)
        return event_rows

    def all_rows(self) -> list[tuple[int, str]]:
        """Return the rows of the files once all events were taken."""
        return [(position.number, event.id) for position, event in self.added.items()]

    def bounds(self) -> list[tuple[Position, Position]]:
        """Return beginning and end of each file."""
        return [
            (file.after_position, read_end_position(self.store.read(file.path) or b"", file.path))
            for file in list_taken_files(self.store)
        ]
