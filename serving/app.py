"""The HTTP application: its routes, for as long as the service behind them runs, and its errors."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from serving.bootstrap import replica_id, running
from serving.config.settings import ServingConfig, check_token
from serving.http import openapi
from serving.http.asgi_app import Front
from serving.http.routes import routes
from serving.observability import watched
from serving.process.worker_metrics import Peers
from serving.requests.bodies import refused
from serving.requests.errors import Problem

_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(config: ServingConfig, peers: Peers | None = None) -> Front:
    """The application; nothing is opened before it starts. Raises ConfigError for a token nobody could send.

    `peers`: the workers of the same parent, if there are any.
    """
    check_token(config.token)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            running(config, peers) as service,
            watched(config, service, replica_id()) as (hot, front.watch),
        ):
            app.state.service = service
            # Routes are tried in order: what is asked most comes before the documentation.
            documentation = list(app.router.routes)
            app.router.routes.clear()
            app.include_router(routes(service))
            app.router.routes.extend(documentation)
            front.hot, front.wire = hot, None if config.traces else hot
            yield
            front.hot = front.wire = None

    front = app = Front(
        title="Larder",
        description="Precomputed predictions, each marked with where it came from.",
        lifespan=lifespan,
        redirect_slashes=False,
        bodies_bytes=config.bodies_bytes,
    )

    async def refuse(_request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = str(error.detail) if isinstance(error, HTTPException) else "internal error"
        return refused(Problem(status, _CODES.get(status, "http_error"), detail))

    app.add_exception_handler(HTTPException, refuse)
    if config.token:
        _document_token(app)
    return app


def _document_token(app: FastAPI) -> None:
    undocumented = app.openapi

    def documented() -> dict[str, Any]:
        document = undocumented()
        schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes[openapi.BEARER] = {"type": "http", "scheme": "bearer"}
        return document

    app.openapi = documented  # type: ignore[method-assign]
