"""An event loop in a thread of its own, for callers that have none."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from serving.client.errors import DeadlineExceeded

_GRACE_S = 5.0
_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for any number of threads; started at once, ended by `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._is_closed = False
        # A daemon: a client that nobody closed keeps no program from ending.
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="larder-client", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T], within_s: float) -> _T:
        """Result of `work`, which ends by itself within `within_s`. Raises RuntimeError after `close` or a fork."""
        with self._closing:  # what is begun before `close` is ended by it
            if self._is_closed or self._pid != os.getpid():
                work.close()
                raise RuntimeError(
                    "this client is closed: make another one"
                    if self._is_closed
                    else "this client was made before the process forked: make one in each process"
                )
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(within_s + _GRACE_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer within {within_s:.3f} s, nor after it") from error
        except CancelledError:
            raise RuntimeError("this client was closed while it waited for an answer") from None
        finally:
            future.cancel()  # Ctrl-C in this thread ends the request in the other one

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Ends the coroutines that run, runs `last`, ends the thread; later calls do nothing."""
        with self._closing:
            if self._is_closed or self._pid != os.getpid():
                last.close()
                return
            self._is_closed = True
        ending = asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        try:
            ending.result(_GRACE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_GRACE_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in other_tasks:
            task.cancel()
        await asyncio.gather(*other_tasks, return_exceptions=True)
        await last
