"""Checkouts side by side: the working tree, and an older commit, unpacked and built with an environment."""

import fcntl
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
FROZEN_FILE: Final = ROOT / "tests/contract/frozen_commit"
"""Holds the id of the commit whose contract is frozen: all that a user can see is as it was there."""
LOCK: Final = "infra/locks/all.txt"
_CACHE: Final = ROOT / "build/checkouts"
_COMMAND_S: Final = 120.0
_BUILD_S: Final = 900.0
_PATHS: Final = """
import sys, cache.native.loader, cache.topk.compiled, infra.cli, precompute, serving
packages = {"cache", "infra", "precompute", "serving"}
modules = [module for name, module in sys.modules.items() if name.split(".")[0] in packages]
print(*filter(None, (module.__file__ for module in modules)), sep="\\n")
"""
"""Program that prints the files that a checkout's own packages are imported from."""


class NoCheckout(RuntimeError):
    """The commit is not available here; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout: its name, its folder, and its environment's Python."""

    name: str
    root: Path
    python: Path

    def run(
        self, *arguments: str, environ: Mapping[str, str], within_s: float = _COMMAND_S
    ) -> "subprocess.CompletedProcess[str]":
        """Run `python -m` with these words in the checkout's folder; the caller judges the outcome."""
        return subprocess.run(
            [self.python, "-m", *arguments], cwd=self.root, env=self.environment(environ),
            capture_output=True, text=True, check=False, timeout=within_s,
        )  # fmt: skip

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables without settings of the surrounding shell, and without any other checkout on the path."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LARDER_")}
        inherited.pop("REDIS_URL", None)
        return {**inherited, **environ, "PYTHONPATH": str(self.root)}


def working_tree() -> Checkout:
    """Return this checkout."""
    return Checkout("new", ROOT, Path(sys.executable))


def frozen_commit(file: Path = FROZEN_FILE) -> str:
    """Return the id of the frozen commit; raise NoCheckout if the file is missing or has none."""
    try:
        commit = file.read_text().strip()
    except OSError as error:
        raise NoCheckout(
            f"{file} cannot be read ({error.strerror}): it holds the id of the frozen commit, and `git log -1 -- "
            "tests/contract/frozen_commit` has the last one"
        ) from None
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise NoCheckout(f"{file} must hold the full id of a commit, 40 hex digits, not {commit[:60]!r}")
    return commit


def checkout_of(commit: str, name: str = "old", cache: Path = _CACHE) -> Checkout:
    """Return the checkout of a commit or tag with built extensions, cached in `cache`; may raise NoCheckout.

    Its environment is this one where its lock is the same, else one of its own beside it, made from that lock.
    """
    commit = _resolved(commit)
    folder = cache / commit
    with _alone(cache / f"{commit}.lock"):
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _unpack(commit, folder)
            checkout = Checkout(name, folder, _python_of(folder))
            _build(checkout)
            (folder / ".complete").touch()
    return Checkout(name, folder, _python_of(folder))


def frozen_checkout() -> Checkout:
    """Return the checkout of the frozen commit; raise NoCheckout if there is none."""
    return checkout_of(frozen_commit())


def _resolved(commit: str) -> str:
    command = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise NoCheckout(
            f"this clone has no commit {commit}: `git fetch --unshallow` gets it after a shallow clone, "
            "`git fetch --tags` a tag"
        )
    return answer.stdout.strip()


def _unpack(commit: str, folder: Path) -> None:
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")


def _build(checkout: Checkout) -> None:
    """Build the checkout's extensions in place, and check that its Python imports them."""
    subprocess.run(
        [checkout.python, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=checkout.root, check=True, capture_output=True, timeout=_BUILD_S,
    )  # fmt: skip
    paths = subprocess.run(
        [checkout.python, "-c", _PATHS], cwd=checkout.root, env=checkout.environment({}),
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    foreign = [path for path in paths if not path.startswith(f"{checkout.root}/")]
    if foreign:
        raise NoCheckout(f"{checkout.root} imports {', '.join(foreign)}, which is not its own")
    if not list(checkout.root.glob("cache/**/*.so")):
        raise NoCheckout(f"{checkout.root} has no compiled parts: does this machine have a C compiler?")


def _python_of(folder: Path) -> Path:
    if (folder / LOCK).read_bytes() == (ROOT / LOCK).read_bytes():
        return Path(sys.executable)
    environment = folder / ".venv"
    python = environment / "bin/python"
    if not (environment / ".complete").exists():
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "venv", "-q", "--allow-existing", "--python", sys.executable, environment], check=True)
        subprocess.run(
            [uv, "pip", "sync", "-q", "--require-hashes", folder / LOCK],
            check=True, timeout=_BUILD_S, env={**os.environ, "VIRTUAL_ENV": str(environment)},
        )  # fmt: skip
        (environment / ".complete").touch()
    return python


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Keep other workers of the test run from making the same checkout at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
