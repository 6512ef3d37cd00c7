"""Settings of a night: those above the sections of `larder.toml`, its sections, and thresholds of gates."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import orjson
from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from cache.config.section import Count, NonEmptyText, fields_of, section
from cache.config.shared import SharedConfig, check_name
from cache.config.timetable import DagConfig
from cache.errors import ConfigError
from cache.format.iso_times import iso_time
from cache.records import Precision

SourceFormat = Literal["auto", "parquet", "csv", "lines"]
DEFAULT_BUNDLE: Final = ".larder/bundle"

LISTS: Final = ("user_topk", "item_similar")
"""Kinds of tables that hold lists."""

REDIS_HEADROOM_RULE: Final = "redis_headroom"
"""Id of the gate rule about room in Redis, as manifests, overrides, metrics and alerts have it."""

DISK_HEADROOM_RULE: Final = "disk_headroom"
"""Id of the gate rule about disk space on the hosts of replicas."""

_DEVICE: Final = re.compile(r"auto|off|cpu|cuda(:\d{1,3})?")
_KIB = 1024


def _texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _sign(value: Any) -> Any:
    return "" if value is False else value


@section
class Sources:
    """Inputs of the night, in `[sources]`; paths may hold wildcards and are relative to the configuration file."""

    interactions: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    """Files, folders with all below, wildcards or fsspec URLs of what users did; may be empty with `user_vectors` or
    `user_features`."""
    format: SourceFormat = "auto"
    """Format of those files; `auto` goes by their names."""
    separator: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """Sign between the fields of a CSV file, such as a semicolon or a tab."""
    quote: Annotated[str, BeforeValidator(_sign), Field(max_length=1)] = '"'
    """Sign around values of a CSV file that hold separators or line breaks; empty, or false: no value has one."""
    escape: Annotated[str, BeforeValidator(_sign), Field(max_length=1)] = ""
    """Sign before a quote that is part of a value of a CSV file, such as a backslash; empty: the quote is doubled."""
    user_column: NonEmptyText = "user"
    """Column of user ids, in every file that has them."""
    item_column: NonEmptyText = "item"
    """Column of item ids, in every file that has them."""
    timestamp_column: str = "timestamp"
    """Column of times."""
    weight_column: str = "weight"
    """Column of weights."""
    user_features: str | None = None
    """Feature table of users."""
    item_features: str | None = None
    """Feature table of items, which is the catalogue."""
    item_attributes: tuple[str, ...] = ()
    """Columns of `item_features` that requests may filter by."""
    category_column: str = "category"
    """Column of an item's category."""
    user_vectors: str | None = None
    """Vectors of users, of the bundle's dimensions: they are scored from these instead of by its user tower."""
    item_vectors: str | None = None
    """Vectors of items, of which a night makes its bundle; `bundle` is not set then."""
    vector_column: NonEmptyText = "vector"
    """Column of vectors, lists of numbers."""
    vector_metric: Literal["inner_product", "cosine"] = "inner_product"
    """Measure by which `item_vectors` are compared."""

    def __post_init__(self) -> None:
        signs = {name: getattr(self, name) for name in ("separator", "quote", "escape")}
        for name, sign in signs.items():
            if sign and (not sign.isascii() or sign in "\r\n"):
                raise ConfigError(f"{name} must be one ASCII character and no line break, not {sign!r}", field=name)
        for name, other_setting in (("quote", "separator"), ("escape", "separator"), ("escape", "quote")):
            if signs[name] and signs[name] == signs[other_setting]:
                raise ConfigError(
                    f"{name} and {other_setting} are both {signs[name]!r}: a sign has one meaning", field=name
                )

    @property
    def names_users(self) -> bool:
        """True if there is a table of users that a night can answer for: one of features is enough for some models."""
        return bool(self.interactions or self.user_vectors or self.user_features)


