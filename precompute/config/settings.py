"""Configuration of the night: one frozen value, read from a TOML file and the environment where a program starts."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_type_hints

import orjson

from cache.control.schedule import CRON, GRACE_S, TIMEZONE, Schedule
from cache.errors import ConfigError
from cache.format.redis_keys import Keyspace
from cache.l2 import slots
from cache.store.artefacts import ArtefactStore
from precompute.config.devices import AUTO, WANTED
from precompute.config.sections import (
    CanaryConfig,
    FlipConfig,
    GateThresholds,
    GovernorConfig,
    ReferenceConfig,
    Sources,
    TableConfig,
)
from precompute.config.tasks import DagConfig
from precompute.config.validation import (
    allowed_values,
    check_above_zero,
    check_filled,
    check_name,
    check_range,
    check_types,
    truth,
)

__all__ = [
    "DagConfig",
    "FlipConfig",
    "GateThresholds",
    "GovernorConfig",
    "NightConfig",
    "ReferenceConfig",
    "Sources",
    "TableConfig",
    "night_config",
    "parse_time",
]

Section = TypeVar("Section")

_REDIS_SCHEMES = ("redis://", "rediss://", "unix://", *slots.SCHEMES)

KIB = 1024

_SECTIONS: Mapping[str, type[Any]] = {
    "gates": GateThresholds,
    "flip": FlipConfig,
    "canary": CanaryConfig,
    "governor": GovernorConfig,
    "reference": ReferenceConfig,
    "dag": DagConfig,
}


def _default_tables() -> Mapping[str, TableConfig]:
    return {
        "user_topk": TableConfig("user_topk"),
        "user_vector": TableConfig("user_vector", precision="f4"),
        "item_vector": TableConfig("item_vector"),
        "item_similar": TableConfig("item_similar", metric="cosine"),
        "user_affinity": TableConfig("value", precision="f4", value="user_affinity"),
    }


@dataclass(frozen=True, slots=True)
class NightConfig:
    """Everything a night needs to know. `semantic` names the part that decides the result."""

    namespace: str = "default"
    artifacts: str = ".larder/artifacts"
    state: str = ".larder"
    ephemeral_state: bool = False
    redis_url: str | None = None
    bundle: str = ".larder/bundle"
    data_until: str | None = None
    schedule: str = CRON
    timezone: str = TIMEZONE
    schedule_grace_s: float = GRACE_S
    shards: int = 4
    page_bytes: int = 256 * KIB
    load_chunk_bytes: int = 1024 * KIB
    index: Literal["auto", "flat", "ivf", "hnsw"] = "auto"
    history_limit: int = 100_000
    keep: int = 1
    threads: int = 0
    device: str = AUTO
    redis_timeout_s: float = 30.0
    superseded_grace_s: float = 60.0
    abandon_after_s: float = 86_400.0
    overlay_ttl_s: float = 86_400.0
    warm_timeout_s: float = 30.0
    sources: Sources = field(default_factory=Sources)
    tables: Mapping[str, TableConfig] = field(default_factory=_default_tables)
    gates: GateThresholds = field(default_factory=GateThresholds)
    flip: FlipConfig = field(default_factory=FlipConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    governor: GovernorConfig = field(default_factory=GovernorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    dag: DagConfig = field(default_factory=DagConfig)
    base: str = "."

    def __post_init__(self) -> None:
        check_types(self)
        check_name("namespace", self.namespace)
        check_filled(self, "artifacts", "state", "bundle")
        check_range(self, "shards", 1, 1024)  # Airflow maps no more
        check_range(self, "page_bytes", 4 * KIB, 8 * KIB * KIB)
        check_range(self, "load_chunk_bytes", 1, 512 * KIB * KIB)  # Redis takes no larger value
        check_range(self, "history_limit", 1)
        check_range(self, "keep", 0)
        check_range(self, "threads", 0)
        if not WANTED.fullmatch(self.device):
            raise ConfigError(
                f"device is auto, off, cpu, cuda or cuda:0 and so on, not {self.device!r}",
                field="device",
            )
        check_range(self, "superseded_grace_s", 0)
        check_range(self, "abandon_after_s", 0)
        check_above_zero(self, "redis_timeout_s", "overlay_ttl_s", "warm_timeout_s")
        if self.redis_url and not self.redis_url.startswith(_REDIS_SCHEMES):
            # Not the value itself: it may hold a password.
            raise ConfigError(
                f"redis_url starts with {', '.join(_REDIS_SCHEMES)}", field="redis_url"
            )
        if self.data_until:
            parse_time(self.data_until)
        Schedule(self.schedule, self.timezone, self.schedule_grace_s)
        if not self.tables:
            raise ConfigError(
                "no table is configured; leave [tables] out to build the default ones"
            )
        for name in self.tables:
            check_name("the name of a table", name)

    def semantic(self) -> bytes:
        """Canonical bytes of the settings that decide what a generation holds."""
        names = ("namespace", "shards", "page_bytes", "index", "history_limit", "tables", "sources")
        return orjson.dumps(
            {name: getattr(self, name) for name in names}, option=orjson.OPT_SORT_KEYS
        )

    def path(self, name: str) -> Path:
        """A path of the configuration, relative to its file."""
        return Path(self.base, name)

    def store(self) -> ArtefactStore:
        """This namespace's part of the artefact store; a remote one keeps this host's copies under the state folder."""
        url = self.artifacts if "://" in self.artifacts else str(self.path(self.artifacts))
        cached = self.path(self.state) / "host-cache" / self.namespace
        return ArtefactStore(
            f"{url.rstrip('/')}/{self.namespace}", cached, is_ephemeral=self.ephemeral_state
        )

    def keyspace(self) -> Keyspace:
        """Redis keys of this namespace."""
        return Keyspace(self.namespace)

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Read a file; unknown names are errors, so that a typo cannot pass."""
        try:
            data = tomllib.loads(path.read_text())
        except FileNotFoundError as error:
            raise ConfigError(f"configuration file {path} does not exist") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read configuration file {path}: {error}") from error
        data.pop("serving", None)  # the lookup service's own section of the same file
        if "sources" in data:
            data["sources"] = _section(Sources, data["sources"], f"{path} [sources]")
        if "tables" in data:
            if not isinstance(data["tables"], dict):
                raise ConfigError(
                    f"{path}: tables must hold one section per table, e.g. [tables.user_topk], "
                    f"not {data['tables']!r}"
                )
            data["tables"] = {
                name: _section(TableConfig, table, f"{path} [tables.{name}]")
                for name, table in data["tables"].items()
            }
        for name, kind in _SECTIONS.items():
            if name in data:
                data[name] = _section(kind, data[name], f"{path} [{name}]")
        return _section(cls, {"base": str(path.parent), **data}, str(path))


