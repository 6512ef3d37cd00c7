"""Pacer of work on the event loop: bounds the work that is started or continued in one iteration.

Without a bound, an iteration does all the work that is ready at its start. Hundreds of batches that arrive together, or
clients that reconnect and send the next batch, would make it seconds long, and cached answers and health probes would
have to wait for its end.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from math import inf
from typing import Any, Final

from serving.requests.models import RequestedEntity
from serving.requests.options import RequestOptions

ITERATION_BUDGET_S: Final = 0.002
"""Seconds of paced work in one iteration: far less than the caller of a cached answer or a health probe notices, and
far more than the overhead of an iteration, about 20 us."""

IS_GONE_KEY: Final = "larder.is_gone"
"""Key in the scope of a request: a callable that returns whether its client has closed the connection."""

_WAITED_S_KEY: Final = "larder.waited_s"
_SOCKETS_FIRST_S_MAX = 0.05
"""Longest time in seconds that new work waits while the loop still finds ready sockets."""
_BACKLOG_WAIT_S = 0.05
"""Wait in seconds from which a client that has closed its sending side is taken to have left."""
_MORE_GONE_EXPECTED_S = 1.0
"""Seconds after a client has left in which others are expected to have left, too."""
_QUIET_ITERATION_S_MAX = 50e-6
"""Longest iteration in seconds that counts as one without ready sockets."""
_WOKEN_PER_ITERATION_MAX = 64
"""Waiters woken in one iteration; those that exceed its budget wait for the next one."""

_PORTION_ENTITIES = 64
"""Entities of a request in one portion of work."""
_HEAVY_ENTITY_WEIGHT = 16
"""Weight of an entity whose list is re-ordered, in entities."""
IsGone = Callable[[], bool]


class CallerGone(Exception):
    """The client of a request closed its connection before its work began."""


class _Waiter:
    __slots__ = ("begin_future", "is_client_gone", "queued_at_s")

    def __init__(self, begin_future: "asyncio.Future[None]", queued_at_s: float, is_client_gone: IsGone) -> None:
        self.begin_future, self.queued_at_s, self.is_client_gone = begin_future, queued_at_s, is_client_gone


class WorkPacer:
    """Pacer that admits portions of work, up to `iteration_budget_s` per iteration of a loop, started requests first.

    After `iteration_budget_s` of new work the loop first handles its sockets until nothing is ready, for 50 ms at most.
    It accepts one connection per iteration, so without this a health probe would wait for one portion per connection
    before its own. By then the loop has also noticed which clients have left.
    """

    def __init__(
        self, iteration_budget_s: float = ITERATION_BUDGET_S, monotonic_clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._iteration_budget_s, self._monotonic_clock = iteration_budget_s, monotonic_clock
        self._begun_waiters: deque[_Waiter] = deque()
        self._new_waiters: deque[_Waiter] = deque()
        self._put_off_waiters: list[tuple[deque[_Waiter], _Waiter]] = []
        self._budget_ends_at: float | None = None  # None: no work was started in this iteration
        self._iteration_ended_at = self._new_work_begun_at = -inf
        self._begun_work_s = 0.0  # new work since the loop last found no ready socket
        self._is_end_scheduled = False
        self._more_gone_until = -inf

    def longest_wait_s(self) -> float:
        """Return the seconds that the oldest request has waited for its work to begin; 0 without one."""
        waiting_since_times = [
            waiter.queued_at_s for queue, waiter in self._put_off_waiters if queue is self._new_waiters
        ]
        if self._new_waiters:
            waiting_since_times.append(self._new_waiters[0].queued_at_s)
        return self._monotonic_clock() - min(waiting_since_times) if waiting_since_times else 0.0

    @property
    def is_backlogged(self) -> bool:
        """True if requests have waited long for their work to begin, or clients have recently left while waiting.

        A peer that has closed its sending side may still read the answer, so without a backlog it is answered.
        """
        return self.longest_wait_s() >= _BACKLOG_WAIT_S or self._monotonic_clock() < self._more_gone_until

    def note_dropped_connection(self) -> None:
        """Record that a connection was dropped on acceptance: more are expected while requests wait.

        Without a backlog the expectation must expire. If each dropped connection renewed it, peers that have only
        closed their sending side would be dropped for as long as they keep coming.
        """
        if self.longest_wait_s() >= _BACKLOG_WAIT_S:
            self._expect_more_gone()

    def _expect_more_gone(self) -> None:
        self._more_gone_until = self._monotonic_clock() + _MORE_GONE_EXPECTED_S

    async def wait_to_begin(self, is_client_gone: IsGone, *, is_short_request: bool = False) -> float:
        """Wait until the work of a request may begin; return the seconds waited.

        A short request goes ahead of others. Raises CallerGone if it had to wait and its client has left.
        """
        now_s = self._monotonic_clock()
        can_begin_at_once = not (self._begun_waiters or self._put_off_waiters)
        if not is_short_request:
            if now_s - self._iteration_ended_at >= self._iteration_budget_s:
                self._begun_work_s = 0.0  # the loop was idle, or could have been
            can_begin_at_once = (
                can_begin_at_once and not self._new_waiters and self._begun_work_s < self._iteration_budget_s
            )
        if can_begin_at_once and self._is_within_budget(now_s):
            return 0.0
        try:
            await self._wait_in_queue(
                self._begun_waiters if is_short_request else self._new_waiters, now_s, is_client_gone
            )
        except CallerGone:
            if self._monotonic_clock() - now_s >= _BACKLOG_WAIT_S:
                self._expect_more_gone()
            raise
        return self._monotonic_clock() - now_s

    async def go_on(self) -> None:
        """Yield to the event loop; return when started work may continue with another portion."""
        await self._wait_in_queue(self._begun_waiters, self._monotonic_clock(), _is_client_never_gone)

    async def resume(self) -> None:
        """Wait until this iteration has room to continue started work that waited for Redis or the model.

        Replies for many requests often arrive together: without this all of them would continue in one iteration.
        """
        now_s = self._monotonic_clock()
        if self._begun_waiters or self._put_off_waiters or not self._is_within_budget(now_s):
            await self._wait_in_queue(self._begun_waiters, now_s, _is_client_never_gone)

    def _is_within_budget(self, now_s: float) -> bool:
        if self._budget_ends_at is None:
            self._budget_ends_at = now_s + self._iteration_budget_s
            self._schedule_iteration_end()
            return True
        return now_s < self._budget_ends_at

    async def _wait_in_queue(self, waiter_queue: deque[_Waiter], queued_at_s: float, is_client_gone: IsGone) -> None:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop.create_future(), queued_at_s, is_client_gone)
        waiter_queue.append(waiter)
        self._schedule_iteration_end()
        await waiter.begin_future
        while not self._is_within_budget(self._monotonic_clock()):
            waiter.begin_future = loop.create_future()
            self._put_off_waiters.append((waiter_queue, waiter))
            await waiter.begin_future

    def _schedule_iteration_end(self) -> None:
        if not self._is_end_scheduled:
            self._is_end_scheduled = True
            asyncio.get_running_loop().call_soon(self._end_iteration)

    def _end_iteration(self) -> None:
        """End an iteration's budget, and wake the waiters of the next one unless sockets come first."""
        now_s = self._monotonic_clock()
        is_quiet, self._iteration_ended_at = (now_s - self._iteration_ended_at < _QUIET_ITERATION_S_MAX, now_s)
        if self._budget_ends_at is not None:
            self._begun_work_s += now_s - (self._budget_ends_at - self._iteration_budget_s)
            self._budget_ends_at, is_quiet = None, False
        self._is_end_scheduled = False
        put_off_waiters, self._put_off_waiters = self._put_off_waiters, []
        for queue, waiter in reversed(put_off_waiters):
            queue.appendleft(waiter)
        if not (self._begun_waiters or self._new_waiters):
            return
        self._schedule_iteration_end()
        woken_count = _wake_oldest(self._begun_waiters, _WOKEN_PER_ITERATION_MAX)
        if self._new_waiters and not is_quiet:
            sockets_waited_s = now_s - max(self._new_work_begun_at, self._new_waiters[0].queued_at_s)
            if sockets_waited_s < _SOCKETS_FIRST_S_MAX:
                return
        if self._new_waiters:
            self._new_work_begun_at, self._begun_work_s = now_s, 0.0
            _wake_oldest(self._new_waiters, _WOKEN_PER_ITERATION_MAX - woken_count)


