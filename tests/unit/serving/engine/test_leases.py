"""Leases between processes: who computes, who waits, and for how long; several processes over one fake Redis."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import cast

import pytest

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace, hash_hex
from cache.l2.commands import LeaseMark, LeaseTake
from cache.tiers.l1 import LocalTier, NegativeCache
from cache.tiers.reads import Hit
from cache.tiers.tiered import TieredCache
from serving.engine.inference import LiveInferences
from serving.engine.ladder import Ladder
from serving.engine.leases import LEASE_REST_S, LeaseManager
from serving.engine.micro_batcher import MicroBatcher
from serving.generations.served_set import ServedGenerations
from tests.fakes import DIGEST_A, DIGEST_B, GENERATION, FakeClock, FakeRemote, Night
from tests.unit.serving.world import World, ask, entity, ids

NIGHT = Night()
WAIT_S = 0.2
KEYS = Keyspace("test")


@dataclass
class Redis:
    """What the processes of a test share."""

    clock: FakeClock = field(default_factory=FakeClock)
    slept: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.remote = FakeRemote(self.clock)
        self.loads: list[str] = []

    async def sleep(self, seconds: float) -> None:
        """Time passes only here."""
        self.slept.append(seconds)
        self.clock.tick(seconds)
        for _ in range(5):  # the others' turns: write, mark, poll
            await asyncio.sleep(0)


class Process:
    """Tiers and leases of one process."""

    def __init__(self, redis: Redis, name: str) -> None:
        self.redis = redis
        self.name = name
        self.gate: asyncio.Event | None = None
        self.fails_with: Exception | None = None
        self.tiers = TieredCache(
            LocalTier(1 << 20, redis.clock), NegativeCache(10, 5.0), redis.remote, monotonic_clock=redis.clock
        )
        self.lead = LeaseManager(
            redis.remote, self.tiers, KEYS,
            lease_wait_s=WAIT_S, process_name=name, monotonic_clock=redis.clock, sleep=redis.sleep, jitter=lambda: 0.5,
        )  # fmt: skip

    async def answer(self, id_: str = "ada", digest: bytes = DIGEST_A, limit_s: float = 10.0) -> bytes:
        """The record, computed here or taken over."""
        view, record_key = NIGHT.view(), NIGHT.record_key(id_, digest)
        record = NIGHT.live_record(id_, float(digest[0] + 1))

        async def compute(lease_mark: LeaseMark | None) -> bytes:
            self.redis.loads.append(self.name)
            if self.gate is not None:
                await self.gate.wait()
            if self.fails_with is not None:
                raise self.fails_with
            self.tiers.put_live(view, record_key, record, digest, 60.0, lease_mark)
            return record

        hit_or_record = await self.lead.answer(view, record_key, digest, limit_s, compute)
        return hit_or_record.record if isinstance(hit_or_record, Hit) else hit_or_record


async def run_loop_iterations(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_follower_takes_the_leaders_answer_as_soon_as_it_is_stored() -> None:
    redis = Redis()
    first, second = Process(redis, "first"), Process(redis, "second")
    first.gate = asyncio.Event()
    leading = asyncio.create_task(first.answer())
    await run_loop_iterations(3)
    following = asyncio.create_task(second.answer())
    await run_loop_iterations(3)
    first.gate.set()

    assert await leading == await following == NIGHT.live_record("ada", 1.0)
    assert redis.loads == ["first"]
    assert (second.lead.counts.waited, second.lead.counts.adopted) == (1, 1)
    assert (first.lead.counts.led, second.lead.counts.led) == (1, 0)


async def test_a_process_that_missed_just_before_the_leader_was_done_computes_nothing() -> None:
    redis = Redis()
    first, second = Process(redis, "first"), Process(redis, "second")
    await first.answer()
    await first.tiers.aclose()

    assert await second.answer() == NIGHT.live_record("ada", 1.0)
    assert redis.loads == ["first"] and redis.slept == []


async def test_one_of_many_takes_over_from_a_dead_leader_and_the_others_follow_it() -> None:
    redis = Redis()
    dead = Process(redis, "dead")
    dead.gate = asyncio.Event()
    leading = asyncio.create_task(dead.answer())
    await run_loop_iterations(3)
    started_at = redis.clock()
    other_processes = [Process(redis, f"other-{number}") for number in range(5)]

    answers = await asyncio.gather(*(process.answer() for process in other_processes))

    assert set(answers) == {NIGHT.live_record("ada", 1.0)}
    assert len(redis.loads) == 2
    assert sum(process.lead.counts.taken_over for process in other_processes) == 1
    assert sum(process.lead.counts.adopted for process in other_processes) == 4
    assert redis.clock() - started_at < WAIT_S
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)


@pytest.mark.parametrize(("limit_s", "waited_s"), [(10.0, WAIT_S), (0.1, 0.05)])
async def test_no_follower_waits_beyond_the_bound_or_half_of_the_time_left(limit_s: float, waited_s: float) -> None:
    redis = Redis()
    process = Process(redis, "process")
    key = KEYS.lease(GENERATION, NIGHT.table.name, hash_hex(NIGHT.record_key("ada").hash_or_digest), DIGEST_A)
    redis.remote.leases[key] = b"slow/1", float("inf")
    started_at = redis.clock()

    await process.answer(limit_s=limit_s)

    assert redis.clock() - started_at == pytest.approx(waited_s)
    assert redis.loads == ["process"] and process.lead.counts.timed_out == 1


async def test_different_inputs_and_entities_never_wait_for_one_another() -> None:
    redis = Redis()
    first, second = Process(redis, "first"), Process(redis, "second")
    first.gate = asyncio.Event()
    leading = asyncio.create_task(first.answer(digest=DIGEST_A))
    await run_loop_iterations(3)

    assert await second.answer(digest=DIGEST_B) == NIGHT.live_record("ada", 17.0)
    assert await second.answer("bob") == NIGHT.live_record("bob", 1.0)
    assert redis.slept == []
    first.gate.set()
    assert await leading == NIGHT.live_record("ada", 1.0)


async def test_inputs_that_replace_one_another_are_computed_at_once_by_every_process() -> None:
    """The lease of A says done, but the answer stored is the one to B."""
    redis = Redis()
    processes = [Process(redis, f"{number}") for number in range(4)]
    for digest in (DIGEST_A, DIGEST_B):
        await processes[0].answer(digest=digest)
        await processes[0].tiers.aclose()

    answers = await asyncio.gather(*(process.answer(digest=DIGEST_A) for process in processes[1:]))

    assert set(answers) == {NIGHT.live_record("ada", 1.0)}
    assert len(redis.loads) == 3


async def test_redis_away_costs_one_question_and_then_none_for_a_while() -> None:
    redis = Redis()
    process = Process(redis, "process")
    redis.remote.fails_with = TierUnavailable("gone", reason="connection")

    await process.answer("ada")
    await process.answer("bob")

    assert redis.slept == [] and redis.loads == ["process"] * 2
    assert len(redis.remote.lease_commands) == 1 and process.lead.counts.unavailable == 2
    redis.clock.tick(LEASE_REST_S)
    redis.remote.fails_with = None
    await process.answer("cyd")
    assert process.lead.counts.led == 1


async def test_a_slow_redis_is_not_asked_again_for_a_while() -> None:
    redis = Redis()
    process = Process(redis, "process")
    redis.remote.lease_s = lambda: WAIT_S / 4

    await process.answer("ada")
    await process.answer("bob")

    assert (
        len([lease_command for lease_command in redis.remote.lease_commands if isinstance(lease_command, LeaseTake)])
        == 1
    )


@pytest.mark.parametrize("ends", ["failed", "cancelled"])
async def test_a_leader_without_an_answer_gives_its_lease_back(ends: str) -> None:
    redis = Redis()
    first, second = Process(redis, "first"), Process(redis, "second")
    first.gate = asyncio.Event()
    first.fails_with = RuntimeError("no model")
    leading = asyncio.create_task(first.answer())
    await run_loop_iterations(3)

    if ends == "cancelled":
        leading.cancel()
    first.gate.set()
    with contextlib.suppress(asyncio.CancelledError, RuntimeError):
        await leading
    started_at = redis.clock()
    await second.answer()

    assert redis.loads == ["first", "second"]
    assert redis.clock() - started_at < 0.01


async def test_a_leader_that_lost_its_lease_neither_takes_it_back_nor_ends_it() -> None:
    redis = Redis()
    first, second = Process(redis, "first"), Process(redis, "second")
    first.gate, second.gate = asyncio.Event(), asyncio.Event()
    first.fails_with = RuntimeError("no model")
    leading = asyncio.create_task(first.answer())
    await run_loop_iterations(3)
    redis.clock.tick(WAIT_S)
    taking_over = asyncio.create_task(second.answer())
    await run_loop_iterations(3)
    first.gate.set()
    await asyncio.gather(leading, return_exceptions=True)

    ((lease_value, _),) = redis.remote.leases.values()

    assert lease_value.startswith(b"second/")
    second.gate.set()
    await taking_over


@pytest.mark.parametrize("leads", [True, False])
async def test_only_answers_that_are_stored_and_may_be_anothers_are_led(leads: bool) -> None:
    world = World()
    lead = LeaseManager(world.remote, world.tiers, KEYS, lease_wait_s=WAIT_S)
    inferences = LiveInferences(
        cast(MicroBatcher, world), world.tiers, overlay_ttl_s=600.0, outage_ttl_s=15.0, leases=lead if leads else None
    )
    ladder = Ladder(world.tiers, inferences, world.metrics, l2_deadline_s=1.0, clock=world.clock)
    served = ServedGenerations(world.snapshot())

    async def source(id_: str, **options: object) -> object:
        lookup = ask(entity(id_, history=ids("i1")), **options)
        (answer,) = await ladder.lookup(served, lookup, time.monotonic())
        return answer["source"]

    assert await source("u1", fresh=True) == await source("stranger", fresh=True) == "live"
    world.remote.fails_with = TierUnavailable("gone", reason="connection")
    assert await source("u2") == await source("other") == "live"
    assert world.remote.lease_commands == []
    world.remote.fails_with = None

    assert await source("yet another") == "live"

    assert lead.counts.led == len(world.remote.lease_commands) == leads
