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
from cache.model.ranking import unit
from cache.model.tower import Histories
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.bundles import held_out, onnx_model
from precompute.bundles.bundle import Bundle, ModelFile, write_bundle
from precompute.bundles.bundle_store import hand_over, swap_in_folder
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig, parse_time
from precompute.reference.matrix_factorisation import (
    AlternatingShape,
    ModelShape,
    SpectralShape,
    Tables,
    UserItemMatrix,
    distance_from_usual,
    first_shapes,
    matrix_of,
    shapes_by_fold,
    shapes_by_regularization,
    tables_of,
    training_of,
)
from precompute.sources.columns import Ids, to_arrow_strings
from precompute.sources.erasures import ErasedEntities, all_erasures
from precompute.sources.files import source_file, source_files
from precompute.sources.plausibility import (
    chosen_cut_in_words,
    demand_enough_ids,
    demand_several_items,
    demand_times,
)
from precompute.sources.readers import feature_schema, read_features, read_interactions
from precompute.sources.vocabulary import HashedIds, NumberedIds, Vocabulary, to_string_chunks

HISTORY_MAX = 1024

AFFINITY_SHARPNESS = 8.0

AFFINITY_CLUSTERS = 16

_CLUSTER_ROUNDS = 20

UNKNOWN_CATEGORY = "unknown"
"""Category of an item that has none."""

CUT_USERS = 8_000
"""Users whose histories are cut: on Gowalla 3,000 chose other exponents with another seed."""

SAMPLE_INTERACTIONS = 1_500_000
"""Interactions at most on which shapes are compared."""

HISTORY_ITEMS_MIN = 5
"""Items of a user whose history is cut."""

PARTS_OF_DIMS = (1, 2, 4, 8)
"""Divisors of the dimensions that are tried with the training that won."""

TARGET_ITEMS_MIN = 15_000
"""Items that are to be found; where one cut at random holds out fewer, there are more cuts."""

CUTS_MAX = 3
"""Cuts at most."""

STANDARD_ERRORS = 2.0
"""Standard errors of the users' differences within which a trial cannot distinguish two shapes."""

ALTERNATING_MARGIN = 0.06
"""Recall that alternating vectors must find more, relative to spectral ones: with less they may lose on later data."""

FEWER_DIMS_LOSE = 0.002
"""Recall that fewer dimensions may lose, relative to the best: less than the trial can measure."""

Interactions = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]
"""Rows of users and of items, and times."""

Recalls = dict[ModelShape, list[NDArray[np.float64]]]
"""Recall of each user, by shape and cut."""


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceData:
    """Interactions as pairs of rows (int64 [n] each); `categories` has one name per item, `times` int64 [n], if known.

    Texts may be Arrow strings: of a large catalogue a Python object each would take more than all else.
    """

    user_rows: NDArray[np.int64]
    item_rows: NDArray[np.int64]
    item_ids: Sequence[str] | pa.Array
    categories: Sequence[str] | pa.Array | None = None
    times: NDArray[np.int64] | None = None


