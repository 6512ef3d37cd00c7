"""Observer of answers: requested names, miss reasons, a sample of the answers, and hooks for features."""

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

RECENT_NAMES_MAX = 4_096
"""Number of requested entities that are remembered, with repetitions."""
_REPORT_BOUNDARY: EntityName = ("", b"")

SAMPLE_QUEUE_MAX = 256
"""Samples that may wait; each holds its answer of a few hundred bytes to a few kilobytes."""

SAMPLE_QUEUE_BYTES_MAX = 4 << 20
"""Bytes of all waiting samples; a sample computed from a history of 10,000 ids also holds these ids."""

_OBJECT_BYTES = 64
"""Estimated bytes of a short text, a number or a set entry, including the reference to it."""


class RecentNames(deque[EntityName]):
    """Requested entities, newest last; a request only appends.

    `flush_pending` adds pending entities of earlier requests.
    """

    def __init__(self) -> None:
        super().__init__(maxlen=RECENT_NAMES_MAX)
        self.flush_pending: Callable[[], None] = lambda: None
        self._tables_and_ids: deque[tuple[str, Sequence[bytes]]] = deque()
        self._batched_id_count = 0

    def add(self, table: str, raw_ids: Sequence[bytes]) -> None:
        """Add ids of one table as a batch, which is unpacked only when it is read."""
        self._tables_and_ids.append((table, raw_ids))
        self._batched_id_count += len(raw_ids)
        while self._batched_id_count - len(self._tables_and_ids[0][1]) >= RECENT_NAMES_MAX:
            self._batched_id_count -= len(self._tables_and_ids.popleft()[1])

    def all_names(self) -> Sequence[EntityName]:
        """Return all entities that are remembered."""
        self.flush_pending()
        for table, raw_ids in self._tables_and_ids:
            self.extend(zip(repeat(table), raw_ids))
        self._tables_and_ids.clear()
        self._batched_id_count = 0
        return self

    def take_new(self) -> list[EntityName]:
        """Return the entities added since the last call, as far as they are still remembered."""
        entity_names = list(self.all_names())
        new_count = (
            entity_names[::-1].index(_REPORT_BOUNDARY) if _REPORT_BOUNDARY in entity_names else len(entity_names)
        )
        if new_count:
            self.append(_REPORT_BOUNDARY)
        return entity_names[len(entity_names) - new_count :]


class AnswerSample(NamedTuple):
    """Answer as it was served, by `generation`; `answered_at` in Unix seconds.

    The sent answer is `answer_json` (JSON), `answer_fields`, or the first `k` items of `stored_record`, the complete
    stored record if known. `caller_input` is the input that it was computed from, None for the night's own input;
    `exclusions` were left out.
    """

    generation: str
    table: str
    raw_id: bytes
    source: str
    producer: str
    answered_at: float
    k: int = 0
    stored_record: bytes = b""
    answer_json: bytes = b""
    answer_fields: Mapping[str, Any] | None = None
    caller_input: LiveInput | None = None
    exclusions: Exclusions = ()

    @property
    def size_bytes(self) -> int:
        """Approximate bytes of memory that the sample holds."""
        sent_input = self.caller_input or LiveInput()
        byte_texts = (self.raw_id, self.stored_record, self.answer_json, *(sent_input.history or ()))
        sampled_parts = (
            byte_texts,
            *self.exclusions,
            *_values_of(self.answer_fields),
            *_values_of(sent_input.features),
        )
        object_count = sum(
            len(sampled_value) if hasattr(sampled_value, "__len__") else 1 for sampled_value in sampled_parts
        )
        return sum(map(len, byte_texts)) + _OBJECT_BYTES * object_count


def _values_of(value_by_name: Mapping[str, Any] | None) -> Iterable[Any]:
    return () if value_by_name is None else value_by_name.values()


