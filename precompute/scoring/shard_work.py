"""Work on the users of one shard: its chunks, what they share, and the stages that compute, towers and then lists."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.format.ids import FINGERPRINT_SEED
from cache.format.item_table import ItemTable
from cache.model.tower import AnyTower, Histories
from cache.process.host import usable_cores
from cache.records import NO_ITEM, Layout
from cache.topk.flat import Top
from cache.topk.topk import AnyScorer
from precompute.builds.build import Build, fetch_partition
from precompute.builds.reports import BEGIN_REPORT
from precompute.builds.tables import layout_of, metric_of, scored_tables
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.settings import TableConfig
from precompute.partitions.catalogue import ITEM_VECTORS_FILE, open_items
from precompute.partitions.marks import marked_mask, marks_file_path
from precompute.scoring.copies import (
    REASONS,
    CopiedUsers,
    PublishedInputs,
    ShardScope,
    UserCopies,
)
from precompute.scoring.pages import finite_rows
from precompute.scoring.scorers import Scorers, ScoringDevice
from precompute.scoring.towers import bind, run_named
from precompute.sources.columns import text_hashes
from precompute.sources.unusable import NOT_FINITE_REASON, RowCase, UnusableRows

CHUNK_USERS = 16_384
"""Users scored at once: enough for the matrix product."""

CHUNK_BYTES = 32 << 20
"""Bytes that the results of a chunk may take on the processor."""

CORES_OF_A_WORKER, WORKERS_MOST = 5, 4
"""A stage whose chunks are worked on side by side has at most so many threads, each for so many cores of the host."""

CHUNKS_MOST = 7 + 2 * WORKERS_MOST + 2
"""Chunks of a shard under way at most: two being read, two compared, as many in the making or waiting as there are
workers, twice, one in each thread that hands them on and the one that writes; and the records of two, unsummed."""

SIDE_BY_SIDE = ("tower", "records")
"""Stages of several threads."""

ON_DEVICE = 4
"""Chunks of a device are so many times larger, in users and bytes: it is idle before a chunk's first product and after
its last."""


@dataclass(slots=True, eq=False)
class Chunk:
    """Some users in hash order on their way from the partition to the pages."""

    ids: Any
    """Arrow strings."""
    hashes: NDArray[np.uint64]
    histories: Histories
    features: Mapping[str, Mapping[str, NDArray[Any]]]
    usable: Mapping[str, NDArray[np.bool_]]
    """Users with every input of each model; the others get no answer of it."""
    inputs: PublishedInputs
    """Inputs that the generation publishes of them; the items in their histories also where it publishes none."""
    copied: CopiedUsers
    """Places of these users among all of their hash range, and of those whose records are copied."""
    entities: int = 0
    """Entities of the shard up to the end of this chunk, those without input included."""
    total: int = 0
    """Entities of the shard: exact with its last slice, estimated before."""
    vectors: NDArray[np.float32] | None = None
    """Vectors [users, dims] from the night's source of user vectors, a row of NaN for a user without one."""
    fingerprints: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    outputs: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    answered: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Users whose output of each model is finite."""
    lists: dict[str, Top] = field(default_factory=dict)
    records: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Records of all users of the chunk's range by table, copied ones among them, in hash order."""
    short: int = 0
    """Lists with fewer items than they could have."""
    unusable: UnusableRows = field(default_factory=UnusableRows)
    """Rows that cannot be used: chunks are worked on side by side, and reports name the first in hash order."""

    @property
    def seen_items(self) -> Histories:
        """Items in the users' histories, which no list of theirs holds."""
        return self.inputs.seen_items

    def case(self, row: int) -> RowCase:
        """Name of a user as a report gives it."""
        return {"user": self.ids[row].as_py()}

    def stay(self, stay_mask: NDArray[np.bool_]) -> None:
        """Lets the users of a mask go, whose records are copied after all."""
        remaining_rows = np.flatnonzero(~stay_mask)
        self.copied.stay(stay_mask)
        self.ids = self.ids.take(pa.array(remaining_rows))
        self.hashes, self.fingerprints = (
            self.hashes[remaining_rows],
            self.fingerprints[remaining_rows],
        )
        self.histories, self.inputs = (
            self.histories.select_rows(remaining_rows),
            self.inputs.select_rows(remaining_rows),
        )
        self.usable = {name: mask[remaining_rows] for name, mask in self.usable.items()}
        self.features = {
            model: {name: column[remaining_rows] for name, column in columns.items()}
            for model, columns in self.features.items()
        }
        self.outputs = {name: outputs[remaining_rows] for name, outputs in self.outputs.items()}
        self.answered = {name: mask[remaining_rows] for name, mask in self.answered.items()}
        if self.vectors is not None:
            self.vectors = self.vectors[remaining_rows]

    def use_vectors(self) -> None:
        """Puts the vectors that the night was given in the place of the user tower's outputs."""
        if self.vectors is None:
            return
        has_vector = ~np.isnan(self.vectors[:, 0])
        tower_outputs = self.outputs["user_tower"]
        self.outputs["user_tower"] = np.where(has_vector[:, None], self.vectors, tower_outputs)
        self.answered["user_tower"] |= has_vector
        self.vectors = None


