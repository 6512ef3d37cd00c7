"""What is handed out: nothing missing, nothing else, and what it says about itself."""

import email
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tests.installs.conftest import Install, Packages
from tests.integration.program import ROOT

pytestmark = pytest.mark.installs

TOPS = ("cache", "dags", "precompute", "serving", "infra/cli", "infra/demo", "infra/lineage", "infra/local")
COMPILED = {"cache/native/_columns", "cache/topk/_topk"}
BUILT_WITH = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
GENERATED = re.compile(r"PKG-INFO|setup\.cfg|larder_predictions\.egg-info/(PKG-INFO|\w+(\.txt)?)")


def source(*, with_c: bool) -> set[str]:
    """The packages' files as they lie here."""
    source_paths = {path for top in TOPS for path in (ROOT / top).rglob("*") if path.is_file()}
    source_paths.add(ROOT / "infra/__init__.py")
    left_out = {".so", ".pyc"} | (set() if with_c else {".c", ".h"})
    return {str(path.relative_to(ROOT)) for path in source_paths if path.suffix not in left_out}


def in_wheel(wheel: Path) -> set[str]:
    """Names of a wheel's files, without what it says about itself."""
    with zipfile.ZipFile(wheel) as archive:
        names = {member.filename for member in archive.infolist() if not member.is_dir()}
    return {name for name in names if not re.match(r"larder_predictions-[^/]+\.dist-info/", name)}


def metadata(wheel: Path, name: str = "METADATA") -> Message:
    """A file of its `dist-info`."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (member_name for member_name in archive.namelist() if member_name.endswith(f".dist-info/{name}"))
        return email.message_from_bytes(archive.read(path))


def test_an_sdist_has_what_a_build_needs_and_nothing_else(packages: Packages) -> None:
    with tarfile.open(packages.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}

    assert {name for name in names if not GENERATED.fullmatch(name)} == source(with_c=True) | BUILT_WITH


def test_a_wheel_has_no_stray_files(packages: Packages) -> None:
    assert in_wheel(packages.pure) == source(with_c=False)
    more = in_wheel(packages.compiled) - in_wheel(packages.pure)
    assert {re.sub(r"\.cpython-\w+-[\w-]+\.so$", "", name) for name in more} == COMPILED


def test_wheels_say_for_which_machines_they_are(packages: Packages) -> None:
    tags = metadata(packages.compiled, "WHEEL").get_all("Tag") or []
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"

    assert metadata(packages.pure, "WHEEL").get_all("Tag") == ["py3-none-any"]
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        assert f"{python}-{python}-manylinux_2_17_x86_64" in tags, tags


@pytest.mark.parametrize("kind", ["compiled", "pure"])
def test_metadata_tell_the_extras_that_the_page_lists(packages: Packages, kind: str) -> None:
    page = (ROOT / "docs/how-to/install.md").read_text()
    documented_extras = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))

    assert set(metadata(getattr(packages, kind)).get_all("Provides-Extra") or []) == documented_extras


def test_every_extra_that_a_document_names_exists(packages: Packages) -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lists = [re.findall(r"larder-predictions\[([\w,]+)\]", page.read_text()) for page in documents]
    named = {extra for page_extras in lists for extras_text in page_extras for extra in extras_text.split(",")}

    assert "client" in named
    assert named <= set(metadata(packages.pure).get_all("Provides-Extra") or [])


CONSUMER = """from serving.client import Client
found: {} = Client("http://localhost").lookup("user_topk", "42").source
print(found)
"""


@pytest.mark.parametrize(("kind", "complaint"), [("str", ""), ("int", "Incompatible types in assignment")])
def test_a_consumer_is_checked_against_our_types(install: Install, tmp_path: Path, kind: str, complaint: str) -> None:
    python = install("client")
    (tmp_path / "consumer.py").write_text(CONSUMER.format(kind))

    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "consumer.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert bool(checked.returncode) == bool(complaint), checked.stdout
    assert complaint in checked.stdout
