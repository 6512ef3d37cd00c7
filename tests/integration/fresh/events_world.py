"""A published night whose manifest has its events and the inputs of its lists, and events after it."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import redis
from numpy.typing import NDArray

from cache.config.events import EventsConfig
from cache.events.event import Event
from cache.events.stream import ACCEPT_SCRIPT, StreamBounds, accept_script_arguments, pack_event, read_outcomes
from cache.format.ids import hash_ids
from cache.format.item_table import ItemTable, Ordinals
from cache.format.manifest import FORMAT_WITH_EVENTS, Artefact, IncludedEvents, Manifest, SeenPart
from cache.format.stream_position import STREAM_BEGINNING, Position
from cache.model.tower import Histories, Tower
from cache.model.tower_spec import TowerSpec
from cache.topk.topk import Scorer
from precompute.config.settings import NightConfig
from precompute.partitions.grouping import last_occurrence_mask, order_by_user_and_time
from tests.attached import newer_events_of
from tests.integration.nights import DATA_UNTIL, build_verified, publish
from tests.integration.serving_app import Running, eventually
from tests.opened import open_generation

EVENTS = EventsConfig(enabled=True)
BOUNDS = StreamBounds(256 << 20, 86_400_000, 100_000)

Row = tuple[str, str, int]
"""User, item, and when (microseconds)."""
Placed = tuple[Position, Event]


@dataclass
class EventWorld:
    """A night's namespace, the rows of its source, its users' features, and the accepted events."""

    config: NightConfig
    features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    limit: int = 100_000
    rows: list[Row] = field(default_factory=list)
    accepted: list[Placed] = field(default_factory=list)
    _count: int = 0
    _newest_us: int = field(init=False)

    def __post_init__(self) -> None:
        table = pq.read_table(self.config.path("interactions.parquet"))
        at_us = table["timestamp"].cast("int64").to_pylist()
        self.rows = list(zip(table["user"].to_pylist(), table["item"].to_pylist(), at_us, strict=True))
        self._newest_us = max(at_us)

    @cached_property
    def users(self) -> list[str]:
        """Users of the source, sorted."""
        return sorted({user for user, _, _ in self.rows})

    @cached_property
    def known_users(self) -> list[str]:
        """Users that a night knows, sorted."""
        return sorted(self._history(STREAM_BEGINNING, DATA_UNTIL))

    @cached_property
    def items(self) -> list[str]:
        """Items of the catalogue, sorted."""
        table = pq.read_table(self.config.path("items.parquet"))
        item_ids: list[str] = table["item"].to_pylist()
        return sorted(item_ids)

    def accept(self, events: Iterable[Event]) -> list[Placed]:
        """Let Redis accept events as the service does; return the accepted ones with their positions."""
        sent_events = list(events)
        keyspace = self.config.of_events().keyspace()
        keys, args = accept_script_arguments(keyspace, BOUNDS, [pack_event(keyspace, event) for event in sent_events])
        with redis.Redis.from_url(str(self.config.redis_url), protocol=2) as client:
            replies = client.eval(ACCEPT_SCRIPT, len(keys), *keys, *args)
        accept_outcomes = read_outcomes(replies)
        placed = [
            (outcome.position, event)
            for outcome, event in zip(accept_outcomes, sent_events, strict=True)
            if outcome.position is not None
        ]
        self.accepted += placed
        return placed

    def event(self, user: str, item: str, at_us: int | None = None, weight: float = 1.0) -> Event:
        """Return an interaction with an id of its own, by default later than every row of the source."""
        self._count += 1
        at = self._newest_us + self._count if at_us is None else at_us
        return Event(f"event-{self._count}", at, user.encode(), item.encode(), weight=weight)

    def build(self, until_position: Position = STREAM_BEGINNING, data_until: str = DATA_UNTIL) -> str:
        """Build a verified generation with the events up to a position; its lists use the source alone."""
        generation = build_verified(self.config, data_until)
        manifest, root = open_generation(self.config.store(), generation)
        seen_parts = self._write_seen(manifest, root, until_position, data_until)
        read = IncludedEvents(str(until_position), self.limit, namespace=self.config.events.namespace)
        manifest = replace(manifest, events=read, seen=seen_parts, format=FORMAT_WITH_EVENTS)
        path = f"generations/{generation}/manifest.json"
        self.config.store().write(path, manifest.to_bytes())
        return generation

    def publish(self, until_position: Position = STREAM_BEGINNING, data_until: str = DATA_UNTIL) -> str:
        """Build such a generation and make it live."""
        generation = self.build(until_position, data_until)
        publish(self.config, generation)
        return generation

    def _history(self, until_position: Position, data_until: str) -> dict[str, list[tuple[str, int]]]:
        """Return the rows of each known user in order: the team's own, then events by position."""
        cut_us = int(datetime.fromisoformat(data_until).timestamp() * 1e6)
        rows_by_user: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for user, item, at_us in self.rows:
            if at_us < cut_us:
                rows_by_user[user].append((item, at_us))
        for position, event in self.accepted:
            if position <= until_position and event.is_in_history and event.user and event.item:
                rows_by_user[event.user.decode()].append((event.item.decode(), event.at_us))
        return rows_by_user

    def _write_seen(
        self, manifest: Manifest, root: Path, until_position: Position, data_until: str
    ) -> tuple[SeenPart, ...]:
        rows: dict[str, list[tuple[str, int]]] = {user: [] for user in self.features}
        rows |= self._history(until_position, data_until)
        items = ItemTable.open(root, manifest)
        entities = manifest.entity_sets["user"]
        raws = [user.encode() for user in rows]
        users = dict(zip(hash_ids(raws, entities.seed).tolist(), rows, strict=True))
        parts = []
        for shard, part in enumerate(entities.parts):
            named = [users[user_hash] for user_hash in np.fromfile(root / part.file.path, "<u8").tolist()]
            grouped = grouped_rows([rows[user] for user in named], items)
            texts = [orjson.dumps(self.features[user]) for user in named if self.features]
            files = {
                "ends": grouped.indptr[1:].astype("<u8").tobytes(),
                "items": grouped.indices.astype("<u4").tobytes(),
                "times": grouped.times.astype("<i8").tobytes(),
            }
            if texts:
                files["feature_ends"] = np.cumsum(list(map(len, texts))).astype("<u8").tobytes()
                files["features"] = b"".join(texts)
            described = {name: self._written(root, f"seen/{shard:04d}.{name}", data) for name, data in files.items()}
            parts.append(SeenPart(**described))
        return tuple(parts)

    @staticmethod
    def _written(root: Path, path: str, data: bytes) -> Artefact:
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(data)
        return Artefact(path, len(data), hashlib.sha256(data).hexdigest())

    def expected(
        self, generation: str, users: Sequence[str], upto: Position | None = None, data_until: str = DATA_UNTIL
    ) -> dict[str, tuple[list[str], NDArray[np.float32]]]:
        """Compute here the lists of a night over the source and all events up to a position."""
        rows = self._history(upto or self.accepted[-1][0], data_until)
        manifest, root = open_generation(self.config.store(), generation)
        items, table = ItemTable.open(root, manifest), manifest.tables["user_topk"]
        model = manifest.models[str(table.producer.model)]
        grouped = grouped_rows([rows.get(user, []) for user in users], items)
        histories = []
        for start, end in zip(grouped.indptr[:-1], grouped.indptr[1:], strict=True):
            newest_ordinals = grouped.indices[max(start, end - self.limit) : end]
            indices = items.model_indices_of(Ordinals(newest_ordinals))
            histories.append(indices[indices >= 0])
        spec = TowerSpec.from_json(model.spec)
        inputs: dict[str, Any] = {}
        for input_spec in spec.inputs:
            if input_spec.bind == "history":
                inputs[input_spec.name] = Histories.of(histories)
            else:
                column = [self.features[user][str(input_spec.column)] for user in users]
                inputs[input_spec.name] = np.array(column, input_spec.dtype)
        vectors = Tower.open(root / model.fp32.path, spec).run(inputs)
        metric = manifest.indexes[str(table.producer.index)].metric
        exclusions = Histories(grouped.indptr, grouped.indices)
        ordinals, scores = Scorer.of(items.vectors, metric).top(vectors, table.layout.width, exclusions)
        counts = (ordinals != 0xFFFFFFFF).sum(axis=1)
        return {
            user: (items.ids_of(ordinals[row, : counts[row]]), scores[row, : counts[row]])
            for row, user in enumerate(users)
        }


