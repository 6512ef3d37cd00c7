"""Redis dies while the service runs, comes back empty, and one command brings everything back."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from cache.control.control_keys import Control
from cache.l2.sync_clients import connect
from cache.process.child_process import GuardedCommand
from cache.process.redis_server import SERVER_SETTINGS, RedisServer
from cache.store.artefacts import read_manifest
from infra.local.service import ROOT, ServiceProcess
from precompute.bulk.load import page_keys
from precompute.config.settings import NightConfig
from tests.conftest import redis_binary
from tests.http_connection import ServiceCounts
from tests.integration.nights import NEXT, build_night, environment, histories, publish_night
from tests.polling import poll_until

OUTAGES = {"l2_down", "l2_timeout", "breaker_open", "page_missing"}


class CountingCaller:
    """A caller that keeps count of what it got."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=30.0)
        self.sources: dict[str, int] = {}
        self.entities = 0

    def look_up(self, entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers; a request that is not answered fails the test."""
        body = {"entities": entities, "k": 20}
        response = self.http.post("/v1/lookup/user_topk", json=body)
        assert response.status_code == 200, response.text
        answers: list[dict[str, Any]] = response.json()["answers"]
        assert len(answers) == len(entities)
        for answer in answers:
            self.sources[answer["source"]] = self.sources.get(answer["source"], 0) + 1
        self.entities += len(entities)
        return answers

    def ready(self) -> dict[str, Any]:
        """What the replica says of itself."""
        body: dict[str, Any] = self.http.get("/readyz").json()
        return body

    def counts(self) -> ServiceCounts:
        """Its counters."""
        return ServiceCounts.read(self.http.get("/metrics").text)


@pytest.fixture
def night(tmp_path: Path, own_redis: RedisServer) -> NightConfig:
    config = build_night(tmp_path / "night", own_redis.url)
    publish_night(config, NEXT)
    return config


@contextmanager
def empty_redis_at(url: str, folder: Path) -> Iterator[None]:
    """A new server where the old one was."""
    port = url.rpartition(":")[2].partition("/")[0]
    command = [str(redis_binary()), "--port", port, "--dir", str(folder)]
    for name, value in SERVER_SETTINGS.items():
        command += [f"--{name}", value]

    def answers() -> bool:
        try:
            with redis.Redis.from_url(url, protocol=2) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    with GuardedCommand(command, log_path=folder / "second-redis.log"):
        assert poll_until(answers)
        yield


def run_restore(environ: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "precompute", "--quiet", "restore"]
    completed_process = subprocess.run(
        command, env={**os.environ, **environ}, cwd=ROOT, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert completed_process.returncode == 0, completed_process.stderr


def test_losing_redis_loses_no_answer_and_one_command_brings_everything_back(
    night: NightConfig, own_redis: RedisServer, tmp_path: Path
) -> None:
    environ = environment(night)
    known_users = sorted(histories(night, NEXT))
    hot_users, cold = known_users[:50], known_users[50:150]
    history = histories(night, NEXT)[known_users[0]][:5]
    with ServiceProcess(tmp_path / "service.log", environ) as service:
        # given: a service that has answered some users, so that they are in L1
        caller = CountingCaller(service.url)
        first_answer_by_id = {answer["id"]: answer for answer in caller.look_up([{"id": user} for user in hot_users])}
        assert {answer["source"] for answer in first_answer_by_id.values()} == {"l2"}
        epoch = caller.ready()["epoch"]

        # when: Redis is killed
        os.kill(own_redis.pid, signal.SIGKILL)

        # then: L1 answers as before, and everyone else gets the next source of the ladder, marked
        for answer in caller.look_up([{"id": user} for user in hot_users]):
            assert answer["source"] == "l1"
            assert answer["items"] == first_answer_by_id[answer["id"]]["items"]
        for answer in caller.look_up([{"id": user} for user in cold]):
            assert answer["source"] == "default"
            assert answer["reason"] in OUTAGES
            assert answer["items"]
        for answer in caller.look_up([{"id": user, "history": history} for user in cold[:20]]):
            assert answer["source"] == "live"
            assert answer["reason"] in OUTAGES
            assert not set(history).intersection(answer["items"])
        stranger = caller.look_up([{"id": "nobody"}])[0]
        assert stranger["source"] == "default"
        assert poll_until(lambda: caller.ready()["stale"] == "redis_unreachable")
        assert caller.ready()["ready"]
        assert caller.look_up([{"id": hot_users[0]}])[0]["stale"] == "redis_unreachable"

        with empty_redis_at(night.redis_url or "", tmp_path):
            # when: Redis is back and empty
            assert poll_until(lambda: caller.ready()["stale"] == "pointer_vanished")

            # then: every request is still answered, from the same generation
            for answer in caller.look_up([{"id": user} for user in cold]):
                assert answer["generation"] == first_answer_by_id[hot_users[0]]["generation"]
                assert answer["source"] == "default"
                assert answer["reason"] in OUTAGES

            # when
            run_restore(environ)

            # then: readers follow under a new epoch, and are answered from pages again
            assert poll_until(lambda: caller.ready()["epoch"] > epoch)
            assert caller.ready()["stale"] is None
            assert caller.ready()["generation"] == first_answer_by_id[hot_users[0]]["generation"]
            assert poll_until(
                lambda: (
                    {entity["source"] for entity in caller.look_up([{"id": entity} for entity in cold[20:]])}
                    <= {"l1", "l2"}
                )
            )
            assert_restored(night)
        counts = caller.counts()
        assert counts.disagreements(caller.sources, caller.entities) == []


def assert_restored(night: NightConfig) -> None:
    """Registry, pointer and every page of live and previous are in Redis."""
    with connect(night.redis_url, night.redis_timeout_s) as client:
        control = Control(client, night.keyspace())
        pointer = control.read_pointer()
        assert pointer is not None
        assert pointer.previous is not None
        for generation in (pointer.generation, pointer.previous):
            assert generation in control.rows()
            names = list(page_keys(night.keyspace(), read_manifest(night.store(), generation)))
            assert client.exists(*names) == len(names)


def test_restoring_twice_changes_nothing(night: NightConfig) -> None:
    # given
    run_restore(environment(night))
    with connect(night.redis_url, night.redis_timeout_s) as client:
        pointer_before = Control(client, night.keyspace()).read_pointer()

        # when
        run_restore(environment(night))

        # then
        assert Control(client, night.keyspace()).read_pointer() == pointer_before
