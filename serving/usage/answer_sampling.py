"""Sampling of served answers to look at again: drawn ahead, so that an answer pays for a countdown only."""

import math
import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cache.model.input_preparation import LiveInput
from serving.rendering.answer_fields import Exclusions

QUEUE_MAX = 256
"""Picks that may wait; each holds its own answer of some hundred bytes to a few kilobytes."""

QUEUE_BYTES = 4 << 20
"""Bytes that waiting picks may hold in all: one that was computed from a history of 10,000 ids holds them, too."""

_OBJECT_BYTES = 64
"""Bytes of a short text, a number or a place in a set, with what refers to it."""


class AnswerSample(NamedTuple):
    """Answer as it was served, by `generation`; `at` in Unix seconds.

    What was sent is in `body` (JSON), in `fields`, or the first `k` items of `record`: the stored record, whole, where
    it is at hand. `caller_input` is what it was computed from, None where the night knows; `exclusions` what was left
    out.
    """

    generation: str
    table: str
    raw: bytes
    source: str
    producer: str
    at: float
    k: int = 0
    record: bytes = b""
    body: bytes = b""
    fields: Mapping[str, Any] | None = None
    caller_input: LiveInput | None = None
    exclusions: Exclusions = ()

    @property
    def size_bytes(self) -> int:
        """Bytes that the pick keeps in memory, about."""
        sent_input = self.caller_input or LiveInput()
        texts = (self.raw, self.record, self.body, *(sent_input.history or ()))
        lists = (texts, *self.exclusions, *_values(self.fields), *_values(sent_input.features))
        objects = sum(
            len(sampled_value) if hasattr(sampled_value, "__len__") else 1
            for sampled_value in lists
        )
        return sum(map(len, texts)) + _OBJECT_BYTES * objects


def _values(of: Mapping[str, Any] | None) -> Iterable[Any]:
    return () if of is None else of.values()


class AnswerSampler:
    """Sample of answers, each picked with the same chance, independently: the gaps between picks are geometric.

    Whoever answers subtracts from `countdown` and, once that is below 0, asks `draw_indices` which of its answers are
    meant. (Vitter, "Faster methods for random sampling", CACM 27(7), 1984: skip counts in place of a number per
    record.)
    """

    def __init__(self, per_mille: float, rng: random.Random | None = None) -> None:
        self.sampled_count = 0
        self.dropped_count = 0
        self.countdown = 0
        self._queue: deque[tuple[AnswerSample, int]] = deque()
        self._size_bytes = 0
        self._rng = rng or random.Random()
        chance = min(per_mille / 1000, 1.0)
        self._log = math.log1p(-chance) if chance < 1 else -math.inf
        self.countdown = self._gap()

    def draw_indices(self, count: int) -> list[int]:
        """Places of the picks among the last `count` answers, counted from 0; draws how many come before the next."""
        at, sample_indexes = count + self.countdown, []
        while at < count:
            sample_indexes.append(at)
            at += 1 + self._gap()
        self.countdown = at - count
        return sample_indexes

    def has_room(self) -> bool:
        """Returns whether one more pick may wait; if not, that one is counted as dropped, and need not be made."""
        if len(self._queue) < QUEUE_MAX and self._size_bytes < QUEUE_BYTES:
            return True
        self.dropped_count += 1
        return False

    def put(self, sample: AnswerSample) -> None:
        """Queues a pick; dropped and counted when too many wait."""
        if self.has_room():
            self.sampled_count += 1
            self._queue.append((sample, size := sample.size_bytes))
            self._size_bytes += size

    def next(self) -> AnswerSample | None:
        """Takes out the oldest pick; None if none waits."""
        if not self._queue:
            return None
        sample, size = self._queue.popleft()
        self._size_bytes -= size
        return sample

    def clear(self) -> None:
        """Drops all picks that wait."""
        self._queue.clear()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def _gap(self) -> int:
        if not self._log:
            return sys.maxsize
        # In (0, 1], whose logarithm is finite.
        return int(math.log(1.0 - self._rng.random()) / self._log)