def train_reference(
    config: NightConfig, *, data_until: str | None = None, progress: Progress = quiet
) -> dict[str, Any]:
    """Train on all interactions and put the bundle where the night reads it.

    With `data_until`, else that of the settings, only on older ones, and on those without a time (`untimed` of the
    report): later ones, which judge the night, are not learnt. Raises ConfigError for a cut if none has a time.
    """
    started = time.perf_counter()
    if not config.sources.interactions:
        raise ConfigError("sources.interactions is empty: name the files to train on")
    users, items, times, rows = HashedIds(), NumberedIds(), [], 0
    data_until = data_until or config.data_until
    cutoff_at = parse_time(data_until) if data_until else None
    files = source_files(config.sources.interactions, Path(config.base))
    demand_times(config.sources, files, data_until)
    erased = ErasedEntities.of(all_erasures(config.store()))
    read = read_interactions(
        config.sources, Path(config.base), cutoff_at=cutoff_at, interaction_files=files
    )
    for batch in map(erased.leave_out, read):
        users.add(batch.users)
        items.add(batch.items)
        times.append(batch.times)
        rows += len(batch.times)
        progress("read interactions", rows, 0)
    if not rows:
        before = f" before {data_until}" if data_until else ""
        raise SourceError(f"the sources hold no interaction to train on{before}")
    when = np.concatenate(times)
    untimed = int((when == 0).sum())
    if data_until and untimed == rows:
        raise ConfigError(chosen_cut_in_words(data_until))
    user_rows, user_count = users.codes()
    item_rows, item_ids = items.codes(), items.names
    demand_enough_ids(user_count, len(item_ids))
    categories = _categories(config, item_ids)
    if categories is None:
        demand_several_items(user_rows, user_count, item_rows, len(item_ids))
    is_timed = bool((when != when[0]).any())
    data = ReferenceData(user_rows, item_rows, item_ids, categories, when if is_timed else None)
    target = config.path(config.bundle)
    staging_folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        reference_config = config.reference
        bundle = train(
            data, staging_folder, dims=reference_config.dims, seed=reference_config.seed,
            programs=reference_config.programs,
            shape=None if reference_config.choose else SpectralShape(), progress=progress,
        )  # fmt: skip
        hand_over(config.store(), bundle)
        swap_in_folder(staging_folder, target)
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)
    progress("train", 1, 1)
    return {
        **bundle.training,
        "bundle": str(target),
        "digest": bundle.digest,
        "users": user_count,
        "items": len(item_ids),
        "interactions": rows,
        "untimed": untimed,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _categories(config: NightConfig, item_ids: Any) -> Any:
    """Category of each item from the item features, as Arrow strings; None where they have no such column."""
    sources, column = config.sources, config.sources.category_column
    if not sources.item_features:
        return None
    path = source_file(sources.item_features, config.path("."))
    if column not in feature_schema(path).names:
        return None
    vocabulary = Vocabulary.of(to_string_chunks(pa.chunked_array([item_ids])))
    assert vocabulary is not None  # noqa: S101 - each id was numbered once
    named, row_parts = NumberedIds(), [np.empty(0, np.int64)]
    for ids, columns in read_features(path, sources.item_column, (column,)):
        texts = pc.fill_null(columns[column].cast(pa.string()), "")
        named.add(Ids.of(texts))
        row_parts.append(vocabulary.find_positions(ids.texts()))
    codes, rows = named.codes(), np.concatenate(row_parts)
    category_codes = np.full(len(item_ids), -1, np.int64)
    matched_indexes = np.flatnonzero(rows >= 0)[::-1]  # of an item that comes twice, its first row
    category_codes[rows[matched_indexes]] = codes[matched_indexes]
    texts = pc.fill_null(named.names.take(pa.array(category_codes, mask=category_codes < 0)), "")
    return pc.if_else(pc.equal(texts, ""), pa.scalar(UNKNOWN_CATEGORY, texts.type), texts)


def train(
    data: ReferenceData,
    bundle_folder: Path,
    *,
    dims: int = 256,
    seed: int = 0,
    programs: bool = False,
    shape: ModelShape | None = None,
    progress: Progress = quiet,
) -> Bundle:
    """Train and write a bundle; the same data and seed give the same bytes on the same machine.

    The shape is chosen (see `choose_shape`) unless it is given; `dims` is the most that a vector may have, and shrinks
    to the smaller side of the matrix. Repeated interactions count once. `programs` writes each model as a torch.export
    program too; raises ConfigError where torch is not installed.
    """
    if not len(data.user_rows):
        raise SourceError("there are no interactions to train on")
    users, items = int(data.user_rows.max()) + 1, len(data.item_ids)
    dims = min(dims, users, items)
    rng, of_choice = np.random.default_rng(seed).spawn(2)
    choice = (
        choose_shape(
            data.user_rows,
            data.item_rows,
            items,
            dims,
            of_choice,
            times=data.times,
            progress=progress,
        )
        if shape is None
        else ShapeChoice(replace(shape, dims=dims))
    )
    matrix = matrix_of(data.user_rows, data.item_rows, (users, items))
    user_item_matrix = UserItemMatrix.of(matrix)
    [(_, (history_rows, item_vectors))] = tables_of(user_item_matrix, [choice.shape], rng)
    dims = choice.shape.dims
    centroids, labels = affinities(
        item_vectors, user_item_matrix.item_degrees, data.item_ids, data.categories, rng
    )
    history = InputSpec("history", "history", "int32", max_length=HISTORY_MAX, pad=items)
    sharpened = centroids * np.float32(AFFINITY_SHARPNESS)
    padded = np.concatenate([history_rows, np.zeros((1, dims), np.float32)])
    carried = _programs(padded, item_vectors, sharpened) if programs else {}
    return write_bundle(
        bundle_folder,
        name=f"reference-{choice.method}",
        version=f"1-seed{seed}",
        dims=dims,
        item_ids=data.item_ids,
        user_tower=ModelFile(
            onnx_model.history_tower(padded),
            TowerSpec((history,), "vector", dims),
            program=carried.get("user_tower"),
        ),
        item_tower=ModelFile(
            onnx_model.item_tower(item_vectors),
            TowerSpec((InputSpec("item_index", "item_index", "int32"),), "vector", dims),
            entity="item",
            program=carried.get("item_tower"),
        ),
        values={
            "user_affinity": ModelFile(
                onnx_model.affinity_model(padded, sharpened),
                TowerSpec((history,), "probabilities", len(labels)),
                labels=labels,
                program=carried.get("user_affinity"),
            )
        },
        training={
            "users": users,
            "items": items,
            "interactions": int(matrix.nnz),
            "seed": seed,
            **({} if data.times is None else {"trained_until": _iso(int(data.times.max()))}),
            **choice.row(),
        },
    )


def _programs(
    padded: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    sharpened: NDArray[np.float32],
) -> Mapping[str, bytes]:
    try:
        from precompute.reference import exports
    except ModuleNotFoundError as error:
        raise ConfigError(
            "reference.programs needs torch: install the extra `gpu`, or set it to false",
            field="programs",
        ) from error
    return {
        "user_tower": exports.history_tower(padded),
        "item_tower": exports.item_tower(item_vectors),
        "user_affinity": exports.affinity_model(padded, sharpened),
    }


def _iso(microseconds: int) -> str:
    """Time of the newest interaction that was learnt from, in UTC."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)).isoformat()


@dataclass(frozen=True, slots=True)
class ShapeTrial:
    """Shape with its recall@20 of held-out items."""

    shape: ModelShape
    recall: float


@dataclass(frozen=True, slots=True)
class ShapeChoice:
    """Best shape, all trials, and their data; without trials the default shape."""

    shape: ModelShape
    trials: tuple[ShapeTrial, ...] = ()
    users: int = 0
    cuts: int = 0
    interactions: int = 0
    is_by_time: bool = False

    @property
    def recall(self) -> float | None:
        """Recall of the chosen shape; None without trials."""
        return next((trial.recall for trial in self.trials if trial.shape == self.shape), None)

    @property
    def method(self) -> str:
        """Name of the chosen shape's method."""
        return "spectral" if isinstance(self.shape, SpectralShape) else "alternating"

    def row(self) -> dict[str, Any]:
        """For a report."""
        return {
            "method": self.method,
            **asdict(self.shape),
            "recall_at_20": None if self.recall is None else round(self.recall, 4),
            "shapes_tried": len(self.trials),
            "users_held_out": self.users,
            "cuts": self.cuts,
            "interactions_tried_on": self.interactions,
            "held_out": "latest" if self.is_by_time else "random",
        }


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Interactions without the held-out ones, and for the users of `rows` the kept items and those to be found."""

    data: UserItemMatrix
    rows: NDArray[np.int64]
    input_histories: Histories
    targets: Histories

    @classmethod
    def of(cls, sample: Interactions, items: int, rng: np.random.Generator) -> Self:
        """Holds out a fifth of the items of at most CUT_USERS users."""
        users, columns, when = sample
        # By user, then as they happened (of a pair that comes twice the latest), or at random.
        if when is None:
            users, columns = np.divmod(np.unique(users * items + columns), items)
            columns = columns[np.lexsort((rng.permutation(len(users)), users))]
        else:
            order = np.lexsort((when, users))[::-1]
            pairs = users[order] * items + columns[order]
            order = order[np.sort(np.unique(pairs, return_index=True)[1])][::-1]
            users, columns = users[order], columns[order]
        counts = np.bincount(users)
        enough = np.flatnonzero(counts >= HISTORY_ITEMS_MIN)
        rows = np.sort(rng.choice(enough, min(CUT_USERS, len(enough)), replace=False))
        ends = np.cumsum(counts)
        is_held = np.zeros(len(users), bool)
        for row in rows:
            is_held[ends[row] - max(1, counts[row] // 5) : ends[row]] = True
        size = len(counts), items
        kept_matrix = matrix_of(users[~is_held], columns[~is_held], size)
        held_out_matrix = matrix_of(users[is_held], columns[is_held], size)
        return cls(
            UserItemMatrix.of(kept_matrix),
            rows,
            _histories(kept_matrix[rows]),
            _histories(held_out_matrix[rows]),
        )

    def recalls(self, tables: Tables) -> NDArray[np.float64]:
        """Recall@20 of each user by these tables."""
        ones = np.ones(len(self.input_histories.indices), np.float32)
        histories = sp.csr_matrix(
            (ones, self.input_histories.indices, self.input_histories.indptr),
            (len(self.input_histories), self.data.items),
        )
        rows, vectors = tables
        return held_out.recall_by_user(
            histories @ rows, vectors, self.input_histories, self.targets, "inner_product"
        )


def choose_shape(
    user_rows: NDArray[np.int64],
    item_rows: NDArray[np.int64],
    items: int,
    dims: int,
    rng: np.random.Generator,
    *,
    times: NDArray[np.int64] | None = None,
    progress: Progress = quiet,
) -> ShapeChoice:
    """The shape with the highest recall; `dims` is the most that its vectors may have. Pairs and times are [n] each.

    Of some users a fifth of the items is held out: the latest where times are known, else at random, and more than once
    where that is little. What the rest of the interactions gives with each shape is judged by recall@20 of that fifth.
    A large data set is judged on a sample of its users.

    One thing after the other, each for the best so far of both methods: exponents and weights, regularisations, folds.
    The method that won is tried with fewer dimensions.
    """
    sample = sample_of(user_rows, item_rows, times, rng)
    cuts = [Cut.of(sample, items, rng)]
    if not len(cuts[0].rows):
        return ShapeChoice(SpectralShape(dims=dims))
    if times is None:  # what is latest can be held out only once
        more = min(CUTS_MAX, -(-TARGET_ITEMS_MIN // len(cuts[0].targets.indices))) - 1
        cuts += [Cut.of(sample, items, rng) for _ in range(more)]
    recalls_by_shape: Recalls = {}
    _try_shapes(recalls_by_shape, first_shapes(dims), cuts, rng, progress)
    for vary_shape in (shapes_by_regularization, shapes_by_fold):
        _try_shapes(
            recalls_by_shape,
            [
                variant
                for shape in _best_of_methods(recalls_by_shape)
                for variant in vary_shape(shape)
            ],
            cuts,
            rng,
            progress,
        )
    spectral, alternating = _best_of_methods(recalls_by_shape)
    wins = _mean_recall(recalls_by_shape[alternating]) > (1 + ALTERNATING_MARGIN) * _mean_recall(
        recalls_by_shape[spectral]
    )
    training = training_of(alternating if wins else spectral)
    narrow = [replace(training, dims=dims // part) for part in PARTS_OF_DIMS if dims >= part]
    _try_shapes(
        recalls_by_shape,
        [variant for shape in narrow for variant in shapes_by_fold(shape)],
        cuts,
        rng,
        progress,
    )
    progress("choose", 1, 1)
    trials = tuple(
        ShapeTrial(shape, _mean_recall(cut_recalls))
        for shape, cut_recalls in recalls_by_shape.items()
    )
    like_it = [trial for trial in trials if training_of(trial.shape) in narrow]
    enough = (1 - FEWER_DIMS_LOSE) * max(trial.recall for trial in like_it)
    won = min(
        (trial for trial in like_it if trial.recall >= enough),
        key=lambda trial: (trial.shape.dims, -trial.recall),
    )
    users = len(cuts[0].rows)
    return ShapeChoice(won.shape, trials, users, len(cuts), len(sample[0]), times is not None)


def _try_shapes(
    recalls_by_shape: Recalls,
    shapes: Sequence[ModelShape],
    cuts: Sequence[Cut],
    rng: np.random.Generator,
    progress: Progress,
) -> None:
    """Adds the recalls of shapes that were not tried yet."""
    fresh = [shape for shape in shapes if shape not in recalls_by_shape]
    for cut_index, cut in enumerate(cuts):
        for tried_count, (shape, tables) in enumerate(tables_of(cut.data, fresh, rng)):
            progress("choose", cut_index * len(fresh) + tried_count, len(cuts) * len(fresh))
            recalls_by_shape.setdefault(shape, []).append(cut.recalls(tables))


def _mean_recall(recalls: Sequence[NDArray[np.float64]]) -> float:
    return float(np.concatenate(recalls).mean())


def _best_of_methods(recalls_by_shape: Recalls) -> list[ModelShape]:
    """The first of each method, spectral before alternating."""
    return [
        _best_shape(
            {
                shape: cut_recalls
                for shape, cut_recalls in recalls_by_shape.items()
                if isinstance(shape, kind)
            }
        )
        for kind in (SpectralShape, AlternatingShape)
    ]


def _best_shape(recalls_by_shape: Mapping[ModelShape, Sequence[NDArray[np.float64]]]) -> ModelShape:
    """The best shape; one nearer to the usual is taken where it loses less than the trial can tell.

    That is STANDARD_ERRORS of the differences user by user.
    """
    recalls = {
        shape: np.concatenate(cut_recalls) for shape, cut_recalls in recalls_by_shape.items()
    }
    best_shape = max(recalls, key=lambda shape: float(recalls[shape].mean()))
    tied = []
    for shape, user_recalls in recalls.items():
        recall_shortfalls = recalls[best_shape] - user_recalls
        if recall_shortfalls.mean() <= STANDARD_ERRORS * recall_shortfalls.std() / np.sqrt(
            len(recall_shortfalls)
        ):
            tied.append(shape)
    return min(tied, key=lambda shape: (distance_from_usual(shape), -float(recalls[shape].mean())))


def sample_of(
    user_rows: NDArray[np.int64],
    item_rows: NDArray[np.int64],
    times: NDArray[np.int64] | None,
    rng: np.random.Generator,
) -> Interactions:
    """All interactions of as many users, drawn at random and numbered anew, as come to SAMPLE_INTERACTIONS."""
    if len(user_rows) <= SAMPLE_INTERACTIONS:
        return user_rows, item_rows, times
    counts = np.bincount(user_rows)
    mixed = rng.permutation(len(counts))
    drawn = mixed[np.cumsum(counts[mixed]) <= SAMPLE_INTERACTIONS]
    numbers = np.full(len(counts), -1, np.int64)
    numbers[drawn] = np.arange(len(drawn))
    user_numbers = numbers[user_rows]
    sampled_rows = np.flatnonzero(user_numbers >= 0)
    return (
        user_numbers[sampled_rows],
        item_rows[sampled_rows],
        None if times is None else times[sampled_rows],
    )


def _histories(matrix: Any) -> Histories:
    return Histories(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64))


def affinities(
    vectors: NDArray[np.float32],
    degrees: NDArray[np.float64],
    item_ids: Sequence[str] | pa.Array,
    categories: Sequence[str] | pa.Array | None,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Unit centroids [n, dims] and their labels: the given categories, or clusters named by their top item."""
    directions = unit(vectors)
    if categories is not None:
        coded = pc.dictionary_encode(to_arrow_strings(categories))
        names, name_indexes = np.unique(
            coded.dictionary.to_numpy(zero_copy_only=False).astype(str), return_inverse=True
        )
        groups = name_indexes[np.asarray(coded.indices)]
        blank = np.zeros((len(names), vectors.shape[1]), np.float32)
        return _centroids(directions, groups, len(names), blank), tuple(str(name) for name in names)
    cluster_count = min(AFFINITY_CLUSTERS, len(vectors))
    groups = spherical_clusters(directions, cluster_count, rng)
    used = np.unique(groups)
    order = np.lexsort((np.arange(len(degrees)), -degrees))
    labels = [str(item_ids[order[groups[order] == cluster][0]]) for cluster in used]
    blank = np.zeros((cluster_count, vectors.shape[1]), np.float32)
    return _centroids(directions, groups, cluster_count, blank)[used], tuple(labels)


def spherical_clusters(
    directions: NDArray[np.float32], clusters: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Cluster of each unit vector by spherical k-means (Dhillon and Modha, 2001)."""
    centres = directions[rng.choice(len(directions), clusters, replace=False)]
    assigned = np.zeros(len(directions), np.int64)
    for _ in range(_CLUSTER_ROUNDS):
        nearest = (directions @ centres.T).argmax(axis=1)
        if np.array_equal(nearest, assigned):
            break
        assigned = nearest
        centres = _centroids(directions, assigned, clusters, centres)
    return assigned


def _centroids(
    directions: NDArray[np.float32],
    groups: NDArray[np.int64],
    count: int,
    otherwise: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Return the unit mean of each group; `otherwise` for an empty group."""
    size = len(directions)
    member = sp.csr_matrix((np.ones(size, np.float32), (groups, np.arange(size))), (count, size))
    filled = np.bincount(groups, minlength=count) > 0
    return np.where(filled[:, None], unit(member @ directions), otherwise)
