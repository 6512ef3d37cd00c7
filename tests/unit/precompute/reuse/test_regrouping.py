"""Regrouping: a tower whose rows depend on their neighbours is caught, any other is not."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.model.tower import Histories, Inputs, rows_of
from precompute.reuse.regrouping import ROWS, is_regrouped_alike

Run = Callable[[Inputs], NDArray[np.float32]]


def inputs(count: int) -> Inputs:
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 50, size) for size in rng.integers(0, 9, count)]
    return {"history": Histories.of(rows), "age": rng.standard_normal(count).astype(np.float32)}


def alone(given: Inputs) -> NDArray[np.float32]:
    """Rows that depend on nothing else."""
    histories, ages = given["history"], given["age"]
    assert isinstance(histories, Histories) and not isinstance(ages, Histories)
    sums = [float(histories.take(np.array([row])).indices.sum()) for row in range(len(ages))]
    return np.stack([np.array(sums, np.float32), ages], axis=1)


def with_mean(given: Inputs) -> NDArray[np.float32]:
    found = alone(given)
    found += found.mean(axis=0)
    return found


def with_largest(given: Inputs) -> NDArray[np.float32]:
    found = alone(given)
    found /= np.abs(found).max()  # as dynamic int8 does
    return found


def with_count(given: Inputs) -> NDArray[np.float32]:
    return alone(given) + np.float32(rows_of(given) > 100)


def with_place(given: Inputs) -> NDArray[np.float32]:
    return alone(given) + (np.arange(rows_of(given), dtype=np.float32) % 4)[:, None]


def with_neighbour(given: Inputs) -> NDArray[np.float32]:
    found = alone(given)
    found[1:] += np.float32(1e-7) * found[:-1]
    return found


@pytest.mark.parametrize("count", [1, 2, 40, ROWS, ROWS + 300])
def test_rows_that_depend_on_nothing_else_are_alike(count: int) -> None:
    assert is_regrouped_alike(alone, inputs(count))


@pytest.mark.parametrize(
    "run", [with_mean, with_largest, with_count, with_place, with_neighbour],
    ids=lambda run: str(run.__name__),
)  # fmt: skip
def test_rows_that_depend_on_their_neighbours_are_caught(run: Run) -> None:
    assert not is_regrouped_alike(run, inputs(ROWS))


def test_no_more_than_a_sample_is_run() -> None:
    asked: list[int] = []

    def counted(given: Inputs) -> NDArray[np.float32]:
        asked.append(rows_of(given))
        return alone(given)

    assert is_regrouped_alike(counted, inputs(ROWS + 300))
    assert asked[0] == ROWS and sum(asked[1:]) == ROWS
