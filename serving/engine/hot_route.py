"""Hot route: plain lookups answered ahead of the router from L1 or one read of L2, counted in bulk.

What it does not recognise (other options, bad input, inputs to compute from, a running canary or experiment) it leaves
to the routes behind it, and ids without a stored answer to the ladder.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter, itemgetter

import orjson
from starlette.types import Message, Receive, Scope

from cache.tiers.l1 import LocalKey, ReadyAnswer
from cache.tiers.reads import Hit, ReadResult
from serving.access.callers import caller_of
from serving.admission.work_pacer import waited_in
from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.engine.answer_builder import RequestContext
from serving.engine.answer_observer import AnswerSample, EntityName
from serving.engine.batch_lookup import BatchLookups, PostedLookups, is_k_too_large
from serving.engine.coalescer import GetCoalescer, GroupResult, SingleRequest
from serving.engine.entity import PendingAnswer, find_plain_record_key, with_filter_table
from serving.engine.rendering.answer_fields import JSON, AnswerJson
from serving.engine.rendering.json_answers import answer_start, ready_with_events
from serving.engine.service import LookupService
from serving.generations.served_set import ServedGenerations
from serving.metrics.collectors import GET_ROUTE
from serving.requests.answers import Source
from serving.requests.bodies import Messages
from serving.requests.context import note_stage
from serving.requests.errors import Problem
from serving.requests.negotiation import JSON_TYPE, forms
from serving.requests.parsing import (
    LOOKUP_PREFIX,
    QueryOptions,
    parse_single,
    tighten_deadline,
)

log = logging.getLogger(__name__)

POST_ROUTE = "POST /v1/lookup/{table}"

FLUSH_ANSWERS = 256
"""Answers counted at once, which spreads the fixed cost of counting."""

TIMED_EVERY = 128
"""Answers per timed one, whose time counts for all of them."""

_CACHED_STARTS_MAX = 8_192
_RESPONSE_START = {"type": "http.response.start", "status": 200}
_JSON_HEADER = b"content-type", JSON_TYPE.encode()
_ARROW_HEADER = b"content-type", ARROW_MEDIA_TYPE.encode()
_get_table_and_id, _table, _is_newer = itemgetter(4), itemgetter(0), attrgetter("is_newer")


class FastLookups:
    """Fast path of lookups; every method returns None for a request that the routes must handle."""

    def __init__(
        self,
        service: LookupService,
        clock: Callable[[], float] = time.time,
        is_traced: Callable[[Scope], bool] | None = None,
    ) -> None:
        self._service = service
        self._holder = service.follower.holder
        self._tiers = tiers = service.tiers
        self._ready = tiers.local.ready
        self._shaper, self._newer_inputs = service.ladder.shaper, service.ladder.newer_inputs
        self._events = self._newer_inputs.packed.get
        self._concerns = service.follower.concerns
        self._metrics = service.metrics
        self._requests = service.metrics.tally.requests
        self.answer = self._answer
        self._sent_answers = SentAnswers(
            service, clock, self._arm if service.observes else _skip_timing
        )
        if service.observes:
            self._metrics.flip_callbacks.append(self._arm)
            self._metrics.tally.flush_callbacks.append(self._sent_answers.flush)
            self._arm()
        self._timer, self._clock = service.timer, clock
        self._queries = QueryOptions(service.limits)
        self._is_traced = is_traced
        self._gate = service.gate()
        self._posted = PostedLookups(service, clock)
        self._singles = SingleLookups(service, self._posted.batches, clock)
        self._starts: dict[int, Message] = {}

    def ready(self, scope: Scope) -> Messages | None:
        """Return the ready answer to an untraced GET with plain headers; None without one."""
        caller = caller_of(scope)
        if not caller.may("read") or caller.quota is not None:  # a quota is taken further below
            return None
        if not self.can_use_fast_path(scope["headers"]) or (
            self._is_traced and self._is_traced(scope)
        ):
            return None
        query, path = scope["query_string"], scope.get("raw_path") or b""
        body = self.answer(path + b"?" + query if query else path)
        return None if body is None else self._messages(body)

    def can_use_fast_path(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """True if a lookup with these headers may have a ready answer."""
        return self._gate.can_use_fast_path(headers)

    def _answer(self, target: bytes) -> bytes | None:
        """Return the ready body in L1 for exactly this path and query, with its current age; None without one."""
        ready = self._ready(target)
        if ready is None:
            return None
        served, sent_answers = self._holder.served, self._sent_answers
        if served is None or self._holder.is_divided or self._concerns.text is not None:
            return None
        if ready.stamp != served.live.stamp and ready.stamp != served.live.values_stamp:
            return None
        if self._events(ready.table_and_id[1]) is not ready.events:
            return None
        if ready.access is not None:
            sent_answers.touched(ready)
        sent_answers.append(ready)
        if len(sent_answers) >= sent_answers.due:
            sent_answers.flush_or_time()
        age = orjson.dumps(round(self._clock() - ready.data_until, 3))
        return b"".join((ready.head, age, ready.tail))

    def _arm(self) -> None:
        self.answer = self._timed

    def _timed(self, target: bytes) -> bytes | None:
        """Answer and record the time: of one answer per TIMED_EVERY, and of each while generations change."""
        started = self._timer()
        body = self._answer(target)
        if body is not None:
            self._sent_answers.times.append(seconds := self._timer() - started)
            if self._metrics.is_flipping:
                self._metrics.flip_answer_seconds.observe(seconds)
            else:
                self.answer = self._answer
        return body

    def parse_get(self, scope: Scope) -> SingleRequest | None:
        """Parse a GET of one id and look it up in the directory; None for a request that the routes must handle."""
        if not caller_of(scope).may("read"):  # first: what a stranger asks leaves no trace
            return None
        started = self._timer()
        deadline_s, served = self._gate.headers.deadline_s(scope["headers"]), self._get_served()
        if deadline_s is None or served is None:
            return None
        single_lookup = parse_single(scope.get("raw_path") or b"")
        if single_lookup is None or (options := self._queries.of(scope["query_string"])) is None:
            return None
        live = served.live
        table = live.manifest.tables.get(single_lookup.table)
        if table is None or is_k_too_large(table, options.k):
            return None
        record_key, filter_mask = find_plain_record_key(live, table, single_lookup.raw), None
        if options.filter is not None:
            # What passes must be known, and be asked of lists: else the routes behind find out, or say what is wrong.
            if table.kind == "topk" and not table.is_facet:
                filter_mask = self._shaper.cached_mask(live, options)
            if filter_mask is None:
                return None
            record_key = with_filter_table(live, record_key, options)
        options = tighten_deadline(options, deadline_s)
        query = scope["query_string"]
        request = scope["raw_path"] + (b"?" + query if query else b"")
        is_plain = (
            record_key.position >= 0
            and not live.blocks(table, single_lookup.raw)
            and table.name not in live.changed_facets
        )
        if (events := self._events(single_lookup.raw)) is not None:
            is_plain = is_plain and not self._newer_inputs.changes(live, table, single_lookup.raw)
        return SingleRequest(
            served,
            table,
            single_lookup,
            record_key,
            options,
            started,
            request,
            is_plain,
            filter_mask,
            events,
        )

    def try_join(self, parsed_get: SingleRequest) -> asyncio.Future[GroupResult] | None:
        """Return the future answer of a GET that joins a grouped read, which needs no task; None if it cannot join."""
        return self._singles.try_join(parsed_get)

    def finish_joined(self, group_future: asyncio.Future[GroupResult]) -> bytes | None:
        """Return the body of a grouped read, and count it; None if the request must continue on its own."""
        body = group_future.result()
        if not isinstance(body, bytes):
            return None
        self._requests[GET_ROUTE] += 1
        return body

    async def get(
        self, parsed_get: SingleRequest, group_future: asyncio.Future[GroupResult] | None = None
    ) -> Messages | None:
        """Return the answer to a GET of one id, which may have joined a grouped read before."""
        singles = self._singles
        try:
            if group_future is None:
                body = await singles.answer(parsed_get)
            else:
                body = await singles.answer_after_join(parsed_get, group_future.result())
        except Exception:  # the routes behind say what is wrong, and count it
            log.exception("the hot route failed")
            return None
        if body is None:
            return None
        self._requests[GET_ROUTE] += 1
        return self._messages(body)

    async def post(self, scope: Scope, receive: Receive) -> tuple[Messages | None, Receive]:
        """Return the answer to a batch for one table, or None, and a `receive` that replays the request."""
        started, path = self._timer() - waited_in(scope), scope.get("raw_path") or b""
        if not path.startswith(LOOKUP_PREFIX) or not caller_of(scope).may("read"):
            return None, receive
        if (served := self._get_served()) is None:
            return None, receive
        try:
            table = served.live.manifest.tables.get(path[len(LOOKUP_PREFIX) :].decode("ascii"))
        except UnicodeDecodeError:
            return None, receive
        deadline_s = self._gate.headers.deadline_s(scope["headers"])
        if table is None or deadline_s is None:
            return None, receive
        try:
            form = forms(scope["headers"])
        except Problem:  # told by the routes behind
            return None, receive
        body, replay_receive = await self._gate.body(scope, receive)
        # Captured once more: the body may have taken its time.
        if body is None or self._get_served() is not served:
            return None, replay_receive
        try:
            response_body = await self._posted.answer(
                scope, body, form, table, deadline_s, served, started
            )
        except Problem:  # late, which the routes behind would be, too
            raise
        except Exception:  # as above
            log.exception("the hot route failed")
            return None, replay_receive
        if response_body is None:
            return None, replay_receive
        self._requests[POST_ROUTE] += 1
        return _arrow_messages(response_body) if form.response_form == "arrow" else self._messages(
            response_body
        ), replay_receive

    def _get_served(self) -> ServedGenerations | None:
        """Return the generations to answer from; None without any, or if a canary or experiments take some requests."""
        return None if self._holder.is_divided else self._holder.served

    def _messages(self, body: bytes) -> Messages:
        length = len(body)
        start = self._starts.get(length)
        if start is None:
            if len(self._starts) >= _CACHED_STARTS_MAX:
                self._starts.clear()
            start = self._starts[length] = {
                **_RESPONSE_START,
                "headers": [(b"content-length", b"%d" % length), _JSON_HEADER],
            }
        return start, {"type": "http.response.body", "body": body}


def _skip_timing() -> None:
    """Do nothing: the `time_next` of a route that times no answer."""


def _arrow_messages(stream: bytes) -> Messages:
    headers = [(b"content-length", b"%d" % len(stream)), _ARROW_HEADER]
    return {**_RESPONSE_START, "headers": headers}, {"type": "http.response.body", "body": stream}


class SingleLookups:
    """Lookup of single ids from L1 or L2; a result that is no plain record goes to the ladder."""

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
        """Return the body of the response; None if a filtered answer needs more than L1."""
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
            note_stage("stored", self._service.timer() - started_at, 1)
        return await self._finished(get, outcome)

    def try_join(self, get: SingleRequest) -> asyncio.Future[GroupResult] | None:
        """Return the future answer of a lookup that joins a grouped read, which needs no task; None if it cannot join.

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
        """Return the body for a request whose grouped read gave no rendered answer."""
        return await self._finished(
            get, await self._read(get) if group_result is None else group_result
        )

    async def _finished(self, get: SingleRequest, outcome: ReadResult | bytes) -> bytes:
        if isinstance(outcome, bytes):
            return outcome
        rendered = self._rendered(get, outcome) if isinstance(outcome, Hit) else None
        return await self._resolved(get, outcome) if rendered is None else rendered

    async def _read(self, get: SingleRequest) -> ReadResult:
        """Read L2, with a deadline if the request has less time than L2 may take."""
        deadline = None
        if not self._coalescer.has_time(get):
            deadline = self._ladder.l2_deadline(get.options, get.started)  # a clock of its own
        return await self._tiers.get(get.served.live.view, get.record_key, deadline)

    def _filtered(self, get: SingleRequest) -> bytes | None:
        """Return the body made of the list in L1 if enough items pass the filter; else None, and count nothing."""
        view, record_key = get.served.live.view, get.record_key
        hit = self._tiers.inspect(view, record_key)
        if hit is None or (start := self._start(get, hit)) is None:
            return None
        self._tiers.peek(view, record_key)  # now it is a hit
        return self._count_and_finish(get, hit, start)

    def _rendered(self, get: SingleRequest, hit: Hit) -> bytes | None:
        """Return the body made of a stored record, and count it; None if the record is no plain answer."""
        start = self._start(get, hit)
        return None if start is None else self._count_and_finish(get, hit, start)

    def _start(self, get: SingleRequest, hit: Hit) -> bytes | None:
        return answer_start(get.served.live, get.table, hit, get.lookup.id, get.k, get.filter_mask)

    def _count_and_finish(self, get: SingleRequest, hit: Hit, start: bytes) -> bytes:
        live, single_lookup = get.served.live, get.lookup
        name = single_lookup.table, single_lookup.raw
        self._ladder.recent.append(name)
        source = Source.L1 if hit.tier == "l1" else Source.L2
        self._metrics.count_fast_answers(
            single_lookup.table, source, self._service.timer() - get.started
        )
        if source is Source.L2:
            self._watch.count_read(live.generation, single_lookup.table, get.record_key.key)
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
        """Return the body with the ladder's answer; `outcome` is that of the tiers' read, None without one."""
        case = get.pending_answer
        if outcome is not None:
            case.set_result(outcome)
        context = RequestContext.of(get.options, get.started)
        answers = await self._ladder.resolve(get.served, [case], context)
        answer = self._service.attach_staleness(answers)[0]
        self._keep_newer(get, case, answer)
        return orjson.dumps(answer, option=JSON)

    def _keep_newer(self, get: SingleRequest, case: PendingAnswer, answer: AnswerJson) -> None:
        """Keep in L1 an answer with newer events; one that settled for the nightly record is not kept."""
        live, events = get.served.live, get.events
        is_whole = case.counted_events is not None and not case.is_settled
        if events is None or not is_whole or answer["source"] is not Source.L1:
            return
        if "stale" in answer or self._ladder.newer_inputs.packed.get(get.lookup.raw) is not events:
            return
        ready = ready_with_events(live, answer, get.lookup.raw, get.request, events)
        self._tiers.keep(live.view, get.record_key, ready)


