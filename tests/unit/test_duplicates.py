"""No block of the source stands twice in two files."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_layering import ROOT

LINES_MAX = 10
"""Lines that two files may share in a row; comments, docstrings, imports and signatures do not count."""
SOURCE = [ROOT / top for top in ("cache", "serving", "precompute", "dags", "infra")]

Line = tuple[int, str]


def counted(text: str) -> list[Line]:
    """Lines that count, with their numbers: neither blank nor what every file has of its own accord."""
    left_out = {number for node in ast.walk(ast.parse(text)) for number in _spared(node)}
    lines = dict(enumerate(text.splitlines(), 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row] = lines[row][:column]
    bare = ((number, line.strip()) for number, line in lines.items() if number not in left_out)
    return [(number, line) for number, line in bare if line]


def _spared(node: ast.AST) -> Iterator[int]:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
        case ast.Expr(value=ast.Constant(value=value)) if value is ...:
            yield node.lineno
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            first = min((decorator.lineno for decorator in node.decorator_list), default=node.lineno)
            yield from range(first, node.body[0].lineno)


def found(*folders: Path) -> list[str]:
    """Blocks of more than LINES_MAX lines that stand in two files: where each begins."""
    first_location_by_block: dict[tuple[str, ...], tuple[Path, int]] = {}
    offences = []
    for path in sorted(file for folder in folders for file in folder.rglob("*.py")):
        lines = counted(path.read_text())
        for at in range(len(lines) - LINES_MAX):
            block = lines[at : at + LINES_MAX + 1]
            first_path, number = first_location_by_block.setdefault(
                tuple(line for _, line in block), (path, block[0][0])
            )
            if first_path != path:
                offences.append(f"{path}:{block[0][0]} stands in {first_path}:{number} as well")
    return offences


def test_no_block_of_the_source_stands_twice() -> None:
    assert found(*SOURCE) == []


@pytest.mark.parametrize(("lines", "is_noticed"), [(LINES_MAX, False), (LINES_MAX + 1, True)])
def test_a_planted_block_is_noticed(tmp_path: Path, lines: int, is_noticed: bool) -> None:
    block = "".join(f"value_{number} = {number} + len('some')\n" for number in range(lines))
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(f"{name} = 1\n{block}{name}_end = 2\n")

    assert bool(found(tmp_path)) == is_noticed


def test_what_every_file_has_does_not_count(tmp_path: Path) -> None:
    named = ",\n".join(f"    name_{number}" for number in range(LINES_MAX + 1))
    text = f'"""Some\ndocstring."""\n\nfrom module import (\n{named},\n)\n\n\ndef some(\n{named},\n): ...\n'
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(text + f"{name} = name_0  # a comment\n")

    assert found(tmp_path) == []
