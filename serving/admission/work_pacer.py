"""Pacer of work on the event loop: bounds the work that is begun or continued in one iteration.

Without it an iteration is as long as all that is ready at its start. Hundreds of batches that come at once, or clients
that close their connection and send the next one, make it seconds long, and ready answers and health wait for its end.
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

BUDGET_S: Final = 0.002
"""Seconds of paced work in one iteration: far below what a caller of a ready answer or a health probe notices, far
above the some 20 us that an iteration costs by itself."""

IS_GONE: Final = "larder.is_gone"
"""Key in the scope of a request: a callable that returns whether its client has closed the connection."""

_WAITED: Final = "larder.waited_s"
_SOCKETS_FIRST_S = 0.05
"""Seconds that new work waits at most while the loop still finds ready sockets."""
_BACKLOG_S = 0.05
"""Seconds of waiting from which on a client that has closed its side counts as gone."""
_GONE_S = 1.0
"""Seconds after a client left during which more clients are expected to have left."""
_QUIET_S = 50e-6
"""Seconds within which an iteration without ready sockets ends."""
_RELEASED_MAX = 64
"""Waiters woken in one iteration; those beyond its budget wait for the next."""

_PORTION_ENTITIES = 64
"""Entities of a request in one portion of work."""
_HEAVY = 16
"""Weight of an entity whose list is re-ordered, in entities."""
IsGone = Callable[[], bool]


class CallerGone(Exception):
    """The client of a request closed its connection before its work began."""


class _Waiter:
    __slots__ = ("future", "is_gone", "waiting_since")

    def __init__(self, future: "asyncio.Future[None]", queued_at: float, is_gone: IsGone) -> None:
        self.future, self.waiting_since, self.is_gone = future, queued_at, is_gone


class WorkPacer:
    """Pacer that admits portions of work, up to `budget_s` per iteration of one event loop, begun requests first.

    Once so much new work was begun, the loop handles its sockets until nothing is ready, for 50 ms at most: it accepts
    one connection in an iteration, so that a health probe would wait for as many portions as there are connections
    before its own. By then the loop also knows of clients that have gone.
    """

    def __init__(
        self, budget_s: float = BUDGET_S, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._budget_s, self._timer = budget_s, timer
        self._first: deque[_Waiter] = deque()
        self._next: deque[_Waiter] = deque()
        self._put_off: list[tuple[deque[_Waiter], _Waiter]] = []
        self._budget_ends_at: float | None = None  # None: nothing was begun in this iteration
        self._turned_at = self._begun_at = -inf
        self._work_s = 0.0  # begun since the loop last found nothing to do at its sockets
        self._is_armed = False
        self._gone_until = -inf

    def waited_s(self) -> float:
        """Return the seconds that the oldest request has waited for its work to begin; 0 without one."""
        waiting = [waiter.waiting_since for queue, waiter in self._put_off if queue is self._next]
        if self._next:
            waiting.append(self._next[0].waiting_since)
        return self._timer() - min(waiting) if waiting else 0.0

    @property
    def is_backlogged(self) -> bool:
        """True if requests have waited long for their work to begin, or clients have recently left while waiting.

        A peer that has closed its side may only be done with sending: without such a queue its answer costs nothing.
        """
        return self.waited_s() >= _BACKLOG_S or self._timer() < self._gone_until

    def note_dropped(self) -> None:
        """Record that a connection was dropped as it was accepted: more are expected if work still waits.

        Without a backlog this expectation ends by itself. If each dropped connection renewed it, peers that have only
        closed their own side would be dropped for as long as such peers come.
        """
        if self.waited_s() >= _BACKLOG_S:
            self._expect_more_gone()

    def _expect_more_gone(self) -> None:
        self._gone_until = self._timer() + _GONE_S

    async def begin(self, is_gone: IsGone, *, is_short: bool = False) -> float:
        """Wait until the work of a request may begin; return the seconds waited.

        A short request goes ahead of others. Raises CallerGone if it had to wait and its client has left.
        """
        now_s = self._timer()
        is_free = not (self._first or self._put_off)
        if not is_short:
            if now_s - self._turned_at >= self._budget_s:
                self._work_s = 0.0  # the loop slept, or could have
            is_free = is_free and not self._next and self._work_s < self._budget_s
        if is_free and self._is_within_budget(now_s):
            return 0.0
        try:
            await self._wait(self._first if is_short else self._next, now_s, is_gone)
        except CallerGone:
            if self._timer() - now_s >= _BACKLOG_S:
                self._expect_more_gone()
            raise
        return self._timer() - now_s

    async def go_on(self) -> None:
        """Yield to the event loop; return when begun work may continue with another portion."""
        await self._wait(self._first, self._timer(), _stays)

    async def resume(self) -> None:
        """Continue begun work that waited for an answer of Redis or of the model, if this iteration has room for it.

        What many requests waited for often arrives at once: without this, all of them would go on in one iteration.
        """
        now_s = self._timer()
        if self._first or self._put_off or not self._is_within_budget(now_s):
            await self._wait(self._first, now_s, _stays)

    def _is_within_budget(self, now_s: float) -> bool:
        if self._budget_ends_at is None:
            self._budget_ends_at = now_s + self._budget_s
            self._arm()
            return True
        return now_s < self._budget_ends_at

    async def _wait(self, queue: deque[_Waiter], queued_at: float, is_gone: IsGone) -> None:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop.create_future(), queued_at, is_gone)
        queue.append(waiter)
        self._arm()
        await waiter.future
        while not self._is_within_budget(self._timer()):
            waiter.future = loop.create_future()
            self._put_off.append((queue, waiter))
            await waiter.future

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            asyncio.get_running_loop().call_soon(self._end_iteration)

    def _end_iteration(self) -> None:
        """End an iteration's budget, and wake the waiters of the next one unless sockets come first."""
        now_s = self._timer()
        is_quiet, self._turned_at = now_s - self._turned_at < _QUIET_S, now_s
        if self._budget_ends_at is not None:
            self._work_s += now_s - (self._budget_ends_at - self._budget_s)
            self._budget_ends_at, is_quiet = None, False
        self._is_armed = False
        put_off, self._put_off = self._put_off, []
        for queue, waiter in reversed(put_off):
            queue.appendleft(waiter)
        if not (self._first or self._next):
            return
        self._arm()
        released = _wake_some(self._first, _RELEASED_MAX)
        if self._next and not is_quiet:
            waited_s = now_s - max(self._begun_at, self._next[0].waiting_since)
            if waited_s < _SOCKETS_FIRST_S:
                return
        if self._next:
            self._begun_at, self._work_s = now_s, 0.0
            _wake_some(self._next, _RELEASED_MAX - released)


