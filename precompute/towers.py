"""Running a bundle's models over many entities: what the night scores with, in fp32."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import BundleError, SourceError
from cache.items import ModelIndices
from cache.tower import Histories, InputSpec, Tower
from precompute.bundle import BundleModel

Features = Mapping[str, NDArray[Any]]
"""By column name; every array has one row per entity."""


def open_model(model: BundleModel, *, threads: int = 1) -> Tower:
    """The fp32 form of a model of a bundle."""
    return Tower.open(model.path, model.spec, threads=threads)


def embed_items(
    tower: Tower, indices: ModelIndices, features: Features | None = None
) -> NDArray[np.float32]:
    """float32 [n, dims] in the order of `indices`.

    An item that the model does not know (-1) and that has no features to go by gets the zero vector.
    """
    return run_model(tower, len(indices), indices=indices, features=features)


def embed_users(
    tower: Tower, histories: Histories, features: Features | None = None
) -> NDArray[np.float32]:
    """float32 [n, dims]; a user with an empty history and no features gets the zero vector."""
    return run_model(tower, len(histories), histories=histories, features=features)


def run_model(
    tower: Tower,
    count: int,
    *,
    histories: Histories | None = None,
    indices: ModelIndices | None = None,
    features: Features | None = None,
) -> NDArray[np.float32]:
    """Outputs float32 [count, output_dims] for `count` entities.

    Rows without any usable input are zero; raises BundleError or SourceError when an input that the
    model wants is not there at all.
    """
    spec = tower.spec
    usable = usable_rows(tower, count, histories=histories, indices=indices)
    rows = np.flatnonzero(usable)
    inputs: dict[str, Histories | NDArray[Any]] = {}
    for each in spec.inputs:
        if each.bind == "history":
            if histories is None:
                raise BundleError(f"input {each.name!r} is a history; these entities have none")
            inputs[each.name] = histories if usable.all() else histories.take(rows)
        elif each.bind == "item_index":
            if indices is None:
                raise BundleError(
                    f"input {each.name!r} is an item index; these entities are not items"
                )
            inputs[each.name] = np.asarray(indices)[rows]
        else:
            inputs[each.name] = _column(each, features)[rows]
    if usable.all():
        return tower.run(inputs)
    outputs = np.zeros((count, spec.output_dims), np.float32)
    if len(rows):
        outputs[rows] = tower.run(inputs)
    return outputs


def usable_rows(
    tower: Tower,
    count: int,
    *,
    histories: Histories | None = None,
    indices: ModelIndices | None = None,
) -> NDArray[np.bool_]:
    """bool [count]: the rows that the tower has any input for; the others have nothing to compute from."""
    binds = {each.bind for each in tower.spec.inputs}
    usable = np.ones(count, np.bool_)
    if binds == {"history"} and histories is not None:
        usable &= np.diff(histories.indptr) > 0
    if "item_index" in binds and indices is not None:
        usable &= np.asarray(indices) >= 0
    return usable


def _column(each: InputSpec, features: Features | None) -> NDArray[Any]:
    if features is None or each.column not in features:
        raise SourceError(
            f"the model takes the column {each.column!r}; the features have "
            f"{sorted(features) if features else 'no columns'}",
            column=each.column,
        )
    column = np.asarray(features[str(each.column)])
    width = column.shape[1] if column.ndim == 2 else None
    if width != each.width:
        raise SourceError(
            f"column {each.column!r} has width {width}, the model takes {each.width}",
            column=each.column,
        )
    if each.dtype == "string":
        return column.astype(object)
    if not np.can_cast(column.dtype, each.dtype, "same_kind"):
        raise SourceError(
            f"column {each.column!r} is {column.dtype}, the model takes {each.dtype}",
            column=each.column,
        )
    if each.dtype == "float32" and not np.isfinite(column).all():
        raise SourceError(f"column {each.column!r} holds a non-finite number", column=each.column)
    return column.astype(each.dtype)
