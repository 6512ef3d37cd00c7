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
    option: ExperimentOption,
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
        own_control = Control(client, config.keyspace())
        controls = {arm.namespace: Control(client, Keyspace(arm.namespace)) for arm in option.arms}
        live = published(store, own_control)
        for namespace, control in controls.items():
            if namespace != config.namespace:
                demand_match(live, published(settings_of(config, namespace).store(), control))
        with audited(
            store, "experiment", f"start {option.name}", actor=config.actor
        ) as audit_details:
            added = change_experiments(
                store,
                lambda experiments: edits.add(
                    experiments, option, holdout=holdout, at=own_control.time()
                ),
            )
            audit_details["version"] = added.version
            own_control.announce("experiments")
            _wait(own_control, controls, option.name, config.flip.wait_s, progress)
            started = change_experiments(
                store,
                lambda experiments: edits.begin(experiments, option.name, at=own_control.time()),
            )
            audit_details["version"] = started.version
        own_control.announce("experiments")
    return started


def change_shares(
    config: NightConfig,
    name: str | None,
    *,
    key_share: float | None = None,
    arms: Mapping[str, float] | None = None,
    holdout: float | None = None,
) -> Experiments:
    """Change shares: of an experiment, of its arms, of the holdout; no more keys move than shares change by."""

    def apply_shares(experiments: Experiments) -> Experiments:
        if name is not None and arms:
            experiments = edits.share_arms(experiments, name, arms)
        key_shares = {} if name is None or key_share is None else {name: key_share}
        return edits.share_keys(experiments, key_shares, holdout)

    store = config.store()
    with connect(config.redis_url, config.redis_timeout_s) as client:
        subject = f"share {name or 'holdout'}"
        with audited(store, "experiment", subject, actor=config.actor) as audit_details:
            written = change_experiments(store, apply_shares)
            audit_details["version"] = written.version
        Control(client, config.keyspace()).announce("experiments")
    return written


def stop(config: NightConfig, name: str, *, reason: str = "") -> Experiments:
    """End an experiment: its keys are answered by the service's own namespace again; a repeat changes nothing."""
    store = config.store()
    with connect(config.redis_url, config.redis_timeout_s) as client:
        own_control = Control(client, config.keyspace())
        subject = f"stop {name}"
        with audited(
            store, "experiment", subject, actor=config.actor, reason=reason
        ) as audit_details:
            ended_experiments = change_experiments(
                store, lambda experiments: edits.end(experiments, name, at=own_control.time())
            )
            audit_details["version"] = ended_experiments.version
        own_control.announce("experiments")
    return ended_experiments


def settings_of(config: NightConfig, namespace: str) -> NightConfig:
    """These settings for the namespace of an arm: the same store, the same Redis."""
    return config if namespace == config.namespace else replace(config, namespace=namespace)


def _wait(
    own_control: Control,
    controls: Mapping[str, Control],
    name: str,
    wait_s: float,
    progress: Progress,
) -> None:
    """Returns once every live replica answers from all namespaces; raises Conflict, naming those that do not."""
    started_at = time.monotonic()
    while lacking := _lacking(own_control, controls):
        if time.monotonic() - started_at >= wait_s:
            lacking_text = "; ".join(f"{replica}: {namespace}" for replica, namespace in lacking)
            raise Conflict(
                f"experiment {name} answers nobody yet: after {wait_s:g} s not all replicas hold the namespaces of its "
                f"arms ({lacking_text}); start it again with the same arms once they do, or stop it",
                experiment=name,
            )
        progress("namespaces to hold", 0, len(lacking))
        time.sleep(POLL_S)


def _lacking(own_control: Control, controls: Mapping[str, Control]) -> list[tuple[str, str]]:
    """Replicas, with the namespace that each does not answer from."""
    names = sorted(replica.name for replica in own_control.replicas())
    lacking_pairs = []
    for namespace, control in controls.items():
        serving = {replica.name for replica in control.replicas() if replica.serving is not None}
        lacking_pairs += [(name, namespace) for name in names if name not in serving]
    return lacking_pairs
