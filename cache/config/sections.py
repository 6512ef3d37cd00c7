"""Sections of the night: sources, tables, flip, canary, governor, reference models."""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
)

from cache.config.section import Count, Filled, section
from cache.errors import ConfigError
from cache.format.records.layout import Precision

SourceFormat = Literal["auto", "parquet", "csv", "lines"]


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
    user_column: Filled = "user"
    """Column of user ids, in every file that has them."""
    item_column: Filled = "item"
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
    vector_column: Filled = "vector"
    """Column of vectors, lists of numbers."""
    vector_metric: Literal["inner_product", "cosine"] = "inner_product"
    """Measure by which `item_vectors` are compared."""

    def __post_init__(self) -> None:
        signs = {name: getattr(self, name) for name in ("separator", "quote", "escape")}
        for name, sign in signs.items():
            if sign and (not sign.isascii() or sign in "\r\n"):
                raise ConfigError(
                    f"{name} must be one ASCII character and no line break, not {sign!r}",
                    field=name,
                )
        for name, other_setting in (
            ("quote", "separator"),
            ("escape", "separator"),
            ("escape", "quote"),
        ):
            if signs[name] and signs[name] == signs[other_setting]:
                raise ConfigError(
                    f"{name} and {other_setting} are both {signs[name]!r}: a sign has one meaning",
                    field=name,
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
            raise ConfigError(
                'a value table names its model output, e.g. value = "user_affinity"', field="value"
            )


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

    attribute: Filled
    """Attribute of items, a text or a list of texts; its values are the ids of the table."""
    k: Annotated[int, Field(ge=1, le=1000)] = 100
    """Number of items of a list."""


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
