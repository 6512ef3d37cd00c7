"""Work on the users of one shard: its chunks, their shared state, and the stages for towers and for lists."""

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
from cache.topk.flat import TopLists
from cache.topk.topk import AnyScorer
from precompute.builds.build import Build, fetch_partition
from precompute.builds.reports import BEGIN_REPORT
from precompute.builds.tables import layout_of, metric_of, scored_tables
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.settings import TableConfig
from precompute.partitions.catalogue import ITEM_VECTORS_FILE, open_items
from precompute.partitions.marks import marked_mask, marks_file_path
from precompute.scoring.copies import REASON_NAMES, CopiedUsers, PublishedInputs, ShardScope, UserCopies
from precompute.scoring.pages import find_finite_rows
from precompute.scoring.scorers import Scorers, ScoringDevice
from precompute.scoring.towers import bind_inputs, run_named
from precompute.sources.columns import text_hashes
from precompute.sources.unusable import NOT_FINITE_REASON, RowCase, UnusableRows

CHUNK_USERS = 16_384
"""Users scored at once: enough for an efficient matrix product."""

CHUNK_BYTES = 32 << 20
"""Most bytes of a chunk's results on the processor."""

CORES_PER_WORKER, WORKERS_MAX = 5, 4
"""A stage that works on chunks in parallel has a thread per CORES_PER_WORKER cores, at most WORKERS_MAX."""

CHUNKS_MAX = 7 + 2 * WORKERS_MAX + 2
"""Most chunks of a shard in progress: two being read, two compared, twice `workers` computed or waiting, one in each
thread that passes chunks on and in the writing one; and the records of two that wait for checksums."""

PARALLEL_STAGES = ("tower", "records")
"""Stages that run in several threads."""

DEVICE_CHUNK_FACTOR = 4
"""Factor of a chunk's users and bytes on a device, which is idle before a chunk's first product and after its last."""


@dataclass(slots=True, eq=False)
class Chunk:
    """Some users in hash order, on their way from the partition to the pages."""

    user_ids: Any
    """Arrow strings."""
    user_hashes: NDArray[np.uint64]
    histories: Histories
    features_by_model: Mapping[str, Mapping[str, NDArray[Any]]]
    is_usable_by_model: Mapping[str, NDArray[np.bool_]]
    """Mask of users with every input of the model; the others get no answer from it."""
    published_inputs: PublishedInputs
    """Inputs of the users that the generation publishes; `seen_items` is set even if nothing is published."""
    copied_users: CopiedUsers
    """Positions of these users among all users of their hash range, and the users whose records are copied."""
    entities_so_far: int = 0
    """Entities of the shard up to the end of this chunk, including those without input."""
    shard_entity_count: int = 0
    """Entities of the shard: exact in its last slice, else an estimate."""
    user_vectors: NDArray[np.float32] | None = None
    """Vectors [users, dims] from the sources, a row of NaN for a user without one."""
    user_fingerprints: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    outputs_by_model: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    is_answered_by_model: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Mask of users with a finite output of the model."""
    lists_by_table: dict[str, TopLists] = field(default_factory=dict)
    records_by_table: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Records of all users of the chunk's range by table, including copied ones, in hash order."""
    short_list_count: int = 0
    """Lists with fewer items than possible."""
    unusable: UnusableRows = field(default_factory=UnusableRows)
    """Unusable rows of this chunk: chunks are processed in parallel, but reports name the first cases in hash order."""

    @property
    def seen_items(self) -> Histories:
        """Items in the users' histories, which are excluded from their lists."""
        return self.published_inputs.seen_items

    def user_case(self, row_index: int) -> RowCase:
        """Return the fields that name a user in a report."""
        return {"user": self.user_ids[row_index].as_py()}

    def stay(self, stay_mask: NDArray[np.bool_]) -> None:
        """Remove the users in the mask from the chunk's own users, since their records are copied after all."""
        remaining_rows = np.flatnonzero(~stay_mask)
        self.copied_users.stay(stay_mask)
        self.user_ids = self.user_ids.take(pa.array(remaining_rows))
        self.user_hashes, self.user_fingerprints = (
            self.user_hashes[remaining_rows],
            self.user_fingerprints[remaining_rows],
        )
        self.histories, self.published_inputs = (
            self.histories.select_rows(remaining_rows),
            self.published_inputs.select_rows(remaining_rows),
        )
        self.is_usable_by_model = {
            model_name: mask[remaining_rows] for model_name, mask in self.is_usable_by_model.items()
        }
        self.features_by_model = {
            model: {input_name: column[remaining_rows] for input_name, column in columns.items()}
            for model, columns in self.features_by_model.items()
        }
        self.outputs_by_model = {
            model_name: outputs[remaining_rows] for model_name, outputs in self.outputs_by_model.items()
        }
        self.is_answered_by_model = {
            model_name: mask[remaining_rows] for model_name, mask in self.is_answered_by_model.items()
        }
        if self.user_vectors is not None:
            self.user_vectors = self.user_vectors[remaining_rows]

    def replace_given_vectors(self) -> None:
        """Replace the user tower's outputs by the vectors from the sources, for users that have one."""
        if self.user_vectors is None:
            return
        has_vector = ~np.isnan(self.user_vectors[:, 0])
        tower_outputs = self.outputs_by_model["user_tower"]
        self.outputs_by_model["user_tower"] = np.where(has_vector[:, None], self.user_vectors, tower_outputs)
        self.is_answered_by_model["user_tower"] |= has_vector
        self.user_vectors = None


