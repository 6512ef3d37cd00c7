"""Alternating least squares: what the vectors minimise, the fold, the bits."""

import numpy as np
import pytest
import scipy.sparse as sp

from precompute.reference import matrix_factorisation
from precompute.reference.matrix_factorisation import (
    AlternatingShape,
    SpectralShape,
    UserItemMatrix,
    build_matrix,
    compute_fold_rows,
    compute_singular_vectors,
    train_alternating_item_vectors,
)

USERS, ITEMS = 300, 120
RNG = np.random.default_rng(0)
SHAPE = AlternatingShape(others=0.05, regularization=0.02, dims=8)


@pytest.fixture(scope="module")
def data() -> UserItemMatrix:
    """Clicks with popular and rare items; some users have none, nor has one item."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, USERS - 5, 4_000), (ITEMS * rng.random(4_000) ** 2).astype(int)
    kept_mask = items != 7
    return UserItemMatrix.of(build_matrix(users[kept_mask], items[kept_mask], (USERS, ITEMS)))


@pytest.fixture(scope="module")
def start(data):
    return compute_singular_vectors(data, SpectralShape(dims=8), np.random.default_rng(0), round_count=5)


def solved(clicks: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """What is best beside the other side's vectors, row by row, as the formula says it."""
    solved_vectors = np.zeros((len(clicks), theirs.shape[1]))
    for row, liked in enumerate(clicks > 0):
        weight = liked.sum() + SHAPE.others * len(theirs)
        square = theirs[liked].T @ theirs[liked] + SHAPE.others * theirs.T @ theirs
        square += SHAPE.regularization * weight * np.eye(theirs.shape[1])
        solved_vectors[row] = np.linalg.solve(square, theirs[liked].sum(axis=0))
    return solved_vectors


def test_after_many_rounds_either_side_is_optimal_given_the_other(data, start):
    clicks = data.matrix.toarray().astype(np.float64)

    items = train_alternating_item_vectors(data, start, SHAPE, RNG, round_count=300).astype(np.float64)

    np.testing.assert_allclose(solved(clicks.T, solved(clicks, items)), items, atol=2e-3)
    assert np.abs(items).max() > 0.5


def test_an_item_without_clicks_has_no_vector_and_scores_nothing(data, start):
    items = train_alternating_item_vectors(data, start, SHAPE, RNG)

    assert not items[7].any() and items[:7].any(axis=1).all()
    assert not compute_fold_rows(items, data, SHAPE)[7].any()


def test_the_bits_do_not_depend_on_cores_and_hardly_on_blocks(data, start, monkeypatch):
    usual = train_alternating_item_vectors(data, start, SHAPE, RNG)

    for cores in (1, 5):
        monkeypatch.setattr(matrix_factorisation, "usable_cores", lambda cores=cores: cores)
        assert train_alternating_item_vectors(data, start, SHAPE, RNG).tobytes() == usual.tobytes()
    monkeypatch.setattr(matrix_factorisation, "BLOCK_NUMBERS", 1)
    np.testing.assert_allclose(train_alternating_item_vectors(data, start, SHAPE, RNG), usual, atol=1e-4)


def test_of_more_users_than_fit_a_random_part_trains_vectors_much_like_all(data, start, monkeypatch):
    usual = train_alternating_item_vectors(data, start, SHAPE, RNG)
    monkeypatch.setattr(matrix_factorisation, "USER_NUMBERS_MAX", 8 * USERS * 2 // 3)

    sampled_vectors = train_alternating_item_vectors(data, start, SHAPE, np.random.default_rng(0))

    is_popular, scores = data.item_degrees > 5, sampled_vectors @ sampled_vectors.T
    likeness = np.corrcoef(
        scores[is_popular][:, is_popular].ravel(), (usual @ usual.T)[is_popular][:, is_popular].ravel()
    )
    assert 0.7 < likeness[0, 1] < 0.9999


def test_a_fold_is_the_ridge_regression_that_knows_only_the_other_items(data, start):
    items = train_alternating_item_vectors(data, start, SHAPE, RNG)
    shape = AlternatingShape(0.05, 0.02, ridge=3.0, item_exponent=0.2, dims=8)

    rows = compute_fold_rows(items, data, shape)

    wide = items.astype(np.float64)
    mean = data.matrix.nnz / USERS + 0.05 * ITEMS
    square = 0.05 * wide.T @ wide + 3.0 * 0.02 * mean * np.eye(8)
    degrees = np.maximum(data.item_degrees, 1)[:, None]
    np.testing.assert_allclose(rows, degrees**-0.2 * wide @ np.linalg.inv(square), rtol=1e-3, atol=1e-5)


def test_rows_are_solved_together_with_rows_of_about_their_length():
    lengths = np.array([3, 0, 1, 900, 3, 2, 1])
    columns = np.concatenate([np.arange(length) for length in lengths])
    rows = np.repeat(np.arange(7), lengths)
    matrix = sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), (7, 1_000))

    blocks = list(matrix_factorisation._Side.of(matrix, SHAPE)._blocks(matrix_factorisation.BLOCK_NUMBERS // 6))

    assert [block.tolist() for block in blocks] == [[2, 6, 5], [0, 4], [3]]
