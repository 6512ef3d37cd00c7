"""Experiments: changes of their record, checks that arms match, and the memory that arms need."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import redis

from cache.control.control_keys import Control
from cache.control.states import GenerationState
from cache.errors import ConfigError, Conflict, LarderError
from cache.format.manifest import Manifest, Table
from cache.format.redis_keys import Keyspace
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore, read_manifest
from cache.store.audit import audited
from cache.traffic.experiments import (
    ARM_NAMESPACES_MAX,
    ARMS_MAX,
    EXPERIMENT_NAME_PATTERN,
    RUNNING_EXPERIMENTS_MAX,
    Experiment,
    ExperimentArm,
    Experiments,
    change_experiments,
    latest_experiments,
)
from cache.traffic.split import allot_buckets
from precompute.bulk.headroom import ArmRoom
from precompute.bulk.load import total_bytes, total_pages
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig

POLL_INTERVAL_S = 0.05

_HOLDOUT_KEY = ""

_SUM_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class ArmOption:
    """Requested arm: its name, namespace and share of the experiment."""

    arm_name: str
    namespace: str
    experiment_share: float


@dataclass(frozen=True, slots=True)
class ExperimentOption:
    """Requested experiment of the service's namespace `own_namespace`; raises ConfigError if invalid."""

    own_namespace: str
    experiment_name: str
    arms: tuple[ArmOption, ...]
    key_share: float
    sampled_key_share: float = 1.0

    def __post_init__(self) -> None:
        arm_names = [arm.arm_name for arm in self.arms]
        for name in (self.experiment_name, *arm_names):
            if not EXPERIMENT_NAME_PATTERN.fullmatch(name):
                raise ConfigError(f"{name!r} is not a name: a letter, then up to 31 of a-z, 0-9, - and _", field="name")
        if not 2 <= len(arm_names) <= ARMS_MAX or len(set(arm_names)) < len(arm_names):
            raise ConfigError(
                f"an experiment has 2 to {ARMS_MAX} arms with different names, not {', '.join(arm_names) or 'none'}",
                field="arm",
            )
        if [arm.namespace for arm in self.arms].count(self.own_namespace) != 1:
            raise ConfigError(
                f"one arm must have the service's own namespace, {self.own_namespace!r}, as the control to compare "
                "with",
                field="arm",
            )
        _demand_shares_sum_to_1({arm.arm_name: arm.experiment_share for arm in self.arms})
        _demand_share("--share", self.key_share)
        _demand_share("--sample", self.sampled_key_share)

    def is_same(self, experiment: Experiment) -> bool:
        """True if the recorded experiment has the same arms, shares and sample."""
        requested_arms = [(arm.arm_name, arm.namespace, arm.experiment_share) for arm in self.arms]
        existing_arms = [(arm.name, arm.namespace, arm.share) for arm in experiment.arms]
        return (requested_arms, self.key_share, self.sampled_key_share) == (
            existing_arms,
            experiment.share,
            experiment.sample,
        )


def start(
    config: NightConfig,
    experiment_option: ExperimentOption,
    *,
    holdout_share: float | None = None,
    progress: Progress = quiet,
) -> Experiments:
    """Let the arms answer their shares, once every live replica holds the live generations of their namespaces.

    A repeat continues its own start, also after a timeout. Raises Conflict for a name in use, a namespace without a
    live generation, tables that do not match, too few free keys, or replicas that do not become ready.
    """
    store = config.store()
    with connect(config.redis_url, config.redis_timeout_s) as client:
        home_control = Control(client, config.keyspace())
        control_by_namespace = {
            arm.namespace: Control(client, Keyspace(arm.namespace)) for arm in experiment_option.arms
        }
        live_manifest = published_manifest(store, home_control)
        for namespace, control in control_by_namespace.items():
            if namespace != config.namespace:
                demand_match(
                    live_manifest, published_manifest(settings_for_namespace(config, namespace).store(), control)
                )
        with audited(
            store, "experiment", f"start {experiment_option.experiment_name}", actor=config.actor
        ) as audit_details:
            added_experiments = change_experiments(
                store,
                lambda experiments: add_experiment(
                    experiments, experiment_option, holdout_share=holdout_share, requested_at=home_control.time()
                ),
            )
            audit_details["version"] = added_experiments.version
            home_control.announce("experiments")
            _wait_for_replicas(
                home_control, control_by_namespace, experiment_option.experiment_name, config.flip.wait_s, progress
            )
            started_experiments = change_experiments(
                store,
                lambda experiments: begin_experiment(
                    experiments, experiment_option.experiment_name, started_at=home_control.time()
                ),
            )
            audit_details["version"] = started_experiments.version
        home_control.announce("experiments")
    return started_experiments


