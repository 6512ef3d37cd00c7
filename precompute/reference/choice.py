"""Choosing the reference model's shape: each is trained without a part of known histories, and has to find it.

Of some users a fifth of the items is held out: the latest where times are known, else at random, and more than once
where that is little. What the rest of the interactions
gives with each shape is judged by recall@20 of that fifth. A large data set is judged on a sample of its users.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cache.model.tower import Histories
from precompute.config.progress import Progress, quiet
from precompute.reference import held_out
from precompute.reference.spectral import (
    ROUNDS,
    SpectralShape,
    Spectrum,
    UserItemMatrix,
    matrix_of,
    singular_vectors,
    tables,
)

USER_EXPONENTS = (0.5, 0.25)
ITEM_EXPONENTS = (0.5, 0.4, 0.3, 0.2)
RIDGES = (0.3, 0.1, 0.03, 0.01)
PARTS_OF_DIMS = (2, 4, 8)
"""Divisors of the dimensions that are tried, too, with the exponents that won."""
USERS = 8_000
"""Users whose histories are cut: on Gowalla 3,000 chose other exponents with another seed."""
HELD = 15_000
"""Items that are to be found; where one cut at random holds out fewer, there are more cuts."""
CUTS = 3
"""Cuts at most."""
SAMPLE = 2_500_000
"""UserItemMatrix at most on which shapes are compared."""
LEAST = 5
"""Items of a user whose history is cut."""
STANDARD_ERRORS = 2.0
"""Standard errors of the users' differences within which a trial cannot tell two shapes apart."""
FEWER_DIMS_LOSE = 0.002
"""Recall that fewer dimensions may lose, relative to the best: less than the trial can tell apart."""


_Sample = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]
"""Rows of users and of items, and times."""


