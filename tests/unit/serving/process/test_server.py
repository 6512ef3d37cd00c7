"""The server around its connections: it looks at them, goes on listening, and has the files open that it needs."""

import asyncio
import contextlib
import resource
import select
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
import uvloop

from cache.config.serving import PeerBounds
from serving.app import create_app, make_server
from serving.config.settings import ServingConfig
from serving.http.connections import Connections
from serving.http.lookup_connection import SharedState, connection_factory
from serving.process.resources import OPEN_FILES_HEADROOM, raise_file_limit
from serving.process.server import Server
from tests.integration.serving_app import eventually
from tests.unit.serving.http.test_connection import Front, app, get, messages

BOUNDS = PeerBounds(head_timeout_s=0.04, write_timeout_s=0.2)
LONG = 32 << 20


async def answered(scope: Any, receive: Any, send: Any) -> None:
    """As the others, and one answer that no buffer holds."""
    if scope["path"] == "/longest":
        for message in messages(200, [], b"x" * LONG):
            await send(message)
    else:
        await app(scope, receive, send)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, tuple[str, int]]]:
    """A server on a real socket, and its address."""
    front = Front()
    front.app = answered
    shared = SharedState(front, BOUNDS)  # type: ignore[arg-type]
    config = uvicorn.Config(
        shared.app,
        http=connection_factory(shared),  # type: ignore[arg-type]
        lifespan="off",
        log_config=None,
    )
    announcement = asyncio.Event()
    server = Server(config, shared.connections, drain_timeout_s=1.0, announce_start=announcement.set)
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server._serve([listener]))
    try:
        address = listener.getsockname()
        await announcement.wait()
        yield server, address
    finally:
        server.should_exit = True
        await task


async def asked(address: tuple[str, int]) -> bytes:
    """How the answer to a request begins."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(get())
    status_line = await reader.readuntil(b"\r\n")
    writer.close()
    return status_line


def test_a_listening_socket_that_was_closed_is_opened_again(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving() as (server, address):
            assert b"200" in await asked(address)
            server.servers[0].close()  # as uvloop does where it cannot accept

            async def listens_again() -> bool:
                return len(server.servers) == 2

            assert await eventually(listens_again)
            assert b"200" in await asked(address)
        with pytest.raises(OSError):  # and when the server stops, that is closed, too
            await asked(address)

    asyncio.run(run())
    assert "listening again" in caplog.text


def test_a_connection_that_asks_nothing_is_closed() -> None:
    async def run() -> None:
        async with serving() as (_, address), asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(*address)
            assert await reader.read() == b""
            writer.close()

    asyncio.run(run())


def test_who_takes_nothing_of_a_long_answer_is_cut_off() -> None:
    async def run() -> None:
        async with serving() as (server, address):
            with socket.socket() as peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
                peer.connect(address)
                peer.sendall(get(b"/longest"))
                connections = server.server_state.connections

                async def is_asked() -> bool:
                    return server.server_state.total_requests == 1

                async def is_gone() -> bool:
                    return not connections

                assert await eventually(is_asked)
                assert len(connections) == 1
                assert await eventually(is_gone)
                poll = select.poll()
                poll.register(peer, 0)
                # The connection is reset, so the kernel does not keep an unread answer either.
                assert poll.poll(1_000)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        check_count, twice = [0], asyncio.Event()

        async def check_progress(_connections: Any, _now_s: float) -> None:
            check_count[0] += 1
            if check_count[0] == 1:
                raise RuntimeError("a defect")
            twice.set()

        async with serving() as (server, _), asyncio.timeout(10):
            monkeypatch.setattr(server._connections, "close_stalled", check_progress)
            await twice.wait()

    asyncio.run(run())
    assert "background loop connections failed" in caplog.text


@pytest.mark.parametrize(("soft", "hard", "connections_max", "raised", "room"), [
    (1_024, 1 << 20, 8_192, 8_192 + OPEN_FILES_HEADROOM, 8_192),
    (1_024, resource.RLIM_INFINITY, 8_192, 8_192 + OPEN_FILES_HEADROOM, 8_192),
    (1_024, 4_096, 8_192, 4_096, 4_096 - OPEN_FILES_HEADROOM),
    (64, 64, 8_192, 64, 32),
    (1 << 20, 1 << 20, 8_192, None, 8_192),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 8_192, None, 8_192),
])  # fmt: skip
def test_as_many_files_may_be_open_as_the_connections_need(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, connections_max: int, raised: int | None, room: int
) -> None:  # fmt: skip
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new_limits: limits.append(new_limits))

    assert raise_file_limit(connections_max) == room
    assert limits == ([] if raised is None else [(raised, hard)])


def test_a_system_that_allows_no_more_files_leaves_room_for_fewer_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refused)

    assert raise_file_limit(8_192) == 1_024 - OPEN_FILES_HEADROOM
    assert "room for 768 connections instead of 8192" in caplog.text


def test_a_server_admits_as_many_connections_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.app.raise_file_limit", lambda connections_max: connections_max // 2)
    config = ServingConfig(artifacts="nowhere", connections_max=200)

    server = make_server(create_app(config), config, "warning", lambda: None)

    assert isinstance(server._connections, Connections)
    assert server._connections.bounds.connections_max == 100
