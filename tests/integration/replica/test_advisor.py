"""What the advisor of a running service predicts is what L1 does at that size."""

import asyncio
import dataclasses
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from precompute.config.settings import NightConfig
from serving.dashboard.service import Dashboard
from tests.attached import attached
from tests.integration.nights import DATA_UNTIL, build_night, build_verified, histories, publish
from tests.integration.serving_app import Running, eventually, serving

L1_BYTES = 120_000
READS = 2_500


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("advisor"), redis_url)


@pytest.fixture(scope="module")
def requested_ids(night: NightConfig) -> list[str]:
    """Single lookups and batches of users, some far more popular than others; and of strangers."""
    rng = np.random.default_rng(0)
    users = [*sorted(histories(night)), *(f"nobody-{number}" for number in range(20))]
    weights = 1 / rng.permutation(np.arange(1, len(users) + 1)) ** 0.8
    return [str(user_id) for user_id in rng.choice(users, READS, p=weights / weights.sum())]


async def look_up(app: Running, user_ids: list[str]) -> float:
    """The share of these reads that L1 answered, over all requests."""
    counters = app.service.tiers.counters
    counters.add_pending_ready_answers()
    counters_before = dataclasses.replace(counters)
    total = counters_before.result_total
    for start in range(0, len(user_ids), 25):
        for user in user_ids[start : start + 15]:
            await app.get(f"/v1/lookup/user_topk/{user}", k=10)
        entities = [{"id": user} for user in dict.fromkeys(user_ids[start + 15 : start + 25])]
        await app.post("/v1/lookup/user_topk", {"entities": entities})
    counters.add_pending_ready_answers()
    return (counters.l1_total - counters_before.l1_total) / (counters.result_total - total)


async def read_predicted_ratios(app: Running) -> dict[str, float]:
    """Return the advisor's predictions once it has seen all reads."""
    readings: list[dict[tuple[str, ...], float]] = []

    async def is_done() -> bool:
        readings.append(await app.scrape_samples("larder_l1_predicted_hit_ratio"))
        # A step of the advisor counts the reads first, then takes a part of them in each iteration of the loop.
        return (
            bool(readings[-1])
            and len(readings) > 1
            and readings[-1] == readings[-2]
            and not app.service.tiers.access_trace
        )

    assert await eventually(is_done)
    return {size: value for (size,), value in readings[-1].items()}


async def test_its_prediction_is_what_l1_of_that_size_does(night: NightConfig, requested_ids: list[str]) -> None:
    measured_by_size: dict[str, float] = {}
    predicted: dict[str, float] = {}
    for size, times in (("half", 0.5), ("now", 1.0), ("double", 2.0)):
        async with serving(night, l1_bytes=int(L1_BYTES * times)) as app:
            measured_by_size[size] = await look_up(app, requested_ids)
            if size == "now":
                predicted = await read_predicted_ratios(app)
                advice = attached(app.service, Dashboard).advisor()
    assert advice is not None and advice["sampling_rate"] == 1.0
    assert advice["sentence"].startswith("L1 of 117 KiB gives ")
    assert predicted["now"] == pytest.approx(measured_by_size["now"], abs=0.03)
    assert predicted["double"] == pytest.approx(measured_by_size["double"], abs=0.04)
    # The sample also has ready answers that a smaller L1 would have lost, besides their records.
    assert predicted["half"] == pytest.approx(measured_by_size["half"], abs=0.08)


async def test_after_a_flip_it_goes_on_with_the_keys_of_the_new_generation(tmp_path: Path, redis_url: str) -> None:
    night = build_night(tmp_path, redis_url, users=200, items=60)
    users = sorted(histories(night))
    later = (datetime.fromisoformat(DATA_UNTIL) + timedelta(minutes=30)).isoformat()
    next_ = await asyncio.to_thread(build_verified, night, later)
    async with serving(night, l1_bytes=4 << 20) as app:
        await look_up(app, users * 3)
        ratios_before = await read_predicted_ratios(app)
        await asyncio.to_thread(publish, night, next_)

        async def is_flipped() -> bool:
            # The advisor's next step notes the flip; it takes keys read before that, within a quarter of a second, for
            # known.
            return app.service.tiers.access_trace.generation == next_

        assert await eventually(is_flipped)
        await look_up(app, users * 3)
        after = await read_predicted_ratios(app)
        keys = (await app.scrape_samples("larder_l1_advisor_sampled_keys"))[()]

    # Each key is new once more, except keys that were preloaded: L1 had them, the sample had not.
    assert after["now"] == pytest.approx(ratios_before["now"], abs=0.1)
    assert len(users) <= keys <= 3 * len(users)


async def test_switched_off_nothing_is_sampled_and_ready_answers_are_not_counted(
    night: NightConfig, requested_ids: list[str]
) -> None:
    async with serving(night, observe=False) as app:
        await look_up(app, requested_ids[:100] * 3)

        assert attached(app.service, Dashboard).advisor() is None and not app.service.tiers.access_trace
        answers = await app.scrape_samples("larder_answers_total")
        sampled = await app.scrape_samples("larder_l1_advisor_sampling_rate")
    assert sum(answers.values()) < 300
    assert sampled == {(): 0.0}
