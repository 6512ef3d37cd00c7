"""Receivers of OpenLineage events over HTTP, small servers: one takes the events, one never answers."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """Events in the order received."""

    url: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver on a free port of this machine."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size_bytes = int(self.headers["Content-Length"])
            receiver.events.append(json.loads(self.rfile.read(size_bytes)))
            self.send_response(201)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join(10)


@dataclass
class Silent:
    """A receiver that accepts connections and never answers."""

    _listening: socket.socket

    @property
    def url(self) -> str:
        """URL of the receiver."""
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def connections(self) -> int:
        """Return the number of connections since the last call."""
        connection_count = 0
        self._listening.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self._listening.accept()[0].close()
                connection_count += 1
        return connection_count


@contextmanager
def silent() -> Iterator[Silent]:
    """Run a silent receiver on a free port of this machine."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield Silent(listening)
