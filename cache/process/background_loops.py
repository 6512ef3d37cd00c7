"""Background loops that cannot end silently: an exception in a body is logged and counted, and the loop continues."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from cache.errors import mask_secrets, traceback_of

FAILING_AFTER_FAILURES: Final = 3
"""Number of consecutive failures from which on a loop counts as failing."""
STEADY_AFTER_S: Final = 10.0
"""Seconds that an endless body must run after a failure before its loop counts as healthy again."""
PAUSE_MAX_S: Final = 1.0
"""Longest pause after a failure: changes of a blocklist or a token file must not wait longer."""
_FIRST_PAUSE_S: Final = 0.05
_CANCEL_AGAIN_S: Final = 0.1

LoopBody = Callable[[], Awaitable[Any]]

log = logging.getLogger(__name__)


def pause_s(failures_in_a_row: int) -> float:
    """Return the pause in seconds after so many consecutive failures: doubled each time, at most PAUSE_MAX_S."""
    return min(PAUSE_MAX_S, _FIRST_PAUSE_S * 2.0 ** min(failures_in_a_row - 1, 10))


@dataclass(slots=True, eq=False)
class BackgroundLoop:
    """One loop: its body, the task that runs it, and its failures since the last success."""

    name: str
    body: LoopBody
    failures_in_a_row: int = 0
    last_error: str = ""
    """Last error of the body, for a log line."""
    iteration_count: int = 0
    """Number of iterations begun."""
    task: asyncio.Task[None] = field(init=False)

    @property
    def is_failing(self) -> bool:
        """True if the body failed FAILING_AFTER_FAILURES times in a row."""
        return self.failures_in_a_row >= FAILING_AFTER_FAILURES


class BackgroundLoops:
    """Background loops of one process; not thread-safe, for its event loop only."""

    def __init__(self) -> None:
        self.failure_count_by_loop: Counter[str] = Counter()
        """Number of failures by loop name, including loops that have ended."""
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever `error_by_failing_loop` may have changed."""
        self._running: set[BackgroundLoop] = set()

    @property
    def running(self) -> tuple[BackgroundLoop, ...]:
        """Loops that run now, ordered by name."""
        return tuple(sorted(self._running, key=lambda loop: loop.name))

    @property
    def error_by_failing_loop(self) -> dict[str, str]:
        """Last error of each failing loop, by name."""
        return {loop.name: loop.last_error for loop in self.running if loop.is_failing}

    def start(
        self, name: str, body: LoopBody, *, wait: LoopBody | None = None, is_due: Callable[[], bool] | None = None
    ) -> asyncio.Task[None]:
        """Start a loop on the running event loop: `wait`, then `body`, repeatedly; return its task.

        The loop ends only when its task is cancelled or when `is_due` returns False before an iteration. A body
        succeeds when it returns. Without `wait` and `is_due` a body may also run forever; then it counts as successful
        after STEADY_AFTER_S.
        """
        loop = BackgroundLoop(name, body)
        self.failure_count_by_loop[name] += 0
        is_endless = wait is None and is_due is None
        loop.task = asyncio.get_running_loop().create_task(
            self._run(loop, wait, is_due, is_endless=is_endless), name=f"larder loop {name}"
        )
        self._running.add(loop)
        loop.task.add_done_callback(lambda _task: self._discard_loop(loop))
        return loop.task

    async def _run(
        self, loop: BackgroundLoop, wait: LoopBody | None, is_due: Callable[[], bool] | None, *, is_endless: bool
    ) -> None:
        event_loop, steady_timer = asyncio.get_running_loop(), None
        while is_due is None or is_due():
            loop.iteration_count += 1
            if is_endless and loop.failures_in_a_row:
                steady_timer = event_loop.call_later(STEADY_AFTER_S, self._note_success, loop)
            try:
                if wait is not None:
                    await wait()
                await loop.body()
            except asyncio.CancelledError as error:
                # What the body awaits may raise this, such as a closed executor, although this loop was not cancelled.
                if loop.task.cancelling():
                    raise
                self._note_failure(loop, error)
            except Exception as error:
                self._note_failure(loop, error)
            else:
                self._note_success(loop)
                continue
            finally:
                if steady_timer is not None:
                    steady_timer.cancel()
            await asyncio.sleep(pause_s(loop.failures_in_a_row))

    def _note_failure(self, loop: BackgroundLoop, error: BaseException) -> None:
        self.failure_count_by_loop[loop.name] += 1
        loop.failures_in_a_row += 1
        loop.last_error = mask_secrets(str(error)) or type(error).__name__
        # Log only the 1st, 2nd, 4th, 8th failure and so on: a loop that fails every second must not fill the log.
        if not loop.failures_in_a_row & (loop.failures_in_a_row - 1):
            log.error(
                "background loop %s failed (%d in a row); it runs again in %.2f s: %s",
                loop.name, loop.failures_in_a_row, pause_s(loop.failures_in_a_row), loop.last_error,
                exc_info=traceback_of(error),
            )  # fmt: skip
        if loop.failures_in_a_row == FAILING_AFTER_FAILURES:
            self.on_change()

    def _note_success(self, loop: BackgroundLoop) -> None:
        was_failing, loop.failures_in_a_row = loop.is_failing, 0
        if was_failing:
            log.warning("background loop %s has recovered", loop.name)
            self.on_change()

    def _discard_loop(self, loop: BackgroundLoop) -> None:
        self._running.discard(loop)
        if loop.is_failing:
            self.on_change()


async def cancel_and_wait(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Cancel tasks and wait until all of them have ended."""
    pending = {task for task in tasks if task is not None}
    while pending:
        # Repeated, because a client library may lose a cancellation that coincides with its reply.
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
