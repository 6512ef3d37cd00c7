"""Samples of a build's inputs, real or drawn, on which live models are calibrated, compared and probed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.errors import BundleError, SourceError
from cache.format.item_table import ItemTable, Ordinals
from cache.model.ranking import Metric
from cache.model.tower import Histories, Inputs, Tower, row_count_of
from precompute.builds.build import Build, fetch_model, fetch_partition
from precompute.builds.reports import SampleFields
from precompute.bundles.agreement import measure_agreement, select_input_rows
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.bundles.index import exact_neighbours
from precompute.bundles.quantize import quantize_tower
from precompute.partitions.catalogue import ItemFeatures
from precompute.partitions.shard_files import PARTITION_FOLDER, read_batches, shard_paths
from precompute.partitions.shard_input import ShardInput, read_shard, scratch_folder, slice_shard
from precompute.scoring.towers import bind_inputs, computes_feature_only_users, select_usable_inputs

SAMPLE_ROWS_MAX = 512
"""Most entities on which a model is calibrated and compared."""

NAMED_USERS: Final = 2
"""Users of each table that an error on ids of different forms names."""

SAMPLE_SEED = 0
"""Seed of drawn histories; gates use another seed."""

DRAWN_USERS_MAX: Final = 512
"""Most users with drawn histories."""

DRAWN_ITEMS_MAX: Final = 50
"""Most items of a drawn history."""

GIVEN_VECTORS_MAX: Final = 8_192
"""Most users whose vectors from the sources are averaged."""

FIRST_SLICE_COUNT = 4
"""Slices of a shard that are written first: they nearly always suffice for the samples."""


class SampleTaker(Protocol):
    """Collector of a feature's sample of the users whose inputs the step reads."""

    def take(self, entities: ShardInput, usable_rows: NDArray[np.int64]) -> bool:
        """Take rows of a slice from `usable_rows`, whose inputs fit the user tower; return True if more are needed."""
        ...

    def finish(self, build: Build) -> SampleFields:
        """Write the sample; return fields of the step's report."""
        ...


def sample_inputs(
    build: Build,
    items: ItemTable,
    model: BundleModel,
    *,
    metric: Metric = "inner_product",
    sample_takers: Sequence[SampleTaker] = (),
) -> ShardInput:
    """Return the inputs of the first slice with a user that the model can use.

    If the night has no histories, they are drawn by the bundle's `metric`. Each of the `sample_takers` gets slices
    until it needs no more; takers get no drawn histories. Raises SourceError if no entity has the model's inputs.
    """
    if lacks_histories(build, model):
        return draw_histories(read_users_with_vectors(build), items, metric, seed=SAMPLE_SEED)
    sample, unfinished_takers = None, list(sample_takers)
    for entities in _read_slices(build):
        usable_rows = select_usable_inputs(items, entities, {model.name: model.spec})[0]
        if len(usable_rows):
            sample = sample or entities
        unfinished_takers = [taker for taker in unfinished_takers if taker.take(entities, usable_rows)]
        if sample is not None and not unfinished_takers:
            break
    if sample is None:
        raise SourceError(
            f"no entity of the sources has the inputs that {model.name} takes" + _id_examples_in_words(build, model)
        )
    return sample


def _id_examples_in_words(build: Build, model: BundleModel) -> str:
    """Return example users of interactions and of the feature table, whose ids may differ in form; "" without both."""
    if not build.config.sources.user_features or not model.spec.features:
        return ""
    examples_by_kind = {"ids": list[str](), "features": list[str]()}
    for shard in range(build.config.shards):
        for file_kind, examples in examples_by_kind.items():
            (path,) = shard_paths(build.root / PARTITION_FOLDER, shard, (file_kind,))
            for batch in read_batches(path, column_indexes=[0]):
                examples += batch.column("user")[:NAMED_USERS].to_pylist()
    if not all(examples_by_kind.values()):
        return ""
    interaction_examples, table_examples = (
        " and ".join(map(repr, examples[:NAMED_USERS])) for examples in examples_by_kind.values()
    )
    return (
        f": interactions have the users {interaction_examples}, {build.config.sources.user_features} has "
        f"{table_examples}. Do both use the same form of ids? See `[sources] user_column`"
    )


