"""The JSON of `GET /dashboard/data`, as types, and what is wrong with one that does not keep to them."""

import math
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

Number = float | None
Bins = list[Number]
Scalar = float | str | bool | None
When = float | str | None
"""Unix seconds or ISO 8601."""


class Verdict(TypedDict):
    level: Literal["ok", "warn", "bad"]
    sentence: str
    advice: str | None


class Replica(TypedDict):
    replica: str
    workers: float | list[Any] | None
    generation: str | None
    epoch: Number
    ready: bool | None
    stale: str | bool | None
    degraded: str | bool | None
    seen_s: Number
    failed: str | bool | None


class Series(TypedDict):
    step_s: float
    at: list[float]
    requests: Bins
    answers: dict[str, Bins]
    seconds: dict[str, dict[str, Bins]]
    stages: dict[str, Bins]
    misses: dict[str, Bins]


class Totals(TypedDict):
    requests: Number
    answers: dict[str, float]
    misses: dict[str, float]
    entities: Number


class Gate(TypedDict):
    rule: str
    value: Scalar
    threshold: Scalar
    verdict: str | bool | None


class Generation(TypedDict):
    generation: str
    state: str | None
    epoch: Number
    role: str | None
    published_at: When
    data_until: When
    bytes: Number
    records: Number
    gates: list[Gate] | None
    reason: str | None


class Schedule(TypedDict):
    age_s: Number
    due_at: Number
    missing: bool | None


class Step(TypedDict):
    step: str
    seconds: Number


class Night(TypedDict):
    generation: str
    outcome: str | None
    began_at: When
    steps: list[Step] | None


class Redis(TypedDict):
    used_bytes: Number
    limit_bytes: Number
    policy: str | None
    clients: Number
    evicted: Number


class Queue(TypedDict):
    live_queued: Number
    under_way: Number
    requests_max: Number
    queue_seconds: Number
    shed: float | dict[str, float] | None


class Local(TypedDict):
    bytes: Number
    budget_bytes: Number
    entries: Number


class Point(TypedDict):
    bytes: float
    entries: Number
    hit_ratio: float


class Advisor(TypedDict):
    sampling_rate: Number
    sampled: Number
    budget_bytes: Number
    hit_ratio: Number
    sentence: str | None
    curve: list[Point] | None


class Rate(TypedDict):
    rate: Number
    low: Number
    high: Number


class Mean(TypedDict):
    mean: Number
    low: Number
    high: Number


class ScoreError(TypedDict):
    mean: Number
    p99: Number


class Stratum(TypedDict):
    source: str | None
    table: str | None
    band: str | None
    samples: Number
    exact: Number
    overlap: Number


class Quality(TypedDict):
    samples: Number
    since: When
    exact: Rate | None
    overlap: Mean | None
    score_error: ScoreError | None
    drift: bool | None
    sentence: str | None
    by: list[Stratum] | None
    worklist: Number
    read_share: Number


class Dashboard(TypedDict):
    """All of it."""

    now: float | None
    whole: bool | None
    verdict: Verdict | None
    replicas: list[Replica] | None
    series: Series | None
    totals: Totals | None
    generations: list[Generation] | None
    schedule: Schedule | None
    nights: list[Night] | None
    redis: Redis | None
    breakers: dict[str, float] | None
    queue: Queue | None
    l1: Local | None
    advisor: Advisor | None
    quality: Quality | None


def faults(data: object) -> list[str]:
    """What keeps a decoded JSON from being a Dashboard, each with its place; more than is asked for is no fault."""
    found = _faults(data, Dashboard, "")
    return found or _uneven(data)


def _faults(value: object, kind: Any, place: str) -> list[str]:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        return _of_any(value, parts, place)
    if origin is Literal:
        return [] if value in parts else [f"{place}: {value!r} is none of {parts}"]
    if kind is Any or (kind is NoneType and value is None):
        return []
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return [] if is_number and math.isfinite(value) else [f"{place}: {value!r} is no number"]  # type: ignore[arg-type]
    if is_typeddict(kind):
        if not isinstance(value, dict):
            return [f"{place}: {value!r:.40} is no object"]
        hints = get_type_hints(kind)
        absent = [f"{place}.{name}: missing" for name in hints if name not in value]
        present = [(name, hint) for name, hint in hints.items() if name in value]
        return absent + [
            each for name, hint in present for each in _faults(value[name], hint, f"{place}.{name}")
        ]
    if origin is list and isinstance(value, list):
        return [e for i, v in enumerate(value) for e in _faults(v, parts[0], f"{place}[{i}]")]
    if origin is dict and isinstance(value, dict):
        return [e for k, v in value.items() for e in _faults(v, parts[1], f"{place}.{k}")]
    is_kind = origin is None and isinstance(value, kind)
    return [] if is_kind else [f"{place}: {value!r:.40} is not {kind}"]


def _of_any(value: object, kinds: tuple[Any, ...], place: str) -> list[str]:
    """The faults under the kind that fits best; null fits wherever it may stand."""
    tried = [_faults(value, kind, place) for kind in kinds if kind is not NoneType or value is None]
    # Of an object the deepest complaint tells most: the kind itself fitted.
    return min(tried, key=lambda each: (bool(each), -len(each[0]) if each else 0))


def _uneven(data: Any) -> list[str]:
    """Every list of the series is as long as its times."""
    series = data["series"]
    if series is None:
        return []
    lists = {"requests": series["requests"]}
    for part in ("answers", "stages", "misses"):
        lists |= {f"{part}.{name}": values for name, values in series[part].items()}
    for source, quantiles in series["seconds"].items():
        lists |= {f"seconds.{source}.{name}": values for name, values in quantiles.items()}
    bins = len(series["at"])
    return [
        f".series.{name}: {len(each)} values for {bins} bins"
        for name, each in lists.items()
        if len(each) != bins
    ]