@dataclass(frozen=True, slots=True, eq=False)
class ShardWork:
    """State that all chunks of one shard share."""

    build: Build
    number: int
    items: ItemTable
    tables: Mapping[str, TableConfig]
    layouts: Mapping[str, Layout]
    models: Mapping[str, BundleModel]
    bundle: Bundle
    scoring_device: ScoringDevice
    seconds: dict[str, float]
    counts: dict[str, int]
    unusable: UnusableRows
    allowed: Mapping[str, NDArray[np.bool_]]
    """Items that the lists of some tables are of, bool [items]; all of them where a table is not named."""
    copies: UserCopies | None = None
    """Records that may be copied; None: all are computed."""
    noting: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that adds to `seconds`."""

    @classmethod
    def of(cls, build: Build, bundle: Bundle, number: int, scorers: Scorers) -> "ShardWork":
        fetch_partition(build, number)
        build.fetch(ITEM_VECTORS_FILE)
        begin_report, scoring_device = build.need_report(BEGIN_REPORT), scorers.at(number)
        tables = scored_tables(build.config, bundle, "user")
        value_names = {str(table.value) for table in tables.values() if table.kind == "value"}
        models = {
            "user_tower": bundle.user_tower,
            **{value_name: bundle.values[value_name] for value_name in value_names},
        }
        items = open_items(build.root, begin_report, dims=bundle.dims)
        layouts = {name: layout_of(bundle, table) for name, table in tables.items()}
        scope = ShardScope(
            build, bundle, number, tables, layouts, items, scoring_device.device,
            scorers.allowed_items,
        )  # fmt: skip
        return cls(
            build=build,
            number=number,
            items=items,
            tables=tables,
            layouts=layouts,
            models=models,
            bundle=bundle,
            scoring_device=scoring_device,
            seconds=dict.fromkeys(("read", "tower", "topk", "records", "write"), 0.0),
            counts=dict.fromkeys(("entities", "scored", "short", "seen", "given", *REASONS), 0),
            unusable=UnusableRows(),
            allowed=scorers.allowed_items(build),
            copies=scorers.user_copies(scope),
        )

    @property
    def chunk_users(self) -> int:
        """Number of users in a chunk: at most CHUNK_USERS, fewer where their results would exceed CHUNK_BYTES.

        On a device ON_DEVICE times as many.
        """
        width = 4 * self.bundle.dims + self.record_bytes
        times = 1 if self.scoring_device.device is None else ON_DEVICE
        return max(1, times * min(CHUNK_USERS, CHUNK_BYTES // width))

    def pages(self, table: str) -> str:
        return f"tables/{table}/{self.number:04d}.pages"

    @contextmanager
    def busy(self, stage: str) -> Iterator[None]:
        """Add up the time of a stage, of several threads their mean: its time without the others."""
        started = time.perf_counter()
        yield
        seconds = (time.perf_counter() - started) / (self.workers if stage in SIDE_BY_SIDE else 1)
        with self.noting:
            self.seconds[stage] += seconds

    @property
    def workers(self) -> int:
        """Number of threads that run the towers on this shard's chunks side by side, and of those that make records."""
        cores = self.build.config.threads or usable_cores()
        return max(1, min(WORKERS_MOST, cores // CORES_OF_A_WORKER))

    @property
    def record_bytes(self) -> int:
        """Bytes of one user's records."""
        return sum(layout.size_bytes for layout in self.layouts.values())

    def opened(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The chunks; the towers are opened while the first one is read."""
        self._towers()
        yield from chunks

    def encode(self, chunk: Chunk) -> Chunk:
        """Adds the outputs of the towers to a chunk; its features are dropped, nothing needs them after."""
        chunk.fingerprints = text_hashes(chunk.ids, FINGERPRINT_SEED)
        with self.busy("tower"):
            towers = self._towers()
            all_users_mask = np.ones(len(chunk.ids), np.bool_)
            chunk.outputs["user_tower"] = self._outputs(chunk, "user_tower", all_users_mask)
            chunk.use_vectors()
            if self.copies is not None and chunk.copied.could_stay.any():
                self._let_stay(chunk, self.copies)
            for name in towers:
                if name != "user_tower":
                    is_wanted = (
                        chunk.copied.unchanged_positions < 0
                        if self._is_kept(name)
                        else all_users_mask
                    )
                    chunk.outputs[name] = self._outputs(chunk, name, is_wanted)
        chunk.features = {}
        return chunk

    def _is_kept(self, model: str) -> bool:
        """True if the records of all tables of a model of values are copied, of whose inputs are as they were."""
        tables = [name for name, table in self.tables.items() if table.value == model]
        return self.copies is not None and set(self.copies.tables) >= set(tables)

    def _let_stay(self, chunk: Chunk, copies: UserCopies) -> None:
        """Users whose inputs and lists are as they were, and whose lists nothing can enter, are copied."""
        rows = np.flatnonzero(chunk.copied.could_stay)
        vectors, exclusions = chunk.outputs["user_tower"][rows], chunk.seen_items.select_rows(rows)
        enters = np.zeros(len(rows), np.bool_)
        for name in copies.list_tables:
            enters |= copies.enters(
                name, chunk.copied.unchanged_positions[rows], vectors, exclusions
            )
        stays = np.zeros(len(chunk.ids), np.bool_)
        stays[rows[~enters]] = True
        for name in self.models:
            if name != "user_tower":
                chunk.unusable.count_checked(f"outputs of {name}", int(stays.sum()))
        chunk.stay(stays)

    def _outputs(
        self, chunk: Chunk, name: str, is_wanted: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """Return float32 [users, dims], NaN for users without an input or not wanted; note other non-finite rows."""
        tower = self._towers()[name]
        usable, features = chunk.usable[name] & is_wanted, chunk.features.get(name, {})
        rows = np.flatnonzero(usable)

        def named(row: int) -> str:
            return f"user {chunk.case(int(rows[row]))['user']!r}"

        if usable.all() and len(usable):
            inputs = bind(tower.spec, histories=chunk.histories, features=features)
            outputs = run_named(tower, inputs, named)
        else:
            row_features = {key: values[rows] for key, values in features.items()}
            outputs = np.full((len(usable), tower.spec.output_dims), np.nan, np.float32)
            if len(rows):
                row_histories = chunk.histories.select_rows(rows)
                inputs = bind(tower.spec, histories=row_histories, features=row_features)
                outputs[rows] = run_named(tower, inputs, named)
        chunk.unusable.count_checked(f"outputs of {name}", int((chunk.usable[name]).sum()))
        chunk.answered[name] = finite_rows(outputs)
        if (is_nonfinite := ~chunk.answered[name] & usable).any():
            of_events = self.are_set_by_events(chunk)
            chunk.unusable.note_rows(
                f"outputs of {name}", {NOT_FINITE_REASON: is_nonfinite}, chunk.case, of_events
            )
        return outputs

    def are_set_by_events(self, chunk: Chunk) -> NDArray[np.bool_]:
        """Return a mask of a chunk's users for whom events set an input of a model, bool [users]."""
        if not self.build.config.events.enabled:
            return np.zeros(len(chunk.ids), np.bool_)
        return marked_mask(self.build.fetch(marks_file_path("user")), chunk.fingerprints)

    def _towers(self) -> dict[str, AnyTower]:
        return {
            name: self.scoring_device.tower(self.build, model)
            for name, model in self.models.items()
        }

    def scored(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Chunks with the lists of each table of lists; the items are made ready while the first chunk is read."""
        with self.scoring_device.compute_slots:
            self._scorers()
        yield from map(self.score, chunks)

    def score(self, chunk: Chunk) -> Chunk:
        """Adds the lists of each table of lists to a chunk."""
        if not len(chunk.ids):
            return chunk
        threads = self.build.config.threads or None
        with self.scoring_device.compute_slots, self.busy("topk"):
            rows = np.flatnonzero(chunk.answered["user_tower"])
            users, exclusions = chunk.outputs["user_tower"], chunk.seen_items
            if len(rows) < len(users):
                users, exclusions = users[rows], exclusions.select_rows(rows)
            for name, scorer in self._scorers().items():
                k, allowed = self.tables[name].k, self.allowed.get(name)
                lists = scorer.top(users, k, exclusions, allowed=allowed, threads=threads)
                chunk.lists[name] = lists_of(len(chunk.ids), rows, lists)
        return chunk

    def _scorers(self) -> dict[str, AnyScorer]:
        return {
            name: self.scoring_device.of(self.items, metric_of(self.bundle, table))
            for name, table in self.tables.items()
            if table.kind == "user_topk"
        }

    @property
    def publishes_features(self) -> bool:
        """True if the generation publishes the user tower's inputs besides the history, for each user."""
        return self.build.config.events.enabled and bool(self.bundle.user_tower.spec.features)

    @property
    def seen_files(self) -> dict[str, str]:
        """Files of the users' histories, by name in `SeenPart`: filters exclude these items, and events add to them."""
        config = self.build.config
        if not (config.events.enabled or config.sources.item_attributes):
            return {}
        parts = ["ends", "items"]
        parts += ["times"] if config.events.enabled else []
        parts += ["feature_ends", "features"] if self.publishes_features else []
        parts += ["brought"] if config.events.enabled and config.sources.user_vectors else []
        return {part: f"seen/{self.number:04d}.{part}" for part in parts}


def lists_of(count: int, rows: NDArray[np.int64], lists: Top) -> Top:
    """Spread the lists of the users in `rows` over `count` users; the lists of the others are empty."""
    if len(rows) == count:
        return lists
    k = lists[0].shape[1]
    ordinals, scores = np.full((count, k), NO_ITEM, np.uint32), np.zeros((count, k), np.float32)
    ordinals[rows], scores[rows] = lists
    return ordinals, scores
