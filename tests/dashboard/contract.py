"""Types of the JSON of `GET /dashboard/data`; optional parts are sent only by services that know them."""

from typing import Any, Literal, NotRequired, TypedDict

Number = float | None
Bins = list[Number]
Scalar = float | str | bool | None
When = float | str | None
"""Unix seconds or ISO 8601."""


class Verdict(TypedDict):
    level: Literal["ok", "warn", "bad"]
    sentence: str
    advice: str | None
    also: NotRequired[list[str]]


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
    tokens_stale: str | None
    tls_stale: str | None
    store_problem: str | None
    canary_problem: str | None


class Series(TypedDict):
    step_s: float
    at: list[float]
    requests: Bins
    answers: dict[str, Bins]
    seconds: dict[str, dict[str, Bins]]
    stages: dict[str, Bins]
    misses: dict[str, Bins]
    events: NotRequired[dict[str, Bins]]


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
    note: NotRequired[str | None]


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
    remarks: list[str] | None


class Schedule(TypedDict):
    age_s: Number
    due_at: Number
    missing: bool | None


class Step(TypedDict):
    step: str
    seconds: Number


class LastNights(TypedDict):
    nights: Number
    users: dict[str, Number] | None
    share: Number
    spared_s: Number


class Copies(TypedDict):
    users: dict[str, Number] | None
    share: Number
    spared_s: Number
    base: str | None
    why: str | None
    read_because: str | None
    lately: LastNights | None


class NightFailure(TypedDict):
    step: str
    at: Number
    error: str


class Night(TypedDict):
    generation: str | None
    outcome: str | None
    began_at: When
    steps: list[Step] | None
    reuse: NotRequired[Copies | None]
    failure: NotRequired[NightFailure | None]


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
    producer: str | None
    band: str | None
    samples: Number
    exact: Rate | None
    overlap: Mean | None
    score_error: ScoreError | None
    age_s: Number


class Quality(TypedDict):
    samples: Number
    since: When
    exact: Rate | None
    overlap: Mean | None
    score_error: ScoreError | None
    age_s: Number
    drift: bool | None
    drifted: list[str] | None
    sentence: str | None
    by: list[Stratum] | None
    worklist: Number
    read_share: Number
    hits_per_gb: Number


class Lately(TypedDict):
    answers: dict[str, Number] | None
    latency: dict[str, dict[str, Number]] | None


class Event(TypedDict):
    count: Number
    rate: Number
    ratio: dict[str, Number] | None


class ShownArm(TypedDict):
    arm: str | None
    namespace: str | None
    share: Number
    generation: str | None
    requests: Number
    events: dict[str, Event | None] | None


class ShownExperiment(TypedDict):
    experiment: str | None
    share: Number
    started_at: Number
    arms: list[ShownArm] | None


class Events(TypedDict):
    up: bool | None
    durability: str | None
    demanded: str | None
    writes_refused: str | None
    results: dict[str, Number] | None
    refused: dict[str, Number] | None
    answers: Number
    answers_share: Number
    list_change: Number
    lag_s: Number
    users: Number
    held_bytes: Number
    held_max_bytes: Number
    stream_bytes: Number
    stream_max_bytes: Number
    stream_length: Number
    inbox_length: Number
    inbox_lag_seconds: Number
    counted_until: str | None
    taken_until: str | None
    published_until: str | None


class Dashboard(TypedDict):
    """The whole document."""

    now: float | None
    whole: bool | None
    verdict: Verdict | None
    replicas: list[Replica] | None
    series: Series | None
    totals: Totals | None
    generations: list[Generation] | None
    generations_at: NotRequired[float | None]
    schedule: Schedule | None
    nights: list[Night] | None
    redis: Redis | None
    breakers: dict[str, float] | None
    queue: Queue | None
    l1: Local | None
    advisor: Advisor | None
    quality: Quality | None
    experiments: NotRequired[list[ShownExperiment] | None]
    events: NotRequired[Events | None]
    trouble: NotRequired[str | None]
    lately: NotRequired[Lately | None]
