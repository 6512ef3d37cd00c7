"""Checksums of files that one process opens again and again: read once while nobody touches them."""

import time
from pathlib import Path

from cache.store.artefacts import sha256_of

SETTLED_NS = 2_000_000_000
"""Nanoseconds after a change from which on another one surely gets a new time stamp, whose grain is a clock tick."""

FILES_MAX = 256

Stamp = tuple[int, int, int, int, int]

_known: dict[Stamp, str] = {}


def sha256_unchanged(path: Path) -> str:
    """SHA-256 of a file, as `sha256_of` gives it; not read again where this process has read these very bytes.

    Device, inode, size, time of modification and of the last change of the inode tell. The latter is the kernel's:
    writing to a file or putting another in its place changes it, whatever times a program sets.
    """
    stamp = _stamp(path)
    if (known := _known.get(stamp)) is not None:
        return known
    found = sha256_of(path)
    if time.time_ns() - stamp[-1] > SETTLED_NS and _stamp(path) == stamp:
        while len(_known) >= FILES_MAX:
            _known.pop(next(iter(_known)), None)
        _known[stamp] = found
    return found


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
