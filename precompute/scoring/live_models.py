"""The generation's live models: each bundle model in int8 beside fp32, with the agreement measured on real inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import BundleError
from cache.format.item_table import ItemTable, Ordinals
from cache.model.tower import Histories, Inputs, Tower, rows_of
from precompute.builds.build import Build, fetch_model
from precompute.bundles.agreement import agreement, select_rows
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.bundles.quantize import quantize_tower
from precompute.partitions.item_features import ItemFeatures
from precompute.partitions.shard_input import ShardInput
from precompute.scoring.input_samples import given_vectors, lacks_histories, sample_inputs
from precompute.scoring.inputs import bind, usable_inputs

SAMPLE = 512


@dataclass(frozen=True, slots=True)
class LiveModel:
    """Int8 form of a model, if it has one, and how far that agrees with fp32."""

    int8: bool
    agreement: Mapping[str, Any]


def quantize_models(
    bundle: Bundle,
    folder: Path,
    items: ItemTable,
    sample_for: Callable[[BundleModel], ShardInput],
    *,
    item_features: Mapping[str, ItemFeatures],
) -> dict[str, LiveModel]:
    """Write an int8 file beside every fp32 one; a model with nothing to quantize stays fp32 and says so.

    `sample_for` gives a user model entities of which some have its inputs.
    """
    live_model_by_name = {}
    for model in bundle.models:
        if model.entity == "user":
            inputs, exclusions = _user_inputs(model, items, sample_for(model))
        else:
            inputs, exclusions = _item_inputs(model, items, item_features[model.name]), None
        fp32, int8 = folder / f"{model.name}.fp32.onnx", folder / f"{model.name}.int8.onnx"
        inputs, exclusions = _with_answers(Tower.open(fp32, model.spec), inputs, exclusions)
        try:
            quantize_tower(fp32, model.spec, inputs, int8)
        except BundleError as error:
            live_model_by_name[model.name] = LiveModel(
                False, {"precision": "fp32", "why": error.message}
            )
            continue
        ranks_items = model.name == bundle.user_tower.name
        facts = agreement(
            Tower.open(fp32, model.spec),
            Tower.open(int8, model.spec),
            inputs,
            np.asarray(items.vectors) if ranks_items else None,
            metric=bundle.metric,
            excluded=exclusions if ranks_items else None,
        )
        live_model_by_name[model.name] = LiveModel(
            True,
            {
                "precision": "int8",
                **facts,
                "fp32_bytes": sum(path.stat().st_size for path, _, _ in model.files),
                "int8_bytes": int8.stat().st_size,
            },
        )
    return live_model_by_name


def sample_user_vectors(build: Build, bundle: Bundle, items: ItemTable) -> NDArray[np.float32]:
    """float32 [n, dims]: vectors of real users, those they bring or up to 512 of the user tower in full precision."""
    tower = bundle.user_tower
    if lacks_histories(build, tower):
        return given_vectors(build)
    fetch_model(build, tower)
    inputs, _ = _user_inputs(tower, items, sample_inputs(build, items, tower))
    vectors = Tower.open(build.root / f"models/{tower.name}.fp32.onnx", tower.spec).run(inputs)
    return vectors[np.isfinite(vectors).all(axis=1)]


def _user_inputs(
    model: BundleModel, items: ItemTable, sample: ShardInput
) -> tuple[Inputs, Histories]:
    usable, histories, features = usable_inputs(items, sample, {model.name: model.spec})
    if not len(usable):
        raise BundleError(
            f"no entity of the sample has the inputs that {model.name} wants", model=model.name
        )
    rows = _spread(usable)
    inputs = bind(
        model.spec,
        histories=histories.select_rows(rows),
        features={name: value[rows] for name, value in features[model.name].items()},
    )
    return inputs, Histories(sample.indptr, sample.ordinals).select_rows(rows)


def _spread(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """At most SAMPLE of the rows, spread evenly."""
    sample_points = np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows)))
    return rows[np.unique(sample_points.astype(np.int64))]


def _with_answers(
    tower: Tower, inputs: Inputs, exclusions: Histories | None
) -> tuple[Inputs, Histories | None]:
    """Inputs without the rows whose output is not finite: they have no record, and calibrate nothing."""
    rows = np.flatnonzero(np.isfinite(tower.run(inputs)).all(axis=1))
    if len(rows) == rows_of(inputs):
        return inputs, exclusions
    return select_rows(inputs, rows), None if exclusions is None else exclusions.select_rows(rows)


def _item_inputs(model: BundleModel, items: ItemTable, features: ItemFeatures) -> Inputs:
    usable_ordinals = np.flatnonzero(features.usable())
    if not len(usable_ordinals):
        raise BundleError(f"no item has the inputs that {model.name} wants", model=model.name)
    rows = _spread(usable_ordinals)
    return bind(model.spec, features=features.of(rows)[0], index=items.to_model(Ordinals(rows)))
