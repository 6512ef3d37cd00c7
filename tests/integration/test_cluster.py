"""A whole night into a Redis Cluster of three masters, and answers out of it, also while it is being mended."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.crc import key_slot
from redis.exceptions import AskError

from cache.artefacts import ArtefactStore, open_generation, read_manifest
from cache.breaker import Breaker
from cache.cluster import ClusterTier
from cache.commands import Overlay, OverlayRead, OverlayWrite, PageRead
from cache.directory import Directory
from cache.keys import Keyspace, hash_id
from cache.lease import DONE, LeaseTake, Mark
from cache.releases import newest_release
from cache.remote import RemoteConfig
from cache.servers import by_server
from precompute import pipeline
from precompute.bulk.load import page_keys, unlink_pages
from precompute.bulk.reload import damaged, reload
from precompute.config import NightConfig
from precompute.releases.control import Row, connect
from precompute.releases.registry import open_releases
from precompute.releases.states import State
from precompute.sections import GovernorConfig
from tests.clusters import Node, TestCluster, cluster
from tests.integration.nights import (
    NEXT,
    UNTIL,
    histories,
    prepare,
    publish_night,
    roll_back,
    top_lists,
)
from tests.integration.release_world import A, World
from tests.integration.serving_app import Running, eventually, serving

USERS = 900
OUTAGES = {"l2_down", "l2_timeout", "breaker_open", "page_missing"}
CONF = Path(__file__).parents[2] / "infra/redis.conf"


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
    """Without an L1, so that every answer is asked for."""
    async with serving(night, l1_bytes=1, breaker_cooldown_s=0.1) as running:
        yield running


@pytest.fixture
async def tier(servers: TestCluster, keyspace: Keyspace) -> AsyncIterator[ClusterTier]:
    found = ClusterTier(RemoteConfig(servers.url, deadline_s=2.0), keyspace, Breaker)
    await found.nodes.ready()
    yield found
    await found.aclose()


def live(night: NightConfig) -> str:
    release = newest_release(night.store())
    assert release is not None
    return release.generation


async def ask(app: Running, users: list[str]) -> dict[str, dict[str, Any]]:
    """Every user is answered, from one generation, with a source, and with a reason where it is not from L2."""
    body = await app.post("/v1/lookup/user_topk", {"entities": users})
    answers = {each["id"]: each for each in body["answers"]}
    assert list(answers) == users
    for each in answers.values():
        assert each["source"] == "l2" or each["reason"] in OUTAGES, each
    return answers


async def all_from_l2(app: Running, users: list[str]) -> bool:
    return {each["source"] for each in (await ask(app, users)).values()} == {"l2"}


def page_key_of(night: NightConfig, user: str) -> str:
    """The page that holds a user's list."""
    manifest, root = open_generation(night.store(), live(night))
    table = manifest.tables["user_topk"]
    directory = Directory.open(root, manifest.entity_sets[table.entity])
    page, _ = table.locate(*directory.place(directory.find(hash_id(user.encode(), directory.seed))))
    return night.keyspace().page(manifest.generation, "user_topk", page)


def users_of(night: NightConfig) -> list[str]:
    return sorted(histories(night))


def test_pages_spread_evenly_over_slots_and_masters(
    servers: TestCluster, tmp_path: Path, keyspace: Keyspace
) -> None:
    with connect(servers.url, 5.0) as client:
        world = World(ArtefactStore(str(tmp_path)), client, keyspace)
        manifest = world.make(A, records=20_000)
        world.control.set_row(A, Row(State.BEGUN, 0.0))
        assert reload(world.control, keyspace, world.store, A) > 0
        names = list(page_keys(keyspace, manifest))
        held = [len(places) for _, places in by_server(client, names)]

        assert len(names) == 4_000 and client.exists(*names) == 4_000
        # Binomial, four standard deviations; a hash tag in the keys would put all of them on one node.
        spread = 4 * np.sqrt(4_000 * (1 / 3) * (2 / 3))
        assert len(held) == 3 and all(abs(each - 4_000 / 3) < spread for each in held)
        slots = Counter(key_slot(name.encode()) for name in names)
        assert len(slots) > 3_400 and max(slots.values()) < 8

        assert world.pages() == set(names)
        assert unlink_pages(client, keyspace, manifest) == 4_001
        assert not client.exists(*names)


