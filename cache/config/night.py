"""Settings of a night: top-level keys of `larder.toml`, sections, and thresholds of gates."""

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

LIST_TABLE_KINDS: Final = ("user_topk", "item_similar")
"""Kinds of tables that hold lists."""

REDIS_HEADROOM_RULE: Final = "redis_headroom"
"""Id of the gate rule about free memory in Redis; used in manifests, overrides, metrics and alerts."""

DISK_HEADROOM_RULE: Final = "disk_headroom"
"""Id of the gate rule about disk space on the hosts of replicas."""

_DEVICE_PATTERN: Final = re.compile(r"auto|off|cpu|cuda(:\d{1,3})?")
_KIB = 1024


def _text_as_tuple(setting_value: Any) -> Any:
    return (setting_value,) if isinstance(setting_value, str) else setting_value


def _false_as_empty_text(setting_value: Any) -> Any:
    return "" if setting_value is False else setting_value


@section
class Sources:
    """Inputs of the night, in `[sources]`; paths may hold wildcards and are relative to the configuration file."""

    interactions: Annotated[tuple[str, ...], BeforeValidator(_text_as_tuple)] = ()
    """Interactions of users: files, folders (read recursively), wildcards or fsspec URLs; may be empty if
    `user_vectors` or `user_features` is set."""
    format: SourceFormat = "auto"
    """Format of these files; `auto` derives it from the file name."""
    separator: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """Character between the fields of a CSV file, such as a semicolon or a tab."""
    quote: Annotated[str, BeforeValidator(_false_as_empty_text), Field(max_length=1)] = '"'
    """Character around values of a CSV file that hold separators or line breaks; empty or false: values are not
    quoted."""
    escape: Annotated[str, BeforeValidator(_false_as_empty_text), Field(max_length=1)] = ""
    """Character before a quote inside a value of a CSV file, such as a backslash; empty: the quote is doubled."""
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
    """Columns of `item_features` by which requests may filter."""
    category_column: str = "category"
    """Column of an item's category."""
    user_vectors: str | None = None
    """Vectors of users, with the bundle's dimensions; users are scored from these vectors instead of by the bundle's
    user tower."""
    item_vectors: str | None = None
    """Vectors of items, from which the night makes its bundle; `bundle` must not be set then."""
    vector_column: NonEmptyText = "vector"
    """Column of vectors (lists of numbers)."""
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
                    f"{name} and {other_setting} are both {signs[name]!r}: use different characters", field=name
                )

    @property
    def names_users(self) -> bool:
        """True if a source names users; for some models the feature table of users is enough."""
        return bool(self.interactions or self.user_vectors or self.user_features)


@section
class TableConfig:
    """Table to build, in `[tables.NAME]`; `kind` decides which of the other settings apply."""

    kind: Literal["user_topk", "user_vector", "item_vector", "item_similar", "value"]
    """Kind of the table's records."""
    k: Annotated[int, Field(ge=1, le=1000)] = 100
    """Number of items of a list."""
    precision: Precision = "f2"
    """Precision of stored numbers: float16, float32 or, for vectors only, int8."""
    value: str | None = None
    """Model output that a table of kind `value` holds."""
    metric: Literal["inner_product", "cosine"] | None = None
    """Measure by which a list is ranked."""

    def __post_init__(self) -> None:
        if self.kind == "value" and not self.value:
            raise ConfigError('a value table must name its model output, e.g. value = "user_affinity"', field="value")


@section
class FilterConfig:
    """Filter that requests may refer to by name, in `[filters.NAME]`.

    It applies to generations made after it was configured.
    """

    filter: dict[str, Any]
    """Expression as requests send it, such as `{"<" = ["price", 20]}`."""
    tables: Annotated[tuple[str, ...], BeforeValidator(_text_as_tuple)] = ()
    """Tables of lists (kinds `user_topk` and `item_similar`) for which a second table is built and loaded, with the
    best items that pass the filter; requests with this filter are answered from it. `larder plan` says from how many
    lookups on this pays off."""


@section
class FacetConfig:
    """Table of the best items for each value of an attribute, in `[facets.NAME]`, by the score of the defaults."""

    attribute: NonEmptyText
    """Attribute of items, a text or a list of texts; its values are the ids of the table."""
    k: Annotated[int, Field(ge=1, le=1000)] = 100
    """Number of items of a list."""


