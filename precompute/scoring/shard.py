"""Scoring one shard: entities in hash order go through the towers and the exact top-K into pages."""

import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.format.item_table import ItemTable, Ordinals
from cache.model.ranking import Metric
from cache.model.tower import AnyTower, Inputs
from cache.model.tower_spec import TowerSpec
from cache.topk.topk import AnyScorer, Scorer
from precompute.builds.build import Build, open_bundle
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.devices import OFF, devices, share_memory
from precompute.partitions.catalogue import ITEM_FEATURES
from precompute.partitions.item_features import ItemFeatures
from precompute.reuse.base import BaseGeneration
from precompute.reuse.items import CopiedVectors
from precompute.scoring.inputs import bind
from precompute.scoring.tables import PageFile, sums_path
from precompute.scoring.towers import open_tower, run_named

CHUNK = 16_384
"""Entities scored at once: enough for the matrix product, bounded in memory."""


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


def open_item_features(build: Build, spec: TowerSpec, count: int) -> ItemFeatures:
    """Feature inputs of all items as `begin` pinned them."""
    file = build.fetch(ITEM_FEATURES) if spec.features else build.root / ITEM_FEATURES
    return ItemFeatures.open(file, spec, count)


class ScoringDevice:
    """Device on which some shards of one build are encoded and compared: one of torch, or (None) the processor.

    Who asks for a scorer and uses it holds `compute_slots`: several at once would only share what computes. On a device
    two may: while the lists of one are copied the other's are computed.
    """

    def __init__(self, device: str | None, tasks: int = 1) -> None:
        self.device = device
        if device is not None:
            share_memory(device, tasks)
        self.compute_slots = threading.BoundedSemaphore(1 if device is None else 2)
        self._scorer_by_metric: dict[Metric, AnyScorer] = {}
        self._towers: dict[str, AnyTower] = {}
        self._opening, self._making = threading.Lock(), threading.Lock()

    def tower(self, build: Build, model: BundleModel) -> AnyTower:
        """A model of the one build, opened when first wanted; whoever asks may run it at once."""
        with self._opening:
            if model.name not in self._towers:
                self._towers[model.name] = open_tower(build, model, self.device)
            return self._towers[model.name]

    def of(self, items: ItemTable, metric: Metric) -> AnyScorer:
        """The items, ready to be compared: made when first wanted; `items` are always those of the one build."""
        with self._making:
            if metric not in self._scorer_by_metric:
                self._scorer_by_metric[metric] = self._make(items, metric)
            return self._scorer_by_metric[metric]

    def _make(self, items: ItemTable, metric: Metric) -> AnyScorer:
        if self.device is not None:
            from precompute.device.scorer import DeviceScorer

            if (device_scorer := DeviceScorer.of(items.vectors, metric, self.device)) is not None:
                return device_scorer
        return Scorer.of(items.vectors, metric)


class Scorers:
    """State that the shards of one build share in a process: its bundle, and the places, one for each GPU."""

    def __init__(self, device: str = OFF, tasks: int = 1) -> None:
        self._device = device
        self._tasks = tasks
        self._scoring_device_by_name: dict[str | None, ScoringDevice] = {}
        self._at: dict[int, str | None] = {}
        self._finished_shards: set[int] = set()
        self._bundle: Bundle | None = None
        self._bases: list[BaseGeneration | None] = []
        self._opening = threading.Lock()

    def bundle(self, build: Build) -> Bundle:
        """The bundle of the one build, opened when first wanted."""
        with self._opening:
            if self._bundle is None:
                self._bundle = open_bundle(build)
            return self._bundle

    def base(self, build: Build) -> BaseGeneration | None:
        """The base that `begin` chose for the one build, opened when first wanted."""
        with self._opening:
            if not self._bases:
                self._bases.append(BaseGeneration.open(build.config, build.need("begin")))
            return self._bases[0]

    def at(self, shard: int) -> ScoringDevice:
        """The place of one shard, always the same: at first the one with the fewest that are not done."""
        with self._opening:
            if shard not in self._at:
                busy = [
                    device
                    for assigned_shard, device in self._at.items()
                    if assigned_shard not in self._finished_shards
                ]
                device_names: tuple[str | None, ...] = devices(self._device) or (None,)
                self._at[shard] = min(device_names, key=busy.count)
            device = self._at[shard]
            if device not in self._scoring_device_by_name:
                self._scoring_device_by_name[device] = ScoringDevice(device, self._tasks)
            return self._scoring_device_by_name[device]

    def mark_finished(self, shard: int) -> None:
        """Notes that nothing of a shard is left to do."""
        with self._opening:
            self._finished_shards.add(shard)


def item_inputs(
    spec: TowerSpec, items: ItemTable, features: ItemFeatures, rows: NDArray[np.int64]
) -> tuple[Inputs, NDArray[np.bool_]]:
    """(inputs of some items for a model of items, which of them have all)."""
    values, usable = features.of(rows)
    return bind(spec, features=values, index=items.to_model(Ordinals(rows))), usable


def described(build: Build, pages: PageFile) -> dict[str, Any]:
    """Manifest entries of a finished page file of the build and its checksums."""
    file, sums = (str(path.relative_to(build.root)) for path in (pages.path, sums_path(pages.path)))
    return {
        "count": pages.count,
        "file": asdict(pages.describe(file)),
        "sums": asdict(build.describe(sums)),
    }


def item_chunks(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Pieces of rows that are scored at once."""
    for start in range(0, len(rows), CHUNK):
        yield rows[start : start + CHUNK]
