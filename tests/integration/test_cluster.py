"""A whole night into a Redis Cluster of three masters, and answers out of it, also while it is being mended."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from redis.crc import key_slot

from cache.artefacts import open_generation
from cache.releases import newest_release
from cache.servers import masters
from precompute import commands, pipeline
from precompute.bulk.load import page_keys
from precompute.config import NightConfig
from precompute.releases.registry import open_releases
from tests.clusters import TestCluster, cluster
from tests.integration.nights import NEXT, UNTIL, histories, prepare, publish_night, top_lists
from tests.integration.serving_app import Running, eventually, serving

USERS = 900


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, servers: TestCluster) -> NightConfig:
    """Two generations, the second one live; pages so small that there are hundreds."""
    config = prepare(tmp_path_factory.mktemp("night"), servers.url, users=USERS)
    config = replace(config, page_bytes=4096)
    publish_night(config, UNTIL)
    publish_night(config, NEXT)
    return config


@pytest.fixture
async def app(night: NightConfig) -> AsyncIterator[Running]:
    async with serving(night, l1_bytes=0) as running:
        yield running


def live(night: NightConfig) -> str:
    release = newest_release(night.store())
    assert release is not None
    return release.generation


def test_pages_spread_evenly(night: NightConfig, servers: TestCluster) -> None:
    manifest = open_generation(night.store(), live(night)).manifest
    names = list(page_keys(night.keyspace(), manifest))
    held = Counter(servers.of_slot(key_slot(name.encode())).port for name in names)

    assert len(names) > 150
    assert sum(node.client.exists(name) for name in names for node in servers.nodes
               if node.port == servers.of_slot(key_slot(name.encode())).port) == len(names)  # fmt: skip
    # Binomial, five standard deviations: a hash tag in the key would put all on one.
    spread = 5 * np.sqrt(len(names) * (1 / 3) * (2 / 3))
    assert all(abs(held[node.port] - len(names) / 3) < spread for node in servers.nodes)
    assert len({key_slot(name.encode()) for name in names}) > 0.95 * len(names)
