"""Settings of a night: what stands above the sections of `larder.toml`, and its sections."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import orjson
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from cache.config.gates import GateThresholds
from cache.config.section import Count, Filled, fields_of, section
from cache.config.sections import (
    CanaryConfig,
    FacetConfig,
    FilterConfig,
    FlipConfig,
    GovernorConfig,
    ReferenceConfig,
    Sources,
    TableConfig,
)
from cache.config.shared import SharedConfig, check_name
from cache.config.timetable import DagConfig
from cache.errors import ConfigError
from cache.format.iso_times import iso_time

DEFAULT_BUNDLE: Final = ".larder/bundle"
_DEVICE: Final = re.compile(r"auto|off|cpu|cuda(:\d{1,3})?")
_KIB = 1024
LISTS: Final = ("user_topk", "item_similar")
"""Kinds of tables that hold lists."""


def _default_tables() -> dict[str, TableConfig]:
    return {
        "user_topk": TableConfig("user_topk"),
        "user_vector": TableConfig("user_vector", precision="f4"),
        "item_vector": TableConfig("item_vector"),
        "item_similar": TableConfig("item_similar", metric="cosine"),
        "user_affinity": TableConfig("value", precision="f4", value="user_affinity"),
    }


@section
class NightConfig(SharedConfig):
    """Everything a night needs to know. `semantic` names the part that decides the result."""

    FROM_ENVIRONMENT: ClassVar = (
        *(SharedConfig.FROM_ENVIRONMENT or ()),
        "device",
        "device_tasks",
    )

    bundle: Filled = DEFAULT_BUNDLE
    """Bundle of models to score with: a folder or an fsspec URL."""
    data_until: str | None = None
    """Cut of the data (ISO 8601; UTC without a zone): what happened from then on is left out."""
    shards: Annotated[int, Field(ge=1, le=1024)] = 4
    """Number of shards that users are scored in; Airflow maps no more."""
    page_bytes: Annotated[int, Field(ge=4 * _KIB, le=8 * _KIB * _KIB)] = 256 * _KIB
    """Bytes of a page of records."""
    load_chunk_bytes: Annotated[int, Field(ge=1, le=512 * _KIB * _KIB)] = 1024 * _KIB
    """Bytes sent to Redis at once, which takes no larger value."""
    index: Literal["auto", "flat", "ivf", "hnsw"] = "auto"
    """Index of candidates; `auto` goes by the number of items."""
    history_limit: Count = 100_000
    """Number of items of a user's history, the newest."""
    featured_users: bool | Literal["auto"] = "auto"
    """Whether users whom the feature table alone names get records, from a model that takes features beside a history:
    all (true), none (false), or with `auto` all unless they are more than the other users."""
    reuse: Literal["auto", "off"] = "auto"
    """Copying of records whose inputs did not change since a verified generation; `off` computes all of them."""
    keep: NonNegativeInt = 1
    """Number of superseded generations left for roll backs; the previous one always is."""
    threads: NonNegativeInt = 0
    """Number of threads; 0: as many as affinity and the control group's `cpu.max` leave."""
    device: str = "auto"
    """Device that scoring runs on: `auto` takes all GPUs that torch (extra `gpu`) sees, `off` the processor; `cuda`,
    `cuda:1` and `cpu` (torch without a GPU: for tests) are demanded. The lists of given vectors have the same bits."""
    device_tasks: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of scoring tasks that share a GPU: each takes such a part of its memory. Slots of the pool `gpu` by the
    GPUs of a worker's host."""
    redis_timeout_s: PositiveFloat = 30.0
    """Seconds that Redis may take for an answer."""
    superseded_grace_s: NonNegativeFloat = 60.0
    """Seconds that a superseded generation is kept for readers that still have it."""
    abandon_after_s: NonNegativeFloat = 86_400.0
    """Seconds until a generation that was begun and not published counts as abandoned."""
    overlay_ttl_s: PositiveFloat = 86_400.0
    """Longest life of a stored live answer, in seconds, where no replica tells a longer one."""
    warm_timeout_s: PositiveFloat = 30.0
    """Seconds that `warm` may take."""
    sources: Sources = Field(default_factory=Sources)
    tables: dict[str, TableConfig] = Field(default_factory=_default_tables)
    filters: dict[str, FilterConfig] = Field(default_factory=dict)
    facets: dict[str, FacetConfig] = Field(default_factory=dict)
    gates: GateThresholds = Field(default_factory=GateThresholds)
    flip: FlipConfig = Field(default_factory=FlipConfig)
    canary: CanaryConfig = Field(default_factory=CanaryConfig)
    governor: GovernorConfig = Field(default_factory=GovernorConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    dag: DagConfig = Field(default_factory=DagConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"device is auto, off, cpu, cuda or cuda:0 and so on, not {self.device!r}",
                field="device",
            )
        if self.data_until:
            parse_time(self.data_until)
        if self.sources.item_vectors and self.bundle != DEFAULT_BUNDLE:
            raise ConfigError(
                f"bundle ({self.bundle}) and sources.item_vectors ({self.sources.item_vectors}) are both set: a night "
                "makes its bundle of the vectors, or takes the one; leave one out",
                field="bundle",
            )
        kinds = {table_config.kind for table_config in self.tables.values()}
        if self.sources.item_attributes and not self.sources.item_features:
            raise ConfigError(
                "sources.item_attributes names columns of sources.item_features, which is not set",
                field="item_attributes",
            )
        if self.sources.item_attributes and "user_topk" in kinds and "user_vector" not in kinds:
            raise ConfigError(
                "a filtered list that the stored one is too short for is found by the user's vector: add a table of "
                "kind user_vector, or leave sources.item_attributes out",
                field="item_attributes",
            )
        if not self.tables:
            raise ConfigError(
                "no table is configured; leave [tables] out to build the default ones"
            )
        for name in self.tables:
            check_name("the name of a table", name)
        for name in self.filters:
            check_name("the name of a filter", name)
        self._check_filtered()
        self._check_facets()
        if self.filters and not self.sources.item_attributes:
            raise ConfigError(
                "filters are over the attributes of items: name columns in sources.item_attributes",
                field="filters",
            )

    @property
    def filtered(self) -> dict[str, tuple[str, str]]:
        """Tables made under filters, by their own names: the table that is asked, and the filter."""
        return {f"{table}.{name}": (table, name) for table, name in self._filtered()}

    def _filtered(self) -> list[tuple[str, str]]:
        return [
            (table, name)
            for name, filter_config in self.filters.items()
            for table in filter_config.tables
        ]

    def _check_filtered(self) -> None:
        lists = sorted(
            name for name, table_config in self.tables.items() if table_config.kind in LISTS
        )
        for table, name in self._filtered():
            if table not in lists:
                raise ConfigError(
                    f"filters.{name} names table {table!r}; tables of lists are {', '.join(lists) or 'none'}",
                    field="filters",
                )
            check_name(
                "the name of a table and a filter, with a dot between them,", f"{table}.{name}"
            )
        if len(self.filtered) < len(self._filtered()) or self.filtered.keys() & self.tables.keys():
            raise ConfigError(
                "two tables would have one name: those made under a filter are called TABLE.FILTER",
                field="filters",
            )

    def _check_facets(self) -> None:
        attributes = self.sources.item_attributes
        for name, facet_config in self.facets.items():
            check_name("the name of a facet", name)
            if name in self.tables or name in self.filtered:
                raise ConfigError(f"facets.{name} has the name of another table", field="facets")
            if facet_config.attribute not in attributes:
                raise ConfigError(
                    f"facets.{name} is of {facet_config.attribute!r}; sources.item_attributes has "
                    f"{', '.join(attributes) or 'none'}",
                    field="facets",
                )

    def semantic(self) -> bytes:
        """Canonical bytes of the settings that decide what a generation holds."""
        names = ["namespace", "shards", "page_bytes", "index", "history_limit", "tables", "sources"]
        # A night without them keeps its id.
        names += [name for name in ("filters", "facets") if getattr(self, name)]
        defaults = fields_of(NightConfig)
        names += [
            name
            for name in ("feature_text_bytes", "featured_users")
            if getattr(self, name) != defaults[name].default
        ]
        settings = {name: getattr(self, name) for name in names}
        if self.events.enabled:
            settings["events"] = self.events.keep_values_days
            if (of := self.of_events()) is not self:
                settings["events_namespace"] = of.namespace
        return orjson.dumps(settings, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def configured(
        cls, environ: Mapping[str, str], path: str | Path | None = None, **overrides: Any
    ) -> Self:
        """The file (without a path the one that LARDER_CONFIG names), the environment over it, overrides over both.

        Unknown names in the file are errors, so that a typo cannot pass.
        """
        from cache.config.reading import ConfigFile, read

        file = ConfigFile.named(environ, path)
        values = {name: setting for name, setting in file.document.items() if name != "serving"}
        return read(cls, values, file, environ, **overrides)


def parse_time(text: str) -> datetime:
    """An ISO 8601 time as UTC; one without a zone is UTC."""
    try:
        time = iso_time(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not an ISO 8601 time, e.g. 2026-01-31T00:00:00Z") from error
    return time.astimezone(UTC)
