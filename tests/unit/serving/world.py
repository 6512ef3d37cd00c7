"""A small generation in memory with all that a request meets: tables, items, a model that fails on demand."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cache.errors import InvalidInput
from cache.format.directory import Directory
from cache.format.ids import fingerprints, hash_ids
from cache.format.item_table import ItemTable
from cache.format.manifest import Artefact, EntitySet, ItemFiles, Manifest, Producer, Table, TablePart
from cache.model.input_preparation import LiveInput, PreparedInput
from cache.records import FLAG_LIVE, Layout, encode_numbers, encode_topk
from cache.store.blocklist import Blocklist
from cache.tiers.l1 import LocalTier, NegativeCache
from cache.tiers.reads import SnapshotView
from cache.tiers.tiered import TieredCache
from serving.admission.controller import Admission
from serving.admission.gate import AdmissionGate, DeadlineCheck
from serving.config.settings import ServingConfig
from serving.engine.batch_inference import compute
from serving.engine.inference import LiveInferences
from serving.engine.ladder import Ladder
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, LiveUnavailable, MicroBatcher
from serving.generations.snapshot import DefaultList, Snapshot
from serving.http.openapi import ApiPaths, core_operations
from serving.metrics.registry import Metrics
from serving.requests.models import LookupRequest, RequestedEntity
from serving.requests.options import Limits, RequestOptions
from serving.requests.parsing import HeaderReader
from tests.fakes import FakeClock, FakeRemote

GENERATION = "20261120T000000Z-000000000001"
OLDER = "20261119T000000Z-000000000002"
DATA_UNTIL = 1_700_000_000
SCORED_AT = DATA_UNTIL + 60
LIMITS = Limits(max_batch=1_000, max_history=50, max_exclude=50, deadline_ms=300, deadline_max_ms=1_000)
USERS = tuple(f"u{number}" for number in range(12))
ITEMS = tuple(f"i{number}" for number in range(20))
WIDTH = 5
NO_FILE = Artefact("none", 0, "")
_SEEDS = {"user": 7, "item": 11}
_LAYOUTS = {
    "user_topk": Layout("topk", WIDTH, "f4"),
    "item_similar": Layout("topk", WIDTH, "f4"),
    "user_vector": Layout("vector", 4, "f4"),
    "user_affinity": Layout("value", 3, "f4"),
}


@dataclass
class FakePredictor:
    """Recommends the items that follow the last of the history, and records its calls."""

    items: ItemTable
    model_digest: str = "model-1"
    precisions: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Layout] = field(default_factory=lambda: _LAYOUTS)
    fails_with: Exception | None = None
    poison: bytes = b"poison"
    batches: list[list[str]] = field(default_factory=list)
    gate: threading.Event | None = None
    started: threading.Event = field(default_factory=threading.Event)

    def supports(self, table: str) -> bool:
        """Return whether the table is one of the world's."""
        return table in self.tables

    def prepare(self, table: str, source: LiveInput) -> PreparedInput | None:
        """Prepare as the real predictor does: drop unknown items; without any left there is no input."""
        for name, value in (source.features or {}).items():
            if name != "age" or isinstance(value, str | tuple):
                raise InvalidInput(f"feature {name!r} is not taken", field=name)
        distinct_items = list(dict.fromkeys(source.history or ()))
        ordinals = self.items.ordinals_of(distinct_items)
        known_ordinals = ordinals[ordinals >= 0]
        if source.item_ordinal is not None:
            known_ordinals = np.append(known_ordinals, source.item_ordinal)
        if not len(known_ordinals) and not source.features:
            return None
        features = {"poisoned": self.poison in (source.history or ())}
        unknown_id_count = len(distinct_items) - int((ordinals >= 0).sum())
        return PreparedInput(table, known_ordinals, features, -1, known_ordinals, unknown_id_count)

    def prepare_all(self, table: str, sources: Sequence[LiveInput]) -> list[PreparedInput | InvalidInput | None]:
        """Prepare as the real predictor does: an error replaces its input."""
        prepared_inputs: list[PreparedInput | InvalidInput | None] = []
        for source in sources:
            try:
                prepared_inputs.append(self.prepare(table, source))
            except InvalidInput as error:
                prepared_inputs.append(error)
        return prepared_inputs

    def predict(
        self,
        table: str,
        batch: Sequence[PreparedInput],
        prints: Sequence[int],
        scored_at: int,
        *,
        blocked_ordinals: NDArray[np.int64],
    ) -> list[bytes]:
        """Return one record for each input."""
        self.batches.append([table] * len(batch))
        self.started.set()
        if self.gate is not None:
            self.gate.wait(5)
        if self.fails_with is not None:
            raise self.fails_with
        if any(prepared.features["poisoned"] for prepared in batch):
            raise RuntimeError("poisoned input")
        fingerprint_array = np.array(prints, np.uint64)
        layout = self.tables[table]
        if layout.kind == "vector":
            vectors = np.full((len(batch), layout.width), 0.5, np.float32)
            rows = encode_numbers(layout, fingerprint_array, vectors, scored_at, flags=FLAG_LIVE)
        elif layout.kind == "value":
            values = np.full((len(batch), layout.width), 0.5, np.float32)
            rows = encode_numbers(layout, fingerprint_array, values, scored_at, flags=FLAG_LIVE)
        else:
            blocked_set = set(blocked_ordinals.tolist())
            lists = [self._after(prepared, blocked_set) for prepared in batch]
            scores = np.tile(np.arange(layout.width, 0, -1).astype(np.float32), (len(batch), 1))
            rows = encode_topk(
                layout, fingerprint_array, np.array(lists, np.uint32), scores, scored_at, flags=FLAG_LIVE
            )
        data, size = rows.tobytes(), layout.size_bytes
        return [data[at : at + size] for at in range(0, len(data), size)]

    def _after(self, prepared: PreparedInput, blocked: set[int]) -> list[int]:
        start = int(prepared.history[-1]) if len(prepared.history) else 0
        exclusions = set(prepared.excluded_ordinals.tolist()) | blocked
        count = self.items.count
        ordinals = [(start + step) % count for step in range(1, count + 1)]
        return [ordinal for ordinal in ordinals if ordinal not in exclusions][:WIDTH]


