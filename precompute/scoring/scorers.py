"""Scorers: the devices on which a build's shards are encoded and compared with the items, with their shared state."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache.format.item_table import ItemTable
from cache.model.ranking import Metric
from cache.model.tower import AnyTower
from cache.topk.topk import AnyScorer, Scorer
from precompute.builds.build import Build, open_bundle
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.devices import OFF, devices, limit_gpu_memory
from precompute.scoring.copies import AllowedItemsFunction, ItemCopies, Prior, ShardScope, UserCopies
from precompute.scoring.towers import open_tower


@dataclass(frozen=True, slots=True)
class ScoringHooks:
    """Hooks of features in the scoring of one build; by default, lists are of all items and nothing is copied."""

    allowed_items: tuple[AllowedItemsFunction, ...] = ()
    open_prior: Callable[[Build], Prior] | None = None


NO_HOOKS: Final = ScoringHooks()


class ScoringDevice:
    """Device that encodes and compares some shards of one build: a torch device, or (None) the processor.

    Threads that use the device's scorer hold one of its `compute_slots`. The processor has one slot, since several uses
    would only compete for it. A GPU has two: while one's lists are copied to the host, the other's are computed.
    """

    def __init__(self, device: str | None, task_count: int = 1) -> None:
        self.device = device
        if device is not None:
            limit_gpu_memory(device, task_count)
        self.compute_slots = threading.BoundedSemaphore(1 if device is None else 2)
        self._scorer_by_metric: dict[Metric, AnyScorer] = {}
        self._towers: dict[str, AnyTower] = {}
        self._tower_lock, self._scorer_lock = threading.Lock(), threading.Lock()

    def tower(self, build: Build, model: BundleModel) -> AnyTower:
        """Return a model of the build, opened at first use; thread-safe."""
        with self._tower_lock:
            if model.name not in self._towers:
                self._towers[model.name] = open_tower(build, model, self.device)
            return self._towers[model.name]

    def of(self, items: ItemTable, metric: Metric) -> AnyScorer:
        """Return the scorer of the build's items, made at first use; thread-safe."""
        with self._scorer_lock:
            if metric not in self._scorer_by_metric:
                self._scorer_by_metric[metric] = self._make_scorer(items, metric)
            return self._scorer_by_metric[metric]

    def _make_scorer(self, items: ItemTable, metric: Metric) -> AnyScorer:
        if self.device is not None:
            from precompute.device.scorer import DeviceScorer

            if (device_scorer := DeviceScorer.of(items.vectors, metric, self.device)) is not None:
                return device_scorer
        return Scorer.of(items.vectors, metric)


class Scorers:
    """State that the shards of one build share in a process: its bundle, its base, and one device per GPU."""

    def __init__(self, device_setting: str = OFF, task_count: int = 1, hooks: ScoringHooks = NO_HOOKS) -> None:
        self._hooks = hooks
        self._device = device_setting
        self._tasks = task_count
        self._scoring_device_by_name: dict[str | None, ScoringDevice] = {}
        self._device_name_by_shard: dict[int, str | None] = {}
        self._finished_shards: set[int] = set()
        self._bundle: Bundle | None = None
        self._prior: Prior | None = None
        self._opening = threading.Lock()

    def bundle(self, build: Build) -> Bundle:
        """Return the bundle of the build, opened at first use."""
        with self._opening:
            if self._bundle is None:
                self._bundle = open_bundle(build)
            return self._bundle

    def user_copies(self, shard: ShardScope) -> UserCopies | None:
        """Return the records of the shard's users that may be copied; None if there are none."""
        prior = self._open_prior(shard.build)
        return None if prior is None else prior.user_copies(shard)

    def item_copies(self, shard: ShardScope) -> ItemCopies | None:
        """Return the records of the shard's items that may be copied; None if there are none."""
        prior = self._open_prior(shard.build)
        return None if prior is None else prior.item_copies(shard)

    def _open_prior(self, build: Build) -> Prior | None:
        with self._opening:
            if self._prior is None and self._hooks.open_prior is not None:
                self._prior = self._hooks.open_prior(build)
            return self._prior

    def allowed_items(self, build: Build) -> dict[str, NDArray[np.bool_]]:
        """Return masks of the allowed items by table."""
        return {
            table: mask
            for allowed_by_table in self._hooks.allowed_items
            for table, mask in allowed_by_table(build).items()
        }

    def device_of_shard(self, shard: int) -> ScoringDevice:
        """Return a shard's device, always the same one: at first call, the device with the fewest unfinished shards."""
        with self._opening:
            if shard not in self._device_name_by_shard:
                busy_devices = [
                    device
                    for assigned_shard, device in self._device_name_by_shard.items()
                    if assigned_shard not in self._finished_shards
                ]
                device_names: tuple[str | None, ...] = devices(self._device) or (None,)
                self._device_name_by_shard[shard] = min(device_names, key=busy_devices.count)
            device = self._device_name_by_shard[shard]
            if device not in self._scoring_device_by_name:
                self._scoring_device_by_name[device] = ScoringDevice(device, self._tasks)
            return self._scoring_device_by_name[device]

    def mark_finished(self, shard: int) -> None:
        """Record that a shard is finished."""
        with self._opening:
            self._finished_shards.add(shard)
