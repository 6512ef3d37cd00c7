"""Status of experiments: shares, arms, and what answers in each."""

from collections.abc import Mapping
from typing import Any

from cache.control.allotment import BUCKETS, size_of
from cache.control.rate_ratio import rate_ratio
from cache.errors import Conflict
from cache.format.redis_keys import Keyspace
from cache.store.experiments import Experiment, Experiments, latest_experiments
from precompute.config.settings import NightConfig
from precompute.control.control_keys import Control, connect
from precompute.experiments.exposures import ArmTotals, totals


def status(config: NightConfig, name: str | None = None) -> dict[str, Any]:
    """Status of one experiment, or of all that are listed; raises Conflict for a name that is not."""
    found = latest_experiments(config.store())
    if name is not None and found.find(name) is None:
        raise Conflict(f"there is no experiment {name!r}")
    shown = [each for each in found.experiments if name in (None, each.name)]
    with connect(config.redis_url, config.redis_timeout_s) as client:
        experiments = [
            _experiment(each, config.namespace, totals(config.store(), each.name), {
                arm.namespace: Control(client, Keyspace(arm.namespace)) for arm in each.arms
            })
            for each in shown
        ]  # fmt: skip
    return {**_layer(found), "experiments": experiments}


def ratios(base: ArmTotals, arm: ArmTotals) -> dict[str, Any]:
    """Rate of each event per request over that of the control, with bounds that hold at all looks; null: unbounded."""
    found = {}
    for event in sorted({*base.feedback, *arm.feedback}):
        each = rate_ratio(arm.feedback[event], arm.requests, base.feedback[event], base.requests)
        found[event] = None if each is None else each._asdict()
    return found


def _layer(found: Experiments) -> dict[str, Any]:
    taken = sum(size_of(each.buckets) for each in found.current)
    holdout = size_of(found.holdout)
    return {
        "version": found.version,
        "holdout": holdout / BUCKETS,
        "free": (BUCKETS - taken - holdout) / BUCKETS,
    }


def _experiment(
    each: Experiment, own: str, counted: Mapping[str, ArmTotals], controls: Mapping[str, Control]
) -> dict[str, Any]:
    base = next((counted.get(arm.name) for arm in each.arms if arm.namespace == own), None)
    arms = []
    for arm in each.arms:
        total = counted.get(arm.name, ArmTotals())
        control = controls[arm.namespace]
        pointer = control.pointer()
        arms.append({
            "arm": arm.name,
            "namespace": arm.namespace,
            "share": size_of(arm.buckets) / BUCKETS,
            "generation": None if pointer is None else pointer.generation,
            "replicas": sum(replica.serving is not None for replica in control.replicas()),
            **total.to_json(),
            "ratios": {} if arm.namespace == own else ratios(base or ArmTotals(), total),
        })  # fmt: skip
    return {
        "experiment": each.name,
        "share": size_of(each.buckets) / BUCKETS,
        "sample": each.sample,
        "created_at": each.created_at,
        "started_at": each.started_at,
        "stopped_at": each.stopped_at,
        "arms": arms,
    }