@section
class TableConfig:
    """Table to build, in `[tables.NAME]`; `kind` decides which of the other settings apply."""

    kind: Literal["user_topk", "user_vector", "item_vector", "item_similar", "value"]
    """Kind of its records."""
    k: Annotated[int, Field(ge=1, le=1000)] = 100
    """Number of items of a list."""
    precision: Precision = "f2"
    """Precision of stored numbers: float16, float32 or, of vectors alone, int8."""
    value: str | None = None
    """Model output that a table of kind `value` holds."""
    metric: Literal["inner_product", "cosine"] | None = None
    """Measure of a list."""

    def __post_init__(self) -> None:
        if self.kind == "value" and not self.value:
            raise ConfigError('a value table names its model output, e.g. value = "user_affinity"', field="value")


@section
class FilterConfig:
    """Filter that requests call by its name, in `[filters.NAME]`; it belongs to the generations made from then on."""

    filter: dict[str, Any]
    """Expression as requests send it, such as `{"<" = ["price", 20]}`."""
    tables: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    """Tables of lists (kinds `user_topk` and `item_similar`) of which another one is made and loaded, of the best that
    passes: requests under the name are answered from it. `larder plan` says from how many on it pays."""


@section
class FacetConfig:
    """Table of the best items with each value of an attribute, in `[facets.NAME]`, by the score of the defaults."""

    attribute: NonEmptyText
    """Attribute of items, a text or a list of texts; its values are the ids of the table."""
    k: Annotated[int, Field(ge=1, le=1000)] = 100
    """Number of items of a list."""


@section
class GateThresholds:
    """Thresholds that a generation must reach before it may be published; shares are 0 to 1."""

    unusable_rows: NonNegativeFloat = 0.001
    """Share left out of the worst source or table, at most; one row always may be, unless it is 0."""
    unknown_items: NonNegativeFloat = 0.5
    """Share of interactions with items that the catalogue does not have, at most; events are not judged."""
    coverage_of_source: NonNegativeFloat = 0.95
    """Share of users with an answer, in the worst table."""
    coverage_of_live: NonNegativeFloat = 0.8
    """Number of users with an answer, as a share of the live generation's."""
    items_of_live: NonNegativeFloat = 0.8
    """Number of items, as a share of the live generation's, at least."""
    items_of_live_most: NonNegativeFloat = 1.5
    """Number of items, as a share of the live generation's, at most: one that grows so fast may be a wrong one."""
    short_lists: NonNegativeFloat = 0.05
    """Share of lists with fewer items than asked for though the catalogue has enough, at most."""
    empty_lists: NonNegativeFloat = 0.01
    """Share of lists without any item, at most."""
    index_recall: NonNegativeFloat = 0.9
    """Recall of the index in the worst stratum."""
    int8_overlap: NonNegativeFloat = 0.9
    """Overlap of lists and labels of int8 models with those of fp32."""
    int8_cosine: NonNegativeFloat = 0.98
    """Cosine of vectors of int8 models with those of fp32."""
    skew_overlap: NonNegativeFloat = 0.9
    """Overlap of lists of the live path with the records."""
    skew_cosine: NonNegativeFloat = 0.95
    """Cosine of vectors of the live path with the records."""
    exact: NonNegativeFloat = 0.995
    """Share of records of a sample that equal a recomputation in float64."""
    top_items: NonNegativeFloat = 0.8
    """Share of all slots that the top 1 % of items hold, at most."""
    single_item: NonNegativeFloat = 0.5
    """Share of all slots that one item holds, at most."""
    distinct_lists: NonNegativeFloat = 0.05
    """Share of lists that differ from each other, at least."""
    score_psi: NonNegativeFloat = 0.25
    """Shift of scores and of values against the live generation (PSI), at most."""
    score_psi_retrained: NonNegativeFloat = 1.0
    """Shift of scores and of values with a changed bundle, at most."""
    list_jaccard: NonNegativeFloat = 0.4
    """Similarity of lists to those of the live generation (Jaccard), at least."""
    list_jaccard_retrained: NonNegativeFloat = 0.2
    """Similarity of lists with a changed bundle, at least."""
    top_items_of_live: NonNegativeFloat = 1.5
    """Ratio of the top items' share to that of the live generation, at most."""
    distinct_lists_of_live: NonNegativeFloat = 0.7
    """Ratio of distinct lists to those of the live generation, at least."""
    stale_lists: NonNegativeFloat = 0.9
    """Share of unchanged lists among users with new interactions, at most."""
    heldout_of_live: NonNegativeFloat = 0.7
    """Ratio of recall of interactions newer than the cut to that of the live generation, at least."""
    heldout_recall: NonNegativeFloat = 0.0
    """Recall of interactions newer than the cut, at least."""
    redis_headroom: NonNegativeFloat = 0.95
    """Share of Redis' memory used, at most."""
    disk_headroom: NonNegativeFloat = 1.0
    """Free disk on the host of every live replica, in multiples of the bytes that readers map."""
    memory_headroom: NonNegativeFloat = 1.0
    """Free memory on the host of every live replica, in multiples of the bytes that readers map."""
    timeout_s: PositiveFloat = 600.0
    """Seconds of one gate, beyond what reading the generation's bytes once takes at the governor's `floor_mib_s`."""
    total_timeout_s: PositiveFloat = 1800.0
    """Seconds of all gates, beyond what reading the generation's bytes three times takes at that rate."""


