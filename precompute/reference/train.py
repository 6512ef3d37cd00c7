"""Training of the reference bundle: its shape chosen by held-out histories, its towers and affinities written."""

import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp
from numpy.typing import NDArray

from cache.errors import ConfigError, SourceError
from cache.model.ranking import unit_rows
from cache.model.tower import Histories
from cache.model.tower_spec import InputSpec, TowerSpec
from cache.store.erasures import all_erasures
from precompute.bundles import held_out, onnx_model
from precompute.bundles.bundle import Bundle, ModelFile, write_bundle
from precompute.bundles.bundle_store import hand_over, swap_in_folder
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig, parse_time
from precompute.reference.matrix_factorisation import (
    AlternatingShape,
    HistoryRowsAndItemVectors,
    ModelShape,
    SpectralShape,
    UserItemMatrix,
    build_matrix,
    distance_from_usual,
    first_shapes,
    shapes_by_fold,
    shapes_by_regularization,
    train_tables,
    training_shape,
)
from precompute.sources.columns import Ids, to_arrow_strings
from precompute.sources.erasures import ErasedEntities
from precompute.sources.files import source_file, source_files
from precompute.sources.plausibility import chosen_cut_in_words, demand_enough_ids, demand_several_items, demand_times
from precompute.sources.readers import feature_schema, read_features, read_interactions
from precompute.sources.vocabulary import HashedIds, NumberedIds, Vocabulary, to_string_chunks

HISTORY_MAX = 1024

AFFINITY_SHARPNESS = 8.0

AFFINITY_CLUSTERS = 16

_CLUSTER_ROUNDS = 20

UNKNOWN_CATEGORY = "unknown"
"""Category of an item without one."""

CUT_USERS_MAX = 8_000
"""Most users whose histories are cut: on Gowalla, 3,000 users chose different exponents with another seed."""

SAMPLE_INTERACTIONS_MAX = 1_500_000
"""Most interactions on which shapes are compared."""

CUT_HISTORY_ITEMS_MIN = 5
"""Fewest items of a user whose history is cut."""

DIMS_DIVISORS = (1, 2, 4, 8)
"""Divisors of the dimensions that are tried with the best training."""

HELD_OUT_ITEMS_MIN = 15_000
"""Fewest held-out items; if one random cut holds out fewer, further cuts are made."""

CUTS_MAX = 3
"""Most cuts."""

STANDARD_ERRORS_MAX = 2.0
"""Standard errors of the per-user differences within which a trial cannot distinguish two shapes."""

ALTERNATING_MARGIN = 0.06
"""Relative gain in recall that alternating vectors need over spectral ones; with less they may lose on later data."""

FEWER_DIMS_LOSS_MAX = 0.002
"""Relative loss in recall allowed to fewer dimensions: less than the trial can measure."""

InteractionArrays = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]
"""User numbers, item numbers and times, [n] each; times are None if unknown."""

RecallsByShape = dict[ModelShape, list[NDArray[np.float64]]]
"""Recall of each user, for each cut, by shape."""


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceData:
    """Interactions as user and item numbers (int64 [n] each), with `interaction_times` int64 [n] if known.

    `category_by_item` has one name per item. Texts may be Arrow strings: for a large catalogue, Python objects would
    take more memory than all other data.
    """

    user_rows: NDArray[np.int64]
    item_rows: NDArray[np.int64]
    item_ids: Sequence[str] | pa.Array
    category_by_item: Sequence[str] | pa.Array | None = None
    interaction_times: NDArray[np.int64] | None = None


