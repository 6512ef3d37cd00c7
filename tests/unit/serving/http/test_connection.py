"""What is answered from where it arrives is what uvicorn would have sent, whatever arrives, in whatever pieces."""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from cache.config.serving import PeerBounds
from serving.access.callers import Callers
from serving.http import http1_protocol
from serving.http.asgi_app import ADMITTED_KEY
from serving.http.http1_protocol import Http1Protocol
from serving.http.lookup_connection import LookupConnection, SharedState, parse_plain_headers, split_content_length
from serving.requests.request_record import CALLER_KEY

READY = {b"/ready": b'{"a":1}', b"/ready?k=2": b"{}", b"/long": b"x" * 70_000}
STORED_ANSWERS = {
    b"/v1/lookup/t/a": (200, [], b'{"stored":1}'),
    b"/v1/lookup/t/shed?k=3": (503, [(b"retry-after", b"1")], b"later"),
    b"/v1/lookup/t/b": (200, [], b'{"with":"others"}'),
}
WITH_OTHERS = b"/v1/lookup/t/b", b"/v1/lookup/t/gone"
"""Without a task; the last one gets no answer after all."""
HEADERS = [(b"date", b"today"), (b"server", b"uvicorn")]
KEEP_ALIVE_BLOCK = b"\r\nHost: a\r\nAccept: */*\r\n\r\n"