@section
class ReferenceConfig:
    """Trainer of the reference bundle, in `[reference]`."""

    dims: Annotated[int, Field(ge=1, le=4096)] = 256
    """Dimensions of a vector at most; fewer are taken where they find as much."""
    choose: bool = True
    """True if method, numbers and dimensions are those that find most of held-out histories; else they are fixed."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of its random numbers."""
    programs: bool = False
    """True if the bundle carries torch.export programs, too."""


@section
class FlipConfig:
    """Wait of a publish for readers, in `[flip]`."""

    wait_s: PositiveFloat = 120.0
    """Seconds that a publish waits for all live replicas to be ready."""
    replicas_min: NonNegativeInt = 0
    """Number of ready replicas that is enough once `wait_s` is over; 0: every live one must be ready."""


@section
class GovernorConfig:
    """Limits on bulk work on Redis, in `[governor]`."""

    p99_factor: Annotated[float, Field(gt=1)] = 1.25
    """Readers' p99 beside bulk work, in multiples of what it is when idle."""
    readers: Literal["auto", "always", "never"] = "auto"
    """True if Redis has readers: `auto` looks for them, the others decide."""
    floor_mib_s: PositiveFloat = 16.0
    """Rate that bulk work never goes below (MiB/s), so that a night always ends."""
    ceiling_mib_s: NonNegativeFloat = 0.0
    """Rate that it never goes above (MiB/s) with readers; 0: no limit."""
    piece_bytes: Annotated[int, Field(ge=1024, le=8 << 20)] = 16 * 1024
    """Bytes of a piece in which pages travel while there are readers."""
    probe_ms: PositiveFloat = 1.0
    """Milliseconds between the records that a probe reads."""
    idle_s: PositiveFloat = 1.5
    """Seconds for which idle latency is measured, before the first piece and in a rest of every step."""
    replica_lag_mib: PositiveFloat = 32.0
    """Bytes (MiB) that Redis' own replicas may fall behind."""
    yield_cpu: bool = True
    """True if the loading thread gives way to everything else on its host."""

    def __post_init__(self) -> None:
        if 0 < self.ceiling_mib_s < self.floor_mib_s:
            raise ConfigError(
                f"ceiling_mib_s ({self.ceiling_mib_s}) must not be below floor_mib_s ({self.floor_mib_s})",
                field="ceiling_mib_s",
            )


