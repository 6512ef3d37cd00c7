"""The packages of `make package`, built once, and environments with them."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.program import ROOT

LOCKS = ROOT / "infra/locks"

Install = Callable[..., Path]


@dataclass(frozen=True)
class Packages:
    """The files of a release."""

    sdist: Path
    compiled: Path
    pure: Path


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Build the packages with `make package`, in the environment of this test."""
    dist = tmp_path_factory.mktemp("dist")
    venv = Path(sys.executable).parents[1]
    subprocess.run(
        ["make", "-s", "-o", "env", "package", f"VENV={venv}", f"DIST={dist}"],
        cwd=ROOT, check=True, timeout=600,
    )  # fmt: skip
    (pure,) = dist.glob("*-none-any.whl")
    (compiled,) = set(dist.glob("*.whl")) - {pure}
    (sdist,) = dist.glob("*.tar.gz")
    return Packages(sdist, compiled, pure)


@pytest.fixture
def install(packages: Packages, tmp_path: Path) -> Install:
    """Make an environment with a wheel and an extra, or exactly what a lock names; return its Python."""

    def make(extra: str = "", *, lock: str = "", is_pure: bool = False) -> Path:
        folder = tmp_path / "environment"
        uv("venv", "--python", sys.executable, str(folder))
        python = folder / "bin/python"
        if lock:
            uv("pip", "sync", "--require-hashes", str(LOCKS / lock), python=python)
        wheel = packages.pure if is_pure else packages.compiled
        requirement = f"{wheel}[{extra}]" if extra else str(wheel)
        uv("pip", "install", *(["--no-deps"] if lock else []), requirement, python=python)
        return python

    return make


def uv(*arguments: str, python: Path | None = None) -> None:
    """Run uv quietly, on an environment."""
    venv_variables = {} if python is None else {"VIRTUAL_ENV": str(python.parents[1])}
    program = Path(sys.executable).with_name("uv")
    subprocess.run([program, "-q", *arguments], check=True, env={**os.environ, **venv_variables}, timeout=600)
