"""Inputs of the towers: histories and feature columns bound to the names that a model gives them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import ConfigError
from cache.format.item_table import ItemTable, Ordinals
from cache.format.manifest import FEATURED_USERS
from cache.model.tower import Histories, Inputs, repeated
from cache.model.tower_spec import TowerSpec
from precompute.builds.build import Build
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig
from precompute.partitions.shard_input import ShardInput
from precompute.sources.features import demand_type, read_values
from precompute.sources.files import feature_file
from precompute.sources.readers import feature_schema


def bind(
    spec: TowerSpec,
    *,
    histories: Histories | None = None,
    features: Mapping[str, NDArray[Any]] | None = None,
    index: NDArray[np.int64] | None = None,
) -> Inputs:
    """A tower's inputs by name; `features` are by input name already."""
    bound: dict[str, Histories | NDArray[Any]] = {}
    for input_spec in spec.inputs:
        if input_spec.bind == "history":
            if histories is None:
                raise ConfigError(
                    f"input {input_spec.name!r} wants a history, which this entity does not have"
                )
            bound[input_spec.name] = histories
        elif input_spec.bind == "item_index":
            if index is None:
                raise ConfigError(
                    f"input {input_spec.name!r} wants an item index, which this entity does not have"
                )
            bound[input_spec.name] = index
        else:
            bound[input_spec.name] = (features or {})[input_spec.name]
    return bound


def demand_feature_types(config: NightConfig, bundle: Bundle) -> None:
    """Raises SourceError for the first feature column that is not there, or whose type an input cannot be read from."""
    for model in bundle.models:
        for feature in model.spec.features:
            path = feature_file(config, model.entity, str(feature.column))
            kind = feature_schema(path, (str(feature.column),)).field(str(feature.column)).type
            demand_type(kind, feature, f"{path}, for {model.name}")


def computes_featured(build: Build) -> bool:
    """True if the night computes users whom the feature table alone names; its `begin` decided."""
    return bool(build.need("begin").get(FEATURED_USERS, False))


Features = dict[str, dict[str, NDArray[Any]]]
"""Features by model and input name: two models may give one input name to different columns."""


def inputs_of(
    items: ItemTable, entities: ShardInput, specs: Mapping[str, TowerSpec]
) -> tuple[dict[str, NDArray[np.bool_]], Histories, Features]:
    """(which rows have every input of each model, histories in model indices, features).

    Feature values of rows that are not usable mean nothing.
    """
    indices = items.to_model(Ordinals(entities.ordinals))
    is_usable_item = (indices >= 0) & _recent(entities)
    running_counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_usable_item)])
    histories = Histories(running_counts[entities.indptr], indices[is_usable_item])
    usable: dict[str, NDArray[np.bool_]] = {}
    features: Features = {name: {} for name in specs}
    for model, spec in specs.items():
        usable[model] = np.ones(len(entities.ids), np.bool_)
        if spec.history is not None and not (entities.answers_without_history and spec.features):
            usable[model] &= np.diff(histories.indptr) > 0
        for feature in spec.features:
            values = read_values(entities.features[str(feature.column)], feature)
            usable[model] &= values.usable
            features[model][feature.name] = values.numbers
    return usable, histories, features


def usable_inputs(
    items: ItemTable, entities: ShardInput, specs: Mapping[str, TowerSpec]
) -> tuple[NDArray[np.int64], Histories, Features]:
    """(rows with every input of all these models, the rest as `inputs_of`)."""
    usable, histories, features = inputs_of(items, entities, specs)
    rows = np.logical_and.reduce([np.ones(len(entities.ids), np.bool_), *usable.values()])
    return np.flatnonzero(rows), histories, features


def _recent(entities: ShardInput) -> NDArray[np.bool_]:
    """Mask of the history items that are new enough to be given to a model, bool [len(ordinals)]."""
    lengths = np.diff(entities.indptr)
    from_end = repeated(entities.indptr[1:], lengths) - np.arange(len(entities.ordinals))
    return np.asarray(from_end <= entities.history_limit, np.bool_)
