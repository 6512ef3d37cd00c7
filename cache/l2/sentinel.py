"""Redis under Sentinel: URLs that list the sentinels, and connections that ask them for the primary as they open."""

from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
import redis.asyncio
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import MasterNotFoundError as AsyncMasterNotFoundError
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from cache.errors import ConfigError
from cache.l2.resp import bound_replies, check_replies

SENTINEL_SCHEMES: Final = ("redis+sentinel://", "rediss+sentinel://")
SENTINEL_PORT: Final = 26_379
"""Port of a sentinel whose address has none."""

SENTINEL_TIMEOUT_S: Final = 0.5
"""Seconds to wait for one sentinel before the next is asked."""

_SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class SentinelGroup:
    """Sentinels of one service; `settings` are those of redis-py's connections to them."""

    addresses: tuple[tuple[str, int], ...]
    service: str
    settings: dict[str, Any] = field(default_factory=dict, repr=False)
    """Connection settings, which may hold the sentinels' password."""


def is_sentinel(url: str) -> bool:
    """True if a URL lists sentinels, which know the primary's address."""
    return url.startswith(SENTINEL_SCHEMES)


def read_sentinel_url(url: str) -> tuple[SentinelGroup, dict[str, Any]]:
    """Return the sentinels in a URL, and redis-py's settings for connections to the primary.

    A URL is `redis+sentinel://user:password@host:port,host:port/service/database`. With `rediss+sentinel://` both
    speak TLS, by the same options. Raises ConfigError, which repeats no part of the URL: a password that is not
    percent-encoded may reach into any.
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
    """True if the connections to sentinels and primary use TLS."""
    return bool(group.settings.get("ssl"))


def _address(text: str, number: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"redis://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise _refused(f"address {number} in the URL of a Redis under Sentinel is not host:port")
    return host, port or SENTINEL_PORT


def _refused(message: str) -> ConfigError:
    remedy = "percent-encode / # ? [ ] @ in a password (urllib.parse.quote), if it has any"
    return ConfigError(f"{message}: {remedy}", field="redis_url")


class PrimaryConnection(redis.Connection):
    """Connection to the primary: asks the sentinels for its address whenever it opens.

    So any pool of redis-py works, and after a failover the next connection leads to the new primary.
    """

    def __init__(self, *, sentinels: SentinelGroup, **settings: Any) -> None:
        self._sentinels = sentinels
        super().__init__(**settings)  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        group = self._sentinels
        sentinel_settings = {**_patience(), "retry": Retry(NoBackoff(), 0), **group.settings}
        # One for each connection: redis-py's puts its sentinels in another order as it asks, and threads share none.
        with Sentinel(group.addresses, sentinel_kwargs=sentinel_settings) as sentinels:  # type: ignore[no-untyped-call]
            for client in sentinels.sentinels:
                check_replies(bound_replies(client))
            try:
                self.host, self.port = sentinels.discover_master(group.service)
            except MasterNotFoundError as error:
                raise _primary_not_found(group) from error
        return super()._connect()  # type: ignore[no-untyped-call]


class PrimarySSLConnection(PrimaryConnection, redis.SSLConnection):
    """TLS connection to the primary that sentinels name."""


class AsyncPrimaryConnection(Connection):
    """Connection to the primary that sentinels name, for an event loop."""

    def __init__(self, *, sentinels: SentinelGroup, **settings: Any) -> None:
        self._sentinels = sentinels
        super().__init__(**settings)

    async def _connect(self) -> None:
        group = self._sentinels
        sentinel_settings = {**_patience(), "retry": AsyncRetry(NoBackoff(), 0), **group.settings}
        async with AsyncSentinel(group.addresses, sentinel_kwargs=sentinel_settings) as sentinels:  # type: ignore[no-untyped-call]
            for client in sentinels.sentinels:
                check_replies(bound_replies(client))
            try:
                self.host, self.port = await sentinels.discover_master(group.service)
            except AsyncMasterNotFoundError as error:
                raise _primary_not_found(group) from error
        await super()._connect()  # type: ignore[no-untyped-call]


class AsyncPrimarySSLConnection(AsyncPrimaryConnection, SSLConnection):
    """TLS connection to the primary that sentinels name, for an event loop."""


def primary_pool(url: str, **settings: Any) -> redis.ConnectionPool:
    """Return a pool of connections to the primary."""
    group, connection_settings = read_sentinel_url(url)
    kind = PrimarySSLConnection if is_tls(group) else PrimaryConnection
    return redis.ConnectionPool(
        connection_class=kind, sentinels=group, **{**connection_settings, **settings}
    )


def async_primary_pool(url: str, **settings: Any) -> redis.asyncio.ConnectionPool:
    """Return a pool of connections to the primary, for an event loop."""
    group, connection_settings = read_sentinel_url(url)
    kind = AsyncPrimarySSLConnection if is_tls(group) else AsyncPrimaryConnection
    return redis.asyncio.ConnectionPool(
        connection_class=kind, sentinels=group, **{**connection_settings, **settings}
    )


def _primary_not_found(group: SentinelGroup) -> redis.ConnectionError:
    """Return the error for a service without a known primary; redis-py's own text would list its clients."""
    addresses = ", ".join(f"{host}:{port}" for host, port in group.addresses)
    return redis.ConnectionError(f"no sentinel of {addresses} names a primary of {group.service!r}")


def _patience() -> dict[str, Any]:
    return {
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        "protocol": 2,
    }
