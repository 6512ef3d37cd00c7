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
TARGET_ITEMS_MIN = 15_000
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
class ShapeChoice:
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
        return next((trial.recall for trial in self.trials if trial.shape == self.shape), None)

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
) -> ShapeChoice:
    """The shape with the highest recall; `dims` is the most that its vectors may have. Pairs and times are [n] each.

    One thing after the other, each for the best so far of both methods: exponents and weights, regularisations, folds.
    The method that won is tried with fewer dimensions.
    """
    sample = sample_of(user_rows, item_rows, times, rng)
    cuts = [Cut.of(sample, items, rng)]
    if not len(cuts[0].rows):
        return ShapeChoice(SpectralShape(dims=dims))
    if times is None:  # what is latest can be held out only once
        more = min(CUTS, -(-TARGET_ITEMS_MIN // len(cuts[0].targets.indices))) - 1
        cuts += [Cut.of(sample, items, rng) for _ in range(more)]
    recalls_by_shape: Recalls = {}
    _try(recalls_by_shape, first_tried(dims), cuts, rng, progress)
    for vary_shape in (regularized, folded):
        _try(
            recalls_by_shape,
            [
                variant
                for shape in _best_of_methods(recalls_by_shape)
                for variant in vary_shape(shape)
            ],
            cuts,
            rng,
            progress,
        )
    spectral, alternating = _best_of_methods(recalls_by_shape)
    wins = _mean(recalls_by_shape[alternating]) > (1 + MARGIN) * _mean(recalls_by_shape[spectral])
    training = training_of(alternating if wins else spectral)
    narrow = [replace(training, dims=dims // part) for part in PARTS_OF_DIMS if dims >= part]
    _try(
        recalls_by_shape,
        [variant for shape in narrow for variant in folded(shape)],
        cuts,
        rng,
        progress,
    )
    progress("choose", 1, 1)
    trials = tuple(
        ShapeTrial(shape, _mean(cut_recalls)) for shape, cut_recalls in recalls_by_shape.items()
    )
    like_it = [trial for trial in trials if training_of(trial.shape) in narrow]
    enough = (1 - FEWER_DIMS_LOSE) * max(trial.recall for trial in like_it)
    won = min(
        (trial for trial in like_it if trial.recall >= enough),
        key=lambda trial: (trial.shape.dims, -trial.recall),
    )
    users = len(cuts[0].rows)
    return ShapeChoice(won.shape, trials, users, len(cuts), len(sample[0]), times is not None)


def _try(
    recalls_by_shape: Recalls,
    shapes: Sequence[Shape],
    cuts: Sequence[Cut],
    rng: np.random.Generator,
    progress: Progress,
) -> None:
    """Adds the recalls of shapes that were not tried yet."""
    fresh = [shape for shape in shapes if shape not in recalls_by_shape]
    for cut_index, cut in enumerate(cuts):
        for tried_count, (shape, tables) in enumerate(tables_of(cut.data, fresh, rng)):
            progress("choose", cut_index * len(fresh) + tried_count, len(cuts) * len(fresh))
            recalls_by_shape.setdefault(shape, []).append(cut.recalls(tables))


def _mean(recalls: Sequence[NDArray[np.float64]]) -> float:
    return float(np.concatenate(recalls).mean())


def _best_of_methods(recalls_by_shape: Recalls) -> list[Shape]:
    """The first of each method, spectral before alternating."""
    return [
        _first(
            {
                shape: cut_recalls
                for shape, cut_recalls in recalls_by_shape.items()
                if isinstance(shape, kind)
            }
        )
        for kind in (SpectralShape, AlternatingShape)
    ]


def _first(recalls_by_shape: Mapping[Shape, Sequence[NDArray[np.float64]]]) -> Shape:
    """The best shape; one nearer to the usual is taken where it loses less than the trial can tell.

    That is STANDARD_ERRORS of the differences user by user.
    """
    recalls = {
        shape: np.concatenate(cut_recalls) for shape, cut_recalls in recalls_by_shape.items()
    }
    best_shape = max(recalls, key=lambda shape: float(recalls[shape].mean()))
    tied = []
    for shape, user_recalls in recalls.items():
        recall_losses = recalls[best_shape] - user_recalls
        if recall_losses.mean() <= STANDARD_ERRORS * recall_losses.std() / np.sqrt(
            len(recall_losses)
        ):
            tied.append(shape)
    return min(tied, key=lambda shape: (distance(shape), -float(recalls[shape].mean())))
