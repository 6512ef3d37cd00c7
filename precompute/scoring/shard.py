"""Scoring one shard: entities in hash order go through the towers and the exact top-K into pages."""

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.format.ids import fingerprints
from cache.format.item_table import ItemTable, Ordinals
from cache.model.ranking import Metric
from cache.model.tower import Histories, Inputs
from cache.model.tower_spec import TowerSpec
from precompute.builds.build import Build, cut_of, open_bundle
from precompute.builds.filtered_items import allowed_items
from precompute.builds.tables import layout_of, metric_of, scored_tables
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.devices import OFF, device_of
from precompute.config.progress import Progress
from precompute.partitions.catalogue import ITEM_FEATURES, VECTORS, open_items
from precompute.partitions.item_features import ItemFeatures
from precompute.scoring.encoding import Answers, encode, finite_rows
from precompute.scoring.inputs import bind
from precompute.scoring.tables import PageFile, sums_path
from precompute.scoring.towers import AnyTower, open_tower
from precompute.sources.unusable import NOT_FINITE, UNFIT, Unusable
from precompute.topk.topk import AnyScorer, Scorer

CHUNK = 16_384
"""Entities scored at once: enough for the matrix product, bounded in memory."""


def embed_catalogue(
    tower: AnyTower, items: ItemTable, features: ItemFeatures
) -> Iterator[NDArray[np.float32]]:
    """Vectors of all items in ordinal order, float32 [some, dims] at a time."""
    for rows in _chunks(np.arange(items.count)):
        yield tower.run(_item_inputs(tower.spec, items, rows, features.of(rows)[0]))


def open_item_features(build: Build, spec: TowerSpec, count: int) -> ItemFeatures:
    """Feature inputs of all items as `begin` pinned them."""
    file = build.fetch(ITEM_FEATURES) if spec.features else build.root / ITEM_FEATURES
    return ItemFeatures.open(file, spec, count)


class Place:
    """Device on which some shards of one build are encoded and compared: one of torch, or (None) the processor.

    Who asks for a scorer and uses it holds `turn`: several at once would only share what computes.
    """

    def __init__(self, device: str | None) -> None:
        self.device = device
        self.turn = threading.Lock()
        self._made: dict[Metric, AnyScorer] = {}
        self._towers: dict[str, AnyTower] = {}
        self._opening = threading.Lock()

    def tower(self, build: Build, model: BundleModel) -> AnyTower:
        """A model of the one build, opened when first wanted; whoever asks may run it at once."""
        with self._opening:
            if model.name not in self._towers:
                self._towers[model.name] = open_tower(build, model, self.device)
            return self._towers[model.name]

    def of(self, items: ItemTable, metric: Metric) -> AnyScorer:
        """The items, ready to be compared: made when first wanted; `items` are always those of the one build."""
        if metric not in self._made:
            self._made[metric] = self._make(items, metric)
        return self._made[metric]

    def _make(self, items: ItemTable, metric: Metric) -> AnyScorer:
        if self.device is not None:
            from precompute.device.scorer import DeviceScorer

            if (found := DeviceScorer.of(items.vectors, metric, self.device)) is not None:
                return found
        return Scorer.of(items.vectors, metric)


class Scorers:
    """State that the shards of one build share in a process: its bundle, and the places; several GPUs take turns."""

    def __init__(self, device: str = OFF) -> None:
        self._device = device
        self._places: dict[str | None, Place] = {}
        self._bundle: Bundle | None = None
        self._opening = threading.Lock()

    def bundle(self, build: Build) -> Bundle:
        """The bundle of the one build, opened when first wanted."""
        with self._opening:
            if self._bundle is None:
                self._bundle = open_bundle(build)
            return self._bundle

    def at(self, shard: int) -> Place:
        """The place of one shard, always the same."""
        device = device_of(self._device, shard)
        return self._places.setdefault(device, Place(device))


def score_items(
    build: Build,
    bundle: Bundle,
    shard: int,
    scorers: Scorers,
    progress: Progress,
    *,
    limit: int | None = None,
) -> dict[str, Any]:
    """All item tables of one shard's hash range, or of its first `limit` items; returns the shard's report."""
    begun = build.need("begin")
    build.fetch(VECTORS)
    config, items = build.config, open_items(build.root, begun, dims=bundle.dims)
    place, unusable = scorers.at(shard), Unusable()
    start, end = begun["bounds"][shard], begun["bounds"][shard + 1]
    end = end if limit is None else min(end, start + limit)
    at, started = cut_of(build.generation), time.perf_counter()
    found = {}
    tables, allowed = scored_tables(config, bundle, "item"), allowed_items(build)
    models = {
        name: bundle.values[str(table.value)]
        for name, table in tables.items()
        if table.kind == "value"
    }
    towers = {name: place.tower(build, model) for name, model in models.items()}
    features = {
        name: open_item_features(build, model.spec, items.count) for name, model in models.items()
    }
    for name, table in tables.items():
        layout, file = layout_of(bundle, table), f"tables/{name}/{shard:04d}.pages"
        with PageFile(build.path(file), layout, config.page_bytes) as pages:
            for rows in _chunks(np.arange(start, end)):
                ids = [items.raw_id(row) for row in rows.tolist()]
                marks, has_answer = fingerprints(ids), np.ones(len(rows), np.bool_)
                vectors = np.asarray(items.vectors[rows])
                answers: Answers = vectors
                if table.kind == "item_similar":
                    itself = Histories(np.arange(len(rows) + 1), rows)
                    with place.turn:
                        scorer = place.of(items, metric_of(bundle, table))
                        answers = scorer.top(
                            vectors, table.k, itself, allowed=allowed.get(name),
                            threads=config.threads or None,
                        )  # fmt: skip
                elif table.kind == "value":
                    values, usable = features[name].of(rows)
                    answers = towers[name].run(_item_inputs(models[name].spec, items, rows, values))
                    is_finite = finite_rows(answers)
                    has_answer = usable & is_finite
                    bad = usable & ~is_finite
                    _note(unusable, f"outputs of {models[name].name}", NOT_FINITE, ids, bad)
                records, bad = encode(layout, marks, answers, has_answer, at)
                _note(unusable, f"records of {name}", UNFIT, ids, bad)
                pages.append(records)
                progress(f"{name} shard {shard}", int(rows[-1]) + 1 - start, end - start)
        found[name] = described(build, file, end - start)
    return {
        "scored": end - start,
        "seconds": {"all": time.perf_counter() - started},
        "tables": found,
        "unusable": unusable.to_json(),
    }


def _item_inputs(
    spec: TowerSpec, items: ItemTable, rows: NDArray[np.int64], values: Mapping[str, NDArray[Any]]
) -> Inputs:
    return bind(spec, features=values, index=items.to_model(Ordinals(rows)))


def _note(
    unusable: Unusable, what: str, why: str, ids: list[bytes], bad: NDArray[np.bool_]
) -> None:
    unusable.looked_at(what, len(ids))
    if bad.any():
        unusable.note_rows(what, {why: bad}, lambda row: {"item": ids[row].decode()})


def described(build: Build, file: str, count: int) -> dict[str, Any]:
    """Manifest entries of a page file and its checksums."""
    sums = str(sums_path(build.root / file).relative_to(build.root))
    return {
        "count": count,
        "file": asdict(build.describe(file)),
        "sums": asdict(build.describe(sums)),
    }


def _chunks(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(rows), CHUNK):
        yield rows[start : start + CHUNK]
