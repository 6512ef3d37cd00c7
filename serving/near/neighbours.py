"""Recent live answers by their vectors, and the policy that says which of them may answer for an input close by."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from threading import Lock
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache.model.recent_vectors import Nearest, RecentVectors
from serving.near.closeness import FARTHEST, RANGES, range_of
from serving.near.reuse_policy import Decision, ReusePolicy

Answer = TypeVar("Answer")
NearOutcome = Decision | Literal["far", "proven"]
"""Outcome of an input: no recent answer is near, one is shown to be its own, or what the policy decided."""

JUDGED: tuple[NearOutcome, ...] = ("learn", "audit")


@dataclass(slots=True, eq=False)
class KeptAnswer(Generic[Answer]):
    """A recent answer, its margin, and the least distance at which it proved wrong."""

    answer: Answer
    margin: float
    limit: float


class NearAnswer(NamedTuple, Generic[Answer]):
    """A recent answer close to an input: its place in the index, and the distance in lengths of the input's vector.

    `closeness` is the range by which the policy knows it.
    """

    kept_answer: KeptAnswer[Answer]
    distance: float
    slot: int
    closeness: int

    @property
    def answer(self) -> Answer:
        """The answer itself."""
        return self.kept_answer.answer


class Neighbours(Generic[Answer]):
    """Answers of one table, generation and kind of input; any thread may call it."""

    def __init__(
        self, error: float, entries: int, dims: int, rng: Random, counts: Counter[NearOutcome]
    ) -> None:
        self.policy = ReusePolicy(error, RANGES, rng)
        self._vectors: RecentVectors[KeptAnswer[Answer]] = RecentVectors(entries, dims)
        self._counts = counts
        self._version = 0
        self._lock = Lock()

    def near(
        self, vectors: NDArray[np.float32], version: int = 0
    ) -> list[NearAnswer[Answer] | None]:
        """The nearest recent answer of each vector [n, dims]; None where none is near, or it proved wrong at less.

        A later version of what all answers leave out forgets those before; an earlier one finds nothing.
        """
        with self._lock:
            if version > self._version:
                self._version = version
                self._vectors.clear()
            if version < self._version:
                return [None] * len(vectors)
            nearest_entries = self._vectors.nearest(vectors)
        return [None if nearest is None else _near(nearest) for nearest in nearest_entries]

    def may_use(self, near: NearAnswer[Answer]) -> bool:
        """True unless the policy leaves it in any case."""
        with self._lock:
            return self.policy.may_use(near.closeness)

    def decide(self, near: NearAnswer[Answer]) -> Decision:
        """The policy's decision about a near answer."""
        with self._lock:
            self._vectors.mark_used(near.slot)
            return self.policy.decide(near.closeness)

    def settle(
        self,
        vector: NDArray[np.float32],
        answer: Answer,
        near: NearAnswer[Answer] | None,
        outcome: NearOutcome,
        *,
        wrong: bool,
        margin: float = 1.0,
        version: int = 0,
    ) -> None:
        """Takes in an answer that was computed: what it says of the near one, and itself unless that stands for both.

        The smaller its `margin`, the sooner another answer is right for an input close by.
        """
        limit = math.inf
        with self._lock:
            if near is not None and outcome in JUDGED:
                self.policy.judge(near.closeness, is_audit=outcome == "audit", wrong=wrong)
                if not wrong:
                    return
                limit = near.distance
                near.kept_answer.limit = min(near.kept_answer.limit, limit)
            # A vector of no length, or what is made of numbers that are none, has no neighbours.
            is_sound = (
                0 < float(np.abs(vector).max(initial=0)) < math.inf and 0 <= margin < math.inf
            )
            if is_sound and version == self._version:
                self._vectors.add(vector, KeptAnswer(answer, margin, limit))

    def count(self, outcomes: Sequence[NearOutcome]) -> None:
        """Counts inputs by what became of them."""
        with self._lock:
            self._counts.update(outcomes)


def _near(nearest: Nearest[KeptAnswer[Answer]]) -> NearAnswer[Answer] | None:
    kept_answer, distance = nearest.entry, nearest.distance
    if not distance < min(FARTHEST, kept_answer.limit):
        return None
    return NearAnswer(kept_answer, distance, nearest.slot, range_of(distance, kept_answer.margin))
