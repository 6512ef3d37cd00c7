"""Calls between our modules for one request, recorded from the running program.

`python -m tests.bench.tools.walk` serves a small night from a real Redis, on uvicorn over a socket, sends one request
at a time and prints its walk as a Markdown table.

Hops are counted as `tests.call_walk` says.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from cache.process.redis_server import join_or_start_server
from precompute.config.settings import NightConfig
from serving.app import create_app, make_server
from serving.http.routes import Service
from tests.call_walk import Call, Recorder, calls_of, hops, modules, table
from tests.integration.nights import build_night, histories
from tests.integration.serving_app import settings

BACKGROUND = (
    "cache.process.background_loops", "serving.generations", "serving.process",
    "serving.admission.controller", "serving.dashboard", "serving.quality", "serving.usage",
)  # fmt: skip
"""Packages whose calls from the event loop are no part of a request."""


class Caller:
    """A keep-alive connection to a service in the same event loop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send_request(self, request: bytes) -> bytes:
        """Sends one request; returns the body of its answer, which must be of status 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(header_line for header_line in head.lower().split(b"\r\n") if b"content-length" in header_line)
        return await reader.readexactly(int(length.split(b":")[1]))

    async def aclose(self) -> None:
        """Closes the connection."""
        if self._streams is not None:
            self._streams[1].close()


@asynccontextmanager
async def served(night: NightConfig, **changes: Any) -> AsyncIterator[tuple[Caller, Service]]:
    """Serve this night on a socket without background work and request logs; yield a connection to it."""
    asleep = dict.fromkeys(("poll_s", "blocklist_poll_s", "heartbeat_s", "figures_s"), 3_000.0)
    asleep |= {"log_share": 0.0, "log_slow_ms": 60_000.0}
    config = settings(night, **(asleep | {"queue_interval_ms": 60_000.0, "sketch_s": 0.0} | changes))
    app, started = create_app(config), asyncio.Event()
    server = make_server(app, config, "warning", started.set)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await started.wait()
        caller = Caller(listener.getsockname()[1])
        try:
            yield caller, app.state.service
        finally:
            await caller.aclose()
            server.should_exit = True
            await serving


async def walked(caller: Caller, request: bytes) -> list[Call]:
    """Return the calls that one request makes."""
    recorder = Recorder()
    with recorder.recording():
        await caller.send_request(request)
        await asyncio.sleep(0)  # what is done once the answer is on its way
    return [root_call for root_call in recorder.roots if not root_call.module.startswith(BACKGROUND)]


def get(path: str) -> bytes:
    """Return the bytes of a GET."""
    return b"GET %b HTTP/1.1\r\nhost: larder\r\n\r\n" % path.encode()


def post(path: str, body: bytes) -> bytes:
    """Return the bytes of a POST of JSON."""
    head = b"POST %b HTTP/1.1\r\nhost: larder\r\ncontent-type: application/json\r\n" % path.encode()
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


async def walks(night: NightConfig, users: Sequence[str], **changes: Any) -> dict[str, list[Call]]:
    """Return the calls for a GET answered by Redis, for a GET of an unknown id, and for a POST of many ids.

    The service has answered others before, on the same connection.
    """
    roots_by_request = {}
    async with served(night, **changes) as (caller, _):
        for user in users[:3]:
            await caller.send_request(get(f"/v1/lookup/user_topk/{user}"))
        await caller.send_request(get("/v1/lookup/user_topk/nobody-0"))
        roots_by_request["get"] = await walked(caller, get(f"/v1/lookup/user_topk/{users[3]}"))
        roots_by_request["unknown"] = await walked(caller, get("/v1/lookup/user_topk/nobody-1"))
        bodies = [orjson.dumps({"entities": users[at : at + 100]}) for at in (100, 200, 300)]
        for body in bodies[:-1]:
            await caller.send_request(post("/v1/lookup/user_topk", body))
        roots_by_request["post"] = await walked(caller, post("/v1/lookup/user_topk", bodies[-1]))
    return roots_by_request


def main() -> None:
    """Print the calls of both paths, or of those named on the command line: `plain`, `fast`."""
    with TemporaryDirectory() as folder, join_or_start_server(Path(folder) / "redis") as redis:
        night = build_night(Path(folder) / "night", redis.url)
        users = sorted(histories(night))
        for http_mode in sys.argv[1:] or ("plain", "fast"):
            print(f"\n# {http_mode}")
            roots_by_request = asyncio.run(walks(night, users, fast_http=http_mode == "fast"))
            for name, roots in roots_by_request.items():
                walk = hops(roots)
                every = calls_of(roots, lambda _: True)
                print(f"\n## {name}: {len(walk)} hops in {len(modules(walk))} modules, {every} calls\n")
                print(table(walk, leaves=True))


if __name__ == "__main__":
    main()
