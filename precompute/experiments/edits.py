"""Edits of the experiments: what a version becomes when one is added, changed, started or stopped. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cache.control.allotment import allotted
from cache.errors import ConfigError, Conflict
from cache.store.experiments import (
    ARMS_MAX,
    NAME,
    NAMESPACES_MAX,
    RUNNING_MAX,
    Experiment,
    ExperimentArm,
    Experiments,
)

_HOLDOUT = ""
_SUM_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class ArmOption:
    """Arm as somebody asks for it: its name, namespace and share of the experiment."""

    name: str
    namespace: str
    share: float


@dataclass(frozen=True, slots=True)
class ExperimentOption:
    """Experiment as asked for, beside the namespace `own_namespace` of the service; raises ConfigError for none."""

    own_namespace: str
    name: str
    arms: tuple[ArmOption, ...]
    share: float
    sample: float = 1.0

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        for name in (self.name, *names):
            if not NAME.fullmatch(name):
                raise ConfigError(
                    f"{name!r} is no name: a letter, then up to 31 of a-z, 0-9, - and _",
                    field="name",
                )
        if not 2 <= len(names) <= ARMS_MAX or len(set(names)) < len(names):
            raise ConfigError(
                f"an experiment has 2 to {ARMS_MAX} arms of different names, not "
                f"{', '.join(names) or 'none'}",
                field="arm",
            )
        if [arm.namespace for arm in self.arms].count(self.own_namespace) != 1:
            raise ConfigError(
                f"one arm has the service's own namespace, {self.own_namespace!r}: it is what the others are compared "
                "with",
                field="arm",
            )
        _demand_whole({arm.name: arm.share for arm in self.arms})
        _demand_share("--share", self.share)
        _demand_share("--sample", self.sample)

    def is_same(self, experiment: Experiment) -> bool:
        """True if this is the experiment that is known."""
        requested_arms = [(arm.name, arm.namespace, arm.share) for arm in self.arms]
        existing_arms = [(arm.name, arm.namespace, arm.share) for arm in experiment.arms]
        return (requested_arms, self.share, self.sample) == (
            existing_arms,
            experiment.share,
            experiment.sample,
        )


def add(
    all_experiments: Experiments,
    option: ExperimentOption,
    *,
    holdout: float | None = None,
    at: float,
) -> Experiments:
    """Experiments with the one asked for, not started yet; as they were if it is there already.

    Raises Conflict for a name in use, too few free keys, or more than replicas may hold.
    """
    if (existing_experiment := all_experiments.find(option.name)) is not None:
        if existing_experiment.is_over:
            raise Conflict(
                f"experiment {existing_experiment.name} is over, and a name is used once: take another"
            )
        if not option.is_same(existing_experiment):
            raise Conflict(
                f"experiment {existing_experiment.name} is there with other arms or shares: change these by "
                "`experiment share`, or "
                "take another name",
                experiment=existing_experiment.name,
            )
        return all_experiments
    if len(all_experiments.current) >= RUNNING_MAX:
        raise Conflict(f"{RUNNING_MAX} experiments run already: stop one first")
    namespaces = {arm.namespace for arm in option.arms} | set(
        all_experiments.namespaces(option.own_namespace)
    )
    if len(namespaces - {option.own_namespace}) > NAMESPACES_MAX:
        raise Conflict(
            f"replicas would have to hold {len(namespaces - {option.own_namespace})} namespaces beside their own, "
            f"{NAMESPACES_MAX} "
            "are allowed: stop an experiment first"
        )
    buckets = allotted({}, {arm.name: arm.share for arm in option.arms})
    arms = tuple(
        ExperimentArm(arm.name, arm.namespace, arm.share, buckets[arm.name]) for arm in option.arms
    )
    salt = f"{option.own_namespace}/{option.name}"
    new = Experiment(option.name, salt, option.share, (), arms, at, sample=option.sample)
    all_experiments = replace(
        all_experiments,
        salt=all_experiments.salt or option.own_namespace,
        experiments=(*all_experiments.experiments, new),
    )
    return share_keys(all_experiments, {option.name: option.share}, holdout)


def share_keys(
    all_experiments: Experiments, key_shares: Mapping[str, float], holdout: float | None = None
) -> Experiments:
    """Experiments with these shares of all keys, the others as they were; Conflict where too few keys are free."""
    for name, key_share in key_shares.items():
        current(all_experiments, name)
        _demand_share("--share", key_share)
    if holdout is not None and not 0 <= holdout < 1:
        raise ConfigError(f"--holdout is from 0 to below 1, not {holdout:g}", field="holdout")
    target_shares = {_HOLDOUT: all_experiments.holdout_share if holdout is None else holdout}
    target_shares |= {
        experiment.name: key_shares.get(experiment.name, experiment.share)
        for experiment in all_experiments.current
    }
    buckets_by_name = {_HOLDOUT: all_experiments.holdout} | {
        experiment.name: experiment.buckets for experiment in all_experiments.current
    }
    try:
        buckets = allotted(buckets_by_name, target_shares)
    except ValueError:
        changed_names = {*key_shares, *([] if holdout is None else [_HOLDOUT])}
        free = max(
            0.0,
            1
            - sum(
                target_share
                for name, target_share in target_shares.items()
                if name not in changed_names
            ),
        )
        raise Conflict(
            f"experiments and holdout would have {sum(target_shares.values()):g} of all keys: {free:g} are "
            "free", free=free
        ) from None  # fmt: skip
    experiments = tuple(
        experiment
        if experiment.is_over
        else replace(
            experiment, share=target_shares[experiment.name], buckets=buckets[experiment.name]
        )
        for experiment in all_experiments.experiments
    )
    return replace(
        all_experiments,
        holdout_share=target_shares[_HOLDOUT],
        holdout=buckets[_HOLDOUT],
        experiments=experiments,
    )


def share_arms(
    all_experiments: Experiments, name: str, arm_shares: Mapping[str, float]
) -> Experiments:
    """Experiments where the arms of one have these shares of it; those not named keep theirs."""
    experiment = current(all_experiments, name)
    for arm in arm_shares:
        if experiment.arm(arm) is None:
            names = ", ".join(experiment_arm.name for experiment_arm in experiment.arms)
            raise Conflict(f"experiment {name} has no arm {arm!r}: it has {names}")
    target_shares = {
        experiment_arm.name: arm_shares.get(experiment_arm.name, experiment_arm.share)
        for experiment_arm in experiment.arms
    }
    _demand_whole(target_shares)
    buckets = allotted(
        {experiment_arm.name: experiment_arm.buckets for experiment_arm in experiment.arms},
        target_shares,
    )
    arms = tuple(
        replace(
            experiment_arm,
            share=target_shares[experiment_arm.name],
            buckets=buckets[experiment_arm.name],
        )
        for experiment_arm in experiment.arms
    )
    return _with(all_experiments, replace(experiment, arms=arms))


def begin(all_experiments: Experiments, name: str, *, at: float) -> Experiments:
    """Experiments where that one answers requests."""
    experiment = current(all_experiments, name)
    return (
        all_experiments
        if experiment.is_running
        else _with(all_experiments, replace(experiment, started_at=at))
    )


def end(all_experiments: Experiments, name: str, *, at: float) -> Experiments:
    """Experiments where that one is over; its keys are free."""
    experiment = _require_experiment(all_experiments, name)
    return (
        all_experiments
        if experiment.is_over
        else _with(all_experiments, replace(experiment, stopped_at=at))
    )


def current(all_experiments: Experiments, name: str) -> Experiment:
    """The experiment of that name; raises Conflict where there is none, or it is over."""
    experiment = _require_experiment(all_experiments, name)
    if experiment.is_over:
        raise Conflict(f"experiment {name} is over: start another one")
    return experiment


def _require_experiment(all_experiments: Experiments, name: str) -> Experiment:
    experiment = all_experiments.find(name)
    if experiment is None:
        names = (
            ", ".join(known_experiment.name for known_experiment in all_experiments.experiments)
            or "none"
        )
        raise Conflict(f"there is no experiment {name!r}: known are {names}")
    return experiment


def _with(all_experiments: Experiments, changed_experiment: Experiment) -> Experiments:
    experiments = tuple(
        changed_experiment if experiment.name == changed_experiment.name else experiment
        for experiment in all_experiments.experiments
    )
    return replace(all_experiments, experiments=experiments)


def _demand_share(option: str, fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ConfigError(
            f"{option} is above 0 and at most 1, not {fraction:g}", field=option.lstrip("-")
        )


def _demand_whole(arm_shares: Mapping[str, float]) -> None:
    total = sum(arm_shares.values())
    if (
        not all(0 <= arm_share <= 1 for arm_share in arm_shares.values())
        or abs(total - 1) > _SUM_TOLERANCE
    ):
        raise ConfigError(
            f"shares of arms are parts of their experiment and sum to 1, not to {total:g}",
            field="arm",
        )
