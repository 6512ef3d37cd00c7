"""Checksums of files that one process opens again and again: read once while nobody touches them."""

import threading
import time
from pathlib import Path

from cachetools import LRUCache, cached

from cache.errors import BundleError
from cache.store.artefacts import sha256_of

SETTLED_NS = 2_000_000_000
"""Nanoseconds after a change from which on another one surely gets a new time stamp, whose grain is a clock tick."""

FILES_MAX = 256

Stamp = tuple[int, int, int, int, int]

_digest_by_stamp: LRUCache[Stamp, str] = LRUCache(FILES_MAX)


def sha256_unchanged(path: Path) -> str:
    """SHA-256 of a file, as `sha256_of` gives it; not read again where this process has read these very bytes.

    Device, inode, size, time of modification and of the last change of the inode tell. The latter is the kernel's:
    writing to a file or putting another in its place changes it, whatever times a program sets.
    """
    file_stat = path.stat()
    stamp = (
        file_stat.st_dev,
        file_stat.st_ino,
        file_stat.st_size,
        file_stat.st_mtime_ns,
        file_stat.st_ctime_ns,
    )
    is_settled = time.time_ns() - file_stat.st_ctime_ns > SETTLED_NS
    return _sha256_once(path, stamp) if is_settled else sha256_of(path)


def demand_sha256(path: Path, expected_sha256: str) -> None:
    """Raises BundleError for a file of a bundle that holds anything else than `bundle.json` says."""
    if (actual_sha256 := sha256_unchanged(path)) != expected_sha256:
        raise BundleError(
            f"{path.name} has SHA-256 {actual_sha256}, bundle.json says {expected_sha256}",
            path=path.name,
        )


@cached(_digest_by_stamp, key=lambda _path, stamp: stamp, lock=threading.Lock())
def _sha256_once(path: Path, _stamp: Stamp) -> str:
    return sha256_of(path)
