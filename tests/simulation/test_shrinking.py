"""Shrinking of failures, with rules on the steps alone in place of simulations."""

from collections.abc import Callable, Collection, Sequence

import pytest

from tests.simulation import shrinking
from tests.simulation.scenarios import Step
from tests.simulation.shrinking import Luck, shrunk

STEPS = [Step(float(number), "ask") for number in range(44)]


def shrunk_numbers(monkeypatch: pytest.MonkeyPatch, breaks: Callable[[Collection[int]], bool]) -> list[int]:
    """Return the numbers of the steps in the report on a rule, which breaks for some sets of steps."""

    def broken(_luck: Luck, steps: Sequence[Step]) -> str | None:
        return "a rule" if breaks({int(step.at) for step in steps}) else None

    monkeypatch.setattr(shrinking, "broken", broken)
    return [int(step.at) for step in shrunk(0, STEPS).steps]


def test_only_needed_steps_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shrunk_numbers(monkeypatch, {3, 17, 18, 40}.issubset) == [3, 17, 18, 40]


def test_a_step_that_goes_only_once_a_pair_is_gone_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps 5 and 30 can only be left out together, and step 43 only after them.
    def breaks(numbers: Collection[int]) -> bool:
        return 7 in numbers and (5 in numbers) == (30 in numbers) and (43 in numbers or 5 not in numbers)

    assert shrunk_numbers(monkeypatch, breaks) == [7]


def test_a_failure_that_does_not_repeat_itself_is_not_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="seed 0 breaks no rule when it is repeated"):
        shrunk_numbers(monkeypatch, lambda _numbers: False)
