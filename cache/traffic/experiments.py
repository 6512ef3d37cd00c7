"""Experiments of a namespace: which arms take which keys, and the interval of the ratio of two arms' rates."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import orjson

from cache.errors import CorruptArtefact
from cache.formats import EXPERIMENTS, demand, stamp, version_of
from cache.store.artefacts import ArtefactStore
from cache.store.write_once import Versioned, Versions
from cache.traffic.split import BUCKETS, Owners, Ranges

EXPERIMENT_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
"""Names of experiments and arms: they are labels of metrics and names of folders."""

RUNNING_MAX = 8
"""Experiments that run at once."""

ARMS_MAX = 8
"""Arms of one experiment."""

NAMESPACES_MAX = 8
"""Namespaces that a replica holds in addition to its own, for all experiments together."""

ENDED_MAX = 64
"""Ended experiments that a version lists, the latest; versions before it have them all."""

EXPERIMENTS_FOLDER = "experiments"

EXPOSURES_FOLDER = "exposures"
"""Folder of the exposure log: parts as replicas write them, and a folder for each experiment."""

RATE_RATIO_ALPHA = 0.05

RATE_RATIO_EFFECT = 0.1
"""Deviation of the logarithm of a ratio for which intervals are shortest: effects of about 10 %."""


@dataclass(frozen=True, slots=True)
class ExperimentArm:
    """Arm of an experiment: the namespace that answers, and its share of the experiment's keys with their buckets."""

    name: str
    namespace: str
    share: float
    buckets: Ranges


@dataclass(frozen=True, slots=True)
class Experiment:
    """Experiment: its share of all keys with their buckets, and its arms; times are Unix seconds.

    `salt` draws its arms, apart from those of every other. One that is not started yet is held ready by replicas and
    answers nobody. `sample`: share of its keys whose exposures are written down.
    """

    name: str
    salt: str
    share: float
    buckets: Ranges
    arms: tuple[ExperimentArm, ...]
    created_at: float
    started_at: float | None = None
    stopped_at: float | None = None
    sample: float = 1.0

    @property
    def is_over(self) -> bool:
        """True once it was stopped."""
        return self.stopped_at is not None

    @property
    def is_running(self) -> bool:
        """True while it answers requests."""
        return self.started_at is not None and not self.is_over

    @property
    def owners(self) -> Owners:
        """Arm of each key, whether or not the experiment has the key."""
        return Owners(self.salt, {arm.name: arm.buckets for arm in self.arms})

    def arm(self, name: str) -> ExperimentArm | None:
        """Return the arm named `name`; None if there is none."""
        return next((arm for arm in self.arms if arm.name == name), None)