def train_reference(
    config: NightConfig, *, data_until: str | None = None, progress: Progress = quiet
) -> dict[str, Any]:
    """Train on the configured interactions, and put the bundle where the night reads it.

    With a cut (`data_until`, else that of the settings), only interactions before it are used, and those without a time
    (`untimed` in the report): later ones judge the night. Raises ConfigError if there is a cut and no interaction has a
    time.
    """
    start_s = time.perf_counter()
    if not config.sources.interactions:
        raise ConfigError("sources.interactions is empty: name the files to train on")
    user_ids, numbered_item_ids, time_batches, row_count = HashedIds(), NumberedIds(), [], 0
    data_until = data_until or config.data_until
    cutoff_at = parse_time(data_until) if data_until else None
    source_paths = source_files(config.sources.interactions, Path(config.base))
    demand_times(config.sources, source_paths, data_until)
    erased = ErasedEntities.of(all_erasures(config.store()))
    interaction_batches = read_interactions(
        config.sources, Path(config.base), cutoff_at=cutoff_at, interaction_files=source_paths
    )
    for batch in map(erased.leave_out, interaction_batches):
        user_ids.add(batch.user_ids)
        numbered_item_ids.add(batch.item_ids)
        time_batches.append(batch.times_us)
        row_count += len(batch.times_us)
        progress("read interactions", row_count, 0)
    if not row_count:
        before_text = f" before {data_until}" if data_until else ""
        raise SourceError(f"the sources have no interaction to train on{before_text}")
    interaction_times = np.concatenate(time_batches)
    untimed_count = int((interaction_times == 0).sum())
    if data_until and untimed_count == row_count:
        raise ConfigError(chosen_cut_in_words(data_until))
    user_rows, user_count = user_ids.codes()
    item_rows, item_ids = numbered_item_ids.codes(), numbered_item_ids.distinct_ids
    demand_enough_ids(user_count, len(item_ids))
    categories = _read_categories(config, item_ids)
    if categories is None:
        demand_several_items(user_rows, user_count, item_rows, len(item_ids))
    is_timed = bool((interaction_times != interaction_times[0]).any())
    data = ReferenceData(user_rows, item_rows, item_ids, categories, interaction_times if is_timed else None)
    bundle_folder = config.path(config.bundle)
    staging_folder = bundle_folder.with_name(f".{bundle_folder.name}.{secrets.token_hex(4)}.part")
    try:
        reference_config = config.reference
        bundle = train(
            data, staging_folder, dims=reference_config.dims, seed=reference_config.seed,
            writes_programs=reference_config.programs,
            shape=None if reference_config.choose else SpectralShape(), progress=progress,
        )  # fmt: skip
        hand_over(config.store(), bundle)
        swap_in_folder(staging_folder, bundle_folder)
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)
    progress("train", 1, 1)
    return {
        **bundle.training,
        "bundle": str(bundle_folder),
        "digest": bundle.digest,
        "users": user_count,
        "items": len(item_ids),
        "interactions": row_count,
        "untimed": untimed_count,
        "seconds": round(time.perf_counter() - start_s, 3),
    }


def _read_categories(config: NightConfig, item_ids: Any) -> Any:
    """Return the category of each item from the item features, as Arrow strings; None without such a column."""
    sources, category_column = config.sources, config.sources.category_column
    if not sources.item_features:
        return None
    path = source_file(sources.item_features, config.path("."))
    if category_column not in feature_schema(path).names:
        return None
    vocabulary = Vocabulary.of(to_string_chunks(pa.chunked_array([item_ids])))
    assert vocabulary is not None  # noqa: S101 - each id was numbered once
    category_names, item_row_parts = NumberedIds(), [np.empty(0, np.int64)]
    for item_ids_of_batch, columns in read_features(path, sources.item_column, (category_column,)):
        category_texts = pc.fill_null(columns[category_column].cast(pa.string()), "")
        category_names.add(Ids.of(category_texts))
        item_row_parts.append(vocabulary.find_positions(item_ids_of_batch.row_texts()))
    row_category_codes, item_rows = category_names.codes(), np.concatenate(item_row_parts)
    category_codes = np.full(len(item_ids), -1, np.int64)
    matched_indexes = np.flatnonzero(item_rows >= 0)[::-1]  # reversed: of repeated rows the first one counts
    category_codes[item_rows[matched_indexes]] = row_category_codes[matched_indexes]
    category_texts = pc.fill_null(
        category_names.distinct_ids.take(pa.array(category_codes, mask=category_codes < 0)), ""
    )
    return pc.if_else(pc.equal(category_texts, ""), pa.scalar(UNKNOWN_CATEGORY, category_texts.type), category_texts)


