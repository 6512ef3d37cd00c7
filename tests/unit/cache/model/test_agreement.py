"""Overlap, cosine and errors of two answers."""

import numpy as np
import pytest

from cache.model.agreement import (
    absolute_errors,
    cosine,
    jaccard,
    overlap,
    recalls,
    relative_errors,
    row_cosines,
    worst_row_errors,
)


def test_an_overlap_is_a_share_of_what_was_wanted() -> None:
    assert overlap(["a", "b", "c"], ["b", "a", "d", "e"], 4) == 0.5
    assert overlap([], [], 0) == 1.0 and overlap([], [1], 1) == 0.0


def test_an_item_that_stands_twice_is_shared_once() -> None:
    assert overlap([1, 1, 2], [1, 1, 3], 3) == pytest.approx(1 / 3)
    assert jaccard([1, 1], [1, 2]) == 0.5 and jaccard([], []) == 1.0


def test_overlaps_are_those_of_numpy_whatever_the_integers() -> None:
    rng = np.random.default_rng(3)
    expected_ids = np.array([rng.permutation(60)[:20] for _ in range(50)], np.uint32)
    retrieved_ids = rng.integers(-1, 60, (50, 25))

    expected_recalls = [len(np.intersect1d(*rows)) / 20 for rows in zip(expected_ids, retrieved_ids, strict=True)]
    assert recalls(expected_ids, retrieved_ids).tolist() == expected_recalls
    assert [overlap(*rows, 20) for rows in zip(expected_ids, retrieved_ids, strict=True)] == expected_recalls


def test_cosines_of_zero_rows_agree_only_with_zero() -> None:
    first_vectors = np.array([[1.0, 0], [0, 0], [0, 0], [2, 2]])
    theirs = np.array([[2.0, 0], [0, 0], [1, 0], [-1, -1]])

    assert row_cosines(first_vectors, theirs).tolist() == pytest.approx([1, 1, 0, -1])
    assert cosine(first_vectors[3], theirs[3]) == pytest.approx(-1)
    assert cosine(first_vectors[1], theirs[1]) is None and cosine(first_vectors[2], theirs[2]) is None


def test_errors_are_relative_to_the_largest_exact_number() -> None:
    exact, approximate = np.array([-4.0, 1.0]), np.array([-3.0, 1.0])

    assert absolute_errors(approximate, exact) == (1.0, 0.5)
    assert relative_errors(approximate, exact) == (0.25, 0.125)
    assert relative_errors(approximate, np.zeros(2)) == absolute_errors(approximate, np.zeros(2))
    assert worst_row_errors(np.stack([approximate, exact]), np.stack([exact, exact])).tolist() == [0.25, 0]