@dataclass(frozen=True, slots=True)
class Experiments(Versioned):
    """Version of a namespace's experiments, which divide one set of buckets among them: no bucket is in two.

    `salt` draws the buckets. The `holdout` is no experiment's, ever.
    """

    salt: str = ""
    holdout_share: float = 0.0
    holdout: Ranges = ()
    experiments: tuple[Experiment, ...] = ()

    @property
    def current(self) -> tuple[Experiment, ...]:
        """Experiments that are not over, oldest first."""
        return tuple(experiment for experiment in self.experiments if not experiment.is_over)

    @property
    def running(self) -> tuple[Experiment, ...]:
        """Experiments that answer requests, oldest first."""
        return tuple(experiment for experiment in self.experiments if experiment.is_running)

    @property
    def owners(self) -> Owners:
        """Experiment of each key, by name; those that are held ready have theirs already."""
        return Owners(
            self.salt, {experiment.name: experiment.buckets for experiment in self.current}
        )

    def find(self, name: str) -> Experiment | None:
        """The experiment of that name, over or not."""
        return next(
            (experiment for experiment in self.experiments if experiment.name == name), None
        )

    def namespaces(self, own_namespace: str) -> tuple[str, ...]:
        """Namespaces of all arms that are not over, without one's `own_namespace`, in their order."""
        named = [arm.namespace for experiment in self.current for arm in experiment.arms]
        return tuple(namespace for namespace in dict.fromkeys(named) if namespace != own_namespace)

    def to_bytes(self) -> bytes:
        """JSON, as it is stored."""
        return orjson.dumps(
            {**stamp(EXPERIMENTS), **asdict(self)},
            option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Reads `to_bytes`; raises CorruptArtefact for anything else."""
        try:
            data = orjson.loads(raw)
            demand(EXPERIMENTS, version_of(data))
            experiments = cls(
                int(data["version"]),
                str(data["salt"]),
                float(data["holdout_share"]),
                _ranges_from_json(data["holdout"]),
                tuple(
                    _experiment_from_json(raw_experiment) for raw_experiment in data["experiments"]
                ),
            )
            experiments._check()
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptArtefact(f"not a version of the experiments: {error}") from error
        return experiments

    def _check(self) -> None:
        """Raises ValueError where a bucket would be two owners': replicas could not agree."""
        _demand_apart([self.holdout, *(experiment.buckets for experiment in self.current)])
        for experiment in self.current:
            _demand_apart([arm.buckets for arm in experiment.arms])


def _experiment_from_json(data: Mapping[str, Any]) -> Experiment:
    arms = tuple(
        ExperimentArm(
            _checked_name(raw_arm["name"]),
            str(raw_arm["namespace"]),
            float(raw_arm["share"]),
            _ranges_from_json(raw_arm["buckets"]),
        )
        for raw_arm in data["arms"]
    )
    started, stopped = data["started_at"], data["stopped_at"]
    return Experiment(
        _checked_name(data["name"]),
        str(data["salt"]),
        float(data["share"]),
        _ranges_from_json(data["buckets"]),
        arms,
        float(data["created_at"]),
        None if started is None else float(started),
        None if stopped is None else float(stopped),
        float(data["sample"]),
    )


def _checked_name(value: object) -> str:
    if not isinstance(value, str) or not EXPERIMENT_NAME.fullmatch(value):
        raise ValueError(f"{value!r} is no name of an experiment or an arm")
    return value


def _ranges_from_json(value: Any) -> Ranges:
    ranges = tuple((int(start), int(stop)) for start, stop in value)
    if any(not 0 <= start < stop <= BUCKETS for start, stop in ranges):
        raise ValueError(f"{value} are no ranges of {BUCKETS} buckets")
    return ranges


def _demand_apart(all_ranges: list[Ranges]) -> None:
    flat = sorted(bucket_range for ranges in all_ranges for bucket_range in ranges)
    for (_, stop), (start, _) in pairwise(flat):
        if start < stop:
            raise ValueError(f"bucket {start} has two owners")


VERSIONS = Versions(EXPERIMENTS_FOLDER, Experiments(), Experiments.from_bytes)


def latest_experiments(store: ArtefactStore) -> Experiments:
    """The version in force."""
    return VERSIONS.latest(store)


def change_experiments(
    store: ArtefactStore, change: Callable[[Experiments], Experiments]
) -> Experiments:
    """Apply `change` to the newest version and write the result; ended experiments beyond the last ENDED_MAX go."""

    def apply_change(experiments: Experiments) -> Experiments:
        changed_experiments = change(experiments)
        over = [experiment for experiment in changed_experiments.experiments if experiment.is_over]
        forgotten = sorted(over, key=lambda experiment: experiment.stopped_at or 0.0)[:-ENDED_MAX]
        retained_experiments = tuple(
            experiment
            for experiment in changed_experiments.experiments
            if experiment not in forgotten
        )
        return replace(changed_experiments, experiments=retained_experiments)

    return VERSIONS.change(store, apply_change)


def exposure_part(hour: int, replica: str, number: int) -> str:
    """Store path of a part of an hour (since 1970), the `number`th of a replica."""
    return f"{EXPOSURES_FOLDER}/parts/{hour}.{replica}-{number}.json"


class RateRatio(NamedTuple):
    """Rate of one arm over that of another, with the bounds that hold at all looks with probability 1 - alpha."""

    ratio: float
    low: float
    high: float


def rate_ratio(
    events: float,
    requests: float,
    base_events: float,
    base_requests: float,
    alpha: float = RATE_RATIO_ALPHA,
) -> RateRatio | None:
    """Events per request over those of a base; None while either has none: then nothing bounds the ratio.

    The interval holds at every look at once: whoever looks each hour is not fooled more. Events are Poisson counts, so
    the logarithm of the ratio of two rates has about the variance v = 1/a + 1/b. Mixed over effects of a normal
    distribution with the deviation RATE_RATIO_EFFECT, the likelihood ratio is a martingale where the ratio is the true
    one, and exceeds 1/alpha with at most the probability alpha, ever (Robbins, "Statistical methods related to the law
    of the iterated logarithm", 1970; Johari, Koomen, Pekelis and Walsh, "Always valid inference", 2022). Events of one
    key that hang together vary more than that.
    """
    if min(events, requests, base_events, base_requests) <= 0:
        return None
    ratio = (events / requests) / (base_events / base_requests)
    variance, effect = 1 / events + 1 / base_events, RATE_RATIO_EFFECT * RATE_RATIO_EFFECT
    spread = 1 + effect / variance
    wide = math.sqrt(
        variance * spread / (effect / variance) * (math.log(spread) - 2 * math.log(alpha))
    )
    return RateRatio(ratio, ratio * math.exp(-wide), ratio * math.exp(wide))
