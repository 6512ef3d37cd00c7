"""Ladder of sources for each entity, within the caller's deadline: stored, live, previous generation, defaults."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from cache.l2.commands import COMMANDS_PER_OVERLAY_READ, deadline_s_for
from cache.records import Record, decode_record
from cache.tiers.reads import Hit, MissReason, ReadResult, RecordKey, SnapshotView
from serving.admission.work_pacer import YieldPacer
from serving.engine.answer_builder import AnswerBuilder, RequestContext
from serving.engine.answer_observer import AnswerObserver, RecentNames
from serving.engine.entity import PendingAnswer, build_pending_answers, find_previous_record_key, unanswered_of
from serving.engine.hooks import ListShaper, NewerInputs
from serving.engine.micro_batcher import ComputedRecord, LiveUnavailable
from serving.engine.rendering.answer_fields import AnswerJson
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.metrics.registry import Metrics
from serving.requests.answers import Source
from serving.requests.models import LookupRequest
from serving.requests.options import RequestOptions
from serving.requests.reasons import LiveReason

log = logging.getLogger(__name__)


class RecordReader(Protocol):
    """Interface of the tiers that the ladder uses."""

    async def get_many(
        self, view: SnapshotView, record_keys: Sequence[RecordKey], deadline_at: float
    ) -> Sequence[ReadResult]:
        """Return one outcome per record key, in order; `deadline_at` is monotonic."""

    def discard(self, view: SnapshotView, record_key: RecordKey) -> None:
        """Remove a record that turned out to be damaged."""


class InferenceRunner(Protocol):
    """Interface of live inference that the ladder uses."""

    def plan_overlay_reads(self, snapshot: Snapshot, pendings: Sequence[PendingAnswer]) -> None:
        """Decide which overlays are left unread."""

    def note_repeat(self) -> None:
        """Count an input that was answered from an overlay."""

    async def run(
        self, snapshot: Snapshot, pendings: Sequence[PendingAnswer], time_limit_s: float
    ) -> Sequence[ComputedRecord | LiveUnavailable]:
        """Return outcomes within `time_limit_s` seconds, one per pending answer, in order."""


class Ladder:
    """Answers every entity exactly once; only a request that can never be answered raises Problem."""

    def __init__(
        self,
        tiers: RecordReader,
        inferences: InferenceRunner,
        metrics: Metrics,
        *,
        l2_deadline_s: float,
        observer: AnswerObserver | None = None,
        monotonic_clock: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.recent_names = RecentNames()
        self.observer = observer or AnswerObserver(metrics.l1_misses)
        self.newer_inputs = NewerInputs()
        """Hook `rewrite`; a feature replaces it when it attaches."""
        self.shaper = ListShaper()
        """Hook `shape`; a feature replaces it when it attaches."""
        self._tiers, self._inferences = tiers, inferences
        self._metrics = metrics
        self.answer_builder = AnswerBuilder(metrics, self.observer, monotonic_clock, clock)
        self._l2_deadline_s = l2_deadline_s
        self._monotonic_clock = monotonic_clock
        self._clock = clock
        # No fallback before `_compute_live`: otherwise requests for a fresh answer would get the fallback.
        self._rungs = (
            self._read_stored,
            self._compute_live,
            self._settle_for_stored,
            self._read_previous,
            self._give_default,
        )

    async def lookup(
        self, served: ServedGenerations, request: LookupRequest, request_started_at: float
    ) -> list[AnswerJson]:
        """Answer each entity once, in order, from the generations captured in `served` when the request came."""
        served = served.pin_generation(request.options.generation)
        pendings = await build_pending_answers(served.live, request)
        return await self.resolve(served, pendings, RequestContext.of(request.options, request_started_at))

    async def resolve(
        self, served: ServedGenerations, pendings: Sequence[PendingAnswer], context: RequestContext
    ) -> list[AnswerJson]:
        """Answer each pending entity once, in order: from the first rung that can.

        If too few stored items pass the filter, the list is searched again from the user's vector, but only for
        requests that sent a filter.

        Every request comes here exactly once, unless stored records alone answer it: a GET or a batch of ids without
        any option but `k`, `deadline_ms` and a cached filter, which `hot_route` and `batch_lookup` answer and count. A
        pending answer may already have the outcome of a read from the tiers (`PendingAnswer.set_read_result`), such as
        that of a batched read; its record is not read again.
        """
        live = served.live
        if not context.is_part_of_answer:
            self._metrics.count_entities([pending.table.name for pending in pendings])
        # Only ids that the night knows: a flood of random ids must not displace hot ids.
        self.recent_names.extend(
            (pending.table.name, pending.entity.raw_id)
            for pending in pendings
            if pending.record_key.directory_position >= 0 and pending.entity.raw_id is not None
        )
        try:
            if self.newer_inputs.packed_input_by_id or live.new_items or context.options.as_of is not None:
                await self._count_newer(live, pendings, context)
            for rung in self._rungs:
                waiting_pendings = unanswered_of(pendings)
                if not waiting_pendings:
                    break
                await rung(served, waiting_pendings, context)
        except Exception:  # after a bug callers get defaults instead of no answer
            log.exception("answering failed")
            for pending in unanswered_of(pendings):
                pending.reason = MissReason.INTERNAL_ERROR
                self.answer_builder.answer_by_default(pending, live, context)
        return [pending.answer for pending in pendings if pending.answer is not None]

    def l2_deadline(self, options: RequestOptions, request_started_at: float, l2_command_count: int = 1) -> float:
        """Return the monotonic time until which a request may wait for its stored records."""
        tier_wait_s = deadline_s_for(self._l2_deadline_s, l2_command_count)
        return min(request_started_at + options.deadline_s, self._monotonic_clock() + tier_wait_s)

    async def _count_newer(
        self, snapshot: Snapshot, pendings: Sequence[PendingAnswer], context: RequestContext
    ) -> None:
        """Add newer events and new items to the pending answers."""

        def read_records(record_keys: Sequence[RecordKey]) -> Awaitable[Sequence[ReadResult]]:
            deadline = self.l2_deadline(context.options, context.request_started_at, len(record_keys))
            return self._tiers.get_many(snapshot.view, record_keys, deadline)

        await self.newer_inputs.count_newer(snapshot, pendings, context.options, read_records)

    async def _read_stored(
        self, served: ServedGenerations, pendings: list[PendingAnswer], context: RequestContext
    ) -> None:
        """Answer from stored records in L1 and L2."""
        snapshot = served.live
        for pending in pendings:
            if snapshot.blocks_entity(pending.table, pending.entity.raw_id):
                pending.reason, pending.hit = MissReason.ENTITY_BLOCKED, None
            elif context.options.fresh and pending.may_compute_live(snapshot):
                pending.reason = MissReason.FRESH
        unread_pendings = [pending for pending in pendings if pending.reason is None and pending.hit is None]
        self._inferences.plan_overlay_reads(snapshot, unread_pendings)
        await self._read_records(snapshot, unread_pendings, context)
        yield_pacer = YieldPacer(context.options)
        for pending in pendings:
            if (hit := pending.hit) is None:
                continue
            await yield_pacer.count_entity(pending.entity)
            if pending.record_key.directory_position < 0 and pending.record_key.input_digest is not None:
                self._inferences.note_repeat()
            try:
                self._answer_from_stored(pending, snapshot, hit, context)
            except Exception:  # a damaged record must not affect other entities
                self._discard_corrupt(pending, snapshot)

    def _answer_from_stored(
        self, pending: PendingAnswer, snapshot: Snapshot, hit: Hit, context: RequestContext
    ) -> None:
        record = decode_record(pending.table.layout, hit.record, snapshot.nameable_item_count)
        pending.reason = hit.reason
        if self._is_record_too_old(snapshot, record, context.options.max_age_s):
            pending.reason = MissReason.TOO_OLD
            if pending.may_compute_live(snapshot):
                return
        elif context.options.fresh:
            pending.reason = MissReason.NOTHING_TO_COMPUTE_FROM
        # For an item, live can compute a longer list than a record holds; with sent features it would be a different
        # list.
        live_knows_more = pending.own_ordinal is not None and not pending.entity.features and not record.is_live
        can_compute_more = live_knows_more and pending.entity.has_input and pending.may_compute_live(snapshot)
        min_items = context.options.k if can_compute_more and context.options.k is not None else 1
        self.answer_builder.answer_from_record(
            pending, snapshot, record, Source(hit.tier), context, min_items=min_items
        )

    def _discard_corrupt(self, pending: PendingAnswer, snapshot: Snapshot) -> None:
        log.warning("a stored record of %s cannot be read", pending.table.name, exc_info=True)
        self._tiers.discard(snapshot.view, pending.record_key)
        pending.hit, pending.reason = None, MissReason.CORRUPT

    async def _read_records(
        self, snapshot: Snapshot, pendings: Sequence[PendingAnswer], context: RequestContext
    ) -> None:
        if not pendings:
            return
        started_at = self._monotonic_clock()
        record_keys = [pending.record_key for pending in pendings]
        deadline = self.l2_deadline(context.options, context.request_started_at, _l2_command_count(record_keys))
        outcomes = await self._tiers.get_many(snapshot.view, record_keys, deadline)
        for pending, outcome in zip(pendings, outcomes, strict=True):
            pending.set_read_result(outcome)
        self._metrics.stage("stored", self._monotonic_clock() - started_at, len(pendings))

    def _is_record_too_old(self, snapshot: Snapshot, record: Record, max_age_s: float | None) -> bool:
        if max_age_s is None:
            return False
        # The age of a live record is that of its inference; the age of a nightly record is that of its data.
        data_at = record.scored_at if record.is_live else snapshot.manifest.data_until
        return self._clock() - data_at > max_age_s

    async def _compute_live(
        self, served: ServedGenerations, pendings: list[PendingAnswer], context: RequestContext
    ) -> None:
        """Answer by live inference."""
        snapshot, started_at = served.live, self._monotonic_clock()
        pendings = [pending for pending in pendings if _is_worth_computing(pending, snapshot)]
        if not pendings:
            return
        remaining_s = max(0.0, context.deadline_at - started_at)
        # Leave some time for the rungs after live.
        limit_s = remaining_s - min(self._l2_deadline_s, remaining_s / 4)
        outcomes = await self._inferences.run(snapshot, pendings, limit_s)
        yield_pacer = YieldPacer(context.options)
        for pending, outcome in zip(pendings, outcomes, strict=True):
            await yield_pacer.count_entity(pending.entity)
            if isinstance(outcome, ComputedRecord):
                self._answer_from_computed(pending, snapshot, outcome, context)
            else:
                pending.live_failure_reason = outcome.reason
            if pending.live_failure_reason is not None:
                self._metrics.live_failed(pending.table.name, pending.live_failure_reason)
        self._metrics.stage("live", self._monotonic_clock() - started_at, len(pendings))

    def _answer_from_computed(
        self, pending: PendingAnswer, snapshot: Snapshot, computed: ComputedRecord, context: RequestContext
    ) -> None:
        miss_reason = pending.reason
        pending.unknown_id_count, pending.near_distance = computed.unknown_id_count, computed.near_distance
        try:
            record = pending.decode_record(snapshot, computed.record)
            self.answer_builder.answer_from_record(pending, snapshot, record, Source.LIVE, context)
        except Exception:  # as for a stored record
            log.warning("a live record of %s cannot be read", pending.table.name, exc_info=True)
            self._tiers.discard(snapshot.view, pending.record_key)
            pending.live_failure_reason = LiveReason.CORRUPT
        if pending.answer is None and pending.live_failure_reason is None and pending.reason is not MissReason.FILTERED:
            pending.reason, pending.live_failure_reason = miss_reason, LiveReason.EXHAUSTED

    async def _settle_for_stored(
        self, served: ServedGenerations, pendings: list[PendingAnswer], context: RequestContext
    ) -> None:
        """Answer from stored records if no fresher answer is available; the previous generation's would be worse."""
        snapshot = served.live
        # Under overload, overlays that were skipped as rarely present are not read either.
        unread_pendings = [
            pending
            for pending in pendings
            if pending.reason != MissReason.ENTITY_BLOCKED
            and (
                pending.fall_back_to_nightly()
                or pending.reason == MissReason.FRESH
                or (pending.reason == MissReason.UNREAD and pending.live_failure_reason != LiveReason.OVERLOADED)
            )
        ]
        for pending in unread_pendings:
            pending.reason, pending.record_key = (None, pending.record_key._replace(skips_overlay=False))
        await self._read_records(snapshot, unread_pendings, context)
        for pending in pendings:
            if (hit := pending.hit) is None:
                continue
            if pending.reason is not None and not pending.reason.traits.allows_stored:
                continue
            try:
                record = pending.decode_record(snapshot, hit.record)
                if context.options.fresh:
                    pending.reason = pending.reason or MissReason.FRESH_UNAVAILABLE
                self.answer_builder.answer_from_record(pending, snapshot, record, Source(hit.tier), context)
            except Exception:  # a damaged record must not affect other entities
                self._discard_corrupt(pending, snapshot)

    async def _read_previous(
        self, served: ServedGenerations, pendings: list[PendingAnswer], context: RequestContext
    ) -> None:
        """Answer from records of the previous generation."""
        previous = served.previous
        if previous is None:
            return
        pendings_and_keys = [(pending, find_previous_record_key(previous, pending)) for pending in pendings]
        keyed_pendings = [
            (pending, record_key) for pending, record_key in pendings_and_keys if isinstance(record_key, RecordKey)
        ]
        if not keyed_pendings:
            return
        started_at = self._monotonic_clock()
        record_keys = [record_key for _, record_key in keyed_pendings]
        deadline = self.l2_deadline(context.options, context.request_started_at, _l2_command_count(record_keys))
        outcomes = await self._tiers.get_many(previous.view, record_keys, deadline)
        yield_pacer = YieldPacer(context.options)
        for (pending, record_key), outcome in zip(keyed_pendings, outcomes, strict=True):
            if not isinstance(outcome, Hit):
                continue
            await yield_pacer.count_entity(pending.entity)
            miss_reason = pending.reason
            try:
                record = decode_record(record_key.table.layout, outcome.record, previous.items.count)
                seen_ordinals = _seen_in_previous(previous, pending, served.live)
                self.answer_builder.answer_from_record(
                    pending, previous, record, Source.PREVIOUS, context, seen_ordinals=seen_ordinals
                )
            except Exception:  # as for a record of the live generation, except that the reason stays
                log.warning("an older record of %s cannot be read", record_key.table.name, exc_info=True)
                self._tiers.discard(previous.view, record_key)
            if pending.answer is None and pending.reason is not MissReason.FILTERED:
                pending.reason = miss_reason
        self._metrics.stage("previous", self._monotonic_clock() - started_at, len(keyed_pendings))

    async def _give_default(
        self, served: ServedGenerations, pendings: list[PendingAnswer], context: RequestContext
    ) -> None:
        """Answer with the table's defaults, which are the same for all users."""
        yield_pacer = YieldPacer(context.options)
        for pending in pendings:
            await yield_pacer.count_entity(pending.entity)
            self.answer_builder.answer_by_default(pending, served.live, context)


def _seen_in_previous(previous: Snapshot, pending: PendingAnswer, live: Snapshot) -> frozenset[int]:
    """Return the ordinals in the previous generation of the user's past items that the live generation knows."""
    seen_ordinals = pending.find_seen_ordinals(live)
    if not len(seen_ordinals):
        return frozenset()
    item_ids = [live.items.raw_id(ordinal) for ordinal in seen_ordinals.tolist()]
    return frozenset(previous.items.ordinals_of(item_ids).tolist())


def _is_worth_computing(pending: PendingAnswer, snapshot: Snapshot) -> bool:
    """True if live may compute, and would not just repeat the list of which no items were left."""
    is_used_up = pending.reason == MissReason.EXHAUSTED and pending.hit is not None and pending.hit.is_live
    return pending.may_compute_live(snapshot) and not is_used_up


def _l2_command_count(record_keys: Sequence[RecordKey]) -> int:
    return sum(1 if record_key.directory_position >= 0 else COMMANDS_PER_OVERLAY_READ for record_key in record_keys)