def _wake_oldest(waiter_queue: deque[_Waiter], woken_max: int) -> int:
    """Wake the oldest waiters; return their number."""
    woken_count = 0
    while waiter_queue and woken_count < woken_max:
        woken_count += _wake(waiter_queue.popleft())
    return woken_count


def _wake(waiter: _Waiter) -> bool:
    """Wake a waiter, with CallerGone if its client has left; return False if it was cancelled."""
    if waiter.begin_future.done():
        return False
    if waiter.is_client_gone():
        waiter.begin_future.set_exception(CallerGone())
    else:
        waiter.begin_future.set_result(None)
    return True


def _is_client_never_gone() -> bool:
    return False


CURRENT_PACER: ContextVar[WorkPacer | None] = ContextVar("larder_pacer", default=None)
"""Pacer of the current request; None outside of requests, as in a night."""


async def wait_for_next_portion() -> None:
    """Yield to the event loop; return when the request's pacer admits another portion."""
    pacer = CURRENT_PACER.get()
    if pacer is None:
        await asyncio.sleep(0)
    else:
        await pacer.go_on()


async def wait_for_room() -> None:
    """Return once the request's pacer has room for more work, after a wait for Redis or the model."""
    if (pacer := CURRENT_PACER.get()) is not None:
        await pacer.resume()


class YieldPacer:
    """Pacer of the loop over a large request's entities: yields to the event loop after each portion."""

    def __init__(self, options: RequestOptions | None = None) -> None:
        is_heavy = options is not None and options.rerank is not None and options.rerank.is_heavy
        self._entity_weight = _HEAVY_ENTITY_WEIGHT if is_heavy else 1
        self._portion_weight = 0
        self._is_resumed = False

    async def count_entity(self, entity: RequestedEntity) -> None:
        """Count one more entity, and yield if the portion is full; a long input or re-ordered list counts as several.

        The first call waits only if other requests have used up the iteration's budget.
        """
        if not self._is_resumed:
            self._is_resumed = True
            await wait_for_room()
        self._portion_weight += self._entity_weight
        if entity.history or entity.features:
            value_count = len(entity.history or ())
            if entity.features:
                feature_values = entity.features.values()
                value_count += sum(
                    [len(feature_value) if type(feature_value) is tuple else 1 for feature_value in feature_values]
                )
            self._portion_weight += value_count // 16
        if self._portion_weight >= _PORTION_ENTITIES:
            self._portion_weight = 0
            await wait_for_next_portion()


def store_wait(scope: MutableMapping[str, Any], waited_s: float) -> None:
    """Store in a request's scope the seconds that it waited for its work to begin."""
    scope[_WAITED_S_KEY] = waited_s


def noted_wait_s(scope: MutableMapping[str, Any]) -> float:
    """Return the seconds that a request waited for its work to begin, which count against its deadline."""
    waited_s: float = scope.get(_WAITED_S_KEY, 0.0)
    return waited_s
