"""Bytes as anybody may send them, over real sockets: what uvicorn alone answers to them, the service answers, too.

The judge is uvicorn's own protocol over the very same application. A bound of ours may end a connection earlier.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
import uvicorn
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from precompute.config.settings import NightConfig
from serving.app import create_app
from serving.engine.hot_route import FastLookups
from serving.http.http1_protocol import Http1Protocol
from serving.http.lookup_connection import SharedState, connection_factory
from tests import hostile
from tests.integration.http.hot_way import NOW_S
from tests.integration.nights import build_night, histories
from tests.integration.serving_app import settings as service_settings
from tests.polling import poll_until

QUIET_S, PATIENT_S = 0.05, 1.0
CLOSE = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
REFUSED = re.compile(rb"HTTP/1.1 (408|413|429|431|503) [^\r]*\r\n.*connection: close", re.DOTALL)
OF_THE_MOMENT = [
    (re.compile(rb"(?:x-request-id|server-timing): [^\r]*\r\n"), b""),
    (re.compile(rb'"source":"l2"'), b'"source":"l1"'),
]


class StreamReply(NamedTuple):
    """A response without the parts that always differ, and whether the connection was closed."""

    data: bytes
    is_ended: bool


@dataclass
class Court:
    """The service and uvicorn's own protocol as its judge, in one loop."""

    runner: asyncio.Runner
    state: ServerState
    shared: SharedState
    users: list[str]
    service_protocol: Callable[[], asyncio.Protocol]
    judges: Callable[[], asyncio.Protocol]
    servers: list[Any] = field(default_factory=list)

    def get_replies(
        self, pieces: list[bytes], quiet_s: float = QUIET_S, *, waits: bool = False
    ) -> tuple[StreamReply, StreamReply]:
        """What each answers to these bytes."""

        async def send_to_both() -> tuple[StreamReply, StreamReply]:
            service_reply, judges = await asyncio.gather(
                *(
                    _send_pieces(server.sockets[0].getsockname(), pieces, quiet_s, waits=waits)
                    for server in self.servers
                )
            )
            return service_reply, judges

        return self.runner.run(send_to_both())

    def agree(self, pieces: list[bytes], *, waits: bool = False) -> None:
        """Fails unless both answer alike, or a bound was passed."""
        ended_count = self.shared.connections.ended_count_by_reason.total()
        for quiet_s in (QUIET_S, PATIENT_S):
            service_reply, judges = self.get_replies(pieces, quiet_s, waits=waits)
            if service_reply == judges:
                return
        assert self.shared.connections.ended_count_by_reason.total() > ended_count, (service_reply, judges)
        answered, _, refusal = service_reply.data.rpartition(b"HTTP/1.1 ")
        answered_data = answered if REFUSED.match(b"HTTP/1.1 " + refusal) else service_reply.data
        assert service_reply.is_ended, (service_reply, judges)
        assert self.judged(answered_data, judges, b"".join(pieces)), (service_reply, judges)

    def judged(self, answered_data: bytes, judges: StreamReply, sent_data: bytes) -> bool:
        """Whether the judge answers some beginning of what was sent with these bytes.

        Not always the whole: for what is no request behind one that is not answered yet it drops that one's answer.
        """
        if judges.data.startswith(answered_data):
            return True
        ends = [match.end() for match in re.finditer(rb"\r\n\r\n", sent_data)]
        return any(
            self.get_replies([sent_data[:end]], PATIENT_S)[1].data.startswith(answered_data) for end in reversed(ends)
        )


class Caller(asyncio.Protocol):
    """A protocol that keeps what it receives."""

    def __init__(self) -> None:
        self.data, self.moved, self.is_ended = bytearray(), asyncio.Event(), False

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.moved.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_ended = True
        self.moved.set()


async def _send_pieces(where: tuple[str, int], pieces: list[bytes], quiet_s: float, *, waits: bool) -> StreamReply:
    """Sends piece by piece; listens until the connection ends, or nothing comes any more."""
    transport, caller = await asyncio.get_running_loop().create_connection(Caller, *where)
    for piece in pieces:
        if not caller.is_ended:
            caller.moved.clear()
            transport.write(piece)
        with contextlib.suppress(TimeoutError):  # who repeats itself hears the answer first
            await asyncio.wait_for(caller.moved.wait(), quiet_s / 10 if waits else 0)
    with contextlib.suppress(TimeoutError):
        while not caller.is_ended:
            caller.moved.clear()
            await asyncio.wait_for(caller.moved.wait(), quiet_s)
    transport.abort()
    reply_data = bytes(caller.data)
    for pattern, instead in OF_THE_MOMENT:
        reply_data = pattern.sub(instead, reply_data)
    return StreamReply(reply_data, caller.is_ended)


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("bytes"), redis_url)