class SentAnswers(list[ReadyAnswer]):
    """Sent answers of the live generation in order, not counted yet; `times` has the seconds of the timed ones.

    The caller that appends the answer that is `due` calls `flush_or_time`; a reader of a count calls `flush` first.
    `time_next` is called when the next answer is to be timed. Counted in bulk, answers cost a third of single counts.
    """

    def __init__(
        self,
        service: LookupService,
        clock: Callable[[], float],
        at_turn: Callable[[], None],
    ) -> None:
        super().__init__()
        self.times: list[float] = []
        self.time_next = at_turn
        self._clock = clock
        self._holder = service.follower.holder
        self._local = service.tiers.local
        self._recent, self._observes = service.ladder.recent, service.observes
        self._counters, self._trace = service.tiers.counters, service.tiers.trace
        self._tally, self._answer_seconds = service.metrics.tally, service.metrics.answer_seconds
        self._sampler = service.ladder.watch.sampler
        self._newer_event_answers = service.metrics.changed_answers.answers
        self._step = TIMED_EVERY if self._observes else FLUSH_ANSWERS
        self.due = self._step
        self._recent.flush_pending = self._counters.flush = self.flush

    def flush_or_time(self) -> None:
        """Count all answers if enough were sent, else have the next one timed; called when one is `due`."""
        if len(self) >= FLUSH_ANSWERS:
            self.flush()
        else:
            self.due += self._step
            self.time_next()

    def flush(self) -> None:
        """Count all answers in the list, and clear it."""
        if not self:
            return
        entity_names = list(map(_get_table_and_id, self))
        self._recent.extend(entity_names)
        if self._observes:
            self._count(entity_names)
        self.clear()
        self.times.clear()
        self.due = self._step
        self.time_next()

    def _count(self, entity_names: list[EntityName]) -> None:
        count = len(entity_names)
        self._counters.ready += count
        self._tally.requests[GET_ROUTE] += count
        times = self.times or [0.0]
        for at, seconds in enumerate(times):
            stands_for = count * (at + 1) // len(times) - count * at // len(times)
            self._answer_seconds.observe(Source.L1, seconds, stands_for)
        if any(map(_is_newer, self)):
            self._newer_event_answers.update(
                [
                    _table(ready_answer.table_and_id)
                    for ready_answer in self
                    if ready_answer.is_newer
                ]
            )
        tables = self._local.ready_tables
        count_by_table = (
            dict.fromkeys(tables, count) if len(tables) == 1 else Counter(map(_table, entity_names))
        )
        for name, answer_count in count_by_table.items():
            self._tally.answers[name, Source.L1] += answer_count
        sampler = self._sampler
        sampler.countdown -= count
        if sampler.countdown < 0:
            for index in sampler.draw_indices(count):
                if sampler.has_room():
                    self._sample(self[index])

    def touched(self, ready: ReadyAnswer) -> None:
        """Record that a sampled answer is about to be sent."""
        trace_entry = ready.access
        if trace_entry is not None and trace_entry[0] <= self._trace.last:
            self._trace.append(trace_entry)
        else:  # since its answer was kept the sample shrank
            self._local.unsampled(ready)

    def _sample(self, ready: ReadyAnswer) -> None:
        """Pass an answer to the sampler with its current age; skip an answer from before a flip."""
        served, now_s = self._holder.served, self._clock()
        stamps = () if served is None else (served.live.stamp, served.live.values_stamp)
        if served is not None and ready.stamp in stamps and not ready.is_newer:
            age = orjson.dumps(round(now_s - ready.data_until, 3))
            body = b"".join((ready.head, age, ready.tail))
            self._sampler.put(
                AnswerSample(
                    served.live.generation,
                    *ready.table_and_id,
                    Source.L1,
                    "batch",
                    now_s,
                    body=body,
                )
            )
