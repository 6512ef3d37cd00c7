"""Folding a history into a vector: the towers that do it, as ONNX graphs, and the choice among them."""

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
from precompute.bundles.held_out import ITEMS_COMPARED, recall, shares_above_random
from precompute.bundles.onnx_model import OnnxModel, float32_info, int32_info, model_of

TINY = np.float32(1e-30)
"""Summand that avoids 0 / 0, so that a solved row stays unchanged."""

HISTORY_MAX = 1024

USERS_MAX = 1_000

HISTORY_ITEMS_MIN = 5
"""Items of a user whose history is cut: four fifths are folded, one fifth is to be found."""

RIDGES = (0.1, 1.0, 10.0)
"""Regularisation of the ridges that are tried, in mean squared lengths of an item's row."""

STEPS = (1, 2, 4, 8, 16, 32, 64)

TOLERANCE = 1e-6
"""Error of a vector, relative to its largest number, at which no more steps are taken."""

CHANCE = 0.55
"""Share of pairs in which a clicked item scores above a random one; below it, ids do not belong to the rows."""

DEVIATIONS = 3.0

USERS_LEAST = 20
"""Least number of users with a click for a judgement: the clicks of one user are alike."""

PAIRS_LEAST = int((DEVIATIONS * 0.5 / (CHANCE - 0.5)) ** 2)
"""Number of clicks up to which a share of exactly one half could be chance, and is not judged."""

PAIRS_ENOUGH = 4_000
"""Number of held-out clicks from which on no further part of the histories is held out for a judgement."""

PARTS = 5
"""Parts of a history, of which one is held out at a time."""

