"""Step `warm`: waits until every replica answers from the published generation."""

import time
from collections.abc import Sequence
from typing import TypedDict

from cache.control.control_keys import Control, Replica
from cache.l2.sync_clients import connect
from cache.store.releases import Pointer
from precompute.builds.build import Build, record_step_time
from precompute.builds.reports import BuildId
from precompute.config.settings import NightConfig
from precompute.steps.night import Night, StepRow

WARM_POLL_INTERVAL_S = 0.1


class FlipFields(TypedDict):
    """Milliseconds: `skew_ms` between the first and the last swap, `lag_ms` of each swap after the publish."""

    skew_ms: float | None
    lag_ms: dict[str, float]


class WarmResult(FlipFields):
    """Result of the step: number of replicas, and the names of those that do not follow yet."""

    generation: str
    replicas: int
    waiting: list[str]
    seconds: float


def run(config: NightConfig, build: BuildId) -> WarmResult:
    """Wait, up to `warm_timeout_s`, until every live replica answers from the generation; return when they swapped.

    `skew_ms`: between the first and the last swap, None for fewer than two; `lag_ms`: of each swap after
    `published_at`.
    """
    generation, started = build["generation"], time.perf_counter()
    with record_step_time(Build.of(config, build), "warm"), connect(config.redis_url, config.redis_timeout_s) as client:
        control = Control(client, config.keyspace())
        while True:
            replicas = control.replicas()
            waiting_replicas = [replica.name for replica in replicas if replica.served_generation != generation]
            seconds = time.perf_counter() - started
            if not waiting_replicas or seconds > config.warm_timeout_s:
                return {
                    "generation": generation,
                    "replicas": len(replicas),
                    "waiting": waiting_replicas,
                    "seconds": round(seconds, 3),
                    **_flip_fields(control.read_pointer(), replicas),
                }
            time.sleep(WARM_POLL_INTERVAL_S)


def _flip_fields(pointer: Pointer | None, replicas: Sequence[Replica]) -> FlipFields:
    """Return skew and lags (ms) of the replicas that swapped; replicas that started after the move did not."""
    swapped_at_by_replica = {
        replica.name: replica.swapped_at
        for replica in replicas
        if pointer is not None and replica.pointer_epoch == pointer.epoch and replica.swapped_at is not None
    }
    swap_times = sorted(swapped_at_by_replica.values())
    published_at = 0.0 if pointer is None else pointer.published_at
    return {
        "skew_ms": round(1000 * (swap_times[-1] - swap_times[0]), 1) if len(swap_times) > 1 else None,
        "lag_ms": {
            name: round(1000 * (swapped_at - published_at), 1) for name, swapped_at in swapped_at_by_replica.items()
        },
    }


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    result = run(night.config, night.build)
    if not result["replicas"]:
        return StepRow(result, "no replica is running")
    follower_count = result["replicas"] - len(result["waiting"])
    skew_text = "" if result["skew_ms"] is None else f", {result['skew_ms']:.0f} ms apart"
    return StepRow(result, f"{follower_count} of {result['replicas']} replicas follow{skew_text}")
