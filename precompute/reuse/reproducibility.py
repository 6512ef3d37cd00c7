"""Reproducibility of a row in another batch: if a model's bits depend on the other rows, nothing of it is copied."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cache.format.item_table import ItemTable
from cache.model.tower import Inputs, rows_of, rows_taken
from precompute.builds.build import Build, fetch_partition
from precompute.bundles.bundle import Bundle
from precompute.partitions.shard_files import (
    HASH_COLUMN,
    PARTITION_FOLDER,
    file_kinds_in,
    read_batches,
    shard_paths,
    user_naming_kinds,
)
from precompute.partitions.shard_input import (
    ShardInput,
    read_shard,
    scratch_folder,
    write_selected_users,
)
from precompute.reuse.base import BaseGeneration
from precompute.scoring.items import item_inputs, open_item_features
from precompute.scoring.towers import (
    DeviceTower,
    bind,
    computes_featured,
    open_tower,
    usable_inputs,
)

REGROUPED_ROWS = 512
"""Rows of a sample that are computed once more in other company."""

_GROUP_SIZES = (1, 2, 3, 7, 33, 130)

_REGROUPING_SEED = 0


def is_regrouped_alike(run: Callable[[Inputs], NDArray[np.float32]], inputs: Inputs) -> bool:
    """True if the first rows have the same bits together, in another order, and in groups of several sizes.

    A model's rows must not depend on the other rows of their batch, or its records are not copied.
    """
    count = min(REGROUPED_ROWS, rows_of(inputs))
    batch_outputs = run(rows_taken(inputs, np.arange(count)))
    order = np.random.default_rng(_REGROUPING_SEED).permutation(count)
    shuffled, start = [], 0
    for size in (*_GROUP_SIZES, count):
        rows = order[start : start + size]
        if len(rows):
            shuffled.append(run(rows_taken(inputs, rows)))
        start += size
    regrouped_outputs = np.concatenate(
        [np.empty((0, *batch_outputs.shape[1:]), np.float32), *shuffled]
    )
    return regrouped_outputs.tobytes() == batch_outputs[order].tobytes()


def regrouped_alike(
    build: Build, base: BaseGeneration, bundle: Bundle, items: ItemTable, device: str | None
) -> dict[str, bool]:
    """Return by model whether its rows have the same bits in any batch, tried on real inputs on its device.

    Records are copied only of models for which that is True. It is False for one without any inputs, and for one on a
    GPU: its batches are larger than those tried here, and their size may decide the order of its sums.
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
            rows = np.flatnonzero(features.of(np.arange(min(REGROUPED_ROWS, items.count)))[1])
            inputs, _ = item_inputs(model.spec, items, features, rows)
        else:
            rows, histories, columns = usable_inputs(items, users, {model.name: model.spec})
            user_features = {name: column[rows] for name, column in columns[model.name].items()}
            inputs = bind(model.spec, histories=histories.select_rows(rows), features=user_features)
        alike_by_model[model.name] = bool(len(rows)) and is_regrouped_alike(tower.run, inputs)
    return alike_by_model


def _some_users(build: Build) -> ShardInput:
    """Return some users of the first shard, those that its files name first."""
    fetch_partition(build, 0)
    folder, shard = build.root / PARTITION_FOLDER, 0
    with scratch_folder(folder) as scratch:
        hashes = [np.empty(0, np.uint64)]
        for path in shard_paths(folder, shard, user_naming_kinds(file_kinds_in(folder, shard))):
            for batch in read_batches(path, column_indexes=[0, 1]):
                hashes.append(np.asarray(batch.column(HASH_COLUMN))[:REGROUPED_ROWS])
                break
        alone = write_selected_users(folder, shard, np.unique(np.concatenate(hashes)), scratch)
        return read_shard(
            alone,
            shard,
            history_limit=build.config.history_limit,
            answers_without_history=computes_featured(build),
        )
