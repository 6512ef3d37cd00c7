"""Reproducibility of a model's rows: if the bits of a row depend on the other rows of its batch, none is copied."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cache.format.item_table import ItemTable
from cache.model.tower import Inputs, row_count_of, select_input_rows
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
from precompute.partitions.shard_input import ShardInput, read_shard, scratch_folder, write_selected_users
from precompute.reuse.base import BaseGeneration
from precompute.scoring.items import item_inputs, open_item_features
from precompute.scoring.towers import (
    DeviceTower,
    bind_inputs,
    computes_feature_only_users,
    open_tower,
    select_usable_inputs,
)

REGROUPED_ROWS = 512
"""Rows of a sample that are computed again in other batches."""

_GROUP_SIZES = (1, 2, 3, 7, 33, 130)

_REGROUPING_SEED = 0


def is_regrouped_alike(run: Callable[[Inputs], NDArray[np.float32]], inputs: Inputs) -> bool:
    """True if the first rows have the same bits together, in another order, and in groups of several sizes.

    Records of a model are copied only if its rows do not depend on the other rows of their batch.
    """
    row_count = min(REGROUPED_ROWS, row_count_of(inputs))
    batch_outputs = run(select_input_rows(inputs, np.arange(row_count)))
    shuffled_rows = np.random.default_rng(_REGROUPING_SEED).permutation(row_count)
    group_outputs, first_row = [], 0
    for group_size in (*_GROUP_SIZES, row_count):
        group_rows = shuffled_rows[first_row : first_row + group_size]
        if len(group_rows):
            group_outputs.append(run(select_input_rows(inputs, group_rows)))
        first_row += group_size
    regrouped_outputs = np.concatenate([np.empty((0, *batch_outputs.shape[1:]), np.float32), *group_outputs])
    return regrouped_outputs.tobytes() == batch_outputs[shuffled_rows].tobytes()


def find_regrouped_alike(
    build: Build, base: BaseGeneration, bundle: Bundle, items: ItemTable, device: str | None
) -> dict[str, bool]:
    """Return, for each model that the base has too, whether its rows have the same bits in any batch.

    Tried on real inputs, on the model's device. Records are copied only from models with True. It is False for a model
    without usable inputs in the sample, and on a GPU: batches there are larger than those tried here, and their size
    may decide the order of sums.
    """
    sample_users, alike_by_model = _read_sample_users(build), {}
    for model in bundle.models:
        if not base.has_model(model):
            continue
        tower = open_tower(build, model, device)
        if isinstance(tower, DeviceTower):
            alike_by_model[model.name] = False
            continue
        if model.entity == "item":
            features = open_item_features(build, model.spec, items.count)
            usable_rows = np.flatnonzero(features.of(np.arange(min(REGROUPED_ROWS, items.count)))[1])
            inputs, _ = item_inputs(model.spec, items, features, usable_rows)
        else:
            usable_rows, histories, columns = select_usable_inputs(items, sample_users, {model.name: model.spec})
            user_features = {
                input_name: input_values[usable_rows] for input_name, input_values in columns[model.name].items()
            }
            inputs = bind_inputs(model.spec, histories=histories.select_rows(usable_rows), features=user_features)
        alike_by_model[model.name] = bool(len(usable_rows)) and is_regrouped_alike(tower.run, inputs)
    return alike_by_model


def _read_sample_users(build: Build) -> ShardInput:
    """Return the inputs of some users of the first shard: those that come first in its files."""
    fetch_partition(build, 0)
    folder, shard = build.root / PARTITION_FOLDER, 0
    with scratch_folder(folder) as scratch:
        hash_arrays = [np.empty(0, np.uint64)]
        for path in shard_paths(folder, shard, user_naming_kinds(file_kinds_in(folder, shard))):
            for batch in read_batches(path, column_indexes=[0, 1]):
                hash_arrays.append(np.asarray(batch.column(HASH_COLUMN))[:REGROUPED_ROWS])
                break
        sample_folder = write_selected_users(folder, shard, np.unique(np.concatenate(hash_arrays)), scratch)
        return read_shard(
            sample_folder,
            shard,
            history_limit=build.config.history_limit,
            answers_without_history=computes_feature_only_users(build),
        )
