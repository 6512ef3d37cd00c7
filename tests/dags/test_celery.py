"""A night through CeleryExecutor, as `python -m infra.celery` runs it: a worker per queue, and one that is killed."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from cache.process.redis_server import RedisServer
from infra.local.airflow import MANUAL_SCHEDULE, ROOT
from precompute.config.settings import NightConfig, night_config
from precompute.reference.train import train_reference
from precompute.steps import retire
from tests.dags.place import CONFIG, current_cut, write_interactions
from tests.integration.killed_steps import night
from tests.integration.killing import run
from tests.integration.wholeness import assert_whole, read_namespace_state
from tests.marked import marked, working_in
from tests.polling import poll_until

pytestmark = [pytest.mark.storm, pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")]

START_S, RUN_S, STOP_S = 240.0, 400.0, 90.0
USERS, ITEMS, SHARDS = 90_000, 400, 5
PROGRAMS = (
    *("redis-server", "bin/postgres", "api-server", "scheduler", "dag-processor"),
    *("--queues default", "--queues gpu"),
)
# Airflow notices the tasks of a dead worker by missing heartbeats, or by their time in a queue that no worker reads.
NOTICED = {
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "8",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
    "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT": "40",
    "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT_CHECK_INTERVAL": "5",
    "LARDER_RETRY_DELAY_S": "1",
}


@dataclass(frozen=True)
class Running:
    """The command, its output, and the mark of all processes that it starts."""

    process: "subprocess.Popen[bytes]"
    printed: Path
    process_marker: str
    state: Path

    def is_gone(self, database: Path) -> bool:
        """Return whether no process runs any more, including PostgreSQL in `database`."""
        return not marked(self.process_marker) and not working_in(database)

    @property
    def database(self) -> Path:
        """PostgreSQL's folder."""
        return (self.state / "celery/postgres").readlink()

    def says(self, text: str, timeout_s: float) -> None:
        """Wait until the command has printed `text`."""
        is_within_timeout = poll_until(lambda: self.process.poll() is not None or text in self.output, timeout_s)
        assert is_within_timeout and text in self.output, self.output

    @property
    def output(self) -> str:
        """All output of the command."""
        return self.printed.read_text()

    def worker_log(self, queue: str) -> str:
        """Return the logs of all workers of a queue."""
        return "".join(
            log_file.read_text() for log_file in (self.state / "airflow/processes").glob(f"worker-{queue}-*.log")
        )

    def session(self, queue: str) -> int:
        """Id of the session that all processes of a queue's worker belong to, its tasks' included."""
        return next(
            os.getsid(pid)
            for pid, line in marked(self.process_marker).items()
            if line.startswith("sh -c") and f"--queues {queue} " in line
        )


def kill(session: int) -> None:
    """Send SIGKILL to all processes of a session at once, so that none reports the end of another."""
    members = [
        int(process_folder.name)
        for process_folder in Path("/proc").glob("[0-9]*")
        if is_of_session(int(process_folder.name), session)
    ]
    for how in (signal.SIGSTOP, signal.SIGKILL):
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, how)


def is_of_session(pid: int, session: int) -> bool:
    """Whether a process that may end meanwhile is of a session."""
    try:
        return os.getsid(pid) == session
    except ProcessLookupError:
        return False


@contextmanager
def celery(folder: Path, redis_url: str, *arguments: str) -> Iterator[Running]:
    """`python -m infra.celery` over a folder; killed at the end if it still runs."""
    process_mark, printed = f"celery-under-test-{uuid.uuid4().hex}", folder / "printed.log"
    state = folder / "s"
    command = [sys.executable, "-u", "-m", "infra.celery", "--state", str(state)]
    command += ["--config", str(folder / "larder.toml"), *arguments]
    extra_environ = {"UNDER_TEST": process_mark, "LARDER_SCHEDULE": MANUAL_SCHEDULE, "REDIS_URL": redis_url}
    with printed.open("wb") as output_file:
        process = subprocess.Popen(
            command, env={**os.environ, **NOTICED, **extra_environ}, cwd=ROOT, stdout=output_file, stderr=output_file
        )
    try:
        yield Running(process, printed, process_mark, state)
    finally:
        process.kill()
        process.wait()


