"""Which requests a canary answers: a stable share, whole, and never one that asked for something else."""

import math
import time
from dataclasses import dataclass
from typing import Any, cast

import orjson
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cache.store.releases import Canary
from cache.traffic.split import KeySplit
from serving.generations.holder import GenerationHolder
from serving.generations.served_set import ServedGenerations
from serving.requests.errors import Problem
from serving.requests.json_fields import read_id
from serving.requests.models import FeedbackReport
from serving.requests.options import Limits, RequestedArm, RequestOptions, query_options, with_headers
from serving.requests.parsing import feedback_from_json, lookup_from_json
from serving.traffic.canary import COUNTED_EVENTS_MAX, CanaryMetrics, CanaryRouter
from tests.unit.serving.world import GENERATION, LIMITS, OLDER, World, ask, entity

KEYS = [f"key-{number}".encode() for number in range(20_000)]
CANARY = Canary(GENERATION, 10.0, 5.0)


@dataclass
class Runs:
    """The canary of the moment."""

    canary: Canary | None


def scene(canary: Canary | None = CANARY, *, is_held: bool = True) -> tuple[World, ServedGenerations, CanaryRouter]:
    world = World()
    live, coming = world.snapshot(OLDER), world.snapshot(GENERATION)
    return (
        world,
        ServedGenerations(live, None, coming, canary if is_held else None),
        CanaryRouter(cast(GenerationHolder, Runs(canary)), CanaryMetrics(world.metrics.registry)),
    )


def options(key: bytes | None = None, **more: Any) -> RequestOptions:
    return RequestOptions(5.0, canary_key=key, **more)


def taken(percent: float, generation: str = GENERATION) -> set[bytes]:
    split = KeySplit.of(generation, percent)
    return {key for key in KEYS if split.has_key(key)}


@pytest.mark.parametrize("percent", [1.0, 10.0, 50.0])
def test_the_share_is_the_percentage_within_binomial_bounds(percent: float) -> None:
    canary_share, count = percent / 100, len(KEYS)

    # Five standard deviations: one in two million such key sets would miss.
    assert abs(len(taken(percent)) - canary_share * count) < 5 * math.sqrt(count * canary_share * (1 - canary_share))


def test_a_larger_share_keeps_who_was_in_and_another_canary_draws_anew() -> None:
    assert taken(1) < taken(10) < taken(100) and len(taken(100)) == len(KEYS)
    assert not taken(0)
    keys_in_both = taken(50) & taken(50, OLDER)
    assert abs(len(keys_in_both) - len(KEYS) / 4) < 5 * math.sqrt(len(KEYS) * 3 / 16)


def test_the_split_is_fixed_for_it_must_agree_between_versions_of_the_service() -> None:
    split = KeySplit.of("20261120T000000Z-000000000001", 10)

    assert split.hash_seed == 0x181A13216E37230D
    assert [number for number in range(60) if split.has_key(KEYS[number])] == [50, 55, 57, 59]


async def test_a_canary_request_is_answered_whole_and_says_so() -> None:
    world, served, trial = scene(Canary(GENERATION, 100.0, 5.0))
    lookup = ask(entity("u1"), entity("u2"), entity("nobody"), canary_key=b"k")

    routed, part = trial.route(served, lookup.entities, lookup.options)
    answers = await world.ladder.lookup(routed, lookup, time.monotonic())
    trial.count(part, answers)

    assert part == ("canary", b"k", Canary(GENERATION, 100.0, 5.0))
    assert {answer["generation"] for answer in answers} == {GENERATION}
    report = trial.report()
    assert report is not None and report["arms"]["canary"]["requests"] == 1
    assert report["arms"]["canary"]["kinds"] == {"stored": 1}
    text = world.metrics.expose()
    assert b'larder_canary_answers_total{arm="canary",source="l2"} 2' in text
    assert b'larder_canary_answers_total{arm="canary",source="default"} 1' in text
    assert report["arms"]["live"]["requests"] == 0