@section
class GateThresholds:
    """Thresholds that a generation must meet before it may be published; shares are between 0 and 1."""

    unusable_rows: NonNegativeFloat = 0.001
    """Largest share of rows left out of any source or table; one row may always be left out, unless this is 0."""
    unknown_items: NonNegativeFloat = 0.5
    """Largest share of interactions with items that the catalogue does not have; events are not counted."""
    coverage_of_source: NonNegativeFloat = 0.95
    """Smallest share of users with an answer, in any table."""
    coverage_of_live: NonNegativeFloat = 0.8
    """Smallest ratio of the number of users with an answer to that of the live generation."""
    items_of_live: NonNegativeFloat = 0.8
    """Smallest ratio of the number of items to that of the live generation."""
    items_of_live_most: NonNegativeFloat = 1.5
    """Largest ratio of the number of items to that of the live generation: faster growth suggests a wrong catalogue."""
    short_lists: NonNegativeFloat = 0.05
    """Largest share of lists with fewer items than `k` although the catalogue has enough."""
    empty_lists: NonNegativeFloat = 0.01
    """Largest share of lists without any item."""
    index_recall: NonNegativeFloat = 0.9
    """Smallest recall of the index, in any stratum."""
    int8_overlap: NonNegativeFloat = 0.9
    """Smallest overlap of lists and labels of int8 models with those of fp32 models."""
    int8_cosine: NonNegativeFloat = 0.98
    """Smallest cosine of vectors of int8 models with those of fp32 models."""
    skew_overlap: NonNegativeFloat = 0.9
    """Smallest overlap of lists of the live path with the records."""
    skew_cosine: NonNegativeFloat = 0.95
    """Smallest cosine of vectors of the live path with the records."""
    exact: NonNegativeFloat = 0.995
    """Smallest share of sampled records that equal a recomputation in float64."""
    top_items: NonNegativeFloat = 0.8
    """Largest share of all list slots that the top 1 % of items hold."""
    single_item: NonNegativeFloat = 0.5
    """Largest share of all list slots that one item holds."""
    distinct_lists: NonNegativeFloat = 0.05
    """Smallest share of distinct lists among all lists."""
    score_psi: NonNegativeFloat = 0.25
    """Largest shift of scores and values against the live generation (PSI)."""
    score_psi_retrained: NonNegativeFloat = 1.0
    """Largest shift of scores and values if the bundle has changed (PSI)."""
    list_jaccard: NonNegativeFloat = 0.4
    """Smallest similarity of lists to those of the live generation (Jaccard)."""
    list_jaccard_retrained: NonNegativeFloat = 0.2
    """Smallest similarity of lists if the bundle has changed (Jaccard)."""
    top_items_of_live: NonNegativeFloat = 1.5
    """Largest ratio of the top items' share to that of the live generation."""
    distinct_lists_of_live: NonNegativeFloat = 0.7
    """Smallest ratio of distinct lists to those of the live generation."""
    stale_lists: NonNegativeFloat = 0.9
    """Largest share of unchanged lists among users with new interactions."""
    heldout_of_live: NonNegativeFloat = 0.7
    """Smallest ratio of recall to that of the live generation, for interactions newer than the cut."""
    heldout_recall: NonNegativeFloat = 0.0
    """Smallest recall of interactions newer than the cut."""
    redis_headroom: NonNegativeFloat = 0.95
    """Largest share of Redis' memory that is used."""
    disk_headroom: NonNegativeFloat = 1.0
    """Smallest free disk space on the host of any live replica, in multiples of the bytes that readers map."""
    memory_headroom: NonNegativeFloat = 1.0
    """Smallest free memory on the host of any live replica, in multiples of the bytes that readers map."""
    timeout_s: PositiveFloat = 600.0
    """Seconds that one gate may take, in addition to one read of the generation's bytes at the governor's
    `floor_mib_s`."""
    total_timeout_s: PositiveFloat = 1800.0
    """Seconds that all gates may take, in addition to three reads of the generation's bytes at the governor's
    `floor_mib_s`."""


@section
class ReferenceConfig:
    """Trainer of the reference bundle, in `[reference]`."""

    dims: Annotated[int, Field(ge=1, le=4096)] = 256
    """Largest number of dimensions of a vector; fewer are used if they reach the same recall."""
    choose: bool = True
    """True if the trainer chooses method, parameters and dimensions by their recall of held-out histories; false: they
    are fixed."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the trainer's random numbers."""
    programs: bool = False
    """True if the bundle also contains torch.export programs."""


@section
class FlipConfig:
    """Wait for replicas during a publish, in `[flip]`."""

    wait_s: PositiveFloat = 120.0
    """Seconds that a publish waits for all live replicas to be ready."""
    replicas_min: NonNegativeInt = 0
    """Number of ready replicas that suffices after `wait_s`; 0: every live replica must be ready."""


