"""Computation of a vector from a history (fold-in): its candidates as ONNX graphs, and the choice of the best one."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from onnx import NodeProto, helper

from cache.errors import SourceError
from cache.model.ranking import Metric
from cache.model.tower import Histories, Tower
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.adapters.inputs import ClickMatrix
from precompute.bundles.held_out import COMPARED_ITEMS_MAX, mean_recall, shares_above_random
from precompute.bundles.onnx_model import OnnxModel, build_onnx_model, float32_info, int32_info

TINY_SUMMAND = np.float32(1e-30)
"""Summand that avoids 0 / 0, so that a row that is already solved does not change."""

HISTORY_ITEMS_MAX = 1024

SAMPLED_USERS_MAX = 1_000

HISTORY_ITEMS_MIN = 5
"""Minimum items of a history that is used to compare folds: four fifths are input, one fifth is held out."""

RIDGE_STRENGTHS = (0.1, 1.0, 10.0)
"""Regularisation of the candidate ridges, as multiples of the mean squared length of an item's row."""

TRIED_STEP_COUNTS = (1, 2, 4, 8, 16, 32, 64)

STEP_TOLERANCE = 1e-6
"""Error of a vector, relative to its largest number, at which no further steps are tried."""

CHANCE_SHARE_MAX = 0.55
"""Share of pairs in which a clicked item scores above a random one; at a lower share, ids do not belong to the rows."""

SIGNIFICANT_DEVIATIONS = 3.0

JUDGED_USERS_MIN = 20
"""Minimum number of users with a click for a judgement: the clicks of one user are too similar."""

JUDGED_CLICKS_MIN = int((SIGNIFICANT_DEVIATIONS * 0.5 / (CHANCE_SHARE_MAX - 0.5)) ** 2)
"""Number of clicks up to which a share of one half could be chance, and is not judged."""

HELD_OUT_CLICKS_ENOUGH = 4_000
"""Number of held-out clicks that suffices for a judgement: no further part of the histories is held out then."""

HISTORY_PARTS = 5
"""Parts of a history, of which one is held out at a time."""

