"""An ASGI exchange without streaming: hands an application a request whose body is here, and keeps the answer."""

import asyncio

from starlette.types import Message


class AsgiCycle:
    """The ASGI callables `receive` and `send` of one request."""

    __slots__ = ("_body", "_is_lost", "_is_whole", "_pieces", "_start")

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._is_lost: asyncio.Event | None = None
        self._start: Message | None = None
        self._pieces: list[bytes] = []
        self._is_whole = False

    async def receive(self) -> Message:
        """Returns the body first; then waits for the end of the connection and returns `http.disconnect`."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._is_lost is None:
            self._is_lost = asyncio.Event()
        await self._is_lost.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Keeps the start of the response, or a piece of its body."""
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._pieces.append(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)

    def lose(self) -> None:
        """Marks the connection as lost, for which `receive` waits."""
        if self._is_lost is None:
            self._is_lost = asyncio.Event()
        self._is_lost.set()

    def answer(self) -> tuple[Message, bytes] | None:
        """The response's start, with its length, and its body; None if the application left it unfinished."""
        if self._start is None or not self._is_whole:
            return None
        body, headers = b"".join(self._pieces), self._start["headers"]
        if not any(name == b"content-length" for name, _ in headers):
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        return {**self._start, "headers": headers}, body
