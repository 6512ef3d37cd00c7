"""Stores of all who read one stream of events, and the Redis that the stream lies in."""

from contextlib import AbstractContextManager

import redis

from cache.l2.sync_clients import connect
from precompute.config.settings import NightConfig


def connect_events(config: NightConfig) -> AbstractContextManager["redis.Redis"]:
    """A client of the Redis that events lie in."""
    variable = "LARDER_EVENTS_URL" if config.events_url else "REDIS_URL"
    return connect(config.events_redis, config.redis_timeout_s, variable)
