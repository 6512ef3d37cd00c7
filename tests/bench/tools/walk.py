"""Walk of one request through the code: which of our modules call into which, drawn from the running program.

`python -m tests.bench.tools.walk` serves a small night from a real Redis, on uvicorn over a socket, sends one request
at a time and prints its walk as a Markdown table.

A *hop* is a call from one of our modules into another one that goes on from there into a third, or out to Redis. A
call that comes straight back (a hash, a field that is read) is a *leaf*: it stands beside the hop that makes it, since
nobody has to follow it to understand where a request goes. Rooms that only observe (metrics, tracing, usage) are looked
through. What is called once more from the same place (for each of 100 entities) counts once. `cache.l2`, the client of
Redis, counts as one module: what happens in it is shared by all who ask in one turn.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import orjson

from cache.process.redis_server import server
from precompute.config.settings import NightConfig
from serving.app import create_app, make_server
from serving.http.service import Service
from tests.integration.nights import build_night, histories
from tests.integration.serving_app import settings

ROOT = Path(__file__).parents[3]
OURS = ("cache", "serving", "precompute", "dags")
AS_ONE = "cache.l2"
OBSERVERS = ("serving.metrics", "serving.tracing", "serving.usage")


@dataclass(eq=False)
class Call:
    """A call of one of our functions, and what it called in turn."""

    module: str
    function: str
    calls: list["Call"] = field(default_factory=list)

    @property
    def place(self) -> str:
        """What it counts as a call of."""
        return AS_ONE if self.module.startswith(f"{AS_ONE}.") else self.module

    @property
    def observes(self) -> bool:
        """Whether it only counts, notes or hands on what it watches."""
        return self.module.startswith(OBSERVERS)

    @property
    def goes_on(self) -> bool:
        """Whether it calls into other modules of ours, at any depth."""
        return any(
            each.goes_on or not (each.observes or each.module == self.module) for each in self.calls
        )


@dataclass(frozen=True)
class Hop:
    """A call into another module, which goes on from there; `leaves`: modules whose functions come straight back."""

    module: str
    function: str
    leaves: tuple[str, ...]


class Recorder:
    """Calls of our code in one thread, while `recording`."""

    def __init__(self) -> None:
        self.roots: list[Call] = []
        self._names: dict[CodeType, str | None] = {}
        self._frames: dict[FrameType, Call] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records until the end of the block."""
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._frames.clear()

    def _event(self, frame: FrameType, event: str, _argument: Any) -> None:
        # A coroutine that goes on is an event of its own, with the same frame.
        if event != "call" or frame in self._frames or (name := self._name(frame.f_code)) is None:
            return
        call = self._frames[frame] = Call(name, frame.f_code.co_qualname.replace(".<locals>", ""))
        above = frame.f_back
        while above is not None and above not in self._frames:
            above = above.f_back
        (self.roots if above is None else self._frames[above].calls).append(call)

    def _name(self, code: CodeType) -> str | None:
        if code not in self._names:
            self._names[code] = self._named(code)
        return self._names[code]

    def _named(self, code: CodeType) -> str | None:
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in OURS:
            return None
        return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def hops(roots: Sequence[Call], home: str = "") -> list[Hop]:
    """The hops of a walk in their order; `home` is where it begins."""
    found: dict[tuple[str, str, str], list[str]] = {}

    def follow(call: Call, above: str, at: list[str]) -> None:
        here = call.place
        if call.observes:
            here = above
        elif here != above:
            if not call.goes_on:
                if here not in at:
                    at.append(here)
                return
            at = found.setdefault((above, here, call.function), [])
        for each in call.calls:
            follow(each, here, at)

    for root in roots:
        follow(root, home, [])
    return [Hop(module, function, tuple(at)) for (_, module, function), at in found.items()]


def modules(walk: Sequence[Hop]) -> list[str]:
    """The modules of a walk, in the order in which it comes to them."""
    return list(dict.fromkeys(hop.module for hop in walk))


def calls_of(roots: Sequence[Call], is_meant: Callable[[Call], bool]) -> int:
    """How many calls of a walk, at any depth, are meant."""
    return sum(is_meant(each) + calls_of(each.calls, is_meant) for each in roots)


