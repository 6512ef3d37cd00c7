"""Factorisations of the user-item matrix, spectral and alternating: vectors of the reference model. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, product
from typing import Self

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cache.model.tower import Histories
from cache.process.host import usable_cores

USER_PART_COUNT = 8
"""Number of user ranges whose products are summed in a fixed order, so that results do not depend on the core count."""

CHUNK_USERS_MAX = 32_768
"""Users whose product with a basis a thread holds in memory at once."""

STRIP_ROWS = 8192
"""Rows of a tall matrix that are rotated, or converted to float64, at once."""

SPECTRAL_ROUNDS = 5
"""Rounds of subspace iteration from a random basis."""

_EXTRA_DIMS = 32

ALTERNATING_ROUNDS = 6
"""Rounds of alternating least squares in a training; with more, weakly regularised shapes would score lower."""

CONJUGATE_GRADIENT_STEPS = 2
"""Steps of conjugate gradients in each half round."""

USER_NUMBERS_MAX = 1 << 28
"""Most numbers in all users' vectors, 1 GiB; of more users, a random sample trains the items' vectors."""

BLOCK_NUMBERS = 1 << 20
"""Numbers in the padded vectors of rows that are solved together, so that they stay in a core's cache."""

TINY = np.float32(1e-30)
"""Lower bound of denominators; it avoids 0 / 0, so that a solved row stays unchanged."""

USER_EXPONENTS = (0.5, 0.25)

ITEM_EXPONENTS = (0.5, 0.4, 0.3, 0.2)

UNOBSERVED_WEIGHTS = (0.003, 0.02, 0.1)

REGULARIZATIONS = (0.003, 0.01, 0.03)

SPECTRAL_RIDGES = (0.3, 0.1, 0.03, 0.01)

FOLD_RIDGES = (0.3, 1.0, 3.0)

FOLD_EXPONENTS = (0.0, 0.2)


@dataclass(frozen=True, slots=True)
class SpectralShape:
    """Parameters of a damped spectral model: exponents of degrees, the ridge, and the dimensions.

    With R the 0/1 matrix of users and items and D their degrees, V and s are the top right singular vectors and values
    of D_u^-a R D_i^-b. A user is the sum of D_i^-b V f(s) over the history, an item is D_i^b V: the row is normalised,
    projected onto the subspace, damped and scaled back (PureSVD, Cremonesi et al., RecSys 2010, with the degree
    normalisation of GF-CF, Shen et al., CIKM 2021). The damping f(s) = s^2 / (s^2 + ridge s_1^2) is that of a linear
    autoencoder with a ridge penalty. Since a user is one linear layer over the history, unseen users can be folded in.
    """

    user_exponent: float = 0.5
    item_exponent: float = 0.4
    ridge: float = 0.03
    dims: int = 256


@dataclass(frozen=True, slots=True)
class AlternatingShape:
    """Parameters of a model by alternating least squares: weights, ridge and exponent of the fold-in, dimensions.

    Vectors u of users and v of items minimise the sum of three terms: over interactions, (1 - u.v)^2; over all pairs,
    `others` times (u.v)^2; and the squared length of each vector, times the regularisation, times the total weight of
    the vector's terms (Hu, Koren and Volinsky, ICDM 2008, weighted as by Rendle et al., RecSys 2022). A half round
    improves the vectors of one side by some steps of conjugate gradients from their current values (Takacs et al.,
    RecSys 2011).

    With V the items' vectors and D_i their degrees, a user is the sum of D_i^-b V (others V'V + ridge reg w I)^-1 over
    the history, w being the mean weight of a user: the ridge regression without the user's own quadratic terms, so that
    one linear layer folds in any user. The exponent b compensates for the missing terms.
    """

    others: float = 0.01
    regularization: float = 0.01
    ridge: float = 1.0
    item_exponent: float = 0.0
    dims: int = 256


ModelShape = SpectralShape | AlternatingShape