def train(
    data: ReferenceData,
    bundle_folder: Path,
    *,
    dims: int = 256,
    seed: int = 0,
    writes_programs: bool = False,
    shape: ModelShape | None = None,
    progress: Progress = quiet,
) -> Bundle:
    """Train and write a bundle; the same data and seed give the same bytes on the same machine.

    Without `shape`, the shape is chosen (see `choose_shape`). `dims` is the maximum length of vectors; it is limited by
    the smaller side of the matrix. Repeated interactions count once. `writes_programs`: also write each model as a
    torch.export program; raises ConfigError if torch is not installed.
    """
    if not len(data.user_rows):
        raise SourceError("there are no interactions to train on")
    user_count, item_count = int(data.user_rows.max()) + 1, len(data.item_ids)
    dims = min(dims, user_count, item_count)
    rng, choice_rng = np.random.default_rng(seed).spawn(2)
    choice = (
        choose_shape(
            data.user_rows,
            data.item_rows,
            item_count,
            dims,
            choice_rng,
            times=data.interaction_times,
            progress=progress,
        )
        if shape is None
        else ShapeChoice(replace(shape, dims=dims))
    )
    matrix = build_matrix(data.user_rows, data.item_rows, (user_count, item_count))
    user_item_matrix = UserItemMatrix.of(matrix)
    [(_, (history_rows, item_vectors))] = train_tables(user_item_matrix, [choice.shape], rng)
    dims = choice.shape.dims
    centroids, labels = compute_affinities(
        item_vectors, user_item_matrix.item_degrees, data.item_ids, data.category_by_item, rng
    )
    history = InputSpec("history", "history", "int32", max_length=HISTORY_MAX, pad=item_count)
    sharpened_centroids = centroids * np.float32(AFFINITY_SHARPNESS)
    padded_history_rows = np.concatenate([history_rows, np.zeros((1, dims), np.float32)])
    program_by_model = (
        _export_programs(padded_history_rows, item_vectors, sharpened_centroids) if writes_programs else {}
    )
    return write_bundle(
        bundle_folder,
        name=f"reference-{choice.method_name}",
        version=f"1-seed{seed}",
        dims=dims,
        item_ids=data.item_ids,
        user_tower=ModelFile(
            onnx_model.history_tower(padded_history_rows),
            TowerSpec((history,), "vector", dims),
            program=program_by_model.get("user_tower"),
        ),
        item_tower=ModelFile(
            onnx_model.item_tower(item_vectors),
            TowerSpec((InputSpec("item_index", "item_index", "int32"),), "vector", dims),
            entity="item",
            program=program_by_model.get("item_tower"),
        ),
        values={
            "user_affinity": ModelFile(
                onnx_model.affinity_model(padded_history_rows, sharpened_centroids),
                TowerSpec((history,), "probabilities", len(labels)),
                labels=labels,
                program=program_by_model.get("user_affinity"),
            )
        },
        training={
            "users": user_count,
            "items": item_count,
            "interactions": int(matrix.nnz),
            "seed": seed,
            **(
                {}
                if data.interaction_times is None
                else {"trained_until": _iso_time(int(data.interaction_times.max()))}
            ),
            **choice.report_fields(),
        },
    )


def _export_programs(
    padded_history_rows: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    sharpened_centroids: NDArray[np.float32],
) -> Mapping[str, bytes]:
    try:
        from precompute.reference import exports
    except ModuleNotFoundError as error:
        raise ConfigError(
            "reference.programs needs torch: install the extra `gpu`, or set it to false", field="programs"
        ) from error
    return {
        "user_tower": exports.history_tower(padded_history_rows),
        "item_tower": exports.item_tower(item_vectors),
        "user_affinity": exports.affinity_model(padded_history_rows, sharpened_centroids),
    }


def _iso_time(microseconds: int) -> str:
    """Return the time in ISO 8601, UTC."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)).isoformat()


@dataclass(frozen=True, slots=True)
class ShapeTrial:
    """Shape with its recall@20 of held-out items."""

    shape: ModelShape
    held_out_recall: float


@dataclass(frozen=True, slots=True)
class ShapeChoice:
    """Best shape, all trials, and sizes of their data; without trials the default shape."""

    shape: ModelShape
    trials: tuple[ShapeTrial, ...] = ()
    user_count: int = 0
    cut_count: int = 0
    interaction_count: int = 0
    is_by_time: bool = False

    @property
    def held_out_recall(self) -> float | None:
        """Recall of the chosen shape; None without trials."""
        return next((trial.held_out_recall for trial in self.trials if trial.shape == self.shape), None)

    @property
    def method_name(self) -> str:
        """Name of the chosen shape's method."""
        return "spectral" if isinstance(self.shape, SpectralShape) else "alternating"

    def report_fields(self) -> dict[str, Any]:
        """Return the fields of the choice for a report."""
        return {
            "method": self.method_name,
            **asdict(self.shape),
            "recall_at_20": None if self.held_out_recall is None else round(self.held_out_recall, 4),
            "shapes_tried": len(self.trials),
            "users_held_out": self.user_count,
            "cuts": self.cut_count,
            "interactions_tried_on": self.interaction_count,
            "held_out": "latest" if self.is_by_time else "random",
        }


