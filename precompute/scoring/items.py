"""Items of a night: laid out as a catalogue, embedded, and scored into pages."""

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.format.ids import fingerprints
from cache.format.item_table import ItemTable, Ordinals
from cache.model.tower import AnyTower, Histories, Inputs, Tower
from cache.model.tower_spec import TowerSpec
from cache.process.host import usable_cores
from precompute.builds.build import Build, data_until_of
from precompute.builds.reports import BEGIN_REPORT, ItemScores
from precompute.builds.tables import layout_of, metric_of, scored_tables
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.devices import device_for_shard
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig, TableConfig
from precompute.partitions import catalogue
from precompute.partitions.catalogue import (
    ITEM_FEATURES_FILE,
    ITEM_VECTORS_FILE,
    ItemFeatures,
    open_items,
    write_item_features,
)
from precompute.partitions.digests import write_item_digests
from precompute.partitions.marks import marked_mask, marks_file_path
from precompute.scoring.copies import CopiedVectors, ItemCopies, Prior, ShardScope
from precompute.scoring.pages import Answers, PageFile, describe_pages, encode_records, find_finite_rows
from precompute.scoring.scorers import Scorers, ScoringDevice
from precompute.scoring.towers import bind_inputs, run_named
from precompute.sources.features import EntityValues
from precompute.sources.unusable import NOT_FINITE_REASON, PRECISION_REASON, UnusableRows

ITEMS_AT_ONCE = 16_384
"""Items scored at once: enough for an efficient matrix product, with bounded memory."""


def lay_out_items(
    config: NightConfig,
    bundle: Bundle,
    root: Path,
    *,
    erased: Collection[bytes],
    unusable: UnusableRows,
    prior: Prior,
    values_by_item: EntityValues,
    event_item_ids: Collection[bytes],
) -> tuple[catalogue.CatalogueFields, str | None]:
    """Write the catalogue and its feature columns; return its fields, and the file of columns if there is one.

    Features include the `values_by_item` that events set, also for the items of `event_item_ids`, which the table
    lacks. Items whose vector is not finite are left out and noted as outputs of the item tower; raises SourceError if
    no vector is finite. Vectors copied from the `prior` generation are known to be finite.
    """
    catalogue_fields = catalogue.write_catalogue(
        config,
        bundle,
        root,
        erased_raw_ids=erased,
        event_values=values_by_item,
        event_item_ids=event_item_ids,
        unusable=unusable,
    )
    items = catalogue.open_items(root, catalogue_fields)
    columns_file = write_item_features(
        config, bundle, items, root, event_values=values_by_item, event_item_ids=event_item_ids, unusable=unusable
    )
    write_item_digests(bundle, items, root)
    is_nonfinite = _find_nonfinite(config, bundle, items, root, prior)
    source_name = f"outputs of {bundle.item_tower.name}"
    unusable.count_checked(source_name, items.count)
    if is_nonfinite.any():
        is_set_by_events = np.zeros(items.count, np.bool_)
        ordinals = items.ordinals_of(list(values_by_item))
        is_set_by_events[ordinals[ordinals >= 0]] = True
        unusable.note_rows(
            source_name, {NOT_FINITE_REASON: is_nonfinite}, lambda row: {"item": items.id_of(row)}, is_set_by_events
        )
        unusable.demand_some(source_name, f"the {source_name}")
        left_out_ids = catalogue.item_id_texts(items).filter(pa.array(is_nonfinite))
        catalogue_fields = catalogue.write_catalogue(
            config,
            bundle,
            root,
            erased_raw_ids=erased,
            left_out_ids=left_out_ids,
            event_values=values_by_item,
            event_item_ids=event_item_ids,
        )
        items = catalogue.open_items(root, catalogue_fields)
        columns_file = write_item_features(
            config, bundle, items, root, event_values=values_by_item, event_item_ids=event_item_ids
        )
        write_item_digests(bundle, items, root)
    return catalogue_fields, columns_file


def _find_nonfinite(
    config: NightConfig, bundle: Bundle, items: ItemTable, root: Path, prior: Prior
) -> NDArray[np.bool_]:
    model, threads = bundle.item_tower, config.threads or usable_cores()
    kept_vectors = prior.item_vectors(bundle, items, root, device_for_shard(config.device, 0))
    tower = Tower.open(model.path, model.spec, threads=threads)
    features = ItemFeatures.open(root / catalogue.ITEM_FEATURES_FILE, model.spec, items.count)
    nonfinite_masks = [~find_finite_rows(vectors) for vectors in embed_catalogue(tower, items, features, kept_vectors)]
    return np.concatenate(nonfinite_masks)


