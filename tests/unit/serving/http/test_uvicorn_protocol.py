"""What one peer may cost: whatever it sends or does not read, a connection keeps and waits no more than it may."""

import asyncio
import functools
import gc
import re
import weakref
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from cache.config.serving import PeerBounds
from serving.http.connections import BEHIND_BYTES_MAX
from serving.http.http1_protocol import PIECE_BYTES
from tests.unit.serving.http.test_connection import KEEP_ALIVE_BLOCK, Connection, Front, Transport, get

BOUNDS = PeerBounds(head_bytes=2_000, head_fields=10, connections_max=4, connections_new_max=3)
LINE = b"GET /other HTTP/1.1\r\n"
HOST = b"Host: a\r\n"
CHUNKED = b"POST /other HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
LATE = 60.0


class Unread(Transport):
    """To a peer that reads as far as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent_bytes, self.is_aborted = 0, False
        self._extra = {
            "socket": SimpleNamespace(
                setsockopt=lambda *_: None, getsockname=lambda: ("a", 1), getpeername=lambda: ("a", 2)
            )
        }

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def abort(self) -> None:
        self.is_aborted = self.is_closed = True


def opened(front: Front | None = None, bounds: PeerBounds = BOUNDS) -> Connection:
    """A new connection within these bounds."""
    connection = Connection(front or Front(), bounds)
    connection.transport = connection.protocol.transport = Unread()
    return connection


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On a loop of its own."""
    asyncio.run(test())


def status(connection: Connection) -> bytes:
    """Of the first answer, and the reason."""
    return bytes(connection.transport.written[9:12])


def statuses(connection: Connection) -> list[bytes]:
    """Of all answers, in order."""
    return re.findall(rb"HTTP/1\.1 (\d{3}) ", bytes(connection.transport.written))


def unread(connection: Connection) -> Unread:
    """Its transport."""
    transport: Any = connection.transport
    assert isinstance(transport, Unread)
    return transport


def look_twice(connection: Connection, after_s: float = LATE) -> None:
    """Two looks, with so much time between them."""
    wire: Any = connection.protocol
    wire.close_if_stalled(1.0)
    wire.close_if_stalled(1.0 + after_s)


def field(size: int) -> bytes:
    """A header field of so many bytes, name and value together."""
    return b"a: " + b"b" * (size - 1) + b"\r\n"


@pytest.mark.parametrize(("more", "expected"), [(0, b"200"), (1, b"431")])
@pytest.mark.parametrize("is_in_target", [False, True])
def test_a_head_has_at_most_so_many_bytes(more: int, expected: bytes, is_in_target: bool) -> None:
    async def test() -> None:
        connection = opened()
        remaining_bytes = BOUNDS.head_bytes - len(b"/otherHosta") + more
        head = b"GET /other?%b HTTP/1.1\r\nHost: a\r\n\r\n" % (b"q" * (remaining_bytes - 1))
        await connection.deliver(head if is_in_target else LINE + HOST + field(remaining_bytes) + b"\r\n")
        assert status(connection) == expected
        assert connection.transport.is_closed == (expected == b"431")

    run(test)


@pytest.mark.parametrize(("count", "expected"), [(10, b"200"), (11, b"431")])
def test_a_head_has_at_most_so_many_fields(count: int, expected: bytes) -> None:
    async def test() -> None:
        connection = opened()
        await connection.deliver(LINE + HOST + b"a:b\r\n" * (count - 1) + b"\r\n")
        assert status(connection) == expected
        assert connection.transport.is_closed == (expected == b"431")

    run(test)


@pytest.mark.parametrize("start", [b"", LINE[:9], LINE, LINE + b"a: b\r\n"])
def test_a_head_of_too_many_lines_is_refused_before_its_fields_are_read(start: bytes) -> None:
    async def test() -> None:
        connection = opened()
        connection.protocol.data_received(start)
        remaining_head = LINE[len(start) :] + b"a:b\r\n" * 900
        connection.protocol.data_received(remaining_head)
        assert status(connection) == b"431" and connection.transport.is_closed
        assert len(connection.protocol.headers or ()) <= 1

    run(test)


def test_lines_of_a_body_are_no_fields_wherever_its_head_is_cut() -> None:
    body = b"[\n" * 450
    request = b"POST /other HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n" + body

    async def test(cut: int) -> None:
        connection = opened()
        for piece in request[:cut], request[cut:]:
            await connection.deliver(piece)
        assert status(connection) == b"200" and not connection.transport.is_closed

    for cut in range(len(request) - len(body) + 1):
        run(functools.partial(test, cut))


