"""Overlays that are not read while inputs hardly come again: when that begins and ends, and what it costs nobody."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import TierUnavailable
from cache.l2.commands import LeaseTake, OverlayRead
from serving.engine.inference import (
    FREQUENT_REPEAT_SHARE,
    INPUTS_PER_PROBE,
    RARE_REPEAT_SHARE,
    REPEAT_WINDOW_INPUTS,
    LiveInferences,
    RepeatRate,
)
from serving.engine.ladder import Ladder
from serving.engine.micro_batcher import MicroBatcher
from serving.engine.rendering.answer_fields import AnswerJson
from serving.generations.served_set import ServedGenerations
from serving.requests.models import LookupRequest
from tests.unit.serving.world import World, ask, entity, ids


def rare() -> RepeatRate:
    repeats = RepeatRate()
    for _ in range(REPEAT_WINDOW_INPUTS):
        repeats.note_input(False)
    return repeats


def test_a_window_of_inputs_without_a_repeat_is_needed_and_enough() -> None:
    repeats = RepeatRate()
    for _ in range(REPEAT_WINDOW_INPUTS - 1):
        repeats.note_input(False)
        assert not repeats.are_repeats_rare
    repeats.note_input(False)
    assert repeats.are_repeats_rare


@given(st.integers(2, round(0.8 / RARE_REPEAT_SHARE)))
def test_what_comes_again_often_enough_is_always_read(every: int) -> None:
    repeats = RepeatRate()
    for number in range(5 * REPEAT_WINDOW_INPUTS):
        repeats.note_input(number % every == 0)
        assert not repeats.are_repeats_rare


@given(st.integers(2, round(1 / FREQUENT_REPEAT_SHARE)))
def test_probes_that_find_answers_end_it_within_a_window(every: int) -> None:
    repeats = rare()
    probes = 0
    while repeats.are_repeats_rare:
        probes += 1
        repeats.note_probe(probes % every == 0)
    assert probes <= REPEAT_WINDOW_INPUTS


def test_a_few_repeats_do_not_end_it() -> None:
    repeats = rare()
    for number in range(10 * REPEAT_WINDOW_INPUTS):
        repeats.note_probe(number % round(2 / RARE_REPEAT_SHARE) == 0)
        assert repeats.are_repeats_rare


def test_only_probes_count_while_nothing_is_read_and_only_reads_while_all_is() -> None:
    repeats = rare()
    for _ in range(REPEAT_WINDOW_INPUTS):
        repeats.note_input(True)
    assert repeats.are_repeats_rare

    for _ in range(REPEAT_WINDOW_INPUTS):
        repeats.note_probe(True)
    assert not repeats.are_repeats_rare
    for _ in range(10 * REPEAT_WINDOW_INPUTS):
        repeats.note_probe(False)
    assert not repeats.are_repeats_rare


def test_one_in_so_many_is_probed() -> None:
    repeats = rare()
    assert sum(repeats.count_unread() for _ in range(10 * INPUTS_PER_PROBE)) == 10
    assert repeats.unread_count == 10 * INPUTS_PER_PROBE


class Service:
    """A ladder that may leave overlays unread, over the fake Redis of a world."""

    def __init__(self, world: World, *, spares_reads: bool = True) -> None:
        self.world = world
        self.admits = True
        self.inferences = LiveInferences(
            cast(MicroBatcher, world), world.tiers, overlay_ttl_s=600.0, outage_ttl_s=15.0,
            admit_input=lambda: self.admits, may_skip_overlay_reads=spares_reads,
        )  # fmt: skip
        self.repeats = self.inferences.repeat_rate
        self.ladder = Ladder(world.tiers, self.inferences, world.metrics, l2_deadline_s=1.0, clock=world.clock)

    async def __call__(self, lookup: LookupRequest) -> list[AnswerJson]:
        """The answers; what was to be stored is."""
        started_at = self.ladder._monotonic_clock()
        answers = await self.ladder.lookup(ServedGenerations(self.world.snapshot()), lookup, started_at)
        await self.world.tiers.aclose()
        return answers

    async def strangers(self, first: int, count: int) -> None:
        """So many that nobody has seen before."""
        for start in range(first, first + count, 64):
            numbers = range(start, min(start + 64, first + count))
            await self(ask(*(entity(f"n{number}", history=ids("i1")) for number in numbers)))


@pytest.fixture
async def service() -> Service:
    """One that has seen nothing but strangers."""
    service = Service(World())
    await service.strangers(0, REPEAT_WINDOW_INPUTS)
    assert service.repeats.are_repeats_rare
    service.world.remote.calls.clear()
    return service


def stranger(id_: str = "stranger") -> LookupRequest:
    return ask(entity(id_, history=ids("i1")))


async def test_strangers_are_answered_without_a_question_and_kept_as_ever(service: Service) -> None:
    (first,) = await service(stranger())
    (repeated_answer,) = await service(stranger())
    (other_answer,) = await Service(World(remote=service.world.remote))(stranger())

    assert [answer["source"] for answer in (first, repeated_answer, other_answer)] == ["live", "l1", "l2"]
    assert first["reason"] == "not_in_generation" and repeated_answer.get("reason") is None
    assert first["items"] == repeated_answer["items"] == other_answer["items"]
    assert len(service.world.remote.calls) == 1  # the other's


async def test_misses_of_strangers_are_counted_as_ever(service: Service) -> None:
    text = service.world.metrics.expose().decode()
    await service(stranger())
    later_text = service.world.metrics.expose().decode()

    def read_miss_count(text: str) -> float:
        (line,) = (
            text_line for text_line in text.splitlines()
            if text_line.startswith("larder_misses_total{") and 'reason="not_in_generation"' in text_line
        )  # fmt: skip
        return float(line.rpartition(" ")[2])

    assert read_miss_count(later_text) == read_miss_count(text) + 1 and "overlay_unread" not in later_text


async def test_a_batch_asks_for_those_of_the_night_alone(service: Service) -> None:
    answers = await service(ask(entity("u1"), *(entity(f"new{n}", history=ids("i1")) for n in range(5))))

    assert [answer["source"] for answer in answers] == ["l2", *["live"] * 5]
    assert not any(isinstance(command, OverlayRead) for command in service.world.remote.reads)


async def test_who_sends_nothing_gets_what_is_stored(service: Service) -> None:
    await Service(World(remote=service.world.remote))(stranger())

    (answer,) = await service(ask(entity("stranger")))

    assert answer["source"] == "l2"


async def test_what_is_stored_answers_when_the_model_cannot(service: Service) -> None:
    await Service(World(remote=service.world.remote))(stranger())
    service.world.busy = True

    (stored_answer,) = await service(stranger())
    (default_answer,) = await service(stranger("nobody"))

    assert stored_answer["source"] == "l2" and stored_answer.get("reason") is None
    assert (default_answer["source"], default_answer["reason"]) == ("default", "not_in_generation")
    assert default_answer["live"] == "busy"


async def test_under_overload_nothing_is_looked_for_that_is_hardly_ever_there(service: Service) -> None:
    service.admits = False

    (answer,) = await service(stranger())

    assert (answer["source"], answer["reason"]) == ("default", "not_in_generation")
    assert answer["live"] == "overloaded" and not service.world.remote.calls


async def test_probes_find_what_others_have_answered_and_end_it(service: Service) -> None:
    other_service = Service(World(remote=service.world.remote))
    for number in range(round(FREQUENT_REPEAT_SHARE * REPEAT_WINDOW_INPUTS) + 1):
        assert service.repeats.are_repeats_rare
        for near in range(INPUTS_PER_PROBE):
            id_ = f"both{number}/{near}"
            await other_service(stranger(id_))
            (answer,) = await service(stranger(id_))
            assert answer["source"] == "live"
    assert not service.repeats.are_repeats_rare

    await other_service(stranger("one more"))
    (answer,) = await service(stranger("one more"))
    assert answer["source"] == "l2"


async def test_an_answer_to_another_input_is_no_repeat(service: Service) -> None:
    other_service = Service(World(remote=service.world.remote))
    for number in range(INPUTS_PER_PROBE):
        await other_service(ask(entity(f"n-{number}", history=ids("i2"))))
        await service(stranger(f"n-{number}"))

    assert service.repeats.are_repeats_rare and service.repeats._repeat_weight == 0
    assert len([command for command in service.world.remote.reads if isinstance(command, OverlayRead)]) > 0


async def test_a_probe_that_fails_tells_nothing_and_harms_nobody(service: Service) -> None:
    service.world.remote.fails_with = TierUnavailable("gone", reason="connection")
    inputs = service.repeats._input_weight

    for number in range(INPUTS_PER_PROBE):
        (answer,) = await service(stranger(f"n-{number}"))
        assert answer["source"] == "live"

    assert service.repeats._input_weight == inputs and service.world.remote.calls


async def test_who_joins_an_inference_under_way_counts_as_a_repeat() -> None:
    service = Service(World())
    repeated_entity = entity("stranger", history=ids("i1"))
    for number in range(REPEAT_WINDOW_INPUTS):
        await service(ask(repeated_entity, repeated_entity) if number % 64 == 0 else stranger(f"n{number}"))

    assert not service.repeats.are_repeats_rare


async def test_all_are_read_where_that_is_wanted() -> None:
    service = Service(World(), spares_reads=False)
    await service.strangers(0, 3 * REPEAT_WINDOW_INPUTS)

    assert service.repeats.unread_count == 0
    assert len(service.world.remote.reads) == 3 * REPEAT_WINDOW_INPUTS


async def test_there_are_no_leases_for_what_is_not_read(service: Service) -> None:
    await service(stranger())

    assert not [
        lease_command for lease_command in service.world.remote.lease_commands if isinstance(lease_command, LeaseTake)
    ]