HistoryRowsAndItemVectors = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Float32 [items, dims] each: rows whose sum over a history is the user's vector, and the items' vectors."""


@dataclass(frozen=True, slots=True, eq=False)
class UserItemMatrix:
    """0/1 CSR matrix [users, items], and the degrees of both (float64)."""

    matrix: sp.csr_matrix
    user_degrees: NDArray[np.float64]
    item_degrees: NDArray[np.float64]

    @classmethod
    def of(cls, matrix: sp.csr_matrix) -> Self:
        """Return the matrix with its degrees."""
        return cls(
            matrix,
            np.diff(matrix.indptr).astype(np.float64),
            np.bincount(matrix.indices, minlength=matrix.shape[1]).astype(np.float64),
        )

    @property
    def item_count(self) -> int:
        """Number of columns."""
        return len(self.item_degrees)

    def multiply_by_gram(self, basis: NDArray[np.float32], shape: SpectralShape) -> NDArray[np.float32]:
        """Return float32 [items, width]: N'N times the basis, where the normalised matrix N is never materialised."""
        item_scales = degree_power(self.item_degrees, -shape.item_exponent).astype(np.float32)[:, None]
        user_weights = degree_power(self.user_degrees, -2 * shape.user_exponent).astype(np.float32)
        scaled_basis = np.ascontiguousarray(basis * item_scales)
        user_count = len(user_weights)
        part_bounds = np.linspace(0, user_count, min(USER_PART_COUNT, user_count) + 1).astype(np.int64)

        def product(part_bounds: tuple[int, int]) -> NDArray[np.float32]:
            total = np.zeros_like(scaled_basis)
            for first_user in range(*part_bounds, CHUNK_USERS_MAX):
                end_user = min(first_user + CHUNK_USERS_MAX, part_bounds[1])
                chunk_matrix = self.matrix[first_user:end_user]
                total += chunk_matrix.T @ ((chunk_matrix @ scaled_basis) * user_weights[first_user:end_user, None])
            return total

        total = np.zeros_like(scaled_basis)
        with ThreadPoolExecutor(usable_cores()) as pool:
            for partial_product in pool.map(product, pairwise(part_bounds)):
                total += partial_product
        return total * item_scales


def build_matrix(
    user_rows: NDArray[np.int64], item_rows: NDArray[np.int64], matrix_shape: Sequence[int]
) -> sp.csr_matrix:
    """Build a 0/1 CSR matrix from pairs; repeated pairs count once, columns ascend."""
    ones = np.ones(len(user_rows), np.float32)
    matrix = sp.csr_matrix((ones, (user_rows, item_rows)), shape=tuple(matrix_shape))
    matrix.sum_duplicates()
    matrix.data[:] = 1
    return matrix


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """Right singular vectors float64 [items, width] and values [width], largest first; a few more than requested."""

    singular_vectors: NDArray[np.float64]
    singular_values: NDArray[np.float64]


def train_tables(
    user_item_matrix: UserItemMatrix, shapes: Iterable[ModelShape], rng: np.random.Generator
) -> Iterator[tuple[ModelShape, HistoryRowsAndItemVectors]]:
    """Yield the tables of each shape; adjacent shapes with the same training share it."""
    start_spectrum: Spectrum | None = None
    for training_shape_in_use, training_shapes in groupby(shapes, training_shape):
        if isinstance(training_shape_in_use, SpectralShape):
            spectrum = compute_singular_vectors(
                user_item_matrix, training_shape_in_use, rng, round_count=SPECTRAL_ROUNDS
            )
            for shape in training_shapes:
                assert isinstance(shape, SpectralShape)  # noqa: S101 - as its training is
                yield shape, compute_spectral_tables(spectrum, user_item_matrix.item_degrees, shape)
        else:
            if start_spectrum is None or start_spectrum.singular_vectors.shape[1] < training_shape_in_use.dims:
                start_spectrum = compute_singular_vectors(
                    user_item_matrix, SpectralShape(dims=training_shape_in_use.dims), rng, round_count=SPECTRAL_ROUNDS
                )
            vectors = train_alternating_item_vectors(user_item_matrix, start_spectrum, training_shape_in_use, rng)
            for shape in training_shapes:
                assert isinstance(shape, AlternatingShape)  # noqa: S101 - as its training is
                yield shape, (compute_fold_rows(vectors, user_item_matrix, shape), vectors)


