"""Folds of histories: the exact vector, the tower that is served, and the choice between candidates."""

from dataclasses import asdict

import numpy as np
import onnxruntime
import pytest
import scipy.sparse as sp

from cache.errors import SourceError
from cache.model.tower import Histories, Tower
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.adapters.factorisations import _als_fold
from precompute.adapters.fold_in import (
    HISTORY_ITEMS_MAX,
    HistoryFold,
    choose_fold,
    demand_better_than_chance,
    find_enough_steps,
    mean_and_ridge_folds,
    run_tower,
)
from precompute.adapters.inputs import ClickMatrix, checked_ids
from tests.unit.precompute.adapters.written import taste_clicks

COUNT, DIMS = 1500, 12
RNG = np.random.default_rng(7)
ITEMS = RNG.normal(0, 0.3, (COUNT, DIMS)).astype(np.float32)
ZERO = np.zeros(DIMS, np.float32)
REGULARIZATION, CONFIDENCE = 0.5, 6.0
LENGTHS = (1, 2, 50, 1024)
HISTORIES = Histories.of([np.sort(RNG.choice(COUNT, length, replace=False)) for length in LENGTHS])
SPEC = TowerSpec((InputSpec("history", "history", "int32", max_length=HISTORY_ITEMS_MAX, pad=COUNT),), "vector", DIMS)
FOLDS = {
    "ALS": _als_fold(ITEMS, REGULARIZATION, CONFIDENCE),
    **{fold.fold_name: fold for fold in mean_and_ridge_folds(ITEMS, ZERO + 0.25, 1.5)},
    "sum": HistoryFold("sum", ITEMS, 0.0, None, ZERO),
    "turned sum": HistoryFold("turned", ITEMS, 0.0, np.diag(np.arange(DIMS)).astype("f4"), ZERO),
}


def rows_of(histories):
    return np.split(histories.indices, histories.indptr[1:-1])


def hu(history):
    """The vector of Hu, Koren and Volinsky: (Y'Y + (c - 1) Z'Z + reg I) u = c Z'1, every item with its confidence."""
    wide = ITEMS.astype(np.float64)
    confidences = np.ones(COUNT)
    confidences[history] = CONFIDENCE
    preferences = np.zeros(COUNT)
    preferences[history] = 1
    square = wide.T @ (confidences[:, None] * wide) + REGULARIZATION * np.eye(DIMS)
    return np.linalg.solve(square, wide.T @ (confidences * preferences))


@pytest.mark.parametrize("history", rows_of(HISTORIES), ids=LENGTHS)
def test_als_is_its_papers_equations(history):
    np.testing.assert_allclose(FOLDS["ALS"].exact_vector(history), hu(history), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("history", rows_of(HISTORIES), ids=LENGTHS)
def test_a_ridge_is_least_squares(history):
    rows = ITEMS.astype(np.float64)
    size = np.square(rows).sum(axis=1).mean()
    history_rows = rows[history]
    for fold, factor in zip(mean_and_ridge_folds(ITEMS, ZERO, 1.5)[1:], (0.1, 1.0, 10.0), strict=True):
        square = factor * size * np.eye(DIMS) + history_rows.T @ history_rows
        vector = np.linalg.solve(square, 1.5 * history_rows.sum(axis=0))
        np.testing.assert_allclose(fold.exact_vector(history), vector, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)
def test_the_tower_gives_the_exact_vectors(fold):
    steps, tower = find_enough_steps(fold, SPEC, HISTORIES)

    vectors = run_tower(tower, SPEC, HISTORIES)

    for vector, history in zip(vectors, rows_of(HISTORIES), strict=True):
        exact = fold.exact_vector(history)
        assert np.abs(vector - exact).max() <= 1e-5 * max(1.0, np.abs(exact).max()), steps


@pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)
def test_a_rows_bytes_do_not_depend_on_the_other_rows(fold):
    rng = np.random.default_rng(0)
    lengths = np.concatenate([LENGTHS, rng.integers(0, 200, 60)])
    histories = Histories.of([rng.choice(COUNT, length, replace=False) for length in lengths])
    tower = fold.tower(8 if fold.gram_factor else 1)

    batch_vectors = run_tower(tower, SPEC, histories)

    for row in (*range(8), 63):
        alone = run_tower(tower, SPEC, histories.select_rows(np.array([row])))
        assert alone.tobytes() == batch_vectors[row].tobytes()


@pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)
def test_padding_of_any_length_has_no_influence(fold):
    session = onnxruntime.InferenceSession(
        fold.tower(8 if fold.gram_factor else 1).graph, providers=["CPUExecutionProvider"]
    )
    history = rows_of(HISTORIES)[2]
    exact = fold.exact_vector(history)

    for padding in (0, 1, 14, 500):
        padded = np.concatenate([history, np.full(padding, COUNT)]).astype(np.int32)[None]
        vector = session.run(["vector"], {"history": padded})[0][0]
        # Longer rows are summed in another order, so the last bits differ.
        unpadded_vector = session.run(["vector"], {"history": history.astype(np.int32)[None]})[0][0]
        assert np.abs(vector - unpadded_vector).max() <= 2e-6 * max(1.0, np.abs(exact).max())


@pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)
def test_nothing_becomes_the_offset(fold):
    empty = Histories.of([(), ()])

    vectors = run_tower(fold.tower(4 if fold.gram_factor else 1), SPEC, empty)

    assert np.array_equal(vectors, np.stack([fold.vector_offset, fold.vector_offset]))
    assert np.array_equal(fold.exact_vector(np.empty(0, np.int64)), fold.vector_offset)


def test_history_longer_than_the_longest_is_its_end(tmp_path):
    fold = FOLDS["sum"]
    history = np.random.default_rng(0).permutation(COUNT)
    fold.tower(1).write(tmp_path / "tower.onnx")

    vectors = Tower.open(tmp_path / "tower.onnx", SPEC).run({"history": Histories.of([history])})

    np.testing.assert_allclose(vectors[0], fold.exact_vector(history[-HISTORY_ITEMS_MAX:]), atol=1e-4)


CLICKS = ClickMatrix.of(taste_clicks(), checked_ids(range(120), "user"), checked_ids(range(80), "item"))
TASTE = (np.arange(80)[:, None] % 4 == np.arange(4)).astype(np.float32)
"""Vectors of items that say to which group each belongs."""
NONE = np.zeros(4, np.float32)


def planted():
    """A fold that knows the groups, and one that mistakes each for the next."""
    good = HistoryFold("good", TASTE, 0.0, None, NONE, is_mean=True)
    return good, HistoryFold("bad", np.roll(TASTE, 1, axis=1), 0.0, None, NONE, is_mean=True)


@pytest.mark.parametrize("turned", [False, True])
def test_the_better_candidate_is_chosen_wherever_it_stands(turned):
    folds = planted()[:: -1 if turned else 1]

    fold_choice = choose_fold(folds, TASTE, CLICKS, "inner_product", np.random.default_rng(0))

    assert (
        fold_choice.fold_name == "good" and fold_choice.recall_by_fold["good"] > 2 * fold_choice.recall_by_fold["bad"]
    )


def test_the_first_of_equals_is_chosen():
    good = planted()[0]
    twin = HistoryFold("twin", TASTE, 0.0, None, NONE, is_mean=True)

    fold_choice = choose_fold([good, twin], TASTE, CLICKS, "inner_product", np.random.default_rng(0))

    assert fold_choice.fold_name == "good" and fold_choice.recall_by_fold["good"] == fold_choice.recall_by_fold["twin"]


def test_without_histories_the_first_is_chosen_and_nothing_claimed():
    short = CLICKS.matrix.copy()
    short.data[:] = 0
    none = ClickMatrix.of(sp.csr_matrix(short), CLICKS.user_ids, checked_ids(range(80), "item"))

    for clicks in (None, none):
        fold_choice = choose_fold(planted()[::-1], TASTE, clicks, "inner_product", np.random.default_rng(0))
        assert fold_choice.fold_name == "bad" and not fold_choice.recall_by_fold


def test_the_choice_is_the_same_every_time():
    twice = [choose_fold(planted(), TASTE, CLICKS, "cosine", np.random.default_rng(3)) for _ in range(2)]

    assert asdict(twice[0]) == asdict(twice[1])


def test_users_that_like_what_they_clicked_pass_and_mixed_ones_do_not():
    users = CLICKS.matrix.toarray() @ TASTE
    demand_better_than_chance(TASTE, users, CLICKS, np.random.default_rng(0))

    with pytest.raises(SourceError, match="as by chance"):
        demand_better_than_chance(TASTE, np.roll(users, 1, axis=0), CLICKS, np.random.default_rng(0))
