"""Settings of the service: the section `[serving]`, the bounds on what one peer may cost, and near-match reuse."""

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
    """Near-match reuse for inputs that no tier knows, in `[serving.near.TABLE]`; a table without a section has none.

    The answer to a near input is reused, marked `near`, where its error is shown to be within the bound.
    """

    error: Annotated[float, Field(ge=0.0001, le=0.5)] = 0.01
    """Share of the reused answers that may differ from live's: in the first label, or by more than `overlap` allows."""
    overlap: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of live's list that a reused one has at least, else it counts as different."""
    entries: Annotated[int, Field(ge=16, le=65_536)] = 2_048
    """Number of recent answers that are kept of each kind of input (history, features or both), of each worker: 4 bytes
    for each dimension of the vector, and 8 for each item of a list."""


@section
class PeerBounds:
    """Bounds on what one peer may cost, in `[serving]`: heads, bodies, pipelines, connections, and their times."""

    head_bytes: PositiveInt = 32 << 10
    """Bytes of a request's target and header fields, trailers included; more is refused with 431, and the connection is
    closed."""
    head_fields: PositiveInt = 100
    """Number of header fields of a request; more is refused like too many bytes."""
    head_timeout_s: PositiveFloat = 10.0
    """Seconds that a connection may wait before its first request begins, and each head may take to arrive; then the
    connection is closed, with 408 if a head had begun. This and the two other times of connections are kept to within a
    second."""
    body_timeout_s: PositiveFloat = 10.0
    """Seconds that a request body may take to arrive whole; then 408 `body_timeout`, and the connection is closed.
    The rest of a body that is not read because its request is answered has as long."""
    write_timeout_s: PositiveFloat = 10.0
    """Seconds in which a peer must take 64 KiB of its answers; a slower one is cut off."""
    answers_bytes: PositiveInt = 64 << 20
    """Bytes of answers to all requests of a worker together that peers have not taken yet, where one connection has
    64 KiB or more of them; beyond it connections whose peers have let theirs wait for a second are cut off, and while
    that is not enough batches are refused with 503 `overloaded`."""
    idle_timeout_s: PositiveFloat = 5.0
    """Seconds that a connection is kept after its last answer."""
    pipeline_max: PositiveInt = 16
    """Number of requests of one connection that are not answered yet, of which 64 KiB of bodies may wait; beyond
    that one more answer is sent and the connection closed."""
    connections_max: PositiveInt = 8_192
    """Number of connections of a worker, where as many files may be open (the soft limit is raised as far as the
    hard one allows, 256 are left for everything else); one more is closed with 503."""
    connections_new_max: PositiveInt = 4_096
    """Number of these that have not sent the head of a request so far; for one more the oldest of them is closed."""


