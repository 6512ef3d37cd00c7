"""URLs of a Redis under Sentinel: `redis+sentinel://user:password@host:port,host:port/service/database`. Pure."""

from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.connection import parse_url

from cache.errors import ConfigError

SCHEMES: Final = ("redis+sentinel://", "rediss+sentinel://")
PORT: Final = 26_379
_SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class SentinelGroup:
    """Sentinels that watch over one service, and how they are asked; `settings` are those of redis-py's connections."""

    addresses: tuple[tuple[str, int], ...]
    service: str
    settings: dict[str, Any] = field(default_factory=dict, repr=False)
    """May hold the sentinels' password."""


def is_sentinel(url: str) -> bool:
    """True if a URL names sentinels, which tell where the primary is."""
    return url.startswith(SCHEMES)


def read_url(url: str) -> tuple[SentinelGroup, dict[str, Any]]:
    """The sentinels that a URL names, and redis-py's settings of a connection to whatever server they name.

    With `rediss+sentinel://` both speak TLS, by the same options. Raises ConfigError, which repeats no part of the URL:
    a password that is not percent-encoded may reach into any.
    """
    try:
        return _read(url)
    except ValueError:  # of urllib and of redis-py; its text may hold the password, too
        raise _refused(
            "the URL of a Redis under Sentinel, or an option behind its ?, cannot be read"
        ) from None


def _read(url: str) -> tuple[SentinelGroup, dict[str, Any]]:
    scheme, _, location = url.partition("+sentinel://")
    parts = urlsplit(f"{scheme}://{location}")
    user, at, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise _refused(
            "the URL of a Redis under Sentinel ends in the name of its service, redis+sentinel://host:port/SERVICE"
        )
    if "@" in service or (database and not database.isdecimal()):
        raise _refused(
            "the URL of a Redis under Sentinel has no database's number behind its service, or an @ in its name"
        )
    options = parse_qsl(parts.query)
    redis_parts = parts._replace(
        netloc=f"{user}{at}{hosts.partition(',')[0]}",
        path=f"/{database}",
        query=urlencode([option for option in options if option[0] not in _SENTINEL_OPTIONS]),
    )
    addresses = tuple(_address(host, number) for number, host in enumerate(hosts.split(","), 1))
    settings: dict[str, Any] = dict(parse_url(redis_parts.geturl()))  # type: ignore[no-untyped-call]
    shared = {name: value for name, value in settings.items() if name.startswith("ssl_")}
    if scheme == "rediss":
        shared["ssl"] = True
    sentinel_credentials = {
        name.removeprefix("sentinel_"): value
        for name, value in options
        if name in _SENTINEL_OPTIONS
    }
    for name in ("host", "port", "connection_class"):
        settings.pop(name, None)
    return SentinelGroup(addresses, unquote(service), {**shared, **sentinel_credentials}), settings


def is_tls(group: SentinelGroup) -> bool:
    """True if the sentinels, and the servers that they name, speak TLS."""
    return bool(group.settings.get("ssl"))


def _address(text: str, number: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"redis://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise _refused(f"address {number} in the URL of a Redis under Sentinel is not host:port")
    return host, port or PORT


def _refused(message: str) -> ConfigError:
    remedy = "percent-encode / # ? [ ] @ in a password (urllib.parse.quote), if it has any"
    return ConfigError(f"{message}: {remedy}", field="redis_url")
