"""Releases side by side: the working tree, and the last one that was tagged, checked out and built."""

import fcntl
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cache.formats import RELEASE

ROOT = Path(__file__).parents[2]
LOCK = "infra/locks/all.txt"
ENVIRONMENT = ROOT / ".venv-upgrade"
COMMAND_S = 120.0
BUILD_S = 900.0


class NoRelease(RuntimeError):
    """There is no tag to compare with; the message says how to get one."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release: its name, the checkout that it runs from, and its environment's Python."""

    name: str
    root: Path
    python: Path

    def run(
        self, *words: str, environ: Mapping[str, str], within_s: float = COMMAND_S
    ) -> "subprocess.CompletedProcess[str]":
        """`python -m` with these words, from its checkout; the outcome is the caller's to judge."""
        return subprocess.run(
            [self.python, "-m", *words], cwd=self.root, env=self.environment(environ),
            capture_output=True, text=True, check=False, timeout=within_s,
        )  # fmt: skip

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Without settings of the surrounding shell, and without any other checkout on the path."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LARDER_")}
        kept.pop("REDIS_URL", None)
        return {**kept, **environ, "PYTHONPATH": str(self.root)}


def working_tree() -> Release:
    """The release in the making: this very checkout."""
    return Release("new", ROOT, Path(sys.executable))


def last_tag() -> str:
    """The newest tag v* before this release; raises NoRelease, with the remedy, where there is none."""
    tag = _described("HEAD")
    if tag == f"v{RELEASE}":
        tag = _described(f"{tag}^")
    if not tag:
        raise NoRelease(
            "no tag v* of an earlier release is in this clone: `git fetch --tags --unshallow` (or `git fetch --tags`) "
            "gets them; a fork without tags can make one at its last release, `git tag -a v0.1.0 COMMIT`"
        )
    return tag


def last_release(folder: Path) -> Release:
    """The release of `last_tag` in `folder`, its compiled parts built.

    Its environment is this one where its lock is the same, else .venv-upgrade, made from that lock.
    """
    tag = last_tag()
    packed = subprocess.run(["git", "archive", tag], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    is_same = (folder / LOCK).read_bytes() == (ROOT / LOCK).read_bytes()
    python = Path(sys.executable) if is_same else _environment(folder / LOCK)
    subprocess.run(
        [python, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder, check=True, capture_output=True, timeout=BUILD_S,
    )  # fmt: skip
    return Release("old", folder, python)


def _described(commit: str) -> str:
    found = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0", "--match", "v*", commit],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stdout.strip()


def _environment(lock: Path) -> Path:
    uv = Path(sys.executable).with_name("uv")
    # Beside it: the file of that name in an environment is uv's own lock.
    with ENVIRONMENT.with_suffix(".lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # workers of one run share it
        if not (ENVIRONMENT / "bin/python").exists():
            made: list[str | Path] = [
                uv,
                "venv",
                "-q",
                "--allow-existing",
                "--python",
                sys.executable,
                ENVIRONMENT,
            ]
            subprocess.run(made, check=True)
        subprocess.run(
            [uv, "pip", "sync", "-q", "--require-hashes", lock],
            check=True, timeout=BUILD_S, env={**os.environ, "VIRTUAL_ENV": str(ENVIRONMENT)},
        )  # fmt: skip
    return ENVIRONMENT / "bin/python"
