"""A Redis of events with an append-only file, one for each file of tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.events.durable_redis import DurableRedis, durable_redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DurableRedis]:
    with durable_redis(tmp_path_factory.mktemp("durable")) as running:
        yield running


@pytest.fixture
def client(server: DurableRedis) -> Iterator[Any]:
    with server.client() as connection:
        yield connection
