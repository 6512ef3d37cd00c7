"""A connection of uvicorn's that can be answered past it.

What each request touches lies together, in slots: with thousands of connections each of them is out of the processor's
caches when its turn comes, and every object of its own costs more than the lookup.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serving.hot import Message


class Connection(HttpToolsProtocol):
    """Knows whether a request is uvicorn's, and whether one is answered past it; winds the clock for those."""

    __slots__ = (
        "_is_ending", "_is_full", "_is_waited_for", "_open", "_was_asked",
        # Uvicorn's own: those that every request looks at.
        "server_state", "timeout_keep_alive_task", "transport",
    )  # fmt: skip

    def __init__(self, *given: Any, **named: Any) -> None:
        self._open = 0  # of uvicorn's requests: one for each that is not read, one for each that is not answered
        self._was_asked = self._is_ending = self._is_full = False
        self._is_waited_for = False
        super().__init__(*given, **named)

    def on_message_begin(self) -> None:
        """See uvicorn."""
        self._open += 2
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """See uvicorn."""
        self._open -= 1
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        self._open -= 1
        super().on_response_complete()

    def pause_writing(self) -> None:
        """See uvicorn."""
        self._is_full = True
        super().pause_writing()

    def resume_writing(self) -> None:
        """See uvicorn."""
        self._is_full = False
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """See uvicorn. Answers from here do not wind the clock up again: that would cost as much as they do."""
        if self._was_asked or self._is_waited_for:
            self._wait()
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """See uvicorn."""
        if self._is_waited_for:
            self._is_ending = True
        else:
            super().shutdown()

    def _respond(self, start: Message, body: bytes) -> None:
        headers = [*self.server_state.default_headers, *start["headers"]]
        closes = any(name == b"connection" for name, _ in headers)
        if self._is_ending and not closes:
            headers.append((b"connection", b"close"))
        lines = [b"%b: %b\r\n" % each for each in headers]
        self.transport.write(b"".join((STATUS_LINE[start["status"]], *lines, b"\r\n", body)))
        self._done()
        if closes or self._is_ending:
            self.transport.close()

    def _done(self) -> None:
        self.server_state.total_requests += 1
        if self.timeout_keep_alive_task is None:
            self._wait()
        self._was_asked = True

    def _wait(self) -> None:
        self._was_asked = False
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
