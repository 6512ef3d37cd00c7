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
            found = status(config, name)
            return found if arguments.json else shown(found)
        case "share":
            arms = dict(_share_of(each) for each in arguments.arm)
            if name is None and (arguments.holdout is None or arms or arguments.share is not None):
                raise ConfigError(
                    "name the experiment, or give --holdout alone for that of all", field="name"
                )
            written = changes.share(
                config, name, share=arguments.share, arms=arms, holdout=arguments.holdout
            )
            return told(written, name)
        case "exposures":
            store = config.store()
            return gather(store, at=time.time(), erased=erased_users(store))
        case "retire":
            return free(config, _named(name))
        case "stop":
            return told(changes.stop(config, _named(name), reason=arguments.reason), name)
    share = 1.0 if arguments.share is None else arguments.share
    arms_ = tuple(arm_of(each) for each in arguments.arm)
    asked = ExperimentOption(config.namespace, _named(name), arms_, share, arguments.sample)
    return told(changes.start(config, asked, holdout=arguments.holdout, progress=progress), name)


def shown(found: dict[str, Any]) -> list[Table | str]:
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
    for each in found["experiments"]:
        for arm in each["arms"]:
            table.add_row(
                escape(each["experiment"]), escape(arm["arm"]), escape(arm["namespace"]),
                f"{each['share'] * arm['share']:.2%}", arm["generation"] or "nothing", f"{arm['requests']:,}",
                escape("; ".join(_event(event, count, arm) for event, count in arm["feedback"].items())),
            )  # fmt: skip
    return [table, f"holdout {found['holdout']:.2%}, free {found['free']:.2%} of all keys"]


def _event(event: str, count: int, arm: dict[str, Any]) -> str:
    found = arm["ratios"].get(event)
    if found is None:
        return f"{event} {count:,}"
    return f"{event} {count:,}: {found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def told(found: Experiments, name: str | None) -> dict[str, Any]:
    """JSON-able outcome of a change: the version written, and how the experiment stands."""
    known = None if name is None else found.find(name)
    return {
        "version": found.version,
        "holdout": found.holdout_share,
        **({} if known is None else _experiment(known)),
    }


def _experiment(known: Experiment) -> dict[str, Any]:
    return {
        "experiment": known.name,
        "state": "over" if known.is_over else "running" if known.is_running else "held ready",
        "share": size_of(known.buckets) / BUCKETS,
        "arms": [f"{arm.name}={arm.namespace}:{size_of(arm.buckets) / BUCKETS:g}" for arm in known.arms],
    }  # fmt: skip


def _named(name: str | None) -> str:
    if name is None:
        raise ConfigError("name the experiment", field="name")
    return name


def arm_of(text: str) -> ArmOption:
    """Arm of NAME=NAMESPACE:SHARE; raises ConfigError for anything else."""
    name, equals, rest = text.partition("=")
    namespace, colon, share = rest.rpartition(":")
    if not (name and equals and namespace and colon):
        raise ConfigError(f"--arm is NAME=NAMESPACE:SHARE, not {text!r}", field="arm")
    return ArmOption(name, namespace, _number(share, text))


def _share_of(text: str) -> tuple[str, float]:
    name, equals, share = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"--arm of `share` is NAME=SHARE, not {text!r}", field="arm")
    return name, _number(share, text)


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--arm ends with a share of 1, such as 0.5, not {whole!r}", field="arm"
        ) from None
