"""Another package named cache, found before ours, is told of in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_layering import ROOT


def said(folder: Path, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """What a program says that was started in a folder."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)} | more
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["cache.py", "cache/__init__.py"])
@pytest.mark.parametrize("program", ["serving", "precompute"])
def test_a_foreign_cache_stops_a_program_in_one_line(tmp_path: Path, program: str, name: str) -> None:
    foreign = tmp_path / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("class LRU: ...\n")

    completed_process = said(tmp_path, "-m", program, "--help")

    assert completed_process.returncode and completed_process.stdout == "" and completed_process.stderr.count("\n") == 1
    assert f"Larder's {program} found another package named cache, {foreign}" in completed_process.stderr


def test_a_foreign_cache_on_the_path_stops_an_import(tmp_path: Path) -> None:
    (tmp_path / "cache.py").touch()
    path = os.pathsep.join([str(tmp_path), str(ROOT)])

    completed_process = said(ROOT.parent, "-c", "import serving.client", PYTHONPATH=path)

    assert completed_process.stderr.rstrip().splitlines()[-1].startswith("ImportError: Larder's serving found")


def test_the_remedy_helps(tmp_path: Path) -> None:
    (tmp_path / "cache.py").touch()

    assert said(tmp_path, "-m", "serving", "--help", PYTHONSAFEPATH="1").returncode == 0
