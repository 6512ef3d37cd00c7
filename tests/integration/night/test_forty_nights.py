"""Forty nights in a Redis of exactly the size that `plan` asks for: each is published, or refused for its own fault."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar

import pyarrow.parquet as pq
import pytest

from cache.errors import BundleError, ConfigError, LarderError, Refused, SourceError
from cache.l2.sync_clients import connect
from cache.process.redis_server import RedisServer
from cache.store.releases import all_releases
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig, peak_generation_count
from precompute.gates.judge import GATES
from precompute.planning.capacity import CapacityLimits, find_limits
from precompute.planning.forecast import forecast, judge_forecast
from precompute.planning.options import PlanParameters
from precompute.steps import assemble, begin, embed_items, index, load, publish, quantize, retire, score, verify, warm
from tests.integration.nights import prepare

T = TypeVar("T")

SEED = int(os.environ.get("LARDER_SEED", "20260131"))
FIRST = datetime(2026, 2, 1, 3, tzinfo=UTC)
NIGHTS, BAD_EVERY = 40, 5
OUTAGE_S = 5.0
TIMEOUT_S = 2.0
"""Of a wait for Redis: below the outage, so that steps do see it."""

FINAL = (BundleError, ConfigError, Refused, SourceError)
TRIES, PAUSE_S = 3, 2.0
"""As the DAG has it, but for a shorter pause."""


def run_with_retries(step: Callable[[], T]) -> T:
    """A step as Airflow takes it: again after a pause, unless the same inputs would fail again."""
    for tries_left in reversed(range(TRIES)):
        try:
            return step()
        except FINAL:
            raise
        except LarderError as error:
            print(f"  {type(error).__name__}: {error.message[:110]}; {tries_left} tries left")
            if not tries_left:
                raise
            time.sleep(PAUSE_S)
    raise AssertionError


@contextmanager
def outage(server: RedisServer, at: int) -> Iterator[Progress]:
    """Redis hangs for `OUTAGE_S` from the gate of that number on (0: before the first), once."""
    timer = threading.Timer(OUTAGE_S, os.kill, (server.pid, signal.SIGCONT))

    def progress(_label: str, number: int, _total: int) -> None:
        if number == at and timer.ident is None:
            os.kill(server.pid, signal.SIGSTOP)
            timer.start()

    progress("verify", 0, len(GATES))
    try:
        yield progress
    finally:
        if timer.ident is not None:
            timer.join()
        else:
            timer.cancel()


def night(config: NightConfig, due: datetime, verifying: Callable[[], AbstractContextManager[Progress]]) -> None:
    """A scheduled night. Raises Refused."""
    name = f"scheduled-{due:%Y%m%d}"
    build = run_with_retries(lambda: begin.run(config, data_until=None, run_after=due.isoformat()))
    run_with_retries(lambda: embed_items.run(config, build))
    for shard in build["shards"]:
        run_with_retries(partial(score.run_shard, config, build, shard))
    run_with_retries(lambda: assemble.run(config, build))
    run_with_retries(lambda: index.run(config, build))
    run_with_retries(lambda: quantize.run(config, build))
    run_with_retries(lambda: load.run(config, build))
    with verifying() as progress:
        verified = run_with_retries(lambda: verify.run(config, build, attempt=name, progress=progress))
    run_with_retries(lambda: publish.run(config, verified, attempt=name))
    run_with_retries(lambda: warm.run(config, build))
    run_with_retries(lambda: retire.run(config, attempt=name))


def planned_bytes(config: NightConfig) -> tuple[int, int]:
    """What `plan` says of Redis: all that it holds at the peak, and `maxmemory` for that."""
    plan = forecast(config, PlanParameters(seconds=0.2, sample=0.5))
    record_bytes = max(layout.size_bytes for _, layout in plan.shape.layout_by_table.values())
    (node,) = find_limits(config, record_bytes=record_bytes).nodes
    planned = node.other_bytes + peak_generation_count(config.keep) * plan.redis_bytes
    print(f"planned are {planned:,} bytes, {plan.redis_bytes:,} a generation")
    limit = int(planned / config.gates.redis_headroom) + 1
    for size, fits in ((limit, True), (limit - 20, False)):
        sized = CapacityLimits((replace(node, limit_bytes=size),), 1 << 50, 1 << 50)
        assert all(verdict.passed for verdict in judge_forecast(config, plan, sized)) == fits
    return planned, limit


@pytest.mark.storm
def test_forty_nights_fit_what_plan_asked_for_and_need_no_operator(tmp_path, own_redis):
    rng = random.Random(SEED)
    print(f"from seed {SEED}")
    config = replace(
        prepare(tmp_path, own_redis.url, users=6_000, items=150),
        superseded_grace_s=0.0, redis_timeout_s=TIMEOUT_S, load_chunk_bytes=1 << 16,
    )  # fmt: skip
    # A source that lost most of its rows ends this night only.
    source = pq.read_table(config.path("interactions.parquet"))
    pq.write_table(source.slice(0, len(source) // 4), config.path("few.parquet"))
    broken = replace(config, sources=replace(config.sources, interactions=("few.parquet",)))
    planned, limit = planned_bytes(config)
    outcomes: list[str] = []
    with connect(own_redis.url, 30.0) as client:
        client.config_set("maxmemory-policy", "volatile-lru")
        client.config_set("maxmemory", limit)
        client.config_resetstat()
        for number in range(NIGHTS):
            due, at = FIRST + timedelta(days=number), rng.randrange(len(GATES))
            is_bad = number % BAD_EVERY == BAD_EVERY - 1
            try:
                night(broken if is_bad else config, due, partial(outage, own_redis, at))
                outcomes.append("published")
            except Refused as error:
                outcomes.append(str(error.details["rule"]))
            generation_ids = config.store().names("generations")
            used = client.info("memory")["used_memory"]
            print(f"night {number} {outcomes[-1]}, Redis hung at gate {at}; {used:,} bytes, {generation_ids}")
            assert len(generation_ids) <= peak_generation_count(config.keep)
        peak = client.info("memory")["used_memory_peak"]

    week = ["published"] * (BAD_EVERY - 1) + ["coverage_of_live"]
    assert outcomes == week * (NIGHTS // BAD_EVERY)
    actions = [release.action for release in all_releases(config.store())]
    assert actions.count("publish") == outcomes.count("published")
    assert actions.count("refuse") == outcomes.count("coverage_of_live")
    assert peak <= planned
