"""Settings of the service: the section `[serving]`, bounds on the cost of one peer, and near-match reuse."""

import ipaddress
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt

from cache.config.section import UnitInterval, section
from cache.config.shared import SharedConfig
from cache.errors import ConfigError

Precision = Literal["int8", "fp32"]
LogForm = Literal["text", "json"]
OverlayReads = Literal["auto", "always"]
ClientCertificates = Literal["off", "optional", "required"]


@section
class NearConfig:
    """Near-match reuse for inputs that no tier knows, in `[serving.near.TABLE]`.

    A table without such a section has no reuse. The answer to a similar input is reused and marked `near` if its
    measured error is within the bound.
    """

    error: Annotated[float, Field(ge=0.0001, le=0.5)] = 0.01
    """Largest share of reused answers that may differ from the live model's: in the first label, or by more than
    `overlap` allows."""
    overlap: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Smallest share of the live model's list that a reused list must contain; otherwise it counts as different."""
    entries: Annotated[int, Field(ge=16, le=65_536)] = 2_048
    """Number of recent answers that each worker keeps for each kind of input (history, features or both); one takes 4
    bytes per dimension of the vector and 8 per item of a list."""


@section
class PeerBounds:
    """Bounds on the cost of one peer, in `[serving]`: heads, bodies, pipelines, connections, and their time limits."""

    head_bytes: PositiveInt = 32 << 10
    """Largest size of a request's target and header fields in bytes, trailers included; a larger one is refused with
    431, and the connection is closed."""
    head_fields: PositiveInt = 100
    """Largest number of header fields of a request; more are refused like a head that is too large."""
    head_timeout_s: PositiveFloat = 10.0
    """Seconds that a connection may wait before its first request begins, and that each head may take to arrive; then
    the connection is closed, with 408 if a head had begun. This and the two other time limits of connections are
    accurate to a second."""
    body_timeout_s: PositiveFloat = 10.0
    """Seconds that a whole request body may take to arrive; then the answer is 408 `body_timeout`, and the connection
    is closed. If a request is answered before its body is read, the rest of the body has the same time."""
    write_timeout_s: PositiveFloat = 10.0
    """Seconds within which a peer must take 64 KiB of its answers; the connection of a slower peer is closed."""
    answers_bytes: PositiveInt = 64 << 20
    """Bytes of answers that peers have not taken yet, of all requests of a worker on connections with 64 KiB or more of
    them. Beyond this, connections whose peers have taken nothing for a second are closed; while that does not suffice,
    batches are refused with 503 `overloaded`."""
    idle_timeout_s: PositiveFloat = 5.0
    """Seconds that a connection is kept after its last answer."""
    pipeline_max: PositiveInt = 16
    """Largest number of unanswered requests of one connection, whose waiting bodies may take 64 KiB; beyond that, one
    more answer is sent and the connection is closed."""
    connections_max: PositiveInt = 8_192
    """Largest number of connections of a worker; a further one is closed with 503. The limit of open files also bounds
    it: the soft limit is raised as far as the hard limit allows, and 256 files are reserved for other uses."""
    connections_new_max: PositiveInt = 4_096
    """Largest number of connections that have not sent the head of a request yet; for a further one the oldest of them
    is closed."""