@dataclass(frozen=True)
class Grouped:
    """Histories of several users: ordinals, and the last time of each."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int64]
    times: NDArray[np.int64]


def grouped_rows(rows: Sequence[Sequence[tuple[str, int]]], items: ItemTable) -> Grouped:
    """Group rows as a night does: known items only, oldest first, each once at its last time."""
    users = np.repeat(np.arange(len(rows)), [len(user_rows) for user_rows in rows])
    flat = [pair for user_rows in rows for pair in user_rows]
    ordinals = np.asarray(items.ordinals_of([item.encode() for item, _ in flat]), np.int64)
    times = np.array([at_us for _, at_us in flat], np.int64)
    is_known = ordinals >= 0
    users, ordinals, times = users[is_known], ordinals[is_known], times[is_known]
    order = order_by_user_and_time(users, times)
    users, ordinals, times = users[order], ordinals[order], times[order]
    keep = last_occurrence_mask(users, ordinals)
    users, ordinals, times = users[keep], ordinals[keep], times[keep]
    return Grouped(np.searchsorted(users, np.arange(len(rows) + 1)), ordinals, times)


async def until_counted(app: Running, world: EventWorld) -> None:
    """Wait until the service counts all accepted events; longer for many events."""
    newest_number, timeout_s = world.accepted[-1][0].number, 10 + len(world.accepted) / 1_000

    async def has_all() -> bool:
        return newer_events_of(app.service).users.last_number >= newest_number

    assert await eventually(has_all, timeout_s)


def same_list(answer: Mapping[str, Any], items: Sequence[str], scores: NDArray[np.float32]) -> bool:
    """Return whether the items are the same, in this order where scores differ by more than 1e-5 relative."""
    answer_items = answer["items"]
    if len(answer_items) != len(items):
        return False
    score_by_item = dict(zip(items, scores.tolist(), strict=True))
    lowest_score = float(scores[-1]) if len(scores) else 0.0
    return all(
        mine == theirs
        or abs(score_by_item.get(mine, lowest_score) - score_by_item[theirs]) <= 1e-5 * abs(score_by_item[theirs])
        for mine, theirs in zip(answer_items, items, strict=True)
    )
