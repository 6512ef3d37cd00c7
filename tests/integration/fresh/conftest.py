"""Fixtures of the follower's tests."""

from collections.abc import Iterator

import pytest

from cache.format.redis_keys import Keyspace
from cache.process.redis_server import RedisServer
from tests.integration.fresh.followed_stream import Stream


@pytest.fixture
def stream(redis_server: RedisServer, keyspace: Keyspace) -> Iterator[Stream]:
    found = Stream(redis_server, keyspace)
    yield found
    found.client.close()