def configured(folder: Path, redis_url: str) -> NightConfig:
    """Settings in a file, data, and nothing else yet."""
    path = folder / "larder.toml"
    path.write_text(re.sub("shards = .*", f"shards = {SHARDS}\nthreads = 1", CONFIG))
    return night_config(str(path), {"REDIS_URL": redis_url})


def test_the_worker_that_scores_is_killed_and_the_night_ends_as_if_undisturbed(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    # given: data, a bundle, and the same night undisturbed, with files and a Redis database of its own
    config = configured(tmp_path, own_redis.url)
    write_interactions(tmp_path / "interactions.csv", seed=7, users=USERS, items=ITEMS)
    cut = current_cut()
    train_reference(config, data_until=cut)
    twin_url = own_redis.url.removesuffix("0") + "1"
    twin = replace(config, artifacts="twin", state="twin-state", redis_url=twin_url)
    undisturbed = run(partial(night, twin, cut, "twin"))
    assert undisturbed is not None

    # when: the worker of the queue `gpu` dies with all its processes while it writes pages
    command = ("--run", "nightly_precompute", "--data-until", cut)
    with celery(tmp_path, own_redis.url, *command) as running:
        running.says("queues ", START_S)
        worker, database = running.session("gpu"), running.database
        assert working_in(database)
        pages = f"{config.namespace}/generations/*/tables/user_topk/"
        assert poll_until(lambda: any((tmp_path / "artifacts").glob(pages + ".*.part")), RUN_S)
        kill(worker)
        finished_count = len(list((tmp_path / "artifacts").glob(pages + "*.pages")))
        partial_count = len(list((tmp_path / "artifacts").glob(pages + ".*.part")))
        print(f"killed with {partial_count} shards half written and {finished_count} of {SHARDS} done", flush=True)
        assert partial_count > 0 and finished_count < SHARDS

        # then: another worker takes over, and retried tasks publish the night
        running.says("the worker of the queue gpu ended", STOP_S)
        assert running.process.wait(RUN_S) == 0, running.output
        print(running.output)
        assert re.search(r"score_shard \[\d\] success \(try 2\)", running.output)
        assert "nightly_precompute success" in running.output

        # and: each queue's tasks ran on that queue's worker
        assert "Executing workload" in running.worker_log("default")
        assert "queue='gpu'" not in running.worker_log("default")
        assert "queue='default'" not in running.worker_log("gpu")
        # and: nothing is left running
        assert poll_until(lambda: running.is_gone(database), STOP_S), marked(running.process_marker)

    # and: its results equal those of the undisturbed night
    for compared_config in (config, twin):
        retire.run(compared_config)
    assert assert_whole(config) == undisturbed.result["generation"]
    assert read_namespace_state(config).differences(read_namespace_state(twin)) == []


@pytest.mark.parametrize(
    ("how", "after"), [(signal.SIGINT, "starting"), (signal.SIGTERM, "until Ctrl-C"), (signal.SIGKILL, "until Ctrl-C")]
)
def test_a_stop_leaves_nothing_running(tmp_path: Path, own_redis: RedisServer, how: signal.Signals, after: str) -> None:
    configured(tmp_path, own_redis.url)
    with celery(tmp_path, own_redis.url) as running:
        running.says(after, START_S)
        assert poll_until((tmp_path / "s/celery/postgres").is_symlink)
        if after == "until Ctrl-C":
            lines = " ".join(marked(running.process_marker).values())
            assert all(program in lines for program in PROGRAMS), lines
            assert working_in(running.database)
        database = running.database

        running.process.send_signal(how)

        code = running.process.wait(STOP_S)
        assert code == (-signal.SIGKILL if how == signal.SIGKILL else 130), running.output
        assert poll_until(lambda: running.is_gone(database), STOP_S), marked(running.process_marker)
        assert how == signal.SIGKILL or not database.exists()

    # and: the next start removes what a killed deployment left running
    if how == signal.SIGKILL:
        with celery(tmp_path, own_redis.url) as running:
            assert poll_until(lambda: not database.exists(), START_S), running.output
            running.says("until Ctrl-C", START_S)
            database = running.database
            running.process.send_signal(signal.SIGTERM)
            running.process.wait(STOP_S)
            assert poll_until(lambda: running.is_gone(database), STOP_S), marked(running.process_marker)
