"""Choosing the reference model's shape: each is trained without a part of known histories, and has to find it.

Of some users a fifth of the items is held out: the latest where times are known, else at random, and more than once
where that is little. What the rest of the interactions gives with each shape is judged by recall@20 of that fifth. A
large data set is judged on a sample of its users.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precompute.config.progress import Progress, quiet
from precompute.reference.alternating import AlternatingShape
from precompute.reference.cuts import Cut, sample_of
from precompute.reference.shapes import (
    Shape,
    distance,
    first_tried,
    folded,
    regularized,
    tables_of,
    training_of,
)
from precompute.reference.spectral import SpectralShape

PARTS_OF_DIMS = (1, 2, 4, 8)
"""Divisors of the dimensions that are tried with the training that won."""
HELD = 15_000
"""Items that are to be found; where one cut at random holds out fewer, there are more cuts."""
CUTS = 3
"""Cuts at most."""
STANDARD_ERRORS = 2.0
"""Standard errors of the users' differences within which a trial cannot tell two shapes apart."""
MARGIN = 0.06
"""Recall that alternating vectors must find more, relative to spectral ones: with less they may lose on later data."""
FEWER_DIMS_LOSE = 0.002
"""Recall that fewer dimensions may lose, relative to the best: less than the trial can tell apart."""


@dataclass(frozen=True, slots=True)
class ShapeTrial:
    """A shape, and the recall@20 of what was held out."""

    shape: Shape
    recall: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The shape that won, all trials, and what they were made on; without trials it is the default."""

    shape: Shape
    trials: tuple[ShapeTrial, ...] = ()
    users: int = 0
    cuts: int = 0
    interactions: int = 0
    is_by_time: bool = False

    @property
    def recall(self) -> float | None:
        """That of the chosen shape; None without trials."""
        return next((each.recall for each in self.trials if each.shape == self.shape), None)

    @property
    def method(self) -> str:
        """Name of the chosen shape's method."""
        return "spectral" if isinstance(self.shape, SpectralShape) else "alternating"

    def row(self) -> dict[str, Any]:
        """For a report."""
        return {
            "method": self.method,
            **asdict(self.shape),
            "recall_at_20": None if self.recall is None else round(self.recall, 4),
            "shapes_tried": len(self.trials),
            "users_held_out": self.users,
            "cuts": self.cuts,
            "interactions_tried_on": self.interactions,
            "held_out": "latest" if self.is_by_time else "random",
        }


Recalls = dict[Shape, list[NDArray[np.float64]]]
"""Recall of each user, by shape and cut."""


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
    """The shape with the highest recall; `dims` is the most that its vectors may have. Pairs and times are [n] each.

    One thing after the other, each for the best so far of both methods: exponents and weights, regularisations, folds.
    The method that won is tried with fewer dimensions.
    """
    sample = sample_of(user_rows, item_rows, times, rng)
    cuts = [Cut.of(sample, items, rng)]
    if not len(cuts[0].rows):
        return Choice(SpectralShape(dims=dims))
    if times is None:  # what is latest can be held out only once
        more = min(CUTS, -(-HELD // len(cuts[0].held.indices))) - 1
        cuts += [Cut.of(sample, items, rng) for _ in range(more)]
    found: Recalls = {}
    _try(found, first_tried(dims), cuts, rng, progress)
    for others in (regularized, folded):
        _try(found, [each for shape in _best(found) for each in others(shape)], cuts, rng, progress)
    spectral, alternating = _best(found)
    wins = _mean(found[alternating]) > (1 + MARGIN) * _mean(found[spectral])
    training = training_of(alternating if wins else spectral)
    narrow = [replace(training, dims=dims // part) for part in PARTS_OF_DIMS if dims >= part]
    _try(found, [each for shape in narrow for each in folded(shape)], cuts, rng, progress)
    progress("choose", 1, 1)
    trials = tuple(ShapeTrial(shape, _mean(each)) for shape, each in found.items())
    like_it = [each for each in trials if training_of(each.shape) in narrow]
    enough = (1 - FEWER_DIMS_LOSE) * max(each.recall for each in like_it)
    won = min(
        (each for each in like_it if each.recall >= enough),
        key=lambda each: (each.shape.dims, -each.recall),
    )
    users = len(cuts[0].rows)
    return Choice(won.shape, trials, users, len(cuts), len(sample[0]), times is not None)


def _try(
    found: Recalls,
    shapes: Sequence[Shape],
    cuts: Sequence[Cut],
    rng: np.random.Generator,
    progress: Progress,
) -> None:
    """Adds the recalls of shapes that were not tried yet."""
    fresh = [each for each in shapes if each not in found]
    for place, cut in enumerate(cuts):
        for done, (shape, tables) in enumerate(tables_of(cut.data, fresh, rng)):
            progress("choose", place * len(fresh) + done, len(cuts) * len(fresh))
            found.setdefault(shape, []).append(cut.recalls(tables))


def _mean(recalls: Sequence[NDArray[np.float64]]) -> float:
    return float(np.concatenate(recalls).mean())


def _best(found: Recalls) -> list[Shape]:
    """The first of each method, spectral before alternating."""
    return [
        _first({shape: each for shape, each in found.items() if isinstance(shape, kind)})
        for kind in (SpectralShape, AlternatingShape)
    ]


def _first(found: Mapping[Shape, Sequence[NDArray[np.float64]]]) -> Shape:
    """The best shape; one nearer to the usual is taken where it loses less than the trial can tell.

    That is STANDARD_ERRORS of the differences user by user.
    """
    recalls = {shape: np.concatenate(each) for shape, each in found.items()}
    best = max(recalls, key=lambda each: float(recalls[each].mean()))
    tied = []
    for shape, each in recalls.items():
        lost = recalls[best] - each
        if lost.mean() <= STANDARD_ERRORS * lost.std() / np.sqrt(len(lost)):
            tied.append(shape)
    return min(tied, key=lambda each: (distance(each), -float(recalls[each].mean())))
