"""Live inference, once per key and input; stores answers, and reads stored ones if inputs repeat often enough."""

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
"""Key of an inference: generation, table, entity, input digest, whether a near answer may be reused, whether leased."""

NO_MISS_TRAITS = MissTraits()

REPEAT_WINDOW_INPUTS = 1_024
"""Inputs after which the repeat rate is judged and all counts are halved."""

RARE_REPEAT_SHARE = 0.01
"""Share of repeated inputs below which overlays are left unread."""

FREQUENT_REPEAT_SHARE = 0.02
"""Share of repeated inputs in a window from which all overlays are read again, immediately."""

INPUTS_PER_PROBE = 16
"""Number of inputs with unread overlays per probe; a probe reads one overlay without delaying the answer."""


class InferenceTarget(NamedTuple):
    """Target of an inference: record key, input digest, and whether the answer replaces a nightly one.

    `key_without_new_items` is the record key of the same id and input without new items.
    """

    record_key: RecordKey
    input_digest: bytes
    replaces_nightly_answer: bool
    stores_answer: bool = True
    key_without_new_items: RecordKey | None = None


class RepeatRate:
    """Repeat rate of inputs of ids that the night does not know: if inputs hardly repeat, overlays need not be read.

    It counts inputs while all overlays are read, and probes while they are not. Answers are stored in both cases, so a
    probe finds the stored answer of any process; about 20 successful probes make all overlays be read again.
    """

    def __init__(self) -> None:
        self.unread_count = 0
        """Number of overlays left unread."""
        self.are_repeats_rare = False
        self._input_weight = 0.0
        self._repeat_weight = 0.0

    def count_unread(self) -> bool:
        """Count an overlay that is left unread; return whether to probe for it."""
        self.unread_count += 1
        return self.unread_count % INPUTS_PER_PROBE == 0

    def note_input(self, is_repeat: bool) -> None:
        """Count an input while all overlays are read; `is_repeat`: its answer was stored or under way."""
        if not self.are_repeats_rare:
            self._count_weighted(is_repeat)

    def note_probe(self, is_repeat: bool) -> None:
        """Count the result of a probe while overlays are left unread."""
        if self.are_repeats_rare:
            self._count_weighted(is_repeat)

    def _count_weighted(self, is_repeat: bool) -> None:
        self._input_weight += 1
        self._repeat_weight += is_repeat
        if self.are_repeats_rare and self._repeat_weight >= FREQUENT_REPEAT_SHARE * REPEAT_WINDOW_INPUTS:
            self.are_repeats_rare = False
        elif self._input_weight >= REPEAT_WINDOW_INPUTS:
            self.are_repeats_rare = self._repeat_weight < RARE_REPEAT_SHARE * self._input_weight
        else:
            return
        self._input_weight /= 2
        self._repeat_weight /= 2