class Ready:
    """As `FastLookups`, for a fixed list of answers; not where a header `x-not` stands."""

    def __init__(self) -> None:
        self.answered: list[bytes] = []

    def can_use_fast_path(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether these headers allow it."""
        return all(name != b"x-not" for name, _ in headers)

    def parse_get(self, scope: Any) -> bytes:
        """Path and query."""
        return target_of(scope)

    def answer(self, target: bytes) -> bytes | None:
        """The list's."""
        if target in READY:
            self.answered.append(target)
        return READY.get(target)


class Front:
    """As the application, as far as a connection looks at it."""

    def __init__(self) -> None:
        self.untraced_fast: Any = Ready()
        self.request_watch: Any = None
        self.gate: Any = None
        self.has_room_for_answer: Any = None
        self.callers = Callers(answers_without_token=True)
        self.looked_up_targets: list[bytes] = []
        self.asked_with_others: list[bytes] = []
        self.run: list[bytes] = []
        self.is_overloaded = False
        self.app: Any = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """What uvicorn's cycle calls."""
        if ADMITTED_KEY in scope:
            self.run.append(scope["raw_path"])
        await self.app(scope, receive, send)

    def refuse_if_overloaded(self) -> Any:
        """As where the queue stands."""
        return messages(503, [(b"retry-after", b"1")], b"later") if self.is_overloaded else None

    def try_join(self, target: bytes) -> Any:
        """As if Redis was asked for several at once."""
        if target not in WITH_OTHERS:
            return None
        self.asked_with_others.append(target)
        loop = asyncio.get_running_loop()
        group_future = loop.create_future()
        answer = STORED_ANSWERS[target][2] if target in STORED_ANSWERS else None
        loop.call_soon(loop.call_soon, group_future.set_result, answer)
        return group_future

    def finish_joined(self, group_future: Any) -> Any:
        """What came with those of others."""
        return group_future.result()

    async def answer_after_join(self, _target: bytes, _group_future: Any) -> Any:
        """Nothing."""
        return None

    async def answer_get(self, target: bytes, _scope: Any) -> Any:
        """As if Redis was asked, for what is stored."""
        self.looked_up_targets.append(target)
        await run_loop_iterations()
        return messages(*STORED_ANSWERS[target]) if target in STORED_ANSWERS else None


class Transport(asyncio.Transport):
    """Remembers what was written."""

    def get_write_buffer_size(self) -> int:
        return 0

    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_closed = bytearray(), False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The peer reads the end, and closes its side at once."""
        self.is_closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def target_of(scope: Any) -> bytes:
    """Path and query."""
    query: bytes = scope["query_string"]
    path: bytes = scope["raw_path"]
    return path + b"?" + query if query else path


def messages(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[Any, Any]:
    """An answer as an application sends it."""
    head = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    start = {"type": "http.response.start", "status": status, "headers": [*head, *headers]}
    return start, {"type": "http.response.body", "body": body}


async def run_loop_iterations() -> None:
    """A few, of the loop."""
    for _ in range(3):
        await asyncio.sleep(0)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers what is ready or stored as it is, and tells of everything else what it was."""
    target = target_of(scope)
    if scope["method"] == "GET" and target in STORED_ANSWERS:
        await run_loop_iterations()
        for message in messages(*STORED_ANSWERS[target]):
            await send(message)
        return
    body = READY.get(target) if scope["method"] == "GET" else None
    if target == b"/hasty":
        body = b"no time to read"
    if body is None:
        request_body = b""
        while True:
            message = await receive()
            request_body += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = scope["method"].encode() + target + request_body
    if target == b"/v1/lookup/fails":
        raise RuntimeError("a defect")
    start, end = messages(200, [], body)
    await send(start)
    if target == b"/v1/lookup/pieces":
        await send({**end, "body": body[:3], "more_body": True})
        await run_loop_iterations()
        end["body"] = body[3:]
    await send(end)


class Connection:
    """One, of either protocol."""

    def __init__(self, front: Front | None, bounds: PeerBounds | None = None) -> None:
        served: Any = app if front is None else front
        config = uvicorn.Config(served, log_config=None, access_log=False, lifespan="off")
        self.state, self.transport = ServerState(), Transport()
        self.state.default_headers = list(HEADERS)
        protocol_arguments: tuple[Any, ...] = (config, self.state, {}, asyncio.get_running_loop())
        self.protocol = (
            Http1Protocol(*protocol_arguments)
            if front is None
            else LookupConnection(SharedState(front, bounds), *protocol_arguments)  # type: ignore[arg-type]
        )
        self.protocol.connection_made(self.transport)

    async def deliver(self, chunk: bytes) -> None:
        """A piece arrives, and is worked off."""
        if not self.transport.is_closed:
            self.protocol.data_received(chunk)
            for _ in range(12):
                await asyncio.sleep(0)


def run_exchange(chunks: Sequence[bytes], front: Front | None, at_once: Sequence[bool] = ()) -> tuple[bytes, bool, int]:
    """What comes back, whether the connection is closed, and how many requests the server counts.

    `at_once`: pieces that arrive while the one before is still being worked off.
    """

    async def run() -> tuple[bytes, bool, int]:
        connection = Connection(front)
        for chunk, is_early in zip_longest(chunks, at_once[: len(chunks)]):
            if is_early and not connection.transport.is_closed:
                connection.protocol.data_received(chunk)
            else:
                await connection.deliver(chunk)
        for _ in range(8):
            await connection.deliver(b"")
        raw_responses = bytes(connection.transport.written)
        closed, count = connection.transport.is_closed, connection.state.total_requests
        connection.protocol.connection_lost(None)
        return raw_responses, closed, count

    return asyncio.run(run())


def get(target: bytes = b"/ready", block: bytes = KEEP_ALIVE_BLOCK, version: bytes = b"1.1") -> bytes:
    """The bytes of a request."""
    return b"GET " + target + b" HTTP/" + version + block


def post(target: bytes = b"/v1/lookup/t", body: bytes = b"{}", block: bytes = KEEP_ALIVE_BLOCK) -> bytes:
    """The bytes of a request with a body, whose length stands before its other headers."""
    length = b"\r\nContent-Length: %d" % len(body)
    return b"POST " + target + b" HTTP/1.1" + length + block + body


POSTED = st.builds(
    post,
    st.sampled_from([
        b"/v1/lookup/t", b"/v1/lookup/t", b"/v1/lookup/t?a=b", b"/v1/lookup/%20", b"/v1/lookup/t#x", b"/v1/lookup/",
        b"/v1/lookup/t ", b"/v1/lookup/fails", b"/v1/lookup/pieces",
    ]),
    st.sampled_from([b"{}", b"", b"x" * 300, b"\r\n\r\n", get(b"/ready")]),
    st.sampled_from([
        KEEP_ALIVE_BLOCK, KEEP_ALIVE_BLOCK, KEEP_ALIVE_BLOCK, b"\r\n\r\n", b"\r\nHost: a\r\nX-Not: 1\r\n\r\n",
        b"\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"\r\nHost: a\r\nContent-Length: 2\r\n\r\n", b"\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\r\nbroken\r\n\r\n",
        b"0\r\nA: b\r\n\r\n", b"\r\n more\r\n\r\n", b"\r\nHost: a\r\nExpect: 100-continue\r\n\r\n",
    ]),
)  # fmt: skip
TARGETS = st.sampled_from([
    *READY, *STORED_ANSWERS, *WITH_OTHERS[1:], b"/v1/lookup/t/none", b"/v1/lookup/t/a#x", b"/other", b"http://a/ready",
    b"/ready#x", b"/ready ", b"", b"/v1/lookup/t/a ", b"/v1/lookup/t/a\t", b"/v1/lookup/t/\x7f", b"/v1/lookup/t/\x01",
])  # fmt: skip
BLOCKS = st.sampled_from([
    KEEP_ALIVE_BLOCK, KEEP_ALIVE_BLOCK, KEEP_ALIVE_BLOCK, b"\r\n\r\n", b"\r\nHost: a\r\nX-Not: 1\r\n\r\n",
    b"\r\nHost: a\r\nConnection: close\r\n\r\n",
    b"\r\nHost: a\r\nConnection: keep-alive\r\n\r\n", b"\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
    b"\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
    b"\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    b"\r\nHost: a\r\nExpect: 100-continue\r\n\r\n", b"\r\nbroken\r\n\r\n", b"\r\nA: b\n\n", KEEP_ALIVE_BLOCK + b"\r\n",
    b"\r\nA: " + b"b" * 9_000 + b"\r\n\r\n",
])  # fmt: skip


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Requests one after the other, cut into pieces anywhere, some with more than one request in them."""
    requests = [
        draw(
            st.one_of(
                st.builds(get, TARGETS, BLOCKS, st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"])),
                st.just(get()),
                st.just(b"POST /other HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"),
                POSTED,
                st.just(post()),
                st.just(b"HEAD /ready HTTP/1.1" + KEEP_ALIVE_BLOCK),
            )
        )
        for _ in range(draw(st.integers(1, 6)))
    ]
    if draw(st.booleans()):
        return requests
    request_stream = b"".join(requests)
    cuts = sorted(draw(st.lists(st.integers(0, len(request_stream)), max_size=6)))
    pieces = [request_stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(request_stream)], strict=True)]
    return [piece for piece in pieces if piece]


@given(streams(), st.lists(st.booleans(), max_size=7))
def test_every_stream_of_bytes_is_answered_as_by_uvicorn(chunks: list[bytes], at_once: list[bool]) -> None:
    expected = run_exchange(chunks, None, at_once)
    if b"400 Bad Request" in expected[0]:  # of what is under way before that uvicorn answers nothing
        at_once, expected = [], run_exchange(chunks, None)
    assert run_exchange(chunks, Front(), at_once) == expected


def test_the_second_request_with_the_same_headers_is_answered_from_here() -> None:
    front = Front()
    exchange_outcome = run_exchange([get(), get(b"/ready?k=2"), get(), get(b"/other"), get()], front)
    assert front.untraced_fast.answered == [b"/ready?k=2", b"/ready", b"/ready"]
    assert exchange_outcome == run_exchange([get(), get(b"/ready?k=2"), get(), get(b"/other"), get()], None)


@pytest.mark.parametrize("block", [
    b"\r\nHost: a\r\n\r\n", b"\r\nHost: a\r\nConnection: keep-alive\r\n\r\n",
    b"\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
])  # fmt: skip
def test_headers_of_a_request_that_is_all_there(block: bytes) -> None:
    assert parse_plain_headers(block) is not None


@pytest.mark.parametrize("block", [
    b"", b"\r\n", b"\r\n\r\n", b"\r\nHost: a\r\n", b"\r\nHost: a\r\n\r\nGET", b"\r\nHost: a b\r\n\r\n",
    b"\r\nHost: a\r\nHost: a\r\n\r\n", b"\r\nHost: a\r\nContent-Encoding: gzip\r\n\r\n", b"\r\nno colon\r\n\r\n",
    b"\r\nHost: a\r\nConnection: close\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\n",
    b"\r\nHost: a\r\nContent-Length: 0\r\nContent-Length: 0\r\n\r\n", b"\r\nContent-Length: +0\r\n\r\n",
    b"\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"\r\nHost: a\r\nExpect: 100-continue\r\n\r\n",
    b"\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    KEEP_ALIVE_BLOCK + b"GET / HTTP/1.1\r\n\r\n",
])  # fmt: skip
def test_headers_of_anything_else(block: bytes) -> None:
    assert parse_plain_headers(block) is None


def test_an_answer_waits_for_the_one_before_it() -> None:
    async def run() -> bytes:
        connection = Connection(Front())
        await connection.deliver(get())
        await connection.deliver(b"POST /other HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nh")
        await connection.deliver(b"i" + get(b"/other"))
        connection.protocol.data_received(get(b"/other"))  # under way, not yet answered
        connection.protocol.data_received(get())
        for _ in range(16):
            await asyncio.sleep(0)
        return bytes(connection.transport.written)

    bodies = [part.rpartition(b"\r\n\r\n")[2] for part in asyncio.run(run()).split(b"HTTP/1.1 200")]
    assert bodies[1:] == [READY[b"/ready"], b"POST/otherhi", *[b"GET/other"] * 2, READY[b"/ready"]]


@pytest.mark.parametrize("preceding_chunk", [
    b"POST /other HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(get()),
    b"POST /hasty HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(get()),  # answered before it is read
    b"GET /other HTTP/1.1\r\nHost: a\r\nX: ",
])  # fmt: skip
def test_what_only_looks_like_a_request_is_none(preceding_chunk: bytes) -> None:
    front = Front()
    chunks = [get(), get(), preceding_chunk, get()]
    assert run_exchange(chunks, front) == run_exchange(chunks, None)
    assert front.untraced_fast.answered == [b"/ready"]


@pytest.mark.parametrize("line", [b"GET /ready HTTP/1.0", b"GET /ready", b"GET  /ready HTTP/1.1"])
def test_other_request_lines_are_uvicorns_to_judge(line: bytes) -> None:
    front = Front()
    chunks = [get(), get(), line + KEEP_ALIVE_BLOCK]
    assert run_exchange(chunks, front) == run_exchange(chunks, None)
    assert front.untraced_fast.answered == [b"/ready"]


def test_a_server_that_drains_closes_its_connections() -> None:
    async def run() -> tuple[bytes, bool]:
        connection = Connection(Front())
        for _ in range(3):
            await connection.deliver(get())
        length_before = len(connection.transport.written)
        connection.state.default_headers.append((b"connection", b"close"))
        await connection.deliver(get())
        return bytes(connection.transport.written[length_before:]), connection.transport.is_closed

    response, is_closed = asyncio.run(run())
    assert b"connection: close" in response and is_closed


def test_a_reader_that_does_not_keep_up_is_not_sent_more() -> None:
    async def run() -> int:
        connection = Connection(Front())
        await connection.deliver(get())
        connection.protocol.pause_writing()
        length_before = len(connection.transport.written)
        await connection.deliver(get())
        await connection.deliver(get())
        new_byte_count = len(connection.transport.written) - length_before
        connection.protocol.resume_writing()
        await connection.deliver(b"")
        return new_byte_count

    assert asyncio.run(run()) == 0


def test_a_connection_is_closed_once_nothing_was_asked_for_as_long_as_uvicorn_waits() -> None:
    async def run() -> list[bool]:
        connection, closed_states = Connection(Front()), []
        for _ in range(3):
            await connection.deliver(get())
        for _ in range(2):
            connection.protocol.timeout_keep_alive_handler()
            closed_states.append(connection.transport.is_closed)
        return closed_states

    assert asyncio.run(run()) == [False, True]


def make_known_header_gets(*targets: bytes) -> list[bytes]:
    """Requests on a connection whose headers are known."""
    return [get(), get(), *map(get, targets)]


@pytest.mark.parametrize("target", [*STORED_ANSWERS, *WITH_OTHERS[1:], b"/v1/lookup/t/none", b"/v1/lookup/t/\xc3\xa9"])
def test_what_is_stored_is_answered_past_uvicorn_as_by_uvicorn(target: bytes) -> None:
    front, chunks = Front(), make_known_header_gets(target, b"/ready", target)
    assert run_exchange(chunks, front) == run_exchange(chunks, None)
    expected_targets = [target] * 2 if target.isascii() else []
    assert (front.asked_with_others, front.looked_up_targets) == (
        (expected_targets, []) if target in WITH_OTHERS else ([], expected_targets)
    )


@pytest.mark.parametrize("is_joined", [False, True])
def test_what_comes_while_a_lookup_is_under_way_waits_for_it(is_joined: bool) -> None:
    target = WITH_OTHERS[0] if is_joined else b"/v1/lookup/t/a"
    front, chunks = Front(), make_known_header_gets(target, b"/ready", b"/other", target)
    at_once = [False, False, True, True, True, True]
    assert run_exchange(chunks, front, at_once) == run_exchange(chunks, None, at_once)
    assert (front.asked_with_others if is_joined else front.looked_up_targets)[:1] == [target]


async def under_way(target: bytes = b"/v1/lookup/t/a") -> Connection:
    """A connection with a lookup that has just begun."""
    connection = Connection(Front())
    for chunk in make_known_header_gets():
        await connection.deliver(chunk)
    connection.transport.written.clear()
    connection.protocol.data_received(get(target))
    assert len(connection.state.tasks) == (target not in WITH_OTHERS)
    return connection


@pytest.mark.parametrize("target", [b"/v1/lookup/t/a", b"/v1/lookup/t/none", *WITH_OTHERS])
@pytest.mark.parametrize("is_draining", [False, True])
def test_a_lookup_under_way_is_answered_before_the_server_stops(target: bytes, is_draining: bool) -> None:
    async def run() -> tuple[bytes, bool, bool]:
        connection = await under_way(target)
        if is_draining:
            connection.state.default_headers.append((b"connection", b"close"))
        connection.protocol.shutdown()
        was_closed = connection.transport.is_closed
        await connection.deliver(b"")
        await connection.deliver(b"")
        return bytes(connection.transport.written), was_closed, connection.transport.is_closed

    response, was_closed, is_closed = asyncio.run(run())
    assert not was_closed and is_closed
    assert response.count(b"connection: close") == 1
    assert response.endswith(STORED_ANSWERS[target][2] if target in STORED_ANSWERS else b"GET" + target)


@pytest.mark.parametrize("target", [b"/v1/lookup/t/a", WITH_OTHERS[0]])
def test_a_connection_is_not_closed_for_a_lookup_that_takes_long(target: bytes) -> None:
    async def run() -> bool:
        connection = await under_way(target)
        for _ in range(3):
            connection.protocol.timeout_keep_alive_handler()
        return connection.transport.is_closed

    assert not asyncio.run(run())


@pytest.mark.parametrize("target", [b"/v1/lookup/t/a", *WITH_OTHERS])
def test_a_caller_that_left_is_not_answered(target: bytes) -> None:
    async def run() -> tuple[bytes, int]:
        connection = await under_way(target)
        connection.protocol.data_received(get())
        connection.transport.close()
        connection.protocol.connection_lost(None)
        for _ in range(12):
            await asyncio.sleep(0)
        return bytes(connection.transport.written), len(connection.state.tasks)

    assert asyncio.run(run()) == (b"", 0)


@pytest.mark.parametrize("target", [b"/v1/lookup/t/a", *WITH_OTHERS])
def test_what_waits_behind_a_lookup_is_bounded(target: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1_protocol, "READ_TURN_S", 60.0)

    async def run() -> list[bool]:
        connection = await under_way(target)
        paused_states = []
        for _ in range(2):
            connection.protocol.data_received(b"POST /other HTTP/1.1\r\n" + b"A: " + b"b" * 40_000)
            paused_states.append(connection.protocol.flow.read_paused)
        await connection.deliver(b"")
        return [*paused_states, connection.protocol.flow.read_paused]

    assert asyncio.run(run()) == [False, True, False]


def test_the_second_lookup_with_a_body_and_the_same_headers_is_run_from_here() -> None:
    bodies = [b"{}", b"{ }", b"x" * 500, b""]
    front, chunks = Front(), [post(body=body) for body in bodies]
    assert run_exchange(chunks, front) == run_exchange(chunks, None)
    assert front.run == [b"/v1/lookup/t"] * 3


def test_an_application_receives_a_body_as_from_uvicorn() -> None:
    scopes: list[dict[str, Any]] = []

    async def keeping(scope: Any, receive: Any, send: Any) -> None:
        added_keys = (ADMITTED_KEY, CALLER_KEY)
        scopes.append({name: scope_value for name, scope_value in scope.items() if name not in added_keys})
        await app(scope, receive, send)

    front = Front()
    front.app = keeping
    run_exchange([post(b"/v1/lookup/t?k=3", b"1"), post(b"/v1/lookup/t?k=3", b"12")], front)
    run_exchange([post(b"/v1/lookup/t?k=3", b"12", b"\r\nExpect: nothing" + KEEP_ALIVE_BLOCK)], front)

    by_uvicorn, from_here, without = scopes
    assert by_uvicorn["headers"][0] == (b"content-length", b"1")
    assert from_here["headers"][0] == (b"content-length", b"2")
    assert {**from_here, "headers": by_uvicorn["headers"]} == by_uvicorn
    assert without.keys() == by_uvicorn.keys()


def test_a_refusal_is_sent_without_a_task() -> None:
    async def run() -> tuple[bytes, list[bytes], int]:
        front = Front()
        connection = Connection(front)
        for _ in range(2):
            await connection.deliver(post())
        connection.transport.written.clear()
        front.is_overloaded = True
        connection.protocol.data_received(post())
        assert not connection.state.tasks
        connection.protocol.data_received(get())
        return bytes(connection.transport.written), front.run, connection.state.total_requests

    responses, run_, count = asyncio.run(run())
    assert responses.startswith(b"HTTP/1.1 503") and b"retry-after: 1\r\n" in responses
    assert responses.split(b"\r\n\r\n", 1)[1].startswith(b"later")
    assert run_ == [b"/v1/lookup/t"] and count == 3


def test_a_watched_request_with_a_body_is_judged_by_the_application() -> None:
    front, chunks = Front(), [post(), post()]
    front.request_watch = SimpleNamespace(leaves_unobserved=lambda _scope: False)
    front.is_overloaded = True
    assert run_exchange(chunks, front) == run_exchange(chunks, None)
    assert not front.run


@pytest.mark.parametrize("end", ["cancelled", "lost"])
def test_a_lookup_with_a_body_that_is_cut_off_leaves_nothing_behind(end: str) -> None:
    async def run() -> tuple[list[str], bool, int]:
        message_types: list[str] = []

        async def waiting(_scope: Any, receive: Any, _send: Any) -> None:
            message_types.append((await receive())["type"])
            message_types.append((await receive())["type"])

        front = Front()
        connection = Connection(front)
        await connection.deliver(post())
        front.app = waiting
        await connection.deliver(post())
        if end == "cancelled":
            for task in list(connection.state.tasks):
                task.cancel()
        else:
            connection.transport.close()
            connection.protocol.connection_lost(None)
        for _ in range(8):
            await asyncio.sleep(0)
        return message_types, connection.transport.is_closed, len(connection.state.tasks)

    expected_types = ["http.request"] + ["http.disconnect"] * (end == "lost")
    assert asyncio.run(run()) == (expected_types, True, 0)


@pytest.mark.parametrize(("block", "expected_block", "digits"), [
    (b"\r\nContent-Length: 12\r\n\r\n", b"\r\nContent-Length: 0\r\n\r\n", b"12"),
    (b"\r\nA: b\r\ncontent-length: 7\r\nC: d\r\n\r\n", b"\r\nA: b\r\ncontent-length: 0\r\nC: d\r\n\r\n", b"7"),
    (KEEP_ALIVE_BLOCK, KEEP_ALIVE_BLOCK, b""),
    (b"\r\nContent-Length: 1234567890\r\n\r\n",) * 2 + (b"",),
    (b"\r\nContent-Length:1\r\n\r\n",) * 2 + (b"",),
    (b"\r\nX-Content-Length: 1\r\n\r\n",) * 2 + (b"",),
])  # fmt: skip
def test_headers_are_known_whatever_length_they_tell(block: bytes, expected_block: bytes, digits: bytes) -> None:
    assert split_content_length(block) == (expected_block, digits)


def test_what_fails_at_once_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bool:
        raise RuntimeError("a defect")

    front, chunks = Front(), make_known_header_gets(b"/v1/lookup/t/a", WITH_OTHERS[0])
    monkeypatch.setattr(front, "try_join", broken)
    assert run_exchange(chunks, front) == run_exchange(chunks, None)
    assert front.looked_up_targets == [b"/v1/lookup/t/a", WITH_OTHERS[0]]


def test_a_watched_request_goes_on() -> None:
    front = Front()
    front.request_watch = SimpleNamespace(leaves_unobserved=lambda _scope: False)
    assert run_exchange(make_known_header_gets(*STORED_ANSWERS), front) == run_exchange(
        make_known_header_gets(*STORED_ANSWERS), None
    )
    assert not front.looked_up_targets and front.untraced_fast.answered


def test_while_there_is_nothing_to_answer_from_requests_go_on() -> None:
    front = Front()
    front.untraced_fast = None
    assert run_exchange([get(), get(), get()], front) == run_exchange([get(), get(), get()], None)
