"""Starting, changing and stopping an experiment, each written down as the next version of the record."""

import time
from collections.abc import Mapping
from dataclasses import replace

from cache.errors import Conflict
from cache.format.redis_keys import Keyspace
from cache.store.audit import audited
from cache.store.experiments import Experiments, change_experiments
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.control.control_keys import Control, connect
from precompute.experiments import edits
from precompute.experiments.edits import ExperimentOption
from precompute.experiments.matching import demand_match, published

POLL_S = 0.05


def start(
    config: NightConfig,
    asked: ExperimentOption,
    *,
    holdout: float | None = None,
    progress: Progress = quiet,
) -> Experiments:
    """Let the arms answer their shares, once every live replica holds what is live in their namespaces.

    A repeat finds its own work, and goes on waiting where it gave up. Raises Conflict for a name in use, a namespace
    without a generation, tables that do not match, too few free keys, or replicas that do not become ready.
    """
    store = config.store()
    with connect(config.redis_url, config.redis_timeout_s) as client:
        own = Control(client, config.keyspace())
        controls = {
            each.namespace: Control(client, Keyspace(each.namespace)) for each in asked.arms
        }
        live = published(store, own)
        for namespace, control in controls.items():
            if namespace != config.namespace:
                demand_match(live, published(settings_of(config, namespace).store(), control))
        with audited(store, "experiment", f"start {asked.name}", actor=config.actor) as told:
            added = change_experiments(
                store, lambda found: edits.add(found, asked, holdout=holdout, at=own.time())
            )
            told["version"] = added.version
            own.announce("experiments")
            _wait(own, controls, asked.name, config.flip.wait_s, progress)
            started = change_experiments(
                store, lambda found: edits.begin(found, asked.name, at=own.time())
            )
            told["version"] = started.version
        own.announce("experiments")
    return started


def share(
    config: NightConfig,
    name: str | None,
    *,
    share: float | None = None,
    arms: Mapping[str, float] | None = None,
    holdout: float | None = None,
) -> Experiments:
    """Change shares: of an experiment, of its arms, of the holdout; no more keys move than shares change by."""

    def changed(found: Experiments) -> Experiments:
        if name is not None and arms:
            found = edits.share_arms(found, name, arms)
        shares = {} if name is None or share is None else {name: share}
        return edits.share_keys(found, shares, holdout)

    store = config.store()
    with connect(config.redis_url, config.redis_timeout_s) as client:
        subject = f"share {name or 'holdout'}"
        with audited(store, "experiment", subject, actor=config.actor) as told:
            written = change_experiments(store, changed)
            told["version"] = written.version
        Control(client, config.keyspace()).announce("experiments")
    return written


def stop(config: NightConfig, name: str, *, reason: str = "") -> Experiments:
    """End an experiment: its keys are answered by the service's own namespace again; a repeat changes nothing."""
    store = config.store()
    with connect(config.redis_url, config.redis_timeout_s) as client:
        own = Control(client, config.keyspace())
        subject = f"stop {name}"
        with audited(store, "experiment", subject, actor=config.actor, reason=reason) as told:
            ended = change_experiments(store, lambda found: edits.end(found, name, at=own.time()))
            told["version"] = ended.version
        own.announce("experiments")
    return ended


def settings_of(config: NightConfig, namespace: str) -> NightConfig:
    """These settings for the namespace of an arm: the same store, the same Redis."""
    return config if namespace == config.namespace else replace(config, namespace=namespace)


def _wait(
    own: Control, controls: Mapping[str, Control], name: str, wait_s: float, progress: Progress
) -> None:
    """Returns once every live replica answers from all namespaces; raises Conflict, naming those that do not."""
    began = time.monotonic()
    while lacking := _lacking(own, controls):
        if time.monotonic() - began >= wait_s:
            told = "; ".join(f"{replica}: {namespace}" for replica, namespace in lacking)
            raise Conflict(
                f"experiment {name} answers nobody yet: after {wait_s:g} s not all replicas hold the namespaces of its "
                f"arms ({told}); start it again with the same arms once they do, or stop it",
                experiment=name,
            )
        progress("namespaces to hold", 0, len(lacking))
        time.sleep(POLL_S)


def _lacking(own: Control, controls: Mapping[str, Control]) -> list[tuple[str, str]]:
    """Replicas, with the namespace that each does not answer from."""
    names = sorted(each.name for each in own.replicas())
    found = []
    for namespace, control in controls.items():
        serving = {each.name for each in control.replicas() if each.serving is not None}
        found += [(name, namespace) for name in names if name not in serving]
    return found
