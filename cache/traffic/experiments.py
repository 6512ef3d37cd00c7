"""Experiments of a namespace: which arms take which keys, and the interval of the ratio of two arms' rates."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import orjson

from cache.errors import CorruptArtefact
from cache.formats import EXPERIMENTS, demand_readable, version_of, version_stamp
from cache.store.artefacts import ArtefactStore
from cache.store.write_once import Versioned, Versions
from cache.traffic.split import BUCKET_COUNT, BucketOwners, BucketRanges

EXPERIMENT_NAME_PATTERN = re.compile(r"[a-z][a-z0-9_-]{0,31}")
"""Names of experiments and arms: they are labels of metrics and names of folders."""

RUNNING_EXPERIMENTS_MAX = 8
"""Experiments that run at once."""

ARMS_MAX = 8
"""Arms of one experiment."""

ARM_NAMESPACES_MAX = 8
"""Namespaces that a replica holds in addition to its own, for all experiments together."""

ENDED_EXPERIMENTS_MAX = 64
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
    buckets: BucketRanges


@dataclass(frozen=True, slots=True)
class Experiment:
    """Experiment: its share of all keys with their buckets, and its arms; times are Unix seconds.

    `salt` draws its arms, apart from those of every other. One that is not started yet is held ready by replicas and
    answers nobody. `sample`: share of its keys whose exposures are written down.
    """

    name: str
    salt: str
    share: float
    buckets: BucketRanges
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
    def owners(self) -> BucketOwners:
        """Arm of each key, whether or not the experiment has the key."""
        return BucketOwners(self.salt, {arm.name: arm.buckets for arm in self.arms})

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
    holdout: BucketRanges = ()
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
    def owners(self) -> BucketOwners:
        """Experiment of each key, by name; those that are held ready have theirs already."""
        return BucketOwners(self.salt, {experiment.name: experiment.buckets for experiment in self.current})

    def find(self, name: str) -> Experiment | None:
        """The experiment of that name, over or not."""
        return next((experiment for experiment in self.experiments if experiment.name == name), None)

    def namespaces(self, own_namespace: str) -> tuple[str, ...]:
        """Namespaces of all arms that are not over, without one's `own_namespace`, in their order."""
        arm_namespaces = [arm.namespace for experiment in self.current for arm in experiment.arms]
        return tuple(namespace for namespace in dict.fromkeys(arm_namespaces) if namespace != own_namespace)

    def to_bytes(self) -> bytes:
        """Return the value as the JSON that is stored."""
        return orjson.dumps(
            {**version_stamp(EXPERIMENTS), **asdict(self)}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        )

    @classmethod
    def from_bytes(cls, experiments_bytes: bytes) -> Self:
        """Reads `to_bytes`; raises CorruptArtefact for anything else."""
        try:
            document = orjson.loads(experiments_bytes)
            demand_readable(EXPERIMENTS, version_of(document))
            experiments = cls(
                int(document["version"]),
                str(document["salt"]),
                float(document["holdout_share"]),
                _ranges_from_json(document["holdout"]),
                tuple(_experiment_from_json(raw_experiment) for raw_experiment in document["experiments"]),
            )
            experiments._check()
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptArtefact(f"not a version of the experiments: {error}") from error
        return experiments

    def _check(self) -> None:
        """Raises ValueError where a bucket would be two owners': replicas could not agree."""
        _demand_disjoint([self.holdout, *(experiment.buckets for experiment in self.current)])
        for experiment in self.current:
            _demand_disjoint([arm.buckets for arm in experiment.arms])


def _experiment_from_json(document: Mapping[str, Any]) -> Experiment:
    arms = tuple(
        ExperimentArm(
            _checked_name(raw_arm["name"]),
            str(raw_arm["namespace"]),
            float(raw_arm["share"]),
            _ranges_from_json(raw_arm["buckets"]),
        )
        for raw_arm in document["arms"]
    )
    started_at, stopped_at = document["started_at"], document["stopped_at"]
    return Experiment(
        _checked_name(document["name"]),
        str(document["salt"]),
        float(document["share"]),
        _ranges_from_json(document["buckets"]),
        arms,
        float(document["created_at"]),
        None if started_at is None else float(started_at),
        None if stopped_at is None else float(stopped_at),
        float(document["sample"]),
    )


def _checked_name(raw_name: object) -> str:
    if not isinstance(raw_name, str) or not EXPERIMENT_NAME_PATTERN.fullmatch(raw_name):
        raise ValueError(f"{raw_name!r} is no name of an experiment or an arm")
    return raw_name


def _ranges_from_json(json_ranges: Any) -> BucketRanges:
    ranges = tuple((int(start), int(stop)) for start, stop in json_ranges)
    if any(not 0 <= start < stop <= BUCKET_COUNT for start, stop in ranges):
        raise ValueError(f"{json_ranges} are no ranges of {BUCKET_COUNT} buckets")
    return ranges


def _demand_disjoint(all_ranges: list[BucketRanges]) -> None:
    sorted_ranges = sorted(bucket_range for ranges in all_ranges for bucket_range in ranges)
    for (_, stop), (start, _) in pairwise(sorted_ranges):
        if start < stop:
            raise ValueError(f"bucket {start} has two owners")


EXPERIMENTS_VERSIONS = Versions(EXPERIMENTS_FOLDER, Experiments(), Experiments.from_bytes)


def latest_experiments(store: ArtefactStore) -> Experiments:
    """The version in force."""
    return EXPERIMENTS_VERSIONS.latest(store)


def change_experiments(store: ArtefactStore, change: Callable[[Experiments], Experiments]) -> Experiments:
    """Apply `change` to the newest version and write the result; of ended ones the last ENDED_EXPERIMENTS_MAX stay."""

    def apply_change(experiments: Experiments) -> Experiments:
        changed_experiments = change(experiments)
        over = [experiment for experiment in changed_experiments.experiments if experiment.is_over]
        forgotten = sorted(over, key=lambda experiment: experiment.stopped_at or 0.0)[:-ENDED_EXPERIMENTS_MAX]
        retained_experiments = tuple(
            experiment for experiment in changed_experiments.experiments if experiment not in forgotten
        )
        return replace(changed_experiments, experiments=retained_experiments)

    return EXPERIMENTS_VERSIONS.change(store, apply_change)


def exposure_part_path(hour: int, replica: str, part_number: int) -> str:
    """Store path of a part of an hour (since 1970), the `part_number`th of a replica."""
    return f"{EXPOSURES_FOLDER}/parts/{hour}.{replica}-{part_number}.json"


class RateRatio(NamedTuple):
    """Rate of one arm over that of another, with the bounds that hold at all looks with probability 1 - alpha."""

    ratio: float
    low: float
    high: float


def rate_ratio(
    events: float, requests: float, base_events: float, base_requests: float, alpha: float = RATE_RATIO_ALPHA
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
    variance, effect_variance = 1 / events + 1 / base_events, RATE_RATIO_EFFECT * RATE_RATIO_EFFECT
    variance_ratio = 1 + effect_variance / variance
    log_half_width = math.sqrt(
        variance * variance_ratio / (effect_variance / variance) * (math.log(variance_ratio) - 2 * math.log(alpha))
    )
    return RateRatio(ratio, ratio * math.exp(-log_half_width), ratio * math.exp(log_half_width))
