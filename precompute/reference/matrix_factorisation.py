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

USER_PARTS = 8
"""Parts of the users whose products are summed in this order, so that the bits do not depend on the cores."""

CHUNK_USERS = 32_768
"""Users whose product with a basis is in a thread's memory at once."""

STRIP_ROWS = 8192
"""Rows of a tall matrix that are rotated, or held in float64, at once."""

SPECTRAL_ROUNDS = 5
"""Products by which a random basis converges to that of the largest singular values."""

_OVERSAMPLE = 32

ALTERNATING_ROUNDS = 6
"""Rounds of a training; with more, weakly regularised shapes would score lower."""

CONJUGATE_GRADIENT_STEPS = 2
"""Steps of conjugate gradients in a half round."""

USER_NUMBERS_MAX = 1 << 28
"""Numbers in all users' vectors at most, 1 GiB; of more users a random part trains the items' vectors."""

BLOCK_NUMBERS = 1 << 20
"""Numbers in the padded vectors of rows solved together: they stay in a core's cache."""

TINY = np.float32(1e-30)
"""Summand that avoids 0 / 0, so that a solved row stays unchanged."""

USER_EXPONENTS = (0.5, 0.25)

ITEM_EXPONENTS = (0.5, 0.4, 0.3, 0.2)

UNOBSERVED_WEIGHTS = (0.003, 0.02, 0.1)

REGULARIZATIONS = (0.003, 0.01, 0.03)

SPECTRAL_RIDGES = (0.3, 0.1, 0.03, 0.01)

FOLD_RIDGES = (0.3, 1.0, 3.0)

FOLD_EXPONENTS = (0.0, 0.2)


@dataclass(frozen=True, slots=True)
class SpectralShape:
    """Parameters of a model by the damped spectrum: exponents of degrees, the ridge, and the dimensions.

    With R the 0/1 matrix of users and items and D their degrees, V and s are the top right singular vectors and values
    of D_u^-a R D_i^-b. A user is the sum of D_i^-b V f(s) over the history, an item is D_i^b V: the row is normalised,
    projected onto the subspace, damped and brought back (PureSVD, Cremonesi et al., RecSys 2010, with the degree
    normalisation of GF-CF, Shen et al., CIKM 2021). The damping f(s) = s^2 / (s^2 + ridge s_1^2) is that of a linear
    autoencoder with a ridge penalty. One linear layer over the history, so any user folds in.
    """

    user_exponent: float = 0.5
    item_exponent: float = 0.4
    ridge: float = 0.03
    dims: int = 256


@dataclass(frozen=True, slots=True)
class AlternatingShape:
    """Parameters of a model by alternating least squares: weights, ridge and exponent of the fold, dimensions.

    Vectors u of users and v of items minimise, over interactions, the sum of (1 - u.v)^2; over all pairs, `others`
    times that of (u.v)^2; and the regularisation times the squared length of each vector, times the weight of all its
    terms (Hu, Koren and Volinsky, ICDM 2008, weighed as by Rendle et al., RecSys 2022). A half round improves the
    vectors of one side by some steps of conjugate gradients from where they were (Takacs et al., RecSys 2011).

    With V the items' vectors and D_i their degrees, a user is the sum of D_i^-b V (others V'V + ridge reg w I)^-1 over
    the history, w the mean weight of a user: the ridge regression that has seen nothing of the user but `others`, so
    that any user folds in by one linear layer. The exponent b makes up for what it leaves out.
    """

    others: float = 0.01
    regularization: float = 0.01
    ridge: float = 1.0
    item_exponent: float = 0.0
    dims: int = 256


ModelShape = SpectralShape | AlternatingShape

Tables = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Rows whose sum over a history is the user, and the items' vectors, [items, dims] each."""


