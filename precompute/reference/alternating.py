"""The reference model's vectors by alternating least squares on implicit feedback. Pure.

Vectors u of users and v of items minimise, over interactions, the sum of (1 - u.v)^2; over all pairs, `others` times
that of (u.v)^2; and the regularisation times the squared length of each vector, times the weight of all its terms (Hu,
Koren and Volinsky, ICDM 2008, weighed as by Rendle et al., RecSys 2022). A half round betters the vectors of one side
by some steps of conjugate gradients from where they were (Takacs et al., RecSys 2011).

With V the items' vectors, a user is the sum of D_i^-b V (others V'V + ridge reg w I)^-1 over the history, w the mean
weight of a user: the ridge regression that has seen nothing of the user but `others`, so that any user folds in by one
linear layer. The exponent b makes up for what it leaves out.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cache.model.tower import Histories
from cache.process.host import usable_cores
from precompute.reference.spectral import (
    STRIP,
    SpectralShape,
    Spectrum,
    UserItemMatrix,
    gram,
    power,
    tables,
)

ROUNDS = 6
"""Rounds of a training; with more, shapes that hold back less would find less."""
STEPS = 2
"""Steps of conjugate gradients in a half round."""
USERS_NUMBERS = 1 << 28
"""Numbers in all users' vectors at most, 1 GiB; of more users a random part trains the items' vectors."""
TINY = np.float32(1e-30)
"""Keeps 0 / 0 from being no number: a row that is solved stays as it is."""
BLOCK = 1 << 20
"""Numbers in the padded vectors of rows that are solved together: they stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class AlternatingShape:
    """Numbers that are chosen of a model: weights, the ridge and the exponent of the fold, and the dimensions."""

    others: float = 0.01
    regularization: float = 0.01
    ridge: float = 1.0
    item_exponent: float = 0.0
    dims: int = 256


def item_vectors(
    data: UserItemMatrix,
    start: Spectrum,
    shape: AlternatingShape,
    rng: np.random.Generator,
    rounds: int = ROUNDS,
) -> NDArray[np.float32]:
    """float32 [items, dims] after some rounds, from where the usual spectral shape has the items."""
    matrix, user_limit = data.matrix, USERS_NUMBERS // shape.dims
    if matrix.shape[0] > user_limit:
        matrix = matrix[np.sort(rng.choice(matrix.shape[0], user_limit, replace=False))]
    by_user, by_item = _Side.of(matrix, shape), _Side.of(matrix.T.tocsr(), shape)
    _, items = tables(start, data.item_degrees, SpectralShape(dims=shape.dims))
    items /= np.sqrt(np.square(items).sum(axis=1).mean())
    users = np.zeros((matrix.shape[0], items.shape[1]), np.float32)
    for _ in range(rounds):
        by_user.better(users, items)
        by_item.better(items, users)
    return items


def fold(
    vectors: NDArray[np.float32], data: UserItemMatrix, shape: AlternatingShape
) -> NDArray[np.float32]:
    """Rows whose sum over a history is the user, float32 [items, dims]."""
    weight = data.user_degrees.mean() + shape.others * data.items
    square = shape.others * gram(vectors)
    square += shape.ridge * shape.regularization * weight * np.eye(len(square))
    scaled = power(data.item_degrees, -shape.item_exponent)[:, None] * vectors
    return (scaled @ np.linalg.inv(square)).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Users by items, or items by users: the columns of each row, its regularisation, and rows solved together."""

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
        """Some steps nearer to what is best beside the vectors of the other side; rows without a column stay 0.

        Both sides are turned to where V'V is diagonal, which changes no product of theirs.
        """
        squares, rotation = np.linalg.eigh(gram(theirs))
        for rows in (mine, theirs):
            for start in range(0, len(rows), STRIP):
                rows[start : start + STRIP] = rows[start : start + STRIP] @ rotation.astype(
                    np.float32
                )
        diagonal = (self.unobserved_weight * np.maximum(squares, 0)).astype(np.float32)
        padded = np.concatenate([theirs, np.zeros((1, theirs.shape[1]), np.float32)])
        blocks, cores = self._blocks(theirs.shape[1]), usable_cores()

        def solve(first: int) -> None:
            dims = theirs.shape[1]
            space = np.empty(max(BLOCK, int(self.lengths.max()) * dims), np.float32)
            for rows in blocks[first::cores]:
                longest = int(self.lengths[rows[-1]])
                padded_indexes = self.histories.padded(rows, longest, len(theirs), "int64")
                clicked = space[: padded_indexes.size * dims].reshape(*padded_indexes.shape, dims)
                np.take(padded, padded_indexes, axis=0, out=clicked, mode="clip")
                mine[rows] = _solved(mine[rows], clicked, diagonal + self.pulls[rows, None])

        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(solve, range(cores)))

    def _blocks(self, dims: int) -> list[NDArray[np.int64]]:
        """Rows of about one length, as many as fit into BLOCK when padded, one at least."""
        order = np.argsort(self.lengths, kind="stable")
        order = order[np.searchsorted(self.lengths[order], 1) :]
        blocks, start = [], 0
        while start < len(order):
            ahead = order[start : start + max(1, BLOCK // dims)]
            sizes = self.lengths[ahead] * np.arange(1, len(ahead) + 1) * dims
            count = max(1, int(np.searchsorted(sizes, BLOCK, side="right")))
            blocks.append(ahead[:count])
            start += count
        return blocks


def _solved(
    x: NDArray[np.float32], clicked: NDArray[np.float32], diagonal: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Steps from x towards (Z'Z + D) x = Z'1, preconditioned by D; x and D [n, dims], Z `clicked` [n, length, dims]."""

    def times(p: NDArray[np.float32]) -> NDArray[np.float32]:
        along = np.einsum("nld,nd->nl", clicked, p)
        return np.asarray(np.einsum("nl,nld->nd", along, clicked) + diagonal * p)

    residual = np.einsum("nld->nd", clicked) - times(x)
    p = residual / diagonal
    squared = _dot(residual, p)
    for _ in range(STEPS):
        product = times(p)
        ahead = squared / np.maximum(_dot(p, product), TINY)
        x = x + ahead * p
        residual = residual - ahead * product
        scaled = residual / diagonal
        previous_squared, squared = squared, _dot(residual, scaled)
        p = scaled + squared / np.maximum(previous_squared, TINY) * p
    return x


def _dot(left_rows: NDArray[np.float32], right_rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Products of the rows, [n, 1]."""
    return np.asarray(np.einsum("nd,nd->n", left_rows, right_rows)[:, None])
