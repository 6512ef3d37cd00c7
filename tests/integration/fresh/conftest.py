"""Fixtures for tests of the follower and of a service; each test module says what is `published`."""

from collections.abc import AsyncIterator, Iterator

import pytest

from cache.format.redis_keys import Keyspace
from cache.process.redis_server import RedisServer
from tests.integration.fresh.asking import ServedWorld
from tests.integration.fresh.events_world import EVENTS, EventWorld, until_counted
from tests.integration.fresh.followed_stream import Stream
from tests.integration.serving_app import serving


@pytest.fixture
def stream(redis_server: RedisServer, keyspace: Keyspace) -> Iterator[Stream]:
    followed_stream = Stream(redis_server, keyspace)
    yield followed_stream
    followed_stream.client.close()


@pytest.fixture
async def served_world(published: tuple[EventWorld, str]) -> AsyncIterator[ServedWorld]:
    world, generation = published
    async with serving(world.config, events=EVENTS) as app:
        if world.accepted:
            await until_counted(app, world)
        yield ServedWorld(app, world, generation)
