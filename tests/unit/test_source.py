"""The source as a whole: one name for one class, no long file."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.unit.test_rooms import ROOT

TOPS = ("cache", "serving", "precompute", "dags", "infra")
LINES_MAX = 300


def files() -> list[Path]:
    """Every file of the source."""
    return sorted(file for top in TOPS for file in (ROOT / top).rglob("*.py"))


def test_no_two_classes_have_one_name() -> None:
    where: defaultdict[str, list[str]] = defaultdict(list)
    for file in files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(str(file.relative_to(ROOT)))

    assert {name: found for name, found in where.items() if len(found) > 1} == {}


def test_no_file_is_long() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in files()}

    assert {str(file): count for file, count in lengths.items() if count > LINES_MAX} == {}
