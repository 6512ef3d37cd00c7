"""Giving way to every other program on this host: a reader that shares a core with the loader never waits for it."""

import os
import threading


class IdlePriority:
    """Puts the calling thread into Linux's idle class (it runs when nothing else wants the core) and back.

    Only where there is a way back: without the right to leave that class again, the thread would stay in it for good.
    """

    def __init__(self) -> None:
        self._thread: int | None = None

    def __call__(self, on: bool) -> bool:
        """Switches giving way on or off for the calling thread; True if the thread that asked now gives way."""
        if not on:
            thread, self._thread = self._thread, None
            if thread is not None:
                _set(thread, idle=False)
            return False
        if self._thread is None and _can_return():
            thread = threading.get_native_id()
            self._thread = thread if _set(thread, idle=True) else None
        return self._thread is not None


def _set(thread: int, *, idle: bool) -> bool:
    if not hasattr(os, "SCHED_IDLE"):
        return False
    try:
        os.sched_setscheduler(thread, os.SCHED_IDLE if idle else os.SCHED_OTHER, os.sched_param(0))
    except OSError:  # not permitted, or the thread has ended
        return False
    return True


def _can_return() -> bool:
    """True if a thread can enter the idle class and leave it, tried on one that has nothing else to do."""
    trial_results: list[bool] = []

    def there_and_back() -> None:
        thread = threading.get_native_id()
        trial_results.append(_set(thread, idle=True) and _set(thread, idle=False))

    trial = threading.Thread(target=there_and_back, name="larder-give-way")
    trial.start()
    trial.join()
    return trial_results[0]
