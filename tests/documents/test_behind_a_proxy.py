"""The settings of proxies on `docs/how-to/behind-a-proxy.md`, each before two replicas, as they stand there."""

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from serving.config.settings import ServingConfig
from tests.blackbox import Shop, free_port, listens, nginx, open_shop, started
from tests.documents.blocks import ALL
from tests.polling import poll_until

PAGE = "docs/how-to/behind-a-proxy.md"
_KINDS = {"nginx": "nginx", "text": "haproxy"}  # Pygments has no lexer of HAProxy's
SETTINGS = {_KINDS[block.kind]: block.text for block in ALL if block.page == PAGE}
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Shop:
    return open_shop(tmp_path_factory.mktemp("shop"), redis_url)


@pytest.fixture(scope="module")
def ports(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Two replicas."""
    logs = tmp_path_factory.mktemp("logs")
    with started(shop, logs / "one") as one, started(shop, logs / "two") as two:
        yield one.port, two.port


@contextmanager
def proxy(kind: str, folder: Path, ports: tuple[int, int]) -> Iterator[str]:
    """URL of the proxy, started with the page's settings."""
    program = shutil.which(kind, path=_PATH)
    if program is None:
        pytest.skip(f"no {kind} here")
    port, text = free_port(), SETTINGS[kind]
    for shown, actual in (("8001", ports[0]), ("8002", ports[1]), ("8080", port)):
        assert shown in text
        text = text.replace(shown, str(actual))
    if kind == "nginx":
        with nginx(program, folder, text):
            assert poll_until(lambda: listens(port))
            yield f"http://127.0.0.1:{port}"
        return
    file = folder / "haproxy.cfg"
    file.write_text(text)
    process = subprocess.Popen([program, "-f", file], stderr=subprocess.DEVNULL)
    try:
        assert poll_until(lambda: listens(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.parametrize("kind", ["nginx", "haproxy"])
def test_requests_pass_as_they_were_sent_and_only_those_of_the_api(
    kind: str, ports: tuple[int, int], tmp_path: Path
) -> None:
    with proxy(kind, tmp_path, ports) as url, httpx.Client(base_url=url, timeout=30) as client:
        answer = client.get("/v1/lookup/user_topk/a0")
        slashed = client.get("/v1/lookup/user_topk/a%2F%2Fb")
        upgrade = client.get(
            "/v1/lookup/user_topk/a0",
            headers={
                "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "X-Forwarded-For": "10.0.0.1",
                "X-Forwarded-Proto": "https", "Forwarded": "for=10.0.0.1",
            },
        )  # fmt: skip
        body = b'{"entities": [{"id": "a0"}]}' + b" " * (2 << 20)
        large = client.post("/v1/lookup/user_topk", content=body, headers={"Content-Type": "application/json"})
        inside = [client.get(path).status_code for path in ("/metrics", "/dashboard", "/readyz")]

    assert answer.status_code == 200 and answer.json()["source"] in ("l1", "l2")
    assert slashed.json()["id"] == "a//b"
    assert upgrade.status_code == 200 and upgrade.json()["items"] == answer.json()["items"]
    assert large.status_code == 200, large.text
    assert inside == [404, 404, 404]


class _Replica(BaseHTTPRequestHandler):
    """Answers every request with 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


@contextmanager
def answering(port: int) -> Iterator[None]:
    """A server that answers on this port."""
    with ThreadingHTTPServer(("127.0.0.1", port), _Replica) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def test_a_replica_that_was_restarted_answers_soon_after_the_next_one_is_stopped(tmp_path: Path) -> None:
    # given nginx before two replicas, of which the first is being restarted
    ports = free_port(), free_port()
    with proxy("nginx", tmp_path, ports) as url, httpx.Client(base_url=url, timeout=10) as client:

        def status() -> int:
            return client.get("/v1/lookup/user_topk/a0").status_code

        with answering(ports[1]):
            assert [status() for _ in range(4)] == [200] * 4

        # when it is back, and the second one is stopped
        with answering(ports[0]):
            is_answered = poll_until(lambda: status() == 200, timeout_s=4.0)

    assert is_answered, "nginx left the first replica out for longer"


def test_the_proxies_give_up_a_connection_before_the_service_does() -> None:
    text = SETTINGS["nginx"] + SETTINGS["haproxy"]
    seconds = re.findall(r"(?:keepalive_timeout|pool-purge-delay) (\d+)s", text)

    assert len(seconds) == 2 and max(map(float, seconds)) < ServingConfig().idle_timeout_s
    assert "client_max_body_size 8m;" in text and ServingConfig().body_bytes == 8 << 20
