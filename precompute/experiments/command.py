"""The command `experiment`: what each action shows."""

import argparse
import time
from typing import Any

from rich.markup import escape
from rich.table import Table

from cache.control.allotment import BUCKETS, size_of
from cache.errors import ConfigError
from cache.store.experiments import Experiment, Experiments
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.experiments import changes
from precompute.experiments.edits import ArmOption, ExperimentOption
from precompute.experiments.exposures import erased_users, gather
from precompute.experiments.freeing import free
from precompute.experiments.status import status


def command(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any] | list[Table | str]:
    """`experiment start|status|share|stop|exposures|retire`."""
    name: str | None = arguments.name
    match arguments.action:
        case "status":
            experiments_status = status(config, name)
            return experiments_status if arguments.json else render_status(experiments_status)
        case "share":
            arms = dict(_share_of(arm_text) for arm_text in arguments.arm)
            if name is None and (arguments.holdout is None or arms or arguments.share is not None):
                raise ConfigError(
                    "name the experiment, or give --holdout alone for that of all", field="name"
                )
            written = changes.change_shares(
                config, name, key_share=arguments.share, arms=arms, holdout=arguments.holdout
            )
            return change_to_json(written, name)
        case "exposures":
            store = config.store()
            return gather(store, at=time.time(), erased=erased_users(store))
        case "retire":
            return free(config, _named(name))
        case "stop":
            return change_to_json(changes.stop(config, _named(name), reason=arguments.reason), name)
    key_share = 1.0 if arguments.share is None else arguments.share
    arms_ = tuple(arm_of(arm_text) for arm_text in arguments.arm)
    option = ExperimentOption(config.namespace, _named(name), arms_, key_share, arguments.sample)
    return change_to_json(
        changes.start(config, option, holdout=arguments.holdout, progress=progress), name
    )


def render_status(experiments_status: dict[str, Any]) -> list[Table | str]:
    """A status for people: a row for each arm."""
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
                escape("; ".join(_event(event, count, arm) for event, count in arm["feedback"].items())),
            )  # fmt: skip
    return [
        table,
        f"holdout {experiments_status['holdout']:.2%}, free {experiments_status['free']:.2%} of all keys",
    ]


def _event(event: str, count: int, arm: dict[str, Any]) -> str:
    ratio_interval = arm["ratios"].get(event)
    if ratio_interval is None:
        return f"{event} {count:,}"
    low, high = ratio_interval["low"], ratio_interval["high"]
    return f"{event} {count:,}: {ratio_interval['ratio']:.3f} ({low:.3f} to {high:.3f})"


def change_to_json(experiments: Experiments, name: str | None) -> dict[str, Any]:
    """JSON-able outcome of a change: the version written, and how the experiment stands."""
    experiment = None if name is None else experiments.find(name)
    return {
        "version": experiments.version,
        "holdout": experiments.holdout_share,
        **({} if experiment is None else _experiment(experiment)),
    }


def _experiment(experiment: Experiment) -> dict[str, Any]:
    return {
        "experiment": experiment.name,
        "state": "over" if experiment.is_over else "running" if experiment.is_running else "held ready",
        "share": size_of(experiment.buckets) / BUCKETS,
        "arms": [f"{arm.name}={arm.namespace}:{size_of(arm.buckets) / BUCKETS:g}" for arm in experiment.arms],
    }  # fmt: skip


def _named(name: str | None) -> str:
    if name is None:
        raise ConfigError("name the experiment", field="name")
    return name


def arm_of(text: str) -> ArmOption:
    """Arm of NAME=NAMESPACE:SHARE; raises ConfigError for anything else."""
    name, equals, namespace_and_share = text.partition("=")
    namespace, colon, share_text = namespace_and_share.rpartition(":")
    if not (name and equals and namespace and colon):
        raise ConfigError(f"--arm is NAME=NAMESPACE:SHARE, not {text!r}", field="arm")
    return ArmOption(name, namespace, _number(share_text, text))


def _share_of(text: str) -> tuple[str, float]:
    name, equals, share_text = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"--arm of `share` is NAME=SHARE, not {text!r}", field="arm")
    return name, _number(share_text, text)


def _number(text: str, arm_text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--arm ends with a share of 1, such as 0.5, not {arm_text!r}", field="arm"
        ) from None