def table(walk: Sequence[Hop], *, leaves: bool = False) -> str:
    """A walk as a Markdown table; `leaves`: with the modules whose functions come straight back."""
    lines = ["| hop | module | function |", "|---|---|---|"]
    if leaves:
        lines = ["| hop | module | function | calls on the way |", "|---|---|---|---|"]
    for number, hop in enumerate(walk, 1):
        on_the_way = ", ".join(f"`{each}`" for each in hop.leaves)
        more = f" {on_the_way} |" if leaves else ""
        lines.append(f"| {number} | `{hop.module}` | `{hop.function}` |{more}")
    return "\n".join(lines)


BACKGROUND = tuple(
    f"serving.{each}"
    for each in ("replica", "process", "admission.loop_lag", "dashboard", "quality", "usage")
)
"""Packages whose calls from the event loop are no part of a request."""


class Caller:
    """A keep-alive connection to a service of the same event loop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> bytes:
        """Sends one request; returns the body of its answer, which must be of status 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(each for each in head.lower().split(b"\r\n") if b"content-length" in each)
        return await reader.readexactly(int(length.split(b":")[1]))

    async def aclose(self) -> None:
        """Closes the connection."""
        if self._streams is not None:
            self._streams[1].close()


@asynccontextmanager
async def served(night: NightConfig, **changes: Any) -> AsyncIterator[tuple[Caller, Service]]:
    """A service of this night on a socket, and a connection to it; its background sleeps."""
    asleep = dict.fromkeys(("poll_s", "blocklist_poll_s", "heartbeat_s", "figures_s"), 3_000.0)
    config = settings(
        night, **(asleep | {"queue_interval_ms": 60_000.0, "sketch_s": 0.0} | changes)
    )
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
    """The calls that one request causes."""
    recorder = Recorder()
    with recorder.recording():
        await caller.ask(request)
        await asyncio.sleep(0)  # what is done once the answer is on its way
    return [each for each in recorder.roots if not each.module.startswith(BACKGROUND)]


def get(path: str) -> bytes:
    """A GET as it stands on the wire."""
    return b"GET %b HTTP/1.1\r\nhost: larder\r\n\r\n" % path.encode()


def post(path: str, body: bytes) -> bytes:
    """A POST of JSON as it stands on the wire."""
    head = b"POST %b HTTP/1.1\r\nhost: larder\r\ncontent-type: application/json\r\n" % path.encode()
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


async def walks(night: NightConfig, users: Sequence[str], **changes: Any) -> dict[str, list[Call]]:
    """The walks of a GET that Redis answers, of one of an id nobody knows, and of a POST of many ids.

    The service has answered others before, on the same connection.
    """
    found = {}
    async with served(night, **changes) as (caller, _):
        for user in users[:3]:
            await caller.ask(get(f"/v1/lookup/user_topk/{user}"))
        await caller.ask(get("/v1/lookup/user_topk/nobody-0"))
        found["get"] = await walked(caller, get(f"/v1/lookup/user_topk/{users[3]}"))
        found["unknown"] = await walked(caller, get("/v1/lookup/user_topk/nobody-1"))
        bodies = [orjson.dumps({"entities": users[at : at + 100]}) for at in (100, 200, 300)]
        for body in bodies[:-1]:
            await caller.ask(post("/v1/lookup/user_topk", body))
        found["post"] = await walked(caller, post("/v1/lookup/user_topk", bodies[-1]))
    return found


def main() -> None:
    """Prints the walks of both ways, or of those that the command line names: `plain`, `fast`."""
    with TemporaryDirectory() as folder, server(Path(folder) / "redis") as redis:
        night = build_night(Path(folder) / "night", redis.url)
        users = sorted(histories(night))
        for way in sys.argv[1:] or ("plain", "fast"):
            print(f"\n# {way}")
            found = asyncio.run(walks(night, users, fast_http=way == "fast"))
            for name, roots in found.items():
                walk = hops(roots)
                every = calls_of(roots, lambda _: True)
                print(
                    f"\n## {name}: {len(walk)} hops in {len(modules(walk))} modules, {every} calls\n"
                )
                print(table(walk, leaves=True))


if __name__ == "__main__":
    main()