@section
class GovernorConfig:
    """Limits on bulk work on Redis, in `[governor]`."""

    p99_factor: Annotated[float, Field(gt=1)] = 1.25
    """Readers' p99 latency during bulk work, as a multiple of their p99 while Redis is idle."""
    readers: Literal["auto", "always", "never"] = "auto"
    """Whether Redis has readers: `auto` detects them, `always` and `never` assume the answer."""
    floor_mib_s: PositiveFloat = 16.0
    """Rate in MiB/s below which bulk work never falls, so that a night always ends."""
    ceiling_mib_s: NonNegativeFloat = 0.0
    """Rate in MiB/s that bulk work never exceeds; 0: no limit."""
    piece_bytes: Annotated[int, Field(ge=1024, le=8 << 20)] = 16 * 1024
    """Bytes of one piece of a page sent while there are readers."""
    probe_ms: PositiveFloat = 1.0
    """Milliseconds between two reads of the latency probe."""
    idle_s: PositiveFloat = 1.5
    """Seconds for which idle latency is measured before the first piece."""
    replica_lag_mib: PositiveFloat = 32.0
    """MiB that Redis' own replicas may fall behind."""
    yield_cpu: bool = True
    """True if the loading thread runs at idle priority, below all other programs on its host."""

    def __post_init__(self) -> None:
        if 0 < self.ceiling_mib_s < self.floor_mib_s:
            raise ConfigError(
                f"ceiling_mib_s ({self.ceiling_mib_s}) must not be below floor_mib_s ({self.floor_mib_s})",
                field="ceiling_mib_s",
            )


