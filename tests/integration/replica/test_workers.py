"""Several workers behind one socket: replaced when they die, one after the other on SIGHUP, counted as one host."""

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from precompute.config.settings import NightConfig
from serving.process.supervisor import WorkerSpawner, WorkerSupervisor, restart_pause_s
from tests.integration.fleet import beating
from tests.integration.nights import DATA_UNTIL, build_night, build_verified, histories, publish
from tests.integration.program import alive, environment, started
from tests.polling import poll_until


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url, users=100, items=60)


def settings(night: NightConfig, state: Path, **more: str) -> dict[str, str]:
    redis = {"REDIS_URL": str(night.redis_url), "LARDER_WORKERS": "2", "LARDER_HEARTBEAT_S": "0.1"}
    return environment(night, state, **redis | more)


def workers_of(process: "subprocess.Popen[str]") -> set[int]:
    """Process ids."""
    pid = process.pid
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def scrape_sums_by_worker(url: str, name: str) -> Counter[str]:
    """Sums of a series by worker."""
    sum_by_worker: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if sample.name == name:
                sum_by_worker[sample.labels["worker"]] += sample.value  # type: ignore[assignment]
    return sum_by_worker


def test_two_workers_serve_one_address_and_any_tells_the_counts_of_both(night: NightConfig, tmp_path: Path) -> None:
    users = sorted(histories(night))
    with started(settings(night, tmp_path / "state")) as (process, url):
        pids = workers_of(process)
        assert poll_until(lambda: len({replica.name for replica in beating(night)}) == 2)

        def send_round() -> bool:
            """One more round, each request on a connection of its own."""
            for user in users:
                assert httpx.get(f"{url}/v1/lookup/user_topk/{user}").status_code == 200
            rounds.append(len(users))
            return len(+scrape_sums_by_worker(url, "larder_entities_total")) == 2

        rounds: list[int] = []
        assert poll_until(send_round)
        assert sum(scrape_sums_by_worker(url, "larder_answers_total").values()) == sum(rounds)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0

    assert len(pids) == 2 and not any(map(alive, pids))
    assert beating(night) == []


def test_a_publish_waits_for_every_worker_and_all_of_them_flip(night: NightConfig, tmp_path: Path) -> None:
    later = (datetime.fromisoformat(DATA_UNTIL) + timedelta(minutes=30)).isoformat()
    with started(settings(night, tmp_path / "state")) as (_, _):
        assert poll_until(lambda: len(beating(night)) == 2)
        next_ = build_verified(night, later)
        publish(night, next_)

        assert poll_until(lambda: [replica.served_generation for replica in beating(night)] == [next_] * 2)
        assert all(replica.warm_up_s is not None for replica in beating(night))


def test_a_killed_worker_gets_a_successor_while_the_others_answer(night: NightConfig, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(settings(night, tmp_path / "state"), log) as (process, url):
        pids_before = workers_of(process)
        victim = min(pids_before)
        os.kill(victim, signal.SIGKILL)
        assert poll_until(lambda: not alive(victim))

        def replaced() -> bool:
            assert httpx.get(f"{url}/v1/lookup/user_topk/nobody").status_code == 200
            return len(workers_of(process)) == 2 and set(scrape_sums_by_worker(url, "larder_ready")) == {"0", "1"}

        assert poll_until(replaced)
        after = workers_of(process)

    assert len(after & pids_before) == 1
    assert f"(process {victim}) ended with code -9: another starts in" in log.read_text()


def test_a_rolling_restart_replaces_all_workers_and_refuses_no_request(night: NightConfig, tmp_path: Path) -> None:
    log = tmp_path / "log"
    codes: Counter[int | str] = Counter()
    finished = threading.Event()

    def send_requests(url: str) -> None:
        while not finished.is_set():
            try:
                codes[httpx.get(f"{url}/v1/lookup/user_topk/nobody", timeout=30).status_code] += 1
            except httpx.HTTPError as error:
                codes[repr(error)] += 1

    with started(settings(night, tmp_path / "state"), log) as (process, url):
        pids_before = workers_of(process)
        threads = [threading.Thread(target=send_requests, args=(url,), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        process.send_signal(signal.SIGHUP)
        assert poll_until(lambda: "all workers have been replaced" in log.read_text(), 60)
        finished.set()
        for thread in threads:
            thread.join(30)
        after = workers_of(process)

    assert set(codes) == {200} and codes[200] > 0
    assert len(after) == 2 and not after & pids_before


def test_a_second_signal_ends_all_of_it_at_once(night: NightConfig, tmp_path: Path) -> None:
    head = b"POST /v1/lookup/user_topk HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    with started(settings(night, tmp_path / "state", LARDER_DRAIN_S="300")) as (process, url):
        pids, address = workers_of(process), (httpx.URL(url).host, httpx.URL(url).port or 0)
        with socket.create_connection(address) as unfinished:
            unfinished.sendall(head)  # someone is still asking
            assert httpx.get(f"{url}/healthz").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert poll_until(lambda: len(workers_of(process)) == 1)  # the other one has nothing to do
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
    assert not any(map(alive, pids))


def test_workers_do_not_outlive_their_parent(night: NightConfig, tmp_path: Path) -> None:
    with started(settings(night, tmp_path / "state")) as (process, _):
        pids = workers_of(process)
        process.kill()
        process.wait(10)

    assert len(pids) == 2 and poll_until(lambda: not any(map(alive, pids)))


def test_settings_that_no_worker_can_use_are_refused_before_any_starts(night: NightConfig, tmp_path: Path) -> None:
    from tests.integration.replica.test_serving_program import run

    completed_process = run(settings(night, tmp_path), "--workers", "0")

    assert completed_process.returncode == 2 and "workers must be above 0" in completed_process.stderr


@pytest.mark.parametrize(("program", "code", "starts"), [("3", 1, 10), ("2", 2, 2)])
async def test_workers_that_never_start_are_given_up(
    tmp_path: Path, program: str, code: int, starts: int, caplog: pytest.LogCaptureFixture
) -> None:
    announced: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        spawn = WorkerSpawner(listener, tmp_path, "", "info", ("-c", f"import os; os._exit({program})"))
        parent = WorkerSupervisor(2, spawn, 1.0, lambda: announced.append(True), lambda _failures: 0.0)
        async with asyncio.timeout(60):
            assert await parent.run() == code

    start_count = caplog.text.count(f"ended with code {program}")
    assert announced == [] and 1 <= start_count <= starts and "giving up" in caplog.text


def test_pauses_between_starts_grow_and_are_bounded() -> None:
    pauses: Callable[[int], float] = restart_pause_s

    assert [pauses(failure_count) for failure_count in (0, 1, 2, 3)] == [0.0, 0.2, 0.4, 0.8]
    assert pauses(1_000) == 30.0