def _directory(name: str, ids: Sequence[str]) -> tuple[Directory, list[bytes]]:
    raws = [id_.encode() for id_ in ids]
    hashes = hash_ids(raws, _SEEDS[name])
    order = np.argsort(hashes)
    return Directory(_SEEDS[name], [0], [hashes[order]]), [raws[index] for index in order]


def item_table() -> ItemTable:
    """Return the catalogue, in ordinal order."""
    directory, raws = _directory("item", ITEMS)
    ids = np.frombuffer(b"".join(raws), np.uint8)
    offsets = np.cumsum([0] + [len(raw) for raw in raws]).astype(np.uint64)
    vectors = np.random.default_rng(0).normal(size=(len(raws), 4)).astype(np.float32)
    return ItemTable(directory, ids, offsets, vectors, np.arange(len(raws), dtype=np.int64))


def night_list(user: str) -> list[int]:
    """Return the ordinals that the night recommends to a user."""
    start = int(user[1:])
    return [(start + step) % len(ITEMS) for step in range(WIDTH)]


@dataclass
class World:
    """Snapshots with pages in a fake Redis, and a ladder over both."""

    clock: FakeClock = field(default_factory=lambda: FakeClock(DATA_UNTIL + 3600.0))
    remote: FakeRemote = field(default_factory=FakeRemote)
    metrics: Metrics = field(default_factory=Metrics)
    busy: bool = False

    def __post_init__(self) -> None:
        self.items = item_table()
        self.users, self.user_raws = _directory("user", USERS)
        self.predictor = FakePredictor(self.items)
        self.tiers = TieredCache(LocalTier(1 << 20), NegativeCache(100, 5.0), self.remote)
        self.inferences = LiveInferences(cast(MicroBatcher, self), self.tiers, overlay_ttl_s=600.0, outage_ttl_s=15.0)
        self.ladder = Ladder(self.tiers, self.inferences, self.metrics, l2_deadline_s=1.0, clock=self.clock)
        self.jobs: list[InferenceJob] = []

    async def infer(self, job: InferenceJob) -> ComputedRecord:
        """Infer at once."""
        self.jobs.append(job)
        if self.busy:
            raise LiveUnavailable("busy")
        outcome = compute([job], clock=self.clock)[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def snapshot(self, generation: str = GENERATION, **changes: Any) -> Snapshot:
        """Return a generation whose pages are in the fake Redis."""
        tables = {}
        for name, layout in _LAYOUTS.items():
            kind, _, table_suffix = name.partition("_")
            rows = self._rows(name, layout)
            self.remote.pages[generation, name, 0] = rows
            part = TablePart(0, 1, len(rows) // layout.size_bytes, NO_FILE, NO_FILE)
            producer = Producer("topk" if table_suffix == "topk" else "tower", "user_tower")
            labels = ("a", "b", "c") if layout.kind == "value" else ()
            tables[name] = Table(name, kind, producer, layout, 1_000, (part,), labels)
        manifest = Manifest(
            namespace="test", generation=generation, data_until=DATA_UNTIL, created_at=DATA_UNTIL,
            bundle_digest="", inputs_digest="",
            entity_sets={
                "user": EntitySet("user", 7, len(USERS), ()),
                "item": EntitySet("item", 11, len(ITEMS), ()),
            },
            items=ItemFiles(NO_FILE, NO_FILE, NO_FILE, NO_FILE, len(ITEMS), 4),
            tables=tables, models={}, indexes={}, defaults=NO_FILE, gates=(),
        )  # fmt: skip
        directories = {"user": self.users, "item": self.items.directory}
        default = DefaultList(
            np.arange(len(ITEMS), dtype=np.uint32),
            np.linspace(1, 0, len(ITEMS), dtype=np.float32),
            {self.items.raw_id(ordinal): ordinal for ordinal in range(len(ITEMS))},
        )
        fields: dict[str, Any] = {
            "generation": generation, "epoch": 1, "published_at": "2026-11-20T00:00:00Z",
            "manifest": manifest, "generation_folder": Path(), "directories": directories, "items": self.items,
            "view": SnapshotView(generation, directories), "predictor": self.predictor,
            "degraded_reason": None,
            "default_list_by_table": {"user_topk": default, "item_similar": default},
            "blocklist": Blocklist(), "blocked_item_numbers": frozenset(),
            "blocked_item_ordinals": np.empty(0, np.int64),
        }  # fmt: skip
        return Snapshot(**(fields | changes))

    def _rows(self, name: str, layout: Layout) -> bytes:
        raws = self.user_raws if name.startswith("user") else [
            self.items.raw_id(ordinal) for ordinal in range(self.items.count)
        ]  # fmt: skip
        prints = fingerprints(raws)
        if layout.kind == "vector":
            vectors = np.ones((len(raws), layout.width), np.float32)
            return encode_numbers(layout, prints, vectors, SCORED_AT).tobytes()
        if layout.kind == "value":
            values = np.ones((len(raws), layout.width), np.float32)
            return encode_numbers(layout, prints, values, SCORED_AT).tobytes()
        lists = np.array([night_list(raw.decode()) for raw in raws], np.uint32)
        scores = np.tile(np.arange(WIDTH, 0, -1).astype(np.float32), (len(raws), 1))
        return encode_topk(layout, prints, lists, scores, SCORED_AT).tobytes()

    def ids(self, ordinals: Sequence[int]) -> list[str]:
        """Return external ids."""
        return [self.items.id_of(ordinal) for ordinal in ordinals]


def ask(*entities: RequestedEntity, **options: Any) -> LookupRequest:
    """Return a lookup with a long deadline."""
    return LookupRequest(entities, RequestOptions(**({"deadline_s": 5.0} | options)))


def entity(id_: str | None, table: str = "user_topk", **fields: Any) -> RequestedEntity:
    """Return one requested entity."""
    return RequestedEntity(table, id_, None if id_ is None else id_.encode(), "entities[0]", **fields)


def ids(*names: str) -> tuple[bytes, ...]:
    """Return ids as bytes."""
    return tuple(name.encode() for name in names)


def config(**changes: Any) -> ServingConfig:
    """Return settings for tests."""
    return ServingConfig(**changes)


PATHS = ApiPaths.of(core_operations(LIMITS))


def gate_of(
    admission: Admission,
    requested: Callable[[str, int], None] = lambda _route, _status: None,
    deadline_ms: float = 300.0,
) -> AdmissionGate:
    """Return the gate of an application that is tested without its service."""
    limits = replace(LIMITS, deadline_ms=deadline_ms, deadline_max_ms=deadline_ms)
    headers = HeaderReader(limits)
    lateness = DeadlineCheck(admission, headers, limits)
    return AdmissionGate(admission, headers, lateness, requested, 1 << 20, 10.0)
