"""Leases for cold answers: one process computes, the others wait for a bounded time, and not for a dead leader."""

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace, hash_hex
from cache.l2.commands import GIVEN_BACK_LEASE_VALUE, LEASE_DONE_PREFIX, LeaseMark, LeaseSwap, LeaseTake
from cache.l2.data_plane import DataPlane
from cache.tiers.reads import Hit, RecordKey, SnapshotView
from cache.tiers.tiered import TieredCache

LEASE_REST_S = 1.0
"""Seconds during which no leases are used after Redis was slow or refused one."""

_RENEWAL_CHECKS_PER_LIFE = 8
"""Number of checks of held leases per life of a lease."""

_FIRST_POLL_PAUSE_S = 0.002
_POLL_PAUSE_S_MAX = 0.025
_POLL_GROWTH_FACTOR = 1.5

T = TypeVar("T")


@dataclass(slots=True)
class LeaseCounts:
    """Counts of leases by outcome; each cold answer counts as `led`, `adopted`, `timed_out` or `unavailable`."""

    led: int = 0
    waited: int = 0
    adopted: int = 0
    taken_over: int = 0
    timed_out: int = 0
    unavailable: int = 0

    def internal_counters(self) -> dict[str, float]:
        """Return the counts by the names under which they are scraped."""
        return {f"leases_{name}": count for name, count in asdict(self).items()}