def change_shares(
    config: NightConfig,
    experiment_name: str | None,
    *,
    key_share: float | None = None,
    share_by_arm: Mapping[str, float] | None = None,
    holdout_share: float | None = None,
) -> Experiments:
    """Change the shares of an experiment, of its arms or of the holdout; only as many keys move as shares change."""

    def apply_shares(experiments: Experiments) -> Experiments:
        if experiment_name is not None and share_by_arm:
            experiments = share_arms(experiments, experiment_name, share_by_arm)
        key_shares = {} if experiment_name is None or key_share is None else {experiment_name: key_share}
        return share_keys(experiments, key_shares, holdout_share)

    store = config.store()
    with connect(config.redis_url, config.redis_timeout_s) as client:
        subject = f"share {experiment_name or 'holdout'}"
        with audited(store, "experiment", subject, actor=config.actor) as audit_details:
            changed_experiments = change_experiments(store, apply_shares)
            audit_details["version"] = changed_experiments.version
        Control(client, config.keyspace()).announce("experiments")
    return changed_experiments


def stop(config: NightConfig, experiment_name: str, *, reason: str = "") -> Experiments:
    """End an experiment: its keys are answered from the service's own namespace again; a repeat changes nothing."""
    store = config.store()
    with connect(config.redis_url, config.redis_timeout_s) as client:
        home_control = Control(client, config.keyspace())
        subject = f"stop {experiment_name}"
        with audited(store, "experiment", subject, actor=config.actor, reason=reason) as audit_details:
            ended_experiments = change_experiments(
                store, lambda experiments: end_experiment(experiments, experiment_name, stopped_at=home_control.time())
            )
            audit_details["version"] = ended_experiments.version
        home_control.announce("experiments")
    return ended_experiments


def settings_for_namespace(config: NightConfig, namespace: str) -> NightConfig:
    """Return the settings for an arm's namespace: the same store and the same Redis."""
    return config if namespace == config.namespace else replace(config, namespace=namespace)


def _wait_for_replicas(
    home_control: Control,
    control_by_namespace: Mapping[str, Control],
    experiment_name: str,
    wait_s: float,
    progress: Progress,
) -> None:
    """Wait until every live replica answers from all namespaces; raise Conflict naming those that do not."""
    started_at = time.monotonic()
    while lacking_pairs := _lacking_replicas(home_control, control_by_namespace):
        if time.monotonic() - started_at >= wait_s:
            lacking_text = "; ".join(f"{replica_name}: {namespace}" for replica_name, namespace in lacking_pairs)
            raise Conflict(
                f"experiment {experiment_name} has not started yet: after {wait_s:g} s not all replicas hold the "
                "namespaces of its "
                f"arms ({lacking_text}); start it again with the same arms once they do, or stop it",
                experiment=experiment_name,
            )
        progress("namespaces to hold", 0, len(lacking_pairs))
        time.sleep(POLL_INTERVAL_S)


def _lacking_replicas(home_control: Control, control_by_namespace: Mapping[str, Control]) -> list[tuple[str, str]]:
    """Return (replica, namespace) for each namespace that a live replica does not serve."""
    replica_names = sorted(replica.name for replica in home_control.replicas())
    lacking_pairs = []
    for namespace, control in control_by_namespace.items():
        serving_names = {replica.name for replica in control.replicas() if replica.served_generation is not None}
        lacking_pairs += [
            (replica_name, namespace) for replica_name in replica_names if replica_name not in serving_names
        ]
    return lacking_pairs


