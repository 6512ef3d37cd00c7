"""Listening anew: where it fails the old sockets go on, nothing is left open, and the next look tries again."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.process.server import ListeningSockets


class Servers:
    """A uvicorn server's parts that listening needs; the second socket of a renewal cannot be listened on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.servers: list[asyncio.Server] = []
        self.lifespan = SimpleNamespace(state={})
        self.server_state = None
        self.config = SimpleNamespace(http_protocol_class=lambda **_: asyncio.Protocol(), backlog=8)
        self.is_broken = False
        self._calls = 0
        loop = asyncio.get_running_loop()
        self._create: Any = loop.create_server
        patch.setattr(loop, "create_server", self.create)

    async def create(self, *arguments: Any, **options: Any) -> asyncio.Server:
        self._calls += 1
        if self.is_broken and self._calls % 2 == 0:
            raise OSError("no more descriptors")
        server: asyncio.Server = await self._create(*arguments, **options)
        return server


@pytest.fixture
async def servers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Servers]:
    fake_servers = Servers(monkeypatch)
    yield fake_servers
    for server in fake_servers.servers:
        server.close()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def listening_on(servers: Servers, count: int, tls: Any = None) -> ListeningSockets:
    listening = ListeningSockets(servers, tls)  # type: ignore[arg-type]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    listening.keep(sockets)
    for listening_socket in sockets:
        servers.servers.append(await servers._create(asyncio.Protocol, sock=listening_socket))
    return listening


async def test_a_renewal_that_fails_leaves_the_old_sockets_and_nothing_besides(servers: Servers) -> None:
    listening = await listening_on(servers, 2)
    old, open_files_before = list(servers.servers), open_files()
    servers.is_broken = True

    for _ in range(3):
        with pytest.raises(OSError, match="descriptors"):
            await listening.renew()

    assert servers.servers == old and all(server.is_serving() for server in old)
    assert open_files() == open_files_before
    servers.is_broken = False
    await listening.renew()
    assert len(servers.servers) == 2 and not set(old) & set(servers.servers)
    listening.leave()


async def test_a_closed_socket_that_cannot_be_listened_on_again_is_tried_at_the_next_look(servers: Servers) -> None:
    listening = await listening_on(servers, 1)
    servers.servers[0].close()
    await asyncio.sleep(0)
    servers.is_broken, servers._calls = True, 1

    with pytest.raises(OSError, match="descriptors"):
        await listening.reopen_closed()
    servers.is_broken = False
    await listening.reopen_closed()

    assert [server.is_serving() for server in servers.servers] == [False, True]
    listening.leave()


async def test_files_of_a_certificate_are_not_read_on_the_event_loop(servers: Servers) -> None:
    threads: list[threading.Thread] = []

    class Tls:
        context = None

        def reload_if_changed(self) -> bool:
            threads.append(threading.current_thread())
            return False

    listening = await listening_on(servers, 1, Tls())

    await listening.reopen_closed()
    await listening.look_at_certificate()

    assert threads and threading.main_thread() not in threads
    listening.leave()
