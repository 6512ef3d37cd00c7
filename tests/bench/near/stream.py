"""A stream of strangers' histories, half of them near-duplicates: a recent history and one more item."""

import random
from collections import deque
from collections.abc import Sequence

from cache.model.input_preparation import LiveInput
from serving.engine.micro_batcher import InferenceJob
from serving.generations.snapshot import Snapshot

NEAR_DUPLICATE_SHARE = 0.5
"""Share of near-duplicates."""
LENGTH = 30
"""Items of a history, at least: one more moves its vector by a tenth or so."""
RECENT = 500
"""Histories of which a near-duplicate may be one."""


class HistoryStream:
    """Jobs without an end: histories of users of the night with other items among them, and near-duplicates."""

    def __init__(self, snapshot: Snapshot, table: str, known_histories: Sequence[Sequence[str]], seed: int = 0) -> None:
        self._snapshot = snapshot
        self._table = table
        self._known_histories = [history for history in known_histories if len(history) >= 5]
        self._recent: deque[list[str]] = deque(maxlen=RECENT)
        self._rng = random.Random(seed)

    def jobs(self, count: int) -> list[InferenceJob]:
        """Return the next so many jobs."""
        return [
            InferenceJob(self._snapshot, self._table, LiveInput(history), number + 1, 1, may_reuse_near_answer=True)
            for number in range(count)
            for history in [tuple([item_id.encode() for item_id in self._next()])]
        ]

    def _next(self) -> list[str]:
        rng = self._rng
        if self._recent and rng.random() < NEAR_DUPLICATE_SHARE:
            return [*rng.choice(self._recent), rng.choice(rng.choice(self._known_histories))]
        history: list[str] = []
        while len(history) < LENGTH:
            history += rng.choice(self._known_histories)
        self._recent.append(history)
        return history
