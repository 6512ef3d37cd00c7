"""Connections to the primary: each asks the sentinels where it is, as it opens and as it opens again.

So any pool of redis-py's serves, and whoever loses a connection to a failover meets the new primary with the next one.
"""

from typing import Any, Final

import redis
import redis.asyncio
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import MasterNotFoundError as AsyncMasterNotFoundError
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from cache.l2.sentinel.url import SentinelGroup, is_tls, read_url
from cache.resp.parsers import bound_replies
from cache.resp.reply_shapes import check_replies

ASK_S: Final = 0.5
"""Seconds that one sentinel may take, before the next is asked."""


class PrimaryConnection(redis.Connection):
    """Connection to the primary that sentinels name."""

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
                raise _not_found(group) from error
        return super()._connect()  # type: ignore[no-untyped-call]


class PrimarySSLConnection(PrimaryConnection, redis.SSLConnection):
    """The same, over TLS."""


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
                raise _not_found(group) from error
        await super()._connect()  # type: ignore[no-untyped-call]


class AsyncPrimarySSLConnection(AsyncPrimaryConnection, SSLConnection):
    """The same, over TLS."""


def pool_of(url: str, **settings: Any) -> redis.ConnectionPool:
    """A pool of connections to the primary."""
    group, connection_settings = read_url(url)
    kind = PrimarySSLConnection if is_tls(group) else PrimaryConnection
    return redis.ConnectionPool(
        connection_class=kind, sentinels=group, **{**connection_settings, **settings}
    )


def async_pool_of(url: str, **settings: Any) -> redis.asyncio.ConnectionPool:
    """A pool of connections to the primary, for an event loop."""
    group, connection_settings = read_url(url)
    kind = AsyncPrimarySSLConnection if is_tls(group) else AsyncPrimaryConnection
    return redis.asyncio.ConnectionPool(
        connection_class=kind, sentinels=group, **{**connection_settings, **settings}
    )


def _not_found(group: SentinelGroup) -> redis.ConnectionError:
    """In place of redis-py's text, which holds every client that it asked with."""
    addresses = ", ".join(f"{host}:{port}" for host, port in group.addresses)
    return redis.ConnectionError(f"no sentinel of {addresses} names a primary of {group.service!r}")


def _patience() -> dict[str, Any]:
    return {"socket_timeout": ASK_S, "socket_connect_timeout": ASK_S, "protocol": 2}
