"""The connection of a step to Redis, whose errors say what to do."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from urllib.parse import urlsplit

import redis

from cache.errors import ConfigError
from cache.l2.errors import translated
from cache.l2.sync_clients import open_client
from precompute.config.settings import NightConfig


@contextmanager
def connect(
    url: str | None, timeout_s: float, variable: str = "REDIS_URL"
) -> Iterator["redis.Redis"]:
    """A synchronous client; its errors become TierUnavailable or Refused with a remedy that names the variable."""
    if not url:
        raise ConfigError(
            f"no Redis is configured: set {variable}, or run through a command that starts one"
        )
    try:
        with translated(_without_password(url), variable):
            client = open_client(
                url,
                protocol=3,
                socket_timeout=timeout_s,
                socket_connect_timeout=min(timeout_s, 5.0),
            )
    except ValueError as error:
        raise ConfigError(f"{variable} cannot be used: {error}") from error
    try:
        with translated(_without_password(url), variable):
            yield client
    finally:
        client.close()


def connect_events(config: NightConfig) -> AbstractContextManager["redis.Redis"]:
    """A client of the Redis that events lie in."""
    variable = "LARDER_EVENTS_URL" if config.events_url else "REDIS_URL"
    return connect(config.events_redis, config.redis_timeout_s, variable)


def _without_password(url: str) -> str:
    """A URL without its password."""
    credentials, at, after = urlsplit(url).netloc.rpartition("@")
    user = credentials.partition(":")[0]
    netloc = f"{user}@{after}" if at and user else after
    return urlsplit(url)._replace(netloc=netloc, query="").geturl()
