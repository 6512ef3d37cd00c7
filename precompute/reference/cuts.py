"""Histories that are cut: what is kept of the interactions, and what is to be found."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cache.model.tower import Histories
from precompute.reference import held_out
from precompute.reference.shapes import Tables
from precompute.reference.spectral import UserItemMatrix, matrix_of

USERS = 8_000
"""Users whose histories are cut: on Gowalla 3,000 chose other exponents with another seed."""
SAMPLE = 1_500_000
"""Interactions at most on which shapes are compared."""
HISTORY_ITEMS_MIN = 5
"""Items of a user whose history is cut."""

Interactions = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]
"""Rows of users and of items, and times."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Interactions without what is held out, and for the users of `rows` what is kept and what is to be found."""

    data: UserItemMatrix
    rows: NDArray[np.int64]
    input_histories: Histories
    targets: Histories

    @classmethod
    def of(cls, sample: Interactions, items: int, rng: np.random.Generator) -> Self:
        """Holds out a fifth of the items of at most USERS users."""
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
        rows = np.sort(rng.choice(enough, min(USERS, len(enough)), replace=False))
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
        return held_out.recalls(
            histories @ rows, vectors, self.input_histories, self.targets, "inner_product"
        )


def sample_of(
    user_rows: NDArray[np.int64],
    item_rows: NDArray[np.int64],
    times: NDArray[np.int64] | None,
    rng: np.random.Generator,
) -> Interactions:
    """All interactions of as many users, drawn at random and numbered anew, as come to SAMPLE."""
    if len(user_rows) <= SAMPLE:
        return user_rows, item_rows, times
    counts = np.bincount(user_rows)
    mixed = rng.permutation(len(counts))
    drawn = mixed[np.cumsum(counts[mixed]) <= SAMPLE]
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
