"""Every entity has one source, and every miss one reason: whatever is asked for and whatever breaks, the sums agree."""

import random
from collections import Counter, defaultdict
from typing import Any, cast, get_args

import pytest

from cache.errors import TierUnavailable
from cache.store.blocklist import Blocklist
from cache.tiers.l1 import ENTRY_OVERHEAD_BYTES, Absence, LocalTier, NegativeCache
from cache.tiers.tiered import TieredCache
from serving.engine.answer_observer import AnswerObserver
from serving.engine.inference import LiveInferences
from serving.engine.ladder import Ladder
from serving.engine.micro_batcher import MicroBatcher
from serving.generations.served_set import ServedGenerations
from serving.metrics.collectors import COUNTED_MISS_REASONS
from tests.unit.serving.world import GENERATION, OLDER, USERS, World, ask, entity, ids

TABLES = ("user_topk", "user_vector", "user_affinity", "item_similar")


def small_world() -> World:
    """Its L1 holds a handful of records, so that much is evicted."""
    world = World()
    local = LocalTier(9 * (ENTRY_OVERHEAD_BYTES + 120), world.clock)
    negative = NegativeCache(10, 5.0, world.clock)
    world.tiers = TieredCache(local, negative, world.remote, monotonic_clock=world.clock)
    world.inferences = LiveInferences(cast(MicroBatcher, world), world.tiers, overlay_ttl_s=20.0, outage_ttl_s=5.0)
    world.ladder = Ladder(
        world.tiers, world.inferences, world.metrics, l2_deadline_s=1.0, clock=world.clock,
        monotonic_clock=world.clock, observer=AnswerObserver(world.metrics.l1_misses, local.eviction_history),
    )  # fmt: skip
    world.remote.timer = world.clock
    return world


def scraped(world: World) -> dict[str, dict[str, Counter[str]]]:
    """By family and table, the values of the other label."""
    counts_by_family: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    world.metrics.expose()
    for family in world.metrics.registry.collect():
        for sample in family.samples:
            if sample.name.endswith("_total") and "table" in sample.labels:
                source_or_reason = sample.labels.get("source", sample.labels.get("reason", ""))
                counts_by_family[sample.name][sample.labels["table"]][source_or_reason] += int(sample.value)
    return counts_by_family


def failing(reason: str | None) -> TierUnavailable | None:
    return None if reason is None else TierUnavailable("gone", reason=reason)


def draw_request(rng: random.Random) -> Any:
    entities = []
    for _ in range(rng.randrange(1, 6)):
        table = rng.choice(TABLES)
        known_ids = USERS if table.startswith("user") else [f"i{number}" for number in range(20)]
        id_ = rng.choice([*known_ids, *(f"stranger{number}" for number in range(4))])
        history = ids(*rng.sample(["i1", "i2", "i3", "i4"], 2)) if rng.random() < 0.3 else None
        entities.append(entity(id_, table, history=history))
    options: dict[str, Any] = {}
    if rng.random() < 0.2:
        options["fresh"] = True
    if rng.random() < 0.2:
        options["max_age_s"] = rng.choice([1.0, 1e9])
    if rng.random() < 0.1:
        options["exclude"] = ids(*(f"i{number}" for number in range(20)))
    return ask(*entities, **options)


@pytest.mark.parametrize("seed", range(20))
async def test_reasons_sum_to_misses_whatever_breaks(seed: int) -> None:
    rng, world = random.Random(seed), small_world()
    blocklist = Blocklist(1, users=frozenset({b"u3"}))
    live = world.snapshot(blocklist=blocklist)
    served = ServedGenerations(live, world.snapshot(OLDER, blocklist=blocklist) if seed % 2 else None)
    pages = dict(world.remote.pages)
    for _ in range(150):
        world.clock.tick(rng.choice([0.0, 1.0, 7.0]))
        world.remote.pages = dict(pages)
        world.busy = rng.random() < 0.1
        reason = rng.choice(["timeout", "connection", "breaker_open", *[None] * 6])
        world.remote.fails_with = failing(reason)
        for name in pages:
            if rng.random() < 0.05:
                del world.remote.pages[name]
            elif rng.random() < 0.05:
                world.remote.pages[name] = bytes(len(pages[name]))

        answers = await world.ladder.lookup(served, draw_request(rng), world.clock())

        assert all(answer["source"] for answer in answers)
    counts_by_family = scraped(world)
    assert set(counts_by_family["larder_entities_total"]) == set(TABLES)
    for table, total in counts_by_family["larder_entities_total"].items():
        sources = counts_by_family["larder_answers_total"][table]
        misses, l1_misses = (
            counts_by_family["larder_misses_total"][table],
            counts_by_family["larder_l1_misses_total"][table],
        )
        assert sum(sources.values()) == sum(total.values())
        assert sum(l1_misses.values()) == sources["l2"]
        assert sum(misses.values()) == sources["live"] + sources["previous"] + sources["default"]
        assert set(misses) <= set(COUNTED_MISS_REASONS) and set(l1_misses) <= set(get_args(Absence))


async def test_these_lives_meet_every_reason() -> None:
    met: Counter[str] = Counter()
    for seed in range(20):
        rng, world = random.Random(seed), small_world()
        live = world.snapshot(blocklist=Blocklist(1, users=frozenset({b"u3"})))
        pages = dict(world.remote.pages)
        for step in range(150):
            world.clock.tick(rng.choice([0.0, 1.0, 7.0]))
            world.remote.pages = dict(pages)
            reason = rng.choice(["timeout", "connection", "breaker_open", *[None] * 6])
            world.remote.fails_with = failing(reason)
            if step % 10 == 1:
                del world.remote.pages[GENERATION, "user_topk", 0]
            elif step % 10 == 2:
                name = GENERATION, "user_topk", 0
                world.remote.pages[name] = bytes(len(pages[name]))
            await world.ladder.lookup(ServedGenerations(live), draw_request(rng), world.clock())
        for tables in (scraped(world)[name] for name in ("larder_misses_total", "larder_l1_misses_total")):
            for reasons in tables.values():
                met += reasons

    # These runs have no filters and no events, which other tests cover: tests/integration/http/test_filters.py,
    # tests/integration/fresh.
    assert set(COUNTED_MISS_REASONS) - set(met) == {"internal_error", "filtered", "newer_events"}
    assert {"cold_start", "evicted"} <= set(met)
