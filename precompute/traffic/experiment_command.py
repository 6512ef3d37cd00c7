"""Command `experiment`: its actions, the status of experiments, and the removal of an ended one from Redis."""

import argparse
import time
from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from cache.control.control_keys import Control
from cache.errors import ConfigError, Conflict, UnknownGeneration
from cache.format.redis_keys import Keyspace
from cache.l2.sync_clients import connect
from cache.store.artefacts import read_manifest
from cache.store.audit import audited
from cache.traffic.experiments import Experiment, Experiments, latest_experiments, rate_ratio
from cache.traffic.split import BUCKET_COUNT, bucket_count
from precompute.bulk.governor import Governor, open_governor
from precompute.bulk.load import unlink_pages
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.releases.release_log import Releases, open_releases
from precompute.releases.sweep import unlink_recorded
from precompute.traffic import experiments
from precompute.traffic.experiments import ArmOption, ExperimentOption, settings_of
from precompute.traffic.exposures import ArmTotals, erased_users, gather, totals


def command(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any] | list[Table | str]:
    """Run `experiment start|status|share|stop|exposures|retire`."""
    name: str | None = arguments.name
    match arguments.action:
        case "status":
            experiments_status = read_status(config, name)
            return experiments_status if arguments.json else render_status(experiments_status)
        case "share":
            arms = dict(_share_of(arm_text) for arm_text in arguments.arm)
            if name is None and (arguments.holdout is None or arms or arguments.share is not None):
                raise ConfigError(
                    "name the experiment, or give --holdout alone for that of all", field="name"
                )
            written = experiments.change_shares(
                config, name, key_share=arguments.share, arms=arms, holdout=arguments.holdout
            )
            return change_to_json(written, name)
        case "exposures":
            store = config.store()
            return gather(store, at=time.time(), erased=erased_users(store))
        case "retire":
            return free_namespaces(config, _demand_name(name))
        case "stop":
            return change_to_json(
                experiments.stop(config, _demand_name(name), reason=arguments.reason), name
            )
    key_share = 1.0 if arguments.share is None else arguments.share
    arms_ = tuple(arm_of(arm_text) for arm_text in arguments.arm)
    option = ExperimentOption(
        config.namespace, _demand_name(name), arms_, key_share, arguments.sample
    )
    return change_to_json(
        experiments.start(config, option, holdout=arguments.holdout, progress=progress), name
    )


def arm_of(text: str) -> ArmOption:
    """Parse an arm NAME=NAMESPACE:SHARE; raise ConfigError for anything else."""
    name, equals, namespace_and_share = text.partition("=")
    namespace, colon, share_text = namespace_and_share.rpartition(":")
    if not (name and equals and namespace and colon):
        raise ConfigError(f"--arm is NAME=NAMESPACE:SHARE, not {text!r}", field="arm")
    return ArmOption(name, namespace, _share_number(share_text, text))


def _share_of(text: str) -> tuple[str, float]:
    name, equals, share_text = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"--arm of `share` is NAME=SHARE, not {text!r}", field="arm")
    return name, _share_number(share_text, text)


def _share_number(text: str, arm_text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--arm ends with a share of 1, such as 0.5, not {arm_text!r}", field="arm"
        ) from None


def _demand_name(name: str | None) -> str:
    if name is None:
        raise ConfigError("name the experiment", field="name")
    return name


def change_to_json(experiments: Experiments, name: str | None) -> dict[str, Any]:
    """Return the JSON-able outcome of a change: the version written, and the experiment's new state."""
    experiment = None if name is None else experiments.find(name)
    return {
        "version": experiments.version,
        "holdout": experiments.holdout_share,
        **({} if experiment is None else _experiment_summary(experiment)),
    }


def _experiment_summary(experiment: Experiment) -> dict[str, Any]:
    return {
        "experiment": experiment.name,
        "state": "over" if experiment.is_over else "running" if experiment.is_running else "held ready",
        "share": bucket_count(experiment.buckets) / BUCKET_COUNT,
        "arms": [f"{arm.name}={arm.namespace}:{bucket_count(arm.buckets) / BUCKET_COUNT:g}" for arm in experiment.arms],
    }  # fmt: skip


def render_status(experiments_status: dict[str, Any]) -> list[Table | str]:
    """Render a status with a row for each arm."""
    table = Table(
        "experiment",
        "arm",
        "namespace",
        "share",
        "generation",
        "requests",
        "events, over the control's",
    )
    for experiment in experiments_status["experiments"]:
        for arm in experiment["arms"]:
            table.add_row(
                escape(experiment["experiment"]), escape(arm["arm"]), escape(arm["namespace"]),
                f"{experiment['share'] * arm['share']:.2%}", arm["generation"] or "nothing", f"{arm['requests']:,}",
                escape("; ".join(_event_text(event, count, arm) for event, count in arm["feedback"].items())),
            )  # fmt: skip
    return [
        table,
        f"holdout {experiments_status['holdout']:.2%}, free {experiments_status['free']:.2%} of all keys",
    ]