NO_FEATURE_VALUES: Mapping[str, NDArray[Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class HistoryFold:
    """Computation of a vector from a history, by `item_rows` float32 [items, dims].

    With Z the rows of a history's items, x is the result of `steps` steps of conjugate gradients (Hestenes and Stiefel,
    1952) from 0 for (I + gram_factor Z'Z) x = Z'1. If `is_mean`, x is divided by the length of the history. The vector
    is x B + `vector_offset` [dims], with B = `back_matrix` [dims, dims], None for the identity. Without strength one
    step is exact, and x is the sum of the rows. With Z = Y W, W = (Y'Y + reg I)^-1/2, strength c - 1 and B = c W, the
    vector is that of ALS for implicit feedback (Hu, Koren and Volinsky, ICDM 2008) with confidence c. Every matrix
    product has one row of the batch, so that an answer does not depend on other rows of the batch.
    """

    fold_name: str
    item_rows: NDArray[np.float32]
    gram_factor: float
    back_matrix: NDArray[np.float32] | None
    vector_offset: NDArray[np.float32]
    is_mean: bool = False

    def exact_vector(self, history_ordinals: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the vector of a history, float64 [dims], solved directly."""
        item_rows = self.item_rows[history_ordinals].astype(np.float64)
        system_matrix = np.eye(item_rows.shape[1]) + self.gram_factor * item_rows.T @ item_rows
        solution: NDArray[np.float64] = np.linalg.solve(system_matrix, item_rows.sum(axis=0))
        if self.is_mean:
            solution /= max(len(history_ordinals), 1)
        rotated_solution = solution if self.back_matrix is None else solution @ self.back_matrix.astype(np.float64)
        return rotated_solution + self.vector_offset.astype(np.float64)

    def tower(self, step_count: int) -> OnnxModel:
        """Build the graph history int32 [n, length] -> vector float32 [n, dims]; the padding is the number of items."""
        padded_table = np.concatenate([self.item_rows, np.zeros((1, self.item_rows.shape[1]), np.float32)])
        constant_by_name: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {
            "table": padded_table,
            "offset": self.vector_offset,
            "middle": np.array([1], np.int64),
            "real": np.concatenate([np.ones(len(self.item_rows), np.float32), np.zeros(1, np.float32)]),
        }
        nodes = [
            helper.make_node("Gather", ["table", "history"], ["rows"], axis=0),
            helper.make_node("Gather", ["real", "history"], ["here"], axis=0),
            helper.make_node("Unsqueeze", ["here", "middle"], ["ones"]),
            helper.make_node("MatMul", ["ones", "rows"], ["target"]),
        ]
        if self.gram_factor:
            constant_by_name |= {"strength": np.array(self.gram_factor, np.float32), "tiny": np.array(TINY_SUMMAND)}
            nodes += [helper.make_node("Transpose", ["rows"], ["columns"], perm=[0, 2, 1])]
            nodes += _conjugate_gradients(step_count)
            last_output = f"x{step_count}"
        else:
            last_output = "target"
        if self.is_mean:
            # A sum of ones is exact in any order.
            constant_by_name["one"] = np.array(1, np.float32)
            nodes += [
                helper.make_node("ReduceSum", ["here", "middle"], ["length"], keepdims=1),
                helper.make_node("Max", ["length", "one"], ["at_least_one"]),
                helper.make_node("Unsqueeze", ["at_least_one", "middle"], ["tall_length"]),
                helper.make_node("Div", [last_output, "tall_length"], ["mean"]),
            ]
            last_output = "mean"
        if self.back_matrix is not None:
            # The constant is the left factor: as the right one it would become int8, which saves nothing in so small a
            # product.
            constant_by_name["back"] = np.ascontiguousarray(self.back_matrix.T)
            nodes += [
                helper.make_node("Transpose", [last_output], ["column"], perm=[0, 2, 1]),
                helper.make_node("MatMul", ["back", "column"], ["turned"]),
                helper.make_node("Transpose", ["turned"], ["row"], perm=[0, 2, 1]),
            ]
            last_output = "row"
        nodes += [helper.make_node("Squeeze", [last_output, "middle"], ["flat"])]
        nodes += [helper.make_node("Add", ["flat", "offset"], ["vector"])]
        return build_onnx_model(
            nodes,
            [int32_info("history", ["rows_of_batch", "length_of_history"])],
            [float32_info("vector", self.item_rows.shape[1])],
            constant_by_name,
        )


def _conjugate_gradients(step_count: int) -> list[NodeProto]:
    """Return nodes that compute `x1`, `x2` and so on from `rows`, `columns` and `target`, starting at x0 = 0."""
    nodes = [
        helper.make_node("Sub", ["target", "target"], ["x0"]),
        helper.make_node("Identity", ["target"], ["r0"]),
        helper.make_node("Identity", ["target"], ["p0"]),
        *_dot_nodes("r0", "r0", "rr0"),
    ]
    for step_index in range(step_count):
        previous_step, next_step = str(step_index), str(step_index + 1)
        nodes += [
            helper.make_node("MatMul", [f"p{previous_step}", "columns"], [f"along{previous_step}"]),
            helper.make_node("MatMul", [f"along{previous_step}", "rows"], [f"square{previous_step}"]),
            helper.make_node("Mul", [f"square{previous_step}", "strength"], [f"weighed{previous_step}"]),
            helper.make_node("Add", [f"weighed{previous_step}", f"p{previous_step}"], [f"ap{previous_step}"]),
            *_dot_nodes(f"p{previous_step}", f"ap{previous_step}", f"pap{previous_step}"),
            *_ratio_nodes(f"rr{previous_step}", f"pap{previous_step}", f"alpha{previous_step}"),
            *_update_nodes(f"x{previous_step}", f"alpha{previous_step}", f"p{previous_step}", f"x{next_step}", "Add"),
            *_update_nodes(f"r{previous_step}", f"alpha{previous_step}", f"ap{previous_step}", f"r{next_step}", "Sub"),
            *_dot_nodes(f"r{next_step}", f"r{next_step}", f"rr{next_step}"),
            *_ratio_nodes(f"rr{next_step}", f"rr{previous_step}", f"beta{previous_step}"),
            *_update_nodes(f"r{next_step}", f"beta{previous_step}", f"p{previous_step}", f"p{next_step}", "Add"),
        ]
    return nodes


def _dot_nodes(left_name: str, right_name: str, output_name: str) -> list[NodeProto]:
    return [
        helper.make_node("Transpose", [right_name], [f"{output_name}_column"], perm=[0, 2, 1]),
        helper.make_node("MatMul", [left_name, f"{output_name}_column"], [output_name]),
    ]


def _ratio_nodes(numerator_name: str, denominator_name: str, output_name: str) -> list[NodeProto]:
    return [
        helper.make_node("Max", [denominator_name, "tiny"], [f"{output_name}_below"]),
        helper.make_node("Div", [numerator_name, f"{output_name}_below"], [output_name]),
    ]


def _update_nodes(
    start_name: str, factor_name: str, direction_name: str, output_name: str, operator_name: str
) -> list[NodeProto]:
    return [
        helper.make_node("Mul", [factor_name, direction_name], [f"{output_name}_step"]),
        helper.make_node(operator_name, [start_name, f"{output_name}_step"], [output_name]),
    ]


@dataclass(frozen=True, slots=True)
class FoldChoice:
    """Chosen fold, its tower, and recall@20 of each candidate (empty if there were no histories to choose by)."""

    fold_name: str
    tower: OnnxModel
    spec: TowerSpec
    step_count: int
    recall_by_fold: dict[str, float]


def mean_and_ridge_folds(
    item_rows: NDArray[np.float32], vector_offset: NDArray[np.float32], target_score: float
) -> list[HistoryFold]:
    """Return the candidate folds: the mean of a history's rows, and ridge regressions on its items.

    A ridge fits `target_score` for each item of the history. A ridge's vector solves (reg I + Z'Z) u = target Z'1.
    """
    mean_squared_length = float(np.square(item_rows, dtype=np.float64).sum(axis=1).mean()) or 1.0
    folds = [HistoryFold("mean", item_rows, 0.0, None, vector_offset, is_mean=True)]
    for ridge_strength in RIDGE_STRENGTHS:
        back_matrix = np.eye(item_rows.shape[1], dtype=np.float32) * np.float32(
            target_score / (ridge_strength * mean_squared_length)
        )
        folds.append(
            HistoryFold(
                f"ridge {ridge_strength:g}",
                item_rows,
                1 / (ridge_strength * mean_squared_length),
                back_matrix,
                vector_offset,
            )
        )
    return folds


def demand_better_than_chance(
    item_vectors: NDArray[np.float32], user_vectors: NDArray[np.float32], clicks: ClickMatrix, rng: np.random.Generator
) -> None:
    """Raise SourceError if users' vectors rank clicked items no better than any other item."""
    if (chance_auc := share_if_by_chance(item_vectors, user_vectors, clicks, rng)) is not None:
        raise chance_error(chance_auc)


def chance_error(share_above_random: float) -> SourceError:
    """Return the error for clicks that score above a random item in this share of pairs."""
    return SourceError(
        f"clicked items score above a random item in {share_above_random:.0%} of pairs, as by chance: give "
        "all ids in the order of "
        "their rows, or, if these clicks are only to be left out of lists, import without them and name their file in "
        "[sources] interactions",
        share=share_above_random,
    )


def share_if_by_chance(
    item_vectors: NDArray[np.float32], user_vectors: NDArray[np.float32], clicks: ClickMatrix, rng: np.random.Generator
) -> float | None:
    """Return the share of pairs in which a clicked item scores above a random one; None if it is better than chance.

    Return None for too few clicks or users, too: the share must be below `CHANCE_SHARE_MAX` by SIGNIFICANT_DEVIATIONS
    of its standard deviations.
    """
    click_pairs = clicks.matrix.tocoo()
    if np.count_nonzero(np.diff(clicks.matrix.indptr)) < JUDGED_USERS_MIN:
        return None
    sampled_pairs = rng.choice(click_pairs.nnz, min(click_pairs.nnz, 20_000), replace=False)
    sampled_user_vectors = user_vectors[click_pairs.row[sampled_pairs]]
    clicked_scores = np.einsum("ij,ij->i", sampled_user_vectors, item_vectors[click_pairs.col[sampled_pairs]])
    random_scores = np.einsum(
        "ij,ij->i", sampled_user_vectors, item_vectors[rng.integers(len(item_vectors), size=len(sampled_pairs))]
    )
    auc = float(((clicked_scores > random_scores) + 0.5 * (clicked_scores == random_scores)).mean())
    return auc if auc + SIGNIFICANT_DEVIATIONS * 0.5 / np.sqrt(len(sampled_pairs)) < CHANCE_SHARE_MAX else None


def choose_fold(
    folds: Sequence[HistoryFold],
    item_vectors: NDArray[np.float32],
    clicks: ClickMatrix | None,
    metric: Metric,
    rng: np.random.Generator,
) -> FoldChoice:
    """Return the fold with the highest recall of held-out items; the first among equals, or without histories."""
    spec = TowerSpec(
        (InputSpec("history", "history", "int32", max_length=HISTORY_ITEMS_MAX, pad=len(item_vectors)),),
        "vector",
        item_vectors.shape[1],
    )
    sampled_users = (
        np.empty(0, np.int64) if clicks is None else clicks.sample_users(SAMPLED_USERS_MAX, HISTORY_ITEMS_MIN, rng)
    )
    fold_in_items, held_out_items = _split_sampled_histories(clicks, sampled_users, rng)
    if not len(sampled_users):
        step_count, tower = find_enough_steps(folds[0], spec, fold_in_items)
        return FoldChoice(folds[0].fold_name, tower, spec, step_count, {})
    recall_by_fold: dict[str, float] = {}
    winning_fold: FoldChoice | None = None  # only the best tower is kept: each has a table of all items
    for fold in folds:
        step_count, tower = find_enough_steps(fold, spec, fold_in_items)
        fold_recall = mean_recall(
            run_tower(tower, spec, fold_in_items), item_vectors, fold_in_items, held_out_items, metric
        )
        if winning_fold is None or fold_recall > recall_by_fold[winning_fold.fold_name]:
            winning_fold = FoldChoice(fold.fold_name, tower, spec, step_count, recall_by_fold)
        recall_by_fold[fold.fold_name] = fold_recall
    assert winning_fold is not None  # noqa: S101
    return winning_fold


@dataclass(frozen=True, slots=True, eq=False)
class InputGain:
    """Shares of pairs, float64 [users], in which held-out clicks score above a random item: with and without an input.

    `input_name` is `history` (replaced by an empty history) or `user_features` (replaced by those of other users).
    """

    input_name: str
    shares_with_input: NDArray[np.float64]
    shares_without_input: NDArray[np.float64]

    def limit_texts(self) -> list[str]:
        """Return a limit if the input does not rank users' own clicks significantly higher; raise SourceError if lower.

        The test is paired: the mean of the users' differences, and its standard error.
        """
        user_gains = (self.shares_with_input - self.shares_without_input)[
            np.isfinite(self.shares_with_input - self.shares_without_input)
        ]
        if len(user_gains) < JUDGED_USERS_MIN:
            return []
        mean_gain, standard_error = (float(user_gains.mean()), float(user_gains.std(ddof=1) / np.sqrt(len(user_gains))))
        if mean_gain > SIGNIFICANT_DEVIATIONS * standard_error:
            return []
        ids_argument, replacement_text = ("item_ids", "an empty one")
        if self.input_name == "user_features":
            ids_argument, replacement_text = "user_ids", "those of other users"
        figures_text = (
            f"held-out clicks score above a random item in {np.nanmean(self.shares_with_input):.1%} of pairs with "
            f"users' own {self.input_name}, and in {np.nanmean(self.shares_without_input):.1%} with "
            f"{replacement_text} (difference "
            f"{mean_gain:+.1%}, standard error {standard_error:.1%})"
        )
        if mean_gain < -SIGNIFICANT_DEVIATIONS * standard_error:
            raise SourceError(
                f"{figures_text}: give all {ids_argument} in the order of the model's rows, or, if these clicks are "
                "only to be left out of lists, import without them and name their file in [sources] interactions",
                gain=mean_gain,
            )
        limit = (
            f"tell whether {ids_argument} are in the order of the model's rows: {figures_text}, which shows no gain; "
            "look at a few lists before you publish"
        )
        return [limit]


@dataclass(frozen=True, slots=True)
class UserTowerCheck:
    """Recall@20 of a user tower (None: nothing to hold out), and why clicks could not validate its ids, if so.

    A tower that ranks by chance is refused instead.
    """

    held_out_recall: float | None
    unjudged_reason: str = ""
    gains: tuple[InputGain, ...] = ()
    """Gain by each kind of input, if there are enough clicks to judge it."""
    share_above_random: float | None = None
    """Mean share of pairs in which a held-out click scores above a random item, if there are enough clicks."""


def check_user_tower(
    tower: OnnxModel,
    spec: TowerSpec,
    item_vectors: NDArray[np.float32],
    clicks: ClickMatrix | None,
    metric: Metric,
    rng: np.random.Generator,
    features: Mapping[str, NDArray[Any]] = NO_FEATURE_VALUES,
) -> UserTowerCheck:
    """Return the recall@20 of a user tower, as `choose` measures it; `features` have a row for each user of the clicks.

    Raises SourceError if it ranks held-out items no better than any other item.
    """
    if clicks is None:
        return UserTowerCheck(None, "there are no clicks")
    are_usable = complete_row_mask(features, clicks.matrix.shape[0])
    sampled_users = clicks.sample_users(SAMPLED_USERS_MAX, HISTORY_ITEMS_MIN, rng, are_usable)
    if len(sampled_users) < JUDGED_USERS_MIN:
        sampled_users = clicks.sample_users(SAMPLED_USERS_MAX, 2, rng, are_usable)
    if not len(sampled_users):
        return UserTowerCheck(None, "no user has clicked two items, of which one could be held out")
    user_features = {name: feature_values[sampled_users] for name, feature_values in features.items()}
    shuffled_histories = _shuffle_histories(clicks, sampled_users, rng)
    strangers_inputs = _inputs_of_strangers(spec, user_features, rng)
    vector_parts, held_out_parts, tower_recall = [], [], 0.0
    stranger_vectors_by_input: dict[str, list[NDArray[np.float32]]] = {name: [] for name in strangers_inputs}
    for part_index in range(HISTORY_PARTS):
        fold_in_items, held_out_items = _hold_out(shuffled_histories, part_index)
        vector_parts.append(run_tower(tower, spec, fold_in_items, user_features))
        for input_name, (is_emptied, features_of_others) in strangers_inputs.items():
            histories = Histories.of([()] * len(sampled_users)) if is_emptied else fold_in_items
            stranger_vectors_by_input[input_name].append(run_tower(tower, spec, histories, features_of_others))
        held_out_parts += _split_histories(held_out_items)
        if part_index == 0:
            tower_recall = mean_recall(vector_parts[0], item_vectors, fold_in_items, held_out_items, metric)
        if sum(map(len, held_out_parts)) >= HELD_OUT_CLICKS_ENOUGH:
            break
    # Items of the input history are not held out: a model of the next item may well rank them last.
    all_held_out_items = Histories.of(held_out_parts)
    ones = np.ones(len(all_held_out_items.indices), np.float32)
    matrix_shape = len(all_held_out_items), len(item_vectors)
    held_out_clicks = ClickMatrix(
        sp.csr_matrix((ones, all_held_out_items.indices, all_held_out_items.indptr), matrix_shape), None
    )
    if len(sampled_users) >= JUDGED_USERS_MIN:
        demand_better_than_chance(item_vectors, np.concatenate(vector_parts), held_out_clicks, rng)
    unjudged_reason, gains, mean_share = (
        too_few_clicks_reason(len(sampled_users), len(all_held_out_items.indices)),
        [],
        None,
    )
    if not unjudged_reason:
        compared_item_vectors = item_vectors[
            rng.choice(len(item_vectors), min(len(item_vectors), COMPARED_ITEMS_MAX), replace=False)
        ]
        shares_with_input = shares_above_random(
            np.concatenate(vector_parts),
            item_vectors,
            compared_item_vectors,
            all_held_out_items,
            len(sampled_users),
            metric,
        )
        for input_name, stranger_vector_parts in stranger_vectors_by_input.items():
            ablated_vectors = np.concatenate(stranger_vector_parts)
            shares_without_input = shares_above_random(
                ablated_vectors, item_vectors, compared_item_vectors, all_held_out_items, len(sampled_users), metric
            )
            gains.append(InputGain(input_name, shares_with_input, shares_without_input))
        mean_share = round(float(np.nanmean(shares_with_input)), 4)
    return UserTowerCheck(tower_recall, unjudged_reason, tuple(gains), mean_share)


def _inputs_of_strangers(
    spec: TowerSpec, features: Mapping[str, NDArray[Any]], rng: np.random.Generator
) -> dict[str, tuple[bool, Mapping[str, NDArray[Any]]]]:
    """Return, by the input that is replaced, (whether the history is emptied, the features to use)."""
    inputs_by_name: dict[str, tuple[bool, Mapping[str, NDArray[Any]]]] = {}
    if spec.history is not None:
        inputs_by_name["history"] = True, features
    if features:
        user_permutation = rng.permutation(len(next(iter(features.values()))))
        inputs_by_name["user_features"] = (
            False,
            {feature_name: feature_values[user_permutation] for feature_name, feature_values in features.items()},
        )
    return inputs_by_name


def too_few_clicks_reason(user_count: int, click_count: int) -> str:
    """Return why there are too few users or clicks to test that ids belong to their rows; empty if there are enough."""
    if user_count >= JUDGED_USERS_MIN and click_count > JUDGED_CLICKS_MIN:
        return ""
    return (
        f"{click_count:,} clicks of {user_count:,} users can be compared, but more than {JUDGED_CLICKS_MIN:,} clicks "
        f"of at least {JUDGED_USERS_MIN} users are needed"
    )


def unjudged_ids_limit(reason: str) -> str:
    """Return the limit of an import in which clicks could not validate the ids."""
    return (
        f"tell by clicks whether all ids are in the order of the model's rows: {reason}; look at a few lists before "
        "you publish"
    )


def complete_row_mask(features: Mapping[str, NDArray[Any]], row_count: int) -> NDArray[np.bool_]:
    """Return a mask of the rows whose numbers are all finite."""
    is_complete = np.ones(row_count, np.bool_)
    for feature_values in features.values():
        if feature_values.dtype.kind == "f":
            is_complete &= np.isfinite(feature_values).reshape(row_count, -1).all(axis=1)
    return is_complete


def find_enough_steps(fold: HistoryFold, spec: TowerSpec, histories: Histories) -> tuple[int, OnnxModel]:
    """Return the fewest steps that reach STEP_TOLERANCE, or after which more do not help, and their tower."""
    if not fold.gram_factor:
        return 1, fold.tower(1)
    history_lengths = np.diff(histories.indptr)
    sampled_histories = histories.select_rows(
        np.argsort(-history_lengths, kind="stable")[:: max(1, len(history_lengths) // 32)]
    )
    if not len(sampled_histories):
        sampled_histories = Histories.of([range(min(8, len(fold.item_rows)))])
    exact_vectors = np.stack([fold.exact_vector(history) for history in _split_histories(sampled_histories)])
    vector_scale = np.abs(exact_vectors).max(axis=1, keepdims=True) + STEP_TOLERANCE
    best_steps_and_tower, best_error = (TRIED_STEP_COUNTS[0], OnnxModel(b"")), np.inf
    for step_count in TRIED_STEP_COUNTS:
        tower = fold.tower(step_count)
        relative_error = float((np.abs(run_tower(tower, spec, sampled_histories) - exact_vectors) / vector_scale).max())
        if relative_error < best_error / 1.5:
            best_steps_and_tower, best_error = (step_count, tower), relative_error
        if relative_error <= STEP_TOLERANCE:
            break
    return best_steps_and_tower


def run_tower(
    tower: OnnxModel, spec: TowerSpec, histories: Histories, features: Mapping[str, NDArray[Any]] = NO_FEATURE_VALUES
) -> NDArray[np.float32]:
    """Return the vectors float32 [n, dims] of histories and features, by the model as it will be served."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        model_path = Path(temporary_folder) / "user_tower.onnx"
        tower.write(model_path)
        return Tower.open(model_path, spec).run(user_inputs(spec, histories, features))


def user_inputs(
    spec: TowerSpec, histories: Histories, features: Mapping[str, NDArray[Any]]
) -> dict[str, Histories | NDArray[Any]]:
    """Return the inputs of a user tower by name; histories are left out if it takes none."""
    history_input = {} if spec.history is None else {spec.history.name: histories}
    return {**history_input, **features}


def _split_histories(histories: Histories) -> list[NDArray[np.int64]]:
    return np.split(histories.indices, histories.indptr[1:-1])


def _split_sampled_histories(
    clicks: ClickMatrix | None, sampled_users: NDArray[np.int64], rng: np.random.Generator
) -> tuple[Histories, Histories]:
    """Return (input items, held-out items) of these users: one fifth of each history is held out."""
    if clicks is None or not len(sampled_users):
        return Histories.of([]), Histories.of([])
    return _hold_out(_shuffle_histories(clicks, sampled_users, rng), 0)


_ShuffledHistories = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""For each user: a history, and its indexes in a random order."""


def _shuffle_histories(
    clicks: ClickMatrix, sampled_users: NDArray[np.int64], rng: np.random.Generator
) -> _ShuffledHistories:
    histories = _split_histories(clicks.histories(sampled_users, HISTORY_ITEMS_MAX))
    return [(history, rng.permutation(len(history))) for history in histories]


def _hold_out(shuffled_histories: _ShuffledHistories, part_index: int) -> tuple[Histories, Histories]:
    """Return (input items, held-out items); short histories have no held-out items in the last parts."""
    fold_in_items, held_out_items = [], []
    for history, shuffled_indexes in shuffled_histories:
        part_size = max(1, len(shuffled_indexes) // HISTORY_PARTS)
        is_held_out = np.zeros(len(shuffled_indexes), np.bool_)
        is_held_out[shuffled_indexes[part_index * part_size : (part_index + 1) * part_size]] = True
        held_out_items.append(history[shuffled_indexes[part_index * part_size : (part_index + 1) * part_size]])
        fold_in_items.append(history[~is_held_out])
    return Histories.of(fold_in_items), Histories.of(held_out_items)
