"""One inference per key and input, whoever asks for it; what may be kept of it is kept."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from cache.lease import Mark
from cache.outcomes import OUTAGES, MissReason
from cache.singleflight import SingleFlight
from cache.tiered import Found, View, Want
from serving.case import Case, Pace
from serving.lead import Lead
from serving.live import Computed, Job, LiveUnavailable
from serving.snapshot import Snapshot

SHARED = frozenset(
    {
        MissReason.NOT_IN_GENERATION,
        MissReason.NEGATIVE,
        MissReason.EXPIRED,
        MissReason.INPUT_CHANGED,
    }
)
"""Misses that another process may have at this moment, too, and whose answer is stored for both.

Not `fresh` and `too_old`: what another process has stored may be older than what was asked for.
"""

log = logging.getLogger(__name__)


class Keeper(Protocol):
    """Where live answers go."""

    def put_live(
        self,
        view: View,
        want: Want,
        record: bytes,
        digest: bytes,
        ttl_s: float,
        mark: Mark | None = None,
    ) -> None:
        """Keep a live answer where that is allowed; `mark` is the lease that ends with it."""


class Batcher(Protocol):
    """What computes."""

    async def infer(self, job: Job) -> Computed:
        """Raises LiveUnavailable."""


class Inferences:
    """The live rung; callers with the same input share a flight, callers with different inputs never do."""

    def __init__(
        self,
        batcher: Batcher,
        keeper: Keeper,
        *,
        overlay_ttl_s: float,
        outage_ttl_s: float,
        lead: Lead | None = None,
    ) -> None:
        self.flights: SingleFlight[tuple[str, str, int | bytes, bytes], Computed] = SingleFlight()
        self._batcher = batcher
        self._keeper = keeper
        self._overlay_ttl_s = overlay_ttl_s
        self._outage_ttl_s = outage_ttl_s
        self._lead = lead

    async def run(
        self, snapshot: Snapshot, cases: Sequence[Case], limit_s: float
    ) -> list[Computed | LiveUnavailable]:
        """One outcome per case within `limit_s`, in order."""
        if snapshot.predictor is None:
            return [LiveUnavailable("no_model")] * len(cases)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + limit_s
        inferring: list[asyncio.Task[Computed | LiveUnavailable]] = []
        pace = Pace()
        try:
            for case in cases:
                if loop.time() >= give_up:
                    break
                inferring.append(loop.create_task(self._one(snapshot, case, limit_s)))
                await pace.step(case.entity)
            late: set[asyncio.Task[Computed | LiveUnavailable]] = set()
            if inferring:
                _, late = await asyncio.wait(inferring, timeout=max(0.0, give_up - loop.time()))
        finally:
            for each in inferring:
                each.cancel()  # late ones; those that are done do not notice
        outcomes = [
            LiveUnavailable("timeout") if each in late else each.result() for each in inferring
        ]
        return outcomes + [LiveUnavailable("timeout")] * (len(cases) - len(inferring))

    async def _one(
        self, snapshot: Snapshot, case: Case, limit_s: float
    ) -> Computed | LiveUnavailable:
        want, digest = case.want, case.digest
        unknown, outage = want.position < 0, case.reason in OUTAGES

        async def infer(mark: Mark | None = None) -> Computed:
            computed = await self._batcher.infer(
                Job(snapshot, case.table.name, case.source, want.fingerprint, case.size_bytes)
            )
            # An id of the night gets a live answer kept (beside, here only) while its page is out of reach.
            if unknown or outage:
                ttl_s = self._overlay_ttl_s if unknown else self._outage_ttl_s
                self._keeper.put_live(snapshot.view, want, computed.record, digest, ttl_s, mark)
            return computed

        async def work() -> Computed:
            if self._lead is None or not unknown or case.reason not in SHARED:
                return await infer()
            answer = await self._lead.answer(snapshot.view, want, digest, limit_s, infer)
            return Computed(answer.record) if isinstance(answer, Found) else answer

        try:
            key = (snapshot.generation, case.table.name, want.key, digest)
            return await self.flights.do(key, work)
        except LiveUnavailable as unavailable:
            return unavailable
        except Exception:  # the model is a guest: whatever it raises, the next rung answers
            log.warning("live inference for %s failed", case.table.name, exc_info=True)
            return LiveUnavailable("failed")