def _event_text(event: str, count: int, arm: dict[str, Any]) -> str:
    ratio_interval = arm["ratios"].get(event)
    if ratio_interval is None:
        return f"{event} {count:,}"
    low, high = ratio_interval["low"], ratio_interval["high"]
    return f"{event} {count:,}: {ratio_interval['ratio']:.3f} ({low:.3f} to {high:.3f})"


def read_status(config: NightConfig, name: str | None = None) -> dict[str, Any]:
    """Return the status of one experiment, or of all listed ones; raise Conflict for an unknown name."""
    all_experiments = latest_experiments(config.store())
    if name is not None and all_experiments.find(name) is None:
        raise Conflict(f"there is no experiment {name!r}")
    selected_experiments = [
        experiment for experiment in all_experiments.experiments if name in (None, experiment.name)
    ]
    with connect(config.redis_url, config.redis_timeout_s) as client:
        experiments = [
            _experiment_status(experiment, config.namespace, totals(config.store(), experiment.name), {
                arm.namespace: Control(client, Keyspace(arm.namespace)) for arm in experiment.arms
            })
            for experiment in selected_experiments
        ]  # fmt: skip
    return {**_layer(all_experiments), "experiments": experiments}


def _experiment_status(
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
        pointer = control.read_pointer()
        arms.append({
            "arm": arm.name,
            "namespace": arm.namespace,
            "share": bucket_count(arm.buckets) / BUCKET_COUNT,
            "generation": None if pointer is None else pointer.generation,
            "replicas": sum(replica.served_generation is not None for replica in control.replicas()),
            **total.to_json(),
            "ratios": {} if arm.namespace == own_namespace else event_ratios(base or ArmTotals(), total),
        })  # fmt: skip
    return {
        "experiment": experiment.name,
        "share": bucket_count(experiment.buckets) / BUCKET_COUNT,
        "sample": experiment.sample,
        "created_at": experiment.created_at,
        "started_at": experiment.started_at,
        "stopped_at": experiment.stopped_at,
        "arms": arms,
    }


def event_ratios(base: ArmTotals, arm: ArmTotals) -> dict[str, Any]:
    """Return the ratio of each event's rate to the control's, with bounds valid at all looks; null: unbounded."""
    ratio_by_event = {}
    for event in sorted({*base.feedback, *arm.feedback}):
        ratio = rate_ratio(arm.feedback[event], arm.requests, base.feedback[event], base.requests)
        ratio_by_event[event] = None if ratio is None else ratio._asdict()
    return ratio_by_event


def _layer(all_experiments: Experiments) -> dict[str, Any]:
    used_bucket_count = sum(
        bucket_count(experiment.buckets) for experiment in all_experiments.current
    )
    holdout = bucket_count(all_experiments.holdout)
    return {
        "version": all_experiments.version,
        "holdout": holdout / BUCKET_COUNT,
        "free": (BUCKET_COUNT - used_bucket_count - holdout) / BUCKET_COUNT,
    }


def free_namespaces(config: NightConfig, name: str) -> dict[str, object]:
    """Remove the keys of an ended experiment's namespaces from Redis; return their number, and the namespaces kept.

    The service's own namespace, those that another experiment names, and those with a live replica are kept. For
    Redis it is like a loss: files and release records stay, and `larder restore` in such a namespace brings them
    back. Raises Conflict for an experiment that is not over.
    """
    record = latest_experiments(config.store())
    experiment = record.find(name)
    if experiment is None or not experiment.is_over:
        raise Conflict(f"experiment {name} is not over: `experiment stop` ends it")
    needed = {config.namespace, *record.namespaces(config.namespace)}
    freed, kept_namespaces, keys = [], [], 0
    for arm in experiment.arms:
        if arm.namespace in needed:
            continue
        with open_releases(settings_of(config, arm.namespace)) as releases:
            if releases.control.replicas():
                kept_namespaces.append(arm.namespace)
                continue
            with audited(
                config.store(), "experiment", f"retire {name}", actor=config.actor
            ) as audit_details:
                audit_details["namespace"] = arm.namespace
                with open_governor(config.governor, releases.control) as governor:
                    keys += _free_namespace(releases, governor)
        freed.append(arm.namespace)
    return {"experiment": name, "freed": freed, "kept": kept_namespaces, "keys": keys}


def _free_namespace(releases: Releases, governor: Governor) -> int:
    """Remove a namespace's keys: the pointer first, so that no replica starts, rows last: a retry needs them."""
    control, history = releases.control, releases.history()
    control.client.delete(control.keyspace.live, control.keyspace.next)
    removed = 0
    for generation in sorted(control.rows()):
        try:
            manifest = read_manifest(releases.store, generation)
        except UnknownGeneration:
            removed += unlink_recorded(releases, generation, history, governor=governor)
        else:
            removed += unlink_pages(control.client, control.keyspace, manifest, governor=governor)
        control.drop_row(generation)
    return removed
