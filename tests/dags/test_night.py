"""One real night, and what comes after it, through a real Airflow, a real Redis and small real files."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cache.process.redis_server import RedisServer
from infra.local.airflow import AirflowFailed, TaskReport
from tests.dags.place import (
    CONFIG,
    RUN_S,
    SHARDS,
    AirflowDeployment,
    airflow_over,
    current_cut,
    states,
    write_interactions,
)


@pytest.fixture
def deployment(tmp_path: Path, own_redis: RedisServer) -> Iterator[AirflowDeployment]:
    """Airflow with nothing published yet."""
    write_interactions(tmp_path / "interactions.csv", seed=7)
    with airflow_over(tmp_path, own_redis) as deployment:
        yield deployment


def test_a_new_bundle_is_scored_and_published_once(deployment: AirflowDeployment) -> None:
    # when
    task_reports: list[TaskReport] = []
    night = deployment.first_night(task_reports.append)

    # then: it had no logical date, scored each shard in its own task, and published
    assert states(night) == {"success"}
    assert night.run_type == "asset_triggered"
    scored = {task.map_index for task in night.tasks if task.task_id == "score_shard"}
    assert scored == set(range(SHARDS))
    assert set(task_reports) == set(night.tasks)
    published = deployment.live
    assert published.attempt == night.run_id
    assert published.previous is None

    # and: a second run for the same cut finds the work of the first one
    cut = datetime.strptime(published.generation[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    repeated_run = deployment.run("nightly_precompute", data_until=cut.isoformat())
    assert [task.task_id for task in repeated_run.tasks if task.state == "success"] == ["begin"]
    assert states(repeated_run) == {"success", "skipped"}
    assert deployment.live == published


@pytest.mark.slow
def test_a_second_night_is_rolled_back_and_a_refused_one_changes_nothing(deployment: AirflowDeployment) -> None:
    # given
    deployment.first_night()
    first = deployment.live
    assert states(deployment.run("nightly_precompute", data_until=current_cut())) == {"success"}
    second = deployment.live
    assert second.previous == first.generation

    # when
    back = deployment.run("roll_back", reason="a test")

    # then
    assert states(back) == {"success"}
    assert deployment.live.generation == first.generation
    assert deployment.live.epoch > second.epoch

    # and: a night that a gate refuses fails in `verify`, at the first try
    config = deployment.folder / "larder.toml"
    config.write_text(CONFIG.replace("index_recall = 0.5", "index_recall = 1.5"))
    run_id = deployment.airflow.trigger("nightly_precompute", {"data_until": current_cut()})
    with pytest.raises(AirflowFailed, match="index_recall"):
        deployment.airflow.wait("nightly_precompute", run_id, RUN_S)
    tasks = {task.task_id: task for task in deployment.airflow.report("nightly_precompute", run_id).tasks}
    assert (tasks["verify"].state, tasks["verify"].try_number) == ("failed", 1)
    assert tasks["publish"].state == "upstream_failed"
    assert deployment.live.generation == first.generation
