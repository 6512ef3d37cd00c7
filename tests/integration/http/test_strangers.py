"""A real service among peers that send endlessly, partly or slowly, or do not read: it stays small and answers."""

import contextlib
import resource
import select
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import httpx
import pytest

from precompute.config.settings import NightConfig
from tests.integration.http.hot_way import AsgiRequest, running
from tests.integration.nights import build_night, histories
from tests.integration.program import environment, started
from tests.polling import poll_until

TOKEN = "sesame"
AUTH_HEADERS = {"Authorization": f"Bearer {TOKEN}"}
PEERS = 200
GROWTH_MB = 40
DESCRIPTORS = 120


class Larder(NamedTuple):
    """A running service."""

    process: "subprocess.Popen[str]"
    url: str
    path: str

    @property
    def where(self) -> tuple[str, int]:
        """Address of the service."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def memory_mb(self) -> float:
        """Resident memory now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def files(self) -> int:
        """Number of open files now."""
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def answers(self) -> bool:
        """Whether a caller that behaves well, on a connection of its own, is answered."""
        response = httpx.get(self.url + self.path, headers=AUTH_HEADERS, timeout=30)
        return response.status_code == 200

    def under_way(self) -> str:
        """The line of `/metrics` about requests under way."""
        text = httpx.get(f"{self.url}/metrics", headers=AUTH_HEADERS, timeout=30).text
        return next(line for line in text.splitlines() if line.startswith("larder_requests_under_way "))


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url)


@pytest.fixture(scope="module")
def larder(night: NightConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Larder]:
    state = tmp_path_factory.mktemp("state")
    bounds = {
        "LARDER_HEAD_TIMEOUT_S": "0.6", "LARDER_BODY_TIMEOUT_S": "0.6", "LARDER_WRITE_TIMEOUT_S": "0.6",
        "LARDER_IDLE_TIMEOUT_S": "0.6", "LARDER_BODY_BYTES": "200000", "LARDER_BODIES_BYTES": "300000",
        "LARDER_TOKEN": TOKEN,
    }  # fmt: skip
    path = f"/v1/lookup/user_topk/{quote(min(histories(night)), safe='')}"
    with started(environment(night, state, **bounds), state / "log") as (process, url):
        service = Larder(process, url, path)
        assert service.answers()
        yield service


@contextlib.contextmanager
def peers(larder: Larder, first: bytes, count: int = PEERS) -> Iterator[list[socket.socket]]:
    """So many connections, each with these bytes sent, that read nothing by themselves."""
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            peer = stack.enter_context(socket.socket())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
            peer.connect(larder.where)
            peer.setblocking(False)
            send(peer, first)
            connections.append(peer)
        yield connections


def send(peer: socket.socket, data: bytes) -> int:
    """As much as goes without waiting; -1 once the service has closed the connection."""
    try:
        return peer.send(data)
    except BlockingIOError:
        return 0
    except OSError:
        return -1


def is_ended(peer: socket.socket) -> bool:
    """Whether the service has ended the connection; what it sent before is read."""
    try:
        while peer.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize(("start", "more"), [
    (b"GET / HTTP/1.1\r\n", b"a:b\r\n" * 2_000),
    (b"GET / HTTP/1.1\r\na: ", b"b" * 10_000),
    (b"POST /healthz HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"a:b\r\n" * 2_000),
])  # fmt: skip
def test_heads_without_an_end_are_cut_off(larder: Larder, start: bytes, more: bytes) -> None:
    memory_before_mb, sent_bytes = larder.memory_mb(), 0
    with socket.create_connection(larder.where, timeout=30) as peer:
        peer.sendall(start)
        with contextlib.suppress(ConnectionError):
            while sent_bytes < 100 << 20:
                peer.sendall(more)
                sent_bytes += len(more)
    assert sent_bytes < 20 << 20  # what lies in the kernel's buffers
    assert larder.answers() and larder.memory_mb() - memory_before_mb < GROWTH_MB


@pytest.mark.parametrize("first", [
    b"", b"G", b"GET / HTTP/1.1\r\na: b", b"\r\n",
    b"POST /v1/lookup/user_topk HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nx",  # no token: not waited for
])  # fmt: skip
def test_who_never_ends_what_it_began_is_ended(larder: Larder, first: bytes) -> None:
    with peers(larder, first) as connections:
        assert larder.answers()
        assert poll_until(lambda: all(map(is_ended, connections)))


@pytest.mark.parametrize("first", [b"G", b"POST /v1/lookup/x HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n\r\n"])
def test_a_trickle_keeps_no_connection(larder: Larder, first: bytes) -> None:
    with peers(larder, first, 20) as connections:

        def are_ended() -> bool:
            connections[:] = [peer for peer in connections if send(peer, b"x") >= 0 and not is_ended(peer)]
            return not connections

        assert poll_until(are_ended, every_s=0.05)
    assert larder.answers() and larder.under_way().endswith(" 0.0")


@pytest.mark.parametrize(("target", "count"), [(b"/v1/lookup/x/y", PEERS), (b"/openapi.json", 30)])
def test_who_asks_and_does_not_read_is_bounded_and_cut_off(larder: Larder, target: bytes, count: int) -> None:
    memory_before_mb, files = larder.memory_mb(), larder.files()
    request = b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n"
    with peers(larder, request * 16, count) as moderate_peers, peers(larder, request * 500, count) as greedy_peers:
        assert len(moderate_peers) == len(greedy_peers) and larder.answers()
        assert poll_until(lambda: larder.under_way().endswith(" 0.0"))
        assert larder.memory_mb() - memory_before_mb < GROWTH_MB
        assert poll_until(lambda: larder.files() < files + count // 3)


def test_bodies_together_are_bounded_and_end(larder: Larder) -> None:
    head = f"POST /v1/lookup/user_topk HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n"
    unfinished_request = head.encode() + b"Content-Length: 199000\r\n\r\n" + b" " * 150_000
    with peers(larder, unfinished_request[:-1], 3) as connections:
        replies = [reply(peer) for peer in connections]
    assert sorted(response[9:12] for response in replies) in ([b"408", b"408", b"503"], [b"408", b"503", b"503"])
    assert b"overloaded" in b"".join(replies)
    assert larder.answers() and larder.under_way().endswith(" 0.0")
    body = b'{"entities":["nobody"]}' + b" " * 150_000
    after = httpx.post(f"{larder.url}/v1/lookup/user_topk", headers=AUTH_HEADERS, content=body)
    assert after.status_code == 200


def reply(peer: socket.socket) -> bytes:
    """Return the first reply."""
    select.select([peer], [], [], 10)
    return peer.recv(1 << 16)


def test_running_out_of_files_passes(larder: Larder) -> None:
    pid, limits = larder.process.pid, resource.prlimit(larder.process.pid, resource.RLIMIT_NOFILE)
    assert limits[0] >= min(limits[1], 8_192)  # raised at the start
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, limits[1]))
    try:
        with peers(larder, b""):

            def is_answered() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return larder.answers()
                return False

            assert poll_until(is_answered)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert larder.process.poll() is None and larder.answers()


def test_what_a_stranger_asks_is_not_remembered(night: NightConfig) -> None:
    path = f"/v1/lookup/user_topk/{quote(min(histories(night)), safe='')}".encode()
    for ways in running(night, token=TOKEN):
        for number in range(20):
            assert ways.send(AsgiRequest("GET", path, b"k=%d" % (1 + number))).status == 401
        assert not ways.fast_lookups._options_by_query._options_by_query
