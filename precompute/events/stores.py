"""Connection to the Redis that holds the event stream."""

from contextlib import AbstractContextManager

import redis

from cache.l2.sync_clients import connect
from precompute.config.settings import NightConfig


def connect_events(config: NightConfig) -> AbstractContextManager["redis.Redis"]:
    """Open a client of the Redis that holds the event stream."""
    url_variable = "LARDER_EVENTS_URL" if config.events_url else "REDIS_URL"
    return connect(config.events_redis_url, config.redis_timeout_s, url_variable)
