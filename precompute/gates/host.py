"""Gates on this host: whether previous, live and the next generation fit its disk and its memory."""

import os
import shutil
from pathlib import Path
from typing import Final

from precompute.bulk.load import total_bytes
from precompute.gates.candidate import Candidate
from precompute.gates.verdict import Verdict, at_least

GENERATIONS: Final = 3
"""Previous, live and the one being loaded coexist on a reader's host."""


def disk_headroom(candidate: Candidate) -> Verdict:
    """Room for one more generation like this one: the next night's, while this one and the last are still here."""
    size_bytes = _mapped_bytes(candidate) + total_bytes(candidate.manifest)
    return disk_verdict(
        disk_free_bytes(candidate.root), size_bytes, candidate.thresholds.disk_headroom
    )


def disk_verdict(
    free_bytes: int, size_bytes: int, threshold: float, *, generations: int = 1
) -> Verdict:
    """Whether a file system has room for so many generations of this size."""
    what = "a generation" if generations == 1 else f"{generations} generations"
    return at_least(
        "disk_headroom",
        free_bytes / max(1, generations * size_bytes),
        threshold,
        f"{free_bytes:,} bytes free for {what} of {size_bytes:,}",
    )


def memory_headroom(candidate: Candidate) -> Verdict:
    """What readers map of three generations fits the memory that is available."""
    return memory_verdict(
        memory_available_bytes(), _mapped_bytes(candidate), candidate.thresholds.memory_headroom
    )


def memory_verdict(available_bytes: int, mapped_bytes: int, threshold: float) -> Verdict:
    """Whether a host's memory holds what readers map of three generations of this size."""
    size_bytes = GENERATIONS * mapped_bytes
    return at_least(
        "memory_headroom",
        available_bytes / max(1, size_bytes),
        threshold,
        f"{available_bytes:,} bytes available, previous, live and this one map {size_bytes:,}",
    )


def disk_free_bytes(folder: Path) -> int:
    """Free bytes of the file system that holds a folder."""
    return shutil.disk_usage(folder).free


def memory_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that programs can still have; where the system does not say, all that the machine has."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _mapped_bytes(candidate: Candidate) -> int:
    return sum(artefact.size_bytes for artefact in candidate.manifest.artefacts())
