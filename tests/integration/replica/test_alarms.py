"""What goes wrong raises exactly the alarms that it should: a real Prometheus with the rules, over the real service.

Ranges, offsets and `for` of the rules are divided by `FASTER`, nothing else about them is changed. A scenario takes
twenty seconds, five of them until Prometheus takes up its first target, so all but one are left to `make storm`.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from cache.errors import Refused
from cache.process.redis_server import RedisServer
from infra.demo.checks import Judge
from infra.local.service import ServiceProcess
from precompute.cli.override import override
from precompute.config.settings import NightConfig
from precompute.steps import publish as publish_step
from precompute.steps import verify
from tests.integration.bad_inputs import on_another_scale
from tests.integration.clocked_service import AHEAD_FILE
from tests.integration.corpus import build, cut_at
from tests.integration.nights import (
    NEXT,
    build_night,
    build_verified,
    environment,
    histories,
    prepare,
    publish,
    publish_night,
    roll_back,
)
from tests.integration.rearranged import rearrange
from tests.integration.scraping import LOOK_S, Prometheus, needs_prometheus, prometheus, sampling, traffic
from tests.polling import poll_until

pytestmark = needs_prometheus

FASTER = 200.0
"""5 minutes are 1.5 s: six scrapes, three evaluations."""

PACE = {"LarderLatencyBudgetBurnsFast", "LarderLatencyBudgetBurnsSlowly"}
"""Left out: where this machine stalls for a second, answers are slow, and these rightly say so."""

RATE = 60.0
ENOUGH = 100
"""Judged answers; of a drifted generation a quarter of these raise the alarm."""

SILENT_S = 2.0
PATIENCE_S = 40.0


@contextmanager
def watched(folder: Path, night: NightConfig, *, module: str = "serving", **more: str) -> Iterator[Prometheus]:
    """A service under load, scraped."""
    environ = environment(night, LARDER_FIGURES_S="0.3", **more)
    with (
        ServiceProcess(folder / "log", environ, module_name=module) as service,
        prometheus(folder / "prometheus", [service.url], faster=FASTER) as server,
        traffic(service.url, night, Judge(), rate=RATE),
    ):
        yield server


def stays(server: Prometheus, expected: set[str]) -> bool:
    """Return whether exactly these alarms fire before long, and stay."""
    begins = poll_until(lambda: server.firing() - PACE == expected, PATIENCE_S, every_s=LOOK_S)
    changes = begins and poll_until(lambda: server.firing() - PACE != expected, SILENT_S, every_s=LOOK_S)
    return begins and not changes


def test_killing_redis_raises_what_follows_from_it_and_nothing_else(tmp_path: Path, own_redis: RedisServer) -> None:
    night = build_night(tmp_path / "night", own_redis.url, users=200, items=60)
    # Nothing stays in memory, so that every caller notices.
    with watched(tmp_path, night, LARDER_L1_BYTES="1") as server:
        # The alert compares with the mean until half an hour ago.
        yesterday = "avg_over_time(larder:hit_ratio:rate5m[1h] offset 10s)"
        assert poll_until(lambda: server.value(yesterday) > 0.5, PATIENCE_S, every_s=LOOK_S)
        assert server.fired() - PACE == set()

        os.kill(own_redis.pid, signal.SIGKILL)

        expected = {"LarderRedisAway", "LarderStale", "LarderHitRateDropped", "LarderFallbackSurge"}
        assert stays(server, expected), server.firing()
        assert server.fired() - PACE == expected


@pytest.mark.slow
def test_a_night_that_stops_for_two_periods_of_its_schedule_is_missing_and_then_stale(
    tmp_path: Path, redis_url: str
) -> None:
    night = build_night(tmp_path / "night", redis_url, users=60, items=60)
    ahead = tmp_path / "ahead"
    ahead.write_text("0")
    # The tick is half an hour from now: a generation made now belongs to no tick.
    hourly = f"{(datetime.now(UTC).minute + 30) % 60} * * * *"
    more = {"LARDER_SCHEDULE": hourly, "LARDER_SCHEDULE_GRACE_S": "0", AHEAD_FILE: str(ahead)}
    module = "tests.integration.clocked_service"
    with watched(tmp_path, night, module=module, **more) as server:
        assert stays(server, set()), server.firing()

        ahead.write_text("3600")
        missing = {"LarderGenerationMissing"}
        assert stays(server, missing), server.firing()

        ahead.write_text("7200")
        assert stays(server, missing | {"LarderGenerationStale"}), server.firing()
        assert server.fired() - PACE == missing | {"LarderGenerationStale"}


@pytest.mark.slow
def test_a_drifted_generation_raises_its_gate_alone_until_something_is_published(
    tmp_path: Path, redis_url: str
) -> None:
    config = prepare(tmp_path / "night", redis_url, users=200, items=80)
    publish_night(config, cut_at(config, 0.85))
    (tmp_path / "scaled").mkdir()
    scaled = on_another_scale(config, tmp_path / "scaled")
    with watched(tmp_path, config) as server:
        assert stays(server, set()), server.firing()

        generation = build(scaled, cut_at(config, 0.9))
        with pytest.raises(Refused, match="score_psi"):
            verify.run(scaled, {"generation": generation})
        assert stays(server, {"LarderGateRefused"}), server.firing()
        (refused,) = server.run_query('ALERTS{alertname="LarderGateRefused",alertstate="firing"}')
        assert refused["metric"]["rule"] == "score_psi"
        assert server.fired() - PACE == {"LarderGateRefused"}

        override(scaled, generation, rule="score_psi", reason="agreed", attempt="a")
        verify.run(scaled, {"generation": generation})
        publish_step.run(scaled, {"generation": generation}, attempt="b")
        assert poll_until(lambda: "LarderGateRefused" not in server.firing(), PATIENCE_S, every_s=LOOK_S)


@pytest.mark.slow
def test_publishing_a_generation_that_its_model_contradicts_raises_drift_until_it_is_rolled_back(
    tmp_path: Path, redis_url: str
) -> None:
    night = build_night(tmp_path / "night", redis_url, users=200, items=60)
    drifted = build_verified(night, NEXT)
    rearrange(night, drifted, "user_topk")
    judged = "sum(larder_quality_samples_total)"
    with watched(tmp_path, night, **sampling(every_s=0.3)) as server:
        assert poll_until(lambda: server.value(judged) > ENOUGH, PATIENCE_S, every_s=LOOK_S)
        assert stays(server, set()), server.firing()

        publish(night, drifted)
        assert stays(server, {"LarderQualityDrift"}), server.firing()
        assert server.run_query("larder_quality_drift == 1")[0]["metric"]["table"] == "user_topk"
        assert server.fired() - PACE == {"LarderQualityDrift"}
        # Do what the runbook says.
        (up_series,) = server.run_query("up")
        explain_url = f"http://{up_series['metric']['instance']}/v1/explain/user_topk/{min(histories(night))}"
        assert httpx.get(explain_url).json()["page"]["state"] == "damaged"

        roll_back(night)
        over = poll_until(lambda: "LarderQualityDrift" not in server.firing(), PATIENCE_S, every_s=LOOK_S)
        assert over, server.firing()
