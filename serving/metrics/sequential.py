"""Sequential tests and bounds, valid after every sample: drift of answers, and an error rate. Pure.

Error rate: for a weight w, each sample x in {0, 1} multiplies a capital by w**x / (1 - p + p*w), which is fair if p is
the sample's probability of being wrong, given all earlier samples. By Ville's inequality the capital ever reaches
1/alpha with a probability of at most alpha. log(1 - p + p*w) is concave in p, so the resulting bound holds for the mean
of the probabilities of all samples so far: the rate need not be constant, samples need not be independent, and their
number need not be fixed in advance (Howard, Ramdas, McAuliffe & Sekhon, "Time-uniform Chernoff bounds via nonnegative
supermartingales", Probability Surveys 17, 2020). Several weights share alpha, and the best one counts; weight 0 is for
samples without any error.
"""

import math
from dataclasses import dataclass, field

DRIFT_ALPHA = 1e-4
"""Probability of a false alarm during a generation's whole life, over all tables of one process together."""

_DRIFT_STAKES = (0.1, 0.3, 0.6)
"""Stakes, as fractions of the largest that cannot lose everything: small stakes detect small drifts, large stakes large
ones."""

_WEIGHTS_BELOW_1 = (0.0, 0.1, 0.3, 0.5, 0.7)

_WEIGHTS_ABOVE_1 = (1.5, 3.0, 10.0, 40.0, 200.0)


@dataclass(slots=True)
class Drift:
    """Drift test of one table of one release; `alpha` is this test's share. An alarm stays.

    Hypothesis: given all earlier samples, a sample's expected overlap is at least `overlap_floor`. Each sample x in [0,
    1] multiplies the capital of a bet against it by 1 + stake * (floor - x), which is at best fair if the hypothesis
    holds (Waudby-Smith & Ramdas, "Estimating means of bounded random variables by betting", JRSS-B 86(1), 2024).
    Answers may become bad at any moment, so a share 1/(t*(t+1)) of the initial capital is reserved for a bet that
    begins at sample t. This makes it a Shiryaev-Roberts statistic whose expectation never exceeds 1 (Shin, Ramdas &
    Rinaldo, "E-detectors", 2023). By Ville's inequality the capital ever reaches 1/alpha with a probability of at most
    alpha, for any run length and any distribution of overlaps. The state is two floats per stake.
    """

    overlap_floor: float
    alpha: float
    sample_count: int = 0
    alarm_after_samples: int | None = None
    _capital_by_stake: list[float] = field(default_factory=lambda: [0.0] * len(_DRIFT_STAKES))

    def add_overlap(self, overlap: float) -> bool:
        """Add a sample's overlap; return whether the alarm is raised."""
        self.sample_count += 1
        reserved_capital = 1.0 / (self.sample_count * (self.sample_count + 1))
        largest_stake = 1.0 / max(1.0 - self.overlap_floor, 0.05)
        alarm_capital = 1.0 / self.alpha
        for stake_index, stake in enumerate(_DRIFT_STAKES):
            grown_capital = (self._capital_by_stake[stake_index] + reserved_capital) * (
                1.0 + stake * largest_stake * (self.overlap_floor - overlap)
            )
            self._capital_by_stake[stake_index] = min(grown_capital, 2 * len(_DRIFT_STAKES) * alarm_capital)
        if self.alarm_after_samples is None and self.evidence >= alarm_capital:
            self.alarm_after_samples = self.sample_count
        return self.is_drift_found

    @property
    def evidence(self) -> float:
        """Capital of the bet: 1 is no evidence, 1/alpha raises the alarm."""
        return sum(self._capital_by_stake) / len(self._capital_by_stake)

    @property
    def is_drift_found(self) -> bool:
        """True if the evidence was ever enough for an alarm."""
        return self.alarm_after_samples is not None


def highest_error_rate(sample_count: int, wrong_count: int, alpha: float) -> float:
    """Return an upper bound of the mean error probability; it is ever too low with a probability of at most `alpha`."""
    if not sample_count:
        return 1.0
    evidence = math.log(len(_WEIGHTS_BELOW_1) / alpha)
    bounds = [1.0]
    for weight in _WEIGHTS_BELOW_1:
        if weight or not wrong_count:
            grown = wrong_count * math.log(weight) if wrong_count else 0.0
            bounds.append((1.0 - math.exp((grown - evidence) / sample_count)) / (1.0 - weight))
    return min(bounds)


def lowest_error_rate(sample_count: int, wrong_count: int, alpha: float) -> float:
    """Return a lower bound of the mean error probability; it is ever too high with a probability of at most `alpha`."""
    if not wrong_count:
        return 0.0
    evidence = math.log(len(_WEIGHTS_ABOVE_1) / alpha)
    bounds = [
        math.expm1((wrong_count * math.log(weight) - evidence) / sample_count) / (weight - 1.0)
        for weight in _WEIGHTS_ABOVE_1
    ]
    return max(0.0, *bounds)
