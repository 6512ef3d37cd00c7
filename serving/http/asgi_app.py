"""The application itself: FastAPI, with the hot route ahead of its router."""

import functools
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from serving.admission.controller import Admission
from serving.fast_lookup.dispatcher import Hot, Messages
from serving.requests.bodies import refused
from serving.requests.body_budget import BYTES_MAX, Bodies
from serving.requests.errors import Problem
from serving.tracing.observer import Below, Watch

ADMITTED = "larder.admitted"
"""Key in the scope of a request that `refusal` let go on."""

_LIMITED = ("/v1/lookup", "/v1/score", "/v1/explain")


def _refusal(problem: Problem) -> Messages:
    response = refused(problem)
    head = {"status": response.status_code, "headers": response.raw_headers}
    body = {"type": "http.response.body", "body": response.body}
    return {"type": "http.response.start", **head}, body


_OVERLOADED = _refusal(Problem(503, "overloaded", "more is asked than can be answered in time"))


class _Place:
    """Admission of a request below L1, until its response starts: a peer that reads nothing would hold it for ever."""

    __slots__ = ("_admission", "_is_held", "_send")

    def __init__(self, admission: Admission, send: Send) -> None:
        self._admission, self._send = admission, send
        self._is_held = True

    async def send(self, message: Message) -> None:
        """Leaves the admission, then passes the message on."""
        self.leave()
        await self._send(message)

    def leave(self) -> None:
        """Leaves the admission; further calls do nothing."""
        if self._is_held:
            self._is_held = False
            self._admission.leave()


class Front(FastAPI):
    """FastAPI behind the hot route: whatever that does not take goes on as it came."""

    def __init__(self, *, bodies_bytes: int = BYTES_MAX, **settings: Any) -> None:
        super().__init__(**settings)
        self.bodies = Bodies(bodies_bytes)
        self.hot: Hot | None = None
        self.wire: Hot | None = None  # the same, unless each request may be traced
        self.watch: Watch | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request or the application's life; what is ready is sent under any load: a refusal costs as much."""
        hot = self.hot
        if hot is None or scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        method = scope["method"]
        if method == "GET" and (answer := hot.ready(scope)) is not None:
            await send(answer[0])
            await send(answer[1])
        elif method == "GET":
            await self._watched(hot, scope, receive, send)
        else:
            with self.bodies.of(receive) as counted:
                await self._watched(hot, scope, counted, send)

    async def _watched(self, hot: Hot, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request that has no ready answer, under the observer if one is set."""
        watch, behind = self.watch, super().__call__
        if watch is None:
            await self._below(hot, behind, scope, receive, send)
        elif scope["method"] == "GET" and watch.leaves(scope):
            # Unless the hot route leaves it, too.
            await self._below(hot, functools.partial(watch, behind), scope, receive, send)
        else:
            await watch(functools.partial(self._below, hot, behind), scope, receive, send)

    async def stored(self, hot: Hot, scope: Scope) -> Messages | None:
        """The answer to a GET of one id, which may be a refusal, for who needs no router; None if it takes one."""
        admission, answer = hot.admission, _OVERLOADED
        if admission.enter():
            try:
                if not (admission.is_behind and hot.is_late(scope, b"")):
                    found = await hot.get(scope)
                    if found is None:
                        return None
                    answer = found
            finally:
                admission.leave()
        if (status := answer[0]["status"]) != 200:
            hot.refused(status)
        return answer

    def refusal(self) -> Messages | None:
        """The refusal of a request with a body before anybody looks at it, counted; None if it may go on."""
        hot = self.hot
        if hot is None or hot.admission.admit_costly():
            return None
        hot.refused(503)
        return _OVERLOADED

    async def _below(
        self, hot: Hot, behind: Below, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answers a request without a ready answer; lookups, scores and explanations need admission."""
        answer: Messages | None
        if not scope["path"].startswith(_LIMITED):  # decoded, as the router reads it
            await behind(scope, receive, send)
            return
        if not hot.admission.enter():
            answer = _OVERLOADED
        else:
            place = _Place(hot.admission, send)
            try:
                answer, receive = await self._judged(hot, scope, receive)
                if answer is None:
                    await behind(scope, receive, place.send)
                    return
            except Problem as problem:
                answer = _refusal(problem)
            finally:
                place.leave()
        if (status := answer[0]["status"]) != 200:
            hot.refused(status)
        await send(answer[0])
        await send(answer[1])

    async def _judged(
        self, hot: Hot, scope: Scope, receive: Receive
    ) -> tuple[Messages | None, Receive]:
        """The answer, which may be a refusal; None if the routes behind have it. Raises Problem for a body too slow."""
        method, admission = scope["method"], hot.admission
        if admission.is_behind:
            body: bytes | None = b""
            if method == "POST" and hot.takes(scope["headers"]):  # of a stranger nothing is read
                body, receive = await hot.body(scope, receive)
            if hot.is_late(scope, body):
                return _OVERLOADED, receive
        answer = await hot.get(scope) if method == "GET" else None
        if answer is None and ADMITTED not in scope and not admission.admit_costly():
            return _OVERLOADED, receive
        if method == "POST":
            return await hot.post(scope, receive)
        return answer, receive
