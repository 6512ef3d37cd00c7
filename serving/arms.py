"""What is counted of a canary and of the requests it is held against, in bounded space."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Arm = Literal["live", "canary"]
ARMS: tuple[Arm, ...] = ("live", "canary")

_STEPS_PER_OCTAVE = 8
_OCTAVES = 16
_MIDDLE = _OCTAVES * _STEPS_PER_OCTAVE
EVENTS_MAX = 16
"""Kinds of feedback that are told apart; what comes after them is `other`."""

_OWN = frozenset({"l1", "l2", "live"})


def bucket(score: float) -> int:
    """A whole number that grows with the score: eighths of an octave (9 %) between 2**-16 and 2**16, either sign."""
    size = min(abs(score), 2.0**_OCTAVES)
    if size < 2.0**-_OCTAVES:
        return 0
    step = min(math.floor(math.log2(size) * _STEPS_PER_OCTAVE) + _MIDDLE, 2 * _MIDDLE - 1) + 1
    return step if score > 0 else -step


@dataclass(slots=True, eq=False)
class Counts:
    """One arm, since its canary began."""

    requests: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    scores: Counter[int] = field(default_factory=Counter)
    score_sum: float = 0.0
    feedback: Counter[str] = field(default_factory=Counter)

    def answered(self, answers: Iterable[Mapping[str, Any]]) -> list[float]:
        """One request more; the top scores of the lists that this very generation gave."""
        self.requests += 1
        tops = []
        for each in answers:
            self.sources[each["source"]] += 1
            scores = each.get("scores")
            if scores is not None and len(scores) and each["source"] in _OWN:
                tops.append(top := float(scores[0]))
                self.scores[bucket(top)] += 1
                self.score_sum += top
        return tops

    def heard(self, event: str, count: int) -> str:
        """Feedback; what the event is counted as."""
        if event not in self.feedback and len(self.feedback) >= EVENTS_MAX:
            event = "other"
        self.feedback[event] += count
        return event

    def to_json(self) -> dict[str, Any]:
        """What travels in the heartbeat; buckets as text, for JSON has no other keys."""
        return {
            "requests": self.requests,
            "sources": dict(self.sources),
            "scores": {str(each): count for each, count in sorted(self.scores.items())},
            "score_sum": self.score_sum,
            "feedback": dict(self.feedback),
        }