async def test_a_batch_from_all_masters_is_what_the_night_computed(
    app: Running, night: NightConfig, servers: TestCluster
) -> None:
    users = users_of(night)
    owners = {servers.of_slot(key_slot(page_key_of(night, user).encode())) for user in users[:50]}

    answers = await ask(app, users)

    assert {name: tuple(each["items"]) for name, each in answers.items()} == dict(
        top_lists(night, live(night), users)
    )
    assert {each["source"] for each in answers.values()} == {"l2"}
    assert len(owners) == 3
    one = await app.get(f"/v1/lookup/user_topk/{users[0]}")
    assert one["source"] == "l2" and one["items"] == answers[users[0]]["items"]


async def test_replicas_are_seen_and_a_roll_back_reaches_them(
    app: Running, night: NightConfig
) -> None:
    users, before = users_of(night)[:100], live(night)
    with open_releases(night) as releases:

        async def beating() -> bool:
            return [each.serving for each in releases.control.replicas()] == [before]

        assert await eventually(beating)

    now = roll_back(night)

    async def moved() -> bool:
        return {each["generation"] for each in (await ask(app, users)).values()} == {now}

    assert now != before and await eventually(moved)
    answers = await ask(app, users)
    assert {name: tuple(each["items"]) for name, each in answers.items()} == dict(
        top_lists(night, now, users)
    )


@pytest.mark.parametrize("which", ["a master of pages", "the master of the control keys"])
async def test_a_killed_master_costs_only_its_own_keys(
    app: Running, night: NightConfig, servers: TestCluster, which: str
) -> None:
    users = users_of(night)
    home = servers.of_slot(key_slot(night.keyspace().live.encode()))
    victim = home if which != "a master of pages" else other_than(servers, home)
    lost = {
        user
        for user in users
        if servers.of_slot(key_slot(page_key_of(night, user).encode())) is victim
    }
    assert 0 < len(lost) < len(users) and await all_from_l2(app, users)

    victim.kill()
    for _ in range(20):
        answers = await ask(app, users)
        assert {name for name, each in answers.items() if each["source"] != "l2"} == lost
    if victim is home:

        async def told() -> bool:
            return bool((await app.get(f"/v1/lookup/user_topk/{users[0]}"))["stale"])

        assert await eventually(told, 30.0)
    victim.start()  # empty: no node keeps anything on disk but what it knows of the others

    async def back() -> bool:
        return bool(servers.well())

    assert await eventually(back, 30.0)
    restored = pipeline.restore(replace(night, governor=GovernorConfig(readers="always")))

    async def healed() -> bool:
        return await all_from_l2(app, users)

    assert restored["generation"] == live(night) and await eventually(healed, 30.0)
    with open_releases(night) as releases:
        assert not damaged(releases.control, releases.control.keys, night.store(), live(night))


def other_than(servers: TestCluster, home: Node) -> Node:
    return next(node for node in servers.nodes if node is not home)


async def test_reads_follow_a_slot_on_its_way(
    app: Running, night: NightConfig, servers: TestCluster
) -> None:
    users = users_of(night)
    slot = key_slot(page_key_of(night, users[0]).encode())
    to = other_than(servers, servers.of_slot(slot))

    owner = servers.open_slot(slot, to)
    assert await all_from_l2(app, users)
    assert servers.move_keys(slot, owner, to) > 0
    for _ in range(3):  # ASK, each time: the slot is still the old owner's
        assert await all_from_l2(app, users)
    servers.close_slot(slot, to)
    for _ in range(3):  # MOVED, once
        assert await all_from_l2(app, users)

    assert (await app.counted("larder_breaker_state"))[()] == 0
    assert servers.of_slot(slot) is to
    manifest = read_manifest(night.store(), live(night))
    with open_releases(night) as releases:
        assert releases.control.client.exists(*page_keys(night.keyspace(), manifest)) > 0