def _wake_some(queue: deque[_Waiter], wake_max: int) -> int:
    """Wake the oldest waiters; return their number."""
    count = 0
    while queue and count < wake_max:
        count += _wake(queue.popleft())
    return count


def _wake(waiter: _Waiter) -> bool:
    """Wake a waiter, with CallerGone if its client has left; return False if it was cancelled."""
    if waiter.future.done():
        return False
    if waiter.is_gone():
        waiter.future.set_exception(CallerGone())
    else:
        waiter.future.set_result(None)
    return True


def _stays() -> bool:
    return False


PACER: ContextVar[WorkPacer | None] = ContextVar("larder_pacer", default=None)
"""Pacer of the current request; None without one, as in a night."""


async def go_on() -> None:
    """Yield to the event loop; return when the request's pacer admits another portion."""
    pacer = PACER.get()
    if pacer is None:
        await asyncio.sleep(0)
    else:
        await pacer.go_on()


async def resume() -> None:
    """Continue after a wait for Redis or the model once the request's pacer has room for more work."""
    if (pacer := PACER.get()) is not None:
        await pacer.resume()


class YieldPacer:
    """Pacer of the loop over a large request's entities, which yields to the event loop now and then."""

    def __init__(self, options: RequestOptions | None = None) -> None:
        is_heavy = options is not None and options.rerank is not None and options.rerank.is_heavy
        self._entity_weight = _HEAVY if is_heavy else 1
        self._worked_entities = 0
        self._is_resumed = False

    async def step(self, entity: RequestedEntity) -> None:
        """Count one more entity, and yield if a portion is full; a long input or re-ordered list counts as several.

        The first step waits only if other requests have used up the iteration.
        """
        if not self._is_resumed:
            self._is_resumed = True
            await resume()
        self._worked_entities += self._entity_weight
        if entity.history or entity.features:
            value_count = len(entity.history or ())
            if entity.features:
                features = entity.features.values()
                value_count += sum(
                    [len(value) if type(value) is tuple else 1 for value in features]
                )
            self._worked_entities += value_count // 16
        if self._worked_entities >= _PORTION_ENTITIES:
            self._worked_entities = 0
            await go_on()


def note_wait(scope: MutableMapping[str, Any], waited_s: float) -> None:
    """Store in a request's scope the seconds that it waited for its work to begin."""
    scope[_WAITED] = waited_s


def waited_in(scope: MutableMapping[str, Any]) -> float:
    """Return the seconds that a request waited for its work to begin, which count against its deadline."""
    waited_s: float = scope.get(_WAITED, 0.0)
    return waited_s
