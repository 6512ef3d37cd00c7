"""The connection of a step to Redis, whose errors say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import redis

from cache.errors import ConfigError
from cache.l2.errors import translated
from cache.l2.sync_clients import open_client


@contextmanager
def connect(url: str | None, timeout_s: float) -> Iterator["redis.Redis"]:
    """A synchronous client; its errors become TierUnavailable or Refused with a remedy."""
    if not url:
        raise ConfigError(
            "no Redis is configured: set REDIS_URL, or run through a command that starts one"
        )
    try:
        with translated(_place(url)):
            client = open_client(
                url,
                protocol=3,
                socket_timeout=timeout_s,
                socket_connect_timeout=min(timeout_s, 5.0),
            )
    except ValueError as error:
        raise ConfigError(f"REDIS_URL cannot be used: {error}") from error
    try:
        with translated(_place(url)):
            yield client
    finally:
        client.close()


def _place(url: str) -> str:
    """A URL without its password."""
    before, at, after = urlsplit(url).netloc.rpartition("@")
    user = before.partition(":")[0]
    netloc = f"{user}@{after}" if at and user else after
    return urlsplit(url)._replace(netloc=netloc, query="").geturl()
