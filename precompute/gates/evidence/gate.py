"""A gate: a rule's public id, the function that judges by it, and whether a person may overrule it."""

from collections.abc import Callable
from dataclasses import dataclass

from precompute.gates.evidence.candidate import Candidate
from precompute.gates.evidence.verdict import Measurement

Measure = Callable[[Candidate], Measurement]


@dataclass(frozen=True, slots=True)
class Gate:
    """A rule; one of `integrity` is on what is simply wrong, and nobody may wave it through.

    One that `wants_interactions` is left out of a night that was given none: it has nothing to ask.
    """

    rule: str
    is_integrity: bool
    measure: Measure
    wants_interactions: bool = False

    def __call__(self, candidate: Candidate) -> Measurement:
        """Measures a candidate; what it reads may make it raise anything."""
        return self.measure(candidate)


def integrity(rule: str) -> Callable[[Measure], Gate]:
    """Decorator of a rule on what is simply wrong; `rule` is its id for good: manifests and alerts hold it."""
    return lambda measure: Gate(rule, True, measure)


def judgement(rule: str, *, wants_interactions: bool = False) -> Callable[[Measure], Gate]:
    """Decorator of a rule on what is unusual: a person may know why it is right."""
    return lambda measure: Gate(rule, False, measure, wants_interactions)
