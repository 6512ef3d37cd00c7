"""HTTP server of one process: starts the application, keeps listening, drains it, and stops."""

import asyncio
import functools
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from cache.process.background_loops import BackgroundLoops
from serving.config.settings import ServingConfig
from serving.config.tls import TlsWatch
from serving.process.resources import freeze_objects

log = logging.getLogger(__name__)

_BACKLOG = 2_048

_DRAIN_CHECK_INTERVAL_S = 0.05

_QUIET_CHECKS = 5

_LISTENING_CHECK_S = 1.0

_SWITCH_INTERVAL_S = 0.0005
"""Thread switch interval in seconds: a thread that opens a generation may delay the loop this long. Default: 5 ms."""


class WatchedConnections(Protocol):
    """Protocol of bounded connections that are checked periodically."""

    @property
    def check_interval_s(self) -> float:
        """Seconds between two checks."""

    async def close_stalled(self, connections: Any, now_s: float) -> None:
        """End the connections without progress."""


class Server(uvicorn.Server):
    """HTTP server that announces its start, and at the end drains until no more requests come."""

    def __init__(
        self,
        config: uvicorn.Config,
        connections: WatchedConnections | None,
        drain_timeout_s: float,
        announce_start: Callable[[], None],
        tls: TlsWatch | None = None,
        handshake_timeout_s: float = 10.0,
        loops: BackgroundLoops | None = None,
    ) -> None:
        super().__init__(config)
        self._loops = BackgroundLoops() if loops is None else loops
        self._connections = connections
        self._tls = tls
        self._listening_sockets = ListeningSockets(self, tls, handshake_timeout_s)
        self._check_tasks: list[asyncio.Task[None]] = []
        self._drain_timeout_s = drain_timeout_s
        self._announce_start = announce_start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._is_exit_requested = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then announce."""
        self._loop = asyncio.get_running_loop()
        # Copies, because a new certificate closes and replaces the sockets.
        server_sockets = sockets if self._tls is None else [listener.dup() for listener in sockets or []]
        await super().startup(server_sockets)
        if self.started:
            self._listening_sockets.keep(sockets or [])
            if self._tls is not None:  # uvicorn has no setting for the handshake time-out
                await self._listening_sockets.renew()
            check_interval_s = _LISTENING_CHECK_S if self._connections is None else self._connections.check_interval_s
            self._check_tasks.append(
                self._loops.start(
                    "connections", self._maintain_connections, wait=lambda: asyncio.sleep(check_interval_s)
                )
            )
            if self._tls is not None:
                self._check_tasks.append(
                    self._loops.start(
                        "certificate", self._listening_sockets.look_at_certificate,
                        wait=lambda: asyncio.sleep(_LISTENING_CHECK_S),
                    )
                )  # fmt: skip
            freeze_objects()
            self._announce_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop as uvicorn does; connections are checked until the last one has ended."""
        self._listening_sockets.leave()
        try:
            await super().shutdown(sockets)
        finally:
            for check_task in self._check_tasks:
                check_task.cancel()

    async def _maintain_connections(self) -> None:
        """End connections without progress, and reopen listening sockets that were closed."""
        if self._connections is not None:
            now_s = asyncio.get_running_loop().time()
            await self._connections.close_stalled(self.server_state.connections, now_s)
        await self._listening_sockets.reopen_closed()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, exit at once at the second."""
        if self._loop is None or not self.started or self._is_exit_requested:
            super().handle_exit(sig, frame)
            self.force_exit = self._is_exit_requested
            if self.force_exit:
                self.config.timeout_graceful_shutdown = 0
                log.warning("second signal to stop: requests under way are cut off")
                # From now on uvicorn would log a traceback for each of its tasks.
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            return
        self._is_exit_requested = True
        # A signal handler runs at any point, and the loop may be waiting for events.
        self._loop.call_soon_threadsafe(self._start_draining, sig)

    def retire(self) -> None:
        """Leave new connections to other processes on the same socket, and drain; on the event loop only."""
        if self._drain_task is None:
            self._listening_sockets.leave()
            for asyncio_server in self.servers:
                asyncio_server.close()
            self._start_draining(signal.SIGTERM)

    def _start_draining(self, sig: int) -> None:
        if self._drain_task is None:
            self._drain_task = asyncio.create_task(self._drain(sig))

    async def _drain(self, sig: int) -> None:
        """Accept and answer until there are no requests for a while, so that none is reset."""
        loop, server_state = asyncio.get_running_loop(), self.server_state
        give_up_at = loop.time() + self._drain_timeout_s
        app: Any = self.config.app
        signing_off = asyncio.create_task(app.state.service.drain())
        for headers in (self.config.encoded_headers, server_state.default_headers):
            headers.append((b"connection", b"close"))  # clients open their next connection elsewhere
        answered_count, quiet_checks = server_state.total_requests, 0
        # Count checks, not seconds: a loop that was busy in between may not have read its sockets yet.
        while quiet_checks < _QUIET_CHECKS and loop.time() < give_up_at and not self.should_exit:
            await asyncio.sleep(_DRAIN_CHECK_INTERVAL_S)
            is_quiet = not server_state.tasks and server_state.total_requests == answered_count
            answered_count, quiet_checks = (server_state.total_requests, quiet_checks + 1 if is_quiet else 0)
        await asyncio.wait({signing_off}, timeout=max(0.0, give_up_at - loop.time()))
        if not self.should_exit:
            self.config.timeout_graceful_shutdown = max(1, int(give_up_at - loop.time()))
            super().handle_exit(sig, None)


def settings_of(
    app: ASGIApp, config: ServingConfig, log_level: str, http_protocol_class: Any, tls: TlsWatch | None = None
) -> uvicorn.Config:
    """Return uvicorn's settings; `http_protocol_class` names its protocol, or creates connections."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    uvicorn_config = uvicorn.Config(
        app,
        loop="uvloop",
        ws="none",  # not used; a websocket connection would not be bounded
        timeout_keep_alive=config.idle_timeout_s,  # type: ignore[arg-type]  # seconds, whole or not
        http=http_protocol_class,
        lifespan="on",
        access_log=False,
        proxy_headers=False,  # client addresses are not used
        log_config=None,  # uvicorn's loggers use the common handlers
        log_level=log_level,
        backlog=_BACKLOG,
    )
    if tls is not None:
        uvicorn_config.load()
        uvicorn_config.ssl = tls.context
    return uvicorn_config