@pytest.mark.parametrize("start", [
    LINE + b"a: ", LINE, b"GET /", b"GET /other HTTP/1.1\r\na",
    CHUNKED + b"1;", CHUNKED + b"0\r\na: ", CHUNKED + b"0\r\n",
])  # fmt: skip
@pytest.mark.parametrize("chunk", [b"b" * 700, b"a:b\r\n" * 20, b"b" * 250_000])
def test_what_never_ends_is_not_kept(start: bytes, chunk: bytes) -> None:
    async def test() -> None:
        connection, sent_bytes = opened(), 0
        await connection.deliver(start)
        while not connection.transport.is_closed:
            assert sent_bytes <= BOUNDS.head_bytes + 2 * PIECE_BYTES
            await connection.deliver(chunk)
            sent_bytes += len(chunk)
        assert status(connection) in (b"431", b"400")
        assert sum(len(name) + len(value) for name, value in connection.protocol.headers) <= 2_000

    run(test)


def test_a_body_is_no_head_however_small_its_chunks() -> None:
    async def test() -> None:
        connection = opened()
        await connection.deliver(CHUNKED)
        for _ in range(40):
            await connection.deliver(b"1\r\nx\r\n" * 2_000)
        await connection.deliver(b"0\r\n\r\n")
        assert status(connection) == b"200" and not connection.transport.is_closed
        assert connection.transport.written.endswith(b"x" * 80_000)

    run(test)


def test_so_many_requests_may_be_asked_at_once_and_more_end_the_connection() -> None:
    async def test() -> None:
        connection = opened()
        await connection.deliver(get(b"/other") * BOUNDS.pipeline_max)
        for _ in range(8):
            await connection.deliver(b"")
        assert connection.transport.written.count(b"HTTP/1.1 200") == BOUNDS.pipeline_max
        assert not connection.transport.is_closed
        connection.transport.written.clear()
        connection.protocol.data_received(get(b"/other") * 5_000)
        assert len(connection.protocol.pipeline) < BOUNDS.pipeline_max
        for _ in range(8):
            await connection.deliver(b"")
        assert statuses(connection) == [b"200"] * BOUNDS.pipeline_max + [b"429"]
        assert connection.transport.is_closed

    run(test)


@pytest.mark.parametrize("more", [0, 1])
def test_a_pipeline_beyond_the_bound_is_refused_behind_the_answers_to_what_is_within(more: int) -> None:
    async def test() -> None:
        connection = opened()
        connection.protocol.data_received(get(b"/other") * (BOUNDS.pipeline_max + more))
        for _ in range(8):
            await connection.deliver(b"")
        assert statuses(connection) == [b"200"] * BOUNDS.pipeline_max + [b"429"] * more
        assert connection.transport.is_closed is bool(more)

    run(test)


@pytest.mark.parametrize("raw_request", [
    get(b"/other"), b"HEAD /other HTTP/1.1" + KEEP_ALIVE_BLOCK,
    b"POST /other HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
], ids=["get", "head", "post"])  # fmt: skip
@pytest.mark.parametrize("at_once", [True, False])
def test_requests_that_wait_are_bounded_whatever_they_ask_and_however_they_come(
    raw_request: bytes, at_once: bool
) -> None:
    async def test() -> None:
        connection = opened()
        count = BOUNDS.pipeline_max + 40
        for piece in [raw_request * count] if at_once else [raw_request] * count:
            connection.protocol.data_received(piece)
        assert len(connection.protocol.pipeline) < BOUNDS.pipeline_max
        for _ in range(8):
            await connection.deliver(b"")
        assert statuses(connection) == [b"200"] * BOUNDS.pipeline_max + [b"429"]
        assert connection.transport.is_closed

    run(test)


def test_a_target_too_long_to_be_looked_up_is_bounded_like_any_head() -> None:
    async def test() -> None:
        front = Front()
        connection = opened(front)
        for _ in range(2):
            await connection.deliver(get())
        for size in 100, 9_000:
            await connection.deliver(get(b"/v1/lookup/t/a?" + b"x" * size))
        assert [len(target) for target in front.looked_up_targets] == [115]
        assert connection.transport.written.rpartition(b"HTTP/1.1 ")[2][:3] == b"431"

    run(test)