@dataclass(slots=True, eq=False)
class LiveInferences:
    """Live rung; requests with the same input share a flight, requests with different inputs never do."""

    batcher: MicroBatcher
    tiers: TieredCache
    _: KW_ONLY
    overlay_ttl_s: float
    outage_ttl_s: float
    leases: LeaseManager | None = None
    admit_input: Callable[[], bool] = lambda: True
    may_skip_overlay_reads: bool = False
    changed_answers: ChangedAnswers | None = None
    near_reuse_tables: frozenset[str] = frozenset()
    """Tables whose answers to near inputs may be reused."""
    repeat_rate: RepeatRate = field(init=False, default_factory=RepeatRate)
    flights: SingleFlight[FlightKey, ComputedRecord] = field(init=False, default_factory=SingleFlight)
    _job_by_flight_key: dict[FlightKey, InferenceJob] = field(init=False, default_factory=dict)

    def note_repeat(self) -> None:
        """Count an input that was answered from an overlay."""
        self.repeat_rate.note_input(True)

    async def run(
        self, snapshot: Snapshot, pendings: Sequence[PendingAnswer], time_limit_s: float
    ) -> list[ComputedRecord | LiveUnavailable]:
        """Return outcomes within `time_limit_s` seconds, one per pending answer, in order."""
        if snapshot.predictor is None:
            return [LiveUnavailable(LiveReason.NO_MODEL)] * len(pendings)
        give_up_at = time.monotonic() + time_limit_s
        flight_seats: list[FlightSeat[FlightKey, ComputedRecord] | None] = []
        yield_pacer = YieldPacer()
        try:
            for pending in pendings:
                if time.monotonic() >= give_up_at:
                    break
                flight_seats.append(self._board_flight(snapshot, pending, give_up_at))
                await yield_pacer.count_entity(pending.entity)
            waiters = {flight_seat.waiter for flight_seat in flight_seats if flight_seat is not None}
            if waiters:
                await asyncio.wait(waiters, timeout=max(0.0, give_up_at - time.monotonic()))
            outcomes = [
                _flight_outcome(pending, flight_seat)
                for pending, flight_seat in zip(pendings, flight_seats, strict=False)
            ]
            if self.changed_answers is not None:
                self._compare_with_nightly(self.changed_answers, snapshot, pendings, outcomes)
        finally:
            for flight_seat in flight_seats:
                if flight_seat is not None:
                    self.flights.leave(flight_seat)
        return outcomes + [LiveUnavailable(LiveReason.TIMEOUT)] * (len(pendings) - len(flight_seats))

    def _board_flight(
        self, snapshot: Snapshot, pending: PendingAnswer, give_up_at: float
    ) -> FlightSeat[FlightKey, ComputedRecord] | None:
        """Return a seat in the flight of this input, None if the inference is shed under overload.

        It costs one future per entity, and a task only if a lease is needed.
        """
        record_key, table = pending.record_key, pending.table.name
        traits = NO_MISS_TRAITS if pending.reason is None else pending.reason.traits
        may_reuse_near_answer = (
            table in self.near_reuse_tables and pending.may_reuse_near_answer and traits.is_looked_up
        )
        inputs_digest = pending.input_digest + pending.new_items.digest
        is_under_lease = record_key.directory_position < 0 and traits.is_shared
        lease_manager, flight_key = (
            self.leases,
            (
                snapshot.generation,
                table,
                record_key.hash_or_digest,
                inputs_digest,
                may_reuse_near_answer,
                is_under_lease,
            ),
        )
        if (job := self._job_by_flight_key.get(flight_key)) is not None:
            job.deadline_at = max(job.deadline_at, give_up_at)
        is_joining = flight_key in self.flights
        if record_key.directory_position < 0 and traits.is_looked_up:
            self.repeat_rate.note_input(is_joining)
        if not is_joining and not self.admit_input():  # joining a flight costs nothing
            return None

        def start_inference() -> asyncio.Future[ComputedRecord]:
            job = InferenceJob(
                snapshot, table, pending.live_input, record_key.fingerprint, pending.input_size_bytes, give_up_at,
                may_reuse_near_answer=may_reuse_near_answer,
                newer_input=None if pending.is_settled_for_stored
                else pending.counted_events and pending.counted_events.event_input,
                eligible_new_items=new_items_of(snapshot, pending),
                seen_item_ordinals=pending.find_seen_ordinals(snapshot),
            )  # fmt: skip
            self._job_by_flight_key[flight_key] = job
            # Evaluated now: the pending answer may settle for the nightly record later.
            stores_answer = pending.counted_events is None or not pending.counted_events.is_as_of_earlier
            night_record_key = pending.nightly_key if pending.new_items and pending.entity.raw_id is not None else None
            inference_target = InferenceTarget(
                record_key, pending.input_digest, traits.allows_stand_in, stores_answer, night_record_key
            )
            if lease_manager is None or not is_under_lease:
                computed_future = self._infer(job, inference_target)
            else:
                computed_future = asyncio.ensure_future(self._infer_under_lease(lease_manager, job, inference_target))
            computed_future.add_done_callback(lambda _: self._forget_job(flight_key, job))
            return computed_future

        return self.flights.board(flight_key, start_inference)

    def plan_overlay_reads(self, snapshot: Snapshot, pendings: Sequence[PendingAnswer]) -> None:
        """Decide which overlays are left unread, and which of them are probed."""
        if snapshot.predictor is None or not (self.may_skip_overlay_reads and self.repeat_rate.are_repeats_rare):
            return
        for pending in pendings:
            record_key = pending.record_key
            if (
                record_key.directory_position < 0
                and record_key.input_digest is not None
                and pending.may_compute_live(snapshot)
            ):
                pending.record_key = record_key._replace(skips_overlay=True)
                if self.repeat_rate.count_unread():
                    self.tiers.probe(snapshot.view, record_key, self.repeat_rate.note_probe)

    def _infer(
        self, job: InferenceJob, inference_target: InferenceTarget, lease_mark: LeaseMark | None = None
    ) -> asyncio.Future[ComputedRecord]:
        # A live answer for an id that the night knows is kept, in L1 only, while its page is unavailable.
        is_unknown, is_in_outage = (
            inference_target.record_key.directory_position < 0,
            inference_target.replaces_nightly_answer,
        )

        def store_when_computed(finished_future: asyncio.Future[ComputedRecord]) -> None:
            if (
                not (inference_target.stores_answer and (is_unknown or is_in_outage))
                or finished_future.cancelled()
                or finished_future.exception() is not None
            ):
                return
            computed = finished_future.result()
            if computed.near_distance is None:
                ttl_s = self.overlay_ttl_s if is_unknown else self.outage_ttl_s
                view, night_record_key, record = (
                    job.snapshot.view,
                    inference_target.key_without_new_items,
                    computed.record,
                )
                if (
                    computed.record_without_new_items is not None and night_record_key is not None
                ):  # the key of the same id without new items
                    if night_record_key.input_digest is not None and is_unknown:
                        self.tiers.put_live(
                            view,
                            night_record_key,
                            computed.record_without_new_items,
                            night_record_key.input_digest,
                            ttl_s,
                        )
                    record = record if is_unknown else computed.record_without_new_items
                self.tiers.put_live(
                    view, inference_target.record_key, record, inference_target.input_digest, ttl_s, lease_mark
                )
            elif lease_mark is not None and self.leases is not None:
                # Not stored, since it was not computed from this input; end the lease so that other processes need not
                # wait.
                self.leases.give_back(lease_mark)

        computed_future = asyncio.ensure_future(self.batcher.infer(job))
        computed_future.add_done_callback(store_when_computed)
        return computed_future

    async def _infer_under_lease(
        self, lease_manager: LeaseManager, job: InferenceJob, inference_target: InferenceTarget
    ) -> ComputedRecord:
        async def compute(lease_mark: LeaseMark | None) -> ComputedRecord:
            return await self._infer(job, inference_target, lease_mark)

        time_limit_s = max(0.0, job.deadline_at - time.monotonic())
        record_or_hit = await lease_manager.answer(
            job.snapshot.view, inference_target.record_key, inference_target.input_digest, time_limit_s, compute
        )
        if not isinstance(record_or_hit, Hit):
            return record_or_hit
        self.note_repeat()
        return ComputedRecord(record_or_hit.record)

    def _compare_with_nightly(
        self,
        changed_answers: ChangedAnswers,
        snapshot: Snapshot,
        pendings: Sequence[PendingAnswer],
        outcomes: Sequence[ComputedRecord | LiveUnavailable],
    ) -> None:
        """Compare lists computed from newer events with the nightly lists that L1 has: a sample without extra reads."""
        for pending, outcome in zip(pendings, outcomes, strict=False):
            if (
                pending.counted_events is None
                or pending.table.kind != "topk"
                or not isinstance(outcome, ComputedRecord)
            ):
                continue
            if (hit := self.tiers.inspect(snapshot.view, pending.nightly_key)) is not None:
                record, stored_record = outcome.record, hit.record
                with contextlib.suppress(CorruptArtefact):
                    computed_items = pending.decode_record(snapshot, record).item_ordinals
                    night_items = pending.decode_record(snapshot, stored_record).item_ordinals
                    if computed_items is not None and night_items is not None:
                        changed_answers.compare(pending.table.name, computed_items, night_items)

    def _forget_job(self, flight_key: FlightKey, job: InferenceJob) -> None:
        if self._job_by_flight_key.get(flight_key) is job:
            del self._job_by_flight_key[flight_key]


def _flight_outcome(
    pending: PendingAnswer, flight_seat: FlightSeat[FlightKey, ComputedRecord] | None
) -> ComputedRecord | LiveUnavailable:
    if flight_seat is None:
        return LiveUnavailable(LiveReason.OVERLOADED)
    if not flight_seat.waiter.done():
        return LiveUnavailable(LiveReason.TIMEOUT)
    # `exception()` instead of raising: a traceback would refer to this frame, and so to the flight that holds the
    # error. That cycle would keep the generation alive, since frozen objects are never collected.
    error = flight_seat.waiter.exception()
    if error is None:
        return flight_seat.value()
    if isinstance(error, LiveUnavailable):
        return error
    # The model is foreign code: whatever it raises, the next rung answers.
    if isinstance(error, UnfitValue):  # an error of the model or its input: a traceback adds nothing
        log.warning("live inference for %s failed: %s", pending.table.name, error.message)
    else:
        log.warning("live inference for %s failed", pending.table.name, exc_info=error)
    return LiveUnavailable(LiveReason.FAILED)