def add_experiment(
    all_experiments: Experiments,
    experiment_option: ExperimentOption,
    *,
    holdout_share: float | None = None,
    requested_at: float,
) -> Experiments:
    """Return the experiments with the requested one, not started yet; unchanged if it is already recorded.

    Raises Conflict for a name in use, too few free keys, or more namespaces than replicas may hold.
    """
    if (existing_experiment := all_experiments.find(experiment_option.experiment_name)) is not None:
        if existing_experiment.is_over:
            raise Conflict(f"experiment {existing_experiment.name} is over, and names are used once: choose another")
        if not experiment_option.is_same(existing_experiment):
            raise Conflict(
                f"experiment {existing_experiment.name} exists with other arms or shares: change these by "
                "`experiment share`, or "
                "choose another name",
                experiment=existing_experiment.name,
            )
        return all_experiments
    if len(all_experiments.current) >= RUNNING_EXPERIMENTS_MAX:
        raise Conflict(f"{RUNNING_EXPERIMENTS_MAX} experiments run already: stop one first")
    arm_namespaces = {arm.namespace for arm in experiment_option.arms} | set(
        all_experiments.namespaces(experiment_option.own_namespace)
    )
    if len(arm_namespaces - {experiment_option.own_namespace}) > ARM_NAMESPACES_MAX:
        raise Conflict(
            f"replicas would have to hold {len(arm_namespaces - {experiment_option.own_namespace})} "
            f"namespaces beside their own, {ARM_NAMESPACES_MAX} "
            "are allowed: stop an experiment first"
        )
    buckets_by_arm = allot_buckets({}, {arm.arm_name: arm.experiment_share for arm in experiment_option.arms})
    arms = tuple(
        ExperimentArm(arm.arm_name, arm.namespace, arm.experiment_share, buckets_by_arm[arm.arm_name])
        for arm in experiment_option.arms
    )
    salt = f"{experiment_option.own_namespace}/{experiment_option.experiment_name}"
    new_experiment = Experiment(
        experiment_option.experiment_name,
        salt,
        experiment_option.key_share,
        (),
        arms,
        requested_at,
        sample=experiment_option.sampled_key_share,
    )
    all_experiments = replace(
        all_experiments,
        salt=all_experiments.salt or experiment_option.own_namespace,
        experiments=(*all_experiments.experiments, new_experiment),
    )
    return share_keys(all_experiments, {experiment_option.experiment_name: experiment_option.key_share}, holdout_share)


def share_keys(
    all_experiments: Experiments, key_shares: Mapping[str, float], holdout_share: float | None = None
) -> Experiments:
    """Return the experiments with these shares of all keys, others unchanged; raise Conflict for too few free keys."""
    for name, key_share in key_shares.items():
        current_experiment(all_experiments, name)
        _demand_share("--share", key_share)
    if holdout_share is not None and not 0 <= holdout_share < 1:
        raise ConfigError(f"--holdout must be at least 0 and below 1, not {holdout_share:g}", field="holdout")
    target_shares = {_HOLDOUT_KEY: all_experiments.holdout_share if holdout_share is None else holdout_share}
    target_shares |= {
        experiment.name: key_shares.get(experiment.name, experiment.share) for experiment in all_experiments.current
    }
    buckets_by_name = {_HOLDOUT_KEY: all_experiments.holdout} | {
        experiment.name: experiment.buckets for experiment in all_experiments.current
    }
    try:
        new_buckets_by_name = allot_buckets(buckets_by_name, target_shares)
    except ValueError:
        changed_names = {*key_shares, *([] if holdout_share is None else [_HOLDOUT_KEY])}
        free_share = max(
            0.0, 1 - sum(target_share for name, target_share in target_shares.items() if name not in changed_names)
        )
        raise Conflict(
            f"experiments and holdout would have {sum(target_shares.values()):g} of all keys: {free_share:g} are "
            "free", free=free_share
        ) from None  # fmt: skip
    experiments = tuple(
        experiment
        if experiment.is_over
        else replace(experiment, share=target_shares[experiment.name], buckets=new_buckets_by_name[experiment.name])
        for experiment in all_experiments.experiments
    )
    return replace(
        all_experiments,
        holdout_share=target_shares[_HOLDOUT_KEY],
        holdout=new_buckets_by_name[_HOLDOUT_KEY],
        experiments=experiments,
    )


