"""A lookup of one plain id on the fast way: L1, then one read of L2 with or without company, else the ladder."""

import asyncio
from collections.abc import Callable

import orjson

from cache.tiers.l1 import LocalKey
from cache.tiers.tiered import Hit, ReadResult
from serving.answers.sources import Source
from serving.fast_lookup.batch import BatchLookups
from serving.fast_lookup.coalescer import GetCoalescer, GroupResult
from serving.fast_lookup.single_request import SingleRequest
from serving.lookup.answer_builder import RequestContext
from serving.lookup.entity import PendingAnswer
from serving.lookup.service import LookupService
from serving.rendering.answer_fields import JSON, AnswerJson
from serving.rendering.json_single import ready_with_events, start_of
from serving.tracing.request_context import note
from serving.usage.answer_sampling import AnswerSample


class SingleLookups:
    """Answers lookups of one id; whatever is no plain record is the ladder's to answer."""

    def __init__(
        self, service: LookupService, batches: BatchLookups, clock: Callable[[], float]
    ) -> None:
        self._service = service
        self._tiers = service.tiers
        self._ladder = service.ladder
        self._metrics = service.metrics
        self._watch = service.ladder.watch
        self._batches = batches
        self._clock = clock
        self._coalescer = GetCoalescer(service, batches, clock)

    async def answer(self, get: SingleRequest) -> bytes | None:
        """The body of the response; None if under its filter more than L1 is needed."""
        if get.filter_mask is not None:
            return self._filtered(get) if get.is_plain else None
        if not get.is_plain:
            self._metrics.stage("parse", self._service.timer() - get.started)
            return await self._resolved(get, None)
        outcome: ReadResult | bytes | None = self._tiers.peek(get.served.live.view, get.record_key)
        if outcome is None:
            coalescer, started_at = self._coalescer, self._service.timer()
            if coalescer.has_time(get) and coalescer.note_arrival():
                outcome = await coalescer.join(get)
            if outcome is None:
                outcome = await self._read(get)
            note("stored", self._service.timer() - started_at, 1)
        return await self._finished(get, outcome)

    def try_join(self, get: SingleRequest) -> asyncio.Future[GroupResult] | None:
        """The future answer of a lookup that goes along with others, which needs no task; None if it does not.

        With 32 in flight a task for each costs 2 of 24 us: 7 % of what L2 lookups take, by processor time.
        """
        coalescer, live = self._coalescer, get.served.live
        is_plain = get.is_plain and get.filter_mask is None
        if not (is_plain and coalescer.is_busy and coalescer.has_time(get)):
            return None
        key = LocalKey(live.generation, get.lookup.table, get.record_key.key)
        if self._tiers.local.inspect(key) is not None:
            return None  # what is here waits for no read of others
        coalescer.note_arrival()
        return coalescer.join(get)

    async def answer_after_join(self, get: SingleRequest, group_result: GroupResult) -> bytes:
        """The body for who joined others and was told no answer."""
        return await self._finished(
            get, await self._read(get) if group_result is None else group_result
        )

    async def _finished(self, get: SingleRequest, outcome: ReadResult | bytes) -> bytes:
        if isinstance(outcome, bytes):
            return outcome
        rendered = self._rendered(get, outcome) if isinstance(outcome, Hit) else None
        return await self._resolved(get, outcome) if rendered is None else rendered

    async def _read(self, get: SingleRequest) -> ReadResult:
        """Reads L2; under a deadline of its own if the request has less time than L2 may take."""
        deadline = None
        if not self._coalescer.has_time(get):
            deadline = self._ladder.l2_deadline(get.options, get.started)  # a clock of its own
        return await self._tiers.get(get.served.live.view, get.record_key, deadline)

    def _filtered(self, get: SingleRequest) -> bytes | None:
        """The body made of the list in L1, if enough of it passes the filter; else nothing is counted."""
        view, record_key = get.served.live.view, get.record_key
        hit = self._tiers.inspect(view, record_key)
        if hit is None or (start := self._start(get, hit)) is None:
            return None
        self._tiers.peek(view, record_key)  # now it is a hit
        return self._count_and_finish(get, hit, start)

    def _rendered(self, get: SingleRequest, hit: Hit) -> bytes | None:
        """The body made of a stored record, counted; None if that is no plain answer."""
        start = self._start(get, hit)
        return None if start is None else self._count_and_finish(get, hit, start)

    def _start(self, get: SingleRequest, hit: Hit) -> bytes | None:
        return start_of(get.served.live, get.table, hit, get.lookup.id, get.k, get.filter_mask)

    def _count_and_finish(self, get: SingleRequest, hit: Hit, start: bytes) -> bytes:
        live, single_lookup = get.served.live, get.lookup
        name = single_lookup.table, single_lookup.raw
        self._ladder.recent.append(name)
        source = Source(hit.tier)
        self._metrics.count_fast_answers(
            single_lookup.table, source, self._service.timer() - get.started
        )
        if source is Source.L2:
            self._watch.read(live.generation, single_lookup.table, get.record_key.key)
        sampler = self._watch.sampler
        sampler.countdown -= 1
        if sampler.countdown < 0:
            sampler.draw_indices(1)
            sampler.put(AnswerSample(
                live.generation, *name, source, "batch", self._clock(), get.k, hit.record
            ))  # fmt: skip
        static_tail = self._batches.get_static_tail(live)
        if source is Source.L1 and static_tail.stale is None:
            by_attributes = get.filter_mask is not None or get.table.is_facet
            ready = static_tail.ready(
                start, name, get.request, get.events, by_attributes=by_attributes
            )
            self._tiers.keep(live.view, get.record_key, ready)
        return start + static_tail.end(source, self._clock())

    async def _resolved(self, get: SingleRequest, outcome: ReadResult | None) -> bytes:
        """The body with the ladder's answer, which knows how the read of the tiers ended, if there was one."""
        case = get.pending_answer
        if outcome is not None:
            case.set_result(outcome)
        context = RequestContext.of(get.options, get.started)
        answers = await self._ladder.resolve(get.served, [case], context)
        answer = self._service.attach_staleness(answers)[0]
        self._keep_newer(get, case, answer)
        return orjson.dumps(answer, option=JSON)

    def _keep_newer(self, get: SingleRequest, case: PendingAnswer, answer: AnswerJson) -> None:
        """Keeps an answer with newer events that L1 gave; one that settled for less is made again."""
        live, events = get.served.live, get.events
        is_whole = case.counted_events is not None and not case.is_settled
        if events is None or not is_whole or answer["source"] is not Source.L1:
            return
        if "stale" in answer or self._ladder.newer_events.packed.get(get.lookup.raw) is not events:
            return
        ready = ready_with_events(live, answer, get.lookup.raw, get.request, events)
        self._tiers.keep(live.view, get.record_key, ready)
