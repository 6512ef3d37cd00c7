"""Ladder of sources for each entity: stored, live, the previous generation, defaults; within the caller's deadline."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from cache.l2.commands import COMMANDS_PER_OVERLAY_READ, deadline_for
from cache.records import Record, decode_record
from cache.tiers.reads import Hit, MissReason, ReadResult, RecordKey, SnapshotView
from serving.admission.work_pacer import YieldPacer
from serving.engine.answer_builder import AnswerBuilder, RequestContext
from serving.engine.answer_observer import AnswerObserver, RecentNames
from serving.engine.entity import (
    PendingAnswer,
    build_pending_answers,
    find_previous_record_key,
    still_open,
)
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
        self, view: SnapshotView, record_keys: Sequence[RecordKey], deadline: float
    ) -> Sequence[ReadResult]:
        """Read one outcome per record key, in order; `deadline` is monotonic."""

    def discard(self, view: SnapshotView, record_key: RecordKey) -> None:
        """Remove a record that turned out to be damaged."""


class InferenceRunner(Protocol):
    """Interface of live inference that the ladder uses."""

    def plan_overlay_reads(self, snapshot: Snapshot, cases: Sequence[PendingAnswer]) -> None:
        """Decide which overlays are left unread."""

    def note_repeat(self) -> None:
        """Count an input that was answered from an overlay."""

    async def run(
        self, snapshot: Snapshot, cases: Sequence[PendingAnswer], limit_s: float
    ) -> Sequence[ComputedRecord | LiveUnavailable]:
        """Return outcomes within `limit_s` seconds, one per pending answer, in order."""


class Ladder:
    """Ladder: answers every entity exactly once; only a request that can never be answered raises (Problem)."""

    def __init__(
        self,
        tiers: RecordReader,
        inferences: InferenceRunner,
        metrics: Metrics,
        *,
        l2_deadline_s: float,
        watch: AnswerObserver | None = None,
        timer: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.recent = RecentNames()
        self.watch = watch or AnswerObserver(metrics.l1_misses)
        self.newer_inputs = NewerInputs()
        """Hook `rewrite`; a feature replaces it when it attaches."""
        self.shaper = ListShaper()
        """Hook `shape`; a feature replaces it when it attaches."""
        self._tiers, self._inferences = tiers, inferences
        self._metrics = metrics
        self.answer_builder = AnswerBuilder(metrics, self.watch, timer, clock)
        self._l2_deadline_s = l2_deadline_s
        self._timer = timer
        self._clock = clock
        # No fallback before `_compute`: it would answer who demands a fresh answer.
        self._rungs = (
            self._read_stored,
            self._compute,
            self._settle_for_stored,
            self._read_previous,
            self._give_default,
        )

    async def lookup(
        self, served: ServedGenerations, request: LookupRequest, started: float
    ) -> list[AnswerJson]:
        """Answer each entity once, in order, from the generations captured in `served` when the request came."""
        served = served.pinned(request.options.generation)
        cases = await build_pending_answers(served.live, request)
        return await self.resolve(served, cases, RequestContext.of(request.options, started))

    async def resolve(
        self, served: ServedGenerations, cases: Sequence[PendingAnswer], context: RequestContext
    ) -> list[AnswerJson]:
        """Answer each pending entity once, in order: from the first rung that can.

        If too few stored items pass the filter, the list is searched again from the user's vector, but only for
        requests that sent a filter.

        All kinds of requests end here. A pending answer may come with the outcome of a read of the tiers
        (`PendingAnswer.set_result`), made in whatever way was cheapest for many: it is judged here, and not read again.
        """
        live = served.live
        if not context.is_part:
            self._metrics.count_entities([case.table.name for case in cases])
        # Only ids of the night: a flood of random ones must not push out what is hot.
        self.recent.extend(
            (case.table.name, case.entity.raw)
            for case in cases
            if case.record_key.position >= 0 and case.entity.raw is not None
        )
        try:
            if self.newer_inputs.packed or live.new_items:
                await self._count_newer(live, cases, context)
            for rung in self._rungs:
                waiting = still_open(cases)
                if not waiting:
                    break
                await rung(served, waiting, context)
        except Exception:  # a defect of ours costs an answer its quality, not its caller the answer
            log.exception("answering failed")
            for case in still_open(cases):
                case.reason = MissReason.INTERNAL_ERROR
                self.answer_builder.default(case, live, context)
        return [case.answer for case in cases if case.answer is not None]

    def l2_deadline(self, options: RequestOptions, started: float, commands: int = 1) -> float:
        """Return the monotonic time until which a request may wait for its stored records."""
        tier_s = deadline_for(self._l2_deadline_s, commands)
        return min(started + options.deadline_s, self._timer() + tier_s)

    async def _count_newer(
        self, snapshot: Snapshot, cases: Sequence[PendingAnswer], context: RequestContext
    ) -> None:
        """Add newer events and new items to the pending answers."""

        def read_records(record_keys: Sequence[RecordKey]) -> Awaitable[Sequence[ReadResult]]:
            deadline = self.l2_deadline(context.options, context.started, len(record_keys))
            return self._tiers.get_many(snapshot.view, record_keys, deadline)

        await self.newer_inputs.count_newer(snapshot, cases, context.options, read_records)

    async def _read_stored(
        self, served: ServedGenerations, cases: list[PendingAnswer], context: RequestContext
    ) -> None:
        """Answer from stored records in L1 and L2."""
        snapshot = served.live
        for case in cases:
            if snapshot.blocks(case.table, case.entity.raw):
                case.reason, case.hit = MissReason.ENTITY_BLOCKED, None
            elif context.options.fresh and case.may_compute(snapshot):
                case.reason = MissReason.FRESH
        unread = [case for case in cases if case.reason is None and case.hit is None]
        self._inferences.plan_overlay_reads(snapshot, unread)
        await self._read(snapshot, unread, context)
        pace = YieldPacer(context.options)
        for case in cases:
            if (hit := case.hit) is None:
                continue
            await pace.step(case.entity)
            if case.record_key.position < 0 and case.record_key.digest is not None:
                self._inferences.note_repeat()
            try:
                self._take_stored(case, snapshot, hit, context)
            except Exception:  # whatever a record holds, it costs no other entity its answer
                self._discard_corrupt(case, snapshot)

    def _take_stored(
        self, case: PendingAnswer, snapshot: Snapshot, hit: Hit, context: RequestContext
    ) -> None:
        record = decode_record(case.table.layout, hit.record, snapshot.numbered)
        case.reason = hit.reason
        if self._too_old(snapshot, record, context.options.max_age_s):
            case.reason = MissReason.TOO_OLD
            if case.may_compute(snapshot):
                return
        elif context.options.fresh:
            case.reason = MissReason.NOTHING_TO_COMPUTE_FROM
        # Of an item, live knows more than fits into a record; of features that are sent it would make another list.
        is_more = case.own_ordinal is not None and not case.entity.features and not record.live
        is_deeper = is_more and case.entity.has_input and case.may_compute(snapshot)
        min_items = context.options.k if is_deeper and context.options.k is not None else 1
        self.answer_builder.answer(
            case, snapshot, record, Source(hit.tier), context, min_items=min_items
        )

    def _discard_corrupt(self, case: PendingAnswer, snapshot: Snapshot) -> None:
        log.warning("a stored record of %s cannot be read", case.table.name, exc_info=True)
        self._tiers.discard(snapshot.view, case.record_key)
        case.hit, case.reason = None, MissReason.CORRUPT

    async def _read(
        self, snapshot: Snapshot, cases: Sequence[PendingAnswer], context: RequestContext
    ) -> None:
        if not cases:
            return
        started_at = self._timer()
        record_keys = [case.record_key for case in cases]
        deadline = self.l2_deadline(context.options, context.started, _commands(record_keys))
        outcomes = await self._tiers.get_many(snapshot.view, record_keys, deadline)
        for case, outcome in zip(cases, outcomes, strict=True):
            case.set_result(outcome)
        self._metrics.stage("stored", self._timer() - started_at, len(cases))

    def _too_old(self, snapshot: Snapshot, record: Record, max_age_s: float | None) -> bool:
        if max_age_s is None:
            return False
        # A live record is as old as its inference, one of the night as old as its data.
        data_at = record.scored_at if record.live else snapshot.manifest.data_until
        return self._clock() - data_at > max_age_s

    async def _compute(
        self, served: ServedGenerations, cases: list[PendingAnswer], context: RequestContext
    ) -> None:
        """Answer by live inference."""
        snapshot, started_at = served.live, self._timer()
        cases = [case for case in cases if _is_worth(case, snapshot)]
        if not cases:
            return
        left_s = max(0.0, context.deadline - started_at)
        # What comes after live needs a little time too.
        limit_s = left_s - min(self._l2_deadline_s, left_s / 4)
        outcomes = await self._inferences.run(snapshot, cases, limit_s)
        pace = YieldPacer(context.options)
        for case, outcome in zip(cases, outcomes, strict=True):
            await pace.step(case.entity)
            if isinstance(outcome, ComputedRecord):
                self._take_live(case, snapshot, outcome, context)
            else:
                case.live_reason = outcome.reason
            if case.live_reason is not None:
                self._metrics.live_failed(case.table.name, case.live_reason)
        self._metrics.stage("live", self._timer() - started_at, len(cases))

    def _take_live(
        self,
        case: PendingAnswer,
        snapshot: Snapshot,
        computed: ComputedRecord,
        context: RequestContext,
    ) -> None:
        missed = case.reason
        case.unknown_id_count, case.near = computed.unknown_id_count, computed.near
        try:
            record = case.decoded(snapshot, computed.record)
            self.answer_builder.answer(case, snapshot, record, Source.LIVE, context)
        except Exception:  # as for a stored one
            log.warning("a live record of %s cannot be read", case.table.name, exc_info=True)
            self._tiers.discard(snapshot.view, case.record_key)
            case.live_reason = LiveReason.CORRUPT
        if (
            case.answer is None
            and case.live_reason is None
            and case.reason is not MissReason.FILTERED
        ):
            case.reason, case.live_reason = missed, LiveReason.EXHAUSTED

    async def _settle_for_stored(
        self, served: ServedGenerations, cases: list[PendingAnswer], context: RequestContext
    ) -> None:
        """Answer from stored records for want of fresher ones; they beat another night's answer."""
        snapshot = served.live
        # Under overload an overlay that is hardly ever there is not looked for either.
        unread = [
            case
            for case in cases
            if case.fall_back_to_nightly()
            or case.reason == MissReason.FRESH
            or (case.reason == MissReason.UNREAD and case.live_reason != LiveReason.OVERLOADED)
        ]
        for case in unread:
            case.reason, case.record_key = None, case.record_key._replace(skips_overlay=False)
        await self._read(snapshot, unread, context)
        for case in cases:
            if (hit := case.hit) is None:
                continue
            if case.reason is not None and not case.reason.traits.allows_stored:
                continue
            try:
                record = case.decoded(snapshot, hit.record)
                if context.options.fresh:
                    case.reason = case.reason or MissReason.FRESH_UNAVAILABLE
                self.answer_builder.answer(case, snapshot, record, Source(hit.tier), context)
            except Exception:  # as above
                self._discard_corrupt(case, snapshot)

    async def _read_previous(
        self, served: ServedGenerations, cases: list[PendingAnswer], context: RequestContext
    ) -> None:
        """Answer from records of the previous generation."""
        previous = served.previous
        if previous is None:
            return
        wants_of = [(case, find_previous_record_key(previous, case)) for case in cases]
        keyed_pendings = [
            (case, record_key) for case, record_key in wants_of if isinstance(record_key, RecordKey)
        ]
        if not keyed_pendings:
            return
        started_at = self._timer()
        record_keys = [record_key for _, record_key in keyed_pendings]
        deadline = self.l2_deadline(context.options, context.started, _commands(record_keys))
        outcomes = await self._tiers.get_many(previous.view, record_keys, deadline)
        pace = YieldPacer(context.options)
        for (case, record_key), outcome in zip(keyed_pendings, outcomes, strict=True):
            if not isinstance(outcome, Hit):
                continue
            await pace.step(case.entity)
            missed = case.reason
            try:
                record = decode_record(
                    record_key.table.layout, outcome.record, previous.items.count
                )
                seen_ordinals = _had_in(previous, case, served.live)
                self.answer_builder.answer(
                    case, previous, record, Source.PREVIOUS, context, seen_ordinals=seen_ordinals
                )
            except Exception:  # as for a record of this night, whose reason stays
                log.warning(
                    "an older record of %s cannot be read", record_key.table.name, exc_info=True
                )
                self._tiers.discard(previous.view, record_key)
            if case.answer is None and case.reason is not MissReason.FILTERED:
                case.reason = missed
        self._metrics.stage("previous", self._timer() - started_at, len(keyed_pendings))

    async def _give_default(
        self, served: ServedGenerations, cases: list[PendingAnswer], context: RequestContext
    ) -> None:
        """Answer with the table's defaults, which are the same for all users."""
        pace = YieldPacer(context.options)
        for case in cases:
            await pace.step(case.entity)
            self.answer_builder.default(case, served.live, context)


def _had_in(previous: Snapshot, case: PendingAnswer, live: Snapshot) -> frozenset[int]:
    """Return the ordinals in the previous generation of the user's past items, as the live one's night knew them."""
    seen_ordinals = case.find_seen_ordinals(live)
    if not len(seen_ordinals):
        return frozenset()
    raws = [live.items.raw_id(ordinal) for ordinal in seen_ordinals.tolist()]
    return frozenset(previous.items.ordinals_of(raws).tolist())


def _is_worth(case: PendingAnswer, snapshot: Snapshot) -> bool:
    """True if live may compute and would not compute exactly the answer that was used up."""
    used_up = case.reason == MissReason.EXHAUSTED and case.hit is not None and case.hit.is_live
    return case.may_compute(snapshot) and not used_up


def _commands(record_keys: Sequence[RecordKey]) -> int:
    return sum(
        1 if record_key.position >= 0 else COMMANDS_PER_OVERLAY_READ for record_key in record_keys
    )
