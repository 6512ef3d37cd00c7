"""The application itself: FastAPI, with the hot route ahead of its router."""

from typing import Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from serving.hot import Hot


class Front(FastAPI):
    """Whatever the hot route does not take goes on to FastAPI as it came."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.hot: Hot | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the application's life."""
        hot = self.hot
        if hot is not None and scope["type"] == "http":
            method = scope["method"]
            if method == "GET":
                answer = hot.ready(scope) or await hot.get(scope)
            elif method == "POST":
                answer, receive = await hot.post(scope, receive)
            else:
                answer = None
            if answer is not None:
                await send(answer[0])
                await send(answer[1])
                return
        await super().__call__(scope, receive, send)