def embed_catalogue(
    tower: AnyTower, items: ItemTable, features: ItemFeatures, kept_vectors: CopiedVectors | None = None
) -> Iterator[NDArray[np.float32]]:
    """Yield the vectors of all items in ordinal order, float32 [some, dims] at a time; `kept_vectors` are copied."""
    for ordinals in split_rows(np.arange(items.count)):
        if kept_vectors is None:
            yield item_outputs(tower, items, features, ordinals)[0]
            continue
        base_ordinals = kept_vectors.base_ordinals[ordinals]
        vectors = np.asarray(kept_vectors.base_vectors[base_ordinals])
        if len(uncopied_rows := np.flatnonzero(base_ordinals < 0)):
            vectors[uncopied_rows] = item_outputs(tower, items, features, ordinals[uncopied_rows])[0]
        yield vectors


def item_outputs(
    tower: AnyTower, items: ItemTable, features: ItemFeatures, item_ordinals: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return (outputs of an item model, mask of items with all inputs); raise SourceError naming an item that fails."""
    inputs, is_usable = item_inputs(tower.spec, items, features, item_ordinals)
    return run_named(tower, inputs, lambda row: f"item {items.id_of(item_ordinals[row])!r}"), is_usable


def item_inputs(
    spec: TowerSpec, items: ItemTable, features: ItemFeatures, item_ordinals: NDArray[np.int64]
) -> tuple[Inputs, NDArray[np.bool_]]:
    """Return (inputs of these items for an item model, mask of items with all inputs)."""
    features_by_input, is_usable = features.of(item_ordinals)
    return bind_inputs(
        spec, features=features_by_input, item_indices=items.model_indices_of(Ordinals(item_ordinals))
    ), is_usable


def open_item_features(build: Build, spec: TowerSpec, item_count: int) -> ItemFeatures:
    """Open the feature inputs of all items as `begin` pinned them."""
    features_path = build.fetch(ITEM_FEATURES_FILE) if spec.features else build.root / ITEM_FEATURES_FILE
    return ItemFeatures.open(features_path, spec, item_count)


def split_rows(row_indexes: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the rows in pieces of at most ITEMS_AT_ONCE."""
    for first_row in range(0, len(row_indexes), ITEMS_AT_ONCE):
        yield row_indexes[first_row : first_row + ITEMS_AT_ONCE]


@dataclass(frozen=True, slots=True, eq=False)
class ItemWork:
    """State shared by all item tables of one shard; models, towers and features are by table of values."""

    build: Build
    bundle: Bundle
    scoring_device: ScoringDevice
    items: ItemTable
    tables: Mapping[str, TableConfig]
    allowed_masks: Mapping[str, NDArray[np.bool_]]
    model_by_table: Mapping[str, BundleModel]
    tower_by_table: Mapping[str, AnyTower]
    features_by_table: Mapping[str, ItemFeatures]
    unusable: UnusableRows

    @classmethod
    def of(cls, build: Build, bundle: Bundle, shard: int, scorers: Scorers) -> Self:
        build.fetch(ITEM_VECTORS_FILE)
        items = open_items(build.root, build.need_report(BEGIN_REPORT), dims=bundle.dims)
        tables, scoring_device = scored_tables(build.config, bundle, "item"), scorers.device_of_shard(shard)
        models = {
            table_name: bundle.value_models[str(table.value)]
            for table_name, table in tables.items()
            if table.kind == "value"
        }
        return cls(
            build, bundle, scoring_device, items, tables, scorers.allowed_items(build), models,
            {table_name: scoring_device.tower(build, model) for table_name, model in models.items()},
            {table_name: open_item_features(build, model.spec, items.count) for table_name, model in models.items()},
            UnusableRows(),
        )  # fmt: skip

    def compute_records(self, table_name: str, item_ordinals: NDArray[np.int64]) -> NDArray[Any]:
        """Compute the records of these items in a table."""
        table, items = self.tables[table_name], self.items
        layout = layout_of(self.bundle, table)
        if not len(item_ordinals):
            return np.empty(0, layout.dtype)
        raw_ids = [items.raw_id(row) for row in item_ordinals.tolist()]
        item_fingerprints, has_answer = fingerprints(raw_ids), np.ones(len(item_ordinals), np.bool_)
        vectors = np.asarray(items.vectors[item_ordinals])
        answers: Answers = vectors
        if table.kind == "item_similar":
            own_items = Histories(np.arange(len(item_ordinals) + 1), item_ordinals)
            with self.scoring_device.compute_slots:
                answers = self.scoring_device.of(items, metric_of(self.bundle, table)).top(
                    vectors, table.k, own_items, allowed=self.allowed_masks.get(table_name),
                    threads=self.build.config.threads or None,
                )  # fmt: skip
        elif table.kind == "value":
            model = self.model_by_table[table_name]
            answers, is_usable = item_outputs(
                self.tower_by_table[table_name], items, self.features_by_table[table_name], item_ordinals
            )
            is_finite = find_finite_rows(answers)
            has_answer = is_usable & is_finite
            self._note(
                f"outputs of {model.name}", NOT_FINITE_REASON, raw_ids, item_fingerprints, is_usable & ~is_finite
            )
        cut_s = data_until_of(self.build.generation)
        records, is_unfit = encode_records(layout, item_fingerprints, answers, has_answer, cut_s)
        self._note(f"records of {table_name}", PRECISION_REASON, raw_ids, item_fingerprints, is_unfit)
        return records

    def records_with_copies(
        self, table_name: str, item_ordinals: NDArray[np.int64], base_records: ItemCopies | None, first_ordinal: int
    ) -> tuple[NDArray[Any], int]:
        """Return (records of these items, number of copied ones); `first_ordinal` is that of the shard's first item."""
        base_positions = None if base_records is None else base_records.base_positions_by_table.get(table_name)
        if base_records is None or base_positions is None:
            return self.compute_records(table_name, item_ordinals), 0
        base_positions = base_positions[item_ordinals - first_ordinal]
        is_kept = base_positions >= 0
        records = np.empty(len(item_ordinals), layout_of(self.bundle, self.tables[table_name]).dtype)
        records[~is_kept] = self.compute_records(table_name, item_ordinals[~is_kept])
        records[is_kept] = base_records.select_records(
            table_name, base_positions[is_kept], data_until_of(self.build.generation)
        )
        copied_count = int(is_kept.sum())
        self.unusable.count_checked(f"records of {table_name}", copied_count)
        if table_name in self.model_by_table:
            self.unusable.count_checked(f"outputs of {self.model_by_table[table_name].name}", copied_count)
        return records, copied_count

    def _note(
        self,
        source_name: str,
        reason: str,
        raw_ids: list[bytes],
        item_fingerprints: NDArray[np.uint64],
        is_unusable: NDArray[np.bool_],
    ) -> None:
        self.unusable.count_checked(source_name, len(raw_ids))
        if is_unusable.any():
            is_set_by_events = None
            if self.build.config.events.enabled:
                is_set_by_events = marked_mask(self.build.fetch(marks_file_path("item")), item_fingerprints)
            self.unusable.note_rows(
                source_name, {reason: is_unusable}, lambda row: {"item": raw_ids[row].decode()}, is_set_by_events
            )


def score_items(
    build: Build, bundle: Bundle, shard: int, scorers: Scorers, progress: Progress, *, items_max: int | None = None
) -> ItemScores:
    """Score all item tables of one shard, or its first `items_max` items; return the shard's report.

    Records that may be copied are not computed.
    """
    start_s, begin_report = time.perf_counter(), build.need_report(BEGIN_REPORT)
    first_ordinal, end_ordinal = begin_report["bounds"][shard], begin_report["bounds"][shard + 1]
    end_ordinal = end_ordinal if items_max is None else min(end_ordinal, first_ordinal + items_max)
    work = ItemWork.of(build, bundle, shard, scorers)
    layouts = {table_name: layout_of(bundle, table) for table_name, table in work.tables.items()}
    base_records = scorers.item_copies(
        ShardScope(
            build, bundle, shard, work.tables, layouts, work.items, work.scoring_device.device,
            scorers.allowed_items,
        )
    )  # fmt: skip
    entry_by_table, total_copied_count = {}, 0
    for table_name in work.tables:
        pages_file = f"tables/{table_name}/{shard:04d}.pages"
        with PageFile(build.path(pages_file), layouts[table_name], build.config.page_bytes) as pages:
            for ordinals in split_rows(np.arange(first_ordinal, end_ordinal)):
                records, copied_count = work.records_with_copies(table_name, ordinals, base_records, first_ordinal)
                total_copied_count += copied_count
                pages.append(records)
                progress(
                    f"{table_name} shard {shard}", int(ordinals[-1]) + 1 - first_ordinal, end_ordinal - first_ordinal
                )
        entry_by_table[table_name] = describe_pages(build, pages)
    return {
        "scored": end_ordinal - first_ordinal,
        "copied": total_copied_count,
        "seconds": {"all": time.perf_counter() - start_s},
        "tables": entry_by_table,
        "unusable": work.unusable.to_json(),
    }
