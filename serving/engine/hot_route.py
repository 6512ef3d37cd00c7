"""Fast path: plain lookups answered before the router, from L1 or by one read of L2, and counted in bulk.

All other requests (other options, bad input, inputs to compute from, a running canary or experiment) are left to the
routes, and ids without a stored answer to the ladder.
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
from serving.admission.work_pacer import noted_wait_s
from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.engine.answer_builder import RequestContext
from serving.engine.answer_observer import AnswerSample, EntityName
from serving.engine.batch_lookup import BatchLookups, PostedLookups, is_k_too_large
from serving.engine.coalescer import GetCoalescer, GroupResult, SingleRequest
from serving.engine.entity import PendingAnswer, find_plain_record_key, with_filter_table
from serving.engine.rendering.answer_fields import JSON_OPTIONS, AnswerJson
from serving.engine.rendering.json_answers import answer_start, ready_with_events
from serving.engine.service import LookupService
from serving.generations.served_set import ServedGenerations
from serving.metrics.collectors import GET_ROUTE
from serving.requests.answers import Source
from serving.requests.bodies import ResponseMessages
from serving.requests.errors import Problem
from serving.requests.negotiation import JSON_MEDIA_TYPE, parse_forms
from serving.requests.parsing import LOOKUP_PATH_PREFIX, QueryOptionsCache, parse_single_lookup, tighten_deadline
from serving.requests.request_record import note_stage

log = logging.getLogger(__name__)

POST_ROUTE = "POST /v1/lookup/{table}"

FLUSHED_ANSWER_COUNT = 256
"""Answers counted at once, to share the fixed cost of counting."""

ANSWERS_PER_TIMED_ONE = 128
"""Number of answers of which one is timed; its time counts for all of them."""

_CACHED_START_MESSAGES_MAX = 8_192
_START_MESSAGE = {"type": "http.response.start", "status": 200}
_JSON_HEADER = b"content-type", JSON_MEDIA_TYPE.encode()
_ARROW_HEADER = b"content-type", ARROW_MEDIA_TYPE.encode()
_get_table_and_id, _get_table, _get_is_newer = (itemgetter(4), itemgetter(0), attrgetter("has_newer_events"))


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
        self._find_ready_answer = tiers.local_tier.find_ready_answer
        self._shaper, self._newer_inputs = service.ladder.shaper, service.ladder.newer_inputs
        self._get_packed_events = self._newer_inputs.packed_input_by_id.get
        self._concerns = service.follower.concerns
        self._metrics = service.metrics
        self._requests_by_route = service.metrics.tally.request_count_by_route
        self.answer = self._answer_ready
        self._sent_answers = SentAnswers(
            service, clock, self._time_next_answer if service.observes_answers else _skip_timing
        )
        if service.observes_answers:
            self._metrics.flip_callbacks.append(self._time_next_answer)
            self._metrics.tally.flush_callbacks.append(self._sent_answers.flush)
            self._time_next_answer()
        self._monotonic_clock, self._clock = service.monotonic_clock, clock
        self._options_by_query = QueryOptionsCache(service.limits)
        self._is_traced = is_traced
        self._admission_gate = service.create_gate()
        self._posted_lookups = PostedLookups(service, clock)
        self._single_lookups = SingleLookups(service, self._posted_lookups.batches, clock)
        self._start_message_by_length: dict[int, Message] = {}

    def ready(self, scope: Scope) -> ResponseMessages | None:
        """Return the ready answer to an untraced GET with plain headers; None without one."""
        caller = caller_of(scope)
        if not caller.may_use_scope("read") or caller.quota is not None:  # a quota is charged elsewhere
            return None
        if not self.can_use_fast_path(scope["headers"]) or (self._is_traced and self._is_traced(scope)):
            return None
        query, path = scope["query_string"], scope.get("raw_path") or b""
        body = self.answer(path + b"?" + query if query else path)
        return None if body is None else self._response_messages(body)

    def can_use_fast_path(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """True if a lookup with these headers may have a ready answer."""
        return self._admission_gate.can_use_fast_path(headers)

    def _answer_ready(self, request_target: bytes) -> bytes | None:
        """Return the ready body in L1 for exactly this path and query, with its current age; None without one."""
        ready_answer = self._find_ready_answer(request_target)
        if ready_answer is None:
            return None
        served, sent_answers = self._holder.served, self._sent_answers
        if served is None or self._holder.is_divided or self._concerns.reasons_text is not None:
            return None
        if ready_answer.state_stamp != served.live.stamp and ready_answer.state_stamp != served.live.item_values_stamp:
            return None
        if self._get_packed_events(ready_answer.table_and_id[1]) is not ready_answer.user_events:
            return None
        if ready_answer.sampled_access is not None:
            sent_answers.note_access(ready_answer)
        sent_answers.append(ready_answer)
        if len(sent_answers) >= sent_answers.due_length:
            sent_answers.flush_or_time()
        age_json = orjson.dumps(round(self._clock() - ready_answer.data_until, 3))
        return b"".join((ready_answer.body_head, age_json, ready_answer.body_tail))

    def _time_next_answer(self) -> None:
        self.answer = self._answer_timed

    def _answer_timed(self, request_target: bytes) -> bytes | None:
        """Answer and record the time; used for one of many answers, and for each while generations change."""
        answer_started_at = self._monotonic_clock()
        body = self._answer_ready(request_target)
        if body is not None:
            self._sent_answers.timed_answer_seconds.append(answer_s := self._monotonic_clock() - answer_started_at)
            if self._metrics.is_flipping:
                self._metrics.flip_answer_seconds.observe(answer_s)
            else:
                self.answer = self._answer_ready
        return body

    def parse_get(self, scope: Scope) -> SingleRequest | None:
        """Parse a GET of one id and look it up in the directory; None for a request that the routes must handle."""
        if not caller_of(scope).may_use_scope("read"):  # first: requests of unknown callers must not change any state
            return None
        started = self._monotonic_clock()
        deadline_s, served = (self._admission_gate.headers.deadline_s(scope["headers"]), self._get_served())
        if deadline_s is None or served is None:
            return None
        single_lookup = parse_single_lookup(scope.get("raw_path") or b"")
        if single_lookup is None or (options := self._options_by_query.of(scope["query_string"])) is None:
            return None
        live = served.live
        table = live.manifest.tables.get(single_lookup.table)
        if table is None or is_k_too_large(table, options.k):
            return None
        record_key, filter_mask = find_plain_record_key(live, table, single_lookup.raw_id), None
        if options.filter is not None:
            # The filter's mask must be cached, and the table must have lists; otherwise the routes evaluate or refuse
            # it.
            if table.kind == "topk" and not table.is_facet:
                filter_mask = self._shaper.cached_mask(live, options)
            if filter_mask is None:
                return None
            record_key = with_filter_table(live, record_key, options)
        options = tighten_deadline(options, deadline_s)
        query = scope["query_string"]
        request_target = scope["raw_path"] + (b"?" + query if query else b"")
        is_plain = (
            record_key.directory_position >= 0
            and not live.blocks_entity(table, single_lookup.raw_id)
            and table.name not in live.changed_values_by_facet
        )
        if (events := self._get_packed_events(single_lookup.raw_id)) is not None:
            is_plain = is_plain and not self._newer_inputs.changes_answer(live, table, single_lookup.raw_id)
        return SingleRequest(
            served, table, single_lookup, record_key, options, started, request_target, is_plain, filter_mask, events
        )

    def try_join(self, parsed_get: SingleRequest) -> asyncio.Future[GroupResult] | None:
        """Return the future answer of a GET that joins a grouped read, which needs no task; None if it cannot join."""
        return self._single_lookups.try_join(parsed_get)

    def finish_joined(self, group_future: asyncio.Future[GroupResult]) -> bytes | None:
        """Return the body of a grouped read, and count it; None if the request must continue on its own."""
        body = group_future.result()
        if not isinstance(body, bytes):
            return None
        self._requests_by_route[GET_ROUTE] += 1
        return body

    async def get(
        self, parsed_get: SingleRequest, group_future: asyncio.Future[GroupResult] | None = None
    ) -> ResponseMessages | None:
        """Return the answer to a GET of one id, which may have joined a grouped read before."""
        single_lookups = self._single_lookups
        try:
            if group_future is None:
                body = await single_lookups.answer(parsed_get)
            else:
                body = await single_lookups.answer_after_join(parsed_get, group_future.result())
        except Exception:  # the routes report the error and count it
            log.exception("the hot route failed")
            return None
        if body is None:
            return None
        self._requests_by_route[GET_ROUTE] += 1
        return self._response_messages(body)

    async def post(self, scope: Scope, receive: Receive) -> tuple[ResponseMessages | None, Receive]:
        """Return the answer to a batch for one table, or None, and a `receive` that replays the request."""
        started, path = self._monotonic_clock() - noted_wait_s(scope), scope.get("raw_path") or b""
        if not path.startswith(LOOKUP_PATH_PREFIX) or not caller_of(scope).may_use_scope("read"):
            return None, receive
        if scope["query_string"]:  # the routes refuse it
            return None, receive
        if (served := self._get_served()) is None:
            return None, receive
        try:
            table = served.live.manifest.tables.get(path[len(LOOKUP_PATH_PREFIX) :].decode("ascii"))
        except UnicodeDecodeError:
            return None, receive
        deadline_s = self._admission_gate.headers.deadline_s(scope["headers"])
        if table is None or deadline_s is None:
            return None, receive
        try:
            form = parse_forms(scope["headers"])
        except Problem:  # the routes refuse it
            return None, receive
        body, replay_receive = await self._admission_gate.read_body(scope, receive)
        # Captured again: generations may have changed while the body arrived.
        if body is None or self._get_served() is not served:
            return None, replay_receive
        try:
            response_body = await self._posted_lookups.answer(scope, body, form, table, deadline_s, served, started)
        except Problem:  # the deadline has passed, for the routes as well
            raise
        except Exception:  # the routes answer instead, or report the error
            log.exception("the hot route failed")
            return None, replay_receive
        if response_body is None:
            return None, replay_receive
        self._requests_by_route[POST_ROUTE] += 1
        return _arrow_messages(response_body) if form.response_form == "arrow" else self._response_messages(
            response_body
        ), replay_receive

    def _get_served(self) -> ServedGenerations | None:
        """Return the generations to answer from; None without any, or if a canary or experiments take some requests."""
        return None if self._holder.is_divided else self._holder.served

    def _response_messages(self, answer_json: bytes) -> ResponseMessages:
        body_bytes = len(answer_json)
        start_message = self._start_message_by_length.get(body_bytes)
        if start_message is None:
            if len(self._start_message_by_length) >= _CACHED_START_MESSAGES_MAX:
                self._start_message_by_length.clear()
            start_message = self._start_message_by_length[body_bytes] = {
                **_START_MESSAGE,
                "headers": [(b"content-length", b"%d" % body_bytes), _JSON_HEADER],
            }
        return start_message, {"type": "http.response.body", "body": answer_json}


def _skip_timing() -> None:
    """Do nothing: default of `time_next_answer`, for routes that time no answers."""


def _arrow_messages(arrow_stream: bytes) -> ResponseMessages:
    headers = [(b"content-length", b"%d" % len(arrow_stream)), _ARROW_HEADER]
    return {**_START_MESSAGE, "headers": headers}, {"type": "http.response.body", "body": arrow_stream}


class SingleLookups:
    """Lookup of single ids from L1 or L2; if the result is not a plain record, the ladder answers."""

    def __init__(self, service: LookupService, batches: BatchLookups, clock: Callable[[], float]) -> None:
        self._service = service
        self._tiers = service.tiers
        self._ladder = service.ladder
        self._metrics = service.metrics
        self._observer = service.ladder.observer
        self._batches = batches
        self._clock = clock
        self._coalescer = GetCoalescer(service, batches, clock)

    async def answer(self, single_request: SingleRequest) -> bytes | None:
        """Return the body of the response; None if a filtered answer needs more than L1."""
        if single_request.filter_mask is not None:
            return self._render_filtered(single_request) if single_request.may_use_nightly_record else None
        if not single_request.may_use_nightly_record:
            self._metrics.stage("parse", self._service.monotonic_clock() - single_request.request_started_at)
            return await self._resolve_by_ladder(single_request, None)
        read_result_or_body: ReadResult | bytes | None = self._tiers.peek(
            single_request.served.live.view, single_request.record_key
        )
        if read_result_or_body is None:
            coalescer, started_at = self._coalescer, self._service.monotonic_clock()
            if coalescer.has_time_for_l2(single_request) and coalescer.note_arrival():
                read_result_or_body = await coalescer.join(single_request)
            if read_result_or_body is None:
                read_result_or_body = await self._read_l2(single_request)
            note_stage("stored", self._service.monotonic_clock() - started_at, 1)
        return await self._finish_outcome(single_request, read_result_or_body)

    def try_join(self, single_request: SingleRequest) -> asyncio.Future[GroupResult] | None:
        """Return the future answer of a lookup that joins a grouped read, which needs no task; None if it cannot join.

        With 32 lookups in flight a task for each would cost 2 of 24 us, 7 % of an L2 lookup's processor time.
        """
        coalescer, live = self._coalescer, single_request.served.live
        is_plain = single_request.may_use_nightly_record and single_request.filter_mask is None
        if not (is_plain and coalescer.is_busy and coalescer.has_time_for_l2(single_request)):
            return None
        local_key = LocalKey(live.generation, single_request.lookup.table, single_request.record_key.hash_or_digest)
        if self._tiers.local_tier.inspect(local_key) is not None:
            return None  # L1 has it: no need to wait for a grouped read
        coalescer.note_arrival()
        return coalescer.join(single_request)

    async def answer_after_join(self, single_request: SingleRequest, group_result: GroupResult) -> bytes:
        """Return the body for a request whose grouped read gave no rendered answer."""
        return await self._finish_outcome(
            single_request, await self._read_l2(single_request) if group_result is None else group_result
        )

    async def _finish_outcome(self, single_request: SingleRequest, read_result_or_body: ReadResult | bytes) -> bytes:
        if isinstance(read_result_or_body, bytes):
            return read_result_or_body
        rendered = (
            self._render_stored(single_request, read_result_or_body) if isinstance(read_result_or_body, Hit) else None
        )
        return await self._resolve_by_ladder(single_request, read_result_or_body) if rendered is None else rendered

    async def _read_l2(self, single_request: SingleRequest) -> ReadResult:
        """Read L2, with a deadline if the request has less time than L2 may take."""
        deadline = None
        if not self._coalescer.has_time_for_l2(single_request):
            deadline = self._ladder.l2_deadline(
                single_request.options, single_request.request_started_at
            )  # needs a deadline
        return await self._tiers.get(single_request.served.live.view, single_request.record_key, deadline)

    def _render_filtered(self, single_request: SingleRequest) -> bytes | None:
        """Return the body made from the list in L1 if enough items pass the filter; else None without counting."""
        view, record_key = single_request.served.live.view, single_request.record_key
        hit = self._tiers.inspect(view, record_key)
        if hit is None or (body_start := self._render_start(single_request, hit)) is None:
            return None
        self._tiers.peek(view, record_key)  # it is certain only now that this is a hit
        return self._count_and_finish(single_request, hit, body_start)

    def _render_stored(self, single_request: SingleRequest, hit: Hit) -> bytes | None:
        """Return the body made from a stored record, and count it; None if the record is not a plain answer."""
        body_start = self._render_start(single_request, hit)
        return None if body_start is None else self._count_and_finish(single_request, hit, body_start)

    def _render_start(self, single_request: SingleRequest, hit: Hit) -> bytes | None:
        return answer_start(
            single_request.served.live,
            single_request.table,
            hit,
            single_request.lookup.id,
            single_request.k,
            single_request.filter_mask,
        )

    def _count_and_finish(self, single_request: SingleRequest, hit: Hit, answer_start: bytes) -> bytes:
        live, single_lookup = single_request.served.live, single_request.lookup
        entity_name = single_lookup.table, single_lookup.raw_id
        self._ladder.recent_names.append(entity_name)
        source = Source.L1 if hit.tier == "l1" else Source.L2
        self._metrics.count_fast_answers(
            single_lookup.table, source, self._service.monotonic_clock() - single_request.request_started_at
        )
        if source is Source.L2:
            self._observer.count_read(live.generation, single_lookup.table, single_request.record_key.hash_or_digest)
        sampler = self._observer.sampler
        sampler.countdown -= 1
        if sampler.countdown < 0:
            sampler.draw_indices(1)
            sampler.put(AnswerSample(
                live.generation, *entity_name, source, "batch", self._clock(), single_request.k, hit.record
            ))  # fmt: skip
        static_tail = self._batches.get_static_tail(live)
        if source is Source.L1 and static_tail.stale_reason is None:
            depends_on_attributes = single_request.filter_mask is not None or single_request.table.is_facet
            ready_answer = static_tail.build_ready_answer(
                answer_start,
                entity_name,
                single_request.request_target,
                single_request.packed_user_events,
                depends_on_item_attributes=depends_on_attributes,
            )
            self._tiers.keep(live.view, single_request.record_key, ready_answer)
        return answer_start + static_tail.end_of_answer(source, self._clock())

    async def _resolve_by_ladder(self, single_request: SingleRequest, outcome: ReadResult | None) -> bytes:
        """Return the body with the ladder's answer; `outcome` is that of the tiers' read, None without one."""
        pending = single_request.pending_answer
        if outcome is not None:
            pending.set_read_result(outcome)
        context = RequestContext.of(single_request.options, single_request.request_started_at)
        answers = await self._ladder.resolve(single_request.served, [pending], context)
        answer = self._service.attach_staleness(answers)[0]
        self._keep_newer_answer(single_request, pending, answer)
        return orjson.dumps(answer, option=JSON_OPTIONS)

    def _keep_newer_answer(self, single_request: SingleRequest, pending: PendingAnswer, answer: AnswerJson) -> None:
        """Keep an answer with newer events in L1, unless it settled for the nightly record."""
        live, events = single_request.served.live, single_request.packed_user_events
        is_whole = pending.counted_events is not None and not pending.is_settled_for_stored
        if events is None or not is_whole or answer["source"] is not Source.L1:
            return
        if (
            "stale" in answer
            or self._ladder.newer_inputs.packed_input_by_id.get(single_request.lookup.raw_id) is not events
        ):
            return
        ready_answer = ready_with_events(
            live, answer, single_request.lookup.raw_id, single_request.request_target, events
        )
        self._tiers.keep(live.view, single_request.record_key, ready_answer)


class SentAnswers(list[ReadyAnswer]):
    """Sent answers of the live generation, in order, not counted yet; `timed_answer_seconds` are of timed ones.

    Code that appends calls `flush_or_time` at a length of `due_length`; code that reads counts calls `flush` first.
    `time_next_answer` is called when the next answer has to be timed. Counting in bulk costs a third of single counts.
    """

    def __init__(
        self, service: LookupService, clock: Callable[[], float], time_next_answer: Callable[[], None]
    ) -> None:
        super().__init__()
        self.timed_answer_seconds: list[float] = []
        self.time_next_answer = time_next_answer
        self._clock = clock
        self._holder = service.follower.holder
        self._local = service.tiers.local_tier
        self._recent, self._observes = service.ladder.recent_names, service.observes_answers
        self._counters, self._trace = service.tiers.counters, service.tiers.access_trace
        self._tally, self._answer_seconds = service.metrics.tally, service.metrics.answer_seconds
        self._sampler = service.ladder.observer.sampler
        self._newer_event_answers = service.metrics.changed_answers.answer_count_by_table
        self._timing_step = ANSWERS_PER_TIMED_ONE if self._observes else FLUSHED_ANSWER_COUNT
        self.due_length = self._timing_step
        self._recent.flush_pending = self._counters.add_pending_ready_answers = self.flush

    def flush_or_time(self) -> None:
        """Count all answers if enough were sent, else have the next answer timed; called at `due_length`."""
        if len(self) >= FLUSHED_ANSWER_COUNT:
            self.flush()
        else:
            self.due_length += self._timing_step
            self.time_next_answer()

    def flush(self) -> None:
        """Count all answers in the list, and clear it."""
        if not self:
            return
        entity_names = list(map(_get_table_and_id, self))
        self._recent.extend(entity_names)
        if self._observes:
            self._count_answers(entity_names)
        self.clear()
        self.timed_answer_seconds.clear()
        self.due_length = self._timing_step
        self.time_next_answer()

    def _count_answers(self, entity_names: list[EntityName]) -> None:
        sent_count = len(entity_names)
        self._counters.ready_answers += sent_count
        self._tally.request_count_by_route[GET_ROUTE] += sent_count
        answer_seconds = self.timed_answer_seconds or [0.0]
        for time_index, seconds in enumerate(answer_seconds):
            represented_count = sent_count * (time_index + 1) // len(answer_seconds) - sent_count * time_index // len(
                answer_seconds
            )
            self._answer_seconds.observe(Source.L1, seconds, represented_count)
        if any(map(_get_is_newer, self)):
            self._newer_event_answers.update(
                [_get_table(ready_answer.table_and_id) for ready_answer in self if ready_answer.has_newer_events]
            )
        ready_tables = self._local.ready_tables
        count_by_table = (
            dict.fromkeys(ready_tables, sent_count)
            if len(ready_tables) == 1
            else Counter(map(_get_table, entity_names))
        )
        for table_name, answer_count in count_by_table.items():
            self._tally.answer_counts[table_name, Source.L1] += answer_count
        sampler = self._sampler
        sampler.countdown -= sent_count
        if sampler.countdown < 0:
            for index in sampler.draw_indices(sent_count):
                if sampler.has_room_for_sample():
                    self._offer_to_sampler(self[index])

    def note_access(self, ready_answer: ReadyAnswer) -> None:
        """Record that a sampled answer is about to be sent."""
        trace_entry = ready_answer.sampled_access
        if trace_entry is not None and trace_entry[0] <= self._trace.greatest_sampled_spot:
            self._trace.append(trace_entry)
        else:  # the sample has shrunk since the answer was kept
            self._local.drop_access(ready_answer)

    def _offer_to_sampler(self, ready_answer: ReadyAnswer) -> None:
        """Pass an answer to the sampler with its current age; skip an answer from before a flip."""
        served, now_s = self._holder.served, self._clock()
        live_stamps = () if served is None else (served.live.stamp, served.live.item_values_stamp)
        if served is not None and ready_answer.state_stamp in live_stamps and not ready_answer.has_newer_events:
            age_json = orjson.dumps(round(now_s - ready_answer.data_until, 3))
            body = b"".join((ready_answer.body_head, age_json, ready_answer.body_tail))
            self._sampler.put(
                AnswerSample(
                    served.live.generation, *ready_answer.table_and_id, Source.L1, "batch", now_s, answer_json=body
                )
            )