def sample_user_vectors(build: Build, bundle: Bundle, items: ItemTable) -> NDArray[np.float32]:
    """Return float32 [n, dims]: vectors of real users, from the sources or from the fp32 user tower (up to 512)."""
    tower = bundle.user_tower
    if lacks_histories(build, tower):
        return read_given_vectors(build)
    fetch_model(build, tower)
    inputs, _ = _user_inputs(tower, items, sample_inputs(build, items, tower))
    vectors = Tower.open(build.root / f"models/{tower.name}.fp32.onnx", tower.spec).run(inputs)
    return vectors[np.isfinite(vectors).all(axis=1)]


def read_given_vectors(build: Build) -> NDArray[np.float32]:
    """Return float32 [n, dims]: the vectors from the sources, of at most 8,192 users with the lowest hashes."""
    vectors_of_slices, vector_count = [], 0
    for entities in _read_slices(build):
        if entities.entity_vectors is not None:
            vectors_of_slices.append(entities.entity_vectors[entities.has_vector][: GIVEN_VECTORS_MAX - vector_count])
            vector_count += len(vectors_of_slices[-1])
        if vector_count >= GIVEN_VECTORS_MAX:
            break
    return np.concatenate(vectors_of_slices)


def lacks_histories(build: Build, model: BundleModel) -> bool:
    """True for a history model in a night with users' vectors and without interactions.

    Users of the feature table alone are sampled unchanged, with empty histories.
    """
    sources = build.config.sources
    return not sources.interactions and bool(sources.user_vectors) and model.spec.history is not None


def read_users_with_vectors(build: Build) -> ShardInput:
    """Return the users of the first slice with a vector from the sources; `begin` makes sure that there is one."""
    return next(entities for entities in _read_slices(build) if entities.has_vector.any())


def _read_slices(build: Build) -> Iterator[ShardInput]:
    """Yield all users by slices in hash order, which is random; the first slices need no whole shard rewritten."""
    config, folder = build.config, build.root / PARTITION_FOLDER
    for shard in range(config.shards):
        fetch_partition(build, shard)
        yielded_count = 0
        for slice_limit in (FIRST_SLICE_COUNT, None):
            with scratch_folder(folder) as scratch:
                slices = slice_shard(folder, shard, config.shards, scratch, first_slices_max=slice_limit)
                for slice_number in slices.slice_numbers[yielded_count:]:
                    yield read_shard(
                        slices.folder,
                        slice_number,
                        history_limit=config.history_limit,
                        answers_without_history=computes_feature_only_users(build),
                    )
            yielded_count = len(slices.slice_numbers)
            if yielded_count < FIRST_SLICE_COUNT:
                break


def draw_histories(entities: ShardInput, items: ItemTable, metric: Metric, *, seed: int) -> ShardInput:
    """Draw histories for at most 512 users with a vector, evenly spread: 1 to 50 of each user's 100 best items.

    Random items would not do: items of a real history are similar, and a model calibrated on means of dissimilar
    vectors would meet larger numbers than calibrated for.
    """
    rows_with_vector = np.flatnonzero(entities.has_vector)
    sample_points = np.linspace(0, len(rows_with_vector) - 1, min(DRAWN_USERS_MAX, len(rows_with_vector)))
    sampled_rows = rows_with_vector[np.unique(sample_points.astype(np.int64))]
    user_vectors = entities.entity_vectors
    assert user_vectors is not None  # noqa: S101 - some user has a vector
    rng = np.random.default_rng(seed)
    histories = [
        rng.permutation(best_ordinals)[: rng.integers(1, DRAWN_ITEMS_MAX, endpoint=True)]
        for best_ordinals in exact_neighbours(np.asarray(items.vectors), user_vectors[sampled_rows], metric)
    ]
    return ShardInput(
        entity_ids=entities.entity_ids.take(pa.array(sampled_rows)),
        entity_hashes=entities.entity_hashes[sampled_rows],
        history_indptr=np.cumsum([0, *map(len, histories)]),
        history_ordinals=np.concatenate(histories),
        features={
            feature_name: column.take(pa.array(sampled_rows)) for feature_name, column in entities.features.items()
        },
        history_limit=entities.history_limit,
        entity_vectors=user_vectors[sampled_rows],
    )


