"""One command at a time in a folder, by a lock that ends with its process."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(lock: Path, taken: Exception) -> Iterator[None]:
    """Hold the lock file; raises `taken` at once while another process does."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise taken from None
        yield