@dataclass(frozen=True, slots=True, eq=False)
class UserItemMatrix:
    """0/1 CSR matrix [users, items], and the degrees of both (float64)."""

    matrix: sp.csr_matrix
    user_degrees: NDArray[np.float64]
    item_degrees: NDArray[np.float64]

    @classmethod
    def of(cls, matrix: sp.csr_matrix) -> Self:
        """Count the degrees of a 0/1 matrix."""
        return cls(
            matrix,
            np.diff(matrix.indptr).astype(np.float64),
            np.bincount(matrix.indices, minlength=matrix.shape[1]).astype(np.float64),
        )

    @property
    def items(self) -> int:
        """Number of columns."""
        return len(self.item_degrees)

    def gram_times(self, basis: NDArray[np.float32], shape: SpectralShape) -> NDArray[np.float32]:
        """Return float32 [items, width]: N'N basis of the normalised matrix N, which is never materialised."""
        right = degree_power(self.item_degrees, -shape.item_exponent).astype(np.float32)[:, None]
        user_weights = degree_power(self.user_degrees, -2 * shape.user_exponent).astype(np.float32)
        scaled = np.ascontiguousarray(basis * right)
        users = len(user_weights)
        bounds = np.linspace(0, users, min(USER_PARTS, users) + 1).astype(np.int64)

        def product(bounds: tuple[int, int]) -> NDArray[np.float32]:
            total = np.zeros_like(scaled)
            for start in range(*bounds, CHUNK_USERS):
                end = min(start + CHUNK_USERS, bounds[1])
                rows = self.matrix[start:end]
                total += rows.T @ ((rows @ scaled) * user_weights[start:end, None])
            return total

        total = np.zeros_like(scaled)
        with ThreadPoolExecutor(usable_cores()) as pool:
            for partial_product in pool.map(product, pairwise(bounds)):
                total += partial_product
        return total * right


def matrix_of(
    user_rows: NDArray[np.int64], item_rows: NDArray[np.int64], size: Sequence[int]
) -> sp.csr_matrix:
    """Build a 0/1 CSR matrix from pairs; repeated ones count once, columns ascend."""
    ones = np.ones(len(user_rows), np.float32)
    matrix = sp.csr_matrix((ones, (user_rows, item_rows)), shape=tuple(size))
    matrix.sum_duplicates()
    matrix.data[:] = 1
    return matrix


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """Right singular vectors float64 [items, width] and values [width], largest first; some more than requested."""

    vectors: NDArray[np.float64]
    values: NDArray[np.float64]


def tables_of(
    data: UserItemMatrix, shapes: Iterable[ModelShape], rng: np.random.Generator
) -> Iterator[tuple[ModelShape, Tables]]:
    """Yield the tables of each shape; neighbouring shapes with the same training are trained once."""
    start: Spectrum | None = None
    for training, training_shapes in groupby(shapes, training_of):
        if isinstance(training, SpectralShape):
            spectrum = singular_vectors(data, training, rng, rounds=SPECTRAL_ROUNDS)
            for shape in training_shapes:
                assert isinstance(shape, SpectralShape)  # noqa: S101 - as its training is
                yield shape, spectral_tables(spectrum, data.item_degrees, shape)
        else:
            if start is None or start.vectors.shape[1] < training.dims:
                start = singular_vectors(
                    data, SpectralShape(dims=training.dims), rng, rounds=SPECTRAL_ROUNDS
                )
            vectors = alternating_item_vectors(data, start, training, rng)
            for shape in training_shapes:
                assert isinstance(shape, AlternatingShape)  # noqa: S101 - as its training is
                yield shape, (fold_rows(vectors, data, shape), vectors)


def singular_vectors(
    data: UserItemMatrix,
    shape: SpectralShape,
    rng: np.random.Generator,
    *,
    rounds: int,
) -> Spectrum:
    """Compute top singular vectors of the normalised matrix by subspace iteration (Halko et al., 2011); signs fixed."""
    width = min(shape.dims + _OVERSAMPLE, data.items)
    basis = rng.standard_normal((data.items, width), np.float32)
    for _ in range(rounds):
        basis = data.gram_times(orthonormal(basis), shape)
    basis = orthonormal(orthonormal(basis))
    # The last product also says how the subspace turns into singular vectors (Rayleigh and Ritz).
    after = data.gram_times(basis, shape)
    squares, rotation = np.linalg.eigh(basis.T.astype(np.float64) @ after.astype(np.float64))
    vectors = basis.astype(np.float64) @ rotation[:, ::-1]
    largest = np.abs(vectors).argmax(axis=0)
    signs = np.where(vectors[largest, np.arange(width)] < 0, -1.0, 1.0)
    return Spectrum(vectors * signs, np.sqrt(np.maximum(squares[::-1], 0)))


