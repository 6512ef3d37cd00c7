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
    all_experiments = latest_experiments(config.store())
    if name is not None and all_experiments.find(name) is None:
        raise Conflict(f"there is no experiment {name!r}")
    selected_experiments = [
        experiment for experiment in all_experiments.experiments if name in (None, experiment.name)
    ]
    with connect(config.redis_url, config.redis_timeout_s) as client:
        experiments = [
            _experiment(experiment, config.namespace, totals(config.store(), experiment.name), {
                arm.namespace: Control(client, Keyspace(arm.namespace)) for arm in experiment.arms
            })
            for experiment in selected_experiments
        ]  # fmt: skip
    return {**_layer(all_experiments), "experiments": experiments}


def ratios(base: ArmTotals, arm: ArmTotals) -> dict[str, Any]:
    """Rate of each event per request over that of the control, with bounds that hold at all looks; null: unbounded."""
    ratio_by_event = {}
    for event in sorted({*base.feedback, *arm.feedback}):
        ratio = rate_ratio(arm.feedback[event], arm.requests, base.feedback[event], base.requests)
        ratio_by_event[event] = None if ratio is None else ratio._asdict()
    return ratio_by_event


def _layer(all_experiments: Experiments) -> dict[str, Any]:
    used_bucket_count = sum(size_of(experiment.buckets) for experiment in all_experiments.current)
    holdout = size_of(all_experiments.holdout)
    return {
        "version": all_experiments.version,
        "holdout": holdout / BUCKETS,
        "free": (BUCKETS - used_bucket_count - holdout) / BUCKETS,
    }


def _experiment(
    experiment: Experiment,
    own_namespace: str,
    totals_by_arm: Mapping[str, ArmTotals],
    controls: Mapping[str, Control],
) -> dict[str, Any]:
    base = next(
        (totals_by_arm.get(arm.name) for arm in experiment.arms if arm.namespace == own_namespace),
        None,
    )
    arms = []
    for arm in experiment.arms:
        total = totals_by_arm.get(arm.name, ArmTotals())
        control = controls[arm.namespace]
        pointer = control.pointer()
        arms.append({
            "arm": arm.name,
            "namespace": arm.namespace,
            "share": size_of(arm.buckets) / BUCKETS,
            "generation": None if pointer is None else pointer.generation,
            "replicas": sum(replica.serving is not None for replica in control.replicas()),
            **total.to_json(),
            "ratios": {} if arm.namespace == own_namespace else ratios(base or ArmTotals(), total),
        })  # fmt: skip
    return {
        "experiment": experiment.name,
        "share": size_of(experiment.buckets) / BUCKETS,
        "sample": experiment.sample,
        "created_at": experiment.created_at,
        "started_at": experiment.started_at,
        "stopped_at": experiment.stopped_at,
        "arms": arms,
    }