class ListeningSockets:
    """Listening sockets of one server, each with a duplicate descriptor to listen again from.

    An event loop that cannot accept for lack of file descriptors may close its listening socket silently (uvloop, if
    another thread took the descriptor that libuv reserves for this case). The process would live on without listening.
    """

    def __init__(self, server: uvicorn.Server, tls: TlsWatch | None = None, handshake_timeout_s: float = 10.0) -> None:
        self._server = server
        self._tls, self._handshake_s, self._is_due = tls, handshake_timeout_s, False
        self._socket_pairs: list[tuple[socket.socket, socket.socket]] = []

    def keep(self, sockets: Iterable[socket.socket]) -> None:
        """Duplicate the descriptor of each socket."""
        self._socket_pairs = [(listener, listener.dup()) for listener in sockets]

    def leave(self) -> None:
        """Close the duplicate descriptors; the server itself stops listening."""
        for _, spare in self._socket_pairs:
            spare.close()
        self._socket_pairs = []

    async def renew(self) -> None:
        """Listen with the new certificate; existing connections stay, and queued ones get the new certificate."""
        servers = self._server.servers
        old_servers = list(servers)
        socket_pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            for _, spare in self._socket_pairs:
                socket_pairs.append((await self._listen_again(spare), spare))
        except BaseException:
            # The old servers go on; close the new ones, or the next attempt would listen twice.
            for server in servers[len(old_servers) :]:
                server.close()
            del servers[len(old_servers) :]
            raise
        self._socket_pairs, self._is_due = socket_pairs, False
        for old_server in old_servers:  # only now: if listening again fails, the old servers go on
            servers.remove(old_server)
            old_server.close()

    async def reopen_closed(self) -> None:
        """Replace each closed listening socket."""
        for index, (listener, spare) in enumerate(self._socket_pairs):
            if listener.fileno() < 0:
                log.error("a listening socket was closed: listening again")
                self._socket_pairs[index] = await self._listen_again(spare), spare

    async def look_at_certificate(self) -> None:
        """Load a changed certificate; files are read in a thread, so that a hanging mount does not block the loop."""
        if self._tls is None:
            return
        if await asyncio.to_thread(self._tls.reload_if_changed):
            self._is_due = True
        if self._is_due:
            await self.renew()
            self._tls.log_renewal()

    async def _listen_again(self, spare_socket: socket.socket) -> socket.socket:
        """Listen on another descriptor of the socket; return the descriptor."""
        new_listener = spare_socket.dup()
        try:
            await self._listen(new_listener)
        except BaseException:
            new_listener.close()
            raise
        return new_listener

    async def _listen(self, listener: socket.socket) -> None:
        server = self._server
        protocol: Any = server.config.http_protocol_class
        protocol_factory = functools.partial(
            protocol,
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state,
        )  # fmt: skip
        loop, backlog = asyncio.get_running_loop(), server.config.backlog
        context: ssl.SSLContext | None = None
        ssl_timeouts: dict[str, float] = {}
        if self._tls is not None:
            context, ssl_timeouts = self._tls.context, {"ssl_handshake_timeout": self._handshake_s}
        asyncio_server = await loop.create_server(
            protocol_factory, sock=listener, backlog=backlog, ssl=context, **ssl_timeouts
        )  # type: ignore[call-overload]
        server.servers.append(asyncio_server)