def share_arms(all_experiments: Experiments, experiment_name: str, arm_shares: Mapping[str, float]) -> Experiments:
    """Return the experiments with these shares of one experiment's arms; other arms keep their shares."""
    experiment = current_experiment(all_experiments, experiment_name)
    for arm_name in arm_shares:
        if experiment.arm(arm_name) is None:
            arm_names = ", ".join(experiment_arm.name for experiment_arm in experiment.arms)
            raise Conflict(f"experiment {experiment_name} has no arm {arm_name!r}: it has {arm_names}")
    target_shares = {
        experiment_arm.name: arm_shares.get(experiment_arm.name, experiment_arm.share)
        for experiment_arm in experiment.arms
    }
    _demand_shares_sum_to_1(target_shares)
    buckets_by_arm = allot_buckets(
        {experiment_arm.name: experiment_arm.buckets for experiment_arm in experiment.arms}, target_shares
    )
    arms = tuple(
        replace(experiment_arm, share=target_shares[experiment_arm.name], buckets=buckets_by_arm[experiment_arm.name])
        for experiment_arm in experiment.arms
    )
    return _with_changed(all_experiments, replace(experiment, arms=arms))


def begin_experiment(all_experiments: Experiments, experiment_name: str, *, started_at: float) -> Experiments:
    """Return the experiments, with the named one running."""
    experiment = current_experiment(all_experiments, experiment_name)
    return (
        all_experiments
        if experiment.is_running
        else _with_changed(all_experiments, replace(experiment, started_at=started_at))
    )


def end_experiment(all_experiments: Experiments, experiment_name: str, *, stopped_at: float) -> Experiments:
    """Return the experiments, with the named one over and its keys free."""
    experiment = _require_experiment(all_experiments, experiment_name)
    return (
        all_experiments
        if experiment.is_over
        else _with_changed(all_experiments, replace(experiment, stopped_at=stopped_at))
    )


def current_experiment(all_experiments: Experiments, experiment_name: str) -> Experiment:
    """Return the experiment of that name; raise Conflict if there is none or it is over."""
    experiment = _require_experiment(all_experiments, experiment_name)
    if experiment.is_over:
        raise Conflict(f"experiment {experiment_name} is over: start a new one")
    return experiment


def _require_experiment(all_experiments: Experiments, experiment_name: str) -> Experiment:
    experiment = all_experiments.find(experiment_name)
    if experiment is None:
        known_names = ", ".join(known_experiment.name for known_experiment in all_experiments.experiments) or "none"
        raise Conflict(f"there is no experiment {experiment_name!r}: known are {known_names}")
    return experiment


def _with_changed(all_experiments: Experiments, changed_experiment: Experiment) -> Experiments:
    experiments = tuple(
        changed_experiment if experiment.name == changed_experiment.name else experiment
        for experiment in all_experiments.experiments
    )
    return replace(all_experiments, experiments=experiments)


def _demand_share(option_name: str, stated_share: float) -> None:
    if not 0 < stated_share <= 1:
        raise ConfigError(
            f"{option_name} must be above 0, at most 1, not {stated_share:g}", field=option_name.lstrip("-")
        )


def _demand_shares_sum_to_1(arm_shares: Mapping[str, float]) -> None:
    share_sum = sum(arm_shares.values())
    if not all(0 <= arm_share <= 1 for arm_share in arm_shares.values()) or abs(share_sum - 1) > _SUM_TOLERANCE:
        raise ConfigError(f"shares of an experiment's arms must sum to 1, not to {share_sum:g}", field="arm")


def published_manifest(store: ArtefactStore, control: Control) -> Manifest:
    """Return the manifest of a namespace's live generation; raise Conflict if there is none."""
    namespace = control.keyspace.namespace
    pointer = control.read_pointer()
    if pointer is None:
        raise Conflict(
            f"nothing is published in namespace {namespace!r} (no generation is live in its Redis keys; its files "
            f"would be in {store.url}): check its name, or run `larder night` with its own settings first",
            namespace=namespace,
        )
    return read_manifest(store, pointer.generation)