@dataclass(frozen=True, slots=True, eq=False)
class HoldoutCut:
    """Interactions without the held-out ones; the kept and the held-out items (`targets`) of each cut user."""

    data: UserItemMatrix
    cut_users: NDArray[np.int64]
    input_histories: Histories
    targets: Histories

    @classmethod
    def of(cls, sample: InteractionArrays, item_count: int, rng: np.random.Generator) -> Self:
        """Hold out a fifth of the items of at most CUT_USERS_MAX users."""
        user_rows, item_rows, interaction_times = sample
        # Rows are ordered by user, then by time (only the latest of a repeated pair), or randomly without times.
        if interaction_times is None:
            user_rows, item_rows = np.divmod(np.unique(user_rows * item_count + item_rows), item_count)
            item_rows = item_rows[np.lexsort((rng.permutation(len(user_rows)), user_rows))]
        else:
            interaction_order = np.lexsort((interaction_times, user_rows))[::-1]
            user_item_codes = user_rows[interaction_order] * item_count + item_rows[interaction_order]
            interaction_order = interaction_order[np.sort(np.unique(user_item_codes, return_index=True)[1])][::-1]
            user_rows, item_rows = user_rows[interaction_order], item_rows[interaction_order]
        item_counts = np.bincount(user_rows)
        eligible_users = np.flatnonzero(item_counts >= CUT_HISTORY_ITEMS_MIN)
        cut_users = np.sort(rng.choice(eligible_users, min(CUT_USERS_MAX, len(eligible_users)), replace=False))
        ends = np.cumsum(item_counts)
        is_held_out = np.zeros(len(user_rows), bool)
        for row in cut_users:
            is_held_out[ends[row] - max(1, item_counts[row] // 5) : ends[row]] = True
        matrix_shape = len(item_counts), item_count
        kept_matrix = build_matrix(user_rows[~is_held_out], item_rows[~is_held_out], matrix_shape)
        held_out_matrix = build_matrix(user_rows[is_held_out], item_rows[is_held_out], matrix_shape)
        return cls(
            UserItemMatrix.of(kept_matrix),
            cut_users,
            _rows_as_histories(kept_matrix[cut_users]),
            _rows_as_histories(held_out_matrix[cut_users]),
        )

    def measure_recalls(self, history_rows_and_vectors: HistoryRowsAndItemVectors) -> NDArray[np.float64]:
        """Return recall@20 of each user by these tables."""
        ones = np.ones(len(self.input_histories.indices), np.float32)
        histories = sp.csr_matrix(
            (ones, self.input_histories.indices, self.input_histories.indptr),
            (len(self.input_histories), self.data.item_count),
        )
        history_rows, item_vectors = history_rows_and_vectors
        return held_out.recall_by_user(
            histories @ history_rows, item_vectors, self.input_histories, self.targets, "inner_product"
        )


def choose_shape(
    user_rows: NDArray[np.int64],
    item_rows: NDArray[np.int64],
    item_count: int,
    dims: int,
    rng: np.random.Generator,
    *,
    times: NDArray[np.int64] | None = None,
    progress: Progress = quiet,
) -> ShapeChoice:
    """Choose the shape with the highest recall; `dims` is the maximum length of its vectors. Pairs and times are [n].

    A fifth of the items of some users is held out: the latest if times are known, else random ones, with several cuts
    if a cut is small. Each shape is trained on the remaining interactions and judged by recall@20 of the held-out
    items. A large data set is judged on a sample of its users.

    The search goes in stages, each for the best shape so far of both methods: exponents and weights, regularisations,
    fold-ins. The better method is then tried with fewer dimensions.
    """
    sample = sample_interactions(user_rows, item_rows, times, rng)
    cuts = [HoldoutCut.of(sample, item_count, rng)]
    if not len(cuts[0].cut_users):
        return ShapeChoice(SpectralShape(dims=dims))
    if times is None:  # the latest items can be held out only once
        further_cuts = min(CUTS_MAX, -(-HELD_OUT_ITEMS_MIN // len(cuts[0].targets.indices))) - 1
        cuts += [HoldoutCut.of(sample, item_count, rng) for _ in range(further_cuts)]
    recalls_by_shape: RecallsByShape = {}
    _try_shapes(recalls_by_shape, first_shapes(dims), cuts, rng, progress)
    for vary_shape in (shapes_by_regularization, shapes_by_fold):
        _try_shapes(
            recalls_by_shape,
            [variant for shape in _best_of_methods(recalls_by_shape) for variant in vary_shape(shape)],
            cuts,
            rng,
            progress,
        )
    spectral, alternating = _best_of_methods(recalls_by_shape)
    is_alternating_better = _mean_recall(recalls_by_shape[alternating]) > (1 + ALTERNATING_MARGIN) * _mean_recall(
        recalls_by_shape[spectral]
    )
    winning_training = training_shape(alternating if is_alternating_better else spectral)
    candidate_trainings = [
        replace(winning_training, dims=dims // divisor) for divisor in DIMS_DIVISORS if dims >= divisor
    ]
    _try_shapes(
        recalls_by_shape,
        [variant for shape in candidate_trainings for variant in shapes_by_fold(shape)],
        cuts,
        rng,
        progress,
    )
    progress("choose", 1, 1)
    trials = tuple(ShapeTrial(shape, _mean_recall(cut_recalls)) for shape, cut_recalls in recalls_by_shape.items())
    candidate_trials = [trial for trial in trials if training_shape(trial.shape) in candidate_trainings]
    recall_min = (1 - FEWER_DIMS_LOSS_MAX) * max(trial.held_out_recall for trial in candidate_trials)
    best_trial = min(
        (trial for trial in candidate_trials if trial.held_out_recall >= recall_min),
        key=lambda trial: (trial.shape.dims, -trial.held_out_recall),
    )
    user_count = len(cuts[0].cut_users)
    return ShapeChoice(best_trial.shape, trials, user_count, len(cuts), len(sample[0]), times is not None)


def _try_shapes(
    recalls_by_shape: RecallsByShape,
    shapes: Sequence[ModelShape],
    cuts: Sequence[HoldoutCut],
    rng: np.random.Generator,
    progress: Progress,
) -> None:
    """Add the recalls of shapes that were not tried yet."""
    untried_shapes = [shape for shape in shapes if shape not in recalls_by_shape]
    for cut_index, cut in enumerate(cuts):
        for tried_count, (shape, tables) in enumerate(train_tables(cut.data, untried_shapes, rng)):
            progress("choose", cut_index * len(untried_shapes) + tried_count, len(cuts) * len(untried_shapes))
            recalls_by_shape.setdefault(shape, []).append(cut.measure_recalls(tables))


def _mean_recall(recalls_by_cut: Sequence[NDArray[np.float64]]) -> float:
    return float(np.concatenate(recalls_by_cut).mean())


def _best_of_methods(recalls_by_shape: RecallsByShape) -> list[ModelShape]:
    """Return the best shape of each method, spectral before alternating."""
    return [
        _best_shape(
            {shape: cut_recalls for shape, cut_recalls in recalls_by_shape.items() if isinstance(shape, shape_class)}
        )
        for shape_class in (SpectralShape, AlternatingShape)
    ]


def _best_shape(recalls_by_shape: Mapping[ModelShape, Sequence[NDArray[np.float64]]]) -> ModelShape:
    """Return the best shape, or a shape nearer to the default whose loss the trial cannot distinguish from 0.

    That is a loss within STANDARD_ERRORS_MAX standard errors of the per-user differences.
    """
    user_recalls_by_shape = {shape: np.concatenate(cut_recalls) for shape, cut_recalls in recalls_by_shape.items()}
    best_shape = max(user_recalls_by_shape, key=lambda shape: float(user_recalls_by_shape[shape].mean()))
    tied_shapes = []
    for shape, user_recalls in user_recalls_by_shape.items():
        recall_shortfalls = user_recalls_by_shape[best_shape] - user_recalls
        if recall_shortfalls.mean() <= STANDARD_ERRORS_MAX * recall_shortfalls.std() / np.sqrt(len(recall_shortfalls)):
            tied_shapes.append(shape)
    return min(tied_shapes, key=lambda shape: (distance_from_usual(shape), -float(user_recalls_by_shape[shape].mean())))


def sample_interactions(
    user_rows: NDArray[np.int64],
    item_rows: NDArray[np.int64],
    times: NDArray[np.int64] | None,
    rng: np.random.Generator,
) -> InteractionArrays:
    """Return the interactions of random users, at most SAMPLE_INTERACTIONS_MAX, with the users renumbered."""
    if len(user_rows) <= SAMPLE_INTERACTIONS_MAX:
        return user_rows, item_rows, times
    interaction_counts = np.bincount(user_rows)
    shuffled_users = rng.permutation(len(interaction_counts))
    sampled_users = shuffled_users[np.cumsum(interaction_counts[shuffled_users]) <= SAMPLE_INTERACTIONS_MAX]
    new_number_by_user = np.full(len(interaction_counts), -1, np.int64)
    new_number_by_user[sampled_users] = np.arange(len(sampled_users))
    user_numbers = new_number_by_user[user_rows]
    sampled_rows = np.flatnonzero(user_numbers >= 0)
    return (user_numbers[sampled_rows], item_rows[sampled_rows], None if times is None else times[sampled_rows])


def _rows_as_histories(matrix: Any) -> Histories:
    return Histories(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64))


def compute_affinities(
    item_vectors: NDArray[np.float32],
    item_degrees: NDArray[np.float64],
    item_ids: Sequence[str] | pa.Array,
    categories: Sequence[str] | pa.Array | None,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Return unit centroids [n, dims] and their labels: the given categories, or clusters named by their top item."""
    directions = unit_rows(item_vectors)
    if categories is not None:
        coded_categories = pc.dictionary_encode(to_arrow_strings(categories))
        category_names, name_indexes = np.unique(
            coded_categories.dictionary.to_numpy(zero_copy_only=False).astype(str), return_inverse=True
        )
        group_by_item = name_indexes[np.asarray(coded_categories.indices)]
        zero_centroids = np.zeros((len(category_names), item_vectors.shape[1]), np.float32)
        return _compute_centroids(directions, group_by_item, len(category_names), zero_centroids), tuple(
            str(name) for name in category_names
        )
    cluster_count = min(AFFINITY_CLUSTERS, len(item_vectors))
    group_by_item = cluster_spherically(directions, cluster_count, rng)
    used_clusters = np.unique(group_by_item)
    items_by_degree = np.lexsort((np.arange(len(item_degrees)), -item_degrees))
    labels = [str(item_ids[items_by_degree[group_by_item[items_by_degree] == cluster][0]]) for cluster in used_clusters]
    zero_centroids = np.zeros((cluster_count, item_vectors.shape[1]), np.float32)
    return _compute_centroids(directions, group_by_item, cluster_count, zero_centroids)[used_clusters], tuple(labels)


def cluster_spherically(
    directions: NDArray[np.float32], cluster_count: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the cluster of each unit vector by spherical k-means (Dhillon and Modha, 2001)."""
    centres = directions[rng.choice(len(directions), cluster_count, replace=False)]
    cluster_by_vector = np.zeros(len(directions), np.int64)
    for _ in range(_CLUSTER_ROUNDS):
        nearest_centres = (directions @ centres.T).argmax(axis=1)
        if np.array_equal(nearest_centres, cluster_by_vector):
            break
        cluster_by_vector = nearest_centres
        centres = _compute_centroids(directions, cluster_by_vector, cluster_count, centres)
    return cluster_by_vector


def _compute_centroids(
    directions: NDArray[np.float32],
    group_of_direction: NDArray[np.int64],
    group_count: int,
    default_centroids: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Return the unit mean of each group; `default_centroids` for an empty group."""
    vector_count = len(directions)
    membership_matrix = sp.csr_matrix(
        (np.ones(vector_count, np.float32), (group_of_direction, np.arange(vector_count))), (group_count, vector_count)
    )
    has_members = np.bincount(group_of_direction, minlength=group_count) > 0
    return np.where(has_members[:, None], unit_rows(membership_matrix @ directions), default_centroids)
