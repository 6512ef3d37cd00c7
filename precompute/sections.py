"""Sections of the night's settings, each one frozen value. Pure."""

from dataclasses import dataclass
from typing import Literal

from cache.errors import ConfigError
from cache.records import Precision
from precompute.checks import check_above_zero, check_filled, check_range, check_types

SourceFormat = Literal["auto", "parquet", "csv", "lines"]


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

    def __post_init__(self) -> None:
        check_types(self)
        check_filled(self, "user_column", "item_column")


@dataclass(frozen=True, slots=True)
class TableConfig:
    """One table to build; `kind` decides which of the other settings apply."""

    kind: Literal["user_topk", "user_vector", "item_vector", "item_similar", "value"]
    k: int = 100
    precision: Precision = "f2"
    value: str | None = None
    metric: Literal["inner_product", "cosine"] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "k", 1, 1000)
        if self.kind == "value" and not self.value:
            raise ConfigError(
                'a value table names its model output, e.g. value = "user_affinity"', field="value"
            )


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

    def __post_init__(self) -> None:
        check_types(self)
        check_above_zero(self, "timeout_s")


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """The reference bundle's trainer."""

    dims: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "dims", 1, 4096)
        check_range(self, "seed", 0, 2**32 - 1)


@dataclass(frozen=True, slots=True)
class FlipConfig:
    """How a publish waits for its readers: all live replicas, or at least `replicas_min` once `wait_s` is over.

    With `replicas_min` at 0 every live replica must be ready.
    """

    wait_s: float = 120.0
    replicas_min: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "replicas_min", 0)
        check_above_zero(self, "wait_s")


@dataclass(frozen=True, slots=True)
class GovernorConfig:
    """How hard a load may press on readers: their p99 stays within `p99_factor` of what it is when idle."""

    p99_factor: float = 1.25

    def __post_init__(self) -> None:
        check_types(self)
        check_above_zero(self, "p99_factor")
