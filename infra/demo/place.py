"""Place of all that the demo keeps: one folder under the state folder, emptied before each run."""

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cache.errors import ConfigError
from cache.format.redis_keys import Keyspace
from cache.process.host import usable_cores
from cache.store.artefacts import read_manifest
from infra.demo.dataset import Dataset
from infra.local.lock import alone
from precompute.bulk.load import unlink_pages
from precompute.config.settings import night_config
from precompute.control.connection import connect_events
from precompute.control.control_keys import connect

SHARDS = 4
SCORERS = 2
"""Scoring tasks at a time, the slots of the pool: together they fill the machine."""
_SUBFOLDERS = (
    "data",
    "artifacts",
    "bundle",
    "bundle-with-features",
    "host-cache",
    "larder.toml",
    "service.log",
)
NEVER = "0 0 29 2 *"
"""Schedule for nights started by hand: none may come by the clock, at once even where one was due a while ago."""


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """Paths under `home`, and the namespace that keeps this run apart from others in the same Redis."""

    home: Path
    namespace: str

    @property
    def config(self) -> Path:
        """The settings of nights and service."""
        return self.home / "larder.toml"

    @property
    def bundle(self) -> Path:
        """The model that nights score with."""
        return self.home / "bundle"

    @property
    def artifacts(self) -> Path:
        """The artefact store."""
        return self.home / "artifacts"

    def write_config(self, dataset: Dataset) -> None:
        """Write the settings that differ from the defaults."""
        lines = [
            f'namespace = "{self.namespace}"',
            'artifacts = "artifacts"',
            'bundle = "bundle"',
            'state = "."',
            f'data_until = "{dataset.first_cut.isoformat()}"',
            f"shards = {SHARDS}",
            f"threads = {max(1, usable_cores() // SCORERS)}",
            "",
            "[sources]",
            'interactions = ["data/interactions"]',
        ]
        lines += [f'{name} = "data/{file}"' for name, file in dataset.feature_tables.items()]
        lines += ["", "[events]", "enabled = true"]
        self.config.write_text("\n".join(lines) + "\n")

    def environment(
        self, redis_url: str, environ: Mapping[str, str] = os.environ
    ) -> dict[str, str]:
        """Environment of nights and service; settings of the surrounding shell do not reach them."""
        blank = {name: "" for name in environ if name.startswith("LARDER_")}
        return {
            **blank,
            "LARDER_CONFIG": str(self.config),
            "LARDER_NAMESPACE": self.namespace,
            "LARDER_ARTIFACTS": str(self.artifacts),
            "LARDER_STATE": str(self.home),
            "LARDER_SCHEDULE": NEVER,
            "LARDER_EVENTS_URL": environ.get("LARDER_EVENTS_URL", ""),
            "REDIS_URL": redis_url,
        }

    def forget(self, redis_url: str) -> None:
        """Leave nothing of this run in a Redis that is not ours."""
        config = night_config(str(self.config), self.environment(redis_url))
        keys = Keyspace(self.namespace)
        with connect(redis_url, config.redis_timeout_s) as client:
            for generation in config.store().names("generations"):
                unlink_pages(client, keys, read_manifest(config.store(), generation))
            client.unlink(keys.live, keys.generations, keys.replicas)
        with connect_events(config) as client:  # ids of events go by themselves, within `keep_s`
            client.unlink(keys.events, keys.inbox, keys.rejected_events)


@contextmanager
def prepare_demo_folder(state: Path) -> Iterator[DemoFolder]:
    """An emptied place that no other run uses meanwhile; raises ConfigError when one does."""
    home = state.resolve() / "demo"
    home.mkdir(parents=True, exist_ok=True)
    lock_error = ConfigError(f"another demo runs in {home}; choose another --state")
    with alone(home / "demo.lock", lock_error):
        for name in _SUBFOLDERS:
            path = home / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        yield DemoFolder(home, f"demo-{secrets.token_hex(4)}")
