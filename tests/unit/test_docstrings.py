"""Docstrings: a first line names its object and stands alone (PEP 257)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_rooms import ROOT

FILES = sorted(
    file
    for top in ("cache", "serving", "precompute", "dags", "infra")
    for file in (ROOT / top).rglob("*.py")
)
NO_NOUN = {
    "As", "How", "It", "Not", "Of", "Once", "One", "Same", "See", "Tells", "What", "When", "Where", "Whether",
    "Which", "Who", "Why",
}  # fmt: skip
"""First words of a line that explains a neighbour, or a noun that is not named."""


def first_lines(source: str) -> Iterator[str]:
    """Yield the first line of every docstring, those of attributes included."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            value = each.value if isinstance(each, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value.strip().partition("\n")[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_first_line_stands_alone(file: Path) -> None:
    lines = first_lines(file.read_text())

    assert [each for each in lines if each.split(" ")[0].strip(".,;:") in NO_NOUN] == []


def test_a_planted_one_is_noticed() -> None:
    assert list(first_lines('"""A module."""\nclass A:\n    """Of one thing."""\n')) == [
        "A module.",
        "Of one thing.",
    ]
