"""Leases of cold answers down the ladder: taken after the read that missed, joined, given back, not needed."""

import asyncio
import time
from typing import cast

import pytest

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.commands import GIVEN_BACK_LEASE_VALUE, LEASE_DONE_PREFIX, LeaseSwap, LeaseTake, OverlayRead
from serving.engine.inference import LiveInferences
from serving.engine.ladder import Ladder
from serving.engine.leases import LEASE_REST_S, LeaseManager
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, MicroBatcher
from serving.generations.served_set import ServedGenerations
from serving.requests.models import LookupRequest
from tests.fakes import FakeClock
from tests.unit.serving.world import World, ask, entity, ids

KEYS = Keyspace("test")
WAIT_S = 0.2


class Service:
    """One process over the fake Redis of a world."""

    def __init__(self, world: World, name: str = "me") -> None:
        self.world = world
        self.clock = FakeClock(time.monotonic())
        world.remote.timer = world.tiers._timer = self.clock
        self.admits = True
        self.gate: asyncio.Event | None = None
        self.slept: list[float] = []
        self.lead = LeaseManager(
            world.remote, world.tiers, KEYS,
            lease_wait_s=WAIT_S, process_name=name, monotonic_clock=self.clock, sleep=self._sleep, jitter=lambda: 0.5,
        )  # fmt: skip
        inferences = LiveInferences(
            cast(MicroBatcher, self), world.tiers, overlay_ttl_s=600.0, outage_ttl_s=15.0, leases=self.lead,
            admit_input=lambda: self.admits,
        )  # fmt: skip
        self.ladder = Ladder(
            world.tiers, inferences, world.metrics,
            l2_deadline_s=1.0, clock=world.clock, monotonic_clock=self.clock,
        )  # fmt: skip

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.tick(seconds)
        for _ in range(5):
            await asyncio.sleep(0)

    async def infer(self, job: InferenceJob) -> ComputedRecord:
        """When the gate is open."""
        if self.gate is not None:
            await self.gate.wait()
        return await self.world.infer(job)

    async def __call__(self, lookup: LookupRequest) -> list[str]:
        """The sources of the answers."""
        answers = await self.ladder.lookup(ServedGenerations(self.world.snapshot()), lookup, self.clock())
        return [answer["source"] for answer in answers]

    @property
    def lease_commands(self) -> list[LeaseTake | LeaseSwap]:
        """Of Redis, about leases."""
        return self.world.remote.lease_commands


@pytest.fixture
def service() -> Service:
    return Service(World())


def stranger(id_: str = "stranger", item: str = "i1") -> LookupRequest:
    return ask(entity(id_, history=ids(item)))


async def test_a_cold_answer_is_led_after_one_question(service: Service) -> None:
    assert await service(stranger()) == ["live"]
    await service.world.tiers.aclose()

    assert [type(lease_command) for lease_command in service.lease_commands] == [LeaseTake]
    assert len(service.world.remote.calls) == 1 and service.lead.counts.led == 1
    ((lease_value, _),) = service.world.remote.leases.values()
    assert lease_value == LEASE_DONE_PREFIX + service.lease_commands[0][1]


async def test_every_stranger_of_a_batch_has_its_own_lease_and_known_ids_have_none(service: Service) -> None:
    lookup = ask(
        entity("u1", history=ids("i1")), *(entity(f"n{n}", history=ids("i1")) for n in range(3)), entity("nothing sent")
    )

    assert await service(lookup) == ["l2", "live", "live", "live", "default"]
    assert (
        len({lease_command.lease_key for lease_command in service.lease_commands}) == len(service.lease_commands) == 3
    )
    assert len(service.world.remote.calls) == 1


async def test_the_same_stranger_twice_in_a_batch_is_computed_once_without_waiting(service: Service) -> None:
    stranger_entity = entity("stranger", history=ids("i1"))

    assert await service(ask(stranger_entity, stranger_entity)) == ["live", "live"]
    assert len(service.world.jobs) == len(service.lease_commands) == 1 and not service.slept


