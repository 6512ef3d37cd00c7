"""Many callers of the same cold answers at once, over a real Redis: one inference and one read for each."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from cache.format.redis_keys import Keyspace
from cache.l2.tier import RemoteConfig, RemoteTier
from cache.process.redis_server import RedisServer
from cache.tiers.l1 import LocalTier, NegativeCache
from cache.tiers.tiered import TieredCache
from serving.engine.batch_inference import compute
from serving.engine.inference import LiveInferences
from serving.engine.ladder import Ladder
from serving.engine.leases import LeaseManager
from serving.engine.micro_batcher import MicroBatcher
from serving.generations.served_set import ServedGenerations
from serving.requests.models import RequestedEntity
from tests.unit.serving.world import World, ask, entity, ids

BATCH = 64
WAITERS = 10_000


@dataclass
class Replica:
    """Everything between a caller and Redis, with a model that counts."""

    world: World
    tiers: TieredCache
    ladder: Ladder
    lead: LeaseManager

    async def __call__(self, entities: Sequence[RequestedEntity]) -> list[Any]:
        """One request for each of them, all at once."""
        served = ServedGenerations(self.world.snapshot())
        requests = [
            self.ladder.lookup(served, ask(requested_entity, deadline_s=60.0), time.monotonic())
            for requested_entity in entities
        ]
        return [answer for (answer,) in await asyncio.gather(*requests)]

    @property
    def batches(self) -> list[int]:
        """Sizes of the inferences so far."""
        return [len(batch) for batch in self.world.predictor.batches]


@pytest.fixture
async def replica(own_redis: RedisServer, keyspace: Keyspace) -> AsyncIterator[Replica]:
    """One with generous deadlines: what is counted here must not depend on the machine's speed."""
    world = World()
    remote = RemoteTier(RemoteConfig(own_redis.url, deadline_s=30.0), keyspace)
    tiers = TieredCache(LocalTier(16 << 20), NegativeCache(100_000, 60.0), remote)
    with ThreadPoolExecutor(1) as executor:
        batcher = MicroBatcher(
            executor, worker_count=1, batch_size_max=BATCH, queued_jobs_max=2_048, queued_bytes_max=32 << 20,
            compute_batch=compute
        )  # fmt: skip
        lead = LeaseManager(remote, tiers, keyspace, lease_wait_s=60.0)
        inferences = LiveInferences(batcher, tiers, overlay_ttl_s=60.0, outage_ttl_s=1.0, leases=lead)
        ladder = Ladder(tiers, inferences, world.metrics, l2_deadline_s=30.0)
        yield Replica(world, tiers, ladder, lead)
    await tiers.aclose()
    await remote.aclose()


def calls(server: RedisServer) -> dict[str, int]:
    """What Redis was asked so far, by command."""
    with redis.Redis.from_url(server.url, protocol=2) as connection:
        stats = connection.info("commandstats")
    return {name.removeprefix("cmdstat_"): command_stats["calls"] for name, command_stats in stats.items()}


async def test_ten_thousand_waiters_for_one_cold_answer_cost_one_inference_and_one_read(
    replica: Replica, own_redis: RedisServer
) -> None:
    answers = await replica([entity("stranger", history=ids("i1"))] * WAITERS)

    assert len(answers) == WAITERS
    assert {answer["source"] for answer in answers} <= {"live", "l1"}
    assert {tuple(answer["items"]) for answer in answers} == {tuple(answers[0]["items"])}
    assert replica.batches == [1]
    assert replica.tiers.counters.l2_reads == 1
    assert replica.lead.counts.led == 1
    await replica.tiers.aclose(30.0)
    calls_by_command = calls(own_redis)
    # Commands: the look-up of the overlay; then setting the lease, the overlay, and the mark that the lease is done.
    assert (calls_by_command["get"], calls_by_command["pttl"], calls_by_command["set"]) == (1, 1, 3)
    assert "getrange" not in calls_by_command


async def test_waiters_with_different_inputs_never_share_an_inference(replica: Replica) -> None:
    items = [f"i{number}" for number in range(20)]

    answers = await replica([entity("stranger", history=ids(item)) for item in items * 50])

    assert sum(replica.batches) == len(items)
    heads = [tuple(answers[at]["items"]) for at in range(20)]
    assert len(set(heads)) == 20
    assert all(tuple(answer["items"]) == heads[at % 20] for at, answer in enumerate(answers))


async def test_a_thousand_cold_answers_with_ten_waiters_apiece_are_inferred_once_and_in_batches(
    replica: Replica, own_redis: RedisServer
) -> None:
    strangers = [entity(f"stranger-{number}", history=ids("i1")) for number in range(1_000)]

    answers = await replica(strangers * 10)

    assert {answer["source"] for answer in answers} <= {"live", "l1"}
    assert sum(replica.batches) == 1_000
    assert len(replica.batches) <= 2 * -(-1_000 // BATCH)
    assert replica.tiers.counters.l2_reads == 1_000
    await replica.tiers.aclose(30.0)
    assert calls(own_redis)["get"] == 1_000
