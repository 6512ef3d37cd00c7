"""The HTTP application of one process: tokens, TLS, routes and request observers."""

import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from cache.process.background_loops import BackgroundLoops
from serving.access.callers import Callers, TokenWatch
from serving.access.quota import QuotaTable
from serving.bootstrap import running
from serving.config.settings import ServingConfig, check_header_token, request_limits
from serving.config.tls import TlsFiles, TlsWatch
from serving.engine.service import LookupService
from serving.features import all_operations
from serving.http.asgi_app import AsgiApp, FastPath
from serving.http.http1_protocol import Http1Protocol
from serving.http.openapi import ApiPaths
from serving.http.routes import build_routes
from serving.metrics.exposition import WorkerPeers
from serving.process.resources import raise_file_limit
from serving.process.server import Server, settings_of
from serving.process.supervisor import QUOTAS_FILE_NAME
from serving.replica.hooks import TraceJudge
from serving.requests.bodies import refusal_response
from serving.requests.errors import Problem

_CODE_BY_STATUS = {404: "not_found", 405: "method_not_allowed"}


def create_app(config: ServingConfig, peers: WorkerPeers | None = None) -> AsgiApp:
    """Create the application; it opens nothing until it is started.

    `peers`: the workers of the same parent, if there are any. Raises ConfigError for a token that no client could send,
    and for TLS files that cannot be used.
    """
    check_header_token(config.token)
    tokens = tokens_in_force(config, peers)
    tls_files = TlsFiles.of(config)
    tls_watch = None if tls_files is None else TlsWatch(tls_files)
    loops = BackgroundLoops()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(config, peers, loops) as service, tokens.follow_file(loops, recognise):
            app.state.service = service
            front_app.request_watch = service.hooks.request_watch
            for collector in filter(None, (tokens, tls_watch)):
                service.metrics.registry.register(collector)
            service.hooks.problem_by_name["tokens"] = lambda: tokens.stale_error
            service.hooks.problem_by_name["tls"] = lambda: None if tls_watch is None else tls_watch.problem
            # Routes are tried in order: the API's frequent requests come before the documentation.
            documentation = list(app.router.routes)
            app.router.routes.clear()
            router, document = build_routes(service)
            app.include_router(router)
            front_app.openapi_document = document
            app.router.routes.extend(documentation)
            front_app.gate = service.create_gate()
            if config.fast_http:
                front_app.fast_path = fast_lookups(service, service.hooks.is_traced)
                front_app.untraced_fast = None if config.traces else front_app.fast_path
            yield
            front_app.gate = front_app.fast_path = front_app.untraced_fast = None

    front_app = app = AsgiApp(
        title="Larder",
        description="Precomputed predictions, each marked with where it came from.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's page loads a script from another host: DOCS_PAGE replaces it
        redoc_url=None,
        bodies_bytes_max=config.bodies_bytes,
        api_paths=ApiPaths.of(all_operations(request_limits(config))),
    )

    app.state.tls = tls_watch
    app.state.loops = loops

    def recognise(callers: Callers) -> None:
        front_app.callers = callers

    recognise(tokens.callers)

    async def refuse(_request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = str(error.detail) if isinstance(error, HTTPException) else "internal error"
        response = refusal_response(Problem(status, _CODE_BY_STATUS.get(status, "http_error"), detail))
        headers = getattr(error, "headers", None) or {}
        if "Allow" in headers:
            response.headers["Allow"] = _with_head(headers["Allow"])
        return response

    app.add_exception_handler(HTTPException, refuse)
    return app


def tokens_in_force(config: ServingConfig, peers: WorkerPeers | None) -> TokenWatch:
    """Open the tokens, with quotas shared by the workers of the same parent; raise ConfigError if that fails."""
    is_shared = peers is not None and config.tokens_file
    quota_rows = (
        QuotaTable.open(peers.path(QUOTAS_FILE_NAME), peers.worker_slot)
        if peers is not None and is_shared
        else QuotaTable.create_private()
    )
    return TokenWatch(config.token, config.tokens_file, quota_rows)


def fast_lookups(service: LookupService, is_traced: TraceJudge | None) -> FastPath:
    """Create the fast path of plain lookups; imported here, so that it is not loaded if switched off."""
    from serving.engine.hot_route import FastLookups

    return FastLookups(service, is_traced=is_traced)


def make_server(app: AsgiApp, config: ServingConfig, log_level: str, announce: Callable[[], None]) -> Server:
    """Create a server for the application; it calls `announce` once it answers.

    With `fast_http` the server uses `LookupConnection`, which answers lookups itself and bounds connections; else
    uvicorn's own protocol.
    """
    tls: TlsWatch | None = app.state.tls
    server_arguments = config.drain_s, announce, tls, config.head_timeout_s, app.state.loops
    if not config.fast_http:
        return Server(settings_of(app, config, log_level, Http1Protocol, tls), None, *server_arguments)
    from serving.http.lookup_connection import SharedState, connection_factory

    shared = SharedState(app, config.bounds(raise_file_limit(config.connections_max)))
    settings = settings_of(app, config, log_level, connection_factory(shared), tls)
    return Server(settings, shared.connections, *server_arguments)


def _with_head(allowed_methods: str) -> str:
    """Add HEAD to a route's methods if they include GET: `AsgiApp` answers HEAD for all."""
    method_names = {method_name.strip() for method_name in allowed_methods.split(",")}
    return ", ".join(sorted(method_names | {"HEAD"} if "GET" in method_names else method_names))
