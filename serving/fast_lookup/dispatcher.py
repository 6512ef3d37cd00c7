"""The hot route: lookups of plain ids, answered ahead of the router by parse, look up, send.

What it does not recognise (other options, bad input, inputs to compute from, a running canary or experiment) it leaves
to the routes behind it, and ids without a stored answer to the ladder.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import orjson
from starlette.types import Message, Receive, Scope

from serving.access.callers import caller_of
from serving.admission.work_pacer import waited_in
from serving.arrow_ipc.schema import MEDIA_TYPE
from serving.fast_lookup.batch_request import PostedLookups, refuses
from serving.fast_lookup.coalescer import GroupResult
from serving.fast_lookup.ready_counts import SentAnswers
from serving.fast_lookup.single import SingleLookups
from serving.fast_lookup.single_request import SingleRequest
from serving.generations.served_set import ServedGenerations
from serving.lookup.entity import find_plain_record_key, with_filter_table
from serving.lookup.service import LookupService
from serving.metrics.fast_counters import GET_ROUTE
from serving.requests import fast_parse
from serving.requests.bodies import Messages
from serving.requests.errors import Problem
from serving.requests.fast_parse import QueryOptions
from serving.requests.negotiation import JSON_TYPE, forms

_STARTS_MAX = 8_192
_START = {"type": "http.response.start", "status": 200}
_JSON_TYPE = b"content-type", JSON_TYPE.encode()
_ARROW_TYPE = b"content-type", MEDIA_TYPE.encode()
POST_ROUTE = "POST /v1/lookup/{table}"

log = logging.getLogger(__name__)


class FastLookups:
    """The hot route: needs what the routes need, and the tiers; every method answers None for what is not its own."""

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
        self._newer_events = service.ladder.newer_events
        self._events = self._newer_events.packed.get
        self._concerns = service.follower.concerns
        self._metrics = service.metrics
        self._requests = service.metrics.tally.requests
        self.answer = self._answer
        self._sent_answers = SentAnswers(
            service, clock, self._arm if service.observes else _skip_timing
        )
        if service.observes:
            self._metrics.at_flips.append(self._arm)
            self._metrics.tally.flushes.append(self._sent_answers.flush)
            self._arm()
        self._timer, self._clock = service.timer, clock
        self._queries = QueryOptions(service.limits)
        self._is_traced = is_traced
        self._gate = service.gate()
        self._posted = PostedLookups(service, clock)
        self._singles = SingleLookups(service, self._posted.batches, clock)
        self._starts: dict[int, Message] = {}

    def ready(self, scope: Scope) -> Messages | None:
        """The ready answer to a GET whose headers allow one, and that is not traced; None if there is none."""
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
        """Returns whether a lookup with these headers may have a ready answer."""
        return self._gate.can_use_fast_path(headers)

    def _answer(self, target: bytes) -> bytes | None:
        """The body for a GET that was answered before (path and query as they came), from L1, its age as of now."""
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
        """Answers, and records how long that took: for the next answer only, and for each while generations change."""
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
        """A GET of one id, parsed and looked up in the directory; None for what is not this route's."""
        if not caller_of(scope).may("read"):  # first: what a stranger asks leaves no trace
            return None
        started = self._timer()
        deadline_s, served = self._gate.headers.deadline_s(scope["headers"]), self._get_served()
        if deadline_s is None or served is None:
            return None
        single_lookup = fast_parse.single(scope.get("raw_path") or b"")
        if single_lookup is None or (options := self._queries.of(scope["query_string"])) is None:
            return None
        live = served.live
        table = live.manifest.tables.get(single_lookup.table)
        if table is None or refuses(table, options.k):
            return None
        record_key, filter_mask = find_plain_record_key(live, table, single_lookup.raw), None
        if options.filter is not None:
            # What passes must be known, and be asked of lists: else the routes behind find out, or say what is wrong.
            if live.filtering is not None and table.kind == "topk" and not table.is_facet:
                filter_mask = live.filtering.get_cached(options.filter)
            if filter_mask is None:
                return None
            record_key = with_filter_table(live, record_key, options)
        options = fast_parse.tighter(options, deadline_s)
        query = scope["query_string"]
        request = scope["raw_path"] + (b"?" + query if query else b"")
        is_plain = (
            record_key.position >= 0
            and not live.blocks(table, single_lookup.raw)
            and live.changed_facet(table) is None
        )
        if (events := self._events(single_lookup.raw)) is not None:
            is_plain = is_plain and not self._newer_events.changes(live, table, single_lookup.raw)
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
        """The future answer to a GET that goes along with others, which needs no task; None if it does not."""
        return self._singles.try_join(parsed_get)

    def finish_joined(self, group_future: asyncio.Future[GroupResult]) -> bytes | None:
        """The body that came with those of others, counted; None if whoever joined has to go on alone."""
        body = group_future.result()
        if not isinstance(body, bytes):
            return None
        self._requests[GET_ROUTE] += 1
        return body

    async def get(
        self, parsed_get: SingleRequest, group_future: asyncio.Future[GroupResult] | None = None
    ) -> Messages | None:
        """The answer to a GET of one id, which may have joined others before."""
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
        """The answer to a batch for one table, and from where the request can still be read if there is none."""
        started, path = self._timer() - waited_in(scope), scope.get("raw_path") or b""
        if not path.startswith(fast_parse.PREFIX) or not caller_of(scope).may("read"):
            return None, receive
        if (served := self._get_served()) is None:
            return None, receive
        try:
            table = served.live.manifest.tables.get(path[len(fast_parse.PREFIX) :].decode("ascii"))
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
        return _arrow(response_body) if form.response_form == "arrow" else self._messages(
            response_body
        ), replay_receive

    def _get_served(self) -> ServedGenerations | None:
        """The generations to answer from; None while there are none, or a canary or experiments take some requests."""
        return None if self._holder.is_divided else self._holder.served

    def _messages(self, body: bytes) -> Messages:
        length = len(body)
        start = self._starts.get(length)
        if start is None:
            if len(self._starts) >= _STARTS_MAX:
                self._starts.clear()
            start = self._starts[length] = {
                **_START,
                "headers": [(b"content-length", b"%d" % length), _JSON_TYPE],
            }
        return start, {"type": "http.response.body", "body": body}


def _skip_timing() -> None:
    """Times no answer."""


def _arrow(stream: bytes) -> Messages:
    headers = [(b"content-length", b"%d" % len(stream)), _ARROW_TYPE]
    return {**_START, "headers": headers}, {"type": "http.response.body", "body": stream}
