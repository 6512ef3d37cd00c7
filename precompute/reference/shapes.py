"""Shapes of the reference model, spectral and alternating: which are tried, and the tables that one is trained to."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, product

import numpy as np
from numpy.typing import NDArray

from precompute.reference.alternating import AlternatingShape, fold, item_vectors
from precompute.reference.spectral import (
    ROUNDS,
    SpectralShape,
    Spectrum,
    UserItemMatrix,
    singular_vectors,
    tables,
)

Shape = SpectralShape | AlternatingShape
Tables = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Rows whose sum over a history is the user, and the items' vectors, [items, dims] each."""

USER_EXPONENTS = (0.5, 0.25)
ITEM_EXPONENTS = (0.5, 0.4, 0.3, 0.2)
UNOBSERVED_WEIGHTS = (0.003, 0.02, 0.1)
REGULARIZATIONS = (0.003, 0.01, 0.03)
SPECTRAL_RIDGES = (0.3, 0.1, 0.03, 0.01)
FOLD_RIDGES = (0.3, 1.0, 3.0)
FOLD_EXPONENTS = (0.0, 0.2)


def first_tried(dims: int) -> list[Shape]:
    """Shapes that each take a training of their own, spectral ones first; alternating ones of one regularisation."""
    exponents = product(USER_EXPONENTS, ITEM_EXPONENTS)
    return [
        *(SpectralShape(*exponent_pair, dims=dims) for exponent_pair in exponents),
        *(AlternatingShape(others_weight, dims=dims) for others_weight in UNOBSERVED_WEIGHTS),
    ]


def regularized(shape: Shape) -> list[Shape]:
    """An alternating shape with each regularisation; of a spectral one itself."""
    if isinstance(shape, SpectralShape):
        return [shape]
    return [replace(shape, regularization=regularization) for regularization in REGULARIZATIONS]


def folded(shape: Shape) -> list[Shape]:
    """Shapes that one training gives, this one among them."""
    if isinstance(shape, SpectralShape):
        return [replace(shape, ridge=ridge) for ridge in SPECTRAL_RIDGES]
    folds = product(FOLD_RIDGES, FOLD_EXPONENTS)
    return [
        replace(shape, ridge=ridge, item_exponent=item_exponent) for ridge, item_exponent in folds
    ]


def training_of(shape: Shape) -> Shape:
    """The same training with the usual fold."""
    if isinstance(shape, SpectralShape):
        return replace(shape, ridge=SpectralShape().ridge)
    usual = AlternatingShape()
    return replace(shape, ridge=usual.ridge, item_exponent=usual.item_exponent)


def distance(shape: Shape) -> float:
    """Distance of a spectral shape's exponents from the usual ones; 0 for an alternating shape."""
    if isinstance(shape, AlternatingShape):
        return 0.0
    usual = SpectralShape()
    moved = abs(shape.user_exponent - usual.user_exponent)
    return round(moved + abs(shape.item_exponent - usual.item_exponent), 6)


def tables_of(
    data: UserItemMatrix, shapes: Iterable[Shape], rng: np.random.Generator
) -> Iterator[tuple[Shape, Tables]]:
    """Tables of each shape; neighbours of one training are trained once."""
    start: Spectrum | None = None
    for training, training_shapes in groupby(shapes, training_of):
        if isinstance(training, SpectralShape):
            spectrum = singular_vectors(data, training, rng, rounds=ROUNDS)
            for shape in training_shapes:
                assert isinstance(shape, SpectralShape)  # noqa: S101 - as its training is
                yield shape, tables(spectrum, data.item_degrees, shape)
        else:
            if start is None or start.vectors.shape[1] < training.dims:
                start = singular_vectors(
                    data, SpectralShape(dims=training.dims), rng, rounds=ROUNDS
                )
            vectors = item_vectors(data, start, training, rng)
            for shape in training_shapes:
                assert isinstance(shape, AlternatingShape)  # noqa: S101 - as its training is
                yield shape, (fold(vectors, data, shape), vectors)
