"""One real night, and what comes after it, through a real Airflow, a real Redis and small real files."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import redis

from cache.embedded import Server
from cache.keys import Keyspace
from cache.releases import Pointer
from infra.demo.airflow import AirflowFailed, LocalAirflow, RunReport, TaskReport
from precompute.control import Control

USERS, ITEMS, SHARDS = 240, 90, 3
CONFIG = f"""
shards = {SHARDS}
bundle = "bundle"
artifacts = "artifacts"
state = "state"

[sources]
interactions = ["interactions.csv"]

[reference]
dims = 16

[gates]
index_recall = 0.5
int8_overlap = 0.5
skew_overlap = 0.5

[tables.user_topk]
kind = "user_topk"
k = 10

[tables.item_similar]
kind = "item_similar"
k = 5
metric = "cosine"
"""


def write_interactions(path: Path, seed: int) -> None:
    """Write users of two tastes, each with some items of the half of the catalogue they like."""
    rng = np.random.default_rng(seed)
    lines = ["user,item"]
    for user in range(USERS):
        liked = rng.choice(ITEMS // 2, size=int(rng.integers(4, 12)), replace=False) * 2 + user % 2
        lines += [f"u{user},item-{item}" for item in liked]
    path.write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Place:
    """A running Airflow over a folder with data, and the Redis that it publishes to."""

    folder: Path
    airflow: LocalAirflow
    control: Control

    @property
    def live(self) -> Pointer:
        """What readers would answer from."""
        pointer = self.control.pointer()
        assert pointer is not None
        return pointer

    def run(self, dag_id: str, **conf: str) -> RunReport:
        """Trigger a DAG by hand and wait for it."""
        return self.airflow.wait(dag_id, self.airflow.trigger(dag_id, conf), 180.0)


@pytest.fixture
def place(tmp_path: Path, own_redis: Server) -> Iterator[Place]:
    """Airflow with nothing published yet."""
    write_interactions(tmp_path / "interactions.csv", seed=7)
    config = tmp_path / "larder.toml"
    config.write_text(CONFIG)
    environment = {"LARDER_CONFIG": str(config), "REDIS_URL": own_redis.url}
    with (
        redis.Redis.from_url(own_redis.url, protocol=3) as client,
        LocalAirflow(tmp_path / "state", environment=environment) as airflow,
    ):
        yield Place(tmp_path, airflow, Control(client, Keyspace("default")))


def now() -> str:
    """Return a cut later than that of any night before: what is older is never published."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def states(report: RunReport) -> set[str]:
    return {task.state for task in report.tasks}


def first_night(place: Place) -> tuple[RunReport, list[TaskReport]]:
    """Train a bundle, and wait for the night that its asset starts."""
    assert states(place.run("train_reference")) == {"success"}
    run_id = place.airflow.wait_new("nightly_precompute", known=())
    told: list[TaskReport] = []
    return place.airflow.wait("nightly_precompute", run_id, 180.0, on_task=told.append), told


def test_a_new_bundle_is_scored_and_published_once(place: Place) -> None:
    # when
    night, told = first_night(place)

    # then: it had no logical date, scored each shard in a task of its own, and published
    assert states(night) == {"success"}
    assert night.run_type == "asset_triggered"
    scored = {task.map_index for task in night.tasks if task.task_id == "score_shard"}
    assert scored == set(range(SHARDS))
    assert set(told) == set(night.tasks)
    published = place.live
    assert published.attempt == night.run_id
    assert published.previous is None

    # and: asked for the same cut again, it knows its own work
    cut = datetime.strptime(published.generation[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    again = place.run("nightly_precompute", data_until=cut.isoformat())
    assert [task.task_id for task in again.tasks if task.state == "success"] == ["begin"]
    assert states(again) == {"success", "skipped"}
    assert place.live == published


@pytest.mark.slow
def test_a_second_night_is_rolled_back_and_a_refused_one_changes_nothing(place: Place) -> None:
    # given
    first_night(place)
    first = place.live
    assert states(place.run("nightly_precompute", data_until=now())) == {"success"}
    second = place.live
    assert second.previous == first.generation

    # when
    back = place.run("roll_back", reason="a test")

    # then
    assert states(back) == {"success"}
    assert place.live.generation == first.generation
    assert place.live.epoch > second.epoch

    # and: a night that a gate refuses is red at `verify`, at its first try
    config = place.folder / "larder.toml"
    config.write_text(CONFIG.replace("index_recall = 0.5", "index_recall = 1.5"))
    run_id = place.airflow.trigger("nightly_precompute", {"data_until": now()})
    with pytest.raises(AirflowFailed, match="index_recall"):
        place.airflow.wait("nightly_precompute", run_id, 180.0)
    tasks = {
        task.task_id: task for task in place.airflow.report("nightly_precompute", run_id).tasks
    }
    assert (tasks["verify"].state, tasks["verify"].try_number) == ("failed", 1)
    assert tasks["publish"].state == "upstream_failed"
    assert place.live.generation == first.generation
