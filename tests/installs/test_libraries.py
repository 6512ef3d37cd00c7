"""The sections on each library whose models are imported, as a reader types them, in an environment of its own."""

from pathlib import Path

import pytest

from tests.documents.blocks import LIBRARIES, of_library
from tests.documents.shell import Shell
from tests.documents.test_blocks import RUN
from tests.installs.conftest import Install, uv


@pytest.mark.slow
@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_a_model_of_the_library_is_fitted_imported_and_has_its_night(
    library: str, install: Install, tmp_path: Path
) -> None:
    python = install("precompute")
    uv("pip", "install", "pip", python=python)  # which the section's own lines call
    folder = tmp_path / "reader"
    folder.mkdir()
    shell = Shell(folder, {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(folder)})
    run = [block for block in of_library(library) if block.kind in RUN]
    assert [block.kind for block in run][:3] == ["sh", "python", "sh"]

    printed = []
    for block in run:
        completed = shell.sh(block.text) if block.kind == "sh" else shell.python(block.text)
        assert completed.returncode == 0, f"{block.location}\n{completed.stdout[-4000:]}"
        printed.append(completed.stdout)

    assert "night" in printed[2] and "gates passed" in printed[2]
