"""A running Airflow over a folder with data, its Redis, and callers of a service over it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import redis

from cache.control.control_keys import Control
from cache.format.redis_keys import Keyspace
from cache.process.redis_server import RedisServer
from cache.store.releases import Pointer
from infra.local.airflow import MANUAL_SCHEDULE, LocalAirflow, RunReport, TaskReport
from infra.local.service import ServiceProcess
from precompute.config.settings import NightConfig, night_config
from tests.integration.nights import PATIENT_ENVIRON, environment, top_lists
from tests.integration.watching import Watch

USERS, ITEMS, SHARDS = 240, 90, 3
RUN_S = 180.0
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


def write_interactions(path: Path, seed: int, *, users: int = USERS, items: int = ITEMS, more: int = 0) -> None:
    """Write users of two tastes, each with some items of the half of the catalogue that they like.

    `more` adds so many clicks, always the same first ones: what a day adds.
    """
    rng = np.random.default_rng(seed)
    lines = ["user,item"]
    for user in range(users):
        liked = rng.choice(items // 2, size=int(rng.integers(4, 12)), replace=False) * 2 + user % 2
        lines += [f"u{user},item-{item}" for item in liked]
    later = np.random.default_rng(seed + 1)
    for user in later.integers(users, size=more):
        lines.append(f"u{user},item-{later.integers(items // 2) * 2 + user % 2}")
    path.write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class AirflowDeployment:
    """A running Airflow over a folder with data, and the Redis that it publishes to."""

    folder: Path
    airflow: LocalAirflow
    control: Control
    redis_url: str

    @property
    def live(self) -> Pointer:
        """The pointer that readers follow."""
        pointer = self.control.read_pointer()
        assert pointer is not None
        return pointer

    @property
    def config(self) -> NightConfig:
        """The configuration that the tasks read now."""
        return night_config(str(self.folder / "larder.toml"), {"REDIS_URL": self.redis_url})

    @property
    def twin(self) -> NightConfig:
        """Configuration of the same night with files and Redis database of its own."""
        url = self.redis_url.removesuffix("0") + "1"
        return replace(self.config, artifacts="twin", state="twin-state", redis_url=url)

    def run(self, dag_id: str, **conf: str) -> RunReport:
        """Trigger a DAG by hand and wait for it."""
        return self.airflow.wait(dag_id, self.airflow.trigger(dag_id, conf), RUN_S)

    def first_night(self, on_task: Callable[[TaskReport], None] | None = None) -> RunReport:
        """Train a bundle, and wait for the night that its asset starts."""
        assert states(self.run("train_reference")) == {"success"}
        run_id = self.airflow.wait_for_new_run("nightly_precompute", earlier_run_ids=())
        return self.airflow.wait("nightly_precompute", run_id, RUN_S, on_task=on_task)

    @contextmanager
    def watched(self) -> Iterator[Watch]:
        """Run a service over the live generation, and callers that send requests all the time."""
        service_environ = environment(
            self.config, LARDER_L1_BYTES="4096", LARDER_POLL_S="0.1", LARDER_HEARTBEAT_S="0.2", **PATIENT_ENVIRON
        )
        items = [f"item-{number}" for number in range(ITEMS)]
        with ExitStack() as stack:
            service = stack.enter_context(ServiceProcess(self.folder / "service.log", service_environ))
            watch = Watch(service.url, self.users, items, seed=0)
            self.expect(watch, self.config, self.live.generation)
            yield stack.enter_context(watch)

    @property
    def users(self) -> list[str]:
        """All users in the data."""
        lines = (self.folder / "interactions.csv").read_text().splitlines()[1:]
        return sorted({line.partition(",")[0] for line in lines})

    def expect(self, watch: Watch, config: NightConfig, generation: str) -> None:
        """Tell the callers which answers this generation gives."""
        watch.expected[generation] = top_lists(config, generation, self.users)


@contextmanager
def airflow_over(
    folder: Path, server: RedisServer, *, config: str = CONFIG, settings: Mapping[str, str] | None = None
) -> Iterator[AirflowDeployment]:
    """Run Airflow over a folder with nothing published yet."""
    path = folder / "larder.toml"
    path.write_text(config)
    airflow_environ = {"LARDER_CONFIG": str(path), "LARDER_SCHEDULE": MANUAL_SCHEDULE, "REDIS_URL": server.url}
    airflow_environ |= dict(settings or {})
    with (
        redis.Redis.from_url(server.url, protocol=3) as client,
        LocalAirflow(folder / "state", task_environment=airflow_environ, slots_by_pool={"gpu": 2}) as airflow,
    ):
        yield AirflowDeployment(folder, airflow, Control(client, Keyspace("default")), server.url)


def current_cut() -> str:
    """Return a cut later than that of any night before: an older one is never published."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def states(report: RunReport) -> set[str]:
    """Return the states of all tasks of a run."""
    return {task.state for task in report.tasks}
