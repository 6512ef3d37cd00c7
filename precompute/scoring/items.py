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
from precompute.builds.build import Build, cut_of
from precompute.builds.reports import BEGIN, ItemScores
from precompute.builds.tables import layout_of, metric_of, scored_tables
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.devices import device_for_shard
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig, TableConfig
from precompute.partitions import catalogue
from precompute.partitions.catalogue import (
    ITEM_FEATURES,
    VECTORS,
    ItemFeatures,
    open_items,
    write_item_features,
)
from precompute.partitions.digests import write_item_digests
from precompute.partitions.marks import are_marked, marks_file
from precompute.scoring.copies import CopiedVectors, ItemCopies, Prior, ShardScope
from precompute.scoring.pages import Answers, PageFile, describe_pages, encode_records, finite_rows
from precompute.scoring.scorers import Scorers, ScoringDevice
from precompute.scoring.towers import bind, run_named
from precompute.sources.features import EntityValues
from precompute.sources.unusable import NOT_FINITE, UNFIT, UnusableRows

ITEMS_AT_ONCE = 16_384
"""Items scored at once: enough for the matrix product, bounded in memory."""


def lay_out_items(
    config: NightConfig,
    bundle: Bundle,
    root: Path,
    *,
    erased: Collection[bytes],
    unusable: UnusableRows,
    prior: Prior,
    values: EntityValues,
    event_item_ids: Collection[bytes],
) -> tuple[catalogue.CatalogueFields, str | None]:
    """Write the catalogue and the columns of its features; returns its facts, and the columns' file if there is one.

    Features have the `values` that events set, also those of items that these `event_item_ids`. Vectors of the `prior`
    generation are known to be finite. An item whose vector is not is left out, and noted as an output of the item
    tower; raises SourceError where that is every item.
    """
    laid = catalogue.write_catalogue(
        config,
        bundle,
        root,
        erased=erased,
        values=values,
        event_item_ids=event_item_ids,
        unusable=unusable,
    )
    items = catalogue.open_items(root, laid)
    columns = write_item_features(
        config, bundle, items, root, values=values, event_item_ids=event_item_ids, unusable=unusable
    )
    write_item_digests(bundle, items, root)
    is_nonfinite = _not_finite(config, bundle, items, root, prior)
    source = f"outputs of {bundle.item_tower.name}"
    unusable.looked_at(source, items.count)
    if is_nonfinite.any():
        of_events = np.zeros(items.count, np.bool_)
        ordinals = items.ordinals_of(list(values))
        of_events[ordinals[ordinals >= 0]] = True
        unusable.note_rows(
            source, {NOT_FINITE: is_nonfinite}, lambda row: {"item": items.id_of(row)}, of_events
        )
        unusable.demand_some(source, f"the {source}")
        left_out = catalogue.item_texts(items).filter(pa.array(is_nonfinite))
        laid = catalogue.write_catalogue(
            config,
            bundle,
            root,
            erased=erased,
            left_out=left_out,
            values=values,
            event_item_ids=event_item_ids,
        )
        items = catalogue.open_items(root, laid)
        columns = write_item_features(
            config, bundle, items, root, values=values, event_item_ids=event_item_ids
        )
        write_item_digests(bundle, items, root)
    return laid, columns


def _not_finite(
    config: NightConfig, bundle: Bundle, items: ItemTable, root: Path, prior: Prior
) -> NDArray[np.bool_]:
    model, threads = bundle.item_tower, config.threads or usable_cores()
    kept_vectors = prior.item_vectors(bundle, items, root, device_for_shard(config.device, 0))
    tower = Tower.open(model.path, model.spec, threads=threads)
    features = ItemFeatures.open(root / catalogue.ITEM_FEATURES, model.spec, items.count)
    nonfinite_masks = [
        ~finite_rows(vectors) for vectors in embed_catalogue(tower, items, features, kept_vectors)
    ]
    return np.concatenate(nonfinite_masks)


