"""Processes that a command under test has started, found by a mark in their environment or by where they work."""

from pathlib import Path


def marked(mark: str) -> dict[int, str]:
    """Command lines by process id."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(process.name)] = line
        except OSError:  # gone meanwhile, or not ours
            continue
    return found


def working_in(folder: Path) -> list[int]:
    """Processes whose current folder is or was within `folder`: PostgreSQL's own overwrite their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink().is_relative_to(folder):
                found.append(int(process.name))
        except OSError:
            continue
    return found
