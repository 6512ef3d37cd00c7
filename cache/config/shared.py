"""Settings that both the night and the service read; in the file they are top-level keys."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field

from cache.config.events import EventsConfig
from cache.config.section import NonEmptyText, section
from cache.config.timetable import Timetable
from cache.errors import ConfigError
from cache.format.redis_keys import NAME_PATTERN, Keyspace
from cache.l2 import slots
from cache.l2.sentinel import SENTINEL_URL_SCHEMES, is_sentinel, read_sentinel_url
from cache.l2.url_options import demand_known_options
from cache.store.artefacts import ArtefactStore

_REDIS_URL_SCHEMES = ("redis://", "rediss://", "unix://", *slots.CLUSTER_URL_SCHEMES, *SENTINEL_URL_SCHEMES)


def _path_as_text(setting_value: Any) -> Any:
    return str(setting_value) if isinstance(setting_value, Path) else setting_value


@section
class SharedConfig(Timetable):
    """Settings that both the night and the service read."""

    FROM_ENVIRONMENT: ClassVar[tuple[str, ...] | None] = (
        *(Timetable.FROM_ENVIRONMENT or ()), "namespace", "artifacts", "state", "ephemeral_state", "redis_url",
        "events_url", "actor", "feature_text_bytes",
    )  # fmt: skip

    namespace: str = "default"
    """Part of every Redis key, so that several installations can share one Redis: 1 to 64 letters, digits, dots,
    hyphens or underscores; not starting with a dot."""
    artifacts: NonEmptyText = ".larder/artifacts"
    """Artefact store, from which Redis can be rebuilt: a folder on a file system with hard links (a local disk, NFS),
    or any fsspec URL (install its driver) of a store that creates objects exclusively (S3, GCS, Azure, any that honours
    `If-None-Match`); this is tested at first use. Each namespace has its own folder in the store. A URL with a password
    may be set in the environment only."""
    state: Annotated[NonEmptyText, BeforeValidator(_path_as_text)] = ".larder"
    """Folder that local runs write to: logs, sockets, copies of remote artefacts. They write nowhere else."""
    ephemeral_state: bool = False
    """True if that folder is deleted when the program ends (a pod without a volume): its copies are not recorded in the
    store, so no erasure waits for them."""
    redis_url: str | None = None
    """Redis: `redis://`, `rediss://` or `unix://`; for a Redis Cluster `redis+cluster://` or `rediss+cluster://` with
    one or more nodes (`host:port,host:port`); under Sentinel `redis+sentinel://` or `rediss+sentinel://` with sentinels
    and the service that they watch (`host:port,host:port/mymaster`). A URL with a password may be set in the
    environment only. If unset, a server is started and stopped with the command."""
    events_url: str = ""
    """Redis for events, a separate single server with `appendonly yes`; empty: the same as `redis_url`. A URL with a
    password may be set in the environment only, as LARDER_EVENTS_URL."""
    events: EventsConfig = Field(default_factory=EventsConfig)
    actor: str = ""
    """Name that the audit log records for a command's caller; empty: the system's user and host."""
    feature_text_bytes: Annotated[int, Field(ge=4_096, le=1 << 20)] = 65_536
    """Largest size of a text in a feature, in bytes of UTF-8. Nights treat a longer text as missing and count it; the
    service refuses a request that contains one (422 `feature_too_long`)."""
    base: str = "."

    def __post_init__(self) -> None:
        check_name("namespace", self.namespace)
        if self.events.namespace:
            check_name("events.namespace", self.events.namespace)
        if self.redis_url and not self.redis_url.startswith(_REDIS_URL_SCHEMES):
            # Do not show the value: it may contain a password.
            raise ConfigError(f"redis_url must start with {', '.join(_REDIS_URL_SCHEMES)}", field="redis_url")
        if self.events_url and not self.events_url.startswith(_REDIS_URL_SCHEMES[:3]):
            raise ConfigError(
                f"events_url must name one server and start with {', '.join(_REDIS_URL_SCHEMES[:3])}",
                field="events_url",
            )
        for setting_name, url in (("redis_url", self.redis_url), ("events_url", self.events_url)):
            if url:
                demand_known_options(url, setting_name)
        if self.events.enabled and self.events_redis_url.startswith(_REDIS_URL_SCHEMES[3:]):
            raise ConfigError(
                "events need one server, and redis_url names a Redis Cluster, or sentinels, whose failover may lose "
                "accepted events: set LARDER_EVENTS_URL to a separate server",
                field="events_url",
            )
        if is_sentinel(self.redis_url or ""):
            read_sentinel_url(self.redis_url or "")
        self.nights()

    def path(self, path_text: str) -> Path:
        """Return a path of the configuration; a relative one starts at the file's folder."""
        return Path(self.base, path_text)

    @property
    def events_redis_url(self) -> str:
        """Return the URL of the Redis that holds events; empty if neither `events_url` nor `redis_url` is set."""
        return self.events_url or self.redis_url or ""

    def store(self) -> ArtefactStore:
        """Open this namespace's part of the artefact store; copies of a remote store are kept in the state folder."""
        url = self.artifacts if "://" in self.artifacts else str(self.path(self.artifacts))
        copies_folder = self.path(self.state) / "host-cache" / self.namespace
        return ArtefactStore(f"{url.rstrip('/')}/{self.namespace}", copies_folder, is_ephemeral=self.ephemeral_state)

    def of_events(self) -> Self:
        """Return these settings for the namespace that holds the stream and files of events."""
        events_namespace = self.events.namespace or self.namespace
        if events_namespace == self.namespace:
            return self
        return replace(self, namespace=events_namespace, events=replace(self.events, namespace=""))

    def keyspace(self) -> Keyspace:
        """Redis keys of this namespace."""
        return Keyspace(self.namespace)


def check_name(name_description: str, name: str) -> None:
    """Raise ConfigError unless `name` is valid in Redis keys and folder names."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"{name_description} has 1 to 64 letters, digits, dots, hyphens or underscores "
            f"and does not start with a dot: "
            f"{name!r}",
            field=name_description,
        )
