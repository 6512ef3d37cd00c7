"""A rolling update, scaling, a killed Redis and a drained pod behind a balancer: no request fails."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from precompute.config.settings import NightConfig
from precompute.releases.recovery import restore
from tests.integration.balanced.balancer import PROGRAM, balancer
from tests.integration.balanced.pods import Deployment, Load
from tests.integration.events.durable_redis import DurableRedis, durable_redis
from tests.integration.nights import DATA_UNTIL, histories, prepare, publish_night, top_lists
from tests.integration.ordeal import AnswerJudge
from tests.polling import poll_until

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no haproxy here: apt-get install haproxy")
SEED = 26


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DurableRedis]:
    """A Redis that comes back empty, as ours does."""
    with durable_redis(tmp_path / "redis", appendonly="no") as running:
        yield running


@contextmanager
def under_load(folder: Path, server: DurableRedis, count: int) -> Iterator[tuple[NightConfig, Deployment, Load]]:
    """Pods behind a balancer, under load."""
    night = prepare(folder / "night", server.url, users=100, items=60)
    live = publish_night(night, DATA_UNTIL)
    users = sorted(histories(night))
    items = sorted({item for history in histories(night).values() for item in history})
    answer_judge = AnswerJudge({live: top_lists(night, live, users)}, users, items, np.random.default_rng(SEED))
    with balancer(folder / "balancer") as front:
        pods = Deployment(night, folder, front)
        try:
            pods.scale(count)
            with Load(front.url, answer_judge).going_on() as load:
                assert load.wait_for_requests(20)
                yield night, pods, load
        finally:
            pods.close()


def lose_redis(server: DurableRedis, night: NightConfig, load: Load) -> None:
    """Killed under load, away for a while, back without anything, filled again from the store."""
    server.kill()
    assert load.wait_for_requests(60)
    server.start()
    assert load.wait_for_requests(20)
    restore(night)
    l2_count_before = load.answer_judge.sources["l2"]
    assert poll_until(lambda: load.answer_judge.sources["l2"] > l2_count_before, 60)


def killed_pods_are_noticed(pods: Deployment, load: Load) -> None:
    """The same callers do count what fails: a pod killed at once, without preStop and drain, costs requests."""
    assert load.answer_judge.wrong == []
    for victim in pods.pods:
        victim.process.send_signal(signal.SIGKILL)
    assert poll_until(lambda: bool(load.answer_judge.wrong))


def test_a_replaced_pod_and_a_killed_redis_fail_no_request(tmp_path: Path, server: DurableRedis) -> None:
    with under_load(tmp_path, server, 1) as (night, pods, load):
        pods.roll_out()
        assert load.wait_for_requests(20)
        lose_redis(server, night, load)
        print(f"{load.answer_judge.requests} requests: {dict(load.answer_judge.sources)}")
        assert load.answer_judge.wrong == []
        killed_pods_are_noticed(pods, load)


@pytest.mark.storm
def test_a_day_of_a_deployment_fails_no_request(tmp_path: Path, server: DurableRedis) -> None:
    with under_load(tmp_path, server, 2) as (night, pods, load):
        report_lines = []

        def report_stage(stage: str) -> None:
            assert load.wait_for_requests(100)
            report_lines.append(
                f"{stage}: {load.answer_judge.requests} requests, {len(load.answer_judge.wrong)} failed"
            )
            print(report_lines[-1])

        pods.roll_out(LARDER_L1_BYTES="32768")
        report_stage("another configuration")
        pods.scale(6)
        report_stage("2 to 6")
        pods.scale(2)
        report_stage("6 to 2")
        lose_redis(server, night, load)
        report_stage("Redis killed, back empty, restored")
        pods.start()  # an eviction: the Deployment starts another one at the same time
        pods.stop(pods.pods[0])
        report_stage("a drained host")

        assert load.answer_judge.wrong == []
        assert load.answer_judge.requests > 1_000
        killed_pods_are_noticed(pods, load)
