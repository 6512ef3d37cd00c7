"""No block of the source stands twice, by pylint's duplicate-code (R0801)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_rooms import ROOT

LINES_MAX = 10
"""Lines that two files may share in a row; comments, docstrings and imports do not count."""
SOURCE = [ROOT / top for top in ("cache", "serving", "precompute", "dags", "infra")]


def found(*folders: Path) -> str:
    """What the checker says of these folders' Python files; empty if nothing stands twice."""
    only = (
        "-j",
        "0",
        "--disable=all",
        "--enable=duplicate-code",
        f"--min-similarity-lines={LINES_MAX}",
    )
    command = [sys.executable, "-m", "pylint", *only, "--persistent=n", "--score=n", "--rcfile="]
    run = subprocess.run([*command, *map(str, folders)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode in (0, 8), run.stderr  # 8: it has something to say about the style
    return run.stdout


def test_no_block_of_the_source_stands_twice() -> None:
    assert found(*SOURCE) == ""


@pytest.mark.parametrize(("lines", "is_noticed"), [(LINES_MAX, False), (LINES_MAX + 1, True)])
def test_a_planted_block_is_noticed(tmp_path: Path, lines: int, is_noticed: bool) -> None:
    block = "".join(f"value_{number} = {number} + len('some')\n" for number in range(lines))
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(f"{name} = 1\n{block}{name}_end = 2\n")

    assert bool(found(tmp_path)) == is_noticed