def demand_match(home_manifest: Manifest, arm_manifest: Manifest) -> None:
    """Raise Conflict unless an arm has the tables of the service's own namespace, with the same shape.

    Kind, entity, width (k of a list, dimensions of a vector) and labels must be equal, and the attributes that filters
    use, and the named filters, must exist, since callers do not know which arm answers. Precision, model, items, and
    the expressions of named filters may differ. If the service reads events, every arm must use the same stream.
    """
    for table_name, table in home_manifest.tables.items():
        expected_shape, arm_shape = (_table_shape(table), _table_shape(arm_manifest.tables.get(table_name)))
        if expected_shape != arm_shape:
            raise Conflict(
                f"table {table_name!r} is {_table_shape_text(expected_shape)} in namespace "
                    f"{home_manifest.namespace!r} and "
                f"{_table_shape_text(arm_shape)} in {arm_manifest.namespace!r}: tables of all arms must match in kind, "
                "entity, width and labels",
                namespace=arm_manifest.namespace, table=table_name,
            )  # fmt: skip
    if lacking_names := sorted(home_manifest.items.attributes.keys() - arm_manifest.items.attributes.keys()):
        raise Conflict(
            (
                    f"items of namespace {arm_manifest.namespace!r} have no attributes {', '.join(lacking_names)}, "
                    "by "
                    "which requests may filter: name them in [sources] item_attributes of its settings"
),
            namespace=arm_manifest.namespace, attributes=lacking_names,
        )  # fmt: skip
    if lacking_names := sorted(home_manifest.filters.keys() - arm_manifest.filters.keys()):
        raise Conflict(
            (
                    f"namespace {arm_manifest.namespace!r} has no filters {', '.join(lacking_names)}, which requests "
                    "call by name: declare them as [filters.NAME] of its settings"
),
            namespace=arm_manifest.namespace, filters=lacking_names,
        )  # fmt: skip
    event_namespace = _event_namespace(home_manifest)
    if event_namespace is not None and _event_namespace(arm_manifest) != event_namespace:
        raise Conflict(
            (
                    f"the live generation of namespace {arm_manifest.namespace!r} was made without the events of "
                    f"{event_namespace!r}, so its "
                    "answers "
                    f'would ignore events: set enabled = true and namespace = "{event_namespace}" in [events] of its '
                    'settings, '
                    "and run its night again"
),
            namespace=arm_manifest.namespace, events=event_namespace,
        )  # fmt: skip


def _event_namespace(manifest: Manifest) -> str | None:
    """Return the namespace of a generation's event stream; None without events."""
    return None if manifest.events is None else manifest.events.namespace or manifest.namespace


def _table_shape(table: Table | None) -> Mapping[str, Any] | None:
    if table is None:
        return None
    shape = {"kind": table.kind, "entity": table.entity, "width": table.layout.width}
    return shape | ({"labels": list(table.labels)} if table.labels else {})


def _table_shape_text(table_shape: Mapping[str, Any] | None) -> str:
    if table_shape is None:
        return "absent"
    return " ".join(f"{property_name} {property_value}" for property_name, property_value in table_shape.items())


def compute_arm_rooms(config: NightConfig, client: "redis.Redis") -> tuple[ArmRoom, ...]:
    """Return the memory needed by each namespace of a current experiment, except the service's own."""
    all_experiments = latest_experiments(config.store())
    rooms = []
    for namespace in all_experiments.namespaces(config.namespace):
        arm_texts = tuple(
            f"{experiment.name}={arm.name}"
            for experiment in all_experiments.current
            for arm in experiment.arms
            if arm.namespace == namespace
        )
        manifests = _generation_manifests(
            settings_for_namespace(config, namespace), Control(client, Keyspace(namespace))
        )
        page_bytes_by_generation = [total_bytes(manifest) for manifest in manifests]
        page_count = sum(map(total_pages, manifests))
        mapped_bytes_by_generation = [
            sum(file.size_bytes for file in manifest.served_artefacts()) for manifest in manifests
        ]
        rooms.append(ArmRoom(
            namespace, arm_texts, len(manifests), page_count, sum(page_bytes_by_generation),
            max(page_bytes_by_generation, default=0),
            max(mapped_bytes_by_generation, default=0),
        ))  # fmt: skip
    return tuple(rooms)


def _generation_manifests(config: NightConfig, control: Control) -> list[Manifest]:
    manifests = []
    for generation, row in control.rows().items():
        if row.state is not GenerationState.RETIRED:
            try:
                manifests.append(read_manifest(config.store(), generation))
            except LarderError:  # an unfinished generation has no pages yet
                continue
    return manifests
