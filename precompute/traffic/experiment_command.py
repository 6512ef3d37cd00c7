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
from precompute.traffic.experiments import ArmOption, ExperimentOption, settings_for_namespace
from precompute.traffic.exposures import ArmTotals, erased_users, gather_exposures, read_totals_by_arm


def command(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any] | list[Table | str]:
    """Run `experiment start|status|share|stop|exposures|retire`."""
    experiment_name: str | None = arguments.name
    match arguments.action:
        case "status":
            experiments_status = read_status(config, experiment_name)
            return experiments_status if arguments.json else render_status(experiments_status)
        case "share":
            share_by_arm = dict(_parse_arm_share(arm_text) for arm_text in arguments.arm)
            if experiment_name is None and (arguments.holdout is None or share_by_arm or arguments.share is not None):
                raise ConfigError("name the experiment, or give only --holdout, for all experiments", field="name")
            changed_experiments = experiments.change_shares(
                config,
                experiment_name,
                key_share=arguments.share,
                share_by_arm=share_by_arm,
                holdout_share=arguments.holdout,
            )
            return change_to_json(changed_experiments, experiment_name)
        case "exposures":
            store = config.store()
            return gather_exposures(store, gathered_at=time.time(), erased_keys=erased_users(store))
        case "retire":
            return free_namespaces(config, _demand_name(experiment_name))
        case "stop":
            return change_to_json(
                experiments.stop(config, _demand_name(experiment_name), reason=arguments.reason), experiment_name
            )
    key_share = 1.0 if arguments.share is None else arguments.share
    arm_options = tuple(parse_arm(arm_text) for arm_text in arguments.arm)
    experiment_option = ExperimentOption(
        config.namespace, _demand_name(experiment_name), arm_options, key_share, arguments.sample
    )
    return change_to_json(
        experiments.start(config, experiment_option, holdout_share=arguments.holdout, progress=progress),
        experiment_name,
    )


def parse_arm(arm_text: str) -> ArmOption:
    """Parse an arm NAME=NAMESPACE:SHARE; raise ConfigError for anything else."""
    arm_name, equals, namespace_and_share = arm_text.partition("=")
    namespace, colon, share_text = namespace_and_share.rpartition(":")
    if not (arm_name and equals and namespace and colon):
        raise ConfigError(f"--arm must be NAME=NAMESPACE:SHARE, not {arm_text!r}", field="arm")
    return ArmOption(arm_name, namespace, _parse_share(share_text, arm_text))


def _parse_arm_share(arm_text: str) -> tuple[str, float]:
    arm_name, equals, share_text = arm_text.partition("=")
    if not (arm_name and equals):
        raise ConfigError(f"--arm of `share` must be NAME=SHARE, not {arm_text!r}", field="arm")
    return arm_name, _parse_share(share_text, arm_text)


def _parse_share(share_text: str, arm_text: str) -> float:
    try:
        return float(share_text)
    except ValueError:
        raise ConfigError(f"--arm must end with a share such as 0.5, not {arm_text!r}", field="arm") from None


def _demand_name(experiment_name: str | None) -> str:
    if experiment_name is None:
        raise ConfigError("name the experiment", field="name")
    return experiment_name


def change_to_json(experiments: Experiments, experiment_name: str | None) -> dict[str, Any]:
    """Return a change as JSON: the version written, and the experiment's new state."""
    experiment = None if experiment_name is None else experiments.find(experiment_name)
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
    """Render a status as a table with a row for each arm."""
    table = Table("experiment", "arm", "namespace", "share", "generation", "requests", "events, over the control's")
    for experiment in experiments_status["experiments"]:
        for arm in experiment["arms"]:
            table.add_row(
                escape(experiment["experiment"]), escape(arm["arm"]), escape(arm["namespace"]),
                f"{experiment['share'] * arm['share']:.2%}", arm["generation"] or "nothing", f"{arm['requests']:,}",
                escape("; ".join(_event_text(event, count, arm) for event, count in arm["feedback"].items())),
            )  # fmt: skip
    return [table, f"holdout {experiments_status['holdout']:.2%}, free {experiments_status['free']:.2%} of all keys"]


def _event_text(event_name: str, event_count: int, arm_status: dict[str, Any]) -> str:
    ratio_interval = arm_status["ratios"].get(event_name)
    if ratio_interval is None:
        return f"{event_name} {event_count:,}"
    lower_bound, upper_bound = ratio_interval["low"], ratio_interval["high"]
    return f"{event_name} {event_count:,}: {ratio_interval['ratio']:.3f} ({lower_bound:.3f} to {upper_bound:.3f})"


def read_status(config: NightConfig, experiment_name: str | None = None) -> dict[str, Any]:
    """Return the status of one experiment, or of all recorded ones; raise Conflict for an unknown name."""
    all_experiments = latest_experiments(config.store())
    if experiment_name is not None and all_experiments.find(experiment_name) is None:
        raise Conflict(f"there is no experiment {experiment_name!r}")
    selected_experiments = [
        experiment for experiment in all_experiments.experiments if experiment_name in (None, experiment.name)
    ]
    with connect(config.redis_url, config.redis_timeout_s) as client:
        experiments = [
            _experiment_status(experiment, config.namespace, read_totals_by_arm(config.store(), experiment.name), {
                arm.namespace: Control(client, Keyspace(arm.namespace)) for arm in experiment.arms
            })
            for experiment in selected_experiments
        ]  # fmt: skip
    return {**_key_space_summary(all_experiments), "experiments": experiments}