NO_FEATURES: Mapping[str, NDArray[Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """Fold of a history: `rows` float32 [items, dims], `back` [dims, dims] (None: as it is), `offset` [dims].

    `is_mean`: divided by the length of the history.

    With Z the rows of a history's items, x is what `steps` steps of conjugate gradients (Hestenes and Stiefel, 1952)
    from 0 make of (I + strength Z'Z) x = Z'1, and the vector is x B + offset. Without strength one step is exact, and x
    is the sum of the rows. With Z = Y W, W = (Y'Y + reg I)^-1/2, strength c - 1 and B = c W, the vector is that of ALS
    for implicit feedback (Hu, Koren and Volinsky, ICDM 2008) with confidence c. Every product has one row of the batch
    in it, so that an answer does not depend on the rows beside it.
    """

    name: str
    rows: NDArray[np.float32]
    strength: float
    back: NDArray[np.float32] | None
    offset: NDArray[np.float32]
    is_mean: bool = False

    def exact(self, items: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [dims]: the vector of a history, solved directly."""
        rows = self.rows[items].astype(np.float64)
        square = np.eye(rows.shape[1]) + self.strength * rows.T @ rows
        solved: NDArray[np.float64] = np.linalg.solve(square, rows.sum(axis=0))
        if self.is_mean:
            solved /= max(len(items), 1)
        turned = solved if self.back is None else solved @ self.back.astype(np.float64)
        return turned + self.offset.astype(np.float64)

    def tower(self, steps: int) -> OnnxModel:
        """history int32 [n, length] -> vector float32 [n, dims]; the number of the items is the padding."""
        table = np.concatenate([self.rows, np.zeros((1, self.rows.shape[1]), np.float32)])
        constants: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {
            "table": table,
            "offset": self.offset,
            "middle": np.array([1], np.int64),
            "real": np.concatenate([np.ones(len(self.rows), np.float32), np.zeros(1, np.float32)]),
        }
        nodes = [
            helper.make_node("Gather", ["table", "history"], ["rows"], axis=0),
            helper.make_node("Gather", ["real", "history"], ["here"], axis=0),
            helper.make_node("Unsqueeze", ["here", "middle"], ["ones"]),
            helper.make_node("MatMul", ["ones", "rows"], ["target"]),
        ]
        if self.strength:
            constants |= {"strength": np.array(self.strength, np.float32), "tiny": np.array(TINY)}
            nodes += [helper.make_node("Transpose", ["rows"], ["columns"], perm=[0, 2, 1])]
            nodes += _conjugate_gradients(steps)
            last = f"x{steps}"
        else:
            last = "target"
        if self.is_mean:
            # A sum of ones is exact in any order.
            constants["one"] = np.array(1, np.float32)
            nodes += [
                helper.make_node("ReduceSum", ["here", "middle"], ["length"], keepdims=1),
                helper.make_node("Max", ["length", "one"], ["at_least_one"]),
                helper.make_node("Unsqueeze", ["at_least_one", "middle"], ["tall_length"]),
                helper.make_node("Div", [last, "tall_length"], ["mean"]),
            ]
            last = "mean"
        if self.back is not None:
            # From the left: a constant on the right would become int8, which so small a product does not repay.
            constants["back"] = np.ascontiguousarray(self.back.T)
            nodes += [
                helper.make_node("Transpose", [last], ["column"], perm=[0, 2, 1]),
                helper.make_node("MatMul", ["back", "column"], ["turned"]),
                helper.make_node("Transpose", ["turned"], ["row"], perm=[0, 2, 1]),
            ]
            last = "row"
        nodes += [helper.make_node("Squeeze", [last, "middle"], ["flat"])]
        nodes += [helper.make_node("Add", ["flat", "offset"], ["vector"])]
        return model_of(
            nodes,
            [int32_info("history", ["rows_of_batch", "length_of_history"])],
            [float32_info("vector", self.rows.shape[1])],
            constants,
        )


def _conjugate_gradients(steps: int) -> list[NodeProto]:
    """Nodes from `rows`, `columns` and `target` to `x1`, `x2` and so on, from x0 = 0."""
    nodes = [
        helper.make_node("Sub", ["target", "target"], ["x0"]),
        helper.make_node("Identity", ["target"], ["r0"]),
        helper.make_node("Identity", ["target"], ["p0"]),
        *_dot_nodes("r0", "r0", "rr0"),
    ]
    for step in range(steps):
        previous_step, after = str(step), str(step + 1)
        nodes += [
            helper.make_node("MatMul", [f"p{previous_step}", "columns"], [f"along{previous_step}"]),
            helper.make_node(
                "MatMul", [f"along{previous_step}", "rows"], [f"square{previous_step}"]
            ),
            helper.make_node(
                "Mul", [f"square{previous_step}", "strength"], [f"weighed{previous_step}"]
            ),
            helper.make_node(
                "Add", [f"weighed{previous_step}", f"p{previous_step}"], [f"ap{previous_step}"]
            ),
            *_dot_nodes(f"p{previous_step}", f"ap{previous_step}", f"pap{previous_step}"),
            *_ratio_nodes(f"rr{previous_step}", f"pap{previous_step}", f"alpha{previous_step}"),
            *_moved_nodes(
                f"x{previous_step}",
                f"alpha{previous_step}",
                f"p{previous_step}",
                f"x{after}",
                "Add",
            ),
            *_moved_nodes(
                f"r{previous_step}",
                f"alpha{previous_step}",
                f"ap{previous_step}",
                f"r{after}",
                "Sub",
            ),
            *_dot_nodes(f"r{after}", f"r{after}", f"rr{after}"),
            *_ratio_nodes(f"rr{after}", f"rr{previous_step}", f"beta{previous_step}"),
            *_moved_nodes(
                f"r{after}", f"beta{previous_step}", f"p{previous_step}", f"p{after}", "Add"
            ),
        ]
    return nodes


def _dot_nodes(left_name: str, right_name: str, output_name: str) -> list[NodeProto]:
    return [
        helper.make_node("Transpose", [right_name], [f"{output_name}_column"], perm=[0, 2, 1]),
        helper.make_node("MatMul", [left_name, f"{output_name}_column"], [output_name]),
    ]


def _ratio_nodes(above: str, below: str, output_name: str) -> list[NodeProto]:
    return [
        helper.make_node("Max", [below, "tiny"], [f"{output_name}_below"]),
        helper.make_node("Div", [above, f"{output_name}_below"], [output_name]),
    ]


def _moved_nodes(start: str, by: str, along: str, output_name: str, how: str) -> list[NodeProto]:
    return [
        helper.make_node("Mul", [by, along], [f"{output_name}_step"]),
        helper.make_node(how, [start, f"{output_name}_step"], [output_name]),
    ]


@dataclass(frozen=True, slots=True)
class FoldChoice:
    """The fold that won, its tower, and recall@20 of each candidate (empty: nothing to choose by)."""

    name: str
    tower: OnnxModel
    spec: TowerSpec
    steps: int
    recalls: dict[str, float]


def ridges(rows: NDArray[np.float32], offset: NDArray[np.float32], target: float) -> list[Fold]:
    """The mean of a history's rows, and least squares against them with `target` for each, ridge-regularised.

    A ridge's vector solves (reg I + Z'Z) u = target Z'1.
    """
    size = float(np.square(rows, dtype=np.float64).sum(axis=1).mean()) or 1.0
    folds = [Fold("mean", rows, 0.0, None, offset, is_mean=True)]
    for ridge in RIDGES:
        back = np.eye(rows.shape[1], dtype=np.float32) * np.float32(target / (ridge * size))
        folds.append(Fold(f"ridge {ridge:g}", rows, 1 / (ridge * size), back, offset))
    return folds


def demand_taste(
    items: NDArray[np.float32],
    users: NDArray[np.float32],
    clicks: ClickMatrix,
    rng: np.random.Generator,
) -> None:
    """Raise SourceError if users' vectors rank clicked items no better than any other item."""
    if (auc := share_by_chance(items, users, clicks, rng)) is not None:
        raise as_by_chance(auc)


def as_by_chance(auc: float) -> SourceError:
    """Error for clicks that score above a random item in this share of pairs."""
    return SourceError(
        f"what users clicked scores above a random item in {auc:.0%} of pairs, as by chance: give all ids in the "
        "order of their rows, or, where these clicks are only to be left out of lists, import without them and "
        "name their file in [sources] interactions",
        share=auc,
    )


def share_by_chance(
    items: NDArray[np.float32],
    users: NDArray[np.float32],
    clicks: ClickMatrix,
    rng: np.random.Generator,
) -> float | None:
    """Return the share of pairs in which a clicked item scores above a random one, if that is as by chance; else None.

    None, too, for few clicks or users: `CHANCE` has to be DEVIATIONS standard deviations of such a share above it.
    """
    pairs = clicks.matrix.tocoo()
    if np.count_nonzero(np.diff(clicks.matrix.indptr)) < USERS_LEAST:
        return None
    sampled_pairs = rng.choice(pairs.nnz, min(pairs.nnz, 20_000), replace=False)
    vectors = users[pairs.row[sampled_pairs]]
    clicked = np.einsum("ij,ij->i", vectors, items[pairs.col[sampled_pairs]])
    random_scores = np.einsum(
        "ij,ij->i", vectors, items[rng.integers(len(items), size=len(sampled_pairs))]
    )
    auc = float(((clicked > random_scores) + 0.5 * (clicked == random_scores)).mean())
    return auc if auc + DEVIATIONS * 0.5 / np.sqrt(len(sampled_pairs)) < CHANCE else None


def choose(
    folds: Sequence[Fold],
    items: NDArray[np.float32],
    clicks: ClickMatrix | None,
    metric: Metric,
    rng: np.random.Generator,
) -> FoldChoice:
    """Return the candidate with the highest recall of held-out items, the first of equals, or without histories."""
    spec = TowerSpec(
        (InputSpec("history", "history", "int32", max_length=HISTORY_MAX, pad=len(items)),),
        "vector",
        items.shape[1],
    )
    rows = (
        np.empty(0, np.int64)
        if clicks is None
        else clicks.sample(USERS_MAX, HISTORY_ITEMS_MIN, rng)
    )
    folded_histories, held_out_histories = _cut(clicks, rows, rng)
    if not len(rows):
        steps, tower = enough_steps(folds[0], spec, folded_histories)
        return FoldChoice(folds[0].name, tower, spec, steps, {})
    recalls: dict[str, float] = {}
    winning_fold: FoldChoice | None = None  # the others are let go: each has a table of all items
    for fold in folds:
        steps, tower = enough_steps(fold, spec, folded_histories)
        fold_recall = recall(
            run(tower, spec, folded_histories), items, folded_histories, held_out_histories, metric
        )
        if winning_fold is None or fold_recall > recalls[winning_fold.name]:
            winning_fold = FoldChoice(fold.name, tower, spec, steps, recalls)
        recalls[fold.name] = fold_recall
    assert winning_fold is not None  # noqa: S101
    return winning_fold


@dataclass(frozen=True, slots=True, eq=False)
class Gain:
    """Share of pairs, float64 [users], in which held-out clicks score above a random item: with an input, and without.

    `name` is `history`, without which it is empty, or `user_features`, without which they are those of other users.
    """

    name: str
    with_own: NDArray[np.float64]
    without: NDArray[np.float64]

    def limits(self) -> list[str]:
        """Return a limit if the input is not shown to place users' own clicks higher; raise SourceError if lower.

        The test is paired: the mean of the users' differences, and its standard error.
        """
        gains = (self.with_own - self.without)[np.isfinite(self.with_own - self.without)]
        if len(gains) < USERS_LEAST:
            return []
        gain, error = float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(len(gains)))
        if gain > DEVIATIONS * error:
            return []
        ids, other = ("item_ids", "an empty one")
        if self.name == "user_features":
            ids, other = "user_ids", "those of other users"
        figures = (
            f"held-out clicks score above a random item in {np.nanmean(self.with_own):.1%} of pairs with users' own "
            f"{self.name}, and in {np.nanmean(self.without):.1%} with {other} (difference {gain:+.1%}, standard error "
            f"{error:.1%})"
        )
        if gain < -DEVIATIONS * error:
            raise SourceError(
                f"{figures}: give all {ids} in the order of the model's rows, or, where these clicks are only to be "
                "left out of lists, import without them and name their file in [sources] interactions",
                gain=gain,
            )
        limit = (
            f"tell whether {ids} are in the order of the model's rows: {figures}, which shows no gain; look at a few "
            "lists before you publish"
        )
        return [limit]


@dataclass(frozen=True, slots=True)
class TasteCheck:
    """Recall@20 of a user tower (None: nothing to hold out), and the reason why clicks could not judge its ids, if any.

    A tower that clicks judge to rank by chance is refused instead.
    """

    recall: float | None
    unjudged: str = ""
    gains: tuple[Gain, ...] = ()
    """What each kind of input adds, if there are clicks enough to judge by."""
    share: float | None = None
    """Share of pairs in which a held-out click scores above a random item, if there are enough."""


def check_taste(
    tower: OnnxModel,
    spec: TowerSpec,
    items: NDArray[np.float32],
    clicks: ClickMatrix | None,
    metric: Metric,
    rng: np.random.Generator,
    features: Mapping[str, NDArray[Any]] = NO_FEATURES,
) -> TasteCheck:
    """Return the recall@20 of a user tower, as `choose` measures it; `features` have a row for each user of the clicks.

    Raises SourceError if it ranks held-out items no better than any other item.
    """
    if clicks is None:
        return TasteCheck(None, "there are no clicks")
    are_usable = complete_rows(features, clicks.matrix.shape[0])
    rows = clicks.sample(USERS_MAX, HISTORY_ITEMS_MIN, rng, are_usable)
    if len(rows) < USERS_LEAST:
        rows = clicks.sample(USERS_MAX, 2, rng, are_usable)
    if not len(rows):
        return TasteCheck(None, "no user has clicked two items, of which one could be held out")
    user_features = {name: values[rows] for name, values in features.items()}
    shuffled = _shuffled(clicks, rows, rng)
    strangers = _strangers_inputs(spec, user_features, rng)
    vectors, held_out, tower_recall = [], [], 0.0
    strangers_vectors: dict[str, list[NDArray[np.float32]]] = {name: [] for name in strangers}
    for part in range(PARTS):
        folded_histories, held_out_histories = _hold_out(shuffled, part)
        vectors.append(run(tower, spec, folded_histories, user_features))
        for name, (is_emptied, features_of_others) in strangers.items():
            histories = Histories.of([()] * len(rows)) if is_emptied else folded_histories
            strangers_vectors[name].append(run(tower, spec, histories, features_of_others))
        held_out += _rows(held_out_histories)
        if part == 0:
            tower_recall = recall(vectors[0], items, folded_histories, held_out_histories, metric)
        if sum(map(len, held_out)) >= PAIRS_ENOUGH:
            break
    # Not what is in the history itself: a model of the next item may well place that last.
    pairs = Histories.of(held_out)
    ones = np.ones(len(pairs.indices), np.float32)
    shape = len(pairs), len(items)
    held_out_clicks = ClickMatrix(sp.csr_matrix((ones, pairs.indices, pairs.indptr), shape), None)
    if len(rows) >= USERS_LEAST:
        demand_taste(items, np.concatenate(vectors), held_out_clicks, rng)
    unjudged, gains, share = too_few_clicks(len(rows), len(pairs.indices)), [], None
    if not unjudged:
        compared = items[rng.choice(len(items), min(len(items), ITEMS_COMPARED), replace=False)]
        with_own = shares_above_random(
            np.concatenate(vectors), items, compared, pairs, len(rows), metric
        )
        for name, vectors_of_others in strangers_vectors.items():
            without = np.concatenate(vectors_of_others)
            shares = shares_above_random(without, items, compared, pairs, len(rows), metric)
            gains.append(Gain(name, with_own, shares))
        share = round(float(np.nanmean(with_own)), 4)
    return TasteCheck(tower_recall, unjudged, tuple(gains), share)


def _strangers_inputs(
    spec: TowerSpec, features: Mapping[str, NDArray[Any]], rng: np.random.Generator
) -> dict[str, tuple[bool, Mapping[str, NDArray[Any]]]]:
    """Return (is the history emptied, features) by the input that is taken away from its user."""
    inputs: dict[str, tuple[bool, Mapping[str, NDArray[Any]]]] = {}
    if spec.history is not None:
        inputs["history"] = True, features
    if features:
        order = rng.permutation(len(next(iter(features.values()))))
        inputs["user_features"] = False, {name: rows[order] for name, rows in features.items()}
    return inputs


def too_few_clicks(users: int, clicks: int) -> str:
    """Return why so few users or clicks cannot show that ids and rows do not belong together; empty if they can."""
    if users >= USERS_LEAST and clicks > PAIRS_LEAST:
        return ""
    return (
        f"{clicks:,} clicks of {users:,} users can be compared, and more than {PAIRS_LEAST:,} of {USERS_LEAST} are "
        "needed"
    )


def unjudged_ids(reason: str) -> str:
    """Return the limit of an import in which clicks could not judge the ids."""
    return (
        f"tell whether all ids are in the order of the model's rows, as clicks would show: {reason}; look at a few "
        "lists before you publish"
    )


def complete_rows(features: Mapping[str, NDArray[Any]], count: int) -> NDArray[np.bool_]:
    """Return a mask of the rows whose numbers are all finite."""
    mask = np.ones(count, np.bool_)
    for values in features.values():
        if values.dtype.kind == "f":
            mask &= np.isfinite(values).reshape(count, -1).all(axis=1)
    return mask


def enough_steps(fold: Fold, spec: TowerSpec, histories: Histories) -> tuple[int, OnnxModel]:
    """The fewest steps whose vectors are within TOLERANCE of the exact ones, or no step more makes them better."""
    if not fold.strength:
        return 1, fold.tower(1)
    lengths = np.diff(histories.indptr)
    sampled_histories = histories.select_rows(
        np.argsort(-lengths, kind="stable")[:: max(1, len(lengths) // 32)]
    )
    if not len(sampled_histories):
        sampled_histories = Histories.of([range(min(8, len(fold.rows)))])
    exact = np.stack([fold.exact(history) for history in _rows(sampled_histories)])
    scale = np.abs(exact).max(axis=1, keepdims=True) + TOLERANCE
    best_steps_and_tower, best_error = (STEPS[0], OnnxModel(b"")), np.inf
    for steps in STEPS:
        tower = fold.tower(steps)
        error = float((np.abs(run(tower, spec, sampled_histories) - exact) / scale).max())
        if error < best_error / 1.5:
            best_steps_and_tower, best_error = (steps, tower), error
        if error <= TOLERANCE:
            break
    return best_steps_and_tower


def run(
    tower: OnnxModel,
    spec: TowerSpec,
    histories: Histories,
    features: Mapping[str, NDArray[Any]] = NO_FEATURES,
) -> NDArray[np.float32]:
    """Vectors float32 [n, dims] of histories and features, by the model as it will be served."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "user_tower.onnx"
        tower.write(path)
        return Tower.open(path, spec).run(user_inputs(spec, histories, features))


def user_inputs(
    spec: TowerSpec, histories: Histories, features: Mapping[str, NDArray[Any]]
) -> dict[str, Histories | NDArray[Any]]:
    """Return the inputs of a user tower by name; histories are left out if it takes none."""
    of_history = {} if spec.history is None else {spec.history.name: histories}
    return {**of_history, **features}


def _rows(histories: Histories) -> list[NDArray[np.int64]]:
    return np.split(histories.indices, histories.indptr[1:-1])


def _cut(
    clicks: ClickMatrix | None, rows: NDArray[np.int64], rng: np.random.Generator
) -> tuple[Histories, Histories]:
    """Return (items to fold, items to find) of these users: one fifth of each history is held out."""
    if clicks is None or not len(rows):
        return Histories.of([]), Histories.of([])
    return _hold_out(_shuffled(clicks, rows, rng), 0)


_Shuffled = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""For each user: a history, and its places in a random order."""


def _shuffled(clicks: ClickMatrix, rows: NDArray[np.int64], rng: np.random.Generator) -> _Shuffled:
    histories = _rows(clicks.histories(rows, HISTORY_MAX))
    return [(history, rng.permutation(len(history))) for history in histories]


def _hold_out(shuffled: _Shuffled, part: int) -> tuple[Histories, Histories]:
    """Return (items to fold, items to find); histories of fewer items than parts have nothing to find in the last."""
    folded_histories, held_out_histories = [], []
    for history, mixed in shuffled:
        size = max(1, len(mixed) // PARTS)
        is_held_out = np.zeros(len(mixed), np.bool_)
        is_held_out[mixed[part * size : (part + 1) * size]] = True
        held_out_histories.append(history[mixed[part * size : (part + 1) * size]])
        folded_histories.append(history[~is_held_out])
    return Histories.of(folded_histories), Histories.of(held_out_histories)
