"""Rules of HTTP/1.1 that a running service keeps on both transports, tried with bytes that no HTTP client sends.

RFC 9110 says what a message means, RFC 9112 how it stands on the wire.
"""

import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from precompute.config.settings import NightConfig
from tests.integration.nights import build_night, histories
from tests.integration.program import environment, started
from tests.polling import poll_until
from tests.raw_http import RawConnection, RawResponse, exchange

TABLE = "/v1/lookup/user_topk"
HOST = b"Host: a\r\n"
LAST = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
"""A request whose answer is the last one of its connection."""
BODY_BYTES = 64 << 10
PIPELINE_MAX = 16
MIB = 1 << 20


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url)


@pytest.fixture(scope="module", params=["on", "off"])
def url(night: NightConfig, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    """A running service, over the fast transport and over uvicorn's."""
    environ = environment(
        night, tmp_path_factory.mktemp("state"),
        LARDER_FAST_HTTP=request.param, LARDER_BODY_BYTES=str(BODY_BYTES),
    )  # fmt: skip
    with started(environ) as (_, address):
        yield address


@pytest.fixture(scope="module")
def users(night: NightConfig) -> list[str]:
    """Two ids of the night that need no escaping."""
    unescaped_users = [user for user in sorted(histories(night)) if user.isascii() and user.isalnum()]
    return unescaped_users[:2]


def get(path: str, *fields: bytes) -> bytes:
    """A GET with the Host field and others."""
    return b"GET %b HTTP/1.1\r\n%b\r\n" % (path.encode(), HOST + b"".join(f + b"\r\n" for f in fields))


def post(body: bytes, *fields: bytes, path: str = TABLE) -> bytes:
    """A POST of JSON with its length."""
    lines = b"".join(field + b"\r\n" for field in (b"Content-Length: %d" % len(body), *fields))
    return b"POST %b HTTP/1.1\r\n%b%b\r\n%b" % (path.encode(), HOST, lines, body)


def chunked(body: bytes, end: bytes = b"0\r\n\r\n", *fields: bytes, version: bytes = b"1.1") -> bytes:
    """A POST of JSON in one chunk, in none without a body; `end` stands behind it."""
    lines = b"".join(field + b"\r\n" for field in (b"Transfer-Encoding: chunked", *fields))
    head = b"POST %b HTTP/%b\r\n%b%b\r\n" % (TABLE.encode(), version, HOST, lines)
    return head + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + end


def lookup(*ids: str) -> bytes:
    """The body of a lookup."""
    return json.dumps({"entities": list(ids), "k": 1}).encode()


def ids_of(response: RawResponse) -> list[str]:
    """The ids that a response of status 200 answers."""
    answer = json.loads(response.body)
    return [entity["id"] for entity in answer.get("answers", [answer])]


def statuses(responses: list[RawResponse]) -> list[int]:
    """Statuses in order."""
    return [response.status for response in responses]


class Rule(NamedTuple):
    """What is sent, and the statuses of which each answer has one; `is_followed`: the next request is answered."""

    name: str
    raw_request: bytes
    answers: tuple[set[int], ...]
    is_followed: bool


ACCEPTED = {200, 404, 405, 422}
REFUSED = {400}
RULES = [
    # Request lines.
    Rule("a GET", get("/"), (ACCEPTED,), True),
    Rule("a POST with a length", post(b"hello"), (ACCEPTED,), True),
    Rule("a POST of the server as such", b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", (ACCEPTED,), True),
    Rule("an absolute target", b"GET http://a/healthz HTTP/1.1\r\n" + HOST + b"\r\n", ({200},), True),
    Rule("CONNECT", b"CONNECT a.example:443 HTTP/1.1\r\n" + HOST + b"\r\n", ({501},), False),
    Rule("a version to come", b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", ({505},), False),
    Rule("no version", b"GET /\r\n" + HOST + b"\r\n", (REFUSED,), False),
    # Fields.
    Rule("no Host", b"GET / HTTP/1.1\r\n\r\n", (REFUSED,), False),
    Rule("two Hosts", get("/", b"Host: b"), (REFUSED,), False),
    Rule("a Host with a blank", b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", (REFUSED,), False),
    Rule("a name with a blank", get("/", b"Bad Name: 1"), (REFUSED,), False),
    Rule("a folded field", get("/", b" more"), (REFUSED,), False),
    Rule("a blank before the colon", b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", (REFUSED,), False),
    Rule("a NUL in a value", b"GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n", (REFUSED,), False),
    # Bodies.
    Rule("chunks", chunked(b"hello"), (ACCEPTED,), True),
    Rule("chunks in HTTP/1.0", chunked(b"hello", version=b"1.0"), (REFUSED,), False),
    Rule("chunks and a length", chunked(b"hello", b"0\r\n\r\n", b"Content-Length: 5"), (REFUSED,), False),
    Rule(
        "an unknown coding",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: odd\r\n\r\nhello", ({400, 501},), False,
    ),
    Rule(
        "chunked before another coding",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked, gzip\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        (REFUSED,), False,
    ),
    Rule("two lengths", post(b"hello!!", b"Content-Length: 5"), (REFUSED,), False),
    Rule("a length in words", b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: five\r\n\r\nhello", (REFUSED,), False),
    Rule("a size that is no number", chunked(b"", b"Z\r\nhello\r\n0\r\n\r\n"), (REFUSED,), False),
    Rule("a chunk longer than its size", chunked(b"", b"5\r\nhello0\r\n\r\n"), (REFUSED,), False),
    # Connections.
    Rule("a second request", get("/healthz") * 2, ({200}, {200}), True),
    Rule("close", get("/healthz", b"Connection: close"), ({200},), False),
    Rule("HTTP/1.0", b"GET /healthz HTTP/1.0\r\n" + HOST + b"\r\n", ({200},), False),
    # Size.
    Rule("a long target", get("/" + "a" * 9_000), (ACCEPTED,), True),
    Rule("a long field", get("/", b"X: " + b"x" * 9_000), (ACCEPTED,), True),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_a_rule_of_http_holds(url: str, rule: Rule) -> None:
    responses = exchange(url, rule.raw_request + LAST)

    assert len(responses) == len(rule.answers) + rule.is_followed
    for response, expected in zip(responses, rule.answers, strict=False):
        assert response.status in expected
        assert "content-length" in response.headers
    assert responses[-1].closes
    assert statuses(exchange(url, LAST)) == [200]


def test_many_fields_do_not_stop_the_service(url: str) -> None:
    request = get("/healthz", *(b"X-%d: 1" % number for number in range(101)))
    # The fast transport bounds the number of fields, uvicorn's does not.
    assert statuses(exchange(url, request + LAST)) in ([431], [200, 200])
    assert statuses(exchange(url, LAST)) == [200]


def test_chunks_and_a_length_close_the_connection(url: str) -> None:
    with RawConnection(url) as connection:
        connection.send(chunked(b"hello", b"0\r\n\r\n", b"Content-Length: 5"))
        response = connection.response()
        assert response is not None
        assert response.closes
        assert connection.response() is None


def test_an_answer_to_head_has_no_body(url: str) -> None:
    with RawConnection(url) as connection:
        connection.send(b"HEAD / HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
        head, _, body = connection.read_to_end().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404")
    assert body == b""


def test_an_error_says_where_it_ends(url: str) -> None:
    (response,) = exchange(url, b"get / HTTP/1.1\r\n" + HOST + b"\r\n")
    assert response.status == 400
    assert int(response.headers["content-length"]) == len(response.body) > 0


HOSTS_REFUSED = [
    b"x, y", b"x,y", b"x y", b"a@b", b"x/y", b"[::1", b"::1", b"[::1]x", b"x:80:80", b"x:port", b"a\\b", b"a#b",
    b"a?b", b"http://a", b"\xc3\xa9", b"a%", b"a%zz", b'"a"', b"<a>", b"a\tb", b"[a b]",
]  # fmt: skip
HOSTS_ACCEPTED = [
    b"a", b"", b"a:", b"a:8000", b"127.0.0.1", b"127.0.0.1:1", b"[::1]", b"[::1]:8000", b"larder_1", b"a.b-c.example.",
    b"a%20b", b" a ", b"xn--e1afmkfd.example",
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS_REFUSED)
def test_a_host_that_is_none_is_refused(url: str, users: list[str], host: bytes) -> None:
    request = b"GET %b/%b?k=1 HTTP/1.1\r\nHost: %b\r\n\r\n" % (TABLE.encode(), users[0].encode(), host)
    (response,) = exchange(url, request + LAST)
    assert response.status == 400
    assert b"Host" in response.body


@pytest.mark.parametrize("host", HOSTS_ACCEPTED)
def test_a_host_with_or_without_a_port_is_accepted(url: str, host: bytes) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: %b\r\n\r\n" % host
    assert statuses(exchange(url, request + LAST)) == [200, 200]


def test_a_request_without_a_host_is_refused_on_a_connection_that_is_known(url: str, users: list[str]) -> None:
    path = f"{TABLE}/{users[0]}?k=1"
    for wrong in (b"", b"Host: a\r\nHost: a\r\n", b"Host: a b\r\n"):
        with RawConnection(url) as connection:
            for _ in range(4):
                connection.send(get(path))
                response = connection.response()
                assert response is not None
                assert response.status == 200
            connection.send(b"GET %b HTTP/1.1\r\n%b\r\n" % (path.encode(), wrong))
            assert statuses(connection.responses()) == [400]


def test_http_1_0_needs_no_host(url: str) -> None:
    assert statuses(exchange(url, b"GET /healthz HTTP/1.0\r\n\r\n")) == [200]
    assert statuses(exchange(url, b"GET /healthz HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n")) == [400]


@pytest.mark.parametrize(("line", "status"), [
    (b"GET /healthz RTSP/1.0", 400), (b"GET /healthz", 400), (b"GET  /healthz HTTP/1.1", 400),
    (b"GET /healthz  HTTP/1.1", 400), (b"GET /healthz HTTP/1.1 ", 400), (b" GET /healthz HTTP/1.1", 400),
    (b"GET\t/healthz HTTP/1.1", 400), (b"GET /healthz\tHTTP/1.1", 400), (b"GET /healthz http/1.1", 400),
    (b"GET /healthz HTTP/1.10", 400), (b"GET /healthz HTTP/11", 400), (b"GET /healthz HTTP/1.1\r", 400),
    (b"GET /healthz ICE/1.0", 400), (b"GET HTTP/1.1", 400),
    (b"GET /healthz HTTP/2.0", 505), (b"GET /healthz HTTP/3.0", 505), (b"GET /healthz HTTP/0.9", 505),
    (b"GET /healthz HTTP/1.2", 505), (b"PRI * HTTP/2.0", 505),
])  # fmt: skip
def test_another_version_or_line_is_refused(url: str, line: bytes, status: int) -> None:
    responses = exchange(url, line + b"\r\n" + HOST + b"\r\n" + LAST)
    assert statuses(responses) == [status]


@pytest.mark.parametrize("start", [b"\r", b"\r\r\n", b"\n", b"\n\n", b"\r\n\r", b"\r\n\n", b" ", b"\t", b"\x00"])
def test_nothing_but_empty_lines_stands_before_a_request(url: str, start: bytes) -> None:
    assert statuses(exchange(url, start + LAST)) == [400]


@pytest.mark.parametrize("start", [b"\r", b"\r\n", b"\r\n\r"])
def test_empty_lines_before_a_request_may_come_in_pieces(url: str, start: bytes) -> None:
    remainder = (b"\r\n" + LAST) if start.endswith(b"\n") else (b"\n" + LAST)
    with RawConnection(url) as connection:
        connection.send(start)
        connection.send(remainder)
        assert statuses(connection.responses()) == [200]


def test_a_bare_carriage_return_in_a_value_is_refused(url: str) -> None:
    assert statuses(exchange(url, get("/healthz", b"X: a\rb") + LAST)) == [400]


def test_a_client_of_http_1_0_gets_no_interim_answer(url: str, users: list[str]) -> None:
    body = lookup(users[0])
    request = b"POST %b HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (TABLE.encode(), len(body))
    with RawConnection(url) as connection:
        connection.send(request)
        connection.send(body)
        assert statuses(connection.responses()) == [200]


def test_a_client_that_expects_100_continue_gets_it(url: str, users: list[str]) -> None:
    body = lookup(users[0])
    with RawConnection(url) as connection:
        connection.send(post(body, b"Expect: 100-continue").removesuffix(body))
        interim = connection.response()
        assert interim is not None
        assert interim.status == 100
        connection.send(body)
        final = connection.response()
        assert final is not None
        assert (final.status, ids_of(final)) == (200, users[:1])


@pytest.mark.parametrize("codings", [
    (b"cow, chunked",), (b"gzip, chunked",), (b"identity, chunked",), (b"gzip", b"chunked"), (b"GZIP , Chunked",),
])  # fmt: skip
def test_a_coding_besides_chunked_is_not_served(url: str, users: list[str], codings: tuple[bytes, ...]) -> None:
    lines = b"".join(b"Transfer-Encoding: %b\r\n" % coding for coding in codings)
    body = lookup(users[0])
    request = b"POST %b HTTP/1.1\r\n%b%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (TABLE.encode(), HOST, lines, len(body), body)
    (response,) = exchange(url, request + LAST)
    assert response.status == 501


@pytest.mark.parametrize("path", [TABLE, "/v1/lookup", "/v1/score", "/v1/events", "/v1/explain/user_topk"])
@pytest.mark.parametrize("coding", [b"gzip", b"GZip", b"br", b"gzip, identity"])
def test_a_body_in_a_content_coding_is_refused_by_its_name(
    url: str, users: list[str], path: str, coding: bytes
) -> None:
    request = post(lookup(users[0]), b"Content-Type: application/json", b"Content-Encoding: " + coding, path=path)
    for response in exchange(url, request * 3 + LAST)[:3]:
        error = json.loads(response.body)["error"]
        if path == "/v1/events" and response.status == 409:
            continue  # this service takes no events in, and says so first
        assert response.status == 415
        assert error["field"] == "content-encoding"
        assert coding.decode().lower() in error["message"]
        assert response.headers["accept-encoding"] == "identity"


def test_a_body_without_a_content_coding_may_say_so(url: str, users: list[str]) -> None:
    request = post(lookup(users[0]), b"Content-Encoding: identity")
    assert statuses(exchange(url, request * 3 + LAST)) == [200] * 4


TRAILERS = [
    b"Connection: close", b"Content-Length: 5", b"Transfer-Encoding: gzip", b"Upgrade: h2c\r\nConnection: upgrade",
    b"Host: b", b"X: y", b"Authorization: Bearer no", b"Content-Encoding: gzip", b"Expect: 100-continue",
]  # fmt: skip


@pytest.mark.parametrize("trailer", TRAILERS)
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_trailer_decides_nothing(url: str, users: list[str], trailer: bytes, *, is_cut: bool) -> None:
    request = chunked(lookup(users[0]), b"0\r\n" + trailer + b"\r\n\r\n")
    with RawConnection(url) as connection:
        for piece in [request[:-9], request[-9:]] if is_cut else [request]:
            connection.send(piece)
        first = connection.response()
        assert first is not None
        assert (first.status, ids_of(first), first.closes) == (200, users[:1], False)
        connection.send(get(f"{TABLE}/{users[1]}?k=1", b"X-Unseen: 1"))
        second = connection.response()
        assert second is not None
        assert (second.status, ids_of(second)) == (200, users[1:2])


@pytest.mark.parametrize("trailer", [b"X: a\nb", b"no colon", b" X: y", b"X : y", b"X: \x00", b"X: a\rb"])
def test_a_trailer_that_is_none_is_refused(url: str, users: list[str], trailer: bytes) -> None:
    responses = exchange(url, chunked(lookup(users[0]), b"0\r\n" + trailer + b"\r\n\r\n") + LAST)
    assert statuses(responses) == [400]


def test_requests_behind_chunks_are_read_from_where_these_end(url: str, users: list[str]) -> None:
    request_pair = chunked(lookup(users[0]), b"0\r\nX: y\r\n\r\n") + get(f"{TABLE}/{users[1]}?k=1")
    byte_stream = request_pair * 2 + LAST
    for size in (len(byte_stream), 1, 7, 50):
        with RawConnection(url) as connection:
            for at in range(0, len(byte_stream), size):
                connection.send(byte_stream[at : at + size])
            responses = connection.responses()
        assert [ids_of(response) for response in responses[:-1]] == [users[:1], users[1:2]] * 2


WRONG = [
    b"BAD\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00", b"\r\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
    b"POST /healthz HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZ\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("count", [1, 3])
def test_valid_requests_are_answered_before_the_one_behind_them_is_refused(
    url: str, users: list[str], wrong: bytes, count: int
) -> None:
    requested_users = [users[number % 2] for number in range(count)]
    raw_requests = b"".join(get(f"{TABLE}/{user}?k=2") for user in requested_users)
    *answers, refusal = exchange(url, raw_requests + wrong + LAST)
    assert [ids_of(answer) for answer in answers] == [[user] for user in requested_users]
    assert refusal.status // 100 == 4 or refusal.status == 505
    assert refusal.closes


def test_a_body_that_breaks_off_behind_a_request_leaves_its_answer(url: str, users: list[str]) -> None:
    raw_requests = post(lookup(users[0])) + chunked(lookup(users[1]), b"nonsense\r\n")
    answer, refusal = exchange(url, raw_requests)
    assert (ids_of(answer), refusal.status) == (users[:1], 400)


def test_requests_within_the_bound_are_answered_before_more_are_refused(url: str, users: list[str]) -> None:
    raw_requests = get(f"{TABLE}/{users[0]}?k=2") * (PIPELINE_MAX + 1)
    responses = exchange(url, raw_requests + LAST)
    assert statuses(responses)[:PIPELINE_MAX] == [200] * PIPELINE_MAX
    # Uvicorn's transport does not bound the number of waiting requests.
    assert statuses(responses)[PIPELINE_MAX:] in ([429], [200, 200])


def half_closed(users: list[str], unknown: str) -> dict[str, tuple[bytes, list[list[str]]]]:
    """What is sent before a peer closes its side, and the ids that are answered."""
    first_user, second_user = users
    ask_one, ask_other = get(f"{TABLE}/{first_user}?k=1"), get(f"{TABLE}/{second_user}?k=1")
    return {
        "a GET": (ask_one, [[first_user]]),
        "a GET of an unknown id": (get(f"{TABLE}/{unknown}?k=1"), [[unknown]]),
        "two GETs": (ask_one + ask_other, [[first_user], [second_user]]),
        "a POST of unknown ids": (post(lookup(unknown, first_user)), [[unknown, first_user]]),
        "POST and GET": (post(lookup(unknown)) + ask_other, [[unknown], [second_user]]),
        "GET and POST": (ask_one + post(lookup(unknown)), [[first_user], [unknown]]),
        "chunks": (chunked(lookup(unknown)), [[unknown]]),
    }


@pytest.mark.parametrize("case", half_closed(["", ""], ""))
@pytest.mark.parametrize("is_known", [False, True])
def test_a_peer_that_has_closed_its_side_gets_its_answers(
    url: str, users: list[str], case: str, *, is_known: bool
) -> None:
    for number in range(5):
        unknown = f"nobody-{case}-{is_known}-{number}".replace(" ", "-")
        raw_requests, expected = half_closed(users, unknown)[case]
        with RawConnection(url) as connection:
            for _ in range(3 if is_known else 0):
                connection.send(get("/healthz"))
                assert connection.response() is not None
            connection.send(raw_requests)
            connection.close_own_side()
            responses = connection.responses()
        assert [ids_of(response) for response in responses] == expected


def test_a_request_that_its_sender_cut_off_is_refused_behind_the_answers(url: str, users: list[str]) -> None:
    request = get(f"{TABLE}/{users[0]}?k=1")
    cut = [request[:9], request[:-2], post(lookup(users[1]))[:-5], chunked(lookup(users[1]))[:-3]]
    for part in cut:
        assert statuses(exchange(url, request + part, is_half_closed=True)) == [200, 400]
        assert statuses(exchange(url, part, is_half_closed=True)) == [400]
    assert exchange(url, b"", is_half_closed=True) == []


def test_head_is_answered_wherever_get_is(url: str, users: list[str]) -> None:
    paths = [
        "/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/dashboard", "/dashboard/data", "/v1/generations",
        f"{TABLE}/{users[0]}?k=2", f"{TABLE}/{users[0]}?k=0", f"/v1/explain/user_topk/{users[0]}",
        "/v1/lookup/nothing/x",
    ]  # fmt: skip
    for path in paths:
        with RawConnection(url) as connection:
            connection.send(get(path))
            expected = connection.response()
            connection.send(get(path).replace(b"GET", b"HEAD", 1))
            answer = connection.response(is_head=True)
            connection.send(LAST)
            behind = connection.response()
        assert expected is not None
        assert answer is not None
        assert behind is not None
        assert (answer.status, behind.status) == (expected.status, 200), path
        assert answer.headers["content-type"] == expected.headers["content-type"]
        assert int(answer.headers["content-length"]) > 0


@pytest.mark.parametrize(("method", "path", "allowed"), [
    ("POST", "/healthz", {"GET", "HEAD"}), ("PUT", "/readyz", {"GET", "HEAD"}), ("DELETE", "/metrics", {"GET", "HEAD"}),
    ("POST", "/v1/lookup/user_topk/u-1", {"GET", "HEAD"}), ("PUT", "/v1/lookup/user_topk", {"POST"}),
    ("GET", "/v1/lookup", {"POST"}), ("HEAD", "/v1/score", {"POST"}), ("PATCH", "/v1/events", {"POST"}),
    ("POST", "/v1/explain/user_topk/u-1", {"GET", "HEAD"}), ("POST", "/v1/generations", {"GET", "HEAD"}),
    ("POST", "/dashboard/data", {"GET", "HEAD"}), ("POST", "/dashboard", {"GET", "HEAD"}),
    ("OPTIONS", "/v1/feedback", {"POST"}), ("POST", "/openapi.json", {"GET", "HEAD"}),
])  # fmt: skip
def test_a_refused_method_is_answered_with_the_allowed_ones(
    url: str, method: str, path: str, allowed: set[str]
) -> None:
    with RawConnection(url) as connection:
        connection.send(f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n".encode())
        response = connection.response(is_head=method == "HEAD")
    assert response is not None
    assert response.status == 405
    assert {name.strip() for name in response.headers["allow"].split(",")} == allowed


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_a_sender_of_too_much_reads_that_it_is_too_much(url: str, *, is_chunked: bool) -> None:
    body = b" " * (8 * MIB)
    for _ in range(10):
        with RawConnection(url) as connection:
            connection.send(chunked(body) if is_chunked else post(body))
            (response,) = connection.responses()
        assert (response.status, response.closes) == (413, True)
        assert json.loads(response.body)["error"]["code"] == "body_too_large"


def test_a_sender_of_much_behind_a_refused_head_reads_why(url: str) -> None:
    for head in (b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n", get("/healthz") + b"BAD\r\n\r\n"):
        for _ in range(10):
            with RawConnection(url) as connection:
                connection.send(head + b" " * (8 * MIB))
                assert connection.responses()[-1].status == 400


def test_a_connection_that_ends_does_not_wait_for_its_peer_for_ever(url: str) -> None:
    with RawConnection(url) as connection:
        connection.send(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n")
        assert statuses(connection.responses()) == [400]

        def is_cut_off() -> bool:
            try:
                connection.send(b"x")
            except OSError:
                return True
            return False

        assert poll_until(is_cut_off, every_s=0.1)