@dataclass(frozen=True, slots=True)
class ShapeTrial:
    """A shape, and the recall@20 of what was held out."""

    shape: SpectralShape
    recall: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The shape that won, all trials, and what they were made on; without trials it is the default."""

    shape: SpectralShape
    trials: tuple[ShapeTrial, ...] = ()
    users: int = 0
    cuts: int = 0
    interactions: int = 0
    is_by_time: bool = False

    @property
    def recall(self) -> float | None:
        """That of the chosen shape; None without trials."""
        return next((each.recall for each in self.trials if each.shape == self.shape), None)

    def row(self) -> dict[str, Any]:
        """For a report."""
        return {
            "user_exponent": self.shape.user_exponent,
            "item_exponent": self.shape.item_exponent,
            "ridge": self.shape.ridge,
            "dims": self.shape.dims,
            "recall_at_20": None if self.recall is None else round(self.recall, 4),
            "shapes_tried": len(self.trials),
            "users_held_out": self.users,
            "cuts": self.cuts,
            "interactions_tried_on": self.interactions,
            "held_out": "latest" if self.is_by_time else "random",
        }


def choose(
    user_rows: NDArray[np.int64],
    item_rows: NDArray[np.int64],
    items: int,
    dims: int,
    rng: np.random.Generator,
    *,
    times: NDArray[np.int64] | None = None,
    progress: Progress = quiet,
) -> Choice:
    """The shape with the highest recall; `dims` is the most that its vectors may have. Pairs and times are [n] each."""
    sample = _sample(user_rows, item_rows, times, rng)
    cuts = [_Cut.of(sample, items, rng)]
    if not len(cuts[0].rows):
        return Choice(SpectralShape(dims=dims))
    if times is None:  # what is latest can be held out only once
        more = min(CUTS, -(-HELD // len(cuts[0].held.indices))) - 1
        cuts += [_Cut.of(sample, items, rng) for _ in range(more)]
    found: dict[SpectralShape, list[NDArray[np.float64]]] = {}
    grid = [SpectralShape(a, b, dims=dims) for a, b in product(USER_EXPONENTS, ITEM_EXPONENTS)]
    for done, cut in enumerate(cuts):
        for place, shape in enumerate(grid):
            progress("choose", done * len(grid) + place, (len(cuts) + 1) * len(grid))
            # As many rounds as the training has: with more behind it a shape finds more, and wins by that alone.
            spectrum = singular_vectors(cut.data, shape, rng, rounds=ROUNDS)
            for ridge in RIDGES:
                each = replace(shape, ridge=ridge)
                found.setdefault(each, []).append(cut.recalls(spectrum, each))
    first = _first(found)
    for cut in cuts:
        spectrum = singular_vectors(cut.data, first, rng, rounds=ROUNDS)
        for each in _smaller(first, dims):
            found.setdefault(each, []).append(cut.recalls(spectrum, each))
    trials = tuple(
        ShapeTrial(shape, float(np.concatenate(each).mean())) for shape, each in found.items()
    )
    like_it = [
        each for each in trials if replace(each.shape, dims=dims, ridge=first.ridge) == first
    ]
    enough = (1 - FEWER_DIMS_LOSE) * max(each.recall for each in like_it)
    won = min(
        (each for each in like_it if each.recall >= enough),
        key=lambda each: (each.shape.dims, -each.recall),
    )
    progress("choose", 1, 1)
    users = len(cuts[0].rows)
    return Choice(won.shape, trials, users, len(cuts), len(sample[0]), times is not None)


def _first(found: Mapping[SpectralShape, Sequence[NDArray[np.float64]]]) -> SpectralShape:
    """The best shape; exponents nearer to the usual ones are taken where they lose less than the trial can tell.

    That is STANDARD_ERRORS of the differences user by user.
    """
    recalls = {shape: np.concatenate(each) for shape, each in found.items()}
    best = max(recalls, key=lambda each: float(recalls[each].mean()))
    usual, tied = SpectralShape(), []
    for shape, each in recalls.items():
        lost = recalls[best] - each
        if lost.mean() <= STANDARD_ERRORS * lost.std() / np.sqrt(len(lost)):
            tied.append(shape)
    return min(
        tied,
        key=lambda each: (
            round(
                abs(each.user_exponent - usual.user_exponent)
                + abs(each.item_exponent - usual.item_exponent),
                6,
            ),
            -float(recalls[each].mean()),
        ),
    )


def _smaller(shape: SpectralShape, dims: int) -> Iterator[SpectralShape]:
    for divisor in PARTS_OF_DIMS:
        if dims >= divisor:
            for ridge in RIDGES:
                yield replace(shape, dims=dims // divisor, ridge=ridge)


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """UserItemMatrix without what is held out, and for the users of `rows` what is kept and what is to be found."""

    data: UserItemMatrix
    rows: NDArray[np.int64]
    kept: Histories
    held: Histories

    @classmethod
    def of(cls, sample: _Sample, items: int, rng: np.random.Generator) -> Self:
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
        enough = np.flatnonzero(counts >= LEAST)
        rows = np.sort(rng.choice(enough, min(USERS, len(enough)), replace=False))
        ends = np.cumsum(counts)
        is_held = np.zeros(len(users), bool)
        for row in rows:
            is_held[ends[row] - max(1, counts[row] // 5) : ends[row]] = True
        size = len(counts), items
        kept = matrix_of(users[~is_held], columns[~is_held], size)
        held = matrix_of(users[is_held], columns[is_held], size)
        return cls(UserItemMatrix.of(kept), rows, _histories(kept[rows]), _histories(held[rows]))

    def recalls(self, spectrum: Spectrum, shape: SpectralShape) -> NDArray[np.float64]:
        """Recall@20 of a shape, for each user."""
        rows, vectors = tables(spectrum, self.data.item_degrees, shape)
        ones = np.ones(len(self.kept.indices), np.float32)
        histories = sp.csr_matrix(
            (ones, self.kept.indices, self.kept.indptr), (len(self.kept), self.data.items)
        )
        return held_out.recalls(histories @ rows, vectors, self.kept, self.held, "inner_product")


def _sample(
    user_rows: NDArray[np.int64],
    item_rows: NDArray[np.int64],
    times: NDArray[np.int64] | None,
    rng: np.random.Generator,
) -> _Sample:
    """All interactions of as many users, drawn at random and numbered anew, as come to SAMPLE."""
    if len(user_rows) <= SAMPLE:
        return user_rows, item_rows, times
    counts = np.bincount(user_rows)
    mixed = rng.permutation(len(counts))
    drawn = mixed[np.cumsum(counts[mixed]) <= SAMPLE]
    numbers = np.full(len(counts), -1, np.int64)
    numbers[drawn] = np.arange(len(drawn))
    found = numbers[user_rows]
    places = np.flatnonzero(found >= 0)
    return found[places], item_rows[places], None if times is None else times[places]


def _histories(matrix: Any) -> Histories:
    return Histories(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64))
