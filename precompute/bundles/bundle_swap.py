"""A trained bundle takes the place of the one before it, whole, whatever is killed meanwhile."""

import glob
import secrets
import shutil
from pathlib import Path

from cache.store.artefacts import last_change

SWAPS = 3


def put_in_place(new: Path, target: Path) -> None:
    """Swap a whole folder in by renames; if that fails, the old one is back, and `heal` brings it back after a kill.

    A night that copies the bundle meanwhile sees the old one or the new one, or copies again.
    """
    for remaining_attempts in reversed(range(SWAPS)):
        old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
        had_one = target.exists()
        if had_one:
            target.replace(old)
        try:
            new.replace(target)
        except BaseException as error:
            if had_one and old.exists():
                old.replace(target)
            elif remaining_attempts and isinstance(error, OSError) and target.exists():
                continue  # a night that found no bundle has put the old one back: once more
            raise
        break
    for leftover in _left_over(target, "old"):
        shutil.rmtree(leftover, ignore_errors=True)


def heal(target: Path) -> bool:
    """Put the bundle back that a `train` killed between its two renames had moved aside; whether there was one."""
    if target.exists():
        return False
    for old in _left_over(target, "old"):
        try:
            old.rename(target)
        except OSError:
            continue
        return True
    return False


def sweep_training(target: Path, *, changed_before_s: float) -> int:
    """Remove what killed trainings left beside a whole bundle before that time (Unix seconds); folders removed."""
    if not target.exists():
        return 0
    leftovers = [
        leftover
        for kind in ("old", "part")
        for leftover in _left_over(target, kind)
        if last_change(leftover) < changed_before_s
    ]
    for leftover in leftovers:
        shutil.rmtree(leftover, ignore_errors=True)
    return len(leftovers)


def _left_over(target: Path, kind: str) -> list[Path]:
    """Folders of killed swaps, the newest first."""
    dated_folders = [
        (last_change(folder), folder)
        for folder in target.parent.glob(f".{glob.escape(target.name)}.????????.{kind}")
    ]
    return [folder for _, folder in sorted(dated_folders, reverse=True)]
