"""Sample of the reads of L1, from which the miss-ratio curve is computed."""

from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from itertools import repeat

import numpy as np
import xxhash

from cache.format.ids import HASH_SPACE
from cache.tiers.l1 import ENTRY_OVERHEAD_BYTES, LIVE_OVERHEAD_BYTES, ReadyAnswer, entry_size_bytes
from cache.tiers.reads import Hit, ReadResult, RecordKey, RecordKeys

Access = tuple[int, int]
"""Spot and size of an access to a key; the size is negative if the key was stored, or moved, without a counted read."""

TRACED_READS_MAX = 16_384
"""Number of reads kept until they are consumed; further reads replace the oldest."""


class AccessTrace(deque[Access]):
    """Trace of sampled reads; other reads cost only one comparison with `greatest_sampled_spot`.

    Sizes are bytes in L1 without the share of the hash table. A spot is an id's fingerprint; its lower half is combined
    with table and generation, so that the fingerprint alone decides whether a key is sampled. `generation` is the
    current one.
    """

    def __init__(self) -> None:
        super().__init__(maxlen=TRACED_READS_MAX)
        self.generation: str | None = None
        self.sample_up_to(-1)

    def sample_up_to(self, greatest_spot: int) -> None:
        """Sample spots up to `greatest_spot` from now on; -1 samples none."""
        self.greatest_sampled_spot = greatest_spot
        self._greatest_sampled_spot = np.uint64(max(0, greatest_spot))

    def begin_generation(self, generation: str | None) -> None:
        """Sample all spots again if the generation differs from the current one."""
        if generation != self.generation:
            self.generation = generation
            if self.greatest_sampled_spot >= 0:
                self.sample_up_to(HASH_SPACE - 1)

    def attach_access(self, generation: str, fingerprint: int, ready_answer: ReadyAnswer) -> ReadyAnswer:
        """Return a ready answer of the live generation, with the access to record at each read if the key is sampled.

        A key that is not sampled now stays so until the next generation, so that readers need not check again.
        """
        self.begin_generation(generation)
        if fingerprint > self.greatest_sampled_spot:
            return ready_answer
        spot = fingerprint ^ _spot_salt(generation, "") ^ xxhash.xxh32_intdigest(ready_answer.request_bytes)
        self.append((spot, -entry_size_bytes(ready_answer)))
        return ready_answer._replace(sampled_access=(spot, entry_size_bytes(ready_answer)))

    def note_read(self, generation: str, record_key: RecordKey, outcome: ReadResult | None) -> None:
        """Record a read and its outcome; ignore a record that does not exist, since an L1 of any size would lack it."""
        if record_key.fingerprint <= self.greatest_sampled_spot and type(outcome) is Hit:
            size_bytes = len(outcome.record) + ENTRY_OVERHEAD_BYTES + LIVE_OVERHEAD_BYTES * outcome.is_live
            self.append((record_key.fingerprint ^ _spot_salt(generation, record_key.table.name), size_bytes))

    def note_reads(self, generation: str, record_keys: RecordKeys, result_by_index: Mapping[int, ReadResult]) -> None:
        """Record a batch of reads; `result_by_index` has the outcomes that are not rows, by index."""
        if self.greatest_sampled_spot < 0:
            return
        indexes = (record_keys.fingerprints <= self._greatest_sampled_spot).nonzero()[0]
        if result_by_index:
            for index in result_by_index:
                self.note_read(generation, record_keys.record_key_at(index), result_by_index[index])
            indexes = np.setdiff1d(indexes, list(result_by_index))
        if len(indexes):
            salt = np.uint64(_spot_salt(generation, record_keys.table.name))
            spots = (record_keys.fingerprints[indexes] ^ salt).tolist()
            self.extend(zip(spots, repeat(record_keys.table.layout.size_bytes + ENTRY_OVERHEAD_BYTES)))

    def note_put(self, generation: str, record_key: RecordKey, size_bytes: int) -> None:
        """Record that a live record was stored."""
        if record_key.fingerprint <= self.greatest_sampled_spot:
            spot = record_key.fingerprint ^ _spot_salt(generation, record_key.table.name)
            self.append((spot, -(size_bytes + ENTRY_OVERHEAD_BYTES + LIVE_OVERHEAD_BYTES)))


@lru_cache(maxsize=256)
def _spot_salt(generation: str, table: str) -> int:
    return xxhash.xxh32_intdigest(f"{generation}\n{table}".encode())