async def test_an_answer_with_newer_events_is_one_of_the_mix_that_the_other_generation_has_stored() -> None:
    # given a live arm that computes answers of users with newer events, and a canary that has these events in records
    _, served, trial = scene(Canary(GENERATION, 40.0, 5.0))
    keys_by_arm: dict[str, list[bytes]] = {"live": [], "canary": []}
    for key in KEYS:
        _, part = trial.route(served, (), options(key))
        keys_by_arm["live" if part is None else part.arm].append(key)
        computed = {"source": "live", "producer": "live", "events": 2, "items": ["i1"], "scores": [0.5]}
        stored = {"source": "l2", "producer": "batch", "items": ["i1"], "scores": [0.5]}
        trial.count(part, [computed if part is not None and part.arm == "live" else stored])

    # then the shares of sources do not differ between the arms, though no answer of the live arm came from a record
    report = trial.report()
    assert report is not None and min(map(len, keys_by_arm.values())) > 0
    assert {frozenset(counts["kinds"]) for counts in report["arms"].values()} == {frozenset({"stored"})}


async def test_below_a_canary_stands_the_live_generation_marked_as_what_it_is() -> None:
    world, served, trial = scene(Canary(GENERATION, 100.0, 5.0))
    del world.remote.pages[GENERATION, "user_topk", 0]
    lookup = ask(entity("u1"))

    routed, _ = trial.route(served, lookup.entities, lookup.options)
    (answer,) = await world.ladder.lookup(routed, lookup, time.monotonic())

    assert (answer["source"], answer["generation"]) == ("previous", OLDER)
    assert answer["reason"] == "page_missing"


@pytest.mark.parametrize(
    ("lookup", "arm"),
    [
        (ask(entity("u1")), "canary"),  # by default the user
        (ask(entity("u1"), entity("u2")), None),  # not one user
        (ask(entity("i1", "item_similar")), None),  # not a user
        (ask(entity(None, history=(b"i1",))), None),
        (ask(entity("u1"), generation=OLDER), None),  # pinned
        (ask(entity("u1"), entity("u2"), canary_key=b"k"), "canary"),
    ],
)
def test_without_a_key_or_with_a_pin_the_live_one_answers(lookup: Any, arm: str | None) -> None:
    _, served, trial = scene(Canary(GENERATION, 100.0, 5.0))

    routed, canary_part = trial.route(served, lookup.entities, lookup.options)

    assert (canary_part and canary_part.arm) == arm and (routed.live.generation == GENERATION) == (arm == "canary")


async def test_a_replica_that_does_not_hold_it_answers_live_and_counts_that() -> None:
    _, served, trial = scene(Canary(GENERATION, 100.0, 5.0), is_held=False)

    routed, part = trial.route(served, (), options(b"k"))

    assert routed is served and part is None
    not_held_count = trial._metrics.requests.labels("not_held")._value.get()
    assert not_held_count == 1


def test_without_a_canary_nothing_is_routed_counted_or_reported() -> None:
    world, served, trial = scene(None)

    assert trial.route(served, (), options(b"k")) == (served, None)
    assert trial.report() is None and trial.count_feedback(served, None, b"k", "click", 1) is None
    assert b"larder_canary_requests_total{" not in world.metrics.expose()


def test_feedback_counts_for_the_arm_that_answered() -> None:
    _, served, trial = scene(Canary(GENERATION, 50.0, 5.0))
    split = KeySplit.of(GENERATION, 50.0)
    inside = next(key for key in KEYS if split.has_key(key))
    outside = next(key for key in KEYS if not split.has_key(key))

    assert trial.count_feedback(served, GENERATION, None, "click", 2) == "canary"
    assert trial.count_feedback(served, OLDER, None, "click", 3) == "live"
    assert trial.count_feedback(served, "another", None, "click", 4) is None
    assert trial.count_feedback(served, None, inside, "buy", 1) == "canary"
    assert trial.count_feedback(served, None, outside, "buy", 1) == "live"
    report = trial.report()
    assert report is not None
    assert report["arms"]["canary"]["feedback"] == {"click": 2, "buy": 1}
    assert report["arms"]["live"]["feedback"] == {"click": 3, "buy": 1}


def test_the_event_that_decides_is_counted_by_name_and_names_are_bounded_over_all_canaries() -> None:
    running = Runs(Canary(GENERATION, 100.0, 5.0, "purchase"))
    _, served, _ = scene()
    registry = CollectorRegistry()
    trial = CanaryRouter(cast(GenerationHolder, running), CanaryMetrics(registry))
    for started_at in range(5):
        running.canary = Canary(GENERATION, 100.0, float(started_at), "purchase")
        for number in range(30):
            trial.count_feedback(served, GENERATION, None, f"junk-{started_at}-{number}", 1)
        trial.count_feedback(served, GENERATION, None, "purchase", 7)

        report = trial.report()
        assert report is not None and report["arms"]["canary"]["feedback"]["purchase"] == 7

    lines = [line for line in generate_latest(registry).splitlines() if line.startswith(b"larder_feedback_total{")]
    assert len(lines) == COUNTED_EVENTS_MAX + 2  # and the one that decides, and `other`
    assert b'larder_feedback_total{arm="canary",event="purchase"} 35.0' in lines


