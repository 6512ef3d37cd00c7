"""Experiments of a namespace: which arm serves which keys, and intervals for the ratio of two arms' rates."""

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
"""Pattern of names of experiments and arms, which are used as metric labels and folder names."""

RUNNING_EXPERIMENTS_MAX = 8
"""Largest number of experiments that run at the same time."""

ARMS_MAX = 8
"""Largest number of arms of one experiment."""

ARM_NAMESPACES_MAX = 8
"""Largest number of namespaces that a replica loads in addition to its own, for all experiments together."""

ENDED_EXPERIMENTS_MAX = 64
"""Largest number of ended experiments in a version, the latest ones; earlier versions still contain the others."""

EXPERIMENTS_FOLDER = "experiments"

EXPOSURES_FOLDER = "exposures"
"""Folder of the exposure log: parts that replicas write, and a folder for each experiment."""

RATE_RATIO_ALPHA = 0.05

RATE_RATIO_EFFECT = 0.1
"""Standard deviation of the logarithm of the ratio for which the intervals are shortest: effects of about 10 %."""


@dataclass(frozen=True, slots=True)
class ExperimentArm:
    """Arm of an experiment: the namespace that answers, its share of the experiment's keys, and their buckets."""

    name: str
    namespace: str
    share: float
    buckets: BucketRanges