@dataclass(frozen=True, slots=True)
class LiveModel:
    """Whether a model has an int8 form, and its agreement with fp32."""

    has_int8: bool
    int8_agreement: Mapping[str, Any]


def quantize_models(
    bundle: Bundle,
    folder: Path,
    items: ItemTable,
    sample_for: Callable[[BundleModel], ShardInput],
    *,
    item_features: Mapping[str, ItemFeatures],
) -> dict[str, LiveModel]:
    """Write an int8 file for every fp32 model; a model with nothing to quantize stays fp32, with the reason reported.

    `sample_for` returns, for a user model, entities of which some have its inputs.
    """
    live_model_by_name = {}
    for model in bundle.models:
        if model.entity == "user":
            inputs, exclusions = _user_inputs(model, items, sample_for(model))
        else:
            inputs, exclusions = _item_inputs(model, items, item_features[model.name]), None
        fp32_path, int8_path = (folder / f"{model.name}.fp32.onnx", folder / f"{model.name}.int8.onnx")
        inputs, exclusions = _select_finite(Tower.open(fp32_path, model.spec), inputs, exclusions)
        try:
            quantize_tower(fp32_path, model.spec, inputs, int8_path)
        except BundleError as error:
            live_model_by_name[model.name] = LiveModel(False, {"precision": "fp32", "why": error.message})
            continue
        ranks_items = model.name == bundle.user_tower.name
        agreement_facts = measure_agreement(
            Tower.open(fp32_path, model.spec),
            Tower.open(int8_path, model.spec),
            inputs,
            np.asarray(items.vectors) if ranks_items else None,
            metric=bundle.metric,
            excluded_ordinals=exclusions if ranks_items else None,
        )
        live_model_by_name[model.name] = LiveModel(
            True,
            {
                "precision": "int8",
                **agreement_facts,
                "fp32_bytes": sum(path.stat().st_size for path, _, _ in model.files),
                "int8_bytes": int8_path.stat().st_size,
            },
        )
    return live_model_by_name


def _user_inputs(model: BundleModel, items: ItemTable, sample: ShardInput) -> tuple[Inputs, Histories]:
    usable_rows, histories, features = select_usable_inputs(items, sample, {model.name: model.spec})
    if not len(usable_rows):
        raise BundleError(f"no entity of the sample has the inputs that {model.name} takes", model=model.name)
    sampled_rows = _spread_rows(usable_rows)
    inputs = bind_inputs(
        model.spec,
        histories=histories.select_rows(sampled_rows),
        features={input_name: input_values[sampled_rows] for input_name, input_values in features[model.name].items()},
    )
    return inputs, Histories(sample.history_indptr, sample.history_ordinals).select_rows(sampled_rows)


def _item_inputs(model: BundleModel, items: ItemTable, features: ItemFeatures) -> Inputs:
    usable_ordinals = np.flatnonzero(features.usable_mask())
    if not len(usable_ordinals):
        raise BundleError(f"no item has the inputs that {model.name} takes", model=model.name)
    sampled_ordinals = _spread_rows(usable_ordinals)
    return bind_inputs(
        model.spec,
        features=features.of(sampled_ordinals)[0],
        item_indices=items.model_indices_of(Ordinals(sampled_ordinals)),
    )


def _spread_rows(row_indexes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return at most SAMPLE_ROWS_MAX of the rows, evenly spread."""
    sample_points = np.linspace(0, len(row_indexes) - 1, min(SAMPLE_ROWS_MAX, len(row_indexes)))
    return row_indexes[np.unique(sample_points.astype(np.int64))]


def _select_finite(tower: Tower, inputs: Inputs, exclusions: Histories | None) -> tuple[Inputs, Histories | None]:
    """Return the inputs without rows whose output is not finite: they get no record, so must not calibrate."""
    finite_rows = np.flatnonzero(np.isfinite(tower.run(inputs)).all(axis=1))
    if not len(finite_rows):
        raise BundleError(
            f"no output of {tower.name} is finite for any of {row_count_of(inputs):,} sampled inputs: was the model "
            "trained to its end, and are its features on the scale of the training?",
            model=tower.name,
        )
    if len(finite_rows) == row_count_of(inputs):
        return inputs, exclusions
    return select_input_rows(inputs, finite_rows), None if exclusions is None else exclusions.select_rows(finite_rows)