class LeaseManager:
    """Manager of leases, which live for half of `lease_wait_s` and are renewed while their leader computes.

    A process that has stored its answer marks the lease as done, even if another process holds it. A follower polls
    with jitter, takes the stored answer once the lease is done, and becomes the leader once the lease has expired.
    After `lease_wait_s`, or half of its caller's time, it computes without a lease.
    """

    def __init__(
        self,
        data_plane: DataPlane,
        tiers: TieredCache,
        keyspace: Keyspace,
        *,
        lease_wait_s: float,
        process_name: str = "",
        monotonic_clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.counts = LeaseCounts()
        self._data_plane = data_plane
        self._tiers = tiers
        self._keyspace = keyspace
        self._lease_wait_s = lease_wait_s
        self._lease_life_s = lease_wait_s / 2
        self._slow_reply_s = lease_wait_s / 8
        self._token_prefix = f"{process_name or secrets.token_hex(4)}/".encode()
        self._token_number = 0
        self._monotonic_clock = monotonic_clock
        self._sleep = sleep
        self._jitter = jitter
        self._resting_until = float("-inf")
        self._written_at_by_mark: dict[LeaseMark, float] = {}
        """Monotonic time of the last write of each lease in Redis."""
        self._renewal_timer: asyncio.TimerHandle | None = None

    def _count_if_resting(self) -> bool:
        """Return whether leases are suspended, after Redis was slow; if so, count an answer without a lease."""
        if self._monotonic_clock() >= self._resting_until:
            return False
        self.counts.unavailable += 1
        return True

    async def answer(
        self,
        view: SnapshotView,
        record_key: RecordKey,
        input_digest: bytes,
        time_limit_s: float,
        compute: Callable[[LeaseMark | None], Awaitable[T]],
    ) -> T | Hit:
        """Return the answer of `compute`, run in at most one process at a time, or another process's stored answer.

        `compute` stores its answer with the given mark; its errors are raised in the caller.
        """
        if self._count_if_resting():
            return await compute(None)
        lease_set_at = started_at = self._monotonic_clock()
        lease_mark = self._build_lease_mark(view, record_key, input_digest)
        lease_state = await self._try_acquire(lease_mark)
        if lease_state is not None:
            give_up_at = started_at + min(self._lease_wait_s, time_limit_s / 2)
            follow_result = await self._follow(lease_mark, lease_state, view, record_key, give_up_at)
            if isinstance(follow_result, Hit):
                return follow_result
            if not follow_result:
                return await compute(lease_mark)
            lease_set_at = self._monotonic_clock()
        return await self._lead(lease_mark, lease_set_at, compute)

    async def _lead(
        self, lease_mark: LeaseMark, lease_set_at: float, compute: Callable[[LeaseMark | None], Awaitable[T]]
    ) -> T:
        self._note_lease_begin(lease_mark, lease_set_at)
        try:
            computed = await compute(lease_mark)
        except BaseException:
            # No answer was stored: another process may try immediately.
            self.give_back(lease_mark)
            raise
        finally:
            del self._written_at_by_mark[lease_mark]
        return computed

    def _note_lease_begin(self, lease_mark: LeaseMark, lease_set_at: float) -> None:
        self.counts.led += 1
        self._written_at_by_mark[lease_mark] = lease_set_at
        if self._renewal_timer is None:
            self._renew_later()

    def give_back(self, lease_mark: LeaseMark) -> None:
        """End a lease under which no answer was stored, so that another process may lead immediately."""
        self._data_plane.lease(LeaseSwap(lease_mark.lease_key, lease_mark.holder_token, GIVEN_BACK_LEASE_VALUE, 1))

    async def _follow(
        self,
        lease_mark: LeaseMark,
        lease_state: bytes | TierUnavailable,
        view: SnapshotView,
        record_key: RecordKey,
        give_up_at: float,
    ) -> Hit | bool:
        """Return the stored answer, else whether this process leads now."""
        if not isinstance(lease_state, TierUnavailable):
            self.counts.waited += 1
        pause_s = _FIRST_POLL_PAUSE_S
        latest_state: bytes | TierUnavailable | None = lease_state
        while latest_state is not None:
            if isinstance(latest_state, TierUnavailable):
                self.counts.unavailable += 1
                return False
            if latest_state.startswith(LEASE_DONE_PREFIX):
                if (hit := await self._tiers.read_overlay_again(view, record_key)) is not None:
                    self.counts.adopted += 1
                    return hit
                # The answer was evicted, or replaced by that of another input: no process is computing it now.
                if await self._data_plane.lease(self._build_swap(lease_mark, latest_state)) == lease_mark.holder_token:
                    break
            remaining_s = give_up_at - self._monotonic_clock()
            if remaining_s <= 0:
                self.counts.timed_out += 1
                return False
            await self._sleep(min(remaining_s, pause_s * (0.75 + self._jitter() / 2)))
            pause_s = min(pause_s * _POLL_GROWTH_FACTOR, _POLL_PAUSE_S_MAX)
            latest_state = await self._try_acquire(lease_mark)
        self.counts.taken_over += 1
        return True

    def _build_swap(self, lease_mark: LeaseMark, expected_lease_value: bytes) -> LeaseSwap:
        return LeaseSwap(lease_mark.lease_key, expected_lease_value, lease_mark.holder_token, self._lease_life_ms)

    @property
    def _lease_life_ms(self) -> int:
        return max(1, round(1000 * self._lease_life_s))

    async def _try_acquire(self, lease_mark: LeaseMark) -> bytes | TierUnavailable | None:
        started_at = self._monotonic_clock()
        lease_state = await self._data_plane.lease(
            LeaseTake(lease_mark.lease_key, lease_mark.holder_token, self._lease_life_ms)
        )
        self._rest_if_slow(lease_state, self._monotonic_clock() - started_at)
        return lease_state

    def _rest_if_slow(self, lease_state: bytes | TierUnavailable | None, reply_took_s: float) -> None:
        if isinstance(lease_state, TierUnavailable) or reply_took_s > self._slow_reply_s:
            self._resting_until = self._monotonic_clock() + LEASE_REST_S

    def _build_lease_mark(self, view: SnapshotView, record_key: RecordKey, input_digest: bytes) -> LeaseMark:
        self._token_number += 1
        return LeaseMark(
            self._keyspace.lease(
                view.generation, record_key.table.name, hash_hex(record_key.hash_or_digest), input_digest
            ),
            self._token_prefix + b"%d" % self._token_number,
        )

    def _renew_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._renewal_timer = loop.call_later(self._lease_life_s / _RENEWAL_CHECKS_PER_LIFE, self._renew)

    def _renew(self) -> None:
        # One pipeline renews all leases of the process; leases that end before the next check need no timer.
        self._renewal_timer = None
        if self._written_at_by_mark:  # first, so that leases whose renewal fails are renewed at the next check
            self._renew_later()
        now_s = self._monotonic_clock()
        # No lease has used more than a third of its life by then; most have ended earlier.
        renewal_age_s = self._lease_life_s / 3 - self._lease_life_s / _RENEWAL_CHECKS_PER_LIFE
        due_marks = [
            lease_mark
            for lease_mark, lease_set_at in self._written_at_by_mark.items()
            if now_s - lease_set_at > renewal_age_s
        ]
        if due_marks:
            self._written_at_by_mark.update(dict.fromkeys(due_marks, now_s))
            self._data_plane.submit(
                [self._build_swap(lease_mark, lease_mark.holder_token) for lease_mark in due_marks], len
            )
