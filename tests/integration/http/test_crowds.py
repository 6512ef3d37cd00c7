"""A real service before crowds: of large batches, of clients that leave, of peers that take no answers."""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import httpx
import pytest

from precompute.config.settings import NightConfig
from tests.integration.nights import build_night, environment, histories
from tests.integration.program import started
from tests.polling import poll_until

IDS = 1_000
UNREAD_LOG_LINE = re.compile(r"since the start: .*\d unread")
Address = tuple[str, int]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("crowds"), redis_url)


@pytest.fixture
def service(night: NightConfig, tmp_path: Path) -> Iterator[tuple[str, Address]]:
    """URL and address of a patient service: nothing is shed for what this machine does beside it."""
    environ = environment(night, LARDER_QUEUE_INTERVAL_MS="60000")
    with started(environ, tmp_path / "service.log") as (_, url):
        where = urlsplit(url)
        yield url, (str(where.hostname), int(where.port or 0))


def batch(ids: list[str], more: bytes = b"") -> bytes:
    """A request for these ids, with more header lines."""
    body = json.dumps({"entities": ids}).encode()
    return (
        b"POST /v1/lookup/user_topk HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%b"
        b"Content-Length: %d\r\n\r\n%b" % (more, len(body), body)
    )


def list_known_ids(night: NightConfig) -> list[str]:
    """As many ids as a batch may have, each with a stored answer."""
    users = sorted(histories(night))
    return (users * (1 + IDS // len(users)))[:IDS]


def status_of(connected: socket.socket) -> int:
    """The status of the next answer, whose body is read to its end; 0 where the connection ends without one."""
    connected.settimeout(60)
    with connected.makefile("rb") as file:
        line = file.readline()
        length = 0
        while (field := file.readline().strip()) != b"" and line:
            if field.lower().startswith(b"content-length:"):
                length = int(field.partition(b":")[2])
        file.read(length)
        return int(line.split()[1]) if line else 0


def metric(url: str, name: str) -> float:
    """A sample of `/metrics`; 0 for one that is not there."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return 0.0 if match is None else float(match[1])


def test_ready_answers_wait_for_a_portion_of_a_crowd_of_batches_not_for_all(
    night: NightConfig, service: tuple[str, Address]
) -> None:
    url, address = service
    ids = list_known_ids(night)
    ready = f"/v1/lookup/user_topk/{ids[0]}?k=5"
    waits: list[float] = []
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=url, timeout=60))
        crowd = [stack.enter_context(socket.create_connection(address)) for _ in range(60)]
        for _ in range(2):  # all ids of the batches are in L1 then
            crowd[0].sendall(batch(ids))
            assert status_of(crowd[0]) == 200
            http.get(ready).raise_for_status()
        statuses: list[int] = []

        def read_statuses() -> None:
            statuses.extend(map(status_of, crowd))

        request = batch(ids)
        senders = [Thread(target=connection.sendall, args=(request,)) for connection in crowd]
        taking = Thread(target=read_statuses)
        started_at = time.monotonic()
        for thread in (*senders, taking):
            thread.start()
        while taking.is_alive():
            requested_at = time.monotonic()
            http.get(ready).raise_for_status()
            waits.append(time.monotonic() - requested_at)
        elapsed_s = time.monotonic() - started_at
        for thread in (*senders, taking):
            thread.join()

    assert set(statuses) <= {200, 503} and statuses.count(200) >= 30
    assert sorted(waits)[len(waits) // 2] < elapsed_s / 20


def test_a_batch_is_held_to_its_deadline_also_while_it_is_rendered(
    night: NightConfig, service: tuple[str, Address]
) -> None:
    url, address = service
    with socket.create_connection(address) as connected:
        statuses = []
        for more in (b"", b"X-Deadline-Ms: 1\r\n"):  # all ids are in L1 for the second
            connected.sendall(batch(list_known_ids(night), more))
            statuses.append(status_of(connected))

    assert statuses == [200, 503] and metric(url, 'larder_shed_total{stage="late"}') == 1


def test_nothing_is_worked_out_for_clients_that_have_gone(service: tuple[str, Address]) -> None:
    url, address = service
    count = 200
    for number in range(count):
        with socket.create_connection(address) as connected:
            connected.sendall(batch([f"stranger-{number}-{index}" for index in range(IDS)]))

    shed_metric = 'larder_shed_total{stage="gone"}'
    answered = 'larder_requests_total{route="POST /v1/lookup/{table}",status="200"}'

    def all_done() -> bool:
        return metric(url, shed_metric) + metric(url, answered) == count

    assert poll_until(all_done, 60.0, every_s=0.1)
    assert metric(url, shed_metric) > count / 2
    assert metric(url, "larder_requests_under_way") == 0


def test_peers_that_take_no_answers_hold_a_bounded_number_of_bytes(night: NightConfig, tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    environ = environment(night, LARDER_QUEUE_INTERVAL_MS="60000", LARDER_ANSWERS_BYTES="1000000")
    request = batch(list_known_ids(night))

    with started(environ, log) as (_, url), ExitStack() as stack:
        where = urlsplit(url)
        address = str(where.hostname), int(where.port or 0)
        for _ in range(8):
            peer = stack.enter_context(socket.socket())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            peer.connect(address)
            peer.sendall(request)

        def is_answered() -> bool:
            with socket.create_connection(address) as reader:
                reader.sendall(request)
                return status_of(reader) == 200

        def are_cut_off() -> bool:
            return is_answered() and bool(UNREAD_LOG_LINE.search(log.read_text()))

        # Each answer is about as large as the bound on all answers.
        assert poll_until(are_cut_off, every_s=0.2)
