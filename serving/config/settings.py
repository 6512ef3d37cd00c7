"""Settings of the service: one frozen value, read once where the program starts."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from cache.control.schedule import CRON, GRACE_S, TIMEZONE, Schedule
from cache.errors import ConfigError
from cache.store.artefacts import ArtefactStore
from serving.config.bounds import Bounds
from serving.config.cpu_affinity import parse_cores
from serving.config.sources import from_toml, typed
from serving.requests.body_budget import BYTES_MAX
from serving.requests.models import Limits
from serving.tracing.log_setup import Form

Precision = Literal["int8", "fp32"]

OverlayReads = Literal["auto", "always"]
"""Policy for overlay reads: `auto` leaves overlays unread while inputs hardly come again."""

_RENAMED = {"redis_url": "REDIS_URL"}


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Every setting with its default; in the environment each is LARDER_<NAME>, except REDIS_URL."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    insecure: bool = False
    workers: int = 1

    state: Path = Path(".larder")
    ephemeral_state: bool = False
    artifacts: str = ".larder/artifacts"
    redis_url: str = ""
    namespace: str = "default"

    schedule: str = CRON
    timezone: str = TIMEZONE
    schedule_grace_s: float = GRACE_S

    l1_bytes: int = 256 << 20
    negative_entries: int = 100_000
    negative_ttl_s: float = 5.0
    overlay_ttl_s: float = 600.0
    overlay_reads: OverlayReads = "auto"
    outage_ttl_s: float = 15.0
    lease_wait_ms: float = 200.0

    deadline_ms: float = 300.0
    deadline_max_ms: float = 10_000.0
    l2_deadline_ms: float = 75.0
    l2_connections: int = 2
    breaker_threshold: int = 5
    breaker_cooldown_s: float = 1.0

    precision: Precision = "int8"
    live_workers: int = 1
    live_threads: int = 1
    live_cores: str = ""
    live_nice: int = 10
    live_batch: int = 256
    live_queue: int = 2_048
    live_queue_bytes: int = 32 << 20

    queue_target_ms: float = 20.0
    queue_interval_ms: float = 100.0
    requests_max: int = 4_096

    poll_s: float = 1.0
    blocklist_poll_s: float = 1.0
    heartbeat_s: float = 1.0
    sketch_s: float = 5.0
    figures_s: float = 15.0
    dashboard_s: float = 2.0
    quality_s: float = 5.0
    quality_per_mille: float = 1.0
    quality_cpu_share: float = 0.001
    drain_s: float = 10.0
    load_bound_s: float = 60.0
    observe: bool = True
    fast_http: bool = True
    advisor_keys: int = 16_384

    log: Form = "text"
    log_share: float = 0.001
    log_slow_ms: float = 1_000.0
    log_lines_per_s: float = 5.0
    server_timing: bool = True
    traces: bool = False
    traces_share: float = 0.01
    traces_ids: bool = False

    body_bytes: int = 8 << 20
    body_timeout_s: float = 10.0
    bodies_bytes: int = BYTES_MAX
    head_bytes: int = Bounds.head_bytes
    head_fields: int = Bounds.head_fields
    head_timeout_s: float = Bounds.head_timeout_s
    idle_timeout_s: float = Bounds.idle_timeout_s
    write_timeout_s: float = Bounds.write_timeout_s
    pipeline_max: int = Bounds.pipeline_max
    connections_max: int = Bounds.connections_max
    connections_new_max: int = Bounds.connections_new_max
    max_batch: int = 1_000
    max_history: int = 10_000
    max_exclude: int = 10_000
    max_ids: int = 50_000
    max_numbers: int = 100_000

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ConfigError(
                f"precision is int8 or fp32, not {self.precision!r}", field="precision"
            )
        if self.overlay_reads not in get_args(OverlayReads):
            raise ConfigError(
                f"overlay_reads is auto or always, not {self.overlay_reads!r}",
                field="overlay_reads",
            )
        if self.log not in get_args(Form):
            raise ConfigError(f"log is text or json, not {self.log!r}", field="log")
        for name in ("log_share", "traces_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is 0 to 1, not {getattr(self, name)}", field=name)
        if not self.namespace or set(self.namespace) & set("{}:*\r\n "):
            raise ConfigError(
                f"a namespace is not empty and holds no braces, colons or spaces: {self.namespace!r}",
                field="namespace",
            )
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}", field=name)
        for name, (most, none) in _UP_TO.items():
            if not 0 <= (value := getattr(self, name)) <= most:
                raise ConfigError(f"{name} is 0 ({none}) to {most}, not {value}", field=name)
        if self.bodies_bytes < self.body_bytes:
            raise ConfigError(
                f"bodies_bytes must have room for one body of body_bytes ({self.body_bytes}), not {self.bodies_bytes}",
                field="bodies_bytes",
            )
        parse_cores(self.live_cores)
        self.nights()

    @classmethod
    def load(cls, environ: Mapping[str, str], **overrides: object) -> Self:
        """Defaults, then the [serving] section of the TOML file LARDER_CONFIG, then the environment, then overrides.

        namespace, artifacts, redis_url, state and schedule stand above the file's sections, where the night reads them.
        Raises ConfigError for an unreadable file, an unknown setting or a value of the wrong type.
        """
        values: dict[str, object] = {}
        if path := environ.get("LARDER_CONFIG"):
            values |= from_toml(Path(path), fields(cls))
        for each in fields(cls):
            name = _RENAMED.get(each.name, f"LARDER_{each.name.upper()}")
            if value := environ.get(name):  # compose files pass unset variables as empty ones
                values[each.name] = value
        values |= {name: value for name, value in overrides.items() if value is not None}
        kinds = {each.name: each.type for each in fields(cls)}
        converted: dict[str, Any] = {
            name: typed(name, kinds[name], value) for name, value in values.items()
        }
        return cls(**converted)

    def store(self) -> ArtefactStore:
        """This namespace's part of the artefact store; a remote one keeps this host's copies under the state folder."""
        cached = self.state / "host-cache" / self.namespace
        url = f"{self.artifacts.rstrip('/')}/{self.namespace}"
        return ArtefactStore(url, cached, is_ephemeral=self.ephemeral_state)

    def nights(self) -> Schedule:
        """Schedule by which generations should exist."""
        return Schedule(self.schedule, self.timezone, self.schedule_grace_s)

    def limits(self) -> Limits:
        """Limits on what one request may hold."""
        return Limits(
            self.max_batch,
            self.max_history,
            self.max_exclude,
            self.deadline_ms,
            self.deadline_max_ms,
            self.max_ids,
            self.max_numbers,
        )

    def bounds(self, connections_max: int) -> Bounds:
        """Bounds on what one peer may cost, with room for so many connections."""
        shared = {each.name: getattr(self, each.name) for each in fields(Bounds)}
        return Bounds(**shared | {"connections_max": connections_max})

    @property
    def sampled_keys(self) -> int:
        """Bound of the advisor's sample, 0 without one."""
        return self.advisor_keys if self.observe else 0

    @property
    def sampled_per_mille(self) -> float:
        """Share of the answers that is judged, per mille; 0 where nothing is observed."""
        return self.quality_per_mille if self.observe else 0

    @property
    def is_loopback(self) -> bool:
        """True if nobody but this machine can reach `host`."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def require_guard(self) -> None:
        """Raises ConfigError when others could reach the service and no token keeps them out."""
        if not (self.is_loopback or self.token or self.insecure):
            raise ConfigError(
                f"{self.host} can be reached from elsewhere: set LARDER_TOKEN, or pass --insecure on purpose",
                field="host",
            )

    def with_redis(self, url: str) -> Self:
        """Copy of the settings with the Redis that was started or found."""
        return replace(self, redis_url=url)


def check_token(token: str) -> None:
    """Raises ConfigError for a token that no header can carry as it is."""
    if not token.isprintable() or any(each.isspace() for each in token):
        raise ConfigError(
            "a token is printable characters without spaces; without any, leave LARDER_TOKEN unset",
            field="token",
        )


_POSITIVE = (
    "workers",
    "l1_bytes", "negative_entries", "negative_ttl_s", "overlay_ttl_s", "outage_ttl_s",
    "deadline_ms", "deadline_max_ms", "l2_deadline_ms", "l2_connections", "breaker_threshold", "breaker_cooldown_s",
    "live_workers", "live_threads", "live_batch", "live_queue", "live_queue_bytes",
    "queue_target_ms", "queue_interval_ms", "requests_max",
    "poll_s", "blocklist_poll_s", "heartbeat_s", "figures_s", "drain_s", "load_bound_s", "body_bytes", "body_timeout_s",
    "head_bytes", "head_fields", "head_timeout_s", "idle_timeout_s", "write_timeout_s", "pipeline_max",
    "connections_max", "connections_new_max",
    "max_batch", "max_history", "max_exclude", "max_ids", "max_numbers",
    "log_slow_ms", "log_lines_per_s", "quality_cpu_share",
)  # fmt: skip

_UP_TO = {
    "port": (65_535, "any free one"),
    "lease_wait_ms": (60_000, "no leases"),
    "sketch_s": (3_600, "no sketch"),
    "live_nice": (19, "the model computes beside answers, not after them"),
    "dashboard_s": (5, "no dashboard"),
    "advisor_keys": (1 << 20, "no advisor"),
    "quality_s": (3_600, "nothing is told"),
    "quality_per_mille": (1_000, "no sampling"),
}
