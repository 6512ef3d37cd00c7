"""Inputs of the towers: histories and feature columns bound to the names that a model gives them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.errors import ConfigError
from cache.items import ItemTable, Ordinals
from cache.tower import Histories, Inputs, TowerSpec
from precompute.catalogue import to_numpy
from precompute.scoring.shard_input import ShardInput


def bind(
    spec: TowerSpec,
    *,
    histories: Histories | None = None,
    features: Mapping[str, NDArray[Any]] | None = None,
    index: NDArray[np.int64] | None = None,
) -> Inputs:
    """A tower's inputs by name; `features` are by input name already."""
    bound: dict[str, Histories | NDArray[Any]] = {}
    for each in spec.inputs:
        if each.bind == "history":
            if histories is None:
                raise ConfigError(
                    f"input {each.name!r} wants a history, which this entity does not have"
                )
            bound[each.name] = histories
        elif each.bind == "item_index":
            if index is None:
                raise ConfigError(
                    f"input {each.name!r} wants an item index, which this entity does not have"
                )
            bound[each.name] = index
        else:
            bound[each.name] = (features or {})[each.name]
    return bound


def usable_inputs(
    items: ItemTable, entities: ShardInput, specs: Mapping[str, TowerSpec]
) -> tuple[NDArray[np.int64], Histories, dict[str, dict[str, NDArray[Any]]]]:
    """(rows with every input that these models want, histories in model indices, features by model and input name).

    Two models may give one input name to different columns, so an input belongs to its model. Feature values of
    rows that are not usable mean nothing.
    """
    indices = items.to_model(Ordinals(entities.ordinals))
    known = indices >= 0
    kept = np.concatenate([np.zeros(1, np.int64), np.cumsum(known)])
    histories = Histories(kept[entities.indptr], indices[known])
    usable = np.ones(len(entities.ids), np.bool_)
    features: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in specs}
    for model, spec in specs.items():
        if spec.history is not None:
            usable &= np.diff(histories.indptr) > 0
        for each in spec.features:
            column = entities.features[str(each.column)]
            valid = np.asarray(pc.is_valid(column))
            usable &= valid
            if not valid.any():
                return np.empty(0, np.int64), histories, features
            whole = np.where(valid, np.arange(len(valid)), int(valid.argmax()))
            features[model][each.name] = to_numpy(column.take(pa.array(whole)), each)
    return np.flatnonzero(usable), histories, features
