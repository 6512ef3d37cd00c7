"""Resources of this host, or of its container: usable cores, available memory, free disk space."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC_FOLDER, CGROUP_FOLDER = Path("/proc"), Path("/sys/fs/cgroup")


def usable_cores(proc_folder: Path = PROC_FOLDER, cgroup_folder: Path = CGROUP_FOLDER) -> int:
    """Return the number of usable cores, at least 1.

    With 4 of 96 cores in a container, 96 threads would only compete.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    allowed_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([allowed_cores, *map(math.ceil, _cpu_quotas(proc_folder, cgroup_folder))]))


def disk_free_bytes(folder: Path) -> int:
    """Return the free bytes of the file system of a folder, which need not exist yet."""
    existing_folder = next(ancestor for ancestor in (folder, *folder.parents) if ancestor.exists())
    return shutil.disk_usage(existing_folder).free


def memory_available_bytes(proc_folder: Path = PROC_FOLDER, cgroup_folder: Path = CGROUP_FOLDER) -> int:
    """Return the available memory in bytes, file cache included: the minimum over the machine and each cgroup."""
    return min([_machine_available_bytes(proc_folder), *_cgroup_available_bytes(proc_folder, cgroup_folder)])


def _cpu_quotas(proc_folder: Path, cgroup_folder: Path) -> Iterator[float]:
    """Return the limit of each cgroup of this process, in cores; version 2, then version 1."""
    for folder in (
        *_cgroup_folders(proc_folder, cgroup_folder, ""),
        *_cgroup_folders(proc_folder, cgroup_folder / "cpu", "cpu"),
    ):
        with suppress(OSError, ValueError):  # ValueError: "max", no limit
            if (limit_file := folder / "cpu.max").exists():
                quota_us, period_us = map(int, limit_file.read_text().split())
            else:
                quota_us = int((folder / "cpu.cfs_quota_us").read_text())
                period_us = int((folder / "cpu.cfs_period_us").read_text())
            if quota_us > 0:
                yield quota_us / period_us


def _machine_available_bytes(proc_folder: Path) -> int:
    """Return the machine's available memory in bytes; its total memory if the system does not report it."""
    try:
        for line in (proc_folder / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_available_bytes(proc_folder: Path, cgroup_folder: Path) -> Iterator[int]:
    """Return the available bytes of each cgroup of this process with a limit; version 2, then version 1."""
    for folder in _cgroup_folders(proc_folder, cgroup_folder, ""):
        yield from _read_cgroup_headroom(folder, "memory.max", "memory.current", "file", "shmem")
    memory_root = cgroup_folder / "memory"
    for folder in _cgroup_folders(proc_folder, memory_root, "memory"):
        yield from _read_cgroup_headroom(
            folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"
        )


def _cgroup_folders(proc_folder: Path, cgroup_root: Path, controller: str) -> list[Path]:
    """Return the folder of the controller's cgroup (controller "" in version 2) and its parents.

    In a container often only the root exists, whatever the path says.
    """
    try:
        lines = (proc_folder / "self/cgroup").read_text().splitlines()
    except OSError:
        return [cgroup_root]
    cgroup_entries = (line.split(":", 2) for line in lines)
    group_path = next((group_path for _, names, group_path in cgroup_entries if controller in names.split(",")), "/")
    folder = cgroup_root / group_path.strip("/")
    return [folder, *(ancestor for ancestor in folder.parents if ancestor.is_relative_to(cgroup_root))]


def _read_cgroup_headroom(
    folder: Path, limit_file: str, usage_file: str, cache_field: str, shared_field: str
) -> Iterator[int]:
    """Yield the available bytes of one cgroup, nothing without a limit.

    File cache can be dropped, its shared memory cannot.
    """
    try:
        limit_text, used_bytes = ((folder / limit_file).read_text().strip(), int((folder / usage_file).read_text()))
        name_value_pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        bytes_by_field = {name: int(value) for name, value in name_value_pairs}
    except (OSError, ValueError):
        return
    if limit_text.isdecimal():
        yield max(
            0, int(limit_text) - used_bytes + bytes_by_field.get(cache_field, 0) - bytes_by_field.get(shared_field, 0)
        )