@dataclass(frozen=True, slots=True, eq=False)
class ShardWork:
    """State that all chunks of one shard share."""

    build: Build
    shard: int
    items: ItemTable
    tables: Mapping[str, TableConfig]
    layout_by_table: Mapping[str, Layout]
    models: Mapping[str, BundleModel]
    bundle: Bundle
    scoring_device: ScoringDevice
    seconds_by_stage: dict[str, float]
    count_by_name: dict[str, int]
    unusable: UnusableRows
    allowed_masks: Mapping[str, NDArray[np.bool_]]
    """Mask bool [items] of the items allowed in a table's lists; a table without a mask lists all items."""
    user_copies: UserCopies | None = None
    """Records that may be copied; None: all records are computed."""
    seconds_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a thread adds to `seconds_by_stage`."""

    @classmethod
    def of(cls, build: Build, bundle: Bundle, shard: int, scorers: Scorers) -> "ShardWork":
        fetch_partition(build, shard)
        build.fetch(ITEM_VECTORS_FILE)
        begin_report, scoring_device = build.need_report(BEGIN_REPORT), scorers.device_of_shard(shard)
        tables = scored_tables(build.config, bundle, "user")
        value_names = {str(table.value) for table in tables.values() if table.kind == "value"}
        models = {
            "user_tower": bundle.user_tower,
            **{value_name: bundle.value_models[value_name] for value_name in value_names},
        }
        items = open_items(build.root, begin_report, dims=bundle.dims)
        layouts = {table_name: layout_of(bundle, table) for table_name, table in tables.items()}
        scope = ShardScope(
            build, bundle, shard, tables, layouts, items, scoring_device.device,
            scorers.allowed_items,
        )  # fmt: skip
        return cls(
            build=build,
            shard=shard,
            items=items,
            tables=tables,
            layout_by_table=layouts,
            models=models,
            bundle=bundle,
            scoring_device=scoring_device,
            seconds_by_stage=dict.fromkeys(("read", "tower", "topk", "records", "write"), 0.0),
            count_by_name=dict.fromkeys(("entities", "scored", "short", "seen", "given", *REASON_NAMES), 0),
            unusable=UnusableRows(),
            allowed_masks=scorers.allowed_items(build),
            user_copies=scorers.user_copies(scope),
        )

    @property
    def chunk_users(self) -> int:
        """Number of users in a chunk: at most CHUNK_USERS, fewer if their results would exceed CHUNK_BYTES.

        DEVICE_CHUNK_FACTOR times as many on a device.
        """
        user_bytes = 4 * self.bundle.dims + self.record_bytes
        device_factor = 1 if self.scoring_device.device is None else DEVICE_CHUNK_FACTOR
        return max(1, device_factor * min(CHUNK_USERS, CHUNK_BYTES // user_bytes))

    def pages_path(self, table_name: str) -> str:
        return f"tables/{table_name}/{self.shard:04d}.pages"

    @contextmanager
    def add_stage_time(self, stage_name: str) -> Iterator[None]:
        """Add the duration of the block to a stage's time, divided by the number of threads for a parallel stage."""
        start_s = time.perf_counter()
        yield
        seconds = (time.perf_counter() - start_s) / (self.worker_count if stage_name in PARALLEL_STAGES else 1)
        with self.seconds_lock:
            self.seconds_by_stage[stage_name] += seconds

    @property
    def worker_count(self) -> int:
        """Number of threads that run the towers on this shard's chunks, and of those that encode records."""
        cores = self.build.config.threads or usable_cores()
        return max(1, min(WORKERS_MAX, cores // CORES_PER_WORKER))

    @property
    def record_bytes(self) -> int:
        """Bytes of one user's records."""
        return sum(layout.size_bytes for layout in self.layout_by_table.values())

    def open_towers_first(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks; the towers are opened while the first chunk is read."""
        self._towers()
        yield from chunks

    def add_tower_outputs(self, chunk: Chunk) -> Chunk:
        """Add the towers' outputs to a chunk and drop its features, which no later stage needs."""
        chunk.user_fingerprints = text_hashes(chunk.user_ids, FINGERPRINT_SEED)
        with self.add_stage_time("tower"):
            towers = self._towers()
            all_users_mask = np.ones(len(chunk.user_ids), np.bool_)
            chunk.outputs_by_model["user_tower"] = self._outputs(chunk, "user_tower", all_users_mask)
            chunk.replace_given_vectors()
            if self.user_copies is not None and chunk.copied_users.could_stay.any():
                self._drop_copied_users(chunk, self.user_copies)
            for model_name in towers:
                if model_name != "user_tower":
                    is_wanted = (
                        chunk.copied_users.unchanged_positions < 0
                        if self._copies_all_tables(model_name)
                        else all_users_mask
                    )
                    chunk.outputs_by_model[model_name] = self._outputs(chunk, model_name, is_wanted)
        chunk.features_by_model = {}
        return chunk

    def _copies_all_tables(self, model_name: str) -> bool:
        """True if the records of all tables of this value model can be copied for users with unchanged inputs."""
        tables = [table_name for table_name, table in self.tables.items() if table.value == model_name]
        return self.user_copies is not None and set(self.user_copies.table_names) >= set(tables)

    def _drop_copied_users(self, chunk: Chunk, copies: UserCopies) -> None:
        """Mark users as copied whose inputs and lists are unchanged and whose lists no item can enter."""
        candidate_rows = np.flatnonzero(chunk.copied_users.could_stay)
        vectors, exclusions = (
            chunk.outputs_by_model["user_tower"][candidate_rows],
            chunk.seen_items.select_rows(candidate_rows),
        )
        has_entering_item = np.zeros(len(candidate_rows), np.bool_)
        for table_name in copies.list_table_names:
            has_entering_item |= copies.entered_lists_mask(
                table_name, chunk.copied_users.unchanged_positions[candidate_rows], vectors, exclusions
            )
        is_copied = np.zeros(len(chunk.user_ids), np.bool_)
        is_copied[candidate_rows[~has_entering_item]] = True
        for model_name in self.models:
            if model_name != "user_tower":
                chunk.unusable.count_checked(f"outputs of {model_name}", int(is_copied.sum()))
        chunk.stay(is_copied)

    def _outputs(self, chunk: Chunk, model_name: str, is_wanted: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return float32 [users, dims], NaN for users without inputs or not wanted; note other non-finite rows."""
        tower = self._towers()[model_name]
        is_usable, features = (
            chunk.is_usable_by_model[model_name] & is_wanted,
            chunk.features_by_model.get(model_name, {}),
        )
        usable_rows = np.flatnonzero(is_usable)

        def row_in_words(row_index: int) -> str:
            return f"user {chunk.user_case(int(usable_rows[row_index]))['user']!r}"

        if is_usable.all() and len(is_usable):
            inputs = bind_inputs(tower.spec, histories=chunk.histories, features=features)
            outputs = run_named(tower, inputs, row_in_words)
        else:
            row_features = {input_name: input_values[usable_rows] for input_name, input_values in features.items()}
            outputs = np.full((len(is_usable), tower.spec.output_dims), np.nan, np.float32)
            if len(usable_rows):
                row_histories = chunk.histories.select_rows(usable_rows)
                inputs = bind_inputs(tower.spec, histories=row_histories, features=row_features)
                outputs[usable_rows] = run_named(tower, inputs, row_in_words)
        chunk.unusable.count_checked(f"outputs of {model_name}", int((chunk.is_usable_by_model[model_name]).sum()))
        chunk.is_answered_by_model[model_name] = find_finite_rows(outputs)
        if (is_nonfinite := ~chunk.is_answered_by_model[model_name] & is_usable).any():
            is_set_by_events = self.are_set_by_events(chunk)
            chunk.unusable.note_rows(
                f"outputs of {model_name}", {NOT_FINITE_REASON: is_nonfinite}, chunk.user_case, is_set_by_events
            )
        return outputs

    def are_set_by_events(self, chunk: Chunk) -> NDArray[np.bool_]:
        """Return the mask of a chunk's users for whom events set an input of a model, bool [users]."""
        if not self.build.config.events.enabled:
            return np.zeros(len(chunk.user_ids), np.bool_)
        return marked_mask(self.build.fetch(marks_file_path("user")), chunk.user_fingerprints)

    def _towers(self) -> dict[str, AnyTower]:
        return {model_name: self.scoring_device.tower(self.build, model) for model_name, model in self.models.items()}

    def score_chunks(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks with their lists; the items are prepared while the first chunk is read."""
        with self.scoring_device.compute_slots:
            self._scorers()
        yield from map(self.add_lists, chunks)

    def add_lists(self, chunk: Chunk) -> Chunk:
        """Add the lists of each table of lists to a chunk."""
        if not len(chunk.user_ids):
            return chunk
        threads = self.build.config.threads or None
        with self.scoring_device.compute_slots, self.add_stage_time("topk"):
            answered_rows = np.flatnonzero(chunk.is_answered_by_model["user_tower"])
            user_vectors, exclusions = chunk.outputs_by_model["user_tower"], chunk.seen_items
            if len(answered_rows) < len(user_vectors):
                user_vectors, exclusions = (user_vectors[answered_rows], exclusions.select_rows(answered_rows))
            for table_name, scorer in self._scorers().items():
                k, allowed_mask = self.tables[table_name].k, self.allowed_masks.get(table_name)
                lists = scorer.top(user_vectors, k, exclusions, allowed=allowed_mask, threads=threads)
                chunk.lists_by_table[table_name] = spread_lists(len(chunk.user_ids), answered_rows, lists)
        return chunk

    def _scorers(self) -> dict[str, AnyScorer]:
        return {
            table_name: self.scoring_device.of(self.items, metric_of(self.bundle, table))
            for table_name, table in self.tables.items()
            if table.kind == "user_topk"
        }

    @property
    def publishes_features(self) -> bool:
        """True if the generation publishes each user's inputs of the user tower besides the history."""
        return self.build.config.events.enabled and bool(self.bundle.user_tower.spec.features)

    @property
    def seen_files(self) -> dict[str, str]:
        """Files of the users' published inputs by name in `SeenPart`, for filters and for events."""
        config = self.build.config
        if not (config.events.enabled or config.sources.item_attributes):
            return {}
        part_names = ["ends", "items"]
        part_names += ["times"] if config.events.enabled else []
        part_names += ["feature_ends", "features"] if self.publishes_features else []
        part_names += ["brought"] if config.events.enabled and config.sources.user_vectors else []
        return {part_name: f"seen/{self.shard:04d}.{part_name}" for part_name in part_names}


def spread_lists(user_count: int, user_rows: NDArray[np.int64], lists: TopLists) -> TopLists:
    """Place the lists of the users in `user_rows` among `user_count` users; the other users' lists are empty."""
    if len(user_rows) == user_count:
        return lists
    list_length = lists[0].shape[1]
    ordinals, scores = (
        np.full((user_count, list_length), NO_ITEM, np.uint32),
        np.zeros((user_count, list_length), np.float32),
    )
    ordinals[user_rows], scores[user_rows] = lists
    return ordinals, scores