def test_a_pipeline_behind_a_request_under_way_ends_after_the_answers_to_what_is_within() -> None:
    async def test() -> None:
        connection = opened()
        for chunk in get(b"/other"), get(b"/other") * (BOUNDS.pipeline_max + 1):
            connection.protocol.data_received(chunk)
        for _ in range(8):
            await connection.deliver(b"")
        assert statuses(connection) == [b"200"] * BOUNDS.pipeline_max + [b"429"]
        assert connection.transport.is_closed

    run(test)


def test_small_pieces_of_a_body_wake_the_application_only_with_the_last() -> None:
    async def test() -> None:
        connection = opened()
        body = b"x" * (PIECE_BYTES - 1)
        head = b"POST /other HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (2 * len(body))
        for chunk in head, body[:-1], body[:1]:
            connection.protocol.data_received(chunk)
        is_woken = connection.protocol.cycle.message_event.is_set
        assert not is_woken()
        connection.protocol.data_received(body)
        assert is_woken()
        await connection.deliver(b"")
        assert connection.transport.written.endswith(body * 2)

    run(test)


def test_a_pipeline_that_ends_unanswered_leaves_nothing_to_the_garbage_collector() -> None:
    async def test() -> Any:
        connection = opened()
        wire: Any = connection.protocol
        for chunk in get(b"/other") * 3, b"":
            wire.data_received(chunk)
        wire.connection_lost(None)
        for _ in range(8):  # the one that had begun ends
            await asyncio.sleep(0)
        return weakref.ref(wire)

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(test())() is None
    finally:
        gc.enable()


def test_an_idle_connection_keeps_nothing_of_the_request_that_it_answered() -> None:
    async def test() -> None:
        connection = opened()
        connection.protocol.data_received(get(b"/other"))
        answered: Any = connection.protocol.cycle
        event_reference = weakref.ref(answered.message_event)
        del answered
        for _ in range(8):
            await asyncio.sleep(0)
        assert connection.transport.written.startswith(b"HTTP/1.1 200")
        assert event_reference() is None
        connection.transport.written.clear()
        await connection.deliver(get(b"/other"))
        assert connection.transport.written.startswith(b"HTTP/1.1 200")

    gc.collect()
    gc.disable()
    try:
        run(test)
    finally:
        gc.enable()


def test_what_waits_behind_an_unanswered_request_is_bounded() -> None:
    async def test() -> None:
        connection = opened()
        body = b"x" * (4 * BEHIND_BYTES_MAX)
        connection.protocol.data_received(get(b"/other") + post_of(body))
        buffered_bytes = sum(len(cycle.body) for cycle, _ in connection.protocol.pipeline)
        assert buffered_bytes <= BEHIND_BYTES_MAX
        await connection.deliver(b"")
        await connection.deliver(b"x")
        assert statuses(connection) == [b"200", b"413"]
        assert connection.transport.is_closed

    run(test)


def post_of(body: bytes) -> bytes:
    """A request with a body that never ends."""
    return b"POST /other HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n\r\n" + body


def test_who_does_not_read_is_not_read_from() -> None:
    async def test() -> None:
        connection = opened()
        connection.protocol.pause_writing()
        await connection.deliver(post_of(b"x" * (4 * BEHIND_BYTES_MAX)))  # read in turns
        assert len(connection.protocol.cycle.body) <= BEHIND_BYTES_MAX
        assert connection.transport.is_closed

    run(test)


@pytest.mark.parametrize(("partial_head", "answer"), [
    (b"", b""), (b"G", b"408"), (LINE + b"a: b", b"408"), (b"\r\n", b""),
])  # fmt: skip
def test_a_head_that_does_not_come_ends_its_connection(partial_head: bytes, answer: bytes) -> None:
    async def test() -> None:
        early, late = opened(), opened()
        for connection in (early, late):
            if partial_head:
                await connection.deliver(partial_head)
        look_twice(early, BOUNDS.head_timeout_s)
        look_twice(late)
        assert not early.transport.is_closed and late.transport.is_closed
        assert status(late) == answer

    run(test)


def test_blank_lines_after_an_answer_keep_no_connection_open() -> None:
    async def test() -> None:
        connection = opened()
        await connection.deliver(get(b"/other"))
        await connection.deliver(b"\r\n")
        look_twice(connection)
        assert connection.transport.is_closed

    run(test)


def test_the_rest_of_a_body_whose_request_is_answered_has_to_come() -> None:
    async def test() -> None:
        connection = opened()
        await connection.deliver(b"POST /hasty HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nx")
        assert status(connection) == b"200"
        look_twice(connection, BOUNDS.body_timeout_s)
        assert not connection.transport.is_closed
        await connection.deliver(b"x")
        wire: Any = connection.protocol
        wire.close_if_stalled(LATE)
        assert connection.transport.is_closed

    run(test)


