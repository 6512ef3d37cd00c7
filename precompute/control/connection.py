"""The connection of a step to Redis, and what goes wrong there in words that say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import redis

from cache.errors import ConfigError, Refused, TierUnavailable
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


@contextmanager
def translated(place: str = "") -> Iterator[None]:
    """Redis errors in Larder's words, each with its remedy; `place` is the URL to name, without a password."""
    where = f"REDIS_URL {place}" if place else "REDIS_URL"
    try:
        yield
    except redis.exceptions.OutOfMemoryError as error:
        raise Refused(
            "Redis is at maxmemory and refused to store more: raise maxmemory or retire generations, then run the same "
            "command again",
            rule="redis_memory",
        ) from error
    except redis.exceptions.ReadOnlyError as error:
        raise TierUnavailable(
            "Redis is a read-only replica; point REDIS_URL at the primary", reason="connection"
        ) from error
    except (redis.exceptions.NoPermissionError, redis.exceptions.AuthenticationError) as error:
        raise ConfigError(
            f"Redis refused the user of REDIS_URL: {error}; it needs the loader's ACL"
        ) from error
    except redis.exceptions.BusyLoadingError as error:
        raise TierUnavailable(
            f"Redis is still loading its data: {error}; wait for it, then run the step again",
            reason="connection",
        ) from error
    except redis.exceptions.TimeoutError as error:
        raise TierUnavailable(
            f"Redis did not answer in time ({where}): {error}; run the step again, or raise redis_timeout_s",
            reason="timeout",
        ) from error
    except redis.exceptions.ConnectionError as error:
        raise TierUnavailable(
            f"Redis cannot be reached ({where}): {error}; start it or correct REDIS_URL, then run the step again",
            reason="connection",
        ) from error
    except redis.exceptions.AskError as error:
        raise ConfigError(
            f"{where} is a node of a Redis Cluster: write redis+cluster:// (with TLS rediss+cluster://)"
        ) from error
    except redis.exceptions.RedisClusterException as error:
        raise TierUnavailable(
            f"the Redis Cluster cannot be used ({where}): {error}; start its nodes or correct REDIS_URL, then run the "
            "step again",
            reason="connection",
        ) from error
    except redis.exceptions.RedisError as error:
        raise TierUnavailable(
            f"Redis refused a command: {error}; run the step again once that is over",
            reason="connection",
        ) from error
