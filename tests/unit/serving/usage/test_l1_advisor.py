"""The advisor keeps the curve of L1 up to date, within its budget, and says it in a sentence."""

import random
from dataclasses import replace
from typing import Any, cast

import pytest

from cache.format.ids import HASH_SPACE
from cache.tiers.access_sample import TRACED_READS_MAX, AccessTrace
from cache.tiers.l1 import Entry, LocalKey, LocalTier
from cache.tiers.reads import Counters
from cache.tiers.tiered import TieredCache
from serving.generations.snapshot import Snapshot
from serving.usage.l1_advisor import (
    BUSY_SAMPLING_RATE,
    FREE_TOUCHES_PER_S,
    SAMPLED_READS_MIN,
    STEP_S,
    TOUCHES_PER_READ,
    TOUCHES_PER_S,
    L1Advisor,
)
from tests.fakes import FakeClock
from tests.unit.serving.world import World

KEYS_MAX = 4_096


class Tiers:
    """What the advisor watches, driven by hand."""

    def __init__(self, l1_bytes: int) -> None:
        self.local_tier = LocalTier(l1_bytes)
        self.access_trace = AccessTrace()
        self.counters = Counters()


class Worker:
    """One worker's advisor."""

    def __init__(self, l1_bytes: int = 100_000, keys_max: int = KEYS_MAX) -> None:
        self.clock, self.tiers = FakeClock(), Tiers(l1_bytes)
        self.live: Snapshot | None = World().snapshot()
        self.advisor = L1Advisor(cast(TieredCache, self.tiers), lambda: self.live, keys_max, self.clock)
        self.rng = random.Random(0)
        self._spots: dict[int, int] = {}

    def spot(self, key: int) -> int:
        return self._spots.setdefault(key, self.rng.randrange(HASH_SPACE))

    def read(self, *keys: int, size: int = 1_000) -> None:
        for key in keys:
            self.tiers.counters.l1_records += 1
            if self.spot(key) <= self.tiers.access_trace.greatest_sampled_spot:
                self.tiers.access_trace.append((self.spot(key), size))

    async def step(self, seconds: float = STEP_S) -> None:
        self.clock.tick(seconds)
        await self.advisor.step()

    async def reading(self, keys: list[int]) -> dict[str, Any]:
        """Reads at a pace that the advisor likes; what it tells afterwards."""
        await self.step()
        for start in range(0, len(keys), 500):
            self.read(*keys[start : start + 500])
            await self.step()
        report = self.advisor.to_json()
        assert report is not None
        return report


@pytest.fixture
def worker() -> Worker:
    return Worker()


async def test_it_says_what_more_and_less_would_give(worker: Worker) -> None:
    # A cycle over 150 keys, too many for 100 entries and few enough for 200; then two of them in turn.
    report = await worker.reading(list(range(150)) * 3 + [0, 1] * 75)

    assert report["hit_ratio"] == pytest.approx(148 / 600, abs=1e-4)
    assert report["sentence"] == ("L1 of 97.7 KiB gives 24.7 %, doubling adds 50.3 points, 2.16 KiB gives as much")
    assert report["sampling_rate"] == 1.0 and report["sampled"] == 150


async def test_the_curve_grows_with_bytes_and_ends_where_it_says(worker: Worker) -> None:
    report = await worker.reading([int(worker.rng.paretovariate(0.8)) for _ in range(4_000)])

    sizes = [point["bytes"] for point in report["curve"]]
    ratios = [point["hit_ratio"] for point in report["curve"]]
    entries = [point["entries"] for point in report["curve"]]
    assert sizes == sorted(sizes) and ratios == sorted(ratios) and entries == sorted(entries)
    assert sizes[0] == report["budget_bytes"] // 64 and sizes[-1] == 8 * report["budget_bytes"]
    assert report["hit_ratio"] == ratios[sizes.index(100_000)]
    assert entries[sizes.index(100_000)] == 100


async def test_nothing_is_said_before_there_was_enough_traffic(worker: Worker) -> None:
    await worker.step()
    worker.read(*range(SAMPLED_READS_MIN - 1))
    await worker.step()

    assert worker.advisor.to_json() is None
    worker.read(0)
    await worker.step()
    assert worker.advisor.to_json() is not None


