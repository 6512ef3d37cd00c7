"""A connection that closed before a command was written to it is an outage of Redis, whatever raises it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import ConnectionPool

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.control_plane import ServerControl
from cache.l2.errors import translate_redis_errors
from cache.l2.resp import checked_reply

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