def embed_catalogue(
    tower: AnyTower,
    items: ItemTable,
    features: ItemFeatures,
    kept_vectors: CopiedVectors | None = None,
) -> Iterator[NDArray[np.float32]]:
    """Vectors of all items in ordinal order, float32 [some, dims] at a time; `kept_vectors` are copied."""
    for rows in item_chunks(np.arange(items.count)):
        if kept_vectors is None:
            yield item_outputs(tower, items, features, rows)[0]
            continue
        base_ordinals = kept_vectors.base_ordinals[rows]
        vectors = np.asarray(kept_vectors.vectors[base_ordinals])
        if len(uncopied_rows := np.flatnonzero(base_ordinals < 0)):
            vectors[uncopied_rows] = item_outputs(tower, items, features, rows[uncopied_rows])[0]
        yield vectors


def item_outputs(
    tower: AnyTower, items: ItemTable, features: ItemFeatures, rows: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """(outputs of a model of items for some, which of them have all inputs); raises SourceError naming an item."""
    inputs, usable = item_inputs(tower.spec, items, features, rows)
    return run_named(tower, inputs, lambda row: f"item {items.id_of(rows[row])!r}"), usable


def item_inputs(
    spec: TowerSpec, items: ItemTable, features: ItemFeatures, rows: NDArray[np.int64]
) -> tuple[Inputs, NDArray[np.bool_]]:
    """(inputs of some items for a model of items, which of them have all)."""
    values, usable = features.of(rows)
    return bind(spec, features=values, index=items.to_model(Ordinals(rows))), usable


def open_item_features(build: Build, spec: TowerSpec, count: int) -> ItemFeatures:
    """Feature inputs of all items as `begin` pinned them."""
    file = build.fetch(ITEM_FEATURES) if spec.features else build.root / ITEM_FEATURES
    return ItemFeatures.open(file, spec, count)


def item_chunks(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Pieces of rows that are scored at once."""
    for start in range(0, len(rows), ITEMS_AT_ONCE):
        yield rows[start : start + ITEMS_AT_ONCE]


@dataclass(frozen=True, slots=True, eq=False)
class ItemWork:
    """State that all tables of items of one shard share; `models`, `towers` and `features` are by table of values."""

    build: Build
    bundle: Bundle
    scoring_device: ScoringDevice
    items: ItemTable
    tables: Mapping[str, TableConfig]
    allowed: Mapping[str, NDArray[np.bool_]]
    models: Mapping[str, BundleModel]
    towers: Mapping[str, AnyTower]
    features: Mapping[str, ItemFeatures]
    unusable: UnusableRows

    @classmethod
    def of(cls, build: Build, bundle: Bundle, shard: int, scorers: Scorers) -> Self:
        build.fetch(VECTORS)
        items = open_items(build.root, build.need(BEGIN), dims=bundle.dims)
        tables, scoring_device = scored_tables(build.config, bundle, "item"), scorers.at(shard)
        models = {
            name: bundle.values[str(table.value)]
            for name, table in tables.items()
            if table.kind == "value"
        }
        return cls(
            build, bundle, scoring_device, items, tables, scorers.allowed_items(build), models,
            {name: scoring_device.tower(build, model) for name, model in models.items()},
            {name: open_item_features(build, model.spec, items.count) for name, model in models.items()},
            UnusableRows(),
        )  # fmt: skip

    def records(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Records of some items of a table, computed."""
        table, items = self.tables[name], self.items
        layout = layout_of(self.bundle, table)
        if not len(rows):
            return np.empty(0, layout.dtype)
        ids = [items.raw_id(row) for row in rows.tolist()]
        item_fingerprints, has_answer = fingerprints(ids), np.ones(len(rows), np.bool_)
        vectors = np.asarray(items.vectors[rows])
        answers: Answers = vectors
        if table.kind == "item_similar":
            itself = Histories(np.arange(len(rows) + 1), rows)
            with self.scoring_device.compute_slots:
                answers = self.scoring_device.of(items, metric_of(self.bundle, table)).top(
                    vectors, table.k, itself, allowed=self.allowed.get(name),
                    threads=self.build.config.threads or None,
                )  # fmt: skip
        elif table.kind == "value":
            model = self.models[name]
            answers, usable = item_outputs(self.towers[name], items, self.features[name], rows)
            is_finite = finite_rows(answers)
            has_answer = usable & is_finite
            self._note(
                f"outputs of {model.name}", NOT_FINITE, ids, item_fingerprints, usable & ~is_finite
            )
        at = cut_of(self.build.generation)
        records, is_unfit = encode_records(layout, item_fingerprints, answers, has_answer, at)
        self._note(f"records of {name}", UNFIT, ids, item_fingerprints, is_unfit)
        return records

    def with_copies(
        self, name: str, rows: NDArray[np.int64], base_records: ItemCopies | None, first: int
    ) -> tuple[NDArray[Any], int]:
        """(records of these items, how many were copied); `first` is the first item of the shard."""
        base_positions = (
            None if base_records is None else base_records.base_positions_by_table.get(name)
        )
        if base_records is None or base_positions is None:
            return self.records(name, rows), 0
        base_positions = base_positions[rows - first]
        is_kept = base_positions >= 0
        records = np.empty(len(rows), layout_of(self.bundle, self.tables[name]).dtype)
        records[~is_kept] = self.records(name, rows[~is_kept])
        records[is_kept] = base_records.select_records(
            name, base_positions[is_kept], cut_of(self.build.generation)
        )
        copied = int(is_kept.sum())
        self.unusable.looked_at(f"records of {name}", copied)
        if name in self.models:
            self.unusable.looked_at(f"outputs of {self.models[name].name}", copied)
        return records, copied

    def _note(
        self,
        source: str,
        reason: str,
        ids: list[bytes],
        item_fingerprints: NDArray[np.uint64],
        is_unusable: NDArray[np.bool_],
    ) -> None:
        self.unusable.looked_at(source, len(ids))
        if is_unusable.any():
            of_events = None
            if self.build.config.events.enabled:
                of_events = are_marked(self.build.fetch(marks_file("item")), item_fingerprints)
            self.unusable.note_rows(
                source, {reason: is_unusable}, lambda row: {"item": ids[row].decode()}, of_events
            )


def score_items(
    build: Build,
    bundle: Bundle,
    shard: int,
    scorers: Scorers,
    progress: Progress,
    *,
    limit: int | None = None,
) -> ItemScores:
    """All item tables of one shard's hash range, or of its first `limit` items; returns the shard's report.

    Records that may be copied are not computed.
    """
    started, begin_report = time.perf_counter(), build.need(BEGIN)
    start, end = begin_report["bounds"][shard], begin_report["bounds"][shard + 1]
    end = end if limit is None else min(end, start + limit)
    work = ItemWork.of(build, bundle, shard, scorers)
    layouts = {name: layout_of(bundle, table) for name, table in work.tables.items()}
    base_records = scorers.item_copies(
        ShardScope(
            build, bundle, shard, work.tables, layouts, work.items, work.scoring_device.device,
            scorers.allowed_items,
        )
    )  # fmt: skip
    entry_by_table, copied = {}, 0
    for name in work.tables:
        file = f"tables/{name}/{shard:04d}.pages"
        with PageFile(build.path(file), layouts[name], build.config.page_bytes) as pages:
            for rows in item_chunks(np.arange(start, end)):
                records, copied_count = work.with_copies(name, rows, base_records, start)
                copied += copied_count
                pages.append(records)
                progress(f"{name} shard {shard}", int(rows[-1]) + 1 - start, end - start)
        entry_by_table[name] = describe_pages(build, pages)
    return {
        "scored": end - start,
        "copied": copied,
        "seconds": {"all": time.perf_counter() - started},
        "tables": entry_by_table,
        "unusable": work.unusable.to_json(),
    }
