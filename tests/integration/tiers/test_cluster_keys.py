"""Keys, URLs and slots of a Redis Cluster of three masters, without a night."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from redis.crc import key_slot
from redis.exceptions import AskError

from cache.control.control_keys import RegistryRow
from cache.control.states import GenerationState
from cache.errors import ConfigError, TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.cluster import ClusterTier
from cache.l2.commands import LEASE_DONE_PREFIX, LeaseMark, LeaseTake, Overlay, OverlayRead, OverlayWrite, PageRead
from cache.l2.data_plane import Breaker
from cache.l2.sync_clients import connect, group_keys_by_server
from cache.l2.tier import RemoteConfig
from cache.store.artefacts import ArtefactStore
from precompute.bulk.load import page_keys, unlink_pages
from precompute.bulk.reload import reload
from tests.certificates import self_signed
from tests.clusters import TestCluster, cluster
from tests.integration.release_world import LAYOUT, A, World
from tests.integration.tiers.clustered import other_than
from tests.l2_reads import answers_of


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
async def tier(servers: TestCluster, keyspace: Keyspace) -> AsyncIterator[ClusterTier]:
    cluster_tier = ClusterTier(patient(servers), keyspace, Breaker)
    await cluster_tier.nodes.ready()
    yield cluster_tier
    await cluster_tier.aclose()


def test_pages_spread_evenly_over_slots_and_masters(servers: TestCluster, tmp_path: Path, keyspace: Keyspace) -> None:
    with connect(servers.url, 5.0) as client:
        world = World(ArtefactStore(str(tmp_path)), client, keyspace)
        manifest = world.make(A, records=20_000)
        world.control.set_row(A, RegistryRow(GenerationState.BEGUN, 0.0))
        assert reload(world.control, world.store, A) > 0
        names = list(page_keys(keyspace, manifest))
        key_counts = [len(key_indices) for _, key_indices in group_keys_by_server(client, names)]

        assert len(names) == 4_000 and client.exists(*names) == 4_000
        # Binomial, four standard deviations; with a hash tag in the keys all of them would be on one node.
        spread = 4 * np.sqrt(4_000 * (1 / 3) * (2 / 3))
        assert len(key_counts) == 3 and all(abs(key_count - 4_000 / 3) < spread for key_count in key_counts)
        slots = Counter(key_slot(name.encode()) for name in names)
        # Random slots would give 3,552; CRC16 of consecutive numbers gives 3,090 to 4,000, with at most 3 keys in a
        # slot, depending on the namespace.
        assert len(slots) > 3_000 and max(slots.values()) < 8

        assert world.pages() == set(names)
        assert unlink_pages(client, keyspace, manifest) == 4_001
        assert not client.exists(*names)


async def test_tls_is_a_matter_of_the_url(tmp_path: Path, keyspace: Keyspace) -> None:
    with cluster(tmp_path / "cluster", self_signed(tmp_path)) as servers:
        assert servers.url.startswith("rediss+cluster://")
        with connect(servers.url, 5.0) as client:
            world = World(ArtefactStore(str(tmp_path / "store")), client, keyspace)
            manifest = world.load(A)
            names = list(page_keys(keyspace, manifest))
            pages = [client.get(name) for name in names]
        tier = ClusterTier(patient(servers), keyspace)
        await tier.nodes.ready()
        size = 10 * LAYOUT.size_bytes
        reads = [PageRead(A, "score", page, 0, size) for page in range(len(names))]

        assert await answers_of(tier, reads) == pages and None not in pages
        assert len(tier.nodes.tiers) == 3
        await tier.aclose()


def test_the_wrong_kind_of_url_is_refused(servers: TestCluster, redis_url: str) -> None:
    node = f"redis://{servers.nodes[0].address}"
    keys = [f"key-{number}" for number in range(50)]
    with pytest.raises(ConfigError, match=r"redis\+cluster://"):
        opened(node, keys)
    single = redis_url.replace("redis://", "redis+cluster://")
    with pytest.raises(TierUnavailable, match=r"[Cc]luster mode is not enabled"):
        opened(single, keys)
    with pytest.raises(TierUnavailable, match="REDIS_URL") as caught:
        opened("redis+cluster://u:secret@127.0.0.1:1", keys)
    assert "secret" not in str(caught.value)


def opened(url: str, keys: list[str]) -> None:
    with connect(url, 5.0) as client:
        for key in keys:
            client.get(key)


async def test_overlays_and_leases_on_their_own_nodes(tier: ClusterTier) -> None:
    writes = []
    for number in range(30):
        lease_mark = LeaseMark(tier.control.keyspace.lease("g1", "user_topk", f"{number:016x}", b"input"), b"me/1")
        assert await tier.lease(LeaseTake(lease_mark.lease_key, lease_mark.holder_token, 60_000)) is None
        writes.append(OverlayWrite("g1", "user_topk", f"{number:016x}", b"payload", 60.0, lease_mark))

    assert await tier.write_overlays(writes) == [None] * 30

    overlays = await answers_of(tier, [OverlayRead(*write[:3]) for write in writes])
    assert [overlay.overlay_value for overlay in overlays if isinstance(overlay, Overlay)] == [b"payload"] * 30
    for write in writes:
        assert write.lease_mark is not None
        lease_reply = await tier.lease(LeaseTake(write.lease_mark.lease_key, b"you/1", 60_000))
        assert lease_reply == LEASE_DONE_PREFIX + b"me/1"


async def test_an_overlay_on_its_way_is_read_where_it_is(tier: ClusterTier, servers: TestCluster) -> None:
    write = OverlayWrite("g1", "user_topk", "ab", b"payload", 60.0)
    key = tier.control.keyspace.overlay("g1", "user_topk", "ab")
    slot = key_slot(key.encode())
    to = other_than(servers, servers.of_slot(slot))
    owner = servers.open_slot(slot, to)

    assert await tier.write_overlays([write]) == [None]  # ASK: there is no such key yet

    with pytest.raises(AskError):
        owner.client.exists(key)
    (overlay,) = await answers_of(tier, [OverlayRead("g1", "user_topk", "ab")])
    assert isinstance(overlay, Overlay) and overlay.overlay_value == b"payload" and overlay.remaining_ttl_s > 30
    servers.close_slot(slot, to)
    (overlay,) = await answers_of(tier, [OverlayRead("g1", "user_topk", "ab")])
    assert isinstance(overlay, Overlay) and tier.nodes.refreshes >= 1
    assert await answers_of(tier, [PageRead("g1", "user_topk", 0, 0, 8)]) == [None]


def patient(servers: TestCluster) -> RemoteConfig:
    """For a machine on which others are at work."""
    return RemoteConfig(servers.url, deadline_s=10.0, connect_timeout_s=20.0, control_timeout_s=20.0)
