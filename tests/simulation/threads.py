"""Threads that run one at a time and pause where the scheduler says: at waits, some between any two lines."""

import asyncio
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import Context, copy_context
from types import FrameType
from typing import Any

import greenlet

from tests.simulation.virtual_loop import HOST, Host, VirtualLoop

STARTS_S, TAKES_S = 0.0005, 0.004
"""Seconds that work mostly waits for a processor at most, and that it takes at most."""

TRACED = ("/cache/", "/serving/", "/precompute/", "/defects.py")
"""Folders between whose lines work may pause."""

TRACED_SHARE = 0.1
LONG_S = 0.5
"""Seconds, at most, that a thread is kept from going on now and then."""

LINES = 40
"""Lines between two pauses, on average."""


class Killed(BaseException):
    """The host of this thread was killed."""


class Work:
    """A call outside of the event loop, which runs only while the loop waits for it."""

    def __init__(self, threads: "Threads", call: Callable[[], None], host: Host | None) -> None:
        self.host = host
        self.is_over = False
        self._threads = threads
        self._call = call
        self._inner: greenlet.greenlet | None = None

    def resume(self) -> None:
        """Run until the work pauses or ends."""
        outer_loop, self._threads.current = asyncio._get_running_loop(), self
        asyncio._set_running_loop(None)
        try:
            self.switch_in()
        finally:
            asyncio._set_running_loop(outer_loop)
            self._threads.current = None

    def pause(self, seconds: float) -> None:
        """Let others run for a time; called within the work."""
        threads = self._threads
        threads.loop.call_later(seconds, threads.resume, self, context=threads.context)
        self.switch_out()
        if self._must_end:
            raise Killed

    def run(self) -> None:
        """Run the call."""
        try:
            if not self._must_end:
                self._call()
        except Killed:
            pass
        finally:
            self.is_over = True

    def switch_in(self) -> None:
        """Continue the work."""
        if self._inner is None:  # here, and not where the work was begun: that may be a thread of its own
            self._inner = greenlet.greenlet(self.run)
        self._inner.switch()

    def switch_out(self) -> None:
        """Go back to the loop."""
        assert self._inner is not None
        self._inner.parent.switch()

    @property
    def _must_end(self) -> bool:
        return self._threads.is_over or (self.host is not None and self.host.is_dead)


class TracedWork(Work):
    """Work in a real thread, which may pause between any two lines; a traced greenlet cannot be left."""

    def __init__(self, threads: "Threads", call: Callable[[], None], host: Host | None) -> None:
        super().__init__(threads, call, host)
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._lines = self._draw()
        self._thread = threading.Thread(target=self._in_thread, daemon=True)
        self._thread.start()

    def switch_in(self) -> None:
        """Let the thread run until it pauses or ends."""
        self._go.release()
        self._back.acquire()
        if self.is_over:
            self._thread.join()

    def switch_out(self) -> None:
        """Let the loop run."""
        self._back.release()
        self._go.acquire()

    def _in_thread(self) -> None:
        self._go.acquire()
        sys.settrace(self._trace)
        try:
            self.run()
        finally:
            sys.settrace(None)
            self._back.release()

    def _draw(self) -> int:
        return 1 + int(self._threads.rng.expovariate(1 / LINES))

    def _trace(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._line if any(folder in frame.f_code.co_filename for folder in TRACED) else None

    def _line(self, _frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self._lines -= 1
            if self._lines < 0:
                self._lines = self._draw()
                rng = self._threads.rng
                self.pause(rng.random() * (LONG_S if rng.random() < 0.1 else TAKES_S))
        return self._line


class Threads:
    """All threads of the simulation."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, traced_share: float = TRACED_SHARE) -> None:
        self.loop = loop
        self.rng = rng
        self.context = copy_context()
        self.current: Work | None = None
        self.is_over = False
        self.traced_share = traced_share
        self._all: list[Work] = []

    def begin(self, call: Callable[[], None], after_s: float) -> Work:
        """Run `call` in a thread, on the host of the current context."""
        kind = TracedWork if self.rng.random() < self.traced_share else Work
        work = kind(self, call, HOST.get())
        self._all.append(work)
        self.loop.call_later(after_s, self.resume, work, context=self.context)
        return work

    def resume(self, work: Work) -> None:
        """Continue the work; end it if its host is dead."""
        if not work.is_over:
            work.resume()
        if work.is_over and work in self._all:
            self._all.remove(work)

    def sleep(self, seconds: float) -> None:
        """Sleep like `time.sleep`, for work in a thread."""
        if self.current is None:
            raise AssertionError("the event loop sleeps")
        self.current.pause(max(0.0, seconds))

    def stop(self) -> None:
        """End every thread."""
        self.is_over = True
        for work in list(self._all):
            while not work.is_over:
                work.resume()
        self._all.clear()


class Lock:
    """A lock like `threading.Lock`; a thread that waits for it lets others run."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock. Raise AssertionError if the event loop would wait for it."""
        started_at = self._threads.loop.time()
        while self._is_held:
            if not blocking or 0 <= timeout <= self._threads.loop.time() - started_at:
                return False
            if self._threads.current is None:
                raise AssertionError("the event loop waits for a lock that a thread holds")
            self._threads.current.pause(TAKES_S)
        self._is_held = True
        return True

    def release(self) -> None:
        """Release the lock."""
        self._is_held = False

    def locked(self) -> bool:
        """Return whether the lock is held."""
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()


class Pool(Executor):
    """A thread pool: so many calls at once, the others in a queue."""

    def __init__(self, threads: Threads, workers: int) -> None:
        self._threads = threads
        self._workers = workers
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._busy = 0
        self._is_shut = False

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue the call."""
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        # Like a real pool, pass on nothing of the caller's context, except for its host.
        context = Context()
        context.run(HOST.set, HOST.get())
        self._queue.append((future, lambda: context.run(fn, *args, **kwargs)))
        self._next()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work."""
        self._is_shut = True
        if cancel_futures:
            queue, self._queue = self._queue, deque()
            for future, _ in queue:
                future.cancel()

    def _next(self) -> None:
        if self._queue and self._busy < self._workers:
            self._busy += 1
            future, call = self._queue.popleft()
            rng = self._threads.rng
            self._threads.begin(lambda: self._work(future, call), rng.random() * STARTS_S)

    def _work(self, future: Future[Any], call: Callable[[], Any]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                try:
                    call_result = call()
                except Exception as error:
                    self._take_time()
                    future.set_exception(error)
                else:
                    self._take_time()
                    future.set_result(call_result)
        finally:
            self._busy -= 1
            if not self._threads.is_over:
                self._next()

    def _take_time(self) -> None:
        self._threads.sleep(self._threads.rng.random() * TAKES_S)