class AnswerSampler:
    """Sampler that picks each answer independently with the same probability: gaps between picks are geometric.

    The code that answers subtracts its number of answers from `countdown`. Once that is below 0, `draw_indices` returns
    which of these answers are picked. (Vitter, "Faster methods for random sampling", CACM 27(7), 1984: skip counts in
    place of a random number per record.)
    """

    def __init__(self, sampled_per_mille: float, rng: random.Random | None = None) -> None:
        self.sampled_count = 0
        self.dropped_count = 0
        self.countdown = 0
        self._queue: deque[tuple[AnswerSample, int]] = deque()
        self._queue_bytes = 0
        self._rng = rng or random.Random()
        sample_chance = min(sampled_per_mille / 1000, 1.0)
        self._log_of_skip_chance = math.log1p(-sample_chance) if sample_chance < 1 else -math.inf
        self.countdown = self._draw_gap()

    def draw_indices(self, answer_count: int) -> list[int]:
        """Return the indexes of the picks among the last `answer_count` answers; draw the gap before the next pick."""
        sample_index, sample_indexes = answer_count + self.countdown, []
        while sample_index < answer_count:
            sample_indexes.append(sample_index)
            sample_index += 1 + self._draw_gap()
        self.countdown = sample_index - answer_count
        return sample_indexes

    def has_room_for_sample(self) -> bool:
        """Return whether one more sample may wait; if not, count it as dropped, so that it need not be built."""
        if len(self._queue) < SAMPLE_QUEUE_MAX and self._queue_bytes < SAMPLE_QUEUE_BYTES_MAX:
            return True
        self.dropped_count += 1
        return False

    def put(self, sample: AnswerSample) -> None:
        """Queue a sample; drop and count it if too many wait."""
        if self.has_room_for_sample():
            self.sampled_count += 1
            self._queue.append((sample, size_bytes := sample.size_bytes))
            self._queue_bytes += size_bytes

    def next(self) -> AnswerSample | None:
        """Remove and return the oldest sample; None if none waits."""
        if not self._queue:
            return None
        sample, size_bytes = self._queue.popleft()
        self._queue_bytes -= size_bytes
        return sample

    def clear(self) -> None:
        """Drop all waiting samples."""
        self._queue.clear()
        self._queue_bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def _draw_gap(self) -> int:
        if not self._log_of_skip_chance:
            return sys.maxsize
        # In (0, 1], so that its logarithm is finite.
        return int(math.log(1.0 - self._rng.random()) / self._log_of_skip_chance)


class AnswerObserver:
    """Observer of answers, for the event loop of one process only: reasons of misses, and hooks for other observers."""

    def __init__(self, l1_misses: L1Misses, eviction_history: EvictionHistory | None = None) -> None:
        self.sampler = AnswerSampler(0)
        """Sampler, which a feature replaces and reads from; the default samples nothing."""
        self.on_l2_read: list[Callable[[str, str, Sequence[int | bytes]], None]] = []
        """Called with generation, table and hashes of entities that Redis answered and the night knows."""
        self.on_unknown_id: list[Callable[[EntityName], object]] = []
        """Called with a requested id that the night does not know."""
        self._l1_misses = l1_misses
        self._eviction_history = eviction_history or EvictionHistory(slot_count=2)

    def classify_miss(self, generation: str, table: str, entity_hash: int | bytes, reason: MissReason | None) -> str:
        """Return the reason by which a miss is counted; an unknown id may have had a live answer that expired."""
        if reason is None:
            return MissReason.INTERNAL_ERROR
        if reason.traits.is_nowhere and self._eviction_history.has_expired(generation, table, entity_hash):
            return MissReason.EXPIRED
        return reason.public_reason

    def count_read(self, generation: str, table: str, entity_hash: int | bytes, is_known_to_night: bool = True) -> None:
        """Count an entity that was answered by Redis and not by L1; `is_known_to_night`: the night knows it."""
        self._l1_misses.add(table, {self._eviction_history.find_reason(generation, table, entity_hash): 1})
        if is_known_to_night:
            for on_read_hook in self.on_l2_read:
                on_read_hook(generation, table, (entity_hash,))

    def count_reads(self, generation: str, table: str, entity_hashes: Sequence[int | bytes]) -> None:
        """Count entities known to the night that were answered by Redis and not by L1."""
        self._l1_misses.add(table, self._eviction_history.count_reasons(generation, table, entity_hashes))
        for on_read_hook in self.on_l2_read:
            on_read_hook(generation, table, entity_hashes)

    def note_read(self, generation: str, table: str, entity_hashes: Sequence[int | bytes]) -> None:
        """Call `on_l2_read` for entities that Redis answered; their misses are counted elsewhere."""
        for on_read_hook in self.on_l2_read:
            on_read_hook(generation, table, entity_hashes)
