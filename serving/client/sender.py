"""Sender of the client: keeps the deadline, retries where that is safe, and hedges slow requests with a second one."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

import httpx

from serving.client.calls import Call
from serving.client.errors import DeadlineExceeded, Garbled, QuotaExceeded, Unanswered, Unreachable, refusal

_SUCCESS_STATUSES = frozenset({200, 202})
_RETRY_STATUSES = frozenset({502, 503, 504})
_UNSENT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_POSITIVE_SETTINGS = (
    "deadline_ms",
    "connect_ms",
    "connections",
    "attempts",
    "max_batch",
    "max_ids",
    "max_numbers",
    "at_once",
)
_SAVED_RETRIES_MAX = 10.0
_SAVED_HEDGES_MAX = 10.0
_ABANDONED_WAIT_S = 1.0
_SPREAD_FACTOR_MAX = 1.25


@dataclass(frozen=True, slots=True)
class Policy:
    """Deadlines, retries and limits. Times are in milliseconds; shares are relative to the original requests."""

    deadline_ms: float = 1_000.0
    """Default deadline of a call, by which it has an answer or an error."""
    told_share: float = 0.9
    """Share of the remaining time that is sent to the service as its deadline; the rest is for the network."""
    connect_ms: float = 250.0
    connections: int = 32
    """Largest number of connections in the pool; idle ones are kept open."""
    attempts: int = 3
    retry_share: float = 0.2
    """Share of requests that may be retried, besides a few saved retries: an outage must not double the load."""
    backoff_ms: float = 10.0
    backoff_max_ms: float = 250.0
    hedge_after_ms: float | None = None
    """Milliseconds without an answer after which the request is sent a second time; the first answer is used. None:
    never."""
    hedge_share: float = 0.1
    max_batch: int = 1_000
    """Entities per request, as in the service's settings; longer batches become several requests."""
    max_ids: int = 50_000
    """Ids in the histories and `exclude` of one request, as in the service's settings."""
    max_numbers: int = 100_000
    """Feature values in one request, as in the service's settings."""
    at_once: int = 4
    """Largest number of requests that one long batch has in flight."""

    def __post_init__(self) -> None:
        """Check the settings; raise ValueError with the setting's name."""
        for name in _POSITIVE_SETTINGS:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number above 0, not {getattr(self, name)}")
        for name in ("told_share", "retry_share", "hedge_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if self.told_share == 0:
            raise ValueError("told_share must be above 0: the service needs some time")


@dataclass(frozen=True, slots=True)
class Pace:
    """Timer, sleep and random numbers of the client, which tests replace."""

    timer: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    rng: random.Random = field(default_factory=random.Random)


class ExtraRequestBudget:
    """Budget of extra requests: each original request adds `share`, up to a balance of `most`."""

    def __init__(self, earned_per_request: float, saved_requests_max: float, saved_requests: float = 0.0) -> None:
        self._earned_per_request = earned_per_request
        self._saved_requests_max = saved_requests_max
        self._saved_requests = saved_requests

    def earn(self) -> None:
        """Add the share of one original request."""
        self._saved_requests = min(self._saved_requests_max, self._saved_requests + self._earned_per_request)

    def try_spend(self) -> bool:
        """Take one extra request from the budget; return whether the balance allowed it."""
        if self._saved_requests + 1e-9 < 1:  # rounding: the sum of ten times 0.1 is slightly below 1
            return False
        self._saved_requests -= 1
        return True


class Sender:
    """Sender of calls over one bounded pool of connections. For one event loop.

    A request waits here for one of the connections: in the queue of httpx's pool each waiting request makes all others
    more expensive, so that 1,500 together got no answer within 30 s.
    """

    def __init__(self, http_client: httpx.AsyncClient, policy: Policy, pace: Pace) -> None:
        self._http = http_client
        self._policy = policy
        self._pace = pace
        self._connection_slots = asyncio.Semaphore(policy.connections)
        self._retry_budget = ExtraRequestBudget(policy.retry_share, _SAVED_RETRIES_MAX, _SAVED_RETRIES_MAX)
        self._hedge_budget = ExtraRequestBudget(policy.hedge_share, _SAVED_HEDGES_MAX)
        self._abandoned_tasks: set[asyncio.Task[httpx.Response]] = set()

    async def send(self, call: Call, deadline_at: float) -> bytes:
        """Send a call; return the body of a 200 or 202 by `deadline_at` (of the pace's timer). Raise Unanswered."""
        policy, timer = self._policy, self._pace.timer
        self._retry_budget.earn()
        self._hedge_budget.earn()
        last_error: Unanswered | None = None
        for attempt in range(1, policy.attempts + 1):
            retry_after_s, remaining_s = 0.0, deadline_at - timer()
            if remaining_s <= 0:
                break
            try:
                async with asyncio.timeout(remaining_s):
                    response = await self._exchange_or_hedge(call, deadline_at)
            except TimeoutError:
                break
            except Unreachable as error:
                last_error, may_retry = error, call.is_repeatable or not error.is_sent
            else:
                if response.status_code in _SUCCESS_STATUSES:
                    return response.content
                last_error = refusal(response.status_code, response.content)
                is_passing = response.status_code in _RETRY_STATUSES or isinstance(last_error, QuotaExceeded)
                may_retry = call.is_repeatable and is_passing
                retry_after_s = _retry_after_s(response)
            pause_s = max(self._spread_wait_s(retry_after_s), self._backoff_s(attempt))
            is_in_time = timer() + pause_s < deadline_at
            if not (may_retry and is_in_time and attempt < policy.attempts and self._retry_budget.try_spend()):
                raise last_error
            await self._pace.sleep(pause_s)
        raise DeadlineExceeded(
            f"{call.method} {call.path}: no answer by the deadline{self._busy_text()}"
        ) from last_error

    async def aclose(self) -> None:
        """Close the connections, those of abandoned requests included."""
        if self._abandoned_tasks:
            await asyncio.wait(self._abandoned_tasks, timeout=_ABANDONED_WAIT_S)
        await self._http.aclose()

    def _busy_text(self) -> str:
        if not self._connection_slots.locked():
            return ""
        return (
            f"; all {self._policy.connections} connections are in use: ask for many ids by lookup_many, or raise "
            "connections or deadline_ms"
        )

    def _spread_wait_s(self, wait_s: float) -> float:
        """Lengthen a wait at random, so that clients refused at the same time do not retry at the same time."""
        return wait_s * self._pace.rng.uniform(1, _SPREAD_FACTOR_MAX) if wait_s else 0.0

    def _backoff_s(self, attempt_number: int) -> float:
        longest_ms = min(self._policy.backoff_max_ms, self._policy.backoff_ms * 2 ** (attempt_number - 1))
        return self._pace.rng.uniform(0, longest_ms) / 1000

    async def _exchange_or_hedge(self, call: Call, deadline_at: float) -> httpx.Response:
        """Return the response to the call, or the faster response if a second request was sent."""
        hedge_after_ms = self._policy.hedge_after_ms
        if hedge_after_ms is None or not call.is_repeatable:
            return await self._exchange(call, deadline_at)
        tasks = [asyncio.create_task(self._exchange(call, deadline_at))]
        hedge_timer = asyncio.ensure_future(self._pace.sleep(hedge_after_ms / 1000))
        try:
            await asyncio.wait((tasks[0], hedge_timer), return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done() and self._hedge_budget.try_spend():
                tasks.append(asyncio.create_task(self._exchange(call, deadline_at)))
            return await _first_usable(tasks)
        finally:
            hedge_timer.cancel()
            for task in tasks:
                self._abandon(task)

    def _abandon(self, task: asyncio.Task[httpx.Response]) -> None:
        """Cancel a request without waiting for its end; its outcome is ignored."""
        task.cancel()
        self._abandoned_tasks.add(task)
        task.add_done_callback(self._discard_task)

    def _discard_task(self, task: asyncio.Task[httpx.Response]) -> None:
        self._abandoned_tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _exchange(self, call: Call, deadline_at: float) -> httpx.Response:
        async with self._connection_slots:
            return await self._request(call, deadline_at)

    async def _request(self, call: Call, deadline_at: float) -> httpx.Response:
        service_deadline_ms = (deadline_at - self._pace.timer()) * 1000 * self._policy.told_share
        # Whole milliseconds: the service's fast path only parses integers.
        headers = {"X-Deadline-Ms": str(max(1, int(service_deadline_ms))), "Accept": call.accept}
        if call.request_body is not None:
            headers["Content-Type"] = call.content_type
        try:
            return await self._http.request(
                call.method, call.path, params=call.query_parameters, content=call.request_body, headers=headers
            )
        except httpx.DecodingError as error:
            raise Garbled(f"{call.method} {call.path}: {error}") from error
        except httpx.RequestError as error:
            detail = f"{call.method} {call.path}: {type(error).__name__} {error}".rstrip()
            raise Unreachable(detail, is_sent=not isinstance(error, _UNSENT_ERRORS)) from error


async def _first_usable(request_tasks: list[asyncio.Task[httpx.Response]]) -> httpx.Response:
    """Return the first usable response; if all fail, the result or error of the first failure."""
    failed_tasks: list[asyncio.Task[httpx.Response]] = []
    pending_tasks = set(request_tasks)
    while pending_tasks:
        finished_tasks, pending_tasks = await asyncio.wait(pending_tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in finished_tasks:
            if task.exception() is None and task.result().status_code not in _RETRY_STATUSES:
                return task.result()
            failed_tasks.append(task)
    return failed_tasks[0].result()


def _retry_after_s(response: httpx.Response) -> float:
    """Return the seconds in `Retry-After`; 0 if the header is missing or malformed."""
    retry_after = response.headers.get("retry-after", "").strip()
    if retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 10:
        return float(retry_after)
    try:
        response_time = parsedate_to_datetime(response.headers.get("date", ""))
        return max(0.0, (parsedate_to_datetime(retry_after) - response_time).total_seconds())
    except (TypeError, ValueError):
        return 0.0
