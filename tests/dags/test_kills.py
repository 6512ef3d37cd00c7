"""kill -9 of running Airflow tasks and of the workers beside them: Airflow notices, tries again, and the night ends as
if nothing had happened, with readers who saw nothing of it.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from cache.process.redis_server import RedisServer
from precompute.steps import retire
from tests.dags.place import CONFIG, RUN_S, AirflowDeployment, airflow_over, current_cut, states, write_interactions
from tests.dags.task_processes import How, task_processes
from tests.integration.killed_steps import night
from tests.integration.killing import run
from tests.integration.wholeness import assert_whole, moves, read_namespace_state
from tests.polling import poll_until

NIGHT = "nightly_precompute"
KILLS, PER_RUN = 10, 6
HOWS: tuple[How, ...] = ("task", "worker", "both")
ALWAYS = ("load", "verify", "publish", "retire")

# Seconds without a heartbeat after which Airflow retries the task of a killed worker.
NOTICED = {
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "5",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
    "LARDER_RETRY_DELAY_S": "1",
}
SMALL_PAGES = "page_bytes = 4096\nload_chunk_bytes = 4096\nkeep = 1\nsuperseded_grace_s = 0\n"

Task = tuple[str, int]
"""Task id and map index."""


def disturbed_run(
    deployment: AirflowDeployment, cut: str, deaths: Mapping[Task, tuple[How, float]], kills_by_task: Counter[str]
) -> str:
    """Run a night and kill these tasks at their first try, some seconds after they appear; return its run id."""
    run_id = deployment.airflow.trigger(NIGHT, {"data_until": cut})
    give_up, looked_at = time.monotonic() + RUN_S, 0.0
    pending_deaths, due, names = dict(deaths), dict[str, float](), dict[str, Task]()
    while time.monotonic() < give_up:
        if time.monotonic() - looked_at > 0.3:
            report, looked_at = deployment.airflow.report(NIGHT, run_id), time.monotonic()
            names = {
                task_report.instance_id: (task_report.task_id, task_report.map_index) for task_report in report.tasks
            }
            if report.state in ("success", "failed"):
                break
        for running_task in task_processes(deployment.airflow.scheduler_session_id):
            task = names.get(running_task.instance_id)
            if task not in pending_deaths:
                continue
            how, after_s = pending_deaths[task]
            if time.monotonic() >= due.setdefault(running_task.instance_id, time.monotonic() + after_s):
                print(f"{task} killed by {how} after {after_s:.3f} s", flush=True)
                del pending_deaths[task]
                running_task.kill(how)
                kills_by_task[task[0]] += 1
        time.sleep(0.01)
    assert states(deployment.airflow.wait(NIGHT, run_id, RUN_S)) == {"success"}
    # A task may still run after its worker was killed.
    assert poll_until(lambda: not task_processes(deployment.airflow.scheduler_session_id), 30.0)
    return run_id


def differences(deployment: AirflowDeployment) -> list[str]:
    """Return differences to the twin, after retiring all that the service does not hold."""
    for config in (deployment.config, deployment.twin):
        retire.run(config)
    return read_namespace_state(deployment.config).differences(read_namespace_state(deployment.twin))


@pytest.mark.storm
def test_killed_tasks_are_tried_again_and_the_night_ends_as_if_undisturbed(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    seed = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"seed {seed} (LARDER_SEED repeats it)")
    moments, killed = random.Random(seed), Counter[str]()
    source = tmp_path / "interactions.csv"
    write_interactions(source, seed=7)
    config = SMALL_PAGES + CONFIG
    with airflow_over(tmp_path, own_redis, config=config, settings=NOTICED) as deployment:
        # given: one undisturbed night in each of two deployments, and callers of the first
        first = deployment.first_night()
        lasted = {(task_report.task_id, task_report.map_index): task_report.duration_s for task_report in first.tasks}
        run(partial(night, deployment.twin, deployment.live.generation[:16], "twin"))
        with deployment.watched() as watch:
            for night_number in range(KILLS):
                if killed.total() >= KILLS and set(killed) >= set(ALWAYS):
                    break
                # when: tasks of the next night are killed at random moments of their usual duration
                data_until = current_cut()
                write_interactions(source, seed=7, more=20 * (night_number + 1))
                undisturbed = run(partial(night, deployment.twin, data_until, f"twin-{night_number}"))
                assert undisturbed is not None
                generation = undisturbed.result["generation"]
                deployment.expect(watch, deployment.twin, generation)
                other_tasks = sorted(set(lasted) - {(task_id, -1) for task_id in ALWAYS})
                killed_tasks = [
                    *moments.sample(other_tasks, PER_RUN - len(ALWAYS)),
                    *((task_id, -1) for task_id in ALWAYS),
                ]
                deaths = {task: (moments.choice(HOWS), moments.uniform(0.0, lasted[task])) for task in killed_tasks}
                disturbed_run(deployment, data_until, deaths, killed)

                # then: it is published and complete, and equals the undisturbed night of the other deployment
                watch.beat()
                assert deployment.live.generation == generation
                assert poll_until(lambda: not differences(deployment), 15.0), differences(deployment)
                watch.check_order([*moves(deployment.config), assert_whole(deployment.config)])
    print(f"killed {dict(killed)}, answers {watch.answers}, {dict(watch.sources)}")
    assert killed.total() >= KILLS