@pytest.fixture(scope="module")
def court(night: NightConfig) -> Iterator[Court]:
    app = create_app(service_settings(night, poll_s=60.0, blocklist_poll_s=60.0))
    state, shared = ServerState(), SharedState(app)
    state.default_headers = [(b"server", b"uvicorn")]
    config = uvicorn.Config(app, ws="none", lifespan="off", access_log=False, proxy_headers=False, log_config=None)
    config.load()
    protocol_factory = connection_factory(shared)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        life = app.router.lifespan_context(app)
        runner.run(life.__aenter__())
        app.fast_path = app.untraced_fast = FastLookups(app.state.service, clock=lambda: NOW_S)
        ladder: Any = app.state.service.ladder
        ladder._clock = ladder.answer_builder._clock = lambda: NOW_S
        fuzz_court = Court(
            runner, state, shared, sorted(histories(night))[:6],
            lambda: protocol_factory(config, state, {}), lambda: Http1Protocol(config, state, {}),
        )  # fmt: skip

        async def listen(make: Callable[[], asyncio.Protocol]) -> Any:
            return await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)

        fuzz_court.servers = [
            runner.run(listen(factory)) for factory in (fuzz_court.service_protocol, fuzz_court.judges)
        ]
        for user in fuzz_court.users * 3:
            target = f"/v1/lookup/user_topk/{quote(user, safe='')}".encode()
            fuzz_court.get_replies([b"GET " + target + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"])
        yield fuzz_court
        for server in fuzz_court.servers:
            server.close()
        runner.run(life.__aexit__(None, None, None))


GOOD_TARGETS = st.sampled_from(
    [b"/healthz", b"/v1/lookup/user_topk/nobody", b"/v1/lookup/user_topk", b"/v1/lookup", b"/v1/score", b"/nothing",
     b"/v1/lookup/user_topk/%22%2C", b"/v1/lookup/user_topk/a?k=3", b"/v1/lookup/user_topk/a?k=x&", b"//",
     b"/openapi.json", b"/v1/lookup/user_topk/%00", b"/v1/lookup/user_topk/%FF", b"/v1%2Flookup/t/a"]
)  # fmt: skip
TARGETS = GOOD_TARGETS | st.sampled_from(
    [b"", b"*", b"/?", b"/v1/lookup/user_topk/a b", b"/v1/lookup/user_topk/\xc3\xa9", b"/v1/lookup/user_topk/a#b",
     b"http://a/healthz", b"/v1/lookup/user_topk/a\x00", b"/v1/lookup/user_topk/" + b"x" * 300]
)  # fmt: skip
GOOD_LINES = st.sampled_from(
    [b"Accept: */*", b"accept: application/vnd.apache.arrow.stream", b"Connection: keep-alive", b"X-Request-Id: a",
     b"X-Deadline-Ms: 900", b"X-Deadline-Ms: soon", b"x-larder-timing: 1", b"Expect: 100-continue", b"x: \xff\xfe",
     b"x:"]
)  # fmt: skip
LINES = GOOD_LINES | st.sampled_from(
    [b"Connection: close", b"Connection: upgrade", b"Upgrade: h2c", b"Upgrade: websocket", b"Content-Length: 0",
     b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 5, 5", b"Content-Length: +5", b"Content-Length: 5x",
     b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Transfer-Encoding: gzip, chunked", b"a:b", b"a : b",
     b"no colon", b" folded", b"\tfolded", b": empty", b"x: \x00", b"Trailer: x", b"x: " + b"y" * 300]
)  # fmt: skip
GOOD_METHODS = st.sampled_from([b"GET", b"GET", b"POST", b"POST", b"HEAD"])
METHODS = GOOD_METHODS | st.sampled_from([b"PUT", b"OPTIONS", b"get", b"PRI", b"\x00", b""])
VERSIONS = st.sampled_from([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.2", b"http/1.1", b"", b"HTTP/1.1 "])
ENDS = st.sampled_from([b"\r\n"] * 8 + [b"\n", b"\r", b"\n\r"])
BODIES = st.sampled_from(
    [b"", b"{}", b'{"entities":["a"]}', b'{"entities":["a\\",","b"],"k":3}', b'{"entities":[{"id":"a"', b"\x00" * 9]
)  # fmt: skip
LASTS = st.sampled_from(
    [b"0\r\nx: y\r\n\r\n", b"0;ext=1\r\n\r\n", b"G\r\n", b"fffffffffffffffff\r\n", b"0\n\n", b""]
)  # fmt: skip


def chunked(body: bytes, step: int, last: bytes) -> bytes:
    chunks = [body[at : at + step] for at in range(0, len(body), step)]
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + last


@st.composite
def requests(draw: st.DrawFn, users: list[str], is_good: bool) -> list[bytes]:
    """One as its bytes; some of them several times, as a client repeats itself."""
    method, body = draw(GOOD_METHODS if is_good else METHODS), draw(BODIES)
    end, version = (b"\r\n", b"HTTP/1.1") if is_good else (draw(ENDS), draw(VERSIONS))
    known_targets = (st.sampled_from(users) | hostile.ids).map(
        lambda id_: f"/v1/lookup/user_topk/{quote(id_, safe='')}".encode()
    )
    target = draw(known_targets | (GOOD_TARGETS if is_good else TARGETS))
    lines = [b"Host: a", *draw(st.lists(GOOD_LINES if is_good else LINES, max_size=2))]
    tail = b""
    if method in (b"POST", b"PUT"):
        target = target if draw(st.booleans()) else b"/v1/lookup/user_topk"
        framing = draw(st.sampled_from(["length", "chunked"] if is_good else ["length", "odd", "none"]))
        tail = body
        if framing == "length":
            lines.append(b"Content-Length: %d" % len(body))
        elif framing != "none":
            lines.append(b"Transfer-Encoding: chunked")
            last = b"0\r\n\r\n" if framing == "chunked" else draw(LASTS)
            tail = chunked(body, draw(st.integers(1, 9)), last)
    raw_request = end.join([b" ".join([method, target, version]), *lines, b"", b""]) + tail
    return [raw_request] * draw(st.sampled_from([1, 1, 2, 4]))


@st.composite
def streams(draw: st.DrawFn, users: list[str]) -> list[bytes]:
    """Several requests of one connection, the last of them or many of them bad, perhaps damaged, in pieces."""
    good = draw(st.lists(requests(users, True), max_size=4))
    bad_requests = draw(st.lists(requests(users, False), max_size=2))
    apart = [*chain(*good, *bad_requests), CLOSE]
    if draw(st.booleans()):
        return apart
    stream = bytearray(b"".join(apart))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(stream) - 1))
        stream[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    cut_positions = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    return [bytes(stream[a:b]) for a, b in pairwise([0, *cut_positions, len(stream)]) if a < b]


def fuzz(court: Court, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(pieces=streams(court.users), waits=st.booleans())
    def agree(pieces: list[bytes], waits: bool) -> None:
        court.agree(pieces, waits=waits)

    agree()


def test_streams_are_answered_as_by_uvicorn(court: Court) -> None:
    fuzz(court, 80)


@pytest.mark.storm
def test_many_streams_are_answered_as_by_uvicorn(court: Court) -> None:
    fuzz(court, 5_000)


def test_a_stream_that_arrives_byte_by_byte_is_the_same_stream(court: Court) -> None:
    get = b"GET /v1/lookup/user_topk/%b HTTP/1.1\r\n" % quote(court.users[0]).encode()
    post = b"POST /v1/lookup/user_topk HTTP/1.1\r\nContent-Length: 18\r\n"
    get, post = get + b"Host: a\r\n\r\n", post + b'Host: a\r\n\r\n{"entities":["a"]}'
    stream = get * 3 + post * 3 + get + CLOSE

    court.agree([bytes([byte]) for byte in stream])
    court.agree([stream])


@pytest.mark.parametrize(
    "raw_requests",
    [
        b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n" * 200,
        b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /" + b"x" * 60_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_beyond_a_bound_what_was_asked_before_is_answered_first(court: Court, raw_requests: bytes) -> None:
    ended_count = court.shared.connections.ended_count_by_reason.total()

    court.agree([raw_requests + CLOSE])

    assert court.shared.connections.ended_count_by_reason.total() > ended_count


def leave(court: Court, examples: int) -> None:
    async def go(pieces: list[bytes], iterations: int) -> None:
        where = court.servers[0].sockets[0].getsockname()
        transport, _ = await asyncio.get_running_loop().create_connection(Caller, *where)
        for piece in pieces:
            transport.write(piece)
            await asyncio.sleep(0)
        for _ in range(iterations):
            await asyncio.sleep(0)
        transport.abort()

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(pieces=streams(court.users), size=st.integers(0, 2_000), iterations=st.integers(0, 9))
    def leave_early(pieces: list[bytes], size: int, iterations: int) -> None:
        cut = b"".join(pieces)[:size]
        court.runner.run(go([cut[: size // 2], cut[size // 2 :]], iterations))

    leave_early()
    front = court.shared.app

    def is_empty() -> bool:
        court.get_replies([CLOSE])
        requests_and_bytes = (front.state.service.admission.requests_under_way, front.body_budget.held_bytes)
        return not court.state.tasks and not court.state.connections and requests_and_bytes == (0, 0)

    assert poll_until(is_empty)


def test_callers_that_leave_at_any_point_leave_nothing_behind(court: Court) -> None:
    leave(court, 60)


@pytest.mark.storm
def test_many_callers_that_leave_leave_nothing_behind(court: Court) -> None:
    leave(court, 5_000)
