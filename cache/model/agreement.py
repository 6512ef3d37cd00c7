"""Agreement of two answers to one question, one stored and one recomputed, say: overlap, cosine, errors. Pure."""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Errors(NamedTuple):
    """Differences of numbers without their signs: the largest and the mean."""

    largest: float
    mean: float


def overlap(ours: Iterable[Hashable], theirs: Iterable[Hashable], of: int) -> float:
    """Different items that both hold, as a share of `of` items; 1 where there are none to share."""
    return len(set(ours).intersection(theirs)) / of if of else 1.0


def jaccard(ours: Iterable[Hashable], theirs: Iterable[Hashable]) -> float:
    """Different items that both hold, as a share of those that either does; 1 where neither holds any."""
    a, b = set(ours), set(theirs)
    return overlap(a, b, len(a | b))


def recalls(wanted: NDArray[Any], found: NDArray[Any]) -> NDArray[np.float64]:
    """float64 [n]: of each row of `wanted` [n, k] the share that the same row of `found` [n, m] holds, in any order."""
    pairs = zip(wanted.tolist(), found.tolist(), strict=True)
    return np.array([overlap(ours, theirs, len(ours)) for ours, theirs in pairs])


def cosine(ours: NDArray[np.floating], theirs: NDArray[np.floating]) -> float | None:
    """Cosine of two vectors of one size; None where one of them has no direction."""
    lengths = float(np.linalg.norm(ours) * np.linalg.norm(theirs))
    return float(ours @ theirs) / lengths if lengths else None


def row_cosines(ours: NDArray[np.floating], theirs: NDArray[np.floating]) -> NDArray[np.float64]:
    """float64 [n] cosines of rows; two zero rows agree, one with another does not."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    both_zero = ~a.any(axis=1) & ~b.any(axis=1)
    products = np.einsum("nd,nd->n", a, b)
    found: NDArray[np.float64] = np.divide(
        products, lengths, out=np.asarray(both_zero, np.float64), where=lengths > 0
    )
    return found


def absolute_errors(found: NDArray[np.floating], exact: NDArray[np.floating]) -> Errors:
    """Errors of one or more numbers in their own unit."""
    sizes = np.abs(found - exact)
    return Errors(float(sizes.max()), float(sizes.mean()))


def relative_errors(found: NDArray[np.floating], exact: NDArray[np.floating]) -> Errors:
    """Errors as shares of the largest of the exact numbers; in their own unit where all of these are 0."""
    largest = float(np.abs(exact).max()) or 1.0
    errors = absolute_errors(found, exact)
    return Errors(errors.largest / largest, errors.mean / largest)


def worst_errors(found: NDArray[np.floating], exact: NDArray[np.floating]) -> NDArray[np.float64]:
    """[n]: the largest error of each row [n, d] as a share of the largest number of its exact row."""
    largest = np.maximum(np.abs(exact).max(axis=1), 1e-30)
    errors: NDArray[np.float64] = np.abs(exact - found).max(axis=1) / largest
    return errors