def _experiment_status(
    experiment: Experiment,
    own_namespace: str,
    totals_by_arm: Mapping[str, ArmTotals],
    control_by_namespace: Mapping[str, Control],
) -> dict[str, Any]:
    control_totals = next(
        (totals_by_arm.get(arm.name) for arm in experiment.arms if arm.namespace == own_namespace), None
    )
    arm_statuses = []
    for arm in experiment.arms:
        arm_totals = totals_by_arm.get(arm.name, ArmTotals())
        control = control_by_namespace[arm.namespace]
        pointer = control.read_pointer()
        arm_statuses.append({
            "arm": arm.name,
            "namespace": arm.namespace,
            "share": bucket_count(arm.buckets) / BUCKET_COUNT,
            "generation": None if pointer is None else pointer.generation,
            "replicas": sum(replica.served_generation is not None for replica in control.replicas()),
            **arm_totals.to_json(),
            "ratios": {} if arm.namespace == own_namespace else event_ratios(control_totals or ArmTotals(), arm_totals),
        })  # fmt: skip
    return {
        "experiment": experiment.name,
        "share": bucket_count(experiment.buckets) / BUCKET_COUNT,
        "sample": experiment.sample,
        "created_at": experiment.created_at,
        "started_at": experiment.started_at,
        "stopped_at": experiment.stopped_at,
        "arms": arm_statuses,
    }


def event_ratios(control_totals: ArmTotals, arm_totals: ArmTotals) -> dict[str, Any]:
    """Return each event's rate divided by the control's, with bounds valid at all looks; None: unbounded."""
    ratio_by_event = {}
    for event in sorted({*control_totals.count_by_feedback_event, *arm_totals.count_by_feedback_event}):
        ratio_interval = rate_ratio(
            arm_totals.count_by_feedback_event[event],
            arm_totals.request_count,
            control_totals.count_by_feedback_event[event],
            control_totals.request_count,
        )
        ratio_by_event[event] = None if ratio_interval is None else ratio_interval._asdict()
    return ratio_by_event


def _key_space_summary(all_experiments: Experiments) -> dict[str, Any]:
    used_bucket_count = sum(bucket_count(experiment.buckets) for experiment in all_experiments.current)
    holdout_bucket_count = bucket_count(all_experiments.holdout)
    return {
        "version": all_experiments.version,
        "holdout": holdout_bucket_count / BUCKET_COUNT,
        "free": (BUCKET_COUNT - used_bucket_count - holdout_bucket_count) / BUCKET_COUNT,
    }


def free_namespaces(config: NightConfig, experiment_name: str) -> dict[str, object]:
    """Remove an ended experiment's namespaces from Redis; return the number of keys, and the namespaces kept.

    The service's own namespace, those of other experiments, and those with a live replica are kept. Files and release
    records stay, so `larder restore` in such a namespace brings its keys back. Raises Conflict if the experiment is not
    over.
    """
    all_experiments = latest_experiments(config.store())
    experiment = all_experiments.find(experiment_name)
    if experiment is None or not experiment.is_over:
        raise Conflict(f"experiment {experiment_name} is not over: `experiment stop` ends it")
    needed_namespaces = {config.namespace, *all_experiments.namespaces(config.namespace)}
    freed_namespaces, kept_namespaces, removed_key_count = [], [], 0
    for arm in experiment.arms:
        if arm.namespace in needed_namespaces:
            continue
        with open_releases(settings_for_namespace(config, arm.namespace)) as releases:
            if releases.control.replicas():
                kept_namespaces.append(arm.namespace)
                continue
            with audited(
                config.store(), "experiment", f"retire {experiment_name}", actor=config.actor
            ) as audit_details:
                audit_details["namespace"] = arm.namespace
                with open_governor(config.governor, releases.control) as governor:
                    removed_key_count += _free_namespace(releases, governor)
        freed_namespaces.append(arm.namespace)
    return {
        "experiment": experiment_name,
        "freed": freed_namespaces,
        "kept": kept_namespaces,
        "keys": removed_key_count,
    }


def _free_namespace(releases: Releases, governor: Governor) -> int:
    """Remove a namespace's keys: the pointer first, so that no replica starts; rows last, since a retry needs them."""
    control, history = releases.control, releases.history()
    control.client.delete(control.keyspace.live, control.keyspace.staging_note)
    removed_key_count = 0
    for generation in sorted(control.rows()):
        try:
            manifest = read_manifest(releases.store, generation)
        except UnknownGeneration:
            removed_key_count += unlink_recorded(releases, generation, history, governor=governor)
        else:
            removed_key_count += unlink_pages(control.client, control.keyspace, manifest, governor=governor)
        control.drop_row(generation)
    return removed_key_count
