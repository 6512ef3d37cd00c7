"""`python -m serving` as a program: what it prints, what it refuses, how it stops and what it starts itself."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import orjson
import pytest

from cache.process.redis_server import join_or_start_server
from precompute.config.settings import NightConfig
from serving.client import Client, Entity, Options
from tests.integration.nights import build_night, histories
from tests.integration.program import ROOT, alive, environment, started
from tests.polling import poll_until


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url)


def run(environ: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "serving", *arguments],
        env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_help_says_where_settings_come_from(night: NightConfig, tmp_path: Path) -> None:
    completed_process = run(environment(night, tmp_path), "--help")

    assert (
        completed_process.returncode == 0
        and "LARDER_TOKEN" in completed_process.stdout
        and "--insecure" in completed_process.stdout
    )


@pytest.mark.parametrize(
    ("more", "arguments", "says"),
    [
        ({}, ("--host", "0.0.0.0", "--port", "0"), "LARDER_TOKEN"),
        ({"LARDER_TOKEN": "two words"}, ("--port", "0"), "token"),
        ({"LARDER_TOKEN": " "}, ("--port", "0"), "token"),
        ({"LARDER_TOKEN": "bell\a"}, ("--port", "0"), "token"),
        ({"LARDER_DEADLINE_MS": "soon"}, (), "deadline_ms"),
        ({"REDIS_URL": "nonsense://x"}, ("--port", "0"), "REDIS_URL"),
        ({}, ("--host", "256.1.1.1", "--port", "0", "--insecure"), "cannot listen"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    night: NightConfig, tmp_path: Path, more: dict[str, str], arguments: tuple[str, ...], says: str
) -> None:
    completed_process = run(environment(night, tmp_path, **more), *arguments)

    assert completed_process.returncode == 2 and says in completed_process.stderr
    assert completed_process.stderr.startswith("larder: ") and "Traceback" not in completed_process.stderr


def test_a_redis_that_may_evict_published_pages_is_refused(night: NightConfig, tmp_path: Path) -> None:
    import redis

    with join_or_start_server(tmp_path / "other") as evicting_redis:
        client = redis.Redis.from_url(evicting_redis.url, protocol=2)
        client.config_set("maxmemory-policy", "allkeys-lru")
        completed_process = run(environment(night, tmp_path, REDIS_URL=evicting_redis.url), "--port", "0")
        client.close()

    assert completed_process.returncode == 2 and "volatile-lru" in completed_process.stderr


def test_it_serves_on_a_free_port_and_stops_cleanly_on_a_signal(night: NightConfig, tmp_path: Path) -> None:
    assert night.redis_url is not None
    user = min(histories(night))
    with started(environment(night, tmp_path, REDIS_URL=night.redis_url)) as (process, url):
        with Client(url) as client:
            answer = client.lookup("user_topk", user, Options(k=3))
            batch_answers = client.lookup_many("user_topk", [user, "nobody"])
            tables = client.lookup_tables([Entity(user, table="user_vector")])
            scores = client.score(user, answer.items or ())
        process.send_signal(signal.SIGTERM)

        assert process.wait(15) == 0
    assert answer.source == "l2" and answer.items is not None and len(answer.items) == 3
    assert [batch_answer.source for batch_answer in batch_answers] == ["l1", "default"]
    assert tables[0].vector is not None and len(tables[0].vector) == 16
    assert set(scores.items) == set(answer.items)


def test_requests_that_were_sent_before_the_stop_signal_are_answered(night: NightConfig, tmp_path: Path) -> None:
    history_by_user = histories(night)
    entities = [{"id": f"new-{user}", "history": history_by_user[user]} for user in sorted(history_by_user)[:40]]
    body = orjson.dumps({"entities": entities})
    head = b"POST /v1/lookup/user_topk HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    environ = environment(night, tmp_path, REDIS_URL=str(night.redis_url))
    with started(environ) as (process, url), contextlib.ExitStack() as stack:
        address = (httpx.URL(url).host, httpx.URL(url).port or 0)

        def call() -> socket.socket:
            connection = stack.enter_context(socket.create_connection(address, timeout=30))
            connection.sendall(head + body)
            return connection

        early = [call() for _ in range(20)]
        process.send_signal(signal.SIGTERM)
        late = [call() for _ in range(20)]  # a load balancer needs a moment to hear of it
        answers = [everything(connection) for connection in early + late]

        assert process.wait(20) == 0
    assert [answer[:15] for answer in answers] == [b"HTTP/1.1 200 OK"] * 40
    assert all(b"connection: close" in answer for answer in answers[20:])


def test_a_stopping_service_is_not_ready_but_answers_until_the_second_signal(
    night: NightConfig, tmp_path: Path
) -> None:
    environ = environment(night, tmp_path, REDIS_URL=str(night.redis_url))
    head = b"POST /v1/lookup/user_topk HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    with started(environ) as (process, url), httpx.Client(base_url=url) as client:
        address = (httpx.URL(url).host, httpx.URL(url).port or 0)
        with socket.create_connection(address) as unfinished:
            unfinished.sendall(head)  # someone is still asking
            assert client.get("/readyz").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert poll_until(lambda: client.get("/readyz").status_code == 503)
            stopping = client.get("/readyz").json()
            answer = client.get("/v1/lookup/user_topk/nobody")
            process.send_signal(signal.SIGTERM)

            assert process.wait(5) == 0
    assert answer.status_code == 200 and stopping["failed"] == "this replica is stopping"


def everything(connection: socket.socket) -> bytes:
    """All bytes until the other side closes."""
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def test_a_real_server_takes_odd_ids_as_they_are_and_stops_long_bodies(night: NightConfig, tmp_path: Path) -> None:
    assert night.redis_url is not None
    odd = ["007", "a/b", "..", "../x", "50% + ü", "?k=1#x", "ü" * 128]
    environ = environment(night, tmp_path, REDIS_URL=night.redis_url, LARDER_BODY_BYTES="50000", LARDER_TOKEN="secret")
    with started(environ) as (_, url), Client(url, token="secret") as client:
        by_url = [client.lookup("user_topk", entity_id, Options(k=1)).id for entity_id in odd]
        refused = httpx.get(f"{url}/v1/lookup/user_topk/%FF", headers={"Authorization": "Bearer secret"})
        long = httpx.post(
            f"{url}/v1/lookup/user_topk",
            content=(b"x" * 10_000 for _ in range(1_000)),
            headers={"Authorization": "Bearer secret"},
        )
        unknown = httpx.get(f"{url}/v1/lookup/user_topk/x")
        after = client.lookup("user_topk", "still here", Options(k=1))

    assert by_url == odd
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_id")
    assert long.status_code == 413 and unknown.status_code == 401
    assert after.source == "default"


def test_without_any_redis_it_starts_one_and_fills_it(night: NightConfig, tmp_path: Path) -> None:
    copied_artefacts = tmp_path / "artifacts"
    shutil.copytree(night.path(night.artifacts), copied_artefacts)
    alone = replace(night, artifacts=str(copied_artefacts), redis_url=None)
    user = min(histories(night))

    with started(environment(alone, tmp_path / "state")) as (process, url):
        answer = httpx.get(f"{url}/v1/lookup/user_topk/{user}", params={"k": 3}).json()
        redis_pid = running_redis(tmp_path / "state")
        assert redis_pid is not None
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0

    assert answer["source"] == "l2" and "stale" not in answer
    assert poll_until(lambda: not alive(redis_pid))


def test_its_own_redis_that_is_killed_comes_back_filled(night: NightConfig, tmp_path: Path) -> None:
    copied_artefacts = tmp_path / "artifacts"
    shutil.copytree(night.path(night.artifacts), copied_artefacts)
    alone = replace(night, artifacts=str(copied_artefacts), redis_url=None)
    first, second, *_ = sorted(histories(night))

    with started(environment(alone, tmp_path / "state"), tmp_path / "log.txt") as (process, url):

        def answer(user: str) -> dict[str, object]:
            return dict(httpx.get(f"{url}/v1/lookup/user_topk/{user}", params={"k": 3}).json())

        published_at = answer(first)["published_at"]
        redis_pid = running_redis(tmp_path / "state")
        assert redis_pid is not None
        os.kill(redis_pid, signal.SIGKILL)

        assert poll_until(lambda: running_redis(tmp_path / "state") not in (None, redis_pid), timeout_s=60)
        assert poll_until(lambda: "stale" not in answer(first) and pages_are_back(url), timeout_s=60)
        assert poll_until(lambda: answer(second)["source"] == "l2", timeout_s=60)
        again = answer(second)
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0

    assert again["published_at"] == published_at


def pages_are_back(url: str) -> bool:
    body = httpx.get(f"{url}/readyz").json()
    return bool(body["epoch"] > 0 and not body.get("stale"))


def test_two_stop_signals_end_it_at_once_and_without_a_traceback(night: NightConfig, tmp_path: Path) -> None:
    assert night.redis_url is not None
    log = tmp_path / "log.txt"
    with started(environment(night, tmp_path, REDIS_URL=night.redis_url), log) as (process, _):
        for stop_signal in (signal.SIGINT, signal.SIGTERM):  # two of one kind may arrive as one
            process.send_signal(stop_signal)
        assert process.wait(15) == 0

    log_text = log.read_text()
    assert "Traceback" not in log_text and "second signal to stop" in log_text


def test_a_killed_service_takes_its_redis_along(night: NightConfig, tmp_path: Path) -> None:
    copied_artefacts = tmp_path / "artifacts"
    shutil.copytree(night.path(night.artifacts), copied_artefacts)
    alone = replace(night, artifacts=str(copied_artefacts), redis_url=None)

    with started(environment(alone, tmp_path / "state")) as (process, _):
        redis_pid = running_redis(tmp_path / "state")
        assert redis_pid is not None
        process.kill()
        process.wait(10)

    assert poll_until(lambda: not alive(redis_pid))


def running_redis(state: Path) -> int | None:
    """Process that serves a state folder's own Redis; None while another one is being started."""
    with suppress(FileNotFoundError):
        return int(orjson.loads((state / "redis.json").read_bytes())["pid"])
    return None