@section
class CanaryConfig:
    """Settings of a canary, in `[canary]`: a generation on trial with a share of the requests.

    It is published if each arm answered enough requests for enough keys and, with each key counted once, no figure
    moved beyond its limit. It is abandoned if a figure exceeds its limit by more than chance. With too few counts to
    decide, it continues for up to `wait_max_s` and then runs on until a person decides.
    """

    percent: Annotated[float, Field(gt=0, le=100)] = 5.0
    """Share of the requests, in percent."""
    wait_s: PositiveFloat = 3600.0
    """Seconds until the canary is judged."""
    wait_max_s: PositiveFloat = 86_400.0
    """Seconds after which a person must decide."""
    requests_min: Count = 1000
    """Smallest number of requests that each arm must have answered."""
    keys_min: Count = 200
    """Smallest number of keys that each arm must have answered."""
    source_shift_max: NonNegativeFloat = 0.05
    """Largest shift of the mix of sources (total variation, 0 to 1)."""
    score_psi_max: NonNegativeFloat = 0.1
    """Largest shift of top scores (PSI)."""
    feedback_event: str = ""
    """Name of the feedback event that is counted; empty: none."""
    feedback_ratio_min: NonNegativeFloat = 0.9
    """Smallest ratio of that event's rate per request to its rate under the live generation."""


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
    """All settings of a night; `semantic_settings_bytes` returns those that decide its result."""

    FROM_ENVIRONMENT: ClassVar = (*(SharedConfig.FROM_ENVIRONMENT or ()), "device", "device_tasks")

    bundle: NonEmptyText = DEFAULT_BUNDLE
    """Model bundle to score with: a folder or an fsspec URL."""
    data_until: str | None = None
    """Cut of the data (ISO 8601; UTC without a zone): data from this time on is left out."""
    shards: Annotated[int, Field(ge=1, le=1024)] = 4
    """Number of shards in which users are scored; Airflow maps at most this many tasks."""
    page_bytes: Annotated[int, Field(ge=4 * _KIB, le=8 * _KIB * _KIB)] = 256 * _KIB
    """Bytes of a page of records."""
    load_chunk_bytes: Annotated[int, Field(ge=1, le=512 * _KIB * _KIB)] = 1024 * _KIB
    """Bytes of one command to Redis; a larger value is sent in several."""
    index: Literal["auto", "flat", "ivf", "hnsw"] = "auto"
    """Index of candidates; `auto` decides by the number of items."""
    history_limit: Count = 100_000
    """Number of newest items kept of a user's history."""
    featured_users: bool | Literal["auto"] = "auto"
    """Whether users who appear only in the feature table get records, from a model that takes features besides a
    history: true (all), false (none), or `auto` (all, unless they outnumber the other users)."""
    reuse: Literal["auto", "off"] = "auto"
    """Copying of records whose inputs did not change since a verified generation; `off` computes all records."""
    keep: NonNegativeInt = 1
    """Number of superseded generations kept for roll backs; the previous one is always kept."""
    threads: NonNegativeInt = 0
    """Number of threads; 0: as many as CPU affinity and the control group's `cpu.max` allow."""
    device: str = "auto"
    """Device for scoring: `auto` uses all GPUs that torch (extra `gpu`) sees, `off` the processor; `cuda`, `cuda:1` and
    `cpu` (torch without a GPU: for tests) must be available. Lists from given vectors have the same bits on all
    devices."""
    device_tasks: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of scoring tasks that share a GPU; each takes an equal part of its memory. Set it to the slots of the pool
    `gpu` divided by the GPUs of a worker's host."""
    redis_timeout_s: PositiveFloat = 30.0
    """Seconds that Redis may take to reply."""
    superseded_grace_s: NonNegativeFloat = 60.0
    """Seconds that a superseded generation is kept for readers that still use it."""
    abandon_after_s: NonNegativeFloat = 86_400.0
    """Seconds after which an unpublished generation counts as abandoned."""
    overlay_ttl_s: PositiveFloat = 86_400.0
    """Longest life of a stored live answer in seconds, unless a replica reports a longer one."""
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
        if not _DEVICE_PATTERN.fullmatch(self.device):
            raise ConfigError(
                f"device is auto, off, cpu, cuda or cuda:0 and so on, not {self.device!r}", field="device"
            )
        if self.data_until:
            parse_time(self.data_until)
        if self.sources.item_vectors and self.bundle != DEFAULT_BUNDLE:
            raise ConfigError(
                f"bundle ({self.bundle}) and sources.item_vectors ({self.sources.item_vectors}) are both set: a night "
                "either makes its bundle from the vectors or takes the given one; leave one out",
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
                "if the stored list is too short after filtering, the search needs the user's vector: add a table of "
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
    def table_and_filter_by_name(self) -> dict[str, tuple[str, str]]:
        """Tables made under filters, by their own names, with the requested table and the filter."""
        return {f"{table}.{name}": (table, name) for table, name in self._tables_and_filters()}

    def _tables_and_filters(self) -> list[tuple[str, str]]:
        return [(table, name) for name, filter_config in self.filters.items() for table in filter_config.tables]

    def _check_filtered(self) -> None:
        lists = sorted(name for name, table_config in self.tables.items() if table_config.kind in LIST_TABLE_KINDS)
        for table, name in self._tables_and_filters():
            if table not in lists:
                raise ConfigError(
                    f"filters.{name} names table {table!r}; tables of lists are {', '.join(lists) or 'none'}",
                    field="filters",
                )
            check_name("the name of a table and a filter, with a dot between them,", f"{table}.{name}")
        if (
            len(self.table_and_filter_by_name) < len(self._tables_and_filters())
            or self.table_and_filter_by_name.keys() & self.tables.keys()
        ):
            raise ConfigError(
                "two tables would have the same name: a filter's tables are called TABLE.FILTER", field="filters"
            )

    def _check_facets(self) -> None:
        attributes = self.sources.item_attributes
        for name, facet_config in self.facets.items():
            check_name("the name of a facet", name)
            if name in self.tables or name in self.table_and_filter_by_name:
                raise ConfigError(f"facets.{name} has the name of another table", field="facets")
            if facet_config.attribute not in attributes:
                raise ConfigError(
                    f"facets.{name} is of {facet_config.attribute!r}; sources.item_attributes has "
                    f"{', '.join(attributes) or 'none'}",
                    field="facets",
                )

    def semantic_settings_bytes(self) -> bytes:
        """Return canonical bytes of the settings that decide the contents of a generation."""
        names = ["namespace", "shards", "page_bytes", "index", "history_limit", "tables", "sources"]
        # If absent, leave them out, so that the id of such a night does not change.
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
        """Load from the file (default: the one that LARDER_CONFIG names), then the environment, then overrides.

        Later ones win. Unknown names in the file are errors, so that a typo cannot pass.
        """
        from cache.config.reading import ConfigFile, read_section

        file = ConfigFile.named(environ, path)
        values = {name: setting for name, setting in file.document.items() if name != "serving"}
        return read_section(cls, values, file, environ, **overrides)


def parse_time(time_text: str) -> datetime:
    """Parse an ISO 8601 time to UTC; a time without a zone is taken as UTC."""
    try:
        time = iso_time(time_text)
    except ValueError as error:
        raise ConfigError(f"{time_text!r} is not an ISO 8601 time, e.g. 2026-01-31T00:00:00Z") from error
    return time.astimezone(UTC)
