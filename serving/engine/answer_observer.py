"""Observer of answers: names asked for, reasons of misses, a sample of the answers, and hooks for other observers."""

import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from cache.model.input_preparation import LiveInput
from cache.tiers.l1 import EvictionHistory
from cache.tiers.reads import MissReason
from serving.engine.rendering.answer_fields import Exclusions
from serving.metrics.collectors import L1Misses

EntityName = tuple[str, bytes]
"""Table and id of an entity."""

RECENT = 4_096
"""Entities remembered, with repetitions."""
_REPORT_BOUNDARY: EntityName = ("", b"")

SAMPLE_QUEUE_MAX = 256
"""Picks that may wait; each holds its own answer of some hundred bytes to a few kilobytes."""

SAMPLE_QUEUE_BYTES = 4 << 20
"""Bytes that waiting picks may hold in all: one that was computed from a history of 10,000 ids holds them, too."""

_OBJECT_BYTES = 64
"""Bytes of a short text, a number or a place in a set, with what refers to it."""


class RecentNames(deque[EntityName]):
    """Requested entities, newest last; appending is all that a request pays for it.

    `flush_pending` adds pending entities of earlier requests.
    """

    def __init__(self) -> None:
        super().__init__(maxlen=RECENT)
        self.flush_pending: Callable[[], None] = lambda: None
        self._batches: deque[tuple[str, Sequence[bytes]]] = deque()
        self._waiting = 0

    def add(self, table: str, raws: Sequence[bytes]) -> None:
        """Add ids of one table at once, as a batch that is unpacked only when it is read."""
        self._batches.append((table, raws))
        self._waiting += len(raws)
        while self._waiting - len(self._batches[0][1]) >= RECENT:
            self._waiting -= len(self._batches.popleft()[1])

    def names(self) -> Sequence[EntityName]:
        """Return all entities that are remembered."""
        self.flush_pending()
        for table, raws in self._batches:
            self.extend(zip(repeat(table), raws))
        self._batches.clear()
        self._waiting = 0
        return self

    def take_new(self) -> list[EntityName]:
        """Return the entities added since the last call, as far as they are still remembered."""
        names = list(self.names())
        last = names[::-1].index(_REPORT_BOUNDARY) if _REPORT_BOUNDARY in names else len(names)
        if last:
            self.append(_REPORT_BOUNDARY)
        return names[len(names) - last :]


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
        object_count = sum(
            len(sampled_value) if hasattr(sampled_value, "__len__") else 1
            for sampled_value in lists
        )
        return sum(map(len, texts)) + _OBJECT_BYTES * object_count


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
        if len(self._queue) < SAMPLE_QUEUE_MAX and self._size_bytes < SAMPLE_QUEUE_BYTES:
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


class AnswerObserver:
    """Observer of answers, for the event loop of one process only: reasons of misses, and hooks for other observers."""

    def __init__(self, l1_misses: L1Misses, absences: EvictionHistory | None = None) -> None:
        self.sampler = AnswerSampler(0)
        """Sampler whose samples a feature takes out; this one samples nothing."""
        self.on_read: list[Callable[[str, str, Sequence[int | bytes]], None]] = []
        """Called with generation, table and hashes of entities that Redis answered and the night knows."""
        self.on_cold: list[Callable[[EntityName], object]] = []
        """Called with an id that was asked for and that the night does not know."""
        self._l1_misses = l1_misses
        self._eviction_history = absences or EvictionHistory(slot_count=2)

    def classify_miss(
        self, generation: str, table: str, key: int | bytes, reason: MissReason | None
    ) -> str:
        """The reason by which a miss is counted: an id that the night lacks may have had a live answer for its life."""
        if reason is None:
            return MissReason.INTERNAL_ERROR
        if reason.traits.is_nowhere and self._eviction_history.has_expired(generation, table, key):
            return MissReason.EXPIRED
        return reason.public

    def count_read(
        self, generation: str, table: str, key: int | bytes, is_known: bool = True
    ) -> None:
        """Counts one entity that Redis answered, so L1 did not; `is_known` to the night."""
        self._l1_misses.add(table, {self._eviction_history.find_reason(generation, table, key): 1})
        if is_known:
            for note in self.on_read:
                note(generation, table, (key,))

    def count_reads(self, generation: str, table: str, keys: Sequence[int | bytes]) -> None:
        """Counts entities that Redis answered, so L1 did not; the night knows them all."""
        self._l1_misses.add(table, self._eviction_history.count_reasons(generation, table, keys))
        for note in self.on_read:
            note(generation, table, keys)

    def note_read(self, generation: str, table: str, keys: Sequence[int | bytes]) -> None:
        """Call `on_read` for entities that Redis answered; their misses are counted elsewhere."""
        for note in self.on_read:
            note(generation, table, keys)