def _section(kind: type[Section], data: Any, where: str) -> Section:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a section of settings, not {data!r}")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(known)):
        raise ConfigError(
            f"{where}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
    for name, each in known.items():
        if name not in data and each.default is MISSING and each.default_factory is MISSING:
            allowed = allowed_values(get_type_hints(kind)[name])
            raise ConfigError(f"{where}: {name} is missing; it must be {allowed}", field=name)
    values = {
        name: (value,) if name == "interactions" and isinstance(value, str) else _plain(value)
        for name, value in data.items()
    }
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", **error.details) from error


def _plain(value: Any) -> Any:
    """TOML's lists and times as the settings hold them."""
    if isinstance(value, list):
        return tuple(value)
    return value.isoformat() if isinstance(value, date) else value


def night_config(
    path: str | None = None, environment: Mapping[str, str] = os.environ, **overrides: Any
) -> NightConfig:
    """The configuration of this process: file, then environment, then what the command line said."""
    file = path or environment.get("LARDER_CONFIG")
    config = NightConfig.from_toml(Path(file)) if file else NightConfig()
    from_environment = {
        "artifacts": environment.get("LARDER_ARTIFACTS"),
        "namespace": environment.get("LARDER_NAMESPACE"),
        "state": environment.get("LARDER_STATE"),
        "redis_url": environment.get("REDIS_URL"),
        "schedule": environment.get("LARDER_SCHEDULE"),
        "timezone": environment.get("LARDER_TIMEZONE"),
        "device": environment.get("LARDER_DEVICE"),
    }
    # Where a path came from decides what it is relative to: the file's folder, or the current one.
    chosen: dict[str, Any] = {
        name: str(Path(value).absolute())
        if name in ("artifacts", "state") and "://" not in value
        else value
        for name, value in from_environment.items()
        if value
    }
    if ephemeral := environment.get("LARDER_EPHEMERAL_STATE"):
        chosen["ephemeral_state"] = truth("LARDER_EPHEMERAL_STATE", ephemeral)
    chosen |= {name: value for name, value in overrides.items() if value is not None}
    return replace(config, **chosen)


def parse_time(text: str) -> datetime:
    """An ISO 8601 time as UTC; one without a zone is UTC."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not an ISO 8601 time, e.g. 2026-01-31T00:00:00Z") from error
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
