"""A connection that closed before a command was written to it is an outage of Redis, whatever raises it."""

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import ConnectionPool

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.control_plane import ServerControl
from cache.l2.errors import translate_redis_errors
from cache.l2.resp import checked_reply
from cache.l2.sync_clients import connect

CLOSED = RuntimeError(
    "unable to perform operation on <TCPTransport closed=True reading=False 0x1>; the handler is closed"
)
"""As uvloop raises it."""


class ClosedClient:
    """Client of redis-py whose connection is gone at the first byte that is written to it."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    async def execute_command(self, *_arguments: Any) -> Any:
        raise self._error

    @contextlib.asynccontextmanager
    async def pipeline(self, **_options: Any) -> AsyncIterator[Any]:
        yield self

    async def execute(self) -> list[Any]:
        raise self._error

    @contextlib.asynccontextmanager
    async def pubsub(self, **_options: Any) -> AsyncIterator[Any]:
        yield self
        raise self._error

    async def subscribe(self, _channel: str) -> None:
        raise self._error


@pytest.fixture
def control() -> ServerControl:
    return ServerControl(Keyspace("default"), ConnectionPool(), lambda: None)


async def ask_all(control: ServerControl) -> None:
    await control.execute_all([])


async def beat(control: ServerControl) -> None:
    await control.heartbeat(b"{}", 1.0)


async def listen(control: ServerControl) -> None:
    async for _ in control.subscribe():
        pass


@pytest.mark.parametrize("call", [ask_all, beat, listen])
async def test_a_transport_that_is_closed_already_is_an_outage(control: ServerControl, call: Any) -> None:
    control._client = ClosedClient(CLOSED)  # type: ignore[assignment]

    with pytest.raises(TierUnavailable, match="closed the connection"):
        await call(control)


@pytest.mark.parametrize("call", [ask_all, beat, listen])
async def test_another_defect_is_no_outage(control: ServerControl, call: Any) -> None:
    control._client = ClosedClient(RuntimeError("can't start new thread"))  # type: ignore[assignment]

    with pytest.raises(RuntimeError, match="new thread"):
        await call(control)


def test_a_server_that_answers_otherwise_than_redis_is_named_with_what_to_do() -> None:
    with pytest.raises(TierUnavailable) as raised, translate_redis_errors("redis://host:6379/0"):
        checked_reply("TIME", 1.5)

    assert raised.value.message == (
        "the server at REDIS_URL redis://host:6379/0 does not answer as Redis does: TIME was answered by 1.5, not by "
        "two numbers; check that the address is Redis', then run the step again"
    )


def test_a_missing_file_of_tls_is_told_as_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"rediss://127.0.0.1:{listener.getsockname()[1]}/0?ssl_ca_certs={tmp_path / 'none.pem'}"
        with pytest.raises(TierUnavailable) as refusal, connect(url, 1.0) as client:
            client.ping()

    assert "a file that an ssl_ option of the URL names does not exist" in refusal.value.message


def test_a_missing_unix_socket_is_no_missing_file_of_tls(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable) as refusal, connect(f"unix://{tmp_path / 'none.sock'}", 1.0) as client:
        client.ping()

    assert "ssl_" not in refusal.value.message
