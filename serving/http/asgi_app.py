"""ASGI application: FastAPI behind admission and an observer, with an optional fast path before both."""

import asyncio
import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from urllib.parse import unquote

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from serving.access.callers import Callers, caller_of, enter_quota
from serving.admission.controller import Admission
from serving.admission.gate import OVERLOADED_MESSAGES, AdmissionGate, refusal_messages
from serving.admission.work_pacer import CURRENT_PACER, IS_GONE_KEY, CallerGone, store_wait
from serving.http.openapi import ApiPaths
from serving.replica.hooks import RequestWatch
from serving.requests.bodies import BODIES_BYTES_MAX, BodyBudget, ResponseMessages
from serving.requests.errors import Problem

ADMITTED_KEY = "larder.admitted"
"""Key in the scope of a request that `refuse_if_overloaded` has already admitted."""


class ParsedGet(Protocol):
    """Parsed GET of one id; `may_use_nightly_record` if a nightly record may answer it."""

    @property
    def may_use_nightly_record(self) -> bool:
        """True if the night knows the id and it is not blocked."""


class FastPath(Protocol):
    """Fast path to some answers; if a method returns None, the request takes the complete path."""

    def answer(self, request_target: bytes) -> bytes | None:
        """Return the body of a ready answer to a GET of this path and query."""

    def can_use_fast_path(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """True if a lookup with these headers may have a ready answer."""

    def ready(self, scope: Scope) -> ResponseMessages | None:
        """Return the ready answer to a GET."""

    def parse_get(self, scope: Scope) -> ParsedGet | None:
        """Parse a GET of one id."""

    def try_join(self, parsed_get: Any) -> asyncio.Future[Any] | None:
        """Return the future answer of a GET that joins a grouped read, which needs no task; None if it cannot join."""

    def finish_joined(self, group_future: asyncio.Future[Any]) -> bytes | None:
        """Return the body of a grouped read; None if the request must continue on its own."""

    async def get(self, parsed_get: Any, group_future: asyncio.Future[Any] | None = None) -> ResponseMessages | None:
        """Return the answer to a parsed GET, which may have joined a grouped read."""

    async def post(self, scope: Scope, receive: Receive) -> tuple[ResponseMessages | None, Receive]:
        """Return the answer to a batch for one table, or None, and a `receive` that replays the request."""


class _AdmissionSlot:
    """Admission of a request below L1; ends when its response starts, since a peer might never read the response."""

    __slots__ = ("_admission", "_is_held", "_send")

    def __init__(self, admission: Admission, send: Send) -> None:
        self._admission, self._send = admission, send
        self._is_held = True

    async def send(self, message: Message) -> None:
        """Leave the admission, then pass the message on."""
        self.leave()
        await self._send(message)

    def leave(self) -> None:
        """Leave the admission; further calls do nothing."""
        if self._is_held:
            self._is_held = False
            self._admission.leave()


class AsgiApp(FastAPI):
    """FastAPI with observer, admission and bounds. Without a `gate` it is plain FastAPI."""

    def __init__(self, *, api_paths: ApiPaths, bodies_bytes_max: int = BODIES_BYTES_MAX, **settings: Any) -> None:
        super().__init__(**settings)
        self.api_paths = api_paths
        self.body_budget = BodyBudget(bodies_bytes_max)
        self.callers = Callers(answers_without_token=True)
        self.has_room_for_answer: Callable[[], bool] = _has_always_room
        """Callback that returns whether unread answers leave room for a large one."""
        self.gate: AdmissionGate | None = None
        self.request_watch: RequestWatch | None = None
        self.fast_path: FastPath | None = None
        self.untraced_fast: FastPath | None = None  # None if requests may be traced
        self.openapi_document: dict[str, Any] = {}
        """OpenAPI document; set once the routes are known."""

    def openapi(self) -> dict[str, Any]:
        """Return the service's own document: newer FastAPIs replace a stored `openapi_schema` when routes change."""
        return self.openapi_document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request or the lifespan; ready answers are sent under any load, since a refusal costs as much."""
        gate, fast_path = self.gate, self.fast_path
        if scope["type"] == "http":
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}  # the server leaves the body out (RFC 9110, section 9.3.2)
            if scope["path"].startswith(self.api_paths.scoped_prefixes):
                self.callers.identify_and_count(scope)
        if gate is None or scope["type"] != "http":
            await super().__call__(scope, receive, send)
        elif scope["method"] != "GET":
            with self.body_budget.of(receive) as counted_receive:
                await self._answer_watched(gate, scope, counted_receive, send)
        elif fast_path is not None and (answer := fast_path.ready(scope)) is not None:
            await _send_messages(answer, send)
        else:
            await self._answer_watched(gate, scope, receive, send)

    async def _answer_watched(self, gate: AdmissionGate, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request without a ready answer, under the observer if one is set."""
        request_watch = self.request_watch
        answer_below = self._answer_admitted if caller_of(scope).quota is None else self._answer_within_quota
        if request_watch is None:
            await answer_below(gate, scope, receive, send)
        elif self.fast_path is not None and scope["method"] == "GET" and request_watch.leaves_unobserved(scope):
            # The observer is still used if the fast path does not answer.
            await answer_below(gate, scope, receive, send, request_watch)
        else:
            await request_watch(functools.partial(answer_below, gate), scope, receive, send)

    async def _answer_within_quota(
        self, gate: AdmissionGate, scope: Scope, receive: Receive, send: Send, request_watch: RequestWatch | None = None
    ) -> None:
        """Answer a request of a caller with a quota, in flight until its response is sent."""
        try:
            is_get = scope["method"] == "GET"
            is_of_one = is_get and scope["path"].startswith(self.api_paths.single_entity_prefixes)
            quota_context = enter_quota(scope, is_of_one_entity=is_of_one)
        except Problem as problem:
            await _send_messages(gate.count_if_refused(refusal_messages(problem)), send)
            return
        with quota_context:
            await self._answer_admitted(gate, scope, receive, send, request_watch)

    async def _answer_admitted(
        self, gate: AdmissionGate, scope: Scope, receive: Receive, send: Send, request_watch: RequestWatch | None = None
    ) -> None:
        """Answer a request that has no ready answer; lookups, scores and explanations need admission."""
        if not scope["path"].startswith(self.api_paths.limited_prefixes):  # the decoded path, as the router uses it
            await self._answer_by_routes(None, scope, receive, send, request_watch)
            return
        answer, is_short = OVERLOADED_MESSAGES, scope["method"] == "GET"
        if gate.admission.enter():
            admission_slot = _AdmissionSlot(gate.admission, send)
            pacer = gate.admission.work_pacer
            pacer_token = CURRENT_PACER.set(pacer)
            try:
                waited_s = await pacer.wait_to_begin(scope.get(IS_GONE_KEY, _is_never_gone), is_short_request=is_short)
                if waited_s:
                    store_wait(scope, waited_s)
                timely_receive: Receive | None = receive
                if gate.admission.may_be_late(waited_s):
                    timely_receive = await gate.receive_unless_late(scope, receive, waited_s)
                response_messages: ResponseMessages | None = OVERLOADED_MESSAGES
                if not is_short and not self.has_room_for_answer():
                    gate.admission.shed_counts["full"] += 1
                elif timely_receive is not None:
                    response_messages, parsed_get, receive = await self._answer_fast(gate, scope, timely_receive)
                if response_messages is None:
                    await self._answer_by_routes(parsed_get, scope, receive, admission_slot.send, request_watch)
                    return
                answer = response_messages
            except CallerGone:
                gate.admission.shed_counts["gone"] += 1
                return
            except Problem as problem:
                answer = refusal_messages(problem)
            finally:
                CURRENT_PACER.reset(pacer_token)
                admission_slot.leave()
        await _send_messages(gate.count_if_refused(answer), send)

    async def _answer_fast(
        self, gate: AdmissionGate, scope: Scope, receive: Receive
    ) -> tuple[ResponseMessages | None, ParsedGet | None, Receive]:
        """Return the answer of the fast path, or a refusal; else the parsed request and a `receive` for the routes."""
        fast_path, answer, parsed_get = self.fast_path, None, None
        is_post = scope["method"] == "POST"
        if fast_path is not None and scope["method"] == "GET" and (parsed_get := fast_path.parse_get(scope)):
            answer = await fast_path.get(parsed_get) if parsed_get.may_use_nightly_record else None
        if answer is None and ADMITTED_KEY not in scope and not gate.admission.admit_costly():
            return OVERLOADED_MESSAGES, None, receive
        if fast_path is not None and is_post:
            answer, receive = await fast_path.post(scope, receive)
        return answer, parsed_get, receive

    async def _answer_by_routes(
        self,
        parsed_get: ParsedGet | None,
        scope: Scope,
        receive: Receive,
        send: Send,
        request_watch: RequestWatch | None,
    ) -> None:
        """Take the complete path: a parsed GET goes to the ladder, any other request through the router."""
        answer_below = super().__call__
        if parsed_get is not None and not parsed_get.may_use_nightly_record:
            answer_below = functools.partial(self._answer_parsed_get, parsed_get)
        if request_watch is not None:
            await request_watch(answer_below, scope, receive, send)
        else:
            await answer_below(scope, receive, send)

    async def _answer_parsed_get(self, parsed_get: ParsedGet, scope: Scope, receive: Receive, send: Send) -> None:
        answer = None if self.fast_path is None else await self.fast_path.get(parsed_get)
        if answer is not None:
            await _send_messages(answer, send)
        elif "type" in scope:  # `LookupConnection` passes a partial scope
            await super().__call__(scope, receive, send)

    def try_join(self, parsed_get: ParsedGet) -> asyncio.Future[Any] | None:
        """Return the future for `finish_joined` and `answer_after_join` if a GET joins a grouped read, else None."""
        gate, fast_path = self.gate, self.fast_path
        if gate is None or fast_path is None:
            return None
        admission = gate.admission
        if admission.requests_under_way >= admission.requests_max or admission.is_loop_behind:
            return None
        group_future = fast_path.try_join(parsed_get)
        if group_future is not None:
            admission.enter()
        return group_future

    def finish_joined(self, group_future: asyncio.Future[Any]) -> bytes | None:
        """Return the body of a grouped read; None if `answer_after_join` must find it."""
        gate, fast_path = self.gate, self.fast_path
        body = None if fast_path is None else fast_path.finish_joined(group_future)
        if body is not None and gate is not None:
            gate.admission.leave()
        return body

    async def answer_after_join(
        self, parsed_get: ParsedGet, group_future: asyncio.Future[Any]
    ) -> ResponseMessages | None:
        """Return the answer to a GET whose grouped read gave no answer; None if it needs a router."""
        gate, fast_path = self.gate, self.fast_path
        try:
            return None if fast_path is None else await fast_path.get(parsed_get, group_future)
        finally:
            if gate is not None:
                gate.admission.leave()

    async def answer_get(self, parsed_get: ParsedGet, scope: Scope) -> ResponseMessages | None:
        """Return the answer or refusal of a GET of one id without a router; None if it needs one."""
        gate, fast_path = self.gate, self.fast_path
        if gate is None or fast_path is None:
            return None
        answer = OVERLOADED_MESSAGES
        if gate.admission.enter():
            pacer = gate.admission.work_pacer
            pacer_token = CURRENT_PACER.set(pacer)
            try:
                waited_s = await pacer.wait_to_begin(scope[IS_GONE_KEY], is_short_request=True)
                if waited_s:
                    store_wait(scope, waited_s)
                if not (gate.admission.may_be_late(waited_s) and gate.is_late(scope, b"", waited_s)):
                    response_messages: ResponseMessages | None = OVERLOADED_MESSAGES
                    if parsed_get.may_use_nightly_record:
                        response_messages = await fast_path.get(parsed_get)
                    elif gate.admission.admit_costly():
                        response_messages = await self._answer_by_ladder(parsed_get, scope)
                    if response_messages is None:
                        return None
                    answer = response_messages
            except CallerGone:
                gate.admission.shed_counts["gone"] += 1
                return None  # the client has left
            finally:
                CURRENT_PACER.reset(pacer_token)
                gate.admission.leave()
        return gate.count_if_refused(answer)

    async def _answer_by_ladder(self, parsed_get: ParsedGet, scope: Scope) -> ResponseMessages | None:
        """Return the answer of the ladder under the observer."""
        sent_messages: list[Message] = []

        async def collect_message(message: Message) -> None:
            sent_messages.append(message)

        scope = {**scope, "path": unquote(scope["raw_path"].decode("ascii"))}
        await self._answer_by_routes(parsed_get, scope, _no_body, collect_message, self.request_watch)
        return (sent_messages[0], sent_messages[1]) if sent_messages else None

    def refuse_if_overloaded(self) -> ResponseMessages | None:
        """Before its body is read, return the counted refusal of a request; None if the request is admitted."""
        gate = self.gate
        if gate is None or gate.admission.admit_costly():
            return None
        return gate.count_if_refused(OVERLOADED_MESSAGES)

    def refuse_for_problem(self, problem: Problem) -> ResponseMessages:
        """Return the response to a request that the connection refuses, and count it."""
        answer = refusal_messages(problem)
        return answer if self.gate is None else self.gate.count_if_refused(answer)


def _has_always_room() -> bool:
    return True


def _is_never_gone() -> bool:
    return False


async def _send_messages(answer: ResponseMessages, send: Send) -> None:
    await send(answer[0])
    await send(answer[1])


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}
