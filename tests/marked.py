"""Processes started by a command under test, found by a variable in their environment or by their folder."""

from pathlib import Path


def marked(marker: str) -> dict[int, str]:
    """Return command lines by process id."""
    command_by_pid = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "environ").read_bytes():
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                command_by_pid[int(process.name)] = line
        except OSError:  # gone meanwhile, or not ours
            continue
    return command_by_pid


def working_in(folder: Path) -> list[int]:
    """Return processes whose current folder is or was in `folder`: PostgreSQL's overwrite their environment."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink().is_relative_to(folder):
                pids.append(int(process.name))
        except OSError:
            continue
    return pids
