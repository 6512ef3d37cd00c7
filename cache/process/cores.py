"""Number of cores this process may use, as its system, its affinity and its control groups limit it."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """Number of usable cores, at least 1. In a container with 4 of 96 cores, 96 threads would only take turns."""
    has_affinity = hasattr(os, "sched_getaffinity")
    allowed = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(share) for share in _quotas(cgroups, own))]))


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """The limits of the process's control group and of those around it, in cores: version 2, then version 1."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = cgroups / "cpu" if controllers else cgroups
        folder = top / path.strip("/")
        # Inside a container the path may be the host's: then only the top is there.
        for each in (folder, *folder.parents):
            if each.is_relative_to(top) and (found := _quota(each)) is not None:
                yield found


def _quota(folder: Path) -> float | None:
    try:
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # "max": no limit
        return None
