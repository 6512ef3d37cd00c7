"""Resources of this host, or of the container on it: usable cores, memory that programs can still have, free disk."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def usable_cores(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Number of usable cores, at least 1. In a container with 4 of 96 cores, 96 threads would only take turns."""
    has_affinity = hasattr(os, "sched_getaffinity")
    allowed = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([allowed, *map(math.ceil, _quotas(proc, groups))]))


def disk_free_bytes(folder: Path) -> int:
    """Free bytes of the file system that holds a folder, or will."""
    existing_folder = next(ancestor for ancestor in (folder, *folder.parents) if ancestor.exists())
    return shutil.disk_usage(existing_folder).free


def memory_available_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return the memory still available here, cached files included: the least of the machine's and each cgroup's."""
    return min([_machine_bytes(proc), *_group_bytes(proc, groups)])


def _quotas(proc: Path, groups: Path) -> Iterator[float]:
    """Limits of each cgroup that this process is in, in cores; version 2, then version 1."""
    for folder in (*_folders(proc, groups, ""), *_folders(proc, groups / "cpu", "cpu")):
        with suppress(OSError, ValueError):  # ValueError: "max", no limit
            if (file := folder / "cpu.max").exists():
                quota, period = map(int, file.read_text().split())
            else:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            if quota > 0:
                yield quota / period


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
    for folder in _folders(proc, groups, ""):
        yield from _read_cgroup_headroom(folder, "memory.max", "memory.current", "file", "shmem")
    memory = groups / "memory"
    for folder in _folders(proc, memory, "memory"):
        yield from _read_cgroup_headroom(
            folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"
        )


def _folders(proc: Path, root: Path, controller: str) -> list[Path]:
    """The folder of the controller's group ("" in version 2) and those above it.

    In a container it is often the root alone, whatever the path says.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return [root]
    groups = (line.split(":", 2) for line in lines)
    path = next((path for _, names, path in groups if controller in names.split(",")), "/")
    folder = root / path.strip("/")
    return [folder, *(ancestor for ancestor in folder.parents if ancestor.is_relative_to(root))]


def _read_cgroup_headroom(
    folder: Path, limit: str, usage: str, cache: str, shared: str
) -> Iterator[int]:
    """Available bytes of one cgroup, none without a limit. File cache can be dropped; shared memory in it cannot."""
    try:
        allowed, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        stat = {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return
    if allowed.isdecimal():
        yield max(0, int(allowed) - used + stat.get(cache, 0) - stat.get(shared, 0))
