"""Live inference, once per key and input; stores answers, and reads stored ones where that pays off."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from cache.errors import CorruptArtefact, UnfitValue
from cache.l2.commands import LeaseMark
from cache.tiers.reads import Hit, MissTraits, RecordKey
from cache.tiers.singleflight import FlightSeat, SingleFlight
from cache.tiers.tiered import TieredCache
from serving.admission.work_pacer import YieldPacer
from serving.engine.entity import PendingAnswer, new_items_of
from serving.engine.leases import LeaseManager
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, LiveUnavailable, MicroBatcher
from serving.generations.snapshot import Snapshot
from serving.metrics.collectors import ChangedAnswers
from serving.requests.reasons import LiveReason

log = logging.getLogger(__name__)

FlightKey = tuple[str, str, int | bytes, bytes, bool, bool]
"""Key of one inference: generation, table, entity, digest of the input, and whether a near answer will do."""

NO_TRAITS = MissTraits()

REPEAT_WINDOW = 1_024
"""Inputs after which the rate is judged; then all counts are halved."""

RARE_SHARE = 0.01
"""Share of repeated inputs below which overlays are left unread."""

FREQUENT_SHARE = 0.02
"""Share of repeated inputs in a window above which all overlays are read again, at once."""

PROBE_EVERY = 16
"""Number of inputs with unread overlays per probe, which reads one overlay without delaying its answer."""


class InferenceTarget(NamedTuple):
    """Target of an inference: record, input, and whether the answer replaces a nightly one.

    `key_without_new_items` is the record key of the same input without new items, by the id.
    """

    record_key: RecordKey
    digest: bytes
    stands_in: bool
    is_kept: bool = True
    key_without_new_items: RecordKey | None = None


class RepeatRate:
    """Repeat rate of inputs of ids that the night does not know: if none repeats, reading overlays is in vain.

    It counts inputs while all overlays are read, and probes while they are not. Answers are stored either way, so a
    probe finds the stored answer of any process, and 20 of them are enough to read everything again.
    """

    def __init__(self) -> None:
        self.spared = 0
        """Number of overlays left unread."""
        self.are_rare = False
        self._inputs = 0.0
        self._repeat_weight = 0.0

    def spare(self) -> bool:
        """Count an overlay that is left unread; return whether to probe for it."""
        self.spared += 1
        return self.spared % PROBE_EVERY == 0

    def saw(self, is_repeat: bool) -> None:
        """Count an input while all overlays are read; `is_repeat`: its answer was stored or under way."""
        if not self.are_rare:
            self._count(is_repeat)

    def probed(self, is_repeat: bool) -> None:
        """Count the result of a probe while overlays are left unread."""
        if self.are_rare:
            self._count(is_repeat)

    def _count(self, is_repeat: bool) -> None:
        self._inputs += 1
        self._repeat_weight += is_repeat
        if self.are_rare and self._repeat_weight >= FREQUENT_SHARE * REPEAT_WINDOW:
            self.are_rare = False
        elif self._inputs >= REPEAT_WINDOW:
            self.are_rare = self._repeat_weight < RARE_SHARE * self._inputs
        else:
            return
        self._inputs /= 2
        self._repeat_weight /= 2


@dataclass(slots=True, eq=False)
class LiveInferences:
    """Live rung; callers with the same input share a flight, callers with different inputs never do."""

    batcher: MicroBatcher
    tiers: TieredCache
    _: KW_ONLY
    overlay_ttl_s: float
    outage_ttl_s: float
    leases: LeaseManager | None = None
    admit: Callable[[], bool] = lambda: True
    spares_reads: bool = False
    changed_answers: ChangedAnswers | None = None
    reuses: frozenset[str] = frozenset()
    """Tables whose answers to near inputs may be reused."""
    repeats: RepeatRate = field(init=False, default_factory=RepeatRate)
    flights: SingleFlight[FlightKey, ComputedRecord] = field(
        init=False, default_factory=SingleFlight
    )
    _jobs: dict[FlightKey, InferenceJob] = field(init=False, default_factory=dict)

    def note_repeat(self) -> None:
        """Count an input that was answered from an overlay."""
        self.repeats.saw(True)

    async def run(
        self, snapshot: Snapshot, cases: Sequence[PendingAnswer], limit_s: float
    ) -> list[ComputedRecord | LiveUnavailable]:
        """Return outcomes within `limit_s` seconds, one per pending answer, in order."""
        if snapshot.predictor is None:
            return [LiveUnavailable(LiveReason.NO_MODEL)] * len(cases)
        give_up = time.monotonic() + limit_s
        boarded: list[FlightSeat[FlightKey, ComputedRecord] | None] = []
        pace = YieldPacer()
        try:
            for case in cases:
                if time.monotonic() >= give_up:
                    break
                boarded.append(self._board(snapshot, case, give_up))
                await pace.step(case.entity)
            waiters = {flight_seat.waiter for flight_seat in boarded if flight_seat is not None}
            if waiters:
                await asyncio.wait(waiters, timeout=max(0.0, give_up - time.monotonic()))
            outcomes = [
                _outcome(case, flight_seat)
                for case, flight_seat in zip(cases, boarded, strict=False)
            ]
            if self.changed_answers is not None:
                self._compare(self.changed_answers, snapshot, cases, outcomes)
        finally:
            for flight_seat in boarded:
                if flight_seat is not None:
                    self.flights.leave(flight_seat)
        return outcomes + [LiveUnavailable(LiveReason.TIMEOUT)] * (len(cases) - len(boarded))

    def _board(
        self, snapshot: Snapshot, case: PendingAnswer, deadline: float
    ) -> FlightSeat[FlightKey, ComputedRecord] | None:
        """Return a place in the one flight for this input, None if it is left out under overload.

        A future per entity, and no task unless others may compute it.
        """
        record_key, table = case.record_key, case.table.name
        traits = NO_TRAITS if case.reason is None else case.reason.traits
        may_reuse = table in self.reuses and case.may_reuse and traits.is_looked_up
        digest = case.digest + case.new_items.digest
        is_led = record_key.position < 0 and traits.is_shared
        lead, key = (
            self.leases,
            (snapshot.generation, table, record_key.key, digest, may_reuse, is_led),
        )
        if (job := self._jobs.get(key)) is not None:
            job.deadline = max(job.deadline, deadline)
        joins = key in self.flights
        if record_key.position < 0 and traits.is_looked_up:
            self.repeats.saw(joins)
        if not joins and not self.admit():  # who joins a flight costs nothing
            return None

        def work() -> asyncio.Future[ComputedRecord]:
            job = InferenceJob(
                snapshot, table, case.live_input, record_key.fingerprint, case.size_bytes, deadline,
                may_reuse=may_reuse,
                newer_input=None if case.is_settled else case.counted_events and case.counted_events.input,
                new=new_items_of(snapshot, case), seen_ordinals=case.find_seen_ordinals(snapshot),
            )  # fmt: skip
            self._jobs[key] = job
            # As it is now: a case that settles for less wants something else.
            is_kept = case.counted_events is None or not case.counted_events.is_past
            night_record_key = (
                case.nightly_key if case.new_items and case.entity.raw is not None else None
            )
            inference_target = InferenceTarget(
                record_key, case.digest, traits.allows_stand_in, is_kept, night_record_key
            )
            if lead is None or not is_led:
                computing = self._infer(job, inference_target)
            else:
                computing = asyncio.ensure_future(
                    self._infer_under_lease(lead, job, inference_target)
                )
            computing.add_done_callback(lambda _: self._forget(key, job))
            return computing

        return self.flights.board(key, work)

    def plan_overlay_reads(self, snapshot: Snapshot, cases: Sequence[PendingAnswer]) -> None:
        """Decide which overlays are left unread, and which of them are probed."""
        if snapshot.predictor is None or not (self.spares_reads and self.repeats.are_rare):
            return
        for case in cases:
            record_key = case.record_key
            if (
                record_key.position < 0
                and record_key.digest is not None
                and case.may_compute(snapshot)
            ):
                case.record_key = record_key._replace(skips_overlay=True)
                if self.repeats.spare():
                    self.tiers.probe(snapshot.view, record_key, self.repeats.probed)

    def _infer(
        self,
        job: InferenceJob,
        inference_target: InferenceTarget,
        lease_mark: LeaseMark | None = None,
    ) -> asyncio.Future[ComputedRecord]:
        # An id of the night gets a live answer kept (beside, here only) while its page is out of reach, or has none.
        unknown, outage = inference_target.record_key.position < 0, inference_target.stands_in

        def keep(finished_future: asyncio.Future[ComputedRecord]) -> None:
            if (
                not (inference_target.is_kept and (unknown or outage))
                or finished_future.cancelled()
                or finished_future.exception() is not None
            ):
                return
            computed = finished_future.result()
            if computed.near is None:
                ttl_s = self.overlay_ttl_s if unknown else self.outage_ttl_s
                view, night_record_key, record = (
                    job.snapshot.view,
                    inference_target.key_without_new_items,
                    computed.record,
                )
                if (
                    computed.record_without_new_items is not None and night_record_key is not None
                ):  # an id alone tells of no new items
                    if night_record_key.digest is not None and unknown:
                        self.tiers.put_live(
                            view,
                            night_record_key,
                            computed.record_without_new_items,
                            night_record_key.digest,
                            ttl_s,
                        )
                    record = record if unknown else computed.record_without_new_items
                self.tiers.put_live(
                    view,
                    inference_target.record_key,
                    record,
                    inference_target.digest,
                    ttl_s,
                    lease_mark,
                )
            elif lease_mark is not None and self.leases is not None:
                # Kept nowhere, for it was not computed from this input: others compute, or reuse, at once.
                self.leases.give_back(lease_mark)

        computing = asyncio.ensure_future(self.batcher.infer(job))
        computing.add_done_callback(keep)
        return computing

    async def _infer_under_lease(
        self, lead: LeaseManager, job: InferenceJob, inference_target: InferenceTarget
    ) -> ComputedRecord:
        async def compute(lease_mark: LeaseMark | None) -> ComputedRecord:
            return await self._infer(job, inference_target, lease_mark)

        limit_s = max(0.0, job.deadline - time.monotonic())
        answer = await lead.answer(
            job.snapshot.view,
            inference_target.record_key,
            inference_target.digest,
            limit_s,
            compute,
        )
        if not isinstance(answer, Hit):
            return answer
        self.note_repeat()
        return ComputedRecord(answer.record)

    def _compare(
        self,
        changed_answers: ChangedAnswers,
        snapshot: Snapshot,
        cases: Sequence[PendingAnswer],
        outcomes: Sequence[ComputedRecord | LiveUnavailable],
    ) -> None:
        """Compare lists computed from newer events with the nightly ones that L1 holds: a sample without a read."""
        for case, outcome in zip(cases, outcomes, strict=False):
            if (
                case.counted_events is None
                or case.table.kind != "topk"
                or not isinstance(outcome, ComputedRecord)
            ):
                continue
            if (hit := self.tiers.inspect(snapshot.view, case.nightly_key)) is not None:
                record, stored_record = outcome.record, hit.record
                with contextlib.suppress(CorruptArtefact):
                    items = case.decoded(snapshot, record).items
                    night_items = case.decoded(snapshot, stored_record).items
                    if items is not None and night_items is not None:
                        changed_answers.compare(case.table.name, items, night_items)

    def _forget(self, key: FlightKey, job: InferenceJob) -> None:
        if self._jobs.get(key) is job:
            del self._jobs[key]


def _outcome(
    case: PendingAnswer, flight_seat: FlightSeat[FlightKey, ComputedRecord] | None
) -> ComputedRecord | LiveUnavailable:
    if flight_seat is None:
        return LiveUnavailable(LiveReason.OVERLOADED)
    if not flight_seat.waiter.done():
        return LiveUnavailable(LiveReason.TIMEOUT)
    # Looked at, not raised: an error whose traceback holds this frame, and so the flight that holds the error, would
    # keep its generation until a collection that never comes for what was frozen.
    error = flight_seat.waiter.exception()
    if error is None:
        return flight_seat.value()
    if isinstance(error, LiveUnavailable):
        return error
    # The model is a guest: whatever it raises, the next rung answers.
    if isinstance(
        error, UnfitValue
    ):  # of the model or its input: where it was found says nothing more
        log.warning("live inference for %s failed: %s", case.table.name, error.message)
    else:
        log.warning("live inference for %s failed", case.table.name, exc_info=error)
    return LiveUnavailable(LiveReason.FAILED)
