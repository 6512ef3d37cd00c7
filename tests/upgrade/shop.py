"""A shop that two releases run together: one store, one Redis, nights and services of either."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pyarrow.parquet as pq
import redis

from cache.format.redis_keys import Keyspace
from cache.store.artefacts import ArtefactStore
from cache.store.releases import Release as ReleaseRecord
from cache.store.releases import all_releases
from infra.demo.synthetic import WorldSettings, synthesize
from infra.local.airflow import MANUAL_SCHEDULE
from infra.local.service import ServiceProcess
from precompute.config.settings import night_config
from tests import polling
from tests.checkouts import Checkout
from tests.integration.nights import write_clicks

CUTS = tuple(f"2026-01-{day}T00:00:00Z" for day in range(27, 32))
FOLLOW_S = 30.0
ARROW = "application/vnd.apache.arrow.stream"
SETTINGS = """
namespace = "{namespace}"
artifacts = "artifacts"
state = "state"
bundle = "bundle"
shards = 2
page_bytes = 16384
threads = 1
[sources]
interactions = ["interactions.parquet"]
item_features = "items.parquet"
[reference]
dims = 16
[flip]
wait_s = 15.0
[gates]
{gates}
[tables.user_topk]
kind = "user_topk"
k = 50
[tables.user_vector]
kind = "user_vector"
[tables.item_vector]
kind = "item_vector"
[tables.item_similar]
kind = "item_similar"
k = 20
metric = "cosine"
[tables.user_affinity]
kind = "value"
precision = "f4"
value = "user_affinity"
"""


@dataclass(slots=True)
class Shop:
    """Folder of a shop and the Redis beside it; `services` by the name of their release, while they run.

    Of the two releases, `first` trains and has the first night, `second` the next.
    """

    folder: Path
    redis_url: str
    namespace: str
    seed: int
    first: Checkout
    second: Checkout
    services: dict[str, ServiceProcess] = field(default_factory=dict)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30))

    def open(self) -> None:
        """Write data and settings; a second settings file has a gate that nothing passes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        clicks = synthesize(WorldSettings(user_count=400, item_count=120, seed=self.seed))
        write_clicks(self.folder, clicks)
        for name, gates in (("larder", ""), ("strict", "items_of_live = 2.0")):
            text = SETTINGS.format(namespace=self.namespace, gates=gates)
            (self.folder / f"{name}.toml").write_text(text)

    @property
    def store(self) -> ArtefactStore:
        """The artefact store of both."""
        return night_config(str(self.folder / "larder.toml"), self.environ()).store()

    def file(self, path: str) -> Path:
        """Return the path of a file of the store."""
        folder = self.store.local_folder
        assert folder is not None
        return folder / path

    @property
    def keys(self) -> Keyspace:
        """Keys of the namespace."""
        return Keyspace(self.namespace)

    @contextlib.contextmanager
    def redis(self) -> Iterator["redis.Redis"]:
        """A client of the test's own."""
        with redis.Redis.from_url(self.redis_url, protocol=3) as client:
            yield client

    def environ(self, settings: str = "larder", **more: str) -> dict[str, str]:
        """Environment of nights and services, with long deadlines, since tests share few cores."""
        return {
            "REDIS_URL": self.redis_url,
            "LARDER_CONFIG": str(self.folder / f"{settings}.toml"),
            "LARDER_DEADLINE_MS": "5000",
            "LARDER_L2_DEADLINE_MS": "1000",
            "LARDER_POLL_S": "0.2",
            "LARDER_BLOCKLIST_POLL_S": "0.5",
            "LARDER_SCHEDULE": MANUAL_SCHEDULE,
            **more,
        }

    def tell(self, release: Checkout, *arguments: str, settings: str = "larder") -> str:
        """Return the output of a release's `precompute` command, which must succeed."""
        completed_process = release.run("precompute", "--quiet", *arguments, environ=self.environ(settings))
        assert completed_process.returncode == 0, f"{release.name} {arguments}: {completed_process.stderr}"
        return completed_process.stdout

    def refusal(self, release: Checkout, *arguments: str, settings: str = "larder", newer_format: str = "") -> str:
        """The line by which a release refuses a command; `newer_format`: as a release with that format runs it."""
        standing_before = self.standing()
        program = ["tests.upgrade.newer", newer_format] if newer_format else []
        completed_process = release.run(*program, "precompute", "--quiet", *arguments, environ=self.environ(settings))
        assert completed_process.returncode not in (0, 3), f"{release.name} {arguments} was not refused"
        lines = [line for line in completed_process.stderr.splitlines() if line.strip()]
        assert len(lines) == 1, completed_process.stderr
        assert self.standing() == standing_before, "something moved"
        return lines[0]

    def standing(self) -> tuple[bytes | None, list[str]]:
        """What a refusal must not change: the pointer and the release records."""
        with self.redis() as client:
            pointer: Any = client.get(self.keys.live)
        names = [name for name in self.store.names("releases") if name.endswith(".done")]
        return pointer, sorted(names)

    def night(self, release: Checkout, cut: str, *, newer_format: str = "") -> str:
        """Run a whole night of a release; return the published generation."""
        program = ["tests.upgrade.newer", newer_format] if newer_format else []
        arguments = ("precompute", "--quiet", "night", "--data-until", cut)
        completed_process = release.run(*program, *arguments, environ=self.environ())
        assert completed_process.returncode == 0, f"{release.name}: {completed_process.stderr}"
        return self.live()

    def live(self) -> str:
        """The generation that the pointer names."""
        with self.redis() as client:
            raw: Any = client.get(self.keys.live)
        return str(orjson.loads(raw)["generation"])

    def previous(self) -> str:
        """The generation that a roll back would return to."""
        with self.redis() as client:
            raw: Any = client.get(self.keys.live)
        return str(orjson.loads(raw)["previous"])

    def history(self) -> list[ReleaseRecord]:
        """Release records, as the working tree reads them."""
        return all_releases(self.store)

    @contextlib.contextmanager
    def serving(self, releases: Sequence[Checkout]) -> Iterator[None]:
        """Run a service of each release, by name."""
        with ExitStack() as stack:
            for release in releases:
                environ = release.environment(self.environ(LARDER_STATE=str(self.state_of(release))))
                service = ServiceProcess(
                    self.folder / f"{release.name}.log",
                    environ,
                    working_folder=release.root,
                    python_path=release.python,
                )
                self.services[release.name] = stack.enter_context(service)
            try:
                yield
            finally:
                self.services.clear()

    def state_of(self, release: Checkout) -> Path:
        """Return the state folder of a service."""
        return self.folder / f"state-{release.name}"

    def log(self, name: str) -> str:
        """Return a service's log."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def view(self, name: str) -> dict[str, Any]:
        """Return the generations that a service holds, and its state."""
        generations_view: dict[str, Any] = self.get(name, "/v1/generations")
        return generations_view

    def get(self, name: str, path: str) -> Any:
        """Return a JSON document of a service."""
        return self.http.get(self.services[name].url + path).json()

    def ready(self, name: str) -> dict[str, Any]:
        """Return the answer of /readyz."""
        readiness: dict[str, Any] = self.get(name, "/readyz")
        return readiness

    def follow(self, generation: str) -> None:
        """Wait until every service answers from the generation, ready and in step."""

        def in_step(name: str) -> bool:
            readiness = self.ready(name)
            return bool(readiness["generation"] == generation and readiness["ready"] and readiness["stale"] is None)

        for name in self.services:
            assert until(lambda name=name: in_step(name)), (  # type: ignore[misc]
                f"{name} does not follow {generation}: {self.ready(name)}\n{self.log(name)[-4000:]}"
            )

    def ask(self, name: str, table: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a service's answers to a batch, as JSON."""
        url = f"{self.services[name].url}/v1/lookup/{table}"
        reply = self.http.post(url, json=body)
        assert reply.status_code == 200, reply.text
        answers: list[dict[str, Any]] = reply.json()["answers"]
        return answers

    def ask_arrow(self, name: str, table: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a service's answers to a batch, as Arrow."""
        import pyarrow as pa

        url = f"{self.services[name].url}/v1/lookup/{table}"
        reply = self.http.post(url, json=body, headers={"Accept": ARROW})
        assert reply.status_code == 200, reply.text
        with pa.ipc.open_stream(reply.content) as stream:
            rows: list[dict[str, Any]] = stream.read_all().to_pylist()
        return rows

    def users(self, count: int) -> list[str]:
        """Users with interactions before all cuts."""
        table = pq.read_table(self.folder / "interactions.parquet")
        rows = sorted(zip(table["timestamp"].to_pylist(), table["user"].to_pylist(), strict=True))
        return list(dict.fromkeys(user for _, user in rows))[:count]

    def items(self, count: int) -> list[str]:
        """Items of the catalogue."""
        return list(pq.read_table(self.folder / "items.parquet")["item"].to_pylist()[:count])


def until(condition: Callable[[], bool]) -> bool:
    """Poll a service at long intervals, since it shares its cores with all other processes."""
    return polling.poll_until(condition, FOLLOW_S, every_s=0.1)


def rule_of(refusal: str) -> str:
    """Return the gate's name in a refusal that may be overridden."""
    rule_match = re.search(r"--rule (\S+)", refusal)
    assert rule_match, refusal
    return rule_match[1]
