"""Redis under Sentinel: URLs with sentinels, and connections that ask them for the primary's address when they open."""

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
from cache.l2.url_options import SENTINEL_OPTIONS

SENTINEL_URL_SCHEMES: Final = ("redis+sentinel://", "rediss+sentinel://")
SENTINEL_PORT: Final = 26_379
"""Port of a sentinel whose address has none."""

SENTINEL_TIMEOUT_S: Final = 0.5
"""Seconds to wait for one sentinel before the next one is asked."""


@dataclass(frozen=True, slots=True)
class SentinelGroup:
    """Sentinels of one service; `connection_settings` are those of redis-py's connections to them."""

    sentinel_addresses: tuple[tuple[str, int], ...]
    service_name: str
    connection_settings: dict[str, Any] = field(default_factory=dict, repr=False)
    """Connection settings, which may contain the sentinels' password."""


def is_sentinel(url: str) -> bool:
    """Return whether a URL lists sentinels."""
    return url.startswith(SENTINEL_URL_SCHEMES)


def read_sentinel_url(url: str) -> tuple[SentinelGroup, dict[str, Any]]:
    """Return the sentinels in a URL, and redis-py's settings for connections to the primary.

    A URL is `redis+sentinel://user:password@host:port,host:port/service/database`. With `rediss+sentinel://` both kinds
    of connections use TLS, with the same options. Raises ConfigError; its message contains no part of the URL, since a
    password that is not percent-encoded may extend into any part.
    """
    try:
        return _parse_sentinel_url(url)
    except ValueError:  # Not chained: the text of an error of urllib or redis-py may contain the password.
        raise _url_error("the URL of a Redis under Sentinel, or an option after its ?, cannot be read") from None


def _parse_sentinel_url(url: str) -> tuple[SentinelGroup, dict[str, Any]]:
    scheme, _, location = url.partition("+sentinel://")
    url_parts = urlsplit(f"{scheme}://{location}")
    user, at_sign, host_list = url_parts.netloc.rpartition("@")
    service, _, database = url_parts.path.strip("/").partition("/")
    if not service:
        raise _url_error(
            "the URL of a Redis under Sentinel must end with the name of its service, redis+sentinel://host:port/SERVICE"
        )
    if "@" in service or (database and not database.isdecimal()):
        raise _url_error(
            "the URL of a Redis under Sentinel has no database number after its service, or an @ in its name"
        )
    url_options = parse_qsl(url_parts.query)
    primary_url_parts = url_parts._replace(
        netloc=f"{user}{at_sign}{host_list.partition(',')[0]}",
        path=f"/{database}",
        query=urlencode([option for option in url_options if option[0] not in SENTINEL_OPTIONS]),
    )
    addresses = tuple(
        _parse_sentinel_address(host, host_number) for host_number, host in enumerate(host_list.split(","), 1)
    )
    primary_settings: dict[str, Any] = dict(parse_url(primary_url_parts.geturl()))  # type: ignore[no-untyped-call]
    tls_settings = {
        setting_name: setting_value
        for setting_name, setting_value in primary_settings.items()
        if setting_name.startswith("ssl_")
    }
    if scheme == "rediss":
        tls_settings["ssl"] = True
    sentinel_credentials = {
        setting_name.removeprefix("sentinel_"): setting_value
        for setting_name, setting_value in url_options
        if setting_name in SENTINEL_OPTIONS
    }
    for setting_name in ("host", "port", "connection_class"):
        primary_settings.pop(setting_name, None)
    return SentinelGroup(addresses, unquote(service), {**tls_settings, **sentinel_credentials}), primary_settings


def is_tls(group: SentinelGroup) -> bool:
    """Whether the connections to sentinels and primary use TLS."""
    return bool(group.connection_settings.get("ssl"))