@section
class CanaryConfig:
    """Settings of a canary, in `[canary]`: a generation gets a share of the requests, then is published or abandoned.

    It is published if each arm answered enough requests for enough keys, and, each key counted once, nothing moved
    beyond its limit. What is above its limit by more than chance abandons it; where too little was counted to tell, it
    goes on for up to `wait_max_s` and is then left running for a person to decide.
    """

    percent: Annotated[float, Field(gt=0, le=100)] = 5.0
    """Share of the requests, in percent."""
    wait_s: PositiveFloat = 3600.0
    """Seconds until it is judged."""
    wait_max_s: PositiveFloat = 86_400.0
    """Seconds until a person must decide."""
    requests_min: Count = 1000
    """Number of requests that each arm must have answered."""
    keys_min: Count = 200
    """Number of keys that each arm must have answered."""
    source_shift_max: NonNegativeFloat = 0.05
    """Shift of the mix of sources, at most (total variation, 0 to 1)."""
    score_psi_max: NonNegativeFloat = 0.1
    """Shift of top scores (PSI), at most."""
    feedback_event: str = ""
    """Name of the feedback event that is counted; empty: none."""
    feedback_ratio_min: NonNegativeFloat = 0.9
    """Rate of that event per request, at least this share of the rate under the live generation."""


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

    FROM_ENVIRONMENT: ClassVar = (*(SharedConfig.FROM_ENVIRONMENT or ()), "device", "device_tasks")

    bundle: NonEmptyText = DEFAULT_BUNDLE
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
                f"device is auto, off, cpu, cuda or cuda:0 and so on, not {self.device!r}", field="device"
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
            raise ConfigError("no table is configured; leave [tables] out to build the default ones")
        for name in self.tables:
            check_name("the name of a table", name)
        for name in self.filters:
            check_name("the name of a filter", name)
        self._check_filtered()
        self._check_facets()
        if self.filters and not self.sources.item_attributes:
            raise ConfigError(
                "filters are over the attributes of items: name columns in sources.item_attributes", field="filters"
            )

    @property
    def filtered(self) -> dict[str, tuple[str, str]]:
        """Tables made under filters, by their own names: the table that is asked, and the filter."""
        return {f"{table}.{name}": (table, name) for table, name in self._filtered()}

    def _filtered(self) -> list[tuple[str, str]]:
        return [(table, name) for name, filter_config in self.filters.items() for table in filter_config.tables]

    def _check_filtered(self) -> None:
        lists = sorted(name for name, table_config in self.tables.items() if table_config.kind in LISTS)
        for table, name in self._filtered():
            if table not in lists:
                raise ConfigError(
                    f"filters.{name} names table {table!r}; tables of lists are {', '.join(lists) or 'none'}",
                    field="filters",
                )
            check_name("the name of a table and a filter, with a dot between them,", f"{table}.{name}")
        if len(self.filtered) < len(self._filtered()) or self.filtered.keys() & self.tables.keys():
            raise ConfigError(
                "two tables would have one name: those made under a filter are called TABLE.FILTER", field="filters"
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
            name for name in ("feature_text_bytes", "featured_users") if getattr(self, name) != defaults[name].default
        ]
        settings = {name: getattr(self, name) for name in names}
        if self.events.enabled:
            settings["events"] = self.events.keep_values_days
            if (of := self.of_events()) is not self:
                settings["events_namespace"] = of.namespace
        return orjson.dumps(settings, option=orjson.OPT_SORT_KEYS)

    @classmethod
    def configured(cls, environ: Mapping[str, str], path: str | Path | None = None, **overrides: Any) -> Self:
        """The file (without a path the one that LARDER_CONFIG names), the environment over it, overrides over both.

        Unknown names in the file are errors, so that a typo cannot pass.
        """
        from cache.config.reading import ConfigFile, read_section

        file = ConfigFile.named(environ, path)
        values = {name: setting for name, setting in file.document.items() if name != "serving"}
        return read_section(cls, values, file, environ, **overrides)


def parse_time(text: str) -> datetime:
    """An ISO 8601 time as UTC; one without a zone is UTC."""
    try:
        time = iso_time(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not an ISO 8601 time, e.g. 2026-01-31T00:00:00Z") from error
    return time.astimezone(UTC)
