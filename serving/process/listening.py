"""Listens again where a listening socket was closed behind the server's back, and where a certificate has changed.

A loop that cannot accept for want of a file descriptor may close its listening socket without a word (uvloop, where
another thread took the descriptor that libuv keeps for this case): the process would live on, deaf.
"""

import asyncio
import functools
import logging
import socket
import ssl
from collections.abc import Iterable
from typing import Any

import uvicorn

from serving.config.tls import TlsWatch

log = logging.getLogger(__name__)


class ListeningSockets:
    """The sockets of one server, each with a second descriptor that nobody else knows of."""

    def __init__(
        self, server: uvicorn.Server, tls: TlsWatch | None = None, handshake_s: float = 10.0
    ) -> None:
        self._server = server
        self._tls, self._handshake_s, self._is_due = tls, handshake_s, False
        self._socket_pairs: list[tuple[socket.socket, socket.socket]] = []

    def keep(self, sockets: Iterable[socket.socket]) -> None:
        """Keeps a second descriptor of each socket from now on."""
        self._socket_pairs = [(listener, listener.dup()) for listener in sockets]

    def leave(self) -> None:
        """Closes the second descriptors: the server itself stops listening."""
        for _, spare in self._socket_pairs:
            spare.close()
        self._socket_pairs = []

    async def renew(self) -> None:
        """Listens with the certificate in force: who is connected stays so, who waits to be accepted is met with it."""
        servers = self._server.servers
        old_servers = list(servers)
        socket_pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            for _, spare in self._socket_pairs:
                socket_pairs.append((await self._listen_again(spare), spare))
        except BaseException:
            # The old ones go on; what listens already would be listened to twice from the next try on.
            for server in servers[len(old_servers) :]:
                server.close()
            del servers[len(old_servers) :]
            raise
        self._socket_pairs, self._is_due = socket_pairs, False
        for (
            old_server
        ) in old_servers:  # not earlier: where listening anew fails, the old ones go on
            servers.remove(old_server)
            old_server.close()

    async def reopen_closed(self) -> None:
        """Puts another socket in the place of each that was closed."""
        for index, (listener, spare) in enumerate(self._socket_pairs):
            if listener.fileno() < 0:
                log.error("a listening socket was closed: listening again")
                self._socket_pairs[index] = await self._listen_again(spare), spare

    async def look_at_certificate(self) -> None:
        """Takes up a new certificate; its files are read in a thread, which a mount that hangs holds up alone."""
        if self._tls is not None and await asyncio.to_thread(self._tls.reload_if_changed):
            self._is_due = True
        if self._is_due:
            await self.renew()

    async def _listen_again(self, spare: socket.socket) -> socket.socket:
        """Another descriptor of the socket, which the server listens on."""
        new_listener = spare.dup()
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
        bounds: dict[str, float] = {}
        if self._tls is not None:
            context, bounds = self._tls.context, {"ssl_handshake_timeout": self._handshake_s}
        asyncio_server = await loop.create_server(
            protocol_factory, sock=listener, backlog=backlog, ssl=context, **bounds
        )  # type: ignore[call-overload]
        server.servers.append(asyncio_server)
