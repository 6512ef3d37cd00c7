"""A TCP proxy before Redis that is fast, slow, flapping, silent or gone, as a test says."""

import asyncio
import contextlib
from collections import deque
from typing import Literal, Self
from urllib.parse import urlsplit, urlunsplit

Fault = Literal["none", "slow", "flapping", "silent", "gone"]

DELAY_S = 0.05
FLAP_S = 0.3
_CHUNK_BYTES = 1 << 16


class FaultProxy:
    """Forwards bytes in order; `fault` may change at any moment, also for open connections.

    slow: replies come `DELAY_S` later, however many are under way. flapping: gone and back every `FLAP_S`. silent: open
    connections stay and nothing passes. gone: connections are closed, new ones at once.
    """

    def __init__(self, url: str) -> None:
        self.fault: Fault = "none"
        self._upstream = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._is_down = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._cut()

    @property
    def url(self) -> str:
        """URL of the proxy, as that of a Redis."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return urlunsplit(self._upstream._replace(netloc=f"{host}:{port}"))

    def set(self, fault: Fault) -> None:
        """Change the fault from now on."""
        if self.fault == "silent" != fault:
            self._cut()  # whoever waited for it has long given up
        self.fault = fault
        (self._flowing.clear if fault == "silent" else self._flowing.set)()
        self._is_down = fault == "gone"
        if self._is_down:
            self._cut()
        if fault == "flapping":
            asyncio.get_running_loop().call_soon(self._flap)

    def _flap(self) -> None:
        if self.fault != "flapping":
            return
        self._is_down = not self._is_down
        if self._is_down:
            self._cut()
        asyncio.get_running_loop().call_later(FLAP_S, self._flap)

    def _cut(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            if not self._is_down:
                await self._connect(reader, writer)
        except OSError:
            pass
        finally:
            self._tasks.discard(task)
            self._open.discard(writer)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._upstream.hostname, self._upstream.port
        upstream_reader, back = await asyncio.open_connection(host, port)
        self._open.add(back)
        try:
            pumps = [
                asyncio.ensure_future(self._pump(reader, back, is_reply=False)),
                asyncio.ensure_future(self._pump(upstream_reader, writer, is_reply=True)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._open.discard(back)
            back.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool) -> None:
        loop = asyncio.get_running_loop()
        late: deque[bytes] = deque()
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._flowing.wait()
                if is_reply and (late or self.fault == "slow"):
                    late.append(data)
                    loop.call_later(DELAY_S, lambda: writer.write(late.popleft()))
                else:
                    writer.write(data)
                    await writer.drain()