@section
class ServingConfig(SharedConfig, PeerBounds):
    """Settings of the service, in `[serving]`; in the environment each is LARDER_<NAME>, except REDIS_URL."""

    FROM_ENVIRONMENT: ClassVar = None

    redis_url: str = ""
    """Redis, as above the sections; empty: a server is started and stopped with the service."""

    host: str = "127.0.0.1"
    """Address to bind; anything but loopback needs `LARDER_TOKEN`, `tokens_file` or `--insecure`."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """Port to bind; 0 is any free one."""
    token: str = Field(default="", repr=False)
    """Secret that callers send as `Authorization: Bearer ...`; from the environment alone. It has
    every scope and no quota, and is called `default`."""
    tokens_file: str = ""
    """File of named tokens with scopes, quotas and expiry, as `larder tokens` writes it; read again within a
    second of a change. Empty: none."""
    tls_certificate: str = ""
    """File of the service's certificate and those between it and its root, PEM; the service then speaks HTTPS alone.
    Read again within two seconds of a change, as are the two below. Empty: plain HTTP."""
    tls_key: str = ""
    """File of the certificate's private key, PEM, without a passphrase."""
    tls_client_ca: str = ""
    """File of the authorities whose client certificates are accepted, PEM."""
    tls_client: ClientCertificates = "off"
    """Certificates that callers show: `required` of all, probes and Prometheus included; `optional`: a wrong one is
    refused, none is not. They take no token's place."""
    insecure: bool = False
    """True if others may reach the service without a token."""
    workers: PositiveInt = 1
    """Number of processes that answer on the one port; each is a replica of its own, with L1, connections and
    threads of its own, while a generation's files are mapped once for all."""

    l1_bytes: PositiveInt = 256 << 20
    """Bytes of the in-process tier, records and bookkeeping included; of each worker."""
    negative_entries: PositiveInt = 100_000
    """Number of unknown ids remembered as unknown."""
    negative_ttl_s: PositiveFloat = 5.0
    """Seconds for which they are."""
    overlay_ttl_s: PositiveFloat = 600.0
    """Life of a record that live inference wrote through, in seconds."""
    overlay_reads: OverlayReads = "auto"
    """Policy for overlay reads. `auto`: while inputs of new ids hardly ever come again, stored live answers are
    looked for in one of 16 cases; `always`: each time, with a lease, so that no two replicas compute the same one."""
    outage_ttl_s: PositiveFloat = 15.0
    """Life of live answers for known entities while Redis is away, in seconds."""
    lease_wait_ms: Annotated[float, Field(ge=0, le=60_000)] = 200.0
    """Milliseconds that a replica waits for another one that computes the same cold answer before it computes itself; a
    dead one is waited for half as long. 0: no leases, replicas do not wait for each other."""

    deadline_ms: PositiveFloat = 300.0
    """Deadline of a request that names none, in milliseconds."""
    deadline_max_ms: PositiveFloat = 10_000.0
    """Longest deadline that a request may name, in milliseconds."""
    l2_deadline_ms: PositiveFloat = 75.0
    """Longest wait for Redis within it, in milliseconds."""
    l2_connections: PositiveInt = 2
    """Number of connections for reads."""
    breaker_threshold: PositiveInt = 5
    """Number of failures in a row before Redis is left alone."""
    breaker_cooldown_s: PositiveFloat = 1.0
    """Seconds for which it is."""

    precision: Precision = "int8"
    """Precision of the live towers; on a GPU fp32, of whose int8 operators it has few."""
    live_provider: Literal["cpu", "cuda", "tensorrt"] = "cpu"
    """ONNX Runtime's provider for the live towers; one of a GPU (the first visible one) wants onnxruntime-gpu in the
    place of onnxruntime. Where it cannot be used they run on the processor, and log and `/v1/generations` say why."""
    live_workers: PositiveInt = 1
    """Number of threads that run the model."""
    live_threads: PositiveInt = 1
    """Number of threads within one inference and one search (ONNX Runtime, FAISS); they never spin."""
    live_cores: str = ""
    """Cores like `2,3` or `4-7` that the model's threads stay on; empty: any. On several NUMA nodes: one process per
    node under `numactl --cpunodebind=N --membind=N`, its cores of that node (`lscpu -e`)."""
    live_nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Steps that the model's threads stand behind those that answer; 0 where other programs keep the cores busy and the
    model must keep its share (Linux): the model computes beside answers, not after them."""
    live_batch: PositiveInt = 256
    """Number of inputs per inference at most; fewer where more could not end before the first deadline."""
    live_queue: PositiveInt = 2_048
    """Number of inputs that may wait for the model."""
    live_queue_bytes: PositiveInt = 32 << 20
    """Bytes that may wait for the model; more goes down the ladder."""

    queue_target_ms: PositiveFloat = 20.0
    """Milliseconds that a turn of the event loop, or the wait of a request for its turn, may take throughout an
    interval before live is left out of more and more answers (`live: "overloaded"`); where next to no live answer is
    left to leave out, and at once at five times this, batches and ids that are not stored are refused more and more,
    503 `overloaded` with `Retry-After`."""
    queue_interval_ms: PositiveFloat = 100.0
    """Length of that interval in milliseconds; after one above the target the share of live shrinks in proportion,
    after one below it grows, by a tenth first and by twice as much each time."""
    requests_max: PositiveInt = 4_096
    """Number of requests that may be below L1 at once; more are refused with 503 `overloaded` and `Retry-After`."""

    poll_s: PositiveFloat = 1.0
    """Seconds between looks at the pointer, beside listening for changes."""
    blocklist_poll_s: PositiveFloat = 1.0
    """Seconds between polls of the blocklist."""
    heartbeat_s: PositiveFloat = 1.0
    """Seconds between heartbeats, which tell the night what this replica holds."""
    sketch_s: Annotated[float, Field(ge=0, le=3_600)] = 5.0
    """Seconds between additions of the ids that were asked for most to the sketch in Redis, from which a replica that
    starts, or flips, reads ahead; they lie there for up to three hours. 0: no sketch, neither written nor read."""
    figures_s: PositiveFloat = 15.0
    """Seconds between readings of the release records and of Redis' memory for `/metrics`."""
    dashboard_s: Annotated[float, Field(ge=0, le=5)] = 2.0
    """Seconds between reports of each worker's counts to Redis, for `/dashboard/data` of every replica (some 250 KB of
    Redis per worker, gone after an hour). 0: no dashboard, neither reported nor shown."""
    quality_s: Annotated[float, Field(ge=0, le=3_600)] = 5.0
    """Seconds between reports to Redis of quality figures, entities read and requests in vain; 0: no reports."""
    quality_per_mille: Annotated[float, Field(ge=0, le=1_000)] = 1.0
    """Share of the answers served that is computed once more by the live model, per mille, off the path of requests;
    0: no sampling."""
    quality_cpu_share: PositiveFloat = 0.001
    """Share of one core that this may cost each worker in processor time; what does not fit is dropped and counted."""
    drain_s: PositiveFloat = 10.0
    """Most seconds of a stop. The service is not ready from then on, answers what still comes, and ends once no request
    has come for a quarter of a second. A balancer that does not look at `/readyz` (nginx by itself) sends on, and a
    stop takes all of them."""
    load_bound_s: PositiveFloat = 60.0
    """Seconds that a replica that has seen a newer generation may take to load it; after that it is not ready."""
    observe: bool = True
    """True if answers that lie ready in L1 are counted, and the advisor runs; `false` to measure what observing
    costs."""
    fast_http: bool = True
    """False: every request goes through uvicorn, the routes and the ladder, as if nothing were there for speed alone.
    What one peer may cost is then bounded by uvicorn alone."""
    advisor_keys: Annotated[int, Field(ge=0, le=1 << 20)] = 65_536
    """Number of records that the L1 size advisor samples at most, of each worker; about 12 MiB. 0: no advisor."""

    log: LogForm = "text"
    """Form of a log line. `json`: one object a line on standard error (`time`, `level`, `logger`, `message`, of
    requests also `request_id`, `trace_id`, `table`, `status`, `seconds`, `sources`, `stages`). Neither form ever
    holds the token or a password, nor an entity's id."""
    log_share: UnitInterval = 0.001
    """Share of the requests that succeed in time that get a line; plain single lookups that L1 or Redis answers
    never do."""
    log_slow_ms: PositiveFloat = 1_000.0
    """Milliseconds beyond which a request always gets a line, as does every status of 500 and more."""
    log_lines_per_s: PositiveFloat = 5.0
    """Lines a second of each place in the program, after a burst of 20; the next one says how many were `dropped`."""
    server_timing: bool = True
    """True if the header `Server-Timing` has stage times; a plain single lookup that L1 or Redis answers is sure to
    have them, and `X-Request-Id`, only if the request has a header `X-Larder-Timing`."""
    traces: bool = False
    """True if OpenTelemetry spans are sent over OTLP/HTTP; needs the extra `otel`. Where they go, and the service's
    name, is said by OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`,
    `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_BSP_*`)."""
    traces_share: UnitInterval = 0.01
    """Share of the requests without a `traceparent` that begin a trace; one with a valid `traceparent` is traced if its
    caller says so."""
    traces_ids: bool = False
    """True if the entity of a single lookup goes into its span (`larder.entity`)."""

    body_bytes: PositiveInt = 8 << 20
    """Bytes of the largest request body."""
    bodies_bytes: PositiveInt = 64 << 20
    """Bytes of the bodies of all requests of a worker together; a body beyond it is refused with 503 `overloaded`."""
    max_batch: PositiveInt = 1_000
    """Number of entities per request."""
    max_history: PositiveInt = 10_000
    """Number of history ids per entity."""
    max_exclude: PositiveInt = 10_000
    """Number of excluded ids per request."""
    max_ids: PositiveInt = 50_000
    """Number of ids per request in all: every history and `exclude` together."""
    max_numbers: PositiveInt = 100_000
    """Number of values of features per request in all: each number of a list, each feature that is none. A JSON body
    with more lists, objects, texts and numbers than `max_ids` + 2 x `max_numbers` + 8 x `max_batch` + 64 is refused
    unread (422 `too_many_values`), as is an Arrow stream of more than 64 record batches."""

    boost_max: Annotated[float, Field(ge=1, le=1_000)] = 4.0
    """Largest factor of a boost that a request may send, and by its reciprocal the smallest; 1: none but declared
    ones, whose factors are theirs."""
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
        """Defaults, then the [serving] section of the TOML file LARDER_CONFIG, then the environment, then overrides.

        namespace, artifacts, redis_url, state and schedule stand above the file's sections, where the night reads them.
        Raises ConfigError for an unreadable file, an unknown setting or a value of the wrong type.
        """
        from cache.config.reading import ConfigFile, read_section

        file = ConfigFile.named(environ)
        values = file.top_level_values(SharedConfig) | dict(file.section("serving"))
        config = read_section(cls, values, file, environ, section_name="serving", **overrides)
        tables = file.section("tables")
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
    def sampled_keys(self) -> int:
        """Bound of the advisor's sample, 0 without one."""
        return self.advisor_keys if self.observe else 0

    @property
    def sampled_per_mille(self) -> float:
        """Share of the answers that is judged, per mille; 0 where nothing is observed."""
        return self.quality_per_mille if self.observe else 0

    @property
    def scheme(self) -> str:
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
        """Raises ConfigError when others could reach the service and no token keeps them out."""
        if not (self.is_loopback or self.has_tokens or self.insecure):
            raise ConfigError(
                f"{self.host} can be reached from elsewhere: set LARDER_TOKEN or tokens_file, or pass --insecure on "
                "purpose",
                field="host",
            )


def parse_cores(text: str) -> tuple[int, ...]:
    """Cores of "0-3,8", in order; none for "". Raises ConfigError for anything else."""
    cores: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else not last)):
            raise ConfigError(f"live_cores is a list like 2,3 or 0-3, not {text!r}", field="live_cores")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))
