"""Configuration of the night: one frozen value, read from a TOML file and the environment where a program starts."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import orjson

from cache.artefacts import ArtefactStore
from cache.errors import ConfigError
from cache.keys import Keyspace
from cache.records import Precision

SourceFormat = Literal["auto", "parquet", "csv", "lines"]
Section = TypeVar("Section")

KIB = 1024


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the night reads from; paths may hold wildcards and are relative to the configuration file."""

    interactions: tuple[str, ...] = ()
    format: SourceFormat = "auto"
    user_column: str = "user"
    item_column: str = "item"
    timestamp_column: str = "timestamp"
    weight_column: str = "weight"
    user_features: str | None = None
    item_features: str | None = None
    category_column: str = "category"


@dataclass(frozen=True, slots=True)
class TableConfig:
    """One table to build; `kind` decides which of the other settings apply."""

    kind: Literal["user_topk", "user_vector", "item_vector", "item_similar", "value"]
    k: int = 100
    precision: Precision = "f2"
    value: str | None = None
    metric: Literal["inner_product", "cosine"] | None = None


@dataclass(frozen=True, slots=True)
class GateThresholds:
    """What a generation must reach before it may be published."""

    coverage_of_source: float = 0.95
    coverage_of_live: float = 0.8
    index_recall: float = 0.9
    int8_overlap: float = 0.9
    skew_overlap: float = 0.9
    short_lists: float = 0.05
    items_of_live: float = 0.8
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """The reference bundle's trainer."""

    dims: int = 256
    seed: int = 0


def _default_tables() -> Mapping[str, TableConfig]:
    return {
        "user_topk": TableConfig("user_topk"),
        "user_vector": TableConfig("user_vector"),
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
    redis_url: str | None = None
    bundle: str = ".larder/bundle"
    data_until: str | None = None
    shards: int = 4
    page_bytes: int = 256 * KIB
    load_chunk_bytes: int = 1024 * KIB
    index: Literal["auto", "flat", "ivf", "hnsw"] = "auto"
    history_limit: int = 100_000
    keep: int = 2
    threads: int = 0
    redis_timeout_s: float = 30.0
    superseded_grace_s: float = 60.0
    overlay_ttl_s: float = 86_400.0
    warm_timeout_s: float = 30.0
    sources: Sources = field(default_factory=Sources)
    tables: Mapping[str, TableConfig] = field(default_factory=_default_tables)
    gates: GateThresholds = field(default_factory=GateThresholds)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    base: str = "."

    def __post_init__(self) -> None:
        if not 1 <= self.shards <= 1024:
            raise ConfigError(f"shards must be 1 to 1024 (Airflow maps no more), not {self.shards}")
        if not 4 * KIB <= self.page_bytes <= 8 * KIB * KIB:
            raise ConfigError(f"page_bytes must be 4 KiB to 8 MiB, not {self.page_bytes}")
        if not self.tables:
            raise ConfigError(
                "no table is configured; leave [tables] out to build the default ones"
            )
        for name, table in self.tables.items():
            if table.kind == "value" and not table.value:
                raise ConfigError(
                    f'table {name}: a value table names its model output, e.g. value = "{name}"'
                )
            if not 1 <= table.k <= 1000:
                raise ConfigError(f"table {name}: k must be 1 to 1000, not {table.k}")

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
        return ArtefactStore(f"{url.rstrip('/')}/{self.namespace}", cached)

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
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: {error}") from error
        data.pop("serving", None)  # the lookup service's own section of the same file
        if "sources" in data:
            data["sources"] = _section(Sources, data["sources"], f"{path} [sources]")
        if "tables" in data:
            data["tables"] = {
                name: _section(TableConfig, table, f"{path} [tables.{name}]")
                for name, table in data["tables"].items()
            }
        if "gates" in data:
            data["gates"] = _section(GateThresholds, data["gates"], f"{path} [gates]")
        if "reference" in data:
            data["reference"] = _section(ReferenceConfig, data["reference"], f"{path} [reference]")
        return _section(cls, {"base": str(path.parent), **data}, str(path))


def _section(kind: type[Section], data: Any, where: str) -> Section:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a table of settings")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(known)):
        raise ConfigError(
            f"{where}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
    values: dict[str, Any] = {}
    for name, value in data.items():
        expected = known[name].type
        if isinstance(value, list):
            values[name] = tuple(value)
        elif name == "interactions" and isinstance(value, str):
            values[name] = (value,)
        elif expected in (int, float) and (
            isinstance(value, bool) or not isinstance(value, int | float)
        ):
            raise ConfigError(f"{where}: {name} must be a number, not {value!r}")
        elif expected is int and isinstance(value, float):
            raise ConfigError(f"{where}: {name} must be a whole number, not {value!r}")
        else:
            values[name] = value
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


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
    }
    # Where a path came from decides what it is relative to: the file's folder, or the current one.
    chosen: dict[str, Any] = {
        name: str(Path(value).absolute())
        if name in ("artifacts", "state") and "://" not in value
        else value
        for name, value in from_environment.items()
        if value
    }
    chosen |= {name: value for name, value in overrides.items() if value is not None}
    return replace(config, **chosen)


def parse_time(text: str) -> datetime:
    """An ISO 8601 time as UTC; one without a zone is UTC."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not an ISO 8601 time, e.g. 2026-01-31T00:00:00Z") from error
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def describe(config: NightConfig) -> dict[str, Any]:
    """For the manifest; nothing secret."""
    return {name: value for name, value in asdict(config).items() if name != "redis_url"}
