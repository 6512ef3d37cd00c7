"""One cold answer, several processes, a real Redis: who computes it, and what a kill of that one costs."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from cache.format.redis_keys import Keyspace
from tests.integration.serving_app import eventually
from tests.integration.tiers.leading import Process

LONG_MS = 60_000.0
"""Longer than a busy machine can stall a process between two renewals; a lease lives for half of it."""
SHORT_MS = 2_000.0


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A plain connection."""
    async with Redis.from_url(redis_url, protocol=2) as connection:
        yield connection


async def loads(redis: Redis, keyspace: Keyspace) -> list[bytes]:
    loader_names: list[bytes] = await redis.lrange(f"{keyspace.namespace}:loads", 0, -1)  # type: ignore[assignment]
    return loader_names


async def value(redis: Redis, name: bytes) -> bytes:
    stored_bytes = await redis.get(name)
    assert isinstance(stored_bytes, bytes)
    return stored_bytes


async def lease_keys(redis: Redis, keyspace: Keyspace) -> list[bytes]:
    # The last part of an overlay's key is its hash; a lease's key has the input's digest after that.
    names = [name async for name in redis.scan_iter(f"larder:1:{keyspace.namespace}:w:*")]
    return [name for name in names if name.count(b":") == 7]


async def test_two_processes_compute_once_while_the_leader_lives(
    redis_url: str, redis: Redis, keyspace: Keyspace
) -> None:
    async with AsyncExitStack() as stack:
        names = ("one", "two")
        first_process, two = [
            await stack.enter_async_context(Process(redis_url, keyspace.namespace, name, LONG_MS)) for name in names
        ]
        for process in (first_process, two):
            for _ in range(10):
                process.start_request("stranger")

        async def both_have_asked() -> bool:
            counts = [await first_process.take_answers(0), await two.take_answers(0)]
            # A request may win the lease and then join another one of its own process: it gives the lease back, and a
            # waiting request takes it over and counts twice.
            return all(
                lease_counts["leases_led"] + lease_counts["leases_waited"] - lease_counts["leases_taken_over"] == 1
                for lease_counts in counts
            )

        assert await eventually(both_have_asked)
        await redis.rpush(f"{keyspace.namespace}:go", "now")

        first, second = await first_process.take_answers(10), await two.take_answers(10)

        assert first["answers"] == second["answers"]
        assert {source for source, _ in first["answers"]} == {"live"}
        assert len(await loads(redis, keyspace)) == 1
        assert first["leases_led"] + second["leases_led"] == 1
        (name,) = await lease_keys(redis, keyspace)
        assert (await value(redis, name)).startswith(b"done:") and await redis.pttl(name) > 0


async def test_a_leader_that_computes_for_longer_than_a_lease_lives_keeps_it(
    redis_url: str, redis: Redis, keyspace: Keyspace
) -> None:
    async with Process(redis_url, keyspace.namespace, "one", SHORT_MS) as leader:
        leader.start_request("stranger")
        assert await eventually(lambda: _count(redis, keyspace, 1))
        (name,) = await lease_keys(redis, keyspace)
        life_ms, renewals = SHORT_MS / 2, 0
        left_ms = await redis.pttl(name)

        async def renewed() -> bool:
            nonlocal left_ms, renewals
            earlier_left_ms, left_ms = left_ms, await redis.pttl(name)
            renewals += left_ms > earlier_left_ms
            return renewals >= 4  # a third of a life apart: together more than one life

        assert await eventually(renewed)
        assert 0 < left_ms <= life_ms and (await value(redis, name)).startswith(b"one/")
        await redis.rpush(f"{keyspace.namespace}:go", "now")
        assert (await leader.take_answers())["leases_led"] == 1


async def test_a_killed_leader_costs_at_most_one_more_inference(
    redis_url: str, redis: Redis, keyspace: Keyspace
) -> None:
    async with AsyncExitStack() as stack:
        leader, two, three = [
            await stack.enter_async_context(
                # Only the leader's lease is short: the others wait as long as they have to.
                Process(redis_url, keyspace.namespace, name, wait_ms)
            )
            for name, wait_ms in (("one", SHORT_MS), ("two", LONG_MS), ("three", LONG_MS))
        ]
        leader.start_request("stranger")
        assert await eventually(lambda: _count(redis, keyspace, 1))
        two.start_request("stranger")
        three.start_request("stranger")

        async def both_wait() -> bool:
            return [(await process.take_answers(0))["leases_waited"] for process in (two, three)] == [1, 1]

        assert await eventually(both_wait)
        await leader.kill()
        assert await eventually(lambda: _count(redis, keyspace, 2), 30.0)
        await redis.rpush(f"{keyspace.namespace}:go", "now", "now", "now")

        second, third = await two.take_answers(), await three.take_answers()
        assert second["answers"] == third["answers"]
        loader_names = await loads(redis, keyspace)
        assert len(loader_names) == 2 and loader_names[0] == b"one"
        assert second["leases_taken_over"] + third["leases_taken_over"] == 1
        assert second["leases_adopted"] + third["leases_adopted"] == 1


async def test_processes_with_different_inputs_compute_separately(
    redis_url: str, redis: Redis, keyspace: Keyspace
) -> None:
    async with AsyncExitStack() as stack:
        first_process, two = [
            await stack.enter_async_context(Process(redis_url, keyspace.namespace, name, LONG_MS))
            for name in ("one", "two")
        ]
        first_process.start_request("stranger", "i1")
        two.start_request("stranger", "i7")
        assert await eventually(lambda: _count(redis, keyspace, 2))
        await redis.rpush(f"{keyspace.namespace}:go", "now", "now")

        first, second = await first_process.take_answers(), await two.take_answers()

        assert first["answers"] != second["answers"]
        assert first["leases_waited"] == second["leases_waited"] == 0


async def _count(redis: Redis, keyspace: Keyspace, count: int) -> bool:
    return len(await loads(redis, keyspace)) == count