def compute_singular_vectors(
    user_item_matrix: UserItemMatrix, shape: SpectralShape, rng: np.random.Generator, *, round_count: int
) -> Spectrum:
    """Compute top singular vectors of the normalised matrix by subspace iteration (Halko et al., 2011).

    Signs are fixed: the largest component of each vector is positive.
    """
    width = min(shape.dims + _EXTRA_DIMS, user_item_matrix.item_count)
    basis = rng.standard_normal((user_item_matrix.item_count, width), np.float32)
    for _ in range(round_count):
        basis = user_item_matrix.multiply_by_gram(orthonormalize(basis), shape)
    basis = orthonormalize(orthonormalize(basis))
    # This product also gives the rotation from the subspace to singular vectors (Rayleigh-Ritz).
    gram_basis = user_item_matrix.multiply_by_gram(basis, shape)
    squared_values, rotation = np.linalg.eigh(basis.T.astype(np.float64) @ gram_basis.astype(np.float64))
    vectors = basis.astype(np.float64) @ rotation[:, ::-1]
    largest_rows = np.abs(vectors).argmax(axis=0)
    signs = np.where(vectors[largest_rows, np.arange(width)] < 0, -1.0, 1.0)
    return Spectrum(vectors * signs, np.sqrt(np.maximum(squared_values[::-1], 0)))