def test_another_canary_is_counted_from_nothing() -> None:
    running = Runs(Canary(GENERATION, 100.0, 5.0))
    _, served, _ = scene()
    registry = CollectorRegistry()
    trial = CanaryRouter(cast(GenerationHolder, running), CanaryMetrics(registry))
    _, part = trial.route(served, (), options(b"k"))
    trial.count(part, [{"source": "l1"}])

    running.canary = Canary(GENERATION, 100.0, 6.0)

    report = trial.report()
    assert report is not None and report["arms"]["canary"]["requests"] == 0


@pytest.mark.parametrize("later", [Canary(OLDER, 100.0, 6.0), Canary(GENERATION, 50.0, 5.0)])
def test_a_request_under_way_does_not_count_for_the_canary_that_began_meanwhile(later: Canary) -> None:
    running = Runs(Canary(GENERATION, 100.0, 5.0))
    _, served, _ = scene()
    registry = CollectorRegistry()
    trial = CanaryRouter(cast(GenerationHolder, running), CanaryMetrics(registry))
    _, part = trial.route(served, (), options(b"k"))

    running.canary = later
    trial.count_feedback(served, None, b"k", "click", 1)
    trial.count(part, [{"source": "l1"}])

    report = trial.report()
    assert part is not None and report is not None
    assert {arm: arm_report["requests"] for arm, arm_report in report["arms"].items()} == {"live": 0, "canary": 0}
    text = generate_latest(registry)
    line = f'larder_canary_requests_total{{arm="{part.arm}"}} 1'
    assert line.encode() in text  # of all canaries


def test_the_key_comes_from_body_query_or_header_in_that_order() -> None:
    limits: Limits = LIMITS
    body = lookup_from_json({"entities": ["u1"], "canary_key": 7}, "user_topk", limits).options
    assert with_headers(body, [(b"x-larder-canary-key", b"h")], limits).canary_key == b"7"
    assert query_options(b"canary_key=a%20b", limits).canary_key == b"a b"
    header = (b"x-larder-canary-key", "schlüssel".encode())
    headers = [(b"accept", b"*/*"), header, (b"x-deadline-ms", b"200")]
    request_options = with_headers(options(), headers, limits)
    assert request_options.canary_key == read_id("schlüssel", "x") and request_options.deadline_s == 0.2
    assert with_headers(options(), [], limits) == options()
    with pytest.raises(Problem):
        lookup_from_json({"entities": ["u1"], "canary_key": ""}, "user_topk", limits)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"event": "click"}', "body"),
        (b'{"event": "click", "generation": "a", "canary_key": "b"}', "body"),
        (b'{"event": "Click!", "generation": "a"}', "event"),
        (b'{"event": "click", "generation": "a", "count": 0}', "count"),
        (b'{"event": "click", "generation": "a", "count": true}', "count"),
        (b'{"event": "click", "generation": 3}', "generation"),
        (b'{"event": "click", "canary_key": 1.5}', "canary_key"),
        (b'{"event": "click", "generation": "a", "user": 1}', "user"),
    ],
)
def test_feedback_that_cannot_be_counted_is_refused_with_its_field(body: bytes, field: str) -> None:
    with pytest.raises(Problem) as refused:
        feedback_from_json(orjson.loads(body))

    assert refused.value.status == 422 and refused.value.field == field


def test_feedback_is_one_event_unless_it_says_more() -> None:
    for body, expected_feedback in (
        (b'{"event": "click", "generation": "a"}', FeedbackReport("a", None, None, "click", 1)),
        (b'{"event": "buy", "canary_key": 7, "count": 5}', FeedbackReport(None, b"7", None, "buy", 5)),
        (b'{"event": "buy", "arm": "e=a"}', FeedbackReport(None, None, RequestedArm("e", "a"), "buy", 1)),
    ):
        assert feedback_from_json(orjson.loads(body)) == expected_feedback
