"""A whole night into a Redis Cluster of three masters, and answers out of it, also while it is being mended."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.crc import key_slot

from cache.config.night import GovernorConfig
from cache.store.artefacts import read_manifest
from precompute.bulk.load import page_keys
from precompute.bulk.reload import find_damaged_pages
from precompute.config.settings import NightConfig
from precompute.releases.recovery import restore
from precompute.releases.release_log import open_releases
from precompute.steps import load, retire
from serving.quality.monitor import QualityMonitor
from tests.attached import attached
from tests.clusters import TestCluster, cluster
from tests.integration.nights import DATA_UNTIL, NEXT, prepare, publish_night, roll_back, top_lists
from tests.integration.serving_app import Running, eventually, serving
from tests.integration.tiers.clustered import all_from_l2, live, look_up_users, other_than, page_key_of, users_of

USERS = 900
CONF = Path(__file__).parents[3] / "infra/redis.conf"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, servers: TestCluster) -> NightConfig:
    """Two generations, the second one live; pages so small that there are hundreds."""
    config = prepare(tmp_path_factory.mktemp("night"), servers.url, users=USERS)
    config = replace(config, page_bytes=4096)
    publish_night(config, DATA_UNTIL)
    publish_night(config, NEXT)
    return config


@pytest.fixture
async def app(night: NightConfig) -> AsyncIterator[Running]:
    """Without an L1, so that every answer is asked for."""
    async with serving(night, l1_bytes=1, breaker_cooldown_s=0.1) as running:
        yield running


async def test_a_batch_from_all_masters_is_what_the_night_computed(
    app: Running, night: NightConfig, servers: TestCluster
) -> None:
    users = users_of(night)
    owners = {servers.of_slot(key_slot(page_key_of(night, user).encode())) for user in users[:50]}

    answers = await look_up_users(app, users)

    assert {name: tuple(answer["items"]) for name, answer in answers.items()} == dict(
        top_lists(night, live(night), users)
    )
    assert {answer["source"] for answer in answers.values()} == {"l2"}
    assert len(owners) == 3
    single_answer = await app.get(f"/v1/lookup/user_topk/{users[0]}")
    assert single_answer["source"] == "l2" and single_answer["items"] == answers[users[0]]["items"]


async def test_pages_of_all_masters_can_be_looked_at(app: Running, night: NightConfig, servers: TestCluster) -> None:
    users = users_of(night)[:20]
    owners = {servers.of_slot(key_slot(page_key_of(night, user).encode())) for user in users}

    explanations = [await app.get(f"/v1/explain/user_topk/{user}") for user in users]

    assert len(owners) == 3 and {explanation["page"]["state"] for explanation in explanations} == {"ok"}


async def test_replicas_are_seen_and_a_roll_back_reaches_them(app: Running, night: NightConfig) -> None:
    users, generation_before = users_of(night)[:100], live(night)
    with open_releases(night) as releases:

        async def beating() -> bool:
            return [replica.served_generation for replica in releases.control.replicas()] == [generation_before]

        assert await eventually(beating)

    generation_after = roll_back(night)

    async def moved() -> bool:
        return {answer["generation"] for answer in (await look_up_users(app, users)).values()} == {generation_after}

    assert generation_after != generation_before and await eventually(moved)
    answers = await look_up_users(app, users)
    assert {name: tuple(answer["items"]) for name, answer in answers.items()} == dict(
        top_lists(night, generation_after, users)
    )


@pytest.mark.parametrize("victim_role", ["a master of pages", "the master of the control keys"])
async def test_a_killed_master_costs_only_its_own_keys(
    app: Running, night: NightConfig, servers: TestCluster, victim_role: str
) -> None:
    users = users_of(night)
    home = servers.of_slot(key_slot(night.keyspace().live.encode()))
    victim = home if victim_role != "a master of pages" else other_than(servers, home)
    affected_users = {user for user in users if servers.of_slot(key_slot(page_key_of(night, user).encode())) is victim}

    async def ready() -> bool:
        return await all_from_l2(app, users)

    assert 0 < len(affected_users) < len(users) and await eventually(ready)

    victim.kill()
    for _ in range(20):
        answers = await look_up_users(app, users)
        assert {name for name, answer in answers.items() if answer["source"] != "l2"} == affected_users
    if victim is home:

        async def is_marked_stale() -> bool:
            return bool((await app.get(f"/v1/lookup/user_topk/{users[0]}"))["stale"])

        assert await eventually(is_marked_stale, 30.0)
    victim.start()  # empty: no node keeps anything on disk but what it knows of the others

    async def back() -> bool:
        return bool(servers.well())

    assert await eventually(back, 30.0)
    restored = restore(replace(night, governor=GovernorConfig(readers="always")))

    async def healed() -> bool:
        return await all_from_l2(app, users)

    assert restored["generation"] == live(night) and await eventually(healed, 30.0)
    with open_releases(night) as releases:
        assert not find_damaged_pages(releases.control, night.store(), live(night))


async def test_a_master_that_hangs_costs_only_its_own_keys(
    app: Running, night: NightConfig, servers: TestCluster
) -> None:
    users = users_of(night)
    victim = other_than(servers, servers.of_slot(key_slot(night.keyspace().live.encode())))
    owners = {user: servers.of_slot(key_slot(page_key_of(night, user).encode())) for user in users}
    affected_users = {user for user, owner in owners.items() if owner is victim}

    with victim.frozen():
        for _ in range(8):
            answers = await look_up_users(app, users)
            assert {name for name, answer in answers.items() if answer["source"] != "l2"} == affected_users
        assert (await app.scrape_samples("larder_breaker_state"))[()] > 0, "its own; the others' are shut"

    async def healed() -> bool:
        return await all_from_l2(app, users)

    assert await eventually(healed, 30.0)

    async def back() -> bool:
        return bool(servers.well())

    assert await eventually(back, 30.0)


async def test_reads_follow_a_slot_on_its_way(app: Running, night: NightConfig, servers: TestCluster) -> None:
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

    assert (await app.scrape_samples("larder_breaker_state"))[()] == 0
    assert servers.of_slot(slot) is to
    manifest = read_manifest(night.store(), live(night))
    with open_releases(night) as releases:
        assert releases.control.client.exists(*page_keys(night.keyspace(), manifest)) > 0


async def test_the_control_keys_may_move(app: Running, night: NightConfig, servers: TestCluster) -> None:
    slot = key_slot(night.keyspace().live.encode())
    to = other_than(servers, servers.of_slot(slot))

    owner = servers.open_slot(slot, to)
    servers.move_keys(slot, owner, to)
    servers.close_slot(slot, to)
    generation_before = live(night)
    generation_after = publish_night(night, "2026-01-31T00:00:00Z")

    async def moved() -> bool:
        answer = await app.get(f"/v1/lookup/user_topk/{users_of(night)[0]}")
        return bool(answer["generation"] == generation_after)

    assert generation_after != generation_before and await eventually(moved)


async def test_the_users_of_redis_conf_suffice(night: NightConfig, servers: TestCluster) -> None:
    lines = [line for line in CONF.read_text().splitlines() if line.startswith("user larder-")]
    for line in lines:
        rules = line.replace("default", night.namespace).split()[1:]
        rules = [">secret" if rule.startswith("#") else rule for rule in rules]
        for node in servers.nodes:
            node.client.execute_command("ACL SETUSER", *joined(rules))
    loading = replace(night, redis_url=servers.url.replace("//", "//larder-loader:secret@"))
    reading = replace(night, redis_url=servers.url.replace("//", "//larder-reader:secret@"))
    users = users_of(night)

    assert restore(loading)["generation"] == live(night)
    load.run(loading, {"generation": live(night)})
    publish_night(loading, "2026-02-01T00:00:00Z")
    retire.run(loading)
    async with serving(reading, l1_bytes=1, figures_s=0.1, quality_s=0.1) as app:

        async def is_all_from_l2() -> bool:
            return await all_from_l2(app, users)

        async def is_memory_counted() -> bool:
            return bool(await app.scrape_samples("larder_redis_memory_used_bytes"))

        assert await eventually(is_all_from_l2)
        assert await eventually(is_memory_counted)
        await app.get("/v1/lookup/user_topk/stranger")

        async def is_usage_reported() -> bool:
            report = attached(app.service, QualityMonitor).to_json() or {}
            return report.get("worklist") == 1 and abs((report["read_share"] or 0) - expected_share) < 0.02

        manifest = read_manifest(night.store(), live(night))
        counts = {name: entity_set.count for name, entity_set in manifest.entity_sets.items()}
        tables = manifest.tables.values()
        expected_share = len(users) / sum(counts[table.entity] for table in tables)
        assert await eventually(is_usage_reported)
        with open_releases(loading) as releases:

            async def beating() -> bool:
                return len(releases.control.replicas()) == 1

            assert await eventually(beating)


def joined(rules: list[str]) -> list[str]:
    """Each selector, in brackets, is one rule."""
    joined_rules: list[str] = []
    for rule in rules:
        if joined_rules and joined_rules[-1].startswith("(") and not joined_rules[-1].endswith(")"):
            joined_rules[-1] += f" {rule}"
        else:
            joined_rules.append(rule)
    return joined_rules


async def test_the_dashboard_is_whole_and_adds_up_the_memory_of_all_masters(
    night: NightConfig, servers: TestCluster
) -> None:
    async with serving(night, dashboard_s=0.1) as first_app, serving(night, dashboard_s=0.1) as second_app:
        await first_app.post("/v1/lookup/user_topk", {"entities": users_of(night)[:10]})

        async def is_whole() -> bool:
            body = await second_app.get("/dashboard/data")
            return bool(body["whole"] and body["totals"]["entities"] == 10)

        assert await eventually(is_whole)
        body = await second_app.get("/dashboard/data")

    assert len(body["replicas"]) == 2 and body["generations"][0]["state"] == "live"
    assert body["redis"]["used_bytes"] > 3 * 500_000 and body["redis"]["policy"] == "volatile-lru"