def orthonormalize(basis: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return orthonormal columns with the span of a tall matrix's columns; a dependent column becomes 0.

    It uses the eigenvectors of the Gram matrix in float64 and reads the rows once. Applied twice it is exact
    (Stathopoulos and Wu, SISC 2002), and 2.5 times as fast as a Householder QR of 41,000 x 288.
    """
    squared_lengths, eigenvectors = np.linalg.eigh(compute_gram(basis))
    is_independent = squared_lengths > squared_lengths[-1] * 1e-12
    lengths = np.sqrt(np.where(is_independent, squared_lengths, 1))
    return basis @ (eigenvectors * np.where(is_independent, 1 / lengths, 0)).astype(np.float32)


def compute_gram(tall_matrix: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return Z'Z of a tall matrix in float64, [width, width]; the rows are read once."""
    gram_sum = np.zeros((tall_matrix.shape[1],) * 2)
    for first_row in range(0, len(tall_matrix), STRIP_ROWS):
        strip_rows = tall_matrix[first_row : first_row + STRIP_ROWS].astype(np.float64)
        gram_sum += strip_rows.T @ strip_rows
    return gram_sum


def compute_spectral_tables(
    spectrum: Spectrum, item_degrees: NDArray[np.float64], shape: SpectralShape
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (rows whose sum over a history is the user's vector, items' vectors), float32 [items, dims] each."""
    singular_vectors, singular_values = (
        spectrum.singular_vectors[:, : shape.dims],
        spectrum.singular_values[: shape.dims],
    )
    squared_values = np.square(singular_values)
    damping = squared_values / np.maximum(squared_values + shape.ridge * squared_values[0], 1e-30)
    history_rows = degree_power(item_degrees, -shape.item_exponent)[:, None] * singular_vectors * damping
    item_vectors = degree_power(item_degrees, shape.item_exponent)[:, None] * singular_vectors
    return history_rows.astype(np.float32), item_vectors.astype(np.float32)


def degree_power(degrees: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    """Return the degrees raised to an exponent; 0 stays 0."""
    return np.power(degrees, exponent, out=np.zeros_like(degrees), where=degrees > 0)


def train_alternating_item_vectors(
    user_item_matrix: UserItemMatrix,
    start_spectrum: Spectrum,
    shape: AlternatingShape,
    rng: np.random.Generator,
    round_count: int = ALTERNATING_ROUNDS,
) -> NDArray[np.float32]:
    """Train item vectors float32 [items, dims] for some rounds, starting from those of the default spectral shape."""
    matrix, users_max = user_item_matrix.matrix, USER_NUMBERS_MAX // shape.dims
    if matrix.shape[0] > users_max:
        matrix = matrix[np.sort(rng.choice(matrix.shape[0], users_max, replace=False))]
    user_side, item_side = _Side.of(matrix, shape), _Side.of(matrix.T.tocsr(), shape)
    _, item_vectors = compute_spectral_tables(
        start_spectrum, user_item_matrix.item_degrees, SpectralShape(dims=shape.dims)
    )
    item_vectors /= np.sqrt(np.square(item_vectors).sum(axis=1).mean())
    user_vectors = np.zeros((matrix.shape[0], item_vectors.shape[1]), np.float32)
    for _ in range(round_count):
        user_side.improve_vectors(user_vectors, item_vectors)
        item_side.improve_vectors(item_vectors, user_vectors)
    return item_vectors


def compute_fold_rows(
    item_vectors: NDArray[np.float32], user_item_matrix: UserItemMatrix, shape: AlternatingShape
) -> NDArray[np.float32]:
    """Return the rows whose sum over a history is the user's vector, float32 [items, dims]."""
    mean_user_weight = user_item_matrix.user_degrees.mean() + shape.others * user_item_matrix.item_count
    system_matrix = shape.others * compute_gram(item_vectors)
    system_matrix += shape.ridge * shape.regularization * mean_user_weight * np.eye(len(system_matrix))
    scaled_vectors = degree_power(user_item_matrix.item_degrees, -shape.item_exponent)[:, None] * item_vectors
    return (scaled_vectors @ np.linalg.inv(system_matrix)).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One side of the matrix (users by items, or items by users): each row's columns and regularisation."""

    histories: Histories
    history_lengths: NDArray[np.int64]
    regularizations: NDArray[np.float32]
    unobserved_weight: float

    @classmethod
    def of(cls, matrix: sp.csr_matrix, shape: AlternatingShape) -> "_Side":
        histories = Histories(matrix.indptr, matrix.indices)
        row_lengths = np.diff(matrix.indptr)
        weights = row_lengths + shape.others * matrix.shape[1]
        regularizations = (shape.regularization * weights).astype(np.float32)
        return cls(histories, row_lengths, regularizations, shape.others)

    def improve_vectors(self, improved_vectors: NDArray[np.float32], other_vectors: NDArray[np.float32]) -> None:
        """Improve vectors in place by conjugate gradients with the other side's vectors; rows without a column stay 0.

        Both sides are rotated so that V'V is diagonal; the products of the two sides stay the same.
        """
        eigenvalues, rotation = np.linalg.eigh(compute_gram(other_vectors))
        for side_vectors in (improved_vectors, other_vectors):
            for first_row in range(0, len(side_vectors), STRIP_ROWS):
                side_vectors[first_row : first_row + STRIP_ROWS] = side_vectors[
                    first_row : first_row + STRIP_ROWS
                ] @ rotation.astype(np.float32)
        diagonal = (self.unobserved_weight * np.maximum(eigenvalues, 0)).astype(np.float32)
        padded_vectors = np.concatenate([other_vectors, np.zeros((1, other_vectors.shape[1]), np.float32)])
        row_blocks, cores = self._blocks(other_vectors.shape[1]), usable_cores()

        def solve(worker_index: int) -> None:
            dims = other_vectors.shape[1]
            workspace = np.empty(max(BLOCK_NUMBERS, int(self.history_lengths.max()) * dims), np.float32)
            for block_rows in row_blocks[worker_index::cores]:
                length_max = int(self.history_lengths[block_rows[-1]])
                padded_indexes = self.histories.pad_rows(block_rows, length_max, len(other_vectors), "int64")
                clicked_vectors = workspace[: padded_indexes.size * dims].reshape(*padded_indexes.shape, dims)
                np.take(padded_vectors, padded_indexes, axis=0, out=clicked_vectors, mode="clip")
                improved_vectors[block_rows] = _improve_rows(
                    improved_vectors[block_rows], clicked_vectors, diagonal + self.regularizations[block_rows, None]
                )

        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(solve, range(cores)))

    def _blocks(self, dims: int) -> list[NDArray[np.int64]]:
        """Return blocks of rows of similar length: as many as fit into BLOCK_NUMBERS when padded, at least one row."""
        rows_by_length = np.argsort(self.history_lengths, kind="stable")
        rows_by_length = rows_by_length[np.searchsorted(self.history_lengths[rows_by_length], 1) :]
        row_blocks, first_index = [], 0
        while first_index < len(rows_by_length):
            candidate_rows = rows_by_length[first_index : first_index + max(1, BLOCK_NUMBERS // dims)]
            padded_number_counts = self.history_lengths[candidate_rows] * np.arange(1, len(candidate_rows) + 1) * dims
            block_rows = max(1, int(np.searchsorted(padded_number_counts, BLOCK_NUMBERS, side="right")))
            row_blocks.append(candidate_rows[:block_rows])
            first_index += block_rows
        return row_blocks


def _improve_rows(
    solution: NDArray[np.float32], clicked_vectors: NDArray[np.float32], diagonal: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Improve x towards (Z'Z + D) x = Z'1, preconditioned by D.

    x and D are [n, dims]; Z are the vectors of the row's interactions, [n, length, dims].
    """

    def times(search_direction: NDArray[np.float32]) -> NDArray[np.float32]:
        clicked_products = np.einsum("nld,nd->nl", clicked_vectors, search_direction)
        return np.asarray(np.einsum("nl,nld->nd", clicked_products, clicked_vectors) + diagonal * search_direction)

    residual = np.einsum("nld->nd", clicked_vectors) - times(solution)
    search_direction = residual / diagonal
    squared_residual = _row_products(residual, search_direction)
    for _ in range(CONJUGATE_GRADIENT_STEPS):
        product = times(search_direction)
        step_sizes = squared_residual / np.maximum(_row_products(search_direction, product), TINY)
        solution = solution + step_sizes * search_direction
        residual = residual - step_sizes * product
        preconditioned_residual = residual / diagonal
        previous_squared_residual, squared_residual = (
            squared_residual,
            _row_products(residual, preconditioned_residual),
        )
        search_direction = (
            preconditioned_residual + squared_residual / np.maximum(previous_squared_residual, TINY) * search_direction
        )
    return solution


def _row_products(left_rows: NDArray[np.float32], right_rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the dot product of each pair of rows, [n, 1]."""
    return np.asarray(np.einsum("nd,nd->n", left_rows, right_rows)[:, None])


def first_shapes(dims: int) -> list[ModelShape]:
    """Return the shapes of the first trials: spectral ones, then alternating ones with the default regularisation.

    Each needs its own training.
    """
    exponents = product(USER_EXPONENTS, ITEM_EXPONENTS)
    return [
        *(SpectralShape(*exponent_pair, dims=dims) for exponent_pair in exponents),
        *(AlternatingShape(unobserved_weight, dims=dims) for unobserved_weight in UNOBSERVED_WEIGHTS),
    ]


def shapes_by_regularization(shape: ModelShape) -> list[ModelShape]:
    """Return an alternating shape with each regularisation; a spectral shape unchanged, as the only one."""
    if isinstance(shape, SpectralShape):
        return [shape]
    return [replace(shape, regularization=regularization) for regularization in REGULARIZATIONS]


def shapes_by_fold(shape: ModelShape) -> list[ModelShape]:
    """Return the shapes that share one training, including this shape."""
    if isinstance(shape, SpectralShape):
        return [replace(shape, ridge=ridge) for ridge in SPECTRAL_RIDGES]
    folds = product(FOLD_RIDGES, FOLD_EXPONENTS)
    return [replace(shape, ridge=ridge, item_exponent=item_exponent) for ridge, item_exponent in folds]


def training_shape(shape: ModelShape) -> ModelShape:
    """Return the shape with the same training and the default fold-in."""
    if isinstance(shape, SpectralShape):
        return replace(shape, ridge=SpectralShape().ridge)
    default_shape = AlternatingShape()
    return replace(shape, ridge=default_shape.ridge, item_exponent=default_shape.item_exponent)


def distance_from_usual(shape: ModelShape) -> float:
    """Return the distance of a spectral shape's exponents from the defaults; 0 for an alternating shape."""
    if isinstance(shape, AlternatingShape):
        return 0.0
    default_shape = SpectralShape()
    exponent_distance = abs(shape.user_exponent - default_shape.user_exponent)
    return round(exponent_distance + abs(shape.item_exponent - default_shape.item_exponent), 6)