@pytest.mark.parametrize("is_closing", [False, True])
def test_who_takes_nothing_of_its_answers_is_cut_off_and_who_is_slow_is_not(is_closing: bool) -> None:
    async def test() -> None:
        connection = opened()
        transport = unread(connection)
        wire: Any = connection.protocol
        if is_closing:
            transport.close()
        else:
            wire.pause_writing()
        for time in range(1, 100, 9):  # 64 KiB in nine seconds
            transport.unsent_bytes = (1 << 20) - (time << 13)
            wire.close_if_stalled(float(time))
        assert not transport.is_aborted
        wire.close_if_stalled(100.0 + BOUNDS.write_timeout_s)
        assert transport.is_aborted

    run(test)


def test_a_connection_is_not_closed_while_the_application_works() -> None:
    async def test() -> None:
        connection = opened()
        connection.protocol.data_received(get(b"/other"))  # under way
        look_twice(connection)
        assert not connection.transport.is_closed
        await connection.deliver(b"")
        look_twice(connection)  # idle: uvicorn's clock runs
        assert not connection.transport.is_closed
        for _ in range(3):
            await connection.deliver(get())
        connection.protocol.data_received(get(b"/v1/lookup/t/a"))
        look_twice(connection)
        assert not connection.transport.is_closed

    run(test)


def open_connections(count: int, asks: bool) -> list[Connection]:
    """Connections of one server, one after the other."""
    first = opened()
    wire: Any = first.protocol
    connections = [first]
    for number in range(count):
        if asks:
            connections[-1].protocol.data_received(get(b"/other"))
        if number + 1 < count:
            connections.append(open_another_connection(wire))
    return connections


def open_another_connection(wire: Any) -> Connection:
    """Another one of the same server."""
    connection = Connection.__new__(Connection)
    connection.state, connection.transport = wire.server_state, Unread()
    connection.protocol = type(wire)(wire._shared, wire.config, wire.server_state, {}, wire.loop)
    connection.protocol.connection_made(connection.transport)
    return connection


def test_of_those_that_ask_nothing_the_oldest_has_to_go() -> None:
    async def test() -> None:
        connections = open_connections(5, asks=False)
        assert [unread(connection).is_aborted for connection in connections] == [True, True, False, False, False]

    run(test)


def test_beyond_the_connection_limit_one_is_refused_unless_another_asks_nothing() -> None:
    async def test() -> None:
        *asking, one_more = open_connections(5, asks=True)
        assert status(one_more) == b"503" and one_more.transport.is_closed
        assert b"connection: close" in one_more.transport.written
        assert not any(connection.transport.is_closed for connection in asking)
        for connection in (asking[0], one_more):
            connection.protocol.connection_lost(None)
        silent, next_ = (open_another_connection(asking[1].protocol), open_another_connection(asking[1].protocol))
        assert unread(silent).is_aborted and not next_.transport.is_closed

    run(test)


def test_a_ready_answer_is_a_request() -> None:
    async def test() -> None:
        front = Front()
        connection = opened(front)
        for _ in range(2):
            await connection.deliver(get())
        second_connection = open_another_connection(connection.protocol)
        second_connection.protocol.data_received(get(block=KEEP_ALIVE_BLOCK))
        assert front.untraced_fast.answered == [b"/ready"] * 2
        for _ in range(BOUNDS.connections_new_max):
            open_another_connection(connection.protocol)
        assert not second_connection.transport.is_closed

    run(test)


def test_answers_that_a_peer_does_not_take_count_until_it_is_gone_and_cost_it_its_connection() -> None:
    async def test() -> None:
        slow = opened(bounds=PeerBounds(answers_bytes=100))
        wire: Any = slow.protocol
        unread_answers = wire._connections.unread_answers
        unread(slow).unsent_bytes = 90
        slow.protocol.pause_writing()
        assert unread_answers.held_bytes == 90
        slow.protocol.resume_writing()
        assert unread_answers.held_bytes == 0

        slow.protocol.pause_writing()
        unread(slow).unsent_bytes = 101
        slow.protocol.pause_writing()
        assert unread_answers.is_full(0.0) and not unread(slow).is_aborted
        assert not unread_answers.is_full(float("inf"))
        assert unread(slow).is_aborted and wire._connections.ended_count_by_reason["unread"] == 1

    run(test)
