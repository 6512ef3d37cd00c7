"""Samples of a build's real inputs: what towers are calibrated, compared and probed with."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.format.item_table import ItemTable
from cache.model.input_sample import USERS_MAX, probe_part
from cache.model.ranking import Metric
from precompute.builds.build import Build, fetch_partition
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.device.towers import DeviceTower
from precompute.partitions.shard_files import (
    HASH,
    PARTITION,
    kinds_in,
    naming,
    read_batches,
    shard_paths,
)
from precompute.partitions.shard_input import (
    ShardInput,
    read_shard,
    scratch_folder,
    slice_shard,
    users_alone,
)
from precompute.reuse.base import BaseGeneration
from precompute.reuse.regrouping import ROWS, is_regrouped_alike
from precompute.scoring.drawn_histories import with_drawn_histories
from precompute.scoring.inputs import bind, computes_featured, usable_inputs
from precompute.scoring.shard import item_inputs, open_item_features
from precompute.scoring.towers import open_tower

SEED = 0
"""Seed of histories that are drawn; the gates draw others."""

FIRST_SLICES = 4
"""Slices written before more of a shard is: they nearly always hold the samples that are wanted."""


def _slices(build: Build) -> Iterator[ShardInput]:
    """All users in hash order (so: at random), a slice at a time; for the first few a shard is not rewritten."""
    config, folder = build.config, build.root / PARTITION
    for shard in range(config.shards):
        fetch_partition(build, shard)
        read_count = 0
        for first in (FIRST_SLICES, None):
            with scratch_folder(folder) as scratch:
                slices = slice_shard(folder, shard, config.shards, scratch, first=first)
                for number in slices.numbers[read_count:]:
                    yield read_shard(
                        slices.folder,
                        number,
                        history_limit=config.history_limit,
                        answers_without_history=computes_featured(build),
                    )
            read_count = len(slices.numbers)
            if read_count < FIRST_SLICES:
                break


def lacks_histories(build: Build, model: BundleModel) -> bool:
    """True for a model of histories in a night where users bring vectors and nobody has a history.

    Users of the feature table alone are asked about as they are: their history is empty.
    """
    sources = build.config.sources
    return (
        not sources.interactions and bool(sources.user_vectors) and model.spec.history is not None
    )


def users_with_vectors(build: Build) -> ShardInput:
    """Users of the first slice in which any brings a vector; there is one, or `begin` had refused."""
    return next(entities for entities in _slices(build) if entities.has_vector.any())


def given_vectors(build: Build) -> NDArray[np.float32]:
    """float32 [n, dims]: vectors of all users that bring one, or of 8,192 with the lowest hashes (so: at random)."""
    parts, count = [], 0
    for entities in _slices(build):
        if entities.vectors is not None:
            parts.append(entities.vectors[entities.has_vector][: USERS_MAX - count])
            count += len(parts[-1])
        if count >= USERS_MAX:
            break
    return np.concatenate(parts)


def sample_inputs(
    build: Build, items: ItemTable, model: BundleModel, *, metric: Metric = "inner_product"
) -> ShardInput:
    """Real inputs of the first slice that holds any which the model can use; histories are drawn if nobody has one.

    `metric` is the bundle's, by which they are drawn.
    """
    if lacks_histories(build, model):
        return with_drawn_histories(users_with_vectors(build), items, metric, seed=SEED)
    for entities in _slices(build):
        if len(usable_inputs(items, entities, {model.name: model.spec})[0]):
            return entities
    raise SourceError(f"no entity of the sources has the inputs that {model.name} wants")


def probe_inputs(
    build: Build, items: ItemTable, model: BundleModel, *, metric: Metric = "inner_product"
) -> tuple[ShardInput, list[Any]]:
    """Inputs as `sample_inputs` finds them, and the parts of the probe: slice after slice, until it is full.

    Drawn histories are in no probe, and neither are users that brought a vector: their lists were not computed from
    what they did, and another answer to that would be no drift.
    """
    if lacks_histories(build, model):
        return sample_inputs(build, items, model, metric=metric), []
    sample, parts, count = None, [], 0
    for entities in _slices(build):
        usable = usable_inputs(items, entities, {model.name: model.spec})[0]
        if len(usable):
            sample = sample or entities
        rows = usable[~entities.has_vector[usable]][: USERS_MAX - count]
        if len(usable) and not len(rows):
            break  # a slice is of users at random: where one has none, there are next to none
        if len(rows):
            count += len(rows)
            parts.append(
                probe_part(
                    entities.hashes, entities.indptr, entities.ordinals, entities.features, rows
                )
            )
        if count >= USERS_MAX:
            break
    if sample is None:
        raise SourceError(f"no entity of the sources has the inputs that {model.name} wants")
    return sample, parts


def regrouped_alike(
    build: Build, base: BaseGeneration, bundle: Bundle, items: ItemTable, device: str | None
) -> dict[str, bool]:
    """By model: that its rows have the same bits beside any others, tried on real inputs where it will run.

    Nothing is copied of one that has not, nor of one that nobody has the inputs for; nor of one on a GPU: its batches
    are larger than what is tried here, and by their size it may choose how it adds.
    """
    users, alike_by_model = _some_users(build), {}
    for model in bundle.models:
        if not base.has_model(model):
            continue
        tower = open_tower(build, model, device)
        if isinstance(tower, DeviceTower):
            alike_by_model[model.name] = False
            continue
        if model.entity == "item":
            features = open_item_features(build, model.spec, items.count)
            rows = np.flatnonzero(features.of(np.arange(min(ROWS, items.count)))[1])
            inputs, _ = item_inputs(model.spec, items, features, rows)
        else:
            rows, histories, columns = usable_inputs(items, users, {model.name: model.spec})
            user_features = {name: column[rows] for name, column in columns[model.name].items()}
            inputs = bind(model.spec, histories=histories.select_rows(rows), features=user_features)
        alike_by_model[model.name] = bool(len(rows)) and is_regrouped_alike(tower.run, inputs)
    return alike_by_model


def _some_users(build: Build) -> ShardInput:
    """Some users of the first shard, those that its files name first."""
    fetch_partition(build, 0)
    folder, shard = build.root / PARTITION, 0
    with scratch_folder(folder) as scratch:
        hashes = [np.empty(0, np.uint64)]
        for path in shard_paths(folder, shard, naming(kinds_in(folder, shard))):
            for batch in read_batches(path, fields=[0, 1]):
                hashes.append(np.asarray(batch.column(HASH))[:ROWS])
                break
        alone = users_alone(folder, shard, np.unique(np.concatenate(hashes)), scratch)
        return read_shard(
            alone,
            shard,
            history_limit=build.config.history_limit,
            answers_without_history=computes_featured(build),
        )
