"""The page of each library whose models are imported, as a reader types it, in an environment of that library's own."""

from pathlib import Path

import pytest

from tests.documents.blocks import LIBRARIES, of_page
from tests.documents.shell import Shell
from tests.documents.test_blocks import RUN
from tests.installs.conftest import Install, uv
from tests.integration.program import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(LIBRARIES))
def test_a_model_of_the_library_is_fitted_imported_and_has_its_night(
    page: str, install: Install, tmp_path: Path
) -> None:
    python = install("precompute")
    uv("pip", "install", "pip", python=python)  # which the page's own lines call
    folder = tmp_path / "reader"
    folder.mkdir()
    shell = Shell(folder, {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(folder)})
    run = [block for block in of_page(ROOT / page) if block.kind in RUN]
    assert [block.kind for block in run][:3] == ["sh", "python", "sh"]

    printed = []
    for block in run:
        completed = shell.sh(block.text) if block.kind == "sh" else shell.python(block.text)
        assert completed.returncode == 0, f"{block.place}\n{completed.stdout[-4000:]}"
        printed.append(completed.stdout)

    assert "night" in printed[2] and "gates passed" in printed[2]
