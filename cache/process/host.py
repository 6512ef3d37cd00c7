"""Free resources of this host, or of the container on it: memory that programs can still have, and disk."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def disk_free_bytes(folder: Path) -> int:
    """Free bytes of the file system that holds a folder, or will."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(there).free


def memory_available_bytes(
    proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Memory that programs here can still have, cached files included: what the machine and each cgroup leave."""
    return min([_machine_bytes(proc), *_group_bytes(proc, groups)])


def _machine_bytes(proc: Path) -> int:
    """Available bytes of the machine's memory; all of its memory where the system does not say."""
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_bytes(proc: Path, groups: Path) -> Iterator[int]:
    """Available bytes in each cgroup with a limit that this process is in; version 2, then version 1."""
    for folder in _folders(proc, groups, "0::"):
        yield from _left(folder, "memory.max", "memory.current", "file", "shmem")
    memory = groups / "memory"
    for folder in _folders(proc, memory, ":memory:"):
        yield from _left(
            folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"
        )


def _folders(proc: Path, root: Path, mark: str) -> list[Path]:
    """The group's folder and those above it; in a container often the root alone, whatever the path says."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return [root]
    path = next((line.partition(mark)[2] for line in lines if mark in line), "/")
    folder = root / path.strip("/")
    return [folder, *(each for each in folder.parents if each.is_relative_to(root))]


def _left(folder: Path, limit: str, usage: str, cache: str, shared: str) -> Iterator[int]:
    """Available bytes of one cgroup, none without a limit. File cache can be dropped; shared memory in it cannot."""
    try:
        allowed, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        stat = {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return
    if allowed.isdecimal():
        yield max(0, int(allowed) - used + stat.get(cache, 0) - stat.get(shared, 0))
