"""The application itself: FastAPI, with the hot route ahead of its router."""

from typing import Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from serving.hot import Hot
from serving.http import refused
from serving.problem import Problem

_LOOKUP, _SCORE = "/v1/lookup", "/v1/score"
_OVERLOADED = refused(Problem(503, "overloaded", "more is asked than can be answered in time"))


class Front(FastAPI):
    """Whatever the hot route does not take goes on to FastAPI as it came."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.hot: Hot | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the application's life; what is ready is answered under any load: a refusal costs as much."""
        hot = self.hot
        if hot is None or scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        method = scope["method"]
        if method == "GET" and (answer := hot.ready(scope)) is not None:
            await send(answer[0])
            await send(answer[1])
            return
        if not scope["path"].startswith((_LOOKUP, _SCORE)):  # decoded, as the router reads it
            await super().__call__(scope, receive, send)
            return
        admission = hot.admission
        if (admission.is_behind and hot.is_late(scope)) or not admission.enter():
            hot.refused()
            await _OVERLOADED(scope, receive, send)
            return
        try:
            answer = await hot.get(scope) if method == "GET" else None
            if answer is None and not admission.admit_costly():
                hot.refused()
                await _OVERLOADED(scope, receive, send)
                return
            if method == "POST":
                answer, receive = await hot.post(scope, receive)
            if answer is None:
                await super().__call__(scope, receive, send)
                return
        finally:
            admission.leave()
        await send(answer[0])
        await send(answer[1])