def _parse_sentinel_address(host_and_port: str, address_number: int) -> tuple[str, int]:
    try:
        address_parts = urlsplit(f"redis://{host_and_port}")
        host, port = address_parts.hostname, address_parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise _url_error(f"address {address_number} in the URL of a Redis under Sentinel is not host:port")
    return host, port or SENTINEL_PORT


def _url_error(message: str) -> ConfigError:
    remedy = "percent-encode / # ? [ ] @ in a password (urllib.parse.quote), if it has any"
    return ConfigError(f"{message}: {remedy}", field="redis_url")


class PrimaryConnection(redis.Connection):
    """Connection to the primary: asks the sentinels for its address each time it opens.

    This works with every pool of redis-py; after a failover the next connection goes to the new primary.
    """

    def __init__(self, *, sentinels: SentinelGroup, **settings: Any) -> None:
        self._sentinels = sentinels
        super().__init__(**settings)  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        group = self._sentinels
        sentinel_settings = {**_timeout_settings(), "retry": Retry(NoBackoff(), 0), **group.connection_settings}
        # One instance per connection: redis-py's Sentinel reorders its sentinels while it asks them and is not
        # thread-safe.
        with Sentinel(group.sentinel_addresses, sentinel_kwargs=sentinel_settings) as sentinels:  # type: ignore[no-untyped-call]
            for client in sentinels.sentinels:
                check_replies(bound_replies(client))
            try:
                self.host, self.port = sentinels.discover_master(group.service_name)
            except MasterNotFoundError as error:
                raise _primary_not_found(group) from error
        return super()._connect()  # type: ignore[no-untyped-call]


class PrimarySSLConnection(PrimaryConnection, redis.SSLConnection):
    """TLS connection to the primary that the sentinels name."""


class AsyncPrimaryConnection(Connection):
    """asyncio connection to the primary that the sentinels name."""

    def __init__(self, *, sentinels: SentinelGroup, **settings: Any) -> None:
        self._sentinels = sentinels
        super().__init__(**settings)

    async def _connect(self) -> None:
        group = self._sentinels
        sentinel_settings = {**_timeout_settings(), "retry": AsyncRetry(NoBackoff(), 0), **group.connection_settings}
        async with AsyncSentinel(group.sentinel_addresses, sentinel_kwargs=sentinel_settings) as sentinels:  # type: ignore[no-untyped-call]
            for client in sentinels.sentinels:
                check_replies(bound_replies(client))
            try:
                self.host, self.port = await sentinels.discover_master(group.service_name)
            except AsyncMasterNotFoundError as error:
                raise _primary_not_found(group) from error
        await super()._connect()  # type: ignore[no-untyped-call]


class AsyncPrimarySSLConnection(AsyncPrimaryConnection, SSLConnection):
    """asyncio TLS connection to the primary that the sentinels name."""


def primary_pool(url: str, **settings: Any) -> redis.ConnectionPool:
    """Return a pool of connections to the primary."""
    group, connection_settings = read_sentinel_url(url)
    connection_class = PrimarySSLConnection if is_tls(group) else PrimaryConnection
    return redis.ConnectionPool(
        connection_class=connection_class, sentinels=group, **{**connection_settings, **settings}
    )


def async_primary_pool(url: str, **settings: Any) -> redis.asyncio.ConnectionPool:
    """Return a pool of asyncio connections to the primary."""
    group, connection_settings = read_sentinel_url(url)
    connection_class = AsyncPrimarySSLConnection if is_tls(group) else AsyncPrimaryConnection
    return redis.asyncio.ConnectionPool(
        connection_class=connection_class, sentinels=group, **{**connection_settings, **settings}
    )


def _primary_not_found(group: SentinelGroup) -> redis.ConnectionError:
    """Return the error for a service without a known primary; redis-py's own text would list client objects."""
    addresses = ", ".join(f"{host}:{port}" for host, port in group.sentinel_addresses)
    return redis.ConnectionError(f"no sentinel of {addresses} names a primary of {group.service_name!r}")


def _timeout_settings() -> dict[str, Any]:
    return {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S, "protocol": 2}