@section
class ServingConfig(SharedConfig, PeerBounds):
    """Settings of the service, in `[serving]`; in the environment each is LARDER_<NAME>, except REDIS_URL."""

    FROM_ENVIRONMENT: ClassVar = None

    redis_url: str = ""
    """Redis, as at the top level of the file; empty: a server is started and stopped with the service."""

    host: str = "127.0.0.1"
    """Address to bind; anything but loopback needs `LARDER_TOKEN`, `tokens_file` or `--insecure`."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """Port to bind; 0: any free port."""
    token: str = Field(default="", repr=False)
    """Secret that callers send as `Authorization: Bearer ...`; may be set in the environment only. It has every scope
    and no quota, and its name is `default`."""
    tokens_file: str = ""
    """File of named tokens with scopes, quotas and expiry, as `larder tokens` writes it; read again within a
    second of a change. Empty: none."""
    tls_certificate: str = ""
    """PEM file of the service's certificate and the intermediate certificates; the service then accepts HTTPS only.
    This file and the next two are read again within two seconds of a change. Empty: plain HTTP."""
    tls_key: str = ""
    """PEM file of the certificate's private key, without a passphrase."""
    tls_client_ca: str = ""
    """PEM file of the authorities whose client certificates are accepted."""
    tls_client: ClientCertificates = "off"
    """Whether callers must show a certificate: `required`: all must, including probes and Prometheus; `optional`: a
    wrong one is refused, a missing one is not. A certificate does not replace a token."""
    insecure: bool = False
    """True if other hosts may reach the service without a token."""
    workers: PositiveInt = 1
    """Number of processes that answer on the port; each is a separate replica with its own L1, connections and threads,
    but they share the mapped files of a generation."""

    l1_bytes: PositiveInt = 256 << 20
    """Bytes of the in-process tier of each worker, records and bookkeeping included."""
    negative_entries: PositiveInt = 100_000
    """Largest number of ids remembered as unknown."""
    negative_ttl_s: PositiveFloat = 5.0
    """Seconds for which an id is remembered as unknown."""
    overlay_ttl_s: PositiveFloat = 600.0
    """Life in seconds of a record that live inference stored in Redis."""
    overlay_reads: OverlayReads = "auto"
    """Policy for overlay reads. `auto`: while inputs of new ids rarely repeat, stored live answers are looked up in one
    of 16 cases; `always`: each time, with a lease, so that no two replicas compute the same answer."""
    outage_ttl_s: PositiveFloat = 15.0
    """Life in seconds of live answers for known entities while Redis is unavailable."""
    lease_wait_ms: Annotated[float, Field(ge=0, le=60_000)] = 200.0
    """Milliseconds that a replica waits for another replica that computes the same cold answer, before it computes the
    answer itself; it waits half as long for a dead one. 0: no leases, replicas do not wait for each other."""

    deadline_ms: PositiveFloat = 300.0
    """Deadline in milliseconds of a request that sets none."""
    deadline_max_ms: PositiveFloat = 10_000.0
    """Longest deadline in milliseconds that a request may set."""
    l2_deadline_ms: PositiveFloat = 75.0
    """Longest wait for Redis within the deadline, in milliseconds."""
    l2_connections: PositiveInt = 2
    """Number of connections for reads."""
    breaker_threshold: PositiveInt = 5
    """Number of consecutive failures after which Redis is not asked."""
    breaker_cooldown_s: PositiveFloat = 1.0
    """Seconds for which Redis is then not asked."""

    precision: Precision = "int8"
    """Precision of the live towers; use fp32 on a GPU, which supports few of the int8 operators."""
    live_provider: Literal["cpu", "cuda", "tensorrt"] = "cpu"
    """ONNX Runtime's provider for the live towers; a GPU provider (the first visible GPU) needs onnxruntime-gpu instead
    of onnxruntime. If it cannot be used, the towers run on the processor, and the log and `/v1/generations` say why."""
    live_workers: PositiveInt = 1
    """Number of threads that run the model."""
    live_threads: PositiveInt = 1
    """Number of threads within one inference and one search (ONNX Runtime, FAISS); they do not busy-wait."""
    live_cores: str = ""
    """Cores for the model's threads, such as `2,3` or `4-7`; empty: any. With several NUMA nodes, run one process per
    node under `numactl --cpunodebind=N --membind=N` and name cores of that node (`lscpu -e`)."""
    live_nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Niceness of the model's threads relative to the threads that answer (Linux). 0: equal priority, for hosts where
    other programs keep the cores busy and the model must keep its share."""
    live_batch: PositiveInt = 256
    """Largest number of inputs per inference; fewer if a larger batch could not end before the first deadline."""
    live_queue: PositiveInt = 2_048
    """Largest number of inputs that may wait for the model."""
    live_queue_bytes: PositiveInt = 32 << 20
    """Largest total size of inputs that may wait for the model, in bytes; further inputs go down the ladder."""

    queue_target_ms: PositiveFloat = 20.0
    """Milliseconds that an iteration of the event loop, or a request's wait for the loop, may take throughout an
    interval. Beyond that, a growing share of answers is made without the live model (`live: "overloaded"`). When almost
    none are left, and at once at five times this value, a growing share of batches and of ids that are not stored is
    refused with 503 `overloaded` and `Retry-After`."""
    queue_interval_ms: PositiveFloat = 100.0
    """Length of that interval in milliseconds. After an interval above the target the live model's share shrinks in
    proportion; after one below, it grows, by a tenth first and by twice as much each time."""
    requests_max: PositiveInt = 4_096
    """Largest number of requests below L1 at once; further ones are refused with 503 `overloaded` and `Retry-After`."""

    poll_s: PositiveFloat = 1.0
    """Seconds between polls of the pointer; changes are announced as well."""
    blocklist_poll_s: PositiveFloat = 1.0
    """Seconds between polls of the blocklist."""
    heartbeat_s: PositiveFloat = 1.0
    """Seconds between heartbeats, which report this replica's generations to the night."""
    sketch_s: Annotated[float, Field(ge=0, le=3_600)] = 5.0
    """Seconds between two reports of the most requested ids to the sketch in Redis, from which a replica preloads at
    its start and after a flip; an id stays there for up to three hours. 0: no sketch is written or read."""
    figures_s: PositiveFloat = 15.0
    """Seconds between two reads of the release records and of Redis' memory for `/metrics`."""
    dashboard_s: Annotated[float, Field(ge=0, le=5)] = 2.0
    """Seconds between reports of each worker's counts to Redis, for `/dashboard/data` of every replica (about 250 KB of
    Redis per worker, which expire after an hour). 0: no dashboard."""
    quality_s: Annotated[float, Field(ge=0, le=3_600)] = 5.0
    """Seconds between reports to Redis of quality figures, of entities read and of ids requested but not known; 0: no
    reports."""
    quality_per_mille: Annotated[float, Field(ge=0, le=1_000)] = 1.0
    """Share of the served answers that the live model computes once more, in per mille, outside of requests; 0: no
    sampling."""
    quality_cpu_share: PositiveFloat = 0.001
    """Largest share of one core that these computations may take in each worker; samples beyond it are dropped and
    counted."""
    drain_s: PositiveFloat = 10.0
    """Longest duration of a stop in seconds. The service reports that it is not ready, still answers requests, and ends
    once no request has come for a quarter of a second. If a balancer does not check `/readyz` (nginx by default),
    requests keep coming and a stop takes the full time."""
    load_bound_s: PositiveFloat = 60.0
    """Seconds that a replica may take to load a newer generation after it has seen it; then the replica is not
    ready."""
    observe: bool = True
    """True if ready answers of L1 are counted and the advisor runs; set to false to measure the cost of both."""
    fast_http: bool = True
    """False: every request takes the general path through uvicorn, the routes and the ladder, without the shortcuts.
    The cost of one peer is then bounded by uvicorn only."""
    advisor_keys: Annotated[int, Field(ge=0, le=1 << 20)] = 65_536
    """Largest number of records that the L1 size advisor samples in each worker; takes about 12 MiB. 0: no advisor."""

    log: LogForm = "text"
    """Format of log lines. `json`: one object per line on standard error (`time`, `level`, `logger`, `message`, and for
    requests `request_id`, `trace_id`, `table`, `status`, `seconds`, `sources`, `stages`). No format ever contains the
    token, a password or an entity's id."""
    log_share: UnitInterval = 0.001
    """Share of successful, timely requests that are logged; simple single lookups answered by L1 or Redis are never
    logged."""
    log_slow_ms: PositiveFloat = 1_000.0
    """Milliseconds beyond which a request is always logged, as is every request with a status of 500 or more."""
    log_lines_per_s: PositiveFloat = 5.0
    """Lines per second of each log statement, after a burst of 20; the next line says how many were `dropped`."""
    server_timing: bool = True
    """True if the header `Server-Timing` has stage times; a simple single lookup answered by L1 or Redis is guaranteed
    to have them, and `X-Request-Id`, only if the request has a header `X-Larder-Timing`."""
    traces: bool = False
    """True if OpenTelemetry spans are sent over OTLP/HTTP; needs the extra `otel`. OpenTelemetry's own variables set
    their target and the service's name (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`,
    `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_BSP_*`)."""
    traces_share: UnitInterval = 0.01
    """Share of the requests without a valid `traceparent` that begin a trace; a request with one is traced if its
    caller says so."""
    traces_ids: bool = False
    """True if the span of a single lookup contains the entity (`larder.entity`)."""

    body_bytes: PositiveInt = 8 << 20
    """Largest size of a request body in bytes."""
    bodies_bytes: PositiveInt = 64 << 20
    """Largest total size in bytes of the bodies of all requests of a worker; a body beyond it is refused with 503
    `overloaded`."""
    max_batch: PositiveInt = 1_000
    """Largest number of entities per request."""
    max_history: PositiveInt = 10_000
    """Largest number of history ids per entity."""
    max_exclude: PositiveInt = 10_000
    """Largest number of excluded ids per request."""
    max_ids: PositiveInt = 50_000
    """Largest total number of ids per request: all histories and `exclude` together."""
    max_numbers: PositiveInt = 100_000
    """Largest total number of feature values per request: each number of a list, and each feature that is not a list. A
    JSON body with more lists, objects, texts and numbers than `max_ids` + 2 x `max_numbers` + 8 x `max_batch` + 64 is
    refused before it is parsed (422 `too_many_values`), as is an Arrow stream of more than 64 record batches."""

    boost_max: Annotated[float, Field(ge=1, le=1_000)] = 4.0
    """Largest factor of a boost in a request; its reciprocal is the smallest. 1: requests may only name declared
    re-rankings, whose factors are not bounded by this."""
    rerank: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Re-rankings that requests may name, one section each with `boost`, `diversify` or both, such as
    `[serving.rerank.varied]` with `diversify = {attribute = "brand", most = 2}`."""
    near: dict[str, NearConfig] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bodies_bytes < self.body_bytes:
            raise ConfigError(
                f"bodies_bytes must have room for one body of body_bytes ({self.body_bytes}), not {self.bodies_bytes}",
                field="bodies_bytes",
            )
        parse_cores(self.live_cores)
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError("tls_certificate and tls_key go together: set both or neither", field="tls_certificate")
        if (self.tls_client != "off") != bool(self.tls_client_ca):
            raise ConfigError("tls_client and tls_client_ca go together: set both or neither", field="tls_client")
        if self.tls_client_ca and not self.tls_certificate:
            raise ConfigError("tls_client_ca needs tls_certificate", field="tls_client_ca")

    @classmethod
    def load(cls, environ: Mapping[str, str], **overrides: Any) -> Self:
        """Load defaults, [serving] of the TOML file LARDER_CONFIG, the environment and overrides; later ones win.

        namespace, artifacts, redis_url, state and schedule are top-level keys of the file, which the night reads as
        well. Raises ConfigError for an unreadable file, an unknown setting or a value of the wrong type.
        """
        from cache.config.reading import ConfigFile, read_section

        file = ConfigFile.named(environ)
        values = file.top_level_values(SharedConfig) | dict(file.section_values("serving"))
        config = read_section(cls, values, file, environ, section_name="serving", **overrides)
        tables = file.section_values("tables")
        for name in config.near if tables else ():
            if name not in tables:
                raise ConfigError(
                    f"{file.path} [serving.near.{name}]: there is no table {name!r}; [tables] has "
                    f"{', '.join(sorted(tables))}",
                    field="near",
                )
        return config

    def bounds(self, connections_max: int) -> PeerBounds:
        """Return the bounds on one peer's cost, with room for `connections_max` connections."""
        shared = {field.name: getattr(self, field.name) for field in fields(PeerBounds)}
        return PeerBounds(**shared | {"connections_max": connections_max})

    @property
    def sampled_keys_max(self) -> int:
        """Largest number of keys that the advisor samples; 0 without an advisor."""
        return self.advisor_keys if self.observe else 0

    @property
    def sampled_answers_per_mille(self) -> float:
        """Share of answers that is computed once more, in per mille; 0 if `observe` is false."""
        return self.quality_per_mille if self.observe else 0

    @property
    def url_scheme(self) -> str:
        """Scheme of the service's URL."""
        return "https" if self.tls_certificate else "http"

    @property
    def has_tokens(self) -> bool:
        """True if callers need a token."""
        return bool(self.token or self.tokens_file)

    @property
    def is_loopback(self) -> bool:
        """True if `host` is a loopback address, which only this machine can reach."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def require_guard(self) -> None:
        """Raise ConfigError if other hosts could reach the service and no token is set."""
        if not (self.is_loopback or self.has_tokens or self.insecure):
            raise ConfigError(
                f"{self.host} can be reached from elsewhere: set LARDER_TOKEN or tokens_file, or pass --insecure on "
                "purpose",
                field="host",
            )


def parse_cores(cores_text: str) -> tuple[int, ...]:
    """Parse "0-3,8" to cores in order, "" to none. Raises ConfigError for anything else."""
    cores: set[int] = set()
    for part in filter(None, cores_text.replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
            raise ConfigError(f"live_cores is a list like 2,3 or 0-3, not {cores_text!r}", field="live_cores")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))
