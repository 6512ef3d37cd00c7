"""Lock on a folder, one command at a time: it ends with the process that holds it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(lock: Path, lock_error: Exception) -> Iterator[None]:
    """Hold the lock file; raises `lock_error` at once while another process does."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise lock_error from None
        yield