async def test_what_another_process_leads_is_waited_for(service: Service) -> None:
    await service(stranger())
    await service.world.tiers.aclose()
    other_world = World(remote=service.world.remote)
    late = Service(other_world, "late")
    read = service.world.remote.overlays.copy()
    service.world.remote.overlays.clear()  # it read just before the answer was stored

    async def look_up() -> list[str]:
        return await late(stranger())

    looking = asyncio.create_task(look_up())
    for _ in range(3):
        await asyncio.sleep(0)
    service.world.remote.overlays.update(read)

    assert await looking == ["live"]
    assert not other_world.jobs and late.lead.counts.adopted == 1


async def test_an_overlay_that_is_there_costs_no_question(service: Service) -> None:
    await service(stranger())
    await service.world.tiers.aclose()
    other_service = Service(World(remote=service.world.remote), "other")

    assert await other_service(stranger()) == ["l2"]
    assert [type(lease_command) for lease_command in service.lease_commands] == [LeaseTake]
    assert not other_service.world.jobs and other_service.lead.counts.led == 0


async def test_what_is_left_out_under_overload_takes_no_lease(service: Service) -> None:
    service.admits = False

    assert await service(stranger()) == ["default"]
    assert not service.lease_commands


async def test_a_lease_without_an_answer_ends_at_once(service: Service) -> None:
    service.world.busy = True

    assert await service(stranger()) == ["default"]

    lease_take, back = service.lease_commands
    assert (
        isinstance(back, LeaseSwap)
        and back.new_lease_value == GIVEN_BACK_LEASE_VALUE
        and back.expected_lease_value == lease_take[1]
    )


async def test_who_asks_for_an_answer_that_is_being_computed_joins_without_a_lease(service: Service) -> None:
    service.gate = asyncio.Event()
    first = asyncio.create_task(service(stranger()))
    for _ in range(5):
        await asyncio.sleep(0)
    service.world.remote.leases.clear()  # as if it had ended, so that another would win it
    service.world.tiers.negative_cache.discard(next(iter(service.world.tiers.negative_cache._keys)))
    second = asyncio.create_task(service(stranger()))
    for _ in range(5):
        await asyncio.sleep(0)
    service.gate.set()

    assert await first == await second == ["live"]
    assert len(service.world.jobs) == 1
    assert len(service.lease_commands) == 1


async def test_no_lease_is_asked_for_in_an_outage_or_while_redis_is_slow(service: Service) -> None:
    remote = service.world.remote
    remote.lease_s = lambda: WAIT_S / 5
    assert await service(stranger("a")) == ["live"]
    remote.lease_s = lambda: 0.0
    assert await service(stranger("b")) == ["live"]
    assert len(service.lease_commands) == 1 and service.lead.counts.led == 1

    service.clock.tick(LEASE_REST_S)
    remote.fails_with = TierUnavailable("gone", reason="connection")
    assert await service(stranger("c")) == ["live"]

    assert service.lead.counts.led == 1 and len(service.lease_commands) == 1


async def test_leases_are_asked_for_after_the_read(service: Service) -> None:
    assert await service(stranger()) == ["live"]
    assert service.lead.counts.led == len(service.lease_commands) == 1
    assert [type(command) for call in service.world.remote.calls for command in call] == [OverlayRead]


async def test_only_a_lease_that_grows_old_is_renewed(service: Service) -> None:
    service.gate = asyncio.Event()
    computing = asyncio.create_task(service(stranger()))
    for _ in range(5):
        await asyncio.sleep(0)
    life_s = WAIT_S / 2

    service.lead._renew()
    assert [type(lease_command) for lease_command in service.lease_commands] == [LeaseTake]
    for _ in range(20):  # two lives and a half
        service.clock.tick(life_s / 8)
        service.lead._renew()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ((lease_value, expires_at),) = service.world.remote.leases.values()
        assert lease_value == service.lease_commands[0][1] and expires_at - service.clock() >= life_s * 2 / 3

    service.gate.set()
    assert await computing == ["live"] and len(service.lease_commands) < 20


async def test_a_renewal_that_fails_is_not_the_last(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.gate = asyncio.Event()
    computing = asyncio.create_task(service(stranger()))
    for _ in range(5):
        await asyncio.sleep(0)
    service.clock.tick(WAIT_S / 2)

    def submit(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(service.world.remote, "submit", submit)
    with pytest.raises(RuntimeError, match="planted"):
        service.lead._renew()

    assert service.lead._renewal_timer is not None and not service.lead._renewal_timer.cancelled()
    service.gate.set()
    assert await computing == ["live"]
