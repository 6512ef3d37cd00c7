"""Agreement of two answers to one question, such as a stored and a recomputed answer: overlap, cosine, errors. Pure."""

from collections.abc import Hashable, Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

SKEW_RULE: Final = "skew"
"""Id of the gate rule that compares lists of the live path with the records; used by gates and by the service."""

SKEW_COSINE_RULE: Final = "skew_cosine"
"""Id of the gate rule that compares vectors of the live path with the records."""

SKEW_DEPTH: Final = 20
"""Largest number of items of a list that `skew` compares, in gates and in the service: agreement depends on the
length."""


class ErrorSummary(NamedTuple):
    """Absolute differences of numbers: the largest and the mean."""

    largest_error: float
    mean_error: float


def overlap(first_items: Iterable[Hashable], second_items: Iterable[Hashable], item_count: int) -> float:
    """Return the number of distinct items in both, as a share of `item_count`; 1 if `item_count` is 0."""
    return len(set(first_items).intersection(second_items)) / item_count if item_count else 1.0


def jaccard(first_items: Iterable[Hashable], second_items: Iterable[Hashable]) -> float:
    """Return the number of distinct items in both, as a share of those in either; 1 if both are empty."""
    first_set, second_set = set(first_items), set(second_items)
    return overlap(first_set, second_set, len(first_set | second_set))


def recalls(expected_ids: NDArray[Any], retrieved_ids: NDArray[Any]) -> NDArray[np.float64]:
    """Return float64 [n]: the share of each row of `expected_ids` [n, k] in that row of `retrieved_ids` [n, m]."""
    pairs = zip(expected_ids.tolist(), retrieved_ids.tolist(), strict=True)
    return np.array([overlap(expected_row, retrieved_row, len(expected_row)) for expected_row, retrieved_row in pairs])


def cosine(first_vector: NDArray[np.floating], second_vector: NDArray[np.floating]) -> float | None:
    """Return the cosine of two vectors of the same size; None if either has length 0."""
    length_product = float(np.linalg.norm(first_vector) * np.linalg.norm(second_vector))
    return float(first_vector @ second_vector) / length_product if length_product else None


def row_cosines(first_vectors: NDArray[np.floating], second_vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the cosines of rows, float64 [n]: 1 for two zero rows, 0 if only one of them is zero."""
    a, b = first_vectors.astype(np.float64), second_vectors.astype(np.float64)
    length_products = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    both_zero_mask = ~a.any(axis=1) & ~b.any(axis=1)
    products = np.einsum("nd,nd->n", a, b)
    cosines: NDArray[np.float64] = np.divide(
        products, length_products, out=np.asarray(both_zero_mask, np.float64), where=length_products > 0
    )
    return cosines


def absolute_errors(approximate_numbers: NDArray[np.floating], exact_numbers: NDArray[np.floating]) -> ErrorSummary:
    """Summarize errors in the unit of the numbers."""
    error_sizes = np.abs(approximate_numbers - exact_numbers)
    return ErrorSummary(float(error_sizes.max()), float(error_sizes.mean()))


def relative_errors(approximate_numbers: NDArray[np.floating], exact_numbers: NDArray[np.floating]) -> ErrorSummary:
    """Summarize errors as shares of the largest absolute exact number.

    If all exact numbers are 0, the errors are in the numbers' unit.
    """
    largest_exact = float(np.abs(exact_numbers).max()) or 1.0
    errors = absolute_errors(approximate_numbers, exact_numbers)
    return ErrorSummary(errors.largest_error / largest_exact, errors.mean_error / largest_exact)


def worst_row_errors(
    approximate_numbers: NDArray[np.floating], exact_numbers: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Return [n]: the largest error of each row [n, d] as a share of the largest absolute number of its exact row."""
    largest_exact = np.maximum(np.abs(exact_numbers).max(axis=1), 1e-30)
    row_errors: NDArray[np.float64] = np.abs(exact_numbers - approximate_numbers).max(axis=1) / largest_exact
    return row_errors
