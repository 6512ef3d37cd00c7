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
    """Experiment as somebody asks for it, beside the namespace `own` of the service; raises ConfigError for none."""

    own: str
    name: str
    arms: tuple[ArmOption, ...]
    share: float
    sample: float = 1.0

    def __post_init__(self) -> None:
        names = [each.name for each in self.arms]
        for each in (self.name, *names):
            if not NAME.fullmatch(each):
                raise ConfigError(
                    f"{each!r} is no name: a letter, then up to 31 of a-z, 0-9, - and _",
                    field="name",
                )
        if not 2 <= len(names) <= ARMS_MAX or len(set(names)) < len(names):
            raise ConfigError(
                f"an experiment has 2 to {ARMS_MAX} arms of different names, not "
                f"{', '.join(names) or 'none'}",
                field="arm",
            )
        if [each.namespace for each in self.arms].count(self.own) != 1:
            raise ConfigError(
                f"one arm has the service's own namespace, {self.own!r}: it is what the others are compared with",
                field="arm",
            )
        _demand_whole({each.name: each.share for each in self.arms})
        _demand_share("--share", self.share)
        _demand_share("--sample", self.sample)

    def is_same(self, known: Experiment) -> bool:
        """True if this is the experiment that is known."""
        asked = [(each.name, each.namespace, each.share) for each in self.arms]
        found = [(each.name, each.namespace, each.share) for each in known.arms]
        return (asked, self.share, self.sample) == (found, known.share, known.sample)


def add(
    found: Experiments, asked: ExperimentOption, *, holdout: float | None = None, at: float
) -> Experiments:
    """Experiments with the one asked for, not started yet; as they were if it is there already.

    Raises Conflict for a name in use, too few free keys, or more than replicas may hold.
    """
    if (known := found.find(asked.name)) is not None:
        if known.is_over:
            raise Conflict(
                f"experiment {known.name} is over, and a name is used once: take another"
            )
        if not asked.is_same(known):
            raise Conflict(
                f"experiment {known.name} is there with other arms or shares: change these by `experiment share`, or "
                "take another name",
                experiment=known.name,
            )
        return found
    if len(found.current) >= RUNNING_MAX:
        raise Conflict(f"{RUNNING_MAX} experiments run already: stop one first")
    beside = {each.namespace for each in asked.arms} | set(found.namespaces(asked.own))
    if len(beside - {asked.own}) > NAMESPACES_MAX:
        raise Conflict(
            f"replicas would have to hold {len(beside - {asked.own})} namespaces beside their own, {NAMESPACES_MAX} "
            "are allowed: stop an experiment first"
        )
    buckets = allotted({}, {each.name: each.share for each in asked.arms})
    arms = tuple(
        ExperimentArm(each.name, each.namespace, each.share, buckets[each.name])
        for each in asked.arms
    )
    salt = f"{asked.own}/{asked.name}"
    new = Experiment(asked.name, salt, asked.share, (), arms, at, sample=asked.sample)
    found = replace(found, salt=found.salt or asked.own, experiments=(*found.experiments, new))
    return share_keys(found, {asked.name: asked.share}, holdout)


def share_keys(
    found: Experiments, shares: Mapping[str, float], holdout: float | None = None
) -> Experiments:
    """Experiments with these shares of all keys, the others as they were; Conflict where too few keys are free."""
    for name, share in shares.items():
        current(found, name)
        _demand_share("--share", share)
    if holdout is not None and not 0 <= holdout < 1:
        raise ConfigError(f"--holdout is from 0 to below 1, not {holdout:g}", field="holdout")
    wanted = {_HOLDOUT: found.holdout_share if holdout is None else holdout}
    wanted |= {each.name: shares.get(each.name, each.share) for each in found.current}
    held = {_HOLDOUT: found.holdout} | {each.name: each.buckets for each in found.current}
    try:
        buckets = allotted(held, wanted)
    except ValueError:
        changed = {*shares, *([] if holdout is None else [_HOLDOUT])}
        free = max(0.0, 1 - sum(share for name, share in wanted.items() if name not in changed))
        raise Conflict(
            f"experiments and holdout would have {sum(wanted.values()):g} of all keys: {free:g} are free", free=free
        ) from None  # fmt: skip
    experiments = tuple(
        each if each.is_over else replace(each, share=wanted[each.name], buckets=buckets[each.name])
        for each in found.experiments
    )
    return replace(
        found, holdout_share=wanted[_HOLDOUT], holdout=buckets[_HOLDOUT], experiments=experiments
    )


def share_arms(found: Experiments, name: str, shares: Mapping[str, float]) -> Experiments:
    """Experiments where the arms of one have these shares of it; those not named keep theirs."""
    known = current(found, name)
    for arm in shares:
        if known.arm(arm) is None:
            names = ", ".join(each.name for each in known.arms)
            raise Conflict(f"experiment {name} has no arm {arm!r}: it has {names}")
    wanted = {each.name: shares.get(each.name, each.share) for each in known.arms}
    _demand_whole(wanted)
    buckets = allotted({each.name: each.buckets for each in known.arms}, wanted)
    arms = tuple(
        replace(each, share=wanted[each.name], buckets=buckets[each.name]) for each in known.arms
    )
    return _with(found, replace(known, arms=arms))


def begin(found: Experiments, name: str, *, at: float) -> Experiments:
    """Experiments where that one answers requests."""
    known = current(found, name)
    return found if known.is_running else _with(found, replace(known, started_at=at))


def end(found: Experiments, name: str, *, at: float) -> Experiments:
    """Experiments where that one is over; its keys are free."""
    known = _known(found, name)
    return found if known.is_over else _with(found, replace(known, stopped_at=at))


def current(found: Experiments, name: str) -> Experiment:
    """The experiment of that name; raises Conflict where there is none, or it is over."""
    known = _known(found, name)
    if known.is_over:
        raise Conflict(f"experiment {name} is over: start another one")
    return known


def _known(found: Experiments, name: str) -> Experiment:
    known = found.find(name)
    if known is None:
        names = ", ".join(each.name for each in found.experiments) or "none"
        raise Conflict(f"there is no experiment {name!r}: known are {names}")
    return known


def _with(found: Experiments, changed: Experiment) -> Experiments:
    experiments = tuple(
        changed if each.name == changed.name else each for each in found.experiments
    )
    return replace(found, experiments=experiments)


def _demand_share(option: str, share: float) -> None:
    if not 0 < share <= 1:
        raise ConfigError(
            f"{option} is above 0 and at most 1, not {share:g}", field=option.lstrip("-")
        )


def _demand_whole(shares: Mapping[str, float]) -> None:
    total = sum(shares.values())
    if not all(0 <= each <= 1 for each in shares.values()) or abs(total - 1) > _SUM_TOLERANCE:
        raise ConfigError(
            f"shares of arms are parts of their experiment and sum to 1, not to {total:g}",
            field="arm",
        )
