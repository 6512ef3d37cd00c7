"""Processes that inherited a mark in their environment: whatever a command under test has started."""

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