async def test_the_place_in_the_table_counts(worker: Worker) -> None:
    for number in range(40):
        key = LocalKey("g", "t", number)
        worker.tiers.local_tier.put(key, Entry(bytes(600), number))
    slot_bytes = worker.tiers.local_tier.table_bytes_per_entry
    report = await worker.reading(list(range(200)) * 2)

    at_budget = next(point for point in report["curve"] if point["bytes"] == 100_000)
    assert slot_bytes > 50
    assert at_budget["entries"] == 100_000 // (1_000 + slot_bytes)


async def test_a_flip_starts_the_sample_again_and_keeps_what_was_counted(worker: Worker) -> None:
    report_before = await worker.reading([1, 2] * 500)
    assert worker.live is not None
    worker.live = replace(worker.live, generation="another")
    await worker.step()
    after = worker.advisor.to_json()

    assert after is not None and after["sampled"] == 0
    assert after["hit_ratio"] == pytest.approx(report_before["hit_ratio"])
    assert worker.tiers.access_trace.greatest_sampled_spot == HASH_SPACE - 1


async def test_a_busy_service_is_sampled_in_part_an_idle_one_whole(worker: Worker) -> None:
    await worker.step()
    for _ in range(60):
        worker.read(*(worker.rng.randrange(500) for _ in range(60)))
        await worker.step()
    idle = worker.tiers.access_trace.greatest_sampled_spot + 1
    for _ in range(60):
        worker.read(*(worker.rng.randrange(500) for _ in range(400)))
        await worker.step()

    assert idle == HASH_SPACE
    assert worker.tiers.access_trace.greatest_sampled_spot + 1 == BUSY_SAMPLING_RATE * HASH_SPACE


async def test_more_touches_than_it_may_afford_halve_the_sample() -> None:
    worker = Worker(l1_bytes=1 << 30, keys_max=1 << 20)
    await worker.step()
    for _ in range(40):
        worker.read(*(worker.rng.randrange(20_000) for _ in range(12_000)))
        await worker.step()

    rate = (worker.tiers.access_trace.greatest_sampled_spot + 1) / HASH_SPACE
    reads_per_s = 12_000 / STEP_S
    allowed_per_s = FREE_TOUCHES_PER_S + TOUCHES_PER_READ * reads_per_s
    assert allowed_per_s < TOUCHES_PER_S
    assert allowed_per_s / 2 <= reads_per_s * rate <= 1.05 * allowed_per_s
    report = worker.advisor.to_json()
    assert report is not None and report["sampling_rate"] == pytest.approx(rate)
    assert report["hit_ratio"] == pytest.approx(1 - 20_000 / 480_000, abs=0.03)


async def test_a_step_that_lost_reads_counts_none_of_them_and_says_so(worker: Worker) -> None:
    report_before = await worker.reading([1, 2] * 500)
    worker.read(*range(TRACED_READS_MAX + 10))
    await worker.step()
    after = worker.advisor.to_json()

    assert worker.advisor.lost_step_count == 1
    assert after is not None and after["hit_ratio"] == pytest.approx(report_before["hit_ratio"])
    assert worker.tiers.access_trace.greatest_sampled_spot + 1 <= BUSY_SAMPLING_RATE * HASH_SPACE


async def test_switched_off_it_samples_nothing_and_says_nothing() -> None:
    worker = Worker(keys_max=0)
    worker.read(*range(1_000))

    assert not worker.tiers.access_trace and worker.advisor.step_s == 0.0
    assert worker.advisor.to_json() is None
    samples = [sample for family in worker.advisor.collect() for sample in family.samples]
    assert {sample.name: sample.value for sample in samples} == {
        "larder_l1_advisor_sampling_rate": 0.0,
        "larder_l1_advisor_sampled_keys": 0.0,
        "larder_l1_advisor_lost_steps_total": 0.0,
    }


async def test_three_points_of_the_curve_are_gauges(worker: Worker) -> None:
    report = await worker.reading([int(worker.rng.paretovariate(0.8)) for _ in range(4_000)])

    ratios = {point["bytes"]: point["hit_ratio"] for point in report["curve"]}
    predicted = next(iter(worker.advisor.collect()))
    assert {sample.labels["size"]: sample.value for sample in predicted.samples} == {
        "half": ratios[50_000],
        "now": ratios[100_000],
        "double": ratios[200_000],
    }
