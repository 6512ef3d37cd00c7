"""Kills of Redis while events are sent: what was accepted is there, once."""

import asyncio
import random
from pathlib import Path

import pytest

from cache.format.redis_keys import Keyspace
from serving.requests.errors import Problem
from tests.integration.events.durable_redis import DurableRedis, durable_redis, stream_of
from tests.integration.events.intakes import Intake, event, intake

BATCH = 20


async def send(one: Intake, numbers: range, acknowledged: list[int], gap_s: float) -> None:
    """Sends batches, each until it is accepted, as a client does."""
    for start in range(numbers.start, numbers.stop, BATCH):
        batch = range(start, min(start + BATCH, numbers.stop))
        while True:
            try:
                told = await one.take(*(event(number, f"u-{number % 7}") for number in batch))
            except Problem as problem:
                if problem.reason != "events_unavailable":
                    raise
                await asyncio.sleep(0.02)
            else:
                assert told["accepted"] + told["repeated"] == len(batch)
                acknowledged.extend(batch)
                break
        await asyncio.sleep(gap_s)


async def kill(
    server: DurableRedis, kills: int, rng: random.Random, sending: asyncio.Task[None]
) -> None:
    """Kills and starts again at random moments."""
    while server.kills < kills and not sending.done():
        await asyncio.sleep(rng.uniform(0, 0.05))
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)


async def ordeal(folder: Path, keyspace: Keyspace, kills: int, seed: int) -> None:
    with durable_redis(folder) as server:
        rng, acknowledged = random.Random(seed), list[int]()
        async with intake(server.url, keyspace, durability="always", of_one=10**6) as one:
            sending = asyncio.create_task(send(one, range(1 << 30), acknowledged, 0.001))
            await kill(server, kills, rng, sending)
            sending.cancel()
            await asyncio.wait([sending])
            assert sending.cancelled(), sending.exception()
        with server.client() as client:
            found = [each["id"] for each in stream_of(client, keyspace)]
    assert server.kills == kills and acknowledged
    assert len(found) == len(set(found)), "an event counts twice"
    assert {f"e-{number}" for number in acknowledged} <= set(found), "an accepted event is lost"


async def test_kills_of_redis_lose_nothing_accepted_and_count_nothing_twice(
    tmp_path: Path, keyspace: Keyspace
) -> None:
    await ordeal(tmp_path, keyspace, 4, 1)


@pytest.mark.storm
async def test_a_hundred_kills_of_redis_lose_nothing_accepted_and_count_nothing_twice(
    tmp_path: Path, keyspace: Keyspace
) -> None:
    await ordeal(tmp_path, keyspace, 100, random.SystemRandom().randrange(1 << 30))