@dataclass(frozen=True, slots=True)
class Experiment:
    """Experiment: its share of all keys, the buckets of that share, and its arms; times are Unix seconds.

    `salt` seeds the assignment of keys to arms, independently of other experiments. Replicas load an experiment before
    it is started; until then it answers no requests. `sample`: share of its keys whose exposures are logged.
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
        """Whether the experiment was stopped."""
        return self.stopped_at is not None

    @property
    def is_running(self) -> bool:
        """Whether the experiment answers requests."""
        return self.started_at is not None and not self.is_over

    @property
    def owners(self) -> BucketOwners:
        """Arm of each key, whether or not the key belongs to the experiment."""
        return BucketOwners(self.salt, {arm.name: arm.buckets for arm in self.arms})

    def arm(self, name: str) -> ExperimentArm | None:
        """Return the arm named `name`; None if there is none."""
        return next((arm for arm in self.arms if arm.name == name), None)


@dataclass(frozen=True, slots=True)
class Experiments(Versioned):
    """Version of a namespace's experiments, which share one set of buckets; no bucket belongs to two experiments.

    `salt` seeds the assignment of keys to buckets. The `holdout` never belongs to an experiment.
    """

    salt: str = ""
    holdout_share: float = 0.0
    holdout: BucketRanges = ()
    experiments: tuple[Experiment, ...] = ()

    @property
    def current(self) -> tuple[Experiment, ...]:
        """Experiments that have not been stopped, oldest first."""
        return tuple(experiment for experiment in self.experiments if not experiment.is_over)

    @property
    def running(self) -> tuple[Experiment, ...]:
        """Experiments that answer requests, oldest first."""
        return tuple(experiment for experiment in self.experiments if experiment.is_running)

    @property
    def owners(self) -> BucketOwners:
        """Experiment name of each key; includes experiments that have not started yet."""
        return BucketOwners(self.salt, {experiment.name: experiment.buckets for experiment in self.current})

    def find(self, name: str) -> Experiment | None:
        """Return the experiment of that name, stopped or not; None if there is none."""
        return next((experiment for experiment in self.experiments if experiment.name == name), None)

    def namespaces(self, own_namespace: str) -> tuple[str, ...]:
        """Return the namespaces of all arms of current experiments, except `own_namespace`, in order."""
        arm_namespaces = [arm.namespace for experiment in self.current for arm in experiment.arms]
        return tuple(namespace for namespace in dict.fromkeys(arm_namespaces) if namespace != own_namespace)

    def to_bytes(self) -> bytes:
        """Return the value as the JSON that is stored."""
        return orjson.dumps(
            {**version_stamp(EXPERIMENTS), **asdict(self)}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        )

    @classmethod
    def from_bytes(cls, experiments_bytes: bytes) -> Self:
        """Parse the result of `to_bytes`; raise CorruptArtefact for anything else."""
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
        """Raise ValueError if a bucket has two owners, since replicas could then disagree."""
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
        raise ValueError(f"{raw_name!r} is not a name for an experiment or an arm")
    return raw_name


def _ranges_from_json(json_ranges: Any) -> BucketRanges:
    ranges = tuple((int(start), int(stop)) for start, stop in json_ranges)
    if any(not 0 <= start < stop <= BUCKET_COUNT for start, stop in ranges):
        raise ValueError(f"{json_ranges} are not ranges of {BUCKET_COUNT} buckets")
    return ranges


def _demand_disjoint(all_ranges: list[BucketRanges]) -> None:
    sorted_ranges = sorted(bucket_range for ranges in all_ranges for bucket_range in ranges)
    for (_, stop), (start, _) in pairwise(sorted_ranges):
        if start < stop:
            raise ValueError(f"bucket {start} has two owners")


EXPERIMENTS_VERSIONS = Versions(EXPERIMENTS_FOLDER, Experiments(), Experiments.from_bytes)


def latest_experiments(store: ArtefactStore) -> Experiments:
    """Return the newest version."""
    return EXPERIMENTS_VERSIONS.latest(store)


def change_experiments(store: ArtefactStore, change: Callable[[Experiments], Experiments]) -> Experiments:
    """Apply `change` to the newest version and write it with the last ENDED_EXPERIMENTS_MAX ended experiments."""

    def apply_change(experiments: Experiments) -> Experiments:
        changed_experiments = change(experiments)
        over = [experiment for experiment in changed_experiments.experiments if experiment.is_over]
        forgotten = sorted(over, key=lambda experiment: experiment.stopped_at or 0.0)[:-ENDED_EXPERIMENTS_MAX]
        retained_experiments = tuple(
            experiment for experiment in changed_experiments.experiments if experiment not in forgotten
        )
        return replace(changed_experiments, experiments=retained_experiments)

    return EXPERIMENTS_VERSIONS.change(store, apply_change)


def exposure_part_path(hour_number: int, replica_name: str, part_number: int) -> str:
    """Return the store path of the exposures of one hour (hours since 1970), the `part_number`th part of a replica."""
    return f"{EXPOSURES_FOLDER}/parts/{hour_number}.{replica_name}-{part_number}.json"


class RateRatio(NamedTuple):
    """Rate of one arm over that of another, and bounds that hold at all times together with probability 1 - alpha."""

    ratio: float
    low: float
    high: float


def rate_ratio(
    event_count: float,
    request_count: float,
    base_event_count: float,
    base_request_count: float,
    alpha: float = RATE_RATIO_ALPHA,
) -> RateRatio | None:
    """Return the ratio of the arm's events per request to the base's; None if a count is 0, which leaves it unbounded.

    The interval holds at all times together: evaluating it often does not increase the error probability. Events are
    Poisson counts, so the logarithm of the ratio of two rates has approximately the variance v = 1/a + 1/b. Averaged
    over effects from a normal distribution with the standard deviation RATE_RATIO_EFFECT, the likelihood ratio is a
    martingale at the true ratio and ever exceeds 1/alpha with at most the probability alpha (Robbins, "Statistical
    methods related to the law of the iterated logarithm", 1970; Johari, Koomen, Pekelis and Walsh, "Always valid
    inference", 2022). Correlated events of one key vary more than this model assumes.
    """
    if min(event_count, request_count, base_event_count, base_request_count) <= 0:
        return None
    ratio = (event_count / request_count) / (base_event_count / base_request_count)
    variance, effect_variance = 1 / event_count + 1 / base_event_count, RATE_RATIO_EFFECT * RATE_RATIO_EFFECT
    variance_ratio = 1 + effect_variance / variance
    log_half_width = math.sqrt(
        variance * variance_ratio / (effect_variance / variance) * (math.log(variance_ratio) - 2 * math.log(alpha))
    )
    return RateRatio(ratio, ratio * math.exp(-log_half_width), ratio * math.exp(log_half_width))
