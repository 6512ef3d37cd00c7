"""Near answers down the ladder: marked, kept nowhere, and never for who wants an answer of its own."""

import asyncio
from typing import Any, cast

import pytest

from cache.format.redis_keys import Keyspace
from cache.l2.commands import GIVEN_BACK_LEASE_VALUE, LeaseSwap, LeaseTake
from serving.engine.inference import LiveInferences
from serving.engine.ladder import Ladder
from serving.engine.leases import LeaseManager
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, MicroBatcher
from serving.filters.filtered_lookup import FilteredLookup
from serving.generations.served_set import ServedGenerations
from tests.unit.serving.world import World, ask, entity, ids

DISTANCE = 0.125


class NearWorld(World):
    """A world whose live answers are near ones wherever that is allowed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lead = LeaseManager(self.remote, self.tiers, Keyspace("test"), lease_wait_s=0.2, process_name="me")
        self.inferences = LiveInferences(
            cast(MicroBatcher, self), self.tiers, overlay_ttl_s=600.0, outage_ttl_s=15.0, leases=self.lead,
            near_reuse_tables=frozenset({"user_topk"}),
        )  # fmt: skip
        self.ladder = Ladder(self.tiers, self.inferences, self.metrics, l2_deadline_s=1.0, clock=self.clock)

    async def infer(self, job: InferenceJob) -> ComputedRecord:
        """As live, marked."""
        computed = await super().infer(job)
        return ComputedRecord(
            computed.record, computed.unknown_id_count, DISTANCE if job.may_reuse_near_answer else None
        )


@pytest.fixture
def world() -> NearWorld:
    return NearWorld()


async def look_up(world: NearWorld, *entities: Any, **options: Any) -> list[dict[str, Any]]:
    started = asyncio.get_running_loop().time()
    served = ServedGenerations(world.snapshot())
    return await world.ladder.lookup(served, ask(*entities, **options), started)


async def test_a_near_answer_says_so_and_is_kept_nowhere(world: NearWorld) -> None:
    new = entity("nobody", history=ids("i1"))

    first, second = (await look_up(world, new))[0], (await look_up(world, new))[0]

    assert [answer["source"] for answer in (first, second)] == ["live", "live"]
    assert first["near"] == second["near"] == DISTANCE and first["producer"] == "live"
    assert "i1" not in first["items"]
    await world.tiers.aclose()
    assert not world.remote.writes and len(world.tiers.local_tier) == 0


async def test_its_lease_is_returned_so_that_no_process_waits_for_an_unstored_answer(world: NearWorld) -> None:
    await look_up(world, entity("nobody", history=ids("i1")))

    lease_take, back = world.remote.lease_commands
    assert isinstance(lease_take, LeaseTake) and isinstance(back, LeaseSwap)
    assert GIVEN_BACK_LEASE_VALUE in back


@pytest.mark.parametrize(
    ("requested_entity", "options"),
    [
        (entity("u3", history=ids("i1")), {"fresh": True}),
        (entity("nobody", history=ids("i1")), {"fresh": True}),
        (entity("nobody", "user_affinity", history=ids("i1")), {}),
        (entity("i3", "item_similar"), {"fresh": True}),
    ],
    ids=["known", "fresh", "another table", "item"],
)
async def test_an_answer_of_its_own_is_computed(
    world: NearWorld, requested_entity: Any, options: dict[str, Any]
) -> None:
    answer = (await look_up(world, requested_entity, **options))[0]

    assert answer["source"] == "live" and "near" not in answer
    assert [job.may_reuse_near_answer for job in world.jobs] == [False]


async def test_who_wants_it_fresh_does_not_join_who_takes_a_near_one(world: NearWorld) -> None:
    new = entity("nobody", history=ids("i1"))

    (near,), (fresh,) = await asyncio.gather(look_up(world, new), look_up(world, new, fresh=True))

    assert near["near"] == DISTANCE and "near" not in fresh and len(world.jobs) == 2


async def test_while_a_page_is_out_of_reach_a_known_id_gets_no_near_one(world: NearWorld) -> None:
    served = ServedGenerations(world.snapshot())
    world.remote.pages.clear()
    started = asyncio.get_running_loop().time()

    answer = (await world.ladder.lookup(served, ask(entity("u3", history=ids("i1"))), started))[0]

    assert answer["source"] == "live" and answer["reason"] == "page_missing" and "near" not in answer


async def test_under_a_filter_nothing_is_reused(world: NearWorld) -> None:
    class NoFilters:
        async def apply(self, *_: object) -> None:
            pass

    lookup = FilteredLookup(world.ladder, NoFilters())  # type: ignore[arg-type]
    started = asyncio.get_running_loop().time()

    await lookup.lookup(ServedGenerations(world.snapshot()), ask(entity("nobody", history=ids("i1"))), started)

    assert [job.may_reuse_near_answer for job in world.jobs] == [False]


async def test_a_near_answer_is_not_sampled_as_one_of_the_models(world: NearWorld) -> None:
    world.ladder.observer.sampler.countdown = 0

    await look_up(world, entity("nobody", history=ids("i1")))

    assert world.ladder.observer.sampler.countdown == 0
