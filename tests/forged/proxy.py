"""A proxy before a real Redis, which replaces chosen replies by malformed ones."""

import contextlib
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.forged.malformations import MALFORMATIONS
from tests.forged.resp import command_name, command_words, reply_end

PUSHED = "(pushed)"
"""Name of what a server sends without a command."""


@dataclass(frozen=True)
class Order:
    """Replies to forge, either one by its number since the order was given or all, of one command; and how."""

    command: str
    malformation: str
    number: int | None = None


class ForgingProxy:
    """Forwards what clients of a Redis send, and forges the replies that one order names."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self._lock = threading.Lock()
        self._no_end_pending = threading.Condition(self._lock)
        self._pending_ends = 0
        self._order: Order | None = None
        self._since_order: Counter[str] = Counter()
        self._last: dict[str, bytes] = {}
        self._connections: set[_Connection] = set()
        self.replies: Counter[str] = Counter()
        """Replies by the command that they answer."""
        self.forged = 0
        """Replies that were replaced."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def forge(self, order: Order | None) -> None:
        """Follow this order from now on; with None, forge nothing.

        Connections that the order before ended are closed when this returns, so that no later call meets their end.
        """
        with self._lock:
            assert self._no_end_pending.wait_for(lambda: not self._pending_ends, timeout=10), "a connection never ended"
            self._order, self.forged = order, 0
            self._since_order.clear()

    def drop_connections(self) -> None:
        """End all connections, so that clients open new ones."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def close(self) -> None:
        """Accept no more connections, and close the open ones."""
        self._listening.close()
        self.drop_connections()

    def replaced(self, command: str, reply: bytes) -> tuple[bytes, bool]:
        """Return the bytes for a client in place of a reply, and whether its connection ends."""
        with self._lock:
            number, order = self._since_order[command], self._order
            self._since_order[command] += 1
            self.replies[command] += 1
            previous_reply, self._last[command] = self._last.get(command, b""), reply
            if order is None or order.command != command or order.number not in (None, number):
                return reply, False
            self.forged += 1
            forgery = MALFORMATIONS[order.malformation](reply, previous_reply)
            self._pending_ends += forgery.ends
        return forgery.data, forgery.ends

    def report_end(self) -> None:
        """Note that a connection was closed because of a forgery."""
        with self._lock:
            self._pending_ends -= 1
            self._no_end_pending.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._upstream)
            except OSError:
                return
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(self, client, server)
            with self._lock:
                self._connections.add(connection)
            connection.start()

    def forget(self, connection: "_Connection") -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._connections.discard(connection)


@dataclass(eq=False)
class _Connection:
    proxy: ForgingProxy
    client: socket.socket
    server: socket.socket
    _commands: deque[str] = field(default_factory=deque)

    def start(self) -> None:
        threading.Thread(target=self._pass_commands, daemon=True).start()
        threading.Thread(target=self._pass_replies, daemon=True).start()

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.proxy.forget(self)

    def _pass_commands(self) -> None:
        waiting = b""
        with contextlib.suppress(OSError, ValueError):
            while data := self.client.recv(1 << 16):
                waiting += data
                at = 0
                while (parsed := command_words(waiting, at)) is not None:
                    command_parts, at = parsed
                    self._commands.append(command_name(command_parts))
                complete_commands, waiting = waiting[:at], waiting[at:]
                self.server.sendall(complete_commands)
        self.close()

    def _pass_replies(self) -> None:
        waiting, ends = b"", False
        with contextlib.suppress(OSError, ValueError):
            while data := self.server.recv(1 << 16):
                waiting += data
                at, outgoing_replies = 0, []
                while not ends and (end := reply_end(waiting, at)) is not None:
                    reply, at = waiting[at:end], end
                    is_push = reply[:1] == b">" or not self._commands
                    command = PUSHED if is_push else self._commands.popleft()
                    forged, ends = self.proxy.replaced(command, reply)
                    outgoing_replies.append(forged)
                waiting = waiting[at:]
                self.client.sendall(b"".join(outgoing_replies))
                if ends:
                    break
        self.close()
        if ends:
            self.proxy.report_end()


@contextlib.contextmanager
def forging(redis_url: str) -> Iterator[ForgingProxy]:
    """Run a proxy before the Redis of this URL."""
    address = urlsplit(redis_url)
    proxy = ForgingProxy((address.hostname or "127.0.0.1", address.port or 6379))
    try:
        yield proxy
    finally:
        proxy.close()
