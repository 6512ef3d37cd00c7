"""Regrouping: a tower whose rows depend on their neighbours is caught, any other is not."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.model.tower import Histories, Inputs, row_count_of
from precompute.reuse.reproducibility import REGROUPED_ROWS, is_regrouped_alike

Run = Callable[[Inputs], NDArray[np.float32]]


def inputs(count: int) -> Inputs:
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 50, size) for size in rng.integers(0, 9, count)]
    return {"history": Histories.of(rows), "age": rng.standard_normal(count).astype(np.float32)}


def alone(tower_inputs: Inputs) -> NDArray[np.float32]:
    """Rows that depend on nothing else."""
    histories, ages = tower_inputs["history"], tower_inputs["age"]
    assert isinstance(histories, Histories) and not isinstance(ages, Histories)
    sums = [float(histories.select_rows(np.array([row])).indices.sum()) for row in range(len(ages))]
    return np.stack([np.array(sums, np.float32), ages], axis=1)


def with_mean(tower_inputs: Inputs) -> NDArray[np.float32]:
    outputs = alone(tower_inputs)
    outputs += outputs.mean(axis=0)
    return outputs


def with_largest(tower_inputs: Inputs) -> NDArray[np.float32]:
    outputs = alone(tower_inputs)
    outputs /= np.abs(outputs).max()  # as dynamic int8 does
    return outputs


def with_count(tower_inputs: Inputs) -> NDArray[np.float32]:
    return alone(tower_inputs) + np.float32(row_count_of(tower_inputs) > 100)


def with_place(tower_inputs: Inputs) -> NDArray[np.float32]:
    return alone(tower_inputs) + (np.arange(row_count_of(tower_inputs), dtype=np.float32) % 4)[:, None]


def with_neighbour(tower_inputs: Inputs) -> NDArray[np.float32]:
    outputs = alone(tower_inputs)
    outputs[1:] += np.float32(1e-7) * outputs[:-1]
    return outputs


@pytest.mark.parametrize("count", [1, 2, 40, REGROUPED_ROWS, REGROUPED_ROWS + 300])
def test_rows_that_depend_on_nothing_else_are_alike(count: int) -> None:
    assert is_regrouped_alike(alone, inputs(count))


@pytest.mark.parametrize(
    "run", [with_mean, with_largest, with_count, with_place, with_neighbour],
    ids=lambda run: str(run.__name__),
)  # fmt: skip
def test_rows_that_depend_on_their_neighbours_are_caught(run: Run) -> None:
    assert not is_regrouped_alike(run, inputs(REGROUPED_ROWS))


def test_no_more_than_a_sample_is_run() -> None:
    row_counts: list[int] = []

    def count_and_run(tower_inputs: Inputs) -> NDArray[np.float32]:
        row_counts.append(row_count_of(tower_inputs))
        return alone(tower_inputs)

    assert is_regrouped_alike(count_and_run, inputs(REGROUPED_ROWS + 300))
    assert row_counts[0] == REGROUPED_ROWS and sum(row_counts[1:]) == REGROUPED_ROWS
