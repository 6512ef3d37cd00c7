"""A canary through a real Airflow: nobody was asked, so nothing is decided, red."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.control.states import GenerationState
from cache.process.redis_server import RedisServer
from infra.local.airflow import AirflowFailed
from tests.dags.place import CONFIG, RUN_S, AirflowDeployment, airflow_over, current_cut, write_interactions
from tests.integration.nights import build_verified

CANARY = """
[canary]
wait_s = 1.0
wait_max_s = 1.0
percent = 10.0
"""


@pytest.fixture
def deployment(tmp_path: Path, own_redis: RedisServer) -> Iterator[AirflowDeployment]:
    write_interactions(tmp_path / "interactions.csv", seed=7)
    with airflow_over(tmp_path, own_redis, config=CONFIG + CANARY) as deployment:
        yield deployment


@pytest.mark.slow
def test_a_night_hands_its_generation_to_the_canary(tmp_path: Path, own_redis: RedisServer) -> None:
    write_interactions(tmp_path / "interactions.csv", seed=7)
    settings = CONFIG + CANARY + '\n[dag]\npublish = "canary"\n'
    with airflow_over(tmp_path, own_redis, config=settings) as deployment:
        deployment.first_night()  # nothing was live, so it is published to all
        live_before = deployment.live
        deployment.airflow.pause("canary", is_paused=False)

        run_id = deployment.airflow.trigger("nightly_precompute", {})
        deployment.airflow.wait("nightly_precompute", run_id, RUN_S)

        tasks = {task.task_id: task for task in deployment.airflow.report("nightly_precompute", run_id).tasks}
        assert (tasks["try_as_canary"].state, tasks["publish"].state) == ("success", "skipped")
        with pytest.raises(AirflowFailed, match="canary answered 0 requests"):
            deployment.airflow.wait("canary", run_id, RUN_S)
        assert deployment.live.generation == live_before.generation and deployment.live.canary is not None


@pytest.mark.slow
def test_a_canary_without_answers_is_left_running_for_a_person_to_decide(deployment: AirflowDeployment) -> None:
    deployment.first_night()
    live_before = deployment.live
    tried = build_verified(deployment.config, current_cut())

    run_id = deployment.airflow.trigger("canary", {})
    with pytest.raises(AirflowFailed, match="canary answered 0 requests"):
        deployment.airflow.wait("canary", run_id, RUN_S)

    tasks = {task.task_id: task for task in deployment.airflow.report("canary", run_id).tasks}
    assert (tasks["start"].state, tasks["wait"].state) == ("success", "success")
    assert tasks["conclude"].state == "failed"
    assert deployment.live.generation == live_before.generation and deployment.live.canary is not None
    assert deployment.live.canary.generation == tried
    assert deployment.control.rows()[tried].state is GenerationState.VERIFIED
