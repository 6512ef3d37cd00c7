"""Sections of the night's settings, each one frozen value. Pure."""

from dataclasses import dataclass, fields
from typing import Literal

from cache.errors import ConfigError
from cache.format.records.layout import Precision
from precompute.config.validation import check_above_zero, check_filled, check_range, check_types

SourceFormat = Literal["auto", "parquet", "csv", "lines"]


@dataclass(frozen=True, slots=True)
class Sources:
    """Inputs of the night; paths may hold wildcards and are relative to the configuration file."""

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
    """Settings of a table to build; `kind` decides which of the other settings apply."""

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
    """Thresholds that a generation must reach before it may be published; shares are 0 to 1.

    Of itself: `unusable_rows` left out of the worst source or table at most (one always may be, unless it is 0),
    `coverage_of_source` users with an answer, `short_lists` and `empty_lists` at most, `index_recall` of the worst
    stratum, `int8_overlap` of lists and labels and `int8_cosine` of vectors with fp32, `skew_overlap`, `skew_cosine`
    of the live path with the records, `exact` records of a sample equal to a recomputation in float64, `top_items`
    slots held by the top 1 % of items and `single_item` by one at most, `distinct_lists` at least.

    Against the live generation: `coverage_of_live`, `items_of_live` (counts); `score_psi` at most and
    `list_jaccard` at least, each with its own `..._retrained` for a changed bundle; `top_items_of_live` and
    `distinct_lists_of_live` (ratios); `stale_lists` unchanged lists of users with new interactions at most;
    `heldout_of_live` recall of interactions newer than the cut (ratio), beside the absolute `heldout_recall`.

    Of its surroundings: `redis_headroom` of Redis' memory used at most; `disk_headroom` and `memory_headroom`, how many
    times what readers map must be free on the host of every live replica. One gate may take `timeout_s`, all
    `total_timeout_s`, beyond what reading the generation's bytes takes at the governor's `floor_mib_s` (once for one,
    three times for all).
    """

    unusable_rows: float = 0.001
    coverage_of_source: float = 0.95
    coverage_of_live: float = 0.8
    items_of_live: float = 0.8
    short_lists: float = 0.05
    empty_lists: float = 0.01
    index_recall: float = 0.9
    int8_overlap: float = 0.9
    int8_cosine: float = 0.98
    skew_overlap: float = 0.9
    skew_cosine: float = 0.95
    exact: float = 0.995
    top_items: float = 0.8
    single_item: float = 0.5
    distinct_lists: float = 0.05
    score_psi: float = 0.25
    score_psi_retrained: float = 1.0
    list_jaccard: float = 0.4
    list_jaccard_retrained: float = 0.2
    top_items_of_live: float = 1.5
    distinct_lists_of_live: float = 0.7
    stale_lists: float = 0.9
    heldout_of_live: float = 0.7
    heldout_recall: float = 0.0
    redis_headroom: float = 0.95
    disk_headroom: float = 1.0
    memory_headroom: float = 1.0
    timeout_s: float = 600.0
    total_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        check_types(self)
        check_above_zero(self, "timeout_s", "total_timeout_s")
        for each in fields(self):
            check_range(self, each.name, 0)


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """The reference bundle's trainer; with `programs` the bundle carries torch.export programs, too."""

    dims: int = 256
    seed: int = 0
    programs: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "dims", 1, 4096)
        check_range(self, "seed", 0, 2**32 - 1)


@dataclass(frozen=True, slots=True)
class FlipConfig:
    """Settings of a publish's wait for readers: all live replicas, or at least `replicas_min` once `wait_s` is over.

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
    """Limits on bulk work on Redis: its readers' p99 stays within `p99_factor` of what it is when idle.

    `readers`: "auto" looks for them, "always" and "never" decide. With readers, pages travel in pieces of `piece_bytes`
    at no less than `floor_mib_s` (a night always ends) and no more than `ceiling_mib_s` (0: no limit). A probe reads a
    record every `probe_ms`; what idle is, is measured for `idle_s` before the first piece and in a rest of every step.
    `replica_lag_mib` is how far Redis' own replicas may fall behind. `yield_cpu`: this thread gives way to everything
    else on its host.
    """

    p99_factor: float = 1.25
    readers: Literal["auto", "always", "never"] = "auto"
    floor_mib_s: float = 16.0
    ceiling_mib_s: float = 0.0
    piece_bytes: int = 16 * 1024
    probe_ms: float = 1.0
    idle_s: float = 1.5
    replica_lag_mib: float = 32.0
    yield_cpu: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        check_above_zero(self, "floor_mib_s", "probe_ms", "idle_s", "replica_lag_mib")
        check_range(self, "piece_bytes", 1024, 8 << 20)
        check_range(self, "ceiling_mib_s", 0)
        if not self.p99_factor > 1:
            raise ConfigError(
                f"p99_factor must be above 1 (what it is when idle), not {self.p99_factor}",
                field="p99_factor",
            )
        if 0 < self.ceiling_mib_s < self.floor_mib_s:
            raise ConfigError(
                f"ceiling_mib_s ({self.ceiling_mib_s}) must not be below floor_mib_s ({self.floor_mib_s})",
                field="ceiling_mib_s",
            )


@dataclass(frozen=True, slots=True)
class CanaryConfig:
    """Settings of a canary: a generation gets `percent` of the requests for `wait_s`, then is published or abandoned.

    It is published if each arm answered `requests_min` for `keys_min` keys, and, each key counted once, the mix of
    sources moved by at most `source_shift_max` (total variation, 0 to 1), top scores by at most `score_psi_max`, and,
    where `feedback_event` names one, that event came at least `feedback_ratio_min` times as often per request as under
    the live generation. What is above its limit by more than chance abandons it; where too little was counted to tell,
    it goes on for up to `wait_max_s` and is then left running for a person to decide.
    """

    percent: float = 5.0
    wait_s: float = 3600.0
    wait_max_s: float = 86_400.0
    requests_min: int = 1000
    keys_min: int = 200
    source_shift_max: float = 0.05
    score_psi_max: float = 0.1
    feedback_event: str = ""
    feedback_ratio_min: float = 0.9

    def __post_init__(self) -> None:
        check_types(self)
        check_above_zero(self, "percent", "wait_s", "wait_max_s")
        check_range(self, "percent", 0, 100)
        check_range(self, "requests_min", 1)
        check_range(self, "keys_min", 1)
        for name in ("source_shift_max", "score_psi_max", "feedback_ratio_min"):
            check_range(self, name, 0)
