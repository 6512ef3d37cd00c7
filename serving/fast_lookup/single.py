"""A lookup of one plain id on the fast way: L1, then one read of L2 with or without company, else the ladder."""

import asyncio
from collections.abc import Callable

import orjson

from cache.tiers.l1 import LocalKey
from cache.tiers.tiered import Found, Outcome
from serving.answers.sources import Source
from serving.fast_lookup.batch import Batches
from serving.fast_lookup.coalescer import Together, Told
from serving.fast_lookup.single_request import Get
from serving.lookup.answer_builder import Turn
from serving.lookup.entity import Case
from serving.lookup.service import LookupService
from serving.rendering.answer_fields import JSON, Answer
from serving.rendering.json_single import ready_with_events, start_of
from serving.tracing.request_context import note
from serving.usage.answer_sampling import Pick


class Singles:
    """Answers lookups of one id; whatever is no plain record is the ladder's to answer."""

    def __init__(
        self, service: LookupService, batches: Batches, clock: Callable[[], float]
    ) -> None:
        self._service = service
        self._tiers = service.tiers
        self._ladder = service.ladder
        self._metrics = service.metrics
        self._watch = service.ladder.watch
        self._batches = batches
        self._clock = clock
        self._together = Together(service, batches, clock)

    async def answer(self, get: Get) -> bytes | None:
        """The body of the response; None if under its filter more than L1 is needed."""
        if get.passing is not None:
            return self._filtered(get) if get.is_plain else None
        if not get.is_plain:
            self._metrics.stage("parse", self._service.timer() - get.started)
            return await self._resolved(get, None)
        outcome: Outcome | bytes | None = self._tiers.peek(get.holding.live.view, get.want)
        if outcome is None:
            coalescer, started_at = self._together, self._service.timer()
            if coalescer.have_time(get) and coalescer.pays():
                outcome = await coalescer.ask(get)
            if outcome is None:
                outcome = await self._read(get)
            note("stored", self._service.timer() - started_at, 1)
        return await self._finished(get, outcome)

    def joins(self, get: Get) -> asyncio.Future[Told] | None:
        """The future answer of a lookup that goes along with others, which needs no task; None if it does not.

        With 32 in flight a task for each costs 2 of 24 us: 7 % of what L2 lookups take, by processor time.
        """
        coalescer, live = self._together, get.holding.live
        is_plain = get.is_plain and get.passing is None
        if not (is_plain and coalescer.is_busy and coalescer.have_time(get)):
            return None
        key = LocalKey(live.generation, get.asked.table, get.want.key)
        if self._tiers.local.look(key) is not None:
            return None  # what is here waits for no read of others
        coalescer.pays()
        return coalescer.ask(get)

    async def after(self, get: Get, group_result: Told) -> bytes:
        """The body for who joined others and was told no answer."""
        return await self._finished(
            get, await self._read(get) if group_result is None else group_result
        )

    async def _finished(self, get: Get, outcome: Outcome | bytes) -> bytes:
        if isinstance(outcome, bytes):
            return outcome
        rendered = self._rendered(get, outcome) if isinstance(outcome, Found) else None
        return await self._resolved(get, outcome) if rendered is None else rendered

    async def _read(self, get: Get) -> Outcome:
        """Reads L2; under a deadline of its own if the request has less time than L2 may take."""
        deadline = None
        if not self._together.have_time(get):
            deadline = self._ladder.l2_deadline(get.options, get.started)  # a clock of its own
        return await self._tiers.get(get.holding.live.view, get.want, deadline)

    def _filtered(self, get: Get) -> bytes | None:
        """The body made of the list in L1, if enough of it passes the filter; else nothing is counted."""
        view, record_key = get.holding.live.view, get.want
        hit = self._tiers.look(view, record_key)
        if hit is None or (start := self._start(get, hit)) is None:
            return None
        self._tiers.peek(view, record_key)  # now it is a hit
        return self._told(get, hit, start)

    def _rendered(self, get: Get, hit: Found) -> bytes | None:
        """The body made of a stored record, counted; None if that is no plain answer."""
        start = self._start(get, hit)
        return None if start is None else self._told(get, hit, start)

    def _start(self, get: Get, hit: Found) -> bytes | None:
        return start_of(get.holding.live, get.table, hit, get.asked.id, get.k, get.passing)

    def _told(self, get: Get, hit: Found, start: bytes) -> bytes:
        live, single_lookup = get.holding.live, get.asked
        name = single_lookup.table, single_lookup.raw
        self._ladder.recent.append(name)
        source = Source(hit.tier)
        self._metrics.hot(single_lookup.table, source, self._service.timer() - get.started)
        if source is Source.L2:
            self._watch.read(live.generation, single_lookup.table, get.want.key)
        sampler = self._watch.picks
        sampler.left -= 1
        if sampler.left < 0:
            sampler.places(1)
            sampler.put(Pick(
                live.generation, *name, source, "batch", self._clock(), get.k, hit.record
            ))  # fmt: skip
        static_tail = self._batches.marks(live)
        if source is Source.L1 and static_tail.stale is None:
            by_attributes = get.passing is not None or get.table.is_facet
            ready = static_tail.ready(
                start, name, get.request, get.events, by_attributes=by_attributes
            )
            self._tiers.keep(live.view, get.want, ready)
        return start + static_tail.end(source, self._clock())

    async def _resolved(self, get: Get, outcome: Outcome | None) -> bytes:
        """The body with the ladder's answer, which knows how the read of the tiers ended, if there was one."""
        case = get.case
        if outcome is not None:
            case.take(outcome)
        context = Turn.of(get.options, get.started)
        answers = await self._ladder.resolve(get.holding, [case], context)
        answer = self._service.marked(answers)[0]
        self._keep_newer(get, case, answer)
        return orjson.dumps(answer, option=JSON)

    def _keep_newer(self, get: Get, case: Case, answer: Answer) -> None:
        """Keeps an answer with newer events that L1 gave; one that settled for less is made again."""
        live, events = get.holding.live, get.events
        is_whole = case.counted is not None and not case.is_settled
        if events is None or not is_whole or answer["source"] is not Source.L1:
            return
        if "stale" in answer or self._ladder.newer.packed.get(get.asked.raw) is not events:
            return
        ready = ready_with_events(live, answer, get.asked.raw, get.request, events)
        self._tiers.keep(live.view, get.want, ready)
