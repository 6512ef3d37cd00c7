"""One request whose body is here, as an application receives it, and the answer as it sends it. Nothing streams."""

import asyncio

from starlette.types import Message


class Cycle:
    """What `receive` and `send` of ASGI are for one request."""

    __slots__ = ("_body", "_is_lost", "_is_whole", "_pieces", "_start")

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._is_lost: asyncio.Event | None = None
        self._start: Message | None = None
        self._pieces: list[bytes] = []
        self._is_whole = False

    async def receive(self) -> Message:
        """The body, then the end of the connection, for which it waits."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._is_lost is None:
            self._is_lost = asyncio.Event()
        await self._is_lost.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Keeps a piece of the answer."""
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._pieces.append(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)

    def lose(self) -> None:
        """The caller has gone."""
        if self._is_lost is None:
            self._is_lost = asyncio.Event()
        self._is_lost.set()

    def answer(self) -> tuple[Message, bytes] | None:
        """How it starts, its length told, and its body; None if the application left it unfinished."""
        if self._start is None or not self._is_whole:
            return None
        body, headers = b"".join(self._pieces), self._start["headers"]
        if not any(name == b"content-length" for name, _ in headers):
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        return {**self._start, "headers": headers}, body
