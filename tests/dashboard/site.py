"""The dashboard's page as the service sends it, with data that a test sets."""

import json
import socket
import threading
from types import TracebackType
from typing import Self

import uvicorn
from fastapi import Request, Response
from starlette.applications import Starlette
from starlette.routing import Route

from serving.access.callers import Callers
from serving.access.quota import QuotaTable
from serving.dashboard.attach import DASHBOARD_PAGE
from tests.browser import Browser
from tests.dashboard import probes as probe
from tests.dashboard.cases import as_json
from tests.polling import poll_until


class Site:
    """A server on a free loopback port that answers with the current `data` and `status`."""

    def __init__(self, data: object, token: str = "") -> None:
        self.data, self.token, self.status = data, token, 200
        self.request_count = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.url = f"http://{self.host}/dashboard"
        app = Starlette(routes=[*DASHBOARD_PAGE.routes(), Route("/dashboard/data", self._answer)])
        self._server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert poll_until(lambda: self._server.started)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Stop the server."""
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()
        assert not self._thread.is_alive()

    async def _answer(self, request: Request) -> Response:
        self.request_count += 1
        callers = Callers.of(self.token, None, QuotaTable.create_private(), {})
        if not callers.identify(request.headers.raw).may_use_scope("admin"):
            error = {"error": {"code": "unauthorized", "message": "send Authorization"}}
            return Response(json.dumps(error), 401, {"WWW-Authenticate": "Bearer"})
        if self.status != 200:
            return Response("{}", self.status)

        return Response(as_json(self.data), 200, media_type="application/json")


def open_page(browser: Browser, site: Site) -> None:
    """Open the page and wait for its numbers."""
    browser.open(site.url)
    browser.wait_until(probe.IS_UPDATED)