async def test_the_control_keys_may_move(
    app: Running, night: NightConfig, servers: TestCluster
) -> None:
    slot = key_slot(night.keyspace().live.encode())
    to = other_than(servers, servers.of_slot(slot))

    owner = servers.open_slot(slot, to)
    servers.move_keys(slot, owner, to)
    servers.close_slot(slot, to)
    before = live(night)
    now = publish_night(night, "2026-01-31T00:00:00Z")

    async def moved() -> bool:
        answer = await app.get(f"/v1/lookup/user_topk/{users_of(night)[0]}")
        return bool(answer["generation"] == now)

    assert now != before and await eventually(moved)


async def test_the_users_of_redis_conf_suffice(night: NightConfig, servers: TestCluster) -> None:
    lines = [line for line in CONF.read_text().splitlines() if line.startswith("user larder-")]
    for line in lines:
        rules = line.replace("default", night.namespace).split()[1:]
        rules = [">secret" if each.startswith("#") else each for each in rules]
        for node in servers.nodes:
            node.client.execute_command("ACL SETUSER", *joined(rules))
    loading = replace(night, redis_url=servers.url.replace("//", "//larder-loader:secret@"))
    reading = replace(night, redis_url=servers.url.replace("//", "//larder-reader:secret@"))
    users = users_of(night)

    assert pipeline.restore(loading)["generation"] == live(night)
    pipeline.load(loading, {"generation": live(night)})
    publish_night(loading, "2026-02-01T00:00:00Z")
    pipeline.retire(loading)
    async with serving(reading, l1_bytes=1) as app:

        async def whole() -> bool:
            return await all_from_l2(app, users)

        assert await eventually(whole)
        with open_releases(loading) as releases:

            async def beating() -> bool:
                return len(releases.control.replicas()) == 1

            assert await eventually(beating)


def joined(rules: list[str]) -> list[str]:
    """A selector, in brackets, is one rule."""
    at = next((n for n, each in enumerate(rules) if each.startswith("(")), len(rules))
    return [*rules[:at], *([" ".join(rules[at:])] if rules[at:] else [])]


async def test_overlays_and_leases_on_their_own_nodes(tier: ClusterTier) -> None:
    writes = []
    for number in range(30):
        mark = Mark(tier.keyspace.lease("g1", "user_topk", f"{number:016x}", b"input"), b"me/1")
        assert await tier.lease(LeaseTake(mark.key, mark.token, 60_000)) is None
        writes.append(OverlayWrite("g1", "user_topk", f"{number:016x}", b"payload", 60.0, mark))

    assert await tier.write_overlays(writes) == [None] * 30

    found = await tier.read([OverlayRead(*each[:3]) for each in writes])
    assert [each.payload for each in found if isinstance(each, Overlay)] == [b"payload"] * 30
    for each in writes:
        assert each.mark is not None
        told = await tier.lease(LeaseTake(each.mark.key, b"you/1", 60_000))
        assert told == DONE + b"me/1"


async def test_an_overlay_on_its_way_is_read_where_it_is(
    tier: ClusterTier, servers: TestCluster
) -> None:
    write = OverlayWrite("g1", "user_topk", "ab", b"payload", 60.0)
    key = tier.keyspace.overlay("g1", "user_topk", "ab")
    slot = key_slot(key.encode())
    to = other_than(servers, servers.of_slot(slot))
    owner = servers.open_slot(slot, to)

    assert await tier.write_overlays([write]) == [None]  # ASK: there is no such key yet

    with pytest.raises(AskError):
        owner.client.exists(key)
    (found,) = await tier.read([OverlayRead("g1", "user_topk", "ab")])
    assert isinstance(found, Overlay) and found.payload == b"payload" and found.ttl_s > 30
    servers.close_slot(slot, to)
    (found,) = await tier.read([OverlayRead("g1", "user_topk", "ab")])
    assert isinstance(found, Overlay) and tier.nodes.refreshes >= 1
    assert await tier.read([PageRead("g1", "user_topk", 0, 0, 8)]) == [None]
