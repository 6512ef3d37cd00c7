"""Kills of services and of either Redis while events are sent: what was accepted is there, and counts once."""

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from cache.config.events import EventsConfig
from cache.format.redis_keys import Keyspace
from serving.requests.errors import Problem
from tests.integration.events.durable_redis import DurableRedis, durable_redis, stream_of
from tests.integration.events.intakes import Intake, event, intake
from tests.integration.events.killed_processes import KINDS, killed_processes
from tests.integration.nights import DATA_UNTIL, prepare, publish_night

BATCH = 20


async def send(target_intake: Intake, numbers: range, acknowledged: list[int], gap_s: float) -> None:
    """Sends batches, each until it is accepted, as a client does."""
    for start in range(numbers.start, numbers.stop, BATCH):
        batch = range(start, min(start + BATCH, numbers.stop))
        while True:
            try:
                receipt = await target_intake.accept_events(*(event(number, f"u-{number % 7}") for number in batch))
            except Problem as problem:
                if problem.reason != "events_unavailable":
                    raise
                await asyncio.sleep(0.02)
            else:
                assert receipt["accepted"] + receipt["repeated"] == len(batch)
                acknowledged.extend(batch)
                break
        await asyncio.sleep(gap_s)


async def kill(server: DurableRedis, kills: int, rng: random.Random, sending: asyncio.Task[None]) -> None:
    """Kills and starts again at random moments."""
    while server.kills < kills and not sending.done():
        await asyncio.sleep(rng.uniform(0, 0.05))
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)


async def ordeal(folder: Path, keyspace: Keyspace, kills: int, seed: int) -> None:
    with durable_redis(folder) as server:
        rng, acknowledged = random.Random(seed), list[int]()
        async with intake(server.url, keyspace, durability="always", of_one=10**6) as running_intake:
            sending = asyncio.create_task(send(running_intake, range(1 << 30), acknowledged, 0.001))
            await kill(server, kills, rng, sending)
            sending.cancel()
            await asyncio.wait([sending])
            assert sending.cancelled(), sending.exception()
        with server.client() as client:
            stored_ids = [stored_event["id"] for stored_event in stream_of(client, keyspace)]
    assert server.kills == kills and acknowledged
    assert len(stored_ids) == len(set(stored_ids)), "an event counts twice"
    assert {f"e-{number}" for number in acknowledged} <= set(stored_ids), "an accepted event is lost"


async def test_kills_of_redis_lose_nothing_accepted_and_count_nothing_twice(tmp_path: Path, keyspace: Keyspace) -> None:
    await ordeal(tmp_path, keyspace, 4, 1)


@pytest.mark.storm
async def test_a_hundred_kills_of_redis_lose_nothing_accepted_and_count_nothing_twice(
    tmp_path: Path, keyspace: Keyspace
) -> None:
    await ordeal(tmp_path, keyspace, 100, random.SystemRandom().randrange(1 << 30))


async def processes_are_killed(folder: Path, kills: int) -> None:
    seed = int(os.environ.get("LARDER_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"seed {seed} (LARDER_SEED={seed} repeats it)")
    lost_on_restart = {"appendonly": "no", "maxmemory-policy": "volatile-lru"}
    with durable_redis(folder / "pages", **lost_on_restart) as pages, durable_redis(folder / "events") as events:
        config = prepare(folder, pages.url, users=120, items=80)
        tables = {"user_topk": config.tables["user_topk"]}
        enabled = EventsConfig(enabled=True)
        config = replace(config, tables=tables, events=enabled, events_url=events.url)
        publish_night(config, DATA_UNTIL)
        async with killed_processes(config, folder, pages, events, seed) as running:
            await running.ordeal(kills)
            await running.check(60.0)
            print(f"{len(running.acknowledged)} acknowledged, {running.lookup_count} looks, {dict(running.killed)}")
            assert running.killed.total() == kills and set(running.killed) == set(KINDS)
            assert running.acknowledged and running.lookup_count


async def test_kills_of_services_and_either_redis_lose_nothing_and_count_nothing_twice(tmp_path: Path) -> None:
    await processes_are_killed(tmp_path, 3)


@pytest.mark.storm
async def test_a_hundred_kills_of_services_and_either_redis_lose_nothing_and_count_nothing_twice(
    tmp_path: Path,
) -> None:
    await processes_are_killed(tmp_path, 100)
