"""One real night, and what comes after it, through a real Airflow, a real Redis and small real files."""

from collections.abc import Iterator
from dataclasses import dataclass
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
LATER = "2026-02-01T00:00:00+00:00"
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


def states(report: RunReport) -> set[str]:
    return {task.state for task in report.tasks}


def test_a_new_bundle_is_scored_published_repeated_and_rolled_back(place: Place) -> None:
    # given: a bundle, trained by one DAG, whose asset starts the other
    trained = place.run("train_reference")
    run_id = place.airflow.wait_new("nightly_precompute", known=())
    told: list[TaskReport] = []

    # when: that night has run
    night = place.airflow.wait("nightly_precompute", run_id, 180.0, on_task=told.append)

    # then: it had no logical date, scored each shard in its own task, and published
    assert states(trained) == states(night) == {"success"}
    assert night.run_type == "asset_triggered"
    scored = {task.map_index for task in night.tasks if task.task_id == "score_shard"}
    assert scored == set(range(SHARDS))
    assert set(told) == set(night.tasks)
    first = place.live
    assert first.attempt == run_id
    assert first.previous is None

    # and: a second night replaces it, and knows its own work when asked again
    second_night = place.run("nightly_precompute", data_until=LATER)
    second = place.live
    assert states(second_night) == {"success"}
    assert second.generation.startswith("20260201T000000Z")
    assert second.previous == first.generation
    again = place.run("nightly_precompute", data_until=LATER)
    assert [task.task_id for task in again.tasks if task.state == "success"] == ["begin"]
    assert states(again) == {"success", "skipped"}
    assert place.live == second

    # and: one trigger brings the first one back
    back = place.run("roll_back", reason="a test")
    assert states(back) == {"success"}
    assert place.live.generation == first.generation
    assert place.live.epoch > second.epoch

    # and: a night that its gates refuse is red at `verify`, once, and changes nothing
    config = place.folder / "larder.toml"
    config.write_text(CONFIG.replace("index_recall = 0.5", "index_recall = 1.5"))
    with pytest.raises(AirflowFailed, match="index_recall") as refused:
        place.run("nightly_precompute", data_until="2026-03-01T00:00:00Z")
    assert "verify" in str(refused.value)
    assert place.live.generation == first.generation
