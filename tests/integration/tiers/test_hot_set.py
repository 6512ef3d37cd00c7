"""The sketch of recent requests in a real Redis, and replicas that read ahead from it."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.tier import RemoteConfig, RemoteTier
from cache.store.blocklist import change_blocklist
from cache.usage.hot_keys import HOT_LIFE_S, MEMBERS_MAX, HotKeyReport, SharedHotKeys
from precompute.config.settings import NightConfig
from tests.integration.nights import NEXT, build_night, build_verified, histories, publish
from tests.integration.serving_app import Running, eventually, serving

USERS = 40


@pytest.fixture
async def tier(redis_url: str, keyspace: Keyspace) -> AsyncIterator[RemoteTier]:
    tier = RemoteTier(RemoteConfig(redis_url, deadline_s=5.0), keyspace)
    yield tier
    await tier.aclose()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def night(tmp_path: Path, redis_url: str) -> NightConfig:
    return build_night(tmp_path / "night", redis_url, users=120, items=60)


def list_known_users(night: NightConfig) -> list[str]:
    return sorted(histories(night))[:USERS]


async def look_up_sources(app: Running, users: list[str]) -> list[str]:
    """Where the answers came from."""
    body = {"entities": [{"id": user} for user in users], "k": 10}
    return [answer["source"] for answer in (await app.post("/v1/lookup/user_topk", body))["answers"]]


async def event(app: Running, name: str) -> float:
    return (await app.scrape_samples(f"larder_{name}_total"))[()]


async def test_reports_add_up_over_replicas_and_hours(tier: RemoteTier, client: redis.asyncio.Redis) -> None:
    await SharedHotKeys(tier.control).add_report(HotKeyReport(9, [(("t", b"a"), 3)]))
    await SharedHotKeys(tier.control).add_report(HotKeyReport(10, [(("t", b"a"), 1), (("t", b"b:c"), 2)]))
    await SharedHotKeys(tier.control).add_report(HotKeyReport(10, [(("u", b"\xff"), 9)]))

    assert await SharedHotKeys(tier.control).fetch_names(10) == [("u", b"\xff"), ("t", b"a"), ("t", b"b:c")]
    assert await SharedHotKeys(tier.control).fetch_names(12) == []
    for hour in (9, 10):
        assert HOT_LIFE_S - 10 < await client.ttl(tier.control.keyspace.hot_names(hour)) <= HOT_LIFE_S


async def test_an_hour_is_bounded_and_keeps_what_was_asked_most(tier: RemoteTier, client: redis.asyncio.Redis) -> None:
    await SharedHotKeys(tier.control).add_report(HotKeyReport(1, [(("t", b"hot"), 5)]))
    for start in range(0, MEMBERS_MAX + 500, 500):
        counts = [(("t", b"%d" % number), 1) for number in range(start, start + 500)]
        await SharedHotKeys(tier.control).add_report(HotKeyReport(1, counts))

        assert await client.zcard(tier.control.keyspace.hot_names(1)) <= MEMBERS_MAX
    hot_names = await SharedHotKeys(tier.control).fetch_names(1)
    assert hot_names[0] == ("t", b"hot") and len(hot_names) == len(set(hot_names)) == MEMBERS_MAX


async def test_what_must_go_goes_from_both_hours(tier: RemoteTier) -> None:
    for hour in (3, 4):
        await SharedHotKeys(tier.control).add_report(HotKeyReport(hour, [(("t", b"a"), 3), (("t", b"b"), 1)]))

    await SharedHotKeys(tier.control).add_report(HotKeyReport(4, [], [("t", b"a")]))

    assert await SharedHotKeys(tier.control).fetch_names(4) == [("t", b"b")]


async def test_a_damaged_key_is_an_outage_of_the_sketch_only(tier: RemoteTier, client: redis.asyncio.Redis) -> None:
    await client.set(tier.control.keyspace.hot_names(2), b"not a sorted set", ex=60)

    with pytest.raises(TierUnavailable):
        await SharedHotKeys(tier.control).add_report(HotKeyReport(2, [(("t", b"a"), 3)]))
    with pytest.raises(TierUnavailable):
        await SharedHotKeys(tier.control).fetch_names(2)
    await tier.control.execute("PING")


async def test_a_replica_that_starts_cold_answers_its_first_requests_from_l1(night: NightConfig) -> None:
    users = list_known_users(night)
    async with serving(night, sketch_s=0.05) as first:
        assert set(await look_up_sources(first, users)) == {"l2"}
        assert await eventually(lambda: reported(first, USERS))

    async with serving(night) as second:
        assert set(await look_up_sources(second, users)) == {"l1"}
        assert (await second.scrape_samples("larder_warmed_records_total"))[()] == USERS
        assert (await second.scrape_samples("larder_warming_seconds_total"))[()] > 0

    async with serving(night, sketch_s=0.0) as third:
        assert set(await look_up_sources(third, users)) == {"l2"}


async def reported(app: Running, count: int) -> bool:
    return await event(app, "hot_reported") >= count


async def test_before_a_flip_a_replica_reads_ahead_what_others_were_asked(night: NightConfig) -> None:
    users = list_known_users(night)
    coming = build_verified(night, NEXT)
    async with serving(night, sketch_s=0.05) as busy, serving(night) as idle:
        await look_up_sources(busy, users)
        assert await eventually(lambda: reported(busy, USERS))

        await asyncio.to_thread(publish, night, coming)

        async def follows() -> bool:
            live = (await idle.get("/v1/generations"))["live"]
            return bool(live["generation"] == coming)

        assert await eventually(follows)
        assert set(await look_up_sources(idle, users)) == {"l1"}


async def test_who_is_blocked_leaves_the_sketch_and_is_not_read_ahead(night: NightConfig) -> None:
    users = list_known_users(night)
    async with serving(night, sketch_s=0.05) as app:
        await look_up_sources(app, users)
        assert await eventually(lambda: reported(app, USERS))
        await asyncio.to_thread(change_blocklist, night.store(), block_users=[users[0].encode()])

        async def is_forgotten() -> bool:
            await look_up_sources(app, users[:1])  # whoever is blocked may go on asking
            async with redis.asyncio.Redis.from_url(str(night.redis_url)) as client:
                members = [
                    sketch_member
                    async for key in client.scan_iter(f"larder:1:{{{night.namespace}}}:hot:*")
                    for sketch_member in await client.zrange(key, 0, -1)
                ]
            member = f"user_topk:{users[0]}".encode()
            return len(members) >= USERS - 1 and member not in members

        assert await eventually(is_forgotten)


async def test_a_replica_starts_without_redis_and_its_failed_reports_harm_no_answer(night: NightConfig) -> None:
    nowhere = dataclasses.replace(night, redis_url="redis://127.0.0.1:1/0")
    async with serving(nowhere, sketch_s=0.05) as app:
        assert set(await look_up_sources(app, list_known_users(night))) == {"default"}

        async def failed() -> bool:
            await look_up_sources(app, list_known_users(night))
            return await event(app, "hot_reports_failed") >= 1

        assert await eventually(failed)
        assert await event(app, "hot_reported") == 0
