"""How a connection ends: in the order of its answers, in stages, and for peers that have closed their side."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from serving.http import http1_protocol
from tests.unit.serving.http.test_connection import Connection, Front, Transport, get, post

MALFORMED_REQUEST = b"BAD\r\n\r\n"


class PatientTransport(Transport):
    """To a peer that goes on sending after it has read the end of the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.is_half_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_half_closed
        super().write(data)

    def write_eof(self) -> None:
        self.is_half_closed = True


@pytest.fixture(params=["fast", "uvicorn"])
def opened(request: pytest.FixtureRequest) -> Callable[[], Connection]:
    """Opens connections of one transport."""

    def open_one() -> Connection:
        connection = Connection(Front() if request.param == "fast" else None)
        connection.transport = connection.protocol.transport = PatientTransport()
        return connection

    return open_one


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On a loop of its own."""
    asyncio.run(test())


async def run_loop_iterations(count: int = 24) -> None:
    """Let requests under way end."""
    for _ in range(count):
        await asyncio.sleep(0)


def transport(connection: Connection) -> PatientTransport:
    """Its transport."""
    assert isinstance(connection.transport, PatientTransport)
    return connection.transport


def statuses(connection: Connection) -> list[bytes]:
    """Of all answers, in order."""
    return re.findall(rb"HTTP/1\.1 (\d{3}) ", bytes(connection.transport.written))


def test_a_refusal_ends_the_own_side_first(opened: Callable[[], Connection]) -> None:
    async def test() -> None:
        connection = opened()
        connection.protocol.data_received(MALFORMED_REQUEST)
        assert statuses(connection) == [b"400"]
        assert transport(connection).is_half_closed
        assert not transport(connection).is_closed
        connection.protocol.data_received(get(b"/other") + b"x" * 100_000)
        await run_loop_iterations()
        assert statuses(connection) == [b"400"]
        assert not transport(connection).is_closed
        connection.protocol.eof_received()
        connection.protocol.connection_lost(None)
        assert transport(connection).is_closed

    run(test)


def test_a_peer_that_sends_without_end_is_cut_off(opened: Callable[[], Connection]) -> None:
    async def test() -> None:
        connection, sent_bytes = opened(), 0
        connection.protocol.data_received(MALFORMED_REQUEST)
        while not transport(connection).is_closed:
            assert sent_bytes < 20 << 20
            connection.protocol.data_received(b"x" * 250_000)
            await run_loop_iterations()  # a slow machine reads the rest of it then
            sent_bytes += 250_000
        assert sent_bytes >= 8 << 20

    run(test)


def test_a_peer_that_never_closes_is_cut_off(opened: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1_protocol, "DISCARD_S", 0.0)

    async def test() -> None:
        connection = opened()
        connection.protocol.data_received(MALFORMED_REQUEST)
        await run_loop_iterations()
        assert transport(connection).is_closed

    run(test)


def test_a_server_that_stops_waits_for_no_peer_that_was_refused(opened: Callable[[], Connection]) -> None:
    async def test() -> None:
        connection = opened()
        connection.protocol.data_received(MALFORMED_REQUEST)
        connection.protocol.shutdown()
        assert transport(connection).is_closed

    run(test)


def test_an_answer_that_was_asked_to_be_the_last_closes_at_once(opened: Callable[[], Connection]) -> None:
    async def test() -> None:
        connection = opened()
        connection.protocol.data_received(get(b"/other", b"\r\nHost: a\r\nConnection: close\r\n\r\n"))
        await run_loop_iterations()
        assert statuses(connection) == [b"200"]
        assert transport(connection).is_closed
        assert not transport(connection).is_half_closed

    run(test)


@pytest.mark.parametrize("wrong", [
    MALFORMED_REQUEST, b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/2.0\r\n\r\n",
    b"POST /other HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n",
    b"POST /other HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZ\r\n",
])  # fmt: skip
@pytest.mark.parametrize("is_split", [False, True])
def test_all_that_was_asked_before_is_answered_before_a_refusal(
    opened: Callable[[], Connection], wrong: bytes, *, is_split: bool
) -> None:
    async def test() -> None:
        connection = opened()
        valid_requests = get(b"/other") + post(b"/other", b"hi") + get(b"/ready")
        for piece in [valid_requests, wrong] if is_split else [valid_requests + wrong]:
            connection.protocol.data_received(piece)
        await run_loop_iterations(60)
        assert statuses(connection)[:3] == [b"200"] * 3
        assert statuses(connection)[3:] in ([b"400"], [b"505"])
        assert transport(connection).is_half_closed

    run(test)


def test_a_peer_that_has_closed_its_side_under_tls_is_not_kept(opened: Callable[[], Connection]) -> None:
    # asyncio closes such a connection, and logs a warning where the protocol asks to keep it
    async def test() -> None:
        connection = opened()
        connection.protocol.scheme = "https"
        connection.protocol.data_received(get(b"/other"))
        assert not connection.protocol.eof_received()
        assert connection.protocol not in http1_protocol._half_closed_connections

    run(test)


def test_a_few_peers_that_have_closed_their_side_are_answered_at_once(opened: Callable[[], Connection]) -> None:
    async def test() -> None:
        for _ in range(3):
            connections = [opened() for _ in range(http1_protocol.HALF_CLOSED_PEERS_MAX + 3)]
            are_kept = []
            for connection in connections:
                connection.protocol.data_received(get(b"/other") * 2)
                are_kept.append(connection.protocol.eof_received())
            assert are_kept == [True] * http1_protocol.HALF_CLOSED_PEERS_MAX + [False] * 3
            await run_loop_iterations()
            for connection in connections[: http1_protocol.HALF_CLOSED_PEERS_MAX]:
                assert statuses(connection) == [b"200"] * 2
                assert transport(connection).is_closed
            for connection in connections:
                connection.protocol.connection_lost(None)

    run(test)


def test_a_peer_that_asks_nothing_and_closes_its_side_is_closed(opened: Callable[[], Connection]) -> None:
    async def test() -> None:
        connection = opened()
        assert not connection.protocol.eof_received()
        connection = opened()
        await connection.deliver(get(b"/other"))
        assert not connection.protocol.eof_received()

    run(test)


def test_a_request_that_is_cut_off_is_answered_with_400(opened: Callable[[], Connection]) -> None:
    async def test() -> None:
        for part in (get(b"/other")[:-1], get(b"/other")[:5], post(b"/other", b"hello")[:-1]):
            connection = opened()
            connection.protocol.data_received(get(b"/other") + part)
            assert connection.protocol.eof_received()
            await run_loop_iterations()
            assert statuses(connection) == [b"200", b"400"]
            assert transport(connection).is_closed
            connection.protocol.connection_lost(None)

    run(test)


def in_tiny_chunks(size: int) -> bytes:
    """A request whose body of `size` bytes comes in chunks of one byte."""
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"1\r\nx\r\n" * size + b"0\r\n\r\n"


def test_a_body_in_tiny_chunks_is_read_in_turns(
    opened: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1_protocol, "READ_TURN_S", 0.0)
    size = 40_000

    async def test() -> None:
        slow, quick = opened(), opened()
        slow.protocol.data_received(in_tiny_chunks(size))
        assert 0 < len(slow.protocol.cycle.body) < size / 4

        quick.protocol.data_received(get(b"/other"))
        await run_loop_iterations(4)
        assert statuses(quick) == [b"200"]
        assert statuses(slow) == []

        await run_loop_iterations(200)
        assert statuses(slow) == [b"200"]

    run(test)


def test_requests_behind_a_body_that_waits_for_its_turn_are_answered_in_order(
    opened: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1_protocol, "READ_TURN_S", 0.0)

    async def test() -> None:
        connection = opened()
        connection.protocol.data_received(in_tiny_chunks(20_000))
        connection.protocol.data_received(get(b"/ready"))
        connection.protocol.eof_received()
        assert statuses(connection) == []

        await run_loop_iterations(200)

        assert statuses(connection) == [b"200", b"200"]
        assert transport(connection).is_closed

    run(test)


def test_a_connection_that_is_lost_while_its_bytes_wait_is_forgotten(
    opened: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1_protocol, "READ_TURN_S", 0.0)

    async def test() -> None:
        connection = opened()
        connection.protocol.data_received(in_tiny_chunks(20_000))
        connection.protocol.connection_lost(None)
        await run_loop_iterations(50)
        assert statuses(connection) == []

    run(test)
