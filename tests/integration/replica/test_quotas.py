"""Quotas hold over all workers of a service, and what a killed worker had in flight is free again."""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
import pytest

from precompute.config.settings import NightConfig
from tests.integration.nights import build_night, histories
from tests.integration.program import environment, started
from tests.integration.token_files import TokenPlace
from tests.polling import poll_until

WORKERS = 4
PER_S = 150.0
SECONDS = 8.0


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url, users=60, items=40)


def settings(night: NightConfig, token_file: TokenPlace, folder: Path, workers: int) -> dict[str, str]:
    return environment(
        night, folder / "state", REDIS_URL=str(night.redis_url), LARDER_WORKERS=str(workers),
        LARDER_TOKENS_FILE=str(token_file.path),
    )  # fmt: skip


class Callers:
    """Threads that ask as fast as they are answered, each on a connection of its own, and when each got through."""

    def __init__(self, count: int, request: bytes, where: tuple[str, int]) -> None:
        self._request, self._where = request, where
        self.through: list[float] = []
        self.refused: list[float] = []
        self._ends_at = time.monotonic() + SECONDS
        self._threads = [threading.Thread(target=self._send_requests) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def _send_requests(self) -> None:
        with socket.create_connection(self._where) as connection:
            while time.monotonic() < self._ends_at:
                connection.sendall(self._request)
                status = _status(connection)
                assert status in (200, 429), status
                (self.through if status == 200 else self.refused).append(time.monotonic())
                if status == 429:
                    time.sleep(0.004)


def _status(connection: socket.socket) -> int:
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += connection.recv(1 << 16)
    head = data[:end].lower()
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(data) < end + 4 + length:
        data += connection.recv(1 << 16)
    return int(data[9:12])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "entities"), [("requests_per_s", 1), ("entities_per_s", 7)])
def test_four_workers_let_through_what_one_quota_has_within_a_percent(
    night: NightConfig, tmp_path: Path, kind: str, entities: int
) -> None:
    token_file = TokenPlace(tmp_path / "tokens.json")
    limit = PER_S * entities
    header = token_file.add("shop", "read", **{kind: limit})["Authorization"]
    users = sorted(histories(night))[:entities]
    if entities == 1:
        request = (
            f"GET /v1/lookup/user_topk/{quote(users[0], safe='')} HTTP/1.1\r\n"
            f"Host: a\r\nAuthorization: {header}\r\n\r\n"
        )
    else:
        body = '{"entities":["' + '","'.join(users) + '"]}'
        request = (
            f"POST /v1/lookup/user_topk HTTP/1.1\r\nHost: a\r\nAuthorization: {header}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        )
    with started(settings(night, token_file, tmp_path, WORKERS), tmp_path / "log") as (_, url):
        parts = urlsplit(url)
        callers = Callers(12, request.encode(), (str(parts.hostname), int(parts.port or 0)))
        callers.wait()
        text = httpx.get(f"{url}/metrics").text

    through = sorted(callers.through)
    lasted_s = through[-1] - through[0]
    promised = PER_S * (lasted_s + 1.0)  # the rate, and one second of it for who has rested
    assert lasted_s > SECONDS - 1 and len(callers.refused) > PER_S
    assert abs(len(through) - promised) <= 0.01 * promised, (len(through), promised)
    # After the first burst every second has its share: no worker keeps a share that it does not use.
    steady = [answered_at for answered_at in through if answered_at > through[0] + 1.5]
    assert abs(len(steady) - PER_S * (steady[-1] - steady[0])) <= 0.02 * len(steady)
    counter_lines = {line for line in text.splitlines() if line.startswith("larder_token_requests_total{")}
    assert sum(not line.endswith(" 0.0") for line in counter_lines) >= 2  # several workers took part


def test_what_a_killed_worker_had_in_flight_is_free_again(night: NightConfig, tmp_path: Path) -> None:
    token_file = TokenPlace(tmp_path / "tokens.json")
    header = token_file.add("narrow", "read", in_flight=2)["Authorization"]
    head = (
        f"POST /v1/lookup/user_topk HTTP/1.1\r\nHost: a\r\nAuthorization: {header}\r\n"
        "Content-Type: application/json\r\nContent-Length: 20\r\n\r\n"
    ).encode()
    more = {"LARDER_BODY_TIMEOUT_S": "300"}
    with started(settings(night, token_file, tmp_path, 2) | more, tmp_path / "log") as (process, url):
        parts, pid = urlsplit(url), process.pid
        path = f"{url}/v1/lookup/user_topk/{quote(min(histories(night)), safe='')}"

        def status() -> int:
            try:
                return httpx.get(path, headers={"Authorization": header}, timeout=5).status_code
            except httpx.TransportError:
                return 0

        assert status() == 200
        connections = [socket.create_connection((parts.hostname, parts.port)) for _ in range(2)]
        for connection in connections:
            connection.sendall(head)
        assert poll_until(lambda: [status() for _ in range(5)] == [429] * 5, 10)  # whichever worker is asked
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for worker in workers:
            os.kill(int(worker), signal.SIGKILL)
        assert poll_until(lambda: [status() for _ in range(5)] == [200] * 5, 60)
        for connection in connections:
            connection.close()
