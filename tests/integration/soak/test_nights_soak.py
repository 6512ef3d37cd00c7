"""Mixed load over nights that follow each other: nothing fails or mixes, and what the service holds stays flat."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.parquet as pq
import pytest
import redis.asyncio
from numpy.typing import NDArray

from cache.config.events import EventsConfig
from cache.config.timetable import NIGHT_STEPS
from cache.process.redis_server import RedisServer
from infra.local.service import ServiceProcess
from precompute.config.settings import NightConfig
from precompute.steps import take_events
from precompute.steps.night import Night, find_step
from tests.http_connection import get
from tests.integration import troubled_service
from tests.integration.nights import DATA_UNTIL, environment, histories, prepare, top_lists
from tests.integration.serving_app import eventually
from tests.integration.soak.flat import growth
from tests.integration.soak.mixed_load import MixedLoad

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="what a process holds is read from /proc"
)
SEED: Final = 26
GROWTH_MAX: Final = {
    "RssAnon": 8 << 10, "descriptors": 5.0, "Threads": 2.0, "tasks": 4.0, "redis_kb": 4 << 10
}  # fmt: skip
"""Growth over the second half, by its slope; kB of private memory and of Redis."""
WIDE: Final = {
    "skew_overlap": 0.0, "int8_overlap": 0.0, "list_jaccard": 0.0, "top_items_of_live": 100.0, "score_psi": 100.0,
    "distinct_lists_of_live": 0.0, "heldout_of_live": 0.0, "stale_lists": 1.0,
}  # fmt: skip
"""Gates on what is unusual: clicks at random, some on each of few users, are."""
SAMPLE_COUNT: Final = 4
LISTS_KEPT: Final = 4
"""Generations whose lists are at hand: live, previous, the one to come, and one more."""


@dataclass
class Soak:
    """The service, its load and its nights."""

    night: NightConfig
    service: ServiceProcess
    load: MixedLoad
    nights: int = 0

    def next_night(self) -> str:
        """A whole night whose lists are known before anybody can get one."""
        cut = datetime.fromisoformat(DATA_UNTIL) + timedelta(hours=self.nights)
        night = Night(self.night, f"soak-{uuid.uuid4().hex[:8]}", cut.isoformat())
        if self.nights:
            take_events.run(self.night)
        for name in NIGHT_STEPS:
            if name == "publish":
                generation = night.generation
                self.load.lists = {**self.load.lists, generation: self._lists(generation)}
            row = find_step(name)(night)
            if not night.generation:
                night = replace(night, generation=row.step_result["generation"])
        self.nights += 1
        self.load.newest_us = round(cut.timestamp() * 1e6)
        recent_generations = list(self.load.lists)[-LISTS_KEPT:]
        self.load.lists = {generation: self.load.lists[generation] for generation in recent_generations}
        return generation

    def _lists(self, generation: str) -> dict[str, tuple[str, ...]]:
        return dict(top_lists(self.night, generation, self.load.users))

    async def read_resource_usage(self) -> dict[str, float]:
        """Tasks, descriptors, threads and private memory of the service, and what Redis uses: the least of some looks.

        What requests need while they are under way differs between them.
        """
        samples = [await self._sample_resource_usage() for _ in range(SAMPLE_COUNT)]
        return {name: min(sample[name] for sample in samples) for name in samples[0]}

    async def _sample_resource_usage(self) -> dict[str, float]:
        async with redis.asyncio.Redis.from_url(str(self.night.redis_url)) as client:
            used = int((await client.info("memory"))["used_memory"])
        text = (await get(self.service.url, "/metrics"))[1].decode()
        return {**troubled_service.held_of(text), "redis_kb": used / 1024}


@pytest.fixture
async def soak(tmp_path: Path, own_redis: RedisServer) -> AsyncIterator[Soak]:
    config = prepare(tmp_path / "night", own_redis.url, seed=SEED, users=1_000, items=300)
    config = replace(
        config,
        events=EventsConfig(enabled=True, keep_s=600.0),
        events_url=own_redis.url,
        gates=replace(config.gates, **WIDE),
        sources=replace(config.sources, item_attributes=("category",)),
    )
    items = pq.read_table(config.path("items.parquet")).to_pydict()
    load = MixedLoad(
        sorted(histories(config)),
        dict(zip(items["item"], items["category"], strict=True)),
        np.random.default_rng(SEED),
        {},
    )
    (tmp_path / "larder.toml").write_text("[events]\nenabled = true\nkeep_s = 600.0\n")
    environ = environment(
        config,
        LARDER_CONFIG=str(tmp_path / "larder.toml"),
        LARDER_EVENTS_URL=own_redis.url,
        # Small bounds: they are soon reached, so that what grows afterwards is a leak.
        LARDER_L1_BYTES=str(128 << 10),
        LARDER_ADVISOR_KEYS="1024",
        LARDER_OVERLAY_TTL_S="60",
        # Refusals because other processes load this machine are no finding here; the benches of overload measure
        # refusals.
        LARDER_QUEUE_TARGET_MS="2000",
    )
    service = ServiceProcess(tmp_path / "log", environ, module_name=troubled_service.__name__)
    running = Soak(config, service, load)
    await asyncio.to_thread(running.next_night)
    await asyncio.to_thread(service.__enter__)
    try:
        yield running
    finally:
        await asyncio.to_thread(service.__exit__, None, None, None)


def format_log_line(
    at_s: float, resource_usage: dict[str, float], load: MixedLoad, lately_ms: NDArray[np.float64]
) -> str:
    """A line of the log."""
    p50, p99 = np.quantile(lately_ms, (0.5, 0.99))
    usage_text = ", ".join(f"{name} {value:,.0f}" for name, value in resource_usage.items())
    return (
        f"{at_s:6.0f} s {load.requests:8} requests, p50 {p50:5.1f} ms, p99 {p99:6.1f} ms, "
        f"{len(load.wrong)} wrong: {usage_text}"
    )


async def soaked(soak: Soak, *, seconds: float, rate: float, nights: int, look_s: float) -> dict[str, float]:
    """Run load and many nights for some time, sample resources every `look_s`; return the growth of each.

    Fails for an answer that is wrong, one that never came, or a night that nobody was answered from.
    """
    load, started_at = soak.load, time.monotonic()
    timed_samples: list[tuple[float, dict[str, float]]] = []

    def is_over() -> bool:
        return time.monotonic() - started_at >= seconds and following.done()

    async def follow_nights() -> None:
        for number in range(nights):
            due = started_at + (number + 0.5) * seconds / nights
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            generation = await asyncio.to_thread(soak.next_night)
            took_s = time.monotonic() - max(due, started_at)
            print(f"night {soak.nights}: {generation} in {took_s:.1f} s", flush=True)
            assert await eventually(partial(answered, generation), 60)

    async def answered(generation: str) -> bool:
        return load.generations[generation] > 0

    async def log_samples() -> None:
        logged_count, complained = 0, 0
        while not is_over():
            timed_samples.append((time.monotonic() - started_at, await soak.read_resource_usage()))
            lately = np.asarray(load.seconds[logged_count:] or [0.0]) * 1000
            logged_count = len(load.seconds)
            print(format_log_line(*timed_samples[-1], load, lately), *load.wrong[complained:][:5], sep="\n", flush=True)
            complained = len(load.wrong)
            await asyncio.sleep(look_s)

    following = asyncio.create_task(follow_nights())
    await asyncio.gather(following, log_samples(), load.drive(soak.service.url, rate=rate, is_over=is_over))
    print(f"kinds {dict(load.kinds)}\nsources {dict(load.sources)}")
    print(f"{len(load.generations)} generations answered, {len(load.wrong)} wrong: {load.wrong[:20]}")
    grown = {}
    for name, growth_max in GROWTH_MAX.items():
        values = [resource_usage[name] for _, resource_usage in timed_samples]
        grown[name] = growth([at for at, _ in timed_samples], values)
        print(
            f"{name}: {values[0]:,.0f} first, {np.median(values):,.0f} median, {max(values):,.0f} most, "
            f"growth over the second half {grown[name]:+,.1f} (at most {growth_max:,.0f})"
        )

    assert load.wrong == [] and load.missing() == []
    assert len(load.generations) == nights + 1
    return grown


async def test_nights_under_mixed_load_fail_no_request_and_mix_no_generations(soak: Soak) -> None:
    await soaked(soak, seconds=4, rate=100, nights=1, look_s=0.5)


@pytest.mark.storm
async def test_hours_of_nights_under_mixed_load_leave_nothing_behind(soak: Soak, soak_s: float) -> None:
    grown = await soaked(soak, seconds=soak_s, rate=100, nights=12, look_s=min(10.0, soak_s / 100))

    assert {name for name, more in grown.items() if more > GROWTH_MAX[name]} == set()
