"""Policy of near-match reuse: how near an answer must be to be reused, learned from judged samples. Pure.

A neighbourhood is a range of closeness. A sample is judged where live computes an answer although a near one exists:
it was wrong if the two differ. Three rules hold the error below the bound:

- a neighbourhood is trusted while the highest that its rate may be, looked at after each sample, is within the bound,
  by its own samples alone (`error_rate.highest`);
- of what a trusted one could answer, a share is computed all the same, drawn by a coin that no caller sees. One such
  audit that proves wrong, and that neighbourhood starts anew, at a smaller part of alpha; nothing at all is reused
  until `DOUBTS` audits in a row were right. Whoever was right for long and turns costs 1 / AUDITED wrong answers;
- the audits are an error measured with its interval, and feed a test for drift. Once either shows that the error is
  above the bound, nothing is reused any more in all of the generation's life.

(Deciding by judged samples when a stored answer may be reused: Schroeder et al., "vCache: Verified Semantic Prompt
Caching", 2025, which fits a curve of the error to similarity for each entry; here nothing is assumed of it.)
"""

from dataclasses import dataclass
from random import Random
from typing import Literal

from serving.sequential.drift import Drift
from serving.sequential.error_rate import highest, lowest

Decision = Literal["reuse", "audit", "learn", "leave"]
"""`reuse` the near answer; `audit` or `learn`: compute, and judge it; `leave`: compute, there is nothing to learn."""

ALPHA = 0.05
"""Chance that any neighbourhood of a table is ever trusted wrongly, in a generation's life."""

ALPHA_OFF = 1e-3
"""Chance of turning off although the error is within the bound."""

AUDITED = 0.05
"""Share of what could be reused that is computed and judged instead."""

DOUBTS = 100
"""Audits in a row that must be right after one that was wrong; meanwhile all that could be reused is audited."""


@dataclass(slots=True)
class TrustEvidence:
    """Samples of one neighbourhood since it last started anew."""

    judged: int = 0
    wrong: int = 0
    starts: int = 1
    is_trusted: bool = False
    is_hopeless: bool = False


class ReusePolicy:
    """Policy for the near answers of one table and generation; not thread-safe."""

    def __init__(self, error: float, neighbourhoods: int, rng: Random) -> None:
        self.error = error
        self.is_off = False
        self.audits = 0
        self.wrong_audits = 0
        self._alpha = ALPHA / neighbourhoods
        self._evidence = [TrustEvidence() for _ in range(neighbourhoods)]
        self._drift = Drift(1.0 - error, ALPHA_OFF)
        self._rng = rng
        self._doubts = 0
        """Audits that must be right, one after another, before anything is reused again."""

    def may_use(self, neighbourhood: int) -> bool:
        """True unless nothing is reused or learned there any more."""
        return not (self.is_off or self._evidence[neighbourhood].is_hopeless)

    def decide(self, neighbourhood: int) -> Decision:
        """Decides about one near answer."""
        if not self.may_use(neighbourhood):
            return "leave"
        if not self._evidence[neighbourhood].is_trusted:
            return "learn"
        return "audit" if self._doubts or self._rng.random() < AUDITED else "reuse"

    def judge(self, neighbourhood: int, *, is_audit: bool, wrong: bool) -> None:
        """Takes in what came of a near answer that was computed as well."""
        found = self._evidence[neighbourhood]
        found.judged += 1
        found.wrong += wrong
        if is_audit:
            self._audited(wrong=wrong)
            if wrong and found.is_trusted:
                self._evidence[neighbourhood] = TrustEvidence(starts=found.starts + 1)
                return
        alpha = self._alpha / (found.starts * (found.starts + 1))
        found.is_trusted = highest(found.judged, found.wrong, alpha) <= self.error
        found.is_hopeless = lowest(found.judged, found.wrong, self._alpha) > self.error

    def _audited(self, *, wrong: bool) -> None:
        self.audits += 1
        self.wrong_audits += wrong
        self._doubts = DOUBTS if wrong else max(0, self._doubts - 1)
        drifted = self._drift.saw(0.0 if wrong else 1.0)
        self.is_off = self.is_off or drifted or self.interval[0] > self.error

    @property
    def is_reusing(self) -> bool:
        """True while any neighbourhood is trusted and no audit has just been wrong."""
        is_trusted = any(each.is_trusted for each in self._evidence)
        return is_trusted and not (self.is_off or self._doubts)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the error of what is reused, its mean over all audits; both hold at every moment, at 1 - ALPHA."""
        count, wrong = self.audits, self.wrong_audits
        return lowest(count, wrong, ALPHA / 2), highest(count, wrong, ALPHA / 2)