def orthonormal(basis: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return orthonormal columns that span those of a tall matrix; a dependent column becomes 0.

    By the eigenvectors of the Gram matrix in float64, over the rows once: done twice it is exact (Stathopoulos and
    Wu, SISC 2002), and 2.5 times as fast as a Householder QR of 41,000 x 288.
    """
    squares, vectors = np.linalg.eigh(gram(basis))
    adds = squares > squares[-1] * 1e-12
    lengths = np.sqrt(np.where(adds, squares, 1))
    return basis @ (vectors * np.where(adds, 1 / lengths, 0)).astype(np.float32)


def gram(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return Z'Z in float64 of a tall matrix, [width, width], over its rows once."""
    total = np.zeros((rows.shape[1],) * 2)
    for start in range(0, len(rows), STRIP_ROWS):
        strip_rows = rows[start : start + STRIP_ROWS].astype(np.float64)
        total += strip_rows.T @ strip_rows
    return total


def spectral_tables(
    spectrum: Spectrum, item_degrees: NDArray[np.float64], shape: SpectralShape
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (rows whose sum over a history is the user, vectors of the items), float32 [items, dims] each."""
    vectors, values = spectrum.vectors[:, : shape.dims], spectrum.values[: shape.dims]
    squares = np.square(values)
    damped = squares / np.maximum(squares + shape.ridge * squares[0], 1e-30)
    rows = degree_power(item_degrees, -shape.item_exponent)[:, None] * vectors * damped
    items = degree_power(item_degrees, shape.item_exponent)[:, None] * vectors
    return rows.astype(np.float32), items.astype(np.float32)


def degree_power(degrees: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    """Return the degrees to an exponent; 0 stays 0."""
    return np.power(degrees, exponent, out=np.zeros_like(degrees), where=degrees > 0)


def alternating_item_vectors(
    data: UserItemMatrix,
    start: Spectrum,
    shape: AlternatingShape,
    rng: np.random.Generator,
    rounds: int = ALTERNATING_ROUNDS,
) -> NDArray[np.float32]:
    """Train item vectors float32 [items, dims] for some rounds, starting from the usual spectral shape's."""
    matrix, user_limit = data.matrix, USER_NUMBERS_MAX // shape.dims
    if matrix.shape[0] > user_limit:
        matrix = matrix[np.sort(rng.choice(matrix.shape[0], user_limit, replace=False))]
    by_user, by_item = _Side.of(matrix, shape), _Side.of(matrix.T.tocsr(), shape)
    _, items = spectral_tables(start, data.item_degrees, SpectralShape(dims=shape.dims))
    items /= np.sqrt(np.square(items).sum(axis=1).mean())
    users = np.zeros((matrix.shape[0], items.shape[1]), np.float32)
    for _ in range(rounds):
        by_user.better(users, items)
        by_item.better(items, users)
    return items


def fold_rows(
    vectors: NDArray[np.float32], data: UserItemMatrix, shape: AlternatingShape
) -> NDArray[np.float32]:
    """Return the rows whose sum over a history is the user, float32 [items, dims]."""
    weight = data.user_degrees.mean() + shape.others * data.items
    square = shape.others * gram(vectors)
    square += shape.ridge * shape.regularization * weight * np.eye(len(square))
    scaled = degree_power(data.item_degrees, -shape.item_exponent)[:, None] * vectors
    return (scaled @ np.linalg.inv(square)).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One side of the matrix, users by items or items by users: each row's columns, regularisation, and blocks."""

    histories: Histories
    lengths: NDArray[np.int64]
    pulls: NDArray[np.float32]
    unobserved_weight: float

    @classmethod
    def of(cls, matrix: sp.csr_matrix, shape: AlternatingShape) -> "_Side":
        histories = Histories(matrix.indptr, matrix.indices)
        lengths = np.diff(matrix.indptr)
        weights = lengths + shape.others * matrix.shape[1]
        pulls = (shape.regularization * weights).astype(np.float32)
        return cls(histories, lengths, pulls, shape.others)

    def better(self, mine: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
        """Improve `mine` by steps of conjugate gradients with the other side's vectors; rows without a column stay 0.

        Both sides are rotated so that V'V is diagonal, which changes none of their products.
        """
        squares, rotation = np.linalg.eigh(gram(theirs))
        for rows in (mine, theirs):
            for start in range(0, len(rows), STRIP_ROWS):
                rows[start : start + STRIP_ROWS] = rows[
                    start : start + STRIP_ROWS
                ] @ rotation.astype(np.float32)
        diagonal = (self.unobserved_weight * np.maximum(squares, 0)).astype(np.float32)
        padded = np.concatenate([theirs, np.zeros((1, theirs.shape[1]), np.float32)])
        blocks, cores = self._blocks(theirs.shape[1]), usable_cores()

        def solve(first: int) -> None:
            dims = theirs.shape[1]
            space = np.empty(max(BLOCK_NUMBERS, int(self.lengths.max()) * dims), np.float32)
            for rows in blocks[first::cores]:
                longest = int(self.lengths[rows[-1]])
                padded_indexes = self.histories.pad_rows(rows, longest, len(theirs), "int64")
                clicked = space[: padded_indexes.size * dims].reshape(*padded_indexes.shape, dims)
                np.take(padded, padded_indexes, axis=0, out=clicked, mode="clip")
                mine[rows] = _solved(mine[rows], clicked, diagonal + self.pulls[rows, None])

        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(solve, range(cores)))

    def _blocks(self, dims: int) -> list[NDArray[np.int64]]:
        """Return blocks of rows of similar length, as many as fit into BLOCK_NUMBERS when padded, one at least."""
        order = np.argsort(self.lengths, kind="stable")
        order = order[np.searchsorted(self.lengths[order], 1) :]
        blocks, start = [], 0
        while start < len(order):
            ahead = order[start : start + max(1, BLOCK_NUMBERS // dims)]
            sizes = self.lengths[ahead] * np.arange(1, len(ahead) + 1) * dims
            count = max(1, int(np.searchsorted(sizes, BLOCK_NUMBERS, side="right")))
            blocks.append(ahead[:count])
            start += count
        return blocks


def _solved(
    x: NDArray[np.float32], clicked: NDArray[np.float32], diagonal: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Step from x towards (Z'Z + D) x = Z'1, preconditioned by D; x and D [n, dims], Z `clicked` [n, length, dims]."""

    def times(p: NDArray[np.float32]) -> NDArray[np.float32]:
        along = np.einsum("nld,nd->nl", clicked, p)
        return np.asarray(np.einsum("nl,nld->nd", along, clicked) + diagonal * p)

    residual = np.einsum("nld->nd", clicked) - times(x)
    p = residual / diagonal
    squared = _row_products(residual, p)
    for _ in range(CONJUGATE_GRADIENT_STEPS):
        product = times(p)
        ahead = squared / np.maximum(_row_products(p, product), TINY)
        x = x + ahead * p
        residual = residual - ahead * product
        scaled = residual / diagonal
        previous_squared, squared = squared, _row_products(residual, scaled)
        p = scaled + squared / np.maximum(previous_squared, TINY) * p
    return x


def _row_products(
    left_rows: NDArray[np.float32], right_rows: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the products of the rows, [n, 1]."""
    return np.asarray(np.einsum("nd,nd->n", left_rows, right_rows)[:, None])


def first_shapes(dims: int) -> list[ModelShape]:
    """Return shapes that each need their own training, spectral ones first; alternating ones of one regularisation."""
    exponents = product(USER_EXPONENTS, ITEM_EXPONENTS)
    return [
        *(SpectralShape(*exponent_pair, dims=dims) for exponent_pair in exponents),
        *(AlternatingShape(others_weight, dims=dims) for others_weight in UNOBSERVED_WEIGHTS),
    ]


def shapes_by_regularization(shape: ModelShape) -> list[ModelShape]:
    """Return an alternating shape with each regularisation; a spectral one alone."""
    if isinstance(shape, SpectralShape):
        return [shape]
    return [replace(shape, regularization=regularization) for regularization in REGULARIZATIONS]


def shapes_by_fold(shape: ModelShape) -> list[ModelShape]:
    """Return the shapes that one training gives, this one among them."""
    if isinstance(shape, SpectralShape):
        return [replace(shape, ridge=ridge) for ridge in SPECTRAL_RIDGES]
    folds = product(FOLD_RIDGES, FOLD_EXPONENTS)
    return [
        replace(shape, ridge=ridge, item_exponent=item_exponent) for ridge, item_exponent in folds
    ]


def training_of(shape: ModelShape) -> ModelShape:
    """Return the shape with the same training and the usual fold."""
    if isinstance(shape, SpectralShape):
        return replace(shape, ridge=SpectralShape().ridge)
    usual = AlternatingShape()
    return replace(shape, ridge=usual.ridge, item_exponent=usual.item_exponent)


def distance_from_usual(shape: ModelShape) -> float:
    """Return the distance of a spectral shape's exponents from the usual ones; 0 for an alternating shape."""
    if isinstance(shape, AlternatingShape):
        return 0.0
    usual = SpectralShape()
    moved = abs(shape.user_exponent - usual.user_exponent)
    return round(moved + abs(shape.item_exponent - usual.item_exponent), 6)
