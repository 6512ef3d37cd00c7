"""Warming: the wait until every replica answers from the published generation."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cache.control.control_keys import Control, Replica
from cache.l2.sync_clients import connect
from cache.store.releases import Pointer
from precompute.builds.build import Build, timed
from precompute.config.progress import Step
from precompute.config.settings import NightConfig
from precompute.steps.night import Night, StepRow

WARM_POLL_S = 0.1


def run(config: NightConfig, build: Mapping[str, Any]) -> Step:
    """Wait, up to `warm_timeout_s`, until every live replica answers from the generation; how far apart they swapped.

    `skew_ms`: between the first swap and the last, null below two; `lag_ms`: each one's behind `published_at`.
    """
    generation, started = str(build["generation"]), time.perf_counter()
    with (
        timed(Build.of(config, build), "warm"),
        connect(config.redis_url, config.redis_timeout_s) as client,
    ):
        control = Control(client, config.keyspace())
        while True:
            replicas = control.replicas()
            waiting = [replica.name for replica in replicas if replica.serving != generation]
            seconds = time.perf_counter() - started
            if not waiting or seconds > config.warm_timeout_s:
                return {
                    "generation": generation,
                    "replicas": len(replicas),
                    "waiting": waiting,
                    "seconds": round(seconds, 3),
                    **_flip_of(control.pointer(), replicas),
                }
            time.sleep(WARM_POLL_S)


def _flip_of(pointer: Pointer | None, replicas: Sequence[Replica]) -> Step:
    """Skew and lags (ms) of the replicas there when the pointer moved; one that started later has not flipped."""
    swapped = {
        replica.name: replica.swapped_at
        for replica in replicas
        if pointer is not None and replica.epoch == pointer.epoch and replica.swapped_at is not None
    }
    times = sorted(swapped.values())
    at = 0.0 if pointer is None else pointer.published_at
    return {
        "skew_ms": round(1000 * (times[-1] - times[0]), 1) if len(times) > 1 else None,
        "lag_ms": {
            name: round(1000 * (swapped_at - at), 1) for name, swapped_at in swapped.items()
        },
    }


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    step_result = run(night.config, night.build)
    if not step_result["replicas"]:
        return StepRow(step_result, "no replica is listening")
    follow = step_result["replicas"] - len(step_result["waiting"])
    apart = "" if step_result["skew_ms"] is None else f", {step_result['skew_ms']:.0f} ms apart"
    return StepRow(step_result, f"{follow} of {step_result['replicas']} replicas follow{apart}")
