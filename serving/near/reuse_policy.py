"""Policy of near-match reuse: how close an answer must be to be reused, learned from judged samples. Pure.

A near answer is judged if live computes the exact answer as well: it was wrong if the two differ. Closeness is divided
into ranges, 0 is the farthest. Four rules keep the error below the bound:

- A range is reused only if its own samples, at least 2 / error of them, were wrong at most half as often as the bound
  allows. Samples of other ranges cannot make up for these.
- It must also lie within a range from which on, together with all closer ranges, the upper bound of the mean
  probability of being wrong is within the bound, checked after each sample (`sequential.highest_error_rate`). A
  closer range is judged at most as often as a farther one with the same results, so the mean over reused answers is
  not higher.
- A random share of the reusable answers, drawn independently of callers, is computed nevertheless (audits). After a
  wrong audit its range, and all farther ranges, start again with a smaller part of alpha, and no answer is reused
  until `DOUBTS` audits in a row were right. If answers change after a long time without errors, this costs about 1 /
  AUDITED wrong ones.
- The audits also measure the error with its interval, and feed a test for drift. Once either shows that the error is
  above the bound, nothing is reused any more during the generation's life.

(Deciding by judged samples when a stored answer may be reused: Schroeder et al., "vCache: Verified Semantic Prompt
Caching", 2025, which fits a curve of error over similarity for each entry; here nothing is assumed about that curve.)
"""

from dataclasses import dataclass
from random import Random
from typing import Literal

from serving.metrics.sequential import Drift, highest_error_rate, lowest_error_rate

Decision = Literal["reuse", "audit", "learn", "leave"]
"""`reuse`: reuse the near answer; `audit`, `learn`: compute, and judge the near answer; `leave`: compute, do not
judge."""

ALPHA = 0.05
"""Probability that the error bound of any range is ever too low during a generation's life."""

ALPHA_OFF = 1e-3
"""Probability of turning reuse off although the error is within the bound."""

AUDITED = 0.05
"""Share of reusable answers that are computed and judged instead."""

DOUBTS = 100
"""Number of audits in a row that must be right after a wrong audit; meanwhile every reusable answer is audited."""


@dataclass(slots=True)
class Samples:
    """Counts of judged and wrong samples since the last restart, and the number of starts."""

    judged_count: int = 0
    wrong_count: int = 0
    start_count: int = 1

    def add(self, *, is_wrong: bool) -> None:
        """Add one sample."""
        self.judged_count += 1
        self.wrong_count += is_wrong


class ReusePolicy:
    """Policy for the near answers of one table, generation and kind of input; not thread-safe."""

    def __init__(self, error_share_max: float, range_count: int, rng: Random) -> None:
        self.error_share_max = error_share_max
        self.is_off = False
        self.audits = 0
        self.wrong_audits = 0
        self._alpha = ALPHA / range_count
        self._samples_by_range = [Samples() for _ in range(range_count)]
        self._from = [Samples() for _ in range(range_count)]
        """Samples of each range together with all closer ranges."""
        self._is_trusted = [False] * range_count
        self._is_hopeless = [False] * range_count
        self._drift = Drift(1.0 - error_share_max, ALPHA_OFF)
        self._rng = rng
        self._doubts = 0
        """Number of audits in a row that must still be right before answers are reused again."""

    def may_use(self, closeness_index: int) -> bool:
        """True while near answers in this range may be reused or judged."""
        return not (self.is_off or self._is_hopeless[closeness_index])

    def decide(self, closeness_index: int) -> Decision:
        """Return the decision about one near answer."""
        if not self.may_use(closeness_index):
            return "leave"
        if not self._is_trusted[closeness_index]:
            return "learn"
        return "audit" if self._doubts or self._rng.random() < AUDITED else "reuse"

    def judge(self, closeness_index: int, *, is_audit: bool, is_wrong: bool) -> None:
        """Record whether a near answer, whose exact answer was computed as well, was wrong."""
        if is_audit:
            self._audited(is_wrong=is_wrong)
        samples_by_range, from_here = self._samples_by_range, self._from
        if is_audit and is_wrong:
            samples_by_range[closeness_index] = Samples()
            for range_index in range(closeness_index + 1):
                from_here[range_index] = Samples(start_count=from_here[range_index].start_count + 1)
        else:
            samples_by_range[closeness_index].add(is_wrong=is_wrong)
            for range_index in range(closeness_index + 1):
                from_here[range_index].add(is_wrong=is_wrong)
            range_samples = samples_by_range[closeness_index]
            self._is_hopeless[closeness_index] = (
                lowest_error_rate(range_samples.judged_count, range_samples.wrong_count, self._alpha)
                > self.error_share_max
            )
        self._trust()

    def _trust(self) -> None:
        is_within = False
        for range_index, (range_samples, samples) in enumerate(zip(self._samples_by_range, self._from, strict=True)):
            is_within = is_within or self._is_within_error(samples)
            is_clean = (
                range_samples.judged_count * self.error_share_max >= 2
                and range_samples.wrong_count <= range_samples.judged_count * self.error_share_max / 2
            )
            self._is_trusted[range_index] = is_within and is_clean

    def _is_within_error(self, samples: Samples) -> bool:
        if samples.judged_count * self.error_share_max < 1:  # too few samples for a bound this low
            return False
        alpha = self._alpha / (samples.start_count * (samples.start_count + 1))
        return highest_error_rate(samples.judged_count, samples.wrong_count, alpha) <= self.error_share_max

    def _audited(self, *, is_wrong: bool) -> None:
        self.audits += 1
        self.wrong_audits += is_wrong
        self._doubts = DOUBTS if is_wrong else max(0, self._doubts - 1)
        drifted = self._drift.add_overlap(0.0 if is_wrong else 1.0)
        self.is_off = self.is_off or drifted or self.error_interval[0] > self.error_share_max

    @property
    def is_reusing(self) -> bool:
        """True while a range is trusted and no recent audit was wrong."""
        return any(self._is_trusted) and not (self.is_off or self._doubts)

    @property
    def error_interval(self) -> tuple[float, float]:
        """Confidence interval (1 - ALPHA, valid at any time) of the mean error of reused answers, from all audits."""
        count, wrong = self.audits, self.wrong_audits
        return lowest_error_rate(count, wrong, ALPHA / 2), highest_error_rate(count, wrong, ALPHA / 2)
