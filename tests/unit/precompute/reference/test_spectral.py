"""The reference model's spectrum: products in parts, singular vectors, the damping."""

import numpy as np
import pytest
import scipy.sparse as sp

from precompute.reference import matrix_factorisation
from precompute.reference.matrix_factorisation import (
    SpectralShape,
    UserItemMatrix,
    build_matrix,
    compute_singular_vectors,
    compute_spectral_tables,
    orthonormalize,
)

USERS, ITEMS = 300, 120


@pytest.fixture(scope="module")
def matrix() -> sp.csr_matrix:
    """Clicks with popular and rare items; some users have none, nor has one item."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, USERS - 5, 4_000), (ITEMS * rng.random(4_000) ** 2).astype(int)
    kept_mask = items != 7
    return build_matrix(users[kept_mask], items[kept_mask], (USERS, ITEMS))


def normalised(matrix: sp.csr_matrix, shape: SpectralShape) -> np.ndarray:
    """The normalised matrix, as the formula says it."""
    dense = matrix.toarray().astype(np.float64)
    users, items = dense.sum(axis=1), dense.sum(axis=0)
    with np.errstate(divide="ignore"):
        user_weights = np.where(users > 0, users**-shape.user_exponent, 0)
        right = np.where(items > 0, items**-shape.item_exponent, 0)
    normalised_matrix: np.ndarray = user_weights[:, None] * dense * right
    return normalised_matrix


@pytest.mark.parametrize("shape", [SpectralShape(), SpectralShape(0.25, 0.2), SpectralShape(0.0, 0.0)])
def test_the_product_with_the_gram_matrix_is_that_of_the_normalised_matrix(matrix, shape):
    basis = np.random.default_rng(1).standard_normal((ITEMS, 9)).astype(np.float32)
    wide = normalised(matrix, shape)

    product = UserItemMatrix.of(matrix).multiply_by_gram(basis, shape)

    np.testing.assert_allclose(product, wide.T @ (wide @ basis), rtol=2e-4, atol=1e-3)


def test_the_bits_of_a_product_do_not_depend_on_cores_or_chunks_of_users(matrix, monkeypatch):
    basis = np.random.default_rng(1).standard_normal((ITEMS, 9)).astype(np.float32)
    data, serialised_products = UserItemMatrix.of(matrix), []

    for cores in (1, 2, 5):
        monkeypatch.setattr(matrix_factorisation, "usable_cores", lambda cores=cores: cores)
        serialised_products.append(data.multiply_by_gram(basis, SpectralShape()).tobytes())

    assert len(set(serialised_products)) == 1


def test_singular_vectors_equal_the_exact_ones(matrix):
    shape = SpectralShape(dims=10)

    spectrum = compute_singular_vectors(UserItemMatrix.of(matrix), shape, np.random.default_rng(0), round_count=30)

    _, values, rows = np.linalg.svd(normalised(matrix, shape))
    np.testing.assert_allclose(spectrum.singular_values[:10], values[:10], rtol=1e-3)
    cosines = np.abs((spectrum.singular_vectors[:, :4] * rows[:4].T).sum(axis=0))
    np.testing.assert_allclose(cosines, 1, atol=1e-3)


def test_scores_are_those_of_the_ridge_regression_of_the_normalised_matrix(matrix):
    """With all dimensions: N (N'N + r I)^-1 N'N of the row, normalised and brought back."""
    shape = SpectralShape(0.5, 0.4, ridge=0.1, dims=ITEMS)
    data = UserItemMatrix.of(matrix)
    spectrum = compute_singular_vectors(data, shape, np.random.default_rng(0), round_count=30)

    rows, items = compute_spectral_tables(spectrum, data.item_degrees, shape)

    wide = normalised(matrix, shape)
    gram = wide.T @ wide
    ridge = 0.1 * np.linalg.svd(wide)[1][0] ** 2
    filtered = np.linalg.solve(gram + ridge * np.eye(ITEMS), gram)
    clicks, degrees = matrix.toarray(), data.item_degrees
    is_clicked = degrees > 0
    expected_scores = (
        (clicks[:, is_clicked] * degrees[is_clicked] ** -0.4)
        @ filtered[is_clicked]
        * np.where(is_clicked, np.where(is_clicked, degrees, 1) ** 0.4, 0)
    )
    np.testing.assert_allclose((clicks @ rows) @ items.T, expected_scores, atol=2e-3 * expected_scores.max())


def test_a_basis_becomes_orthonormal_and_a_column_that_adds_nothing_becomes_zero():
    rng = np.random.default_rng(0)
    basis = rng.standard_normal((20_000, 6)).astype(np.float32) * np.logspace(0, -4, 6, dtype="f4")
    basis = np.concatenate([basis, basis[:, :1]], axis=1)

    orthonormal_basis = orthonormalize(orthonormalize(basis))

    inside = orthonormal_basis.T.astype(np.float64) @ orthonormal_basis
    np.testing.assert_allclose(inside, np.diag([0, *np.ones(6)]), atol=1e-5)
    residual = basis - orthonormal_basis @ (orthonormal_basis.T @ basis)
    np.testing.assert_allclose(residual, 0, atol=1e-4)


def test_an_item_without_clicks_scores_nothing(matrix):
    data = UserItemMatrix.of(matrix)
    spectrum = compute_singular_vectors(data, SpectralShape(dims=8), np.random.default_rng(0), round_count=5)

    rows, items = compute_spectral_tables(spectrum, data.item_degrees, SpectralShape(dims=8))

    assert not rows[7].any() and not items[7].any()
