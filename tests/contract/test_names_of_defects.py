"""The planted defects that random lives and simulations must find: none is lost without a successor."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests import defects as of_lives
from tests.simulation import defects as of_simulations

DEFECTS_FILE = Path(__file__).with_name("defects.txt")
PLANTED = {f"{module.__name__}: {name}" for module in (of_lives, of_simulations) for name in module.DEFECTS}


class Frozen(NamedTuple):
    """A line of the list: a defect, and its successor, "" without one."""

    name: str
    successor: str


def frozen_defects(text: str) -> list[Frozen]:
    """Lines of the list that are no comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [Frozen(name.strip(), successor.strip()) for name, _, successor in (line.partition("->") for line in lines)]


def lost_defects(frozen: list[Frozen], planted: set[str]) -> list[str]:
    """Return defects of the list that are no longer planted, neither themselves nor their successors."""
    return [name for name, successor in frozen if (successor or name) not in planted]


def test_no_planted_defect_is_lost() -> None:
    frozen = frozen_defects(DEFECTS_FILE.read_text())

    assert len(frozen) >= 54
    assert lost_defects(frozen, PLANTED) == []


def test_a_new_defect_stands_in_the_list() -> None:
    frozen = frozen_defects(DEFECTS_FILE.read_text())

    assert PLANTED - {name for line in frozen for name in line} == set()


@pytest.mark.parametrize(
    ("line", "expected_defects"), [("a: gone", ["a: gone"]), ("a: gone -> b: here", []), ("b: here", [])]
)
def test_a_lost_defect_is_reported_unless_it_has_a_successor(line: str, expected_defects: list[str]) -> None:
    assert lost_defects(frozen_defects(f"# text\n{line}\n"), {"b: here"}) == expected_defects
