"""A request that asks for another protocol is an ordinary request: its body is no request, and what follows is read."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from precompute.config.settings import NightConfig
from tests.integration.nights import build_night, histories
from tests.integration.program import environment, started
from tests.polling import poll_until
from tests.raw_http import RawConnection, RawResponse

NGINX = shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin")))
TABLE = "/v1/lookup/user_topk"
PROTOCOLS = ("foo", "h2c", "websocket")
SEED = 11


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url)


@pytest.fixture(scope="module", params=["on", "off"])
def url(night: NightConfig, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    """A running service, over the fast transport and over uvicorn's."""
    environ = environment(night, tmp_path_factory.mktemp("state"), LARDER_FAST_HTTP=request.param)
    with started(environ) as (_, address):
        yield address


@pytest.fixture(scope="module")
def users(night: NightConfig) -> list[str]:
    unescaped_users = [user for user in sorted(histories(night)) if user.isascii() and user.isalnum()]
    return unescaped_users[:2] if len(unescaped_users) > 1 else ["u1", "u2"]


def get(user: str, *fields: str) -> bytes:
    """A GET of a user's list."""
    lines = "".join(f"{field}\r\n" for field in fields)
    return f"GET {TABLE}/{user}?k=1 HTTP/1.1\r\nHost: a\r\n{lines}\r\n".encode()


def post(body: bytes, *fields: str, is_chunked: bool = False) -> tuple[bytes, bytes]:
    """Head and framed body of a POST of lookups."""
    if is_chunked:
        body, length = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), "Transfer-Encoding: chunked"
    else:
        length = f"Content-Length: {len(body)}"
    lines = "".join(f"{field}\r\n" for field in ("Content-Type: application/json", *fields, length))
    return f"POST {TABLE} HTTP/1.1\r\nHost: a\r\n{lines}\r\n".encode(), body


def upgrade(protocol: str) -> tuple[str, str]:
    """The fields with which a client asks for another protocol."""
    return "Connection: Upgrade", f"Upgrade: {protocol}"


def responses(url: str, pieces: list[bytes], count: int) -> list[RawResponse]:
    """The first `count` answers of one connection to these pieces; fewer if the connection ends."""
    answers: list[RawResponse] = []
    with RawConnection(url) as connection:
        for piece in pieces[:-1]:
            connection.send(piece)
            connection.wait_until_taken()
        connection.send(pieces[-1])
        while len(answers) < count and not (answers and answers[-1].closes):
            answer = connection.response()
            assert answer is not None, f"the connection ended after {answers}"
            answers.append(answer)
    return answers


def _id(response: RawResponse) -> str | None:
    answer = json.loads(response.body) if response.status == 200 else {}
    return answer.get("id") if isinstance(answer, dict) else None


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("cut", ["one piece", "body apart", "by bytes"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_body_behind_an_upgrade_is_not_run(
    url: str, users: list[str], protocol: str, cut: str, *, is_chunked: bool
) -> None:
    hidden, canary = users
    head, body = post(get(hidden), *upgrade(protocol), is_chunked=is_chunked)
    request, behind = head + body, get(canary)
    if cut == "one piece":
        pieces = [request + behind]
    elif cut == "body apart":
        pieces = [head, body, behind]
    else:
        cuts = sorted(np.random.default_rng(SEED).choice(len(request), 6, replace=False))
        pieces = [request[a:b] for a, b in zip([0, *cuts], [*cuts, len(request)], strict=True)]
        pieces = [*filter(None, pieces), behind]

    answers = responses(url, pieces, count=2)

    assert [answer.status for answer in answers] == [422, 200]
    assert [_id(answer) for answer in answers] == [None, canary]


def test_a_long_body_behind_an_upgrade_is_not_run(url: str, users: list[str]) -> None:
    # The parser skips empty lines before a request, so the hidden request is found wherever a body is split.
    hidden, canary = users
    head, body = post(b"\r\n" * 10_000 + get(hidden), *upgrade("foo"))

    answers = responses(url, [head + body + get(canary)], count=2)

    assert [(answer.status, _id(answer)) for answer in answers] == [(422, None), (200, canary)]


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_a_request_with_an_upgrade_is_answered_as_one_without(url: str, users: list[str], *, is_chunked: bool) -> None:
    requested_user, canary = users
    body = json.dumps({"entities": [requested_user], "k": 1}).encode()
    ordinary_request = post(body, is_chunked=is_chunked)
    upgrading = post(body, *upgrade("h2c"), is_chunked=is_chunked)

    (expected, _), (answered, last) = (
        responses(url, [b"".join(request), get(canary)], count=2) for request in (ordinary_request, upgrading)
    )

    assert answered.status == expected.status == 200
    (ordinary_answer,), (upgraded_answer,) = (json.loads(answer.body)["answers"] for answer in (expected, answered))
    assert (ordinary_answer["id"], ordinary_answer["items"]) == (upgraded_answer["id"], upgraded_answer["items"])
    assert _id(last) == canary


def test_pipelined_requests_behind_upgrades_are_all_answered(url: str, users: list[str]) -> None:
    first, canary = users
    pieces = [get(first, *upgrade("h2c")) * 3 + get(first) * 2 + get(canary)]

    answers = responses(url, pieces, count=6)

    assert [_id(answer) for answer in answers] == [first] * 5 + [canary]


@pytest.mark.parametrize("cut", ["one piece", "body apart"])
def test_connect_is_refused_and_nothing_behind_it_is_run(url: str, users: list[str], cut: str) -> None:
    body = get(users[0])
    head = f"CONNECT /x HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    pieces = [head + body] if cut == "one piece" else [head, body]

    (answer,) = responses(url, pieces, count=1)

    assert answer.status == 501
    assert answer.closes


@contextmanager
def proxied(url: str, folder: Path) -> Iterator[str]:
    """The service behind nginx with the lines that its manual has for WebSockets, and pooled connections."""
    assert NGINX is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    (folder / "nginx.conf").write_text(f"""
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream larder {{ server {urlsplit(url).netloc}; keepalive 1; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://larder; proxy_http_version 1.1;
      proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection "upgrade";
    }}
  }}
}}""")
    process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")])

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        assert poll_until(listens)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.skipif(NGINX is None, reason="no nginx here: apt-get install nginx-light")
def test_no_caller_behind_a_proxy_gets_what_another_one_hid_in_a_body(
    url: str, users: list[str], tmp_path: Path
) -> None:
    hidden, canary = users
    with proxied(url, tmp_path) as front:
        for filler in (0, 10_000):
            head, body = post(b"\r\n" * filler + get(hidden), *upgrade("foo"))
            for _ in range(10):
                (refused,) = responses(front, [head + body], count=1)
                assert refused.status == 422
                (answer,) = responses(front, [get(canary)], count=1)
                assert _id(answer) == canary
