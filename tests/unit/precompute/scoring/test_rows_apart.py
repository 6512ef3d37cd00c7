"""Rows on which a model raises are told from all others, whichever they are, and named where that ends a night."""

from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.model.tower import Inputs, run_isolating_failures
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.scoring.towers import run_named

SPEC: Final = TowerSpec((InputSpec("home", "feature", "int64", column="country"),), "vector", 2)


class Odd:
    """Model that raises on batches with a negative number, and counts its runs."""

    spec = SPEC

    def __init__(self) -> None:
        self.runs = 0

    def run(self, inputs: Inputs) -> NDArray[np.float32]:
        self.runs += 1
        numbers: Any = inputs["home"]
        if (numbers < 0).any():
            raise RuntimeError("Non-zero status code\nidx=-1 must be within the inclusive range [0,4]")
        return np.repeat(np.asarray(numbers, np.float32)[:, None], 2, axis=1)


@given(st.lists(st.integers(-3, 3), max_size=40))
def test_rows_that_raise_are_found_and_the_others_have_their_outputs(numbers: list[int]) -> None:
    tower, input_numbers = Odd(), np.array(numbers, np.int64)

    outputs, raised = run_isolating_failures(tower, {"home": input_numbers})

    assert raised.tolist() == [number < 0 for number in numbers]
    assert outputs[~raised, 0].tolist() == [number for number in numbers if number >= 0]
    assert np.isnan(outputs[raised]).all()
    assert tower.runs <= 1 + 2 * len(numbers)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_the_first_row_that_ends_a_night_is_named_with_its_value(numbers: list[int], data: Any) -> None:
    row = data.draw(st.integers(0, len(numbers) - 1))
    numbers[row] = -7

    with pytest.raises(SourceError, match="country -7") as caught:
        run_named(Odd(), {"home": np.array(numbers)}, lambda row: f"user 'u{row}'")

    assert str(caught.value).startswith(f"user 'u{row}': ") and "idx=-1 must be" in str(caught.value)


def test_what_no_row_alone_is_to_blame_for_is_raised_as_it_is() -> None:
    class Small(Odd):
        def run(self, inputs: Inputs) -> NDArray[np.float32]:
            if len(inputs["home"]) > 3:
                raise MemoryError
            return super().run(inputs)

    with pytest.raises(MemoryError):
        run_named(Small(), {"home": np.arange(8)}, str)
