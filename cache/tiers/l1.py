"""L1: in-process cache of records, bounded by bytes, with a bounded history of evicted and expired keys."""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from sys import getsizeof
from typing import Any, Literal, NamedTuple

import numpy as np
from cachetools import TTLCache

Absence = Literal["cold_start", "evicted", "expired", "flipped"]
"""Reason why L1 lacks a key: never held in this generation (or no longer known), evicted, expired, or held only in the
previous generation."""

ENTRY_OVERHEAD_BYTES = 328
"""Memory per entry besides the record and the table: key, entry, two numbers, and allocator overhead."""

LIVE_OVERHEAD_BYTES = 96
"""Memory that the digest and expiry of a live answer add to an entry."""

READY_OVERHEAD_BYTES = 416
"""Memory per ready answer besides its texts, request and id; the key is the request's bytes object."""

EVICTED_SLOTS = 1 << 17
"""Slots of 8 bytes, 1 MiB in all: room for about the last hundred thousand evicted keys."""

EXPIRED_SLOTS = 1 << 13

FLIPPED_WITHIN_S = 300.0
"""Seconds after a flip for which a miss counts as `flipped` if L1 held the previous generation's record."""

_RECORDS_FILLED_AT_ONCE = 32
"""Largest number of records by which the tier may briefly exceed its bound."""

_BOUND_TO_FILLED_RATIO = 64
"""Smallest ratio of the tier's bound to the size of the records stored at once."""

_VECTORISE_KEYS_MIN = 16
"""Number of keys from which on numpy is faster despite its fixed cost."""


class LocalKey(NamedTuple):
    """Key of a record in L1; includes the generation, so that entries never need to be invalidated."""

    generation: str
    table: str
    hash_or_digest: int | bytes


class Entry(NamedTuple):
    """Record in L1; `input_digest` and `expires_at` (monotonic seconds) are None for a nightly record."""

    record: bytes
    fingerprint: int
    input_digest: bytes | None = None
    expires_at: float | None = None


class ReadyAnswer(NamedTuple):
    """Rendered answer except for its age, which is inserted between `body_head` and `body_tail`.

    `state_stamp` identifies the state from which the answer was made: with another stamp the answer is invalid.
    `sampled_access`: spot and bytes in the sample of L1's reads, if sampled. `user_events`: the bytes object of the
    user's events in memory: with another object the answer is invalid. `has_newer_events`: the answer includes newer
    events.
    """

    state_stamp: int
    body_head: bytes
    body_tail: bytes
    data_until: int
    table_and_id: tuple[str, bytes]
    request_bytes: bytes
    sampled_access: tuple[int, int] | None = None
    user_events: bytes | None = None
    has_newer_events: bool = False


def entry_size_bytes(entry: Entry | ReadyAnswer) -> int:
    """Return the bytes of one entry, without its share of the hash table."""
    if isinstance(entry, ReadyAnswer):
        sent_bytes = len(entry.body_head) + len(entry.body_tail) + len(entry.request_bytes)
        return sent_bytes + len(entry.table_and_id[1]) + len(entry.user_events or b"") + READY_OVERHEAD_BYTES
    live_bytes = 0 if entry.input_digest is None else LIVE_OVERHEAD_BYTES
    return len(entry.record) + ENTRY_OVERHEAD_BYTES + live_bytes


class LocalTier:
    """LRU cache bounded by bytes; an expired entry is never returned.

    The hash table's actual size counts: with many replacements, Python makes it three to six times as large as needed.
    """

    def __init__(self, max_bytes: int, monotonic_clock: Callable[[], float] = time.monotonic) -> None:
        self.too_large_count = 0
        self.ready_tables: set[str] = set()
        """Tables for which a ready answer was ever kept."""
        self._timer = monotonic_clock
        self.max_bytes = max_bytes
        self._entries: OrderedDict[LocalKey | bytes, Entry | ReadyAnswer] = OrderedDict()
        self._find_entry, self._move_to_end = self._entries.get, self._entries.move_to_end
        self._entries_bytes = 0
        self.eviction_history = EvictionHistory(self._entries.__contains__, monotonic_clock)

    def get(self, key: LocalKey) -> Entry | None:
        """Return the entry, None if it is absent or expired; mark it as recently used."""
        entry: Entry | None = self._find_entry(key)  # type: ignore[assignment]  # a LocalKey names a record
        if entry is None:
            return None
        if entry[3] is None or entry[3] > self._timer():
            self._move_to_end(key)
            return entry
        self._remove_entry(key)
        self.eviction_history.expired_keys.note(key)
        return None

    def inspect(self, key: LocalKey) -> Entry | None:
        """Return the entry like `get`, but change neither contents nor LRU order."""
        entry: Entry | None = self._find_entry(key)  # type: ignore[assignment]  # as above
        is_gone = entry is None or (entry[3] is not None and entry[3] <= self._timer())
        return None if is_gone else entry

    def get_many(self, keys: Sequence[LocalKey]) -> list[Entry | None]:
        """Return the entries of many keys, None for each that is absent or expired."""
        entries: list[Any] = list(map(self._find_entry, keys))
        return [self.get(key) for key in keys] if any(entries) else entries

    def can_fit(self, size_bytes: int) -> bool:
        """Return whether a record of this size can be stored; `put` counts records that cannot."""
        return size_bytes + ENTRY_OVERHEAD_BYTES <= self.max_bytes

    def find_ready_answer(self, request_bytes: bytes) -> ReadyAnswer | None:
        """Return the answer kept for exactly these request bytes; the caller checks its stamp."""
        ready_answer = self._find_entry(request_bytes)
        if ready_answer is not None:
            self._move_to_end(request_bytes)
        return ready_answer  # type: ignore[return-value]  # bytes name a ready answer

    def keep_ready_answer(self, ready_answer: ReadyAnswer) -> None:
        """Store a ready answer, which counts against the same bound as records."""
        self.ready_tables.add(ready_answer.table_and_id[0])
        self.put(ready_answer.request_bytes, ready_answer)

    def drop_access(self, ready_answer: ReadyAnswer) -> None:
        """Remove the access of a ready answer that is no longer sampled, so that its readers record nothing."""
        if self._find_entry(ready_answer.request_bytes) is ready_answer:
            self._entries[ready_answer.request_bytes] = ready_answer._replace(sampled_access=None)

    def fill(self, keys: Sequence[LocalKey], records: Sequence[bytes], fingerprints: Sequence[int]) -> None:
        """Store nightly records of one size, evicting after each few of them."""
        entries, entry_bytes = (self._entries, len(records[0]) + ENTRY_OVERHEAD_BYTES if records else 0)
        # The hash table grows for all records stored at once: in a small tier that would evict more than necessary.
        records_at_once = max(
            1, min(_RECORDS_FILLED_AT_ONCE, self.max_bytes // (_BOUND_TO_FILLED_RATIO * max(1, entry_bytes)))
        )
        for start in range(0, len(keys), records_at_once):
            chunk_slice = slice(start, start + records_at_once)
            for key, entry in zip(
                keys[chunk_slice], map(Entry, records[chunk_slice], fingerprints[chunk_slice]), strict=True
            ):
                if (previous_entry := entries.get(key)) is not None:
                    self._entries_bytes -= entry_size_bytes(previous_entry)
                    self._move_to_end(key)
                entries[key] = entry
                self._entries_bytes += entry_bytes
            self._make_room()

    def put(self, key: LocalKey | bytes, entry: Entry | ReadyAnswer) -> None:
        """Store or replace an entry; one larger than the whole tier is left out and counted."""
        entries, entry_bytes = self._entries, entry_size_bytes(entry)
        if (previous_entry := entries.get(key)) is not None:
            self._entries_bytes -= entry_size_bytes(previous_entry)
            self._move_to_end(key)
        entries[key] = entry
        self._entries_bytes += entry_bytes
        if entry_bytes > self.max_bytes:
            self._remove_entry(key)
            self.too_large_count += 1
        self._make_room()

    def _make_room(self) -> None:
        entries, bytes_max, evicted_keys = self._entries, self.max_bytes, list[Hashable]()
        while self._entries_bytes + getsizeof(entries) > bytes_max and entries:
            key, oldest_entry = entries.popitem(last=False)
            if type(oldest_entry) is Entry and oldest_entry[2] is None:
                self._entries_bytes -= len(oldest_entry[0]) + ENTRY_OVERHEAD_BYTES
            else:
                self._entries_bytes -= entry_size_bytes(oldest_entry)
            if type(key) is not bytes:  # The key of a ready answer: L1 may still have the record
                evicted_keys.append(key)
        if evicted_keys:
            self.eviction_history.evicted_keys.note_all(evicted_keys)
        if not entries:
            entries.clear()  # without this, an emptied table keeps its memory

    def _remove_entry(self, key: LocalKey | bytes) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._entries_bytes -= entry_size_bytes(entry)

    def discard(self, key: LocalKey) -> None:
        """Remove the key if it is present."""
        self._remove_entry(key)
        self.eviction_history.evicted_keys.note(key)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of all entries and their table, never above `max_bytes`."""
        return self._entries_bytes + getsizeof(self._entries) if self._entries else 0

    @property
    def table_bytes_per_entry(self) -> int:
        """Bytes of the table per entry; 0 without entries."""
        return getsizeof(self._entries) // len(self._entries) if self._entries else 0


class NegativeCache:
    """Cache of keys that are stored nowhere; separate from L1, so that many of them evict no records."""

    def __init__(self, max_entries: int, ttl_s: float, monotonic_clock: Callable[[], float] = time.monotonic) -> None:
        # cachetools raises an error if an entry is added to a cache of size 0.
        self._keys: TTLCache[LocalKey, None] = TTLCache(max(0, max_entries), ttl_s, monotonic_clock)

    def __contains__(self, key: LocalKey) -> bool:
        return key in self._keys

    def add(self, key: LocalKey) -> None:
        """Add the key for the cache's life; the least recently added key is evicted."""
        if self._keys.maxsize >= 1:
            self._keys[key] = None

    def discard(self, key: LocalKey) -> None:
        """Remove the key, because a record for it exists now."""
        if key in self._keys:  # the key is almost never present, and this check costs a third of `pop` or `del`
            self._keys.pop(key, None)

    def __len__(self) -> int:
        return len(self._keys)


class EvictionHistory:
    """Bounded history of keys that left L1, which gives the reason of a miss; `is_cached` returns whether L1 has a key.

    Expiry takes precedence over eviction, and both over a flip.
    """

    def __init__(
        self,
        is_cached: Callable[[tuple[str, str, int | bytes]], bool] = lambda _key: False,
        monotonic_clock: Callable[[], float] = time.monotonic,
        slot_count: int = EVICTED_SLOTS,
    ) -> None:
        self.evicted_keys = LossyKeySet(slot_count)
        self.expired_keys = LossyKeySet(min(slot_count, EXPIRED_SLOTS))
        self._is_in_l1 = is_cached
        self._timer = monotonic_clock
        self._last_flip: tuple[str, float] | None = None

    def note_flip(self, previous_generation: str) -> None:
        """Record a flip from `previous_generation` to another live generation."""
        self._last_flip = previous_generation, self._timer() + FLIPPED_WITHIN_S

    def find_reason(self, generation: str, table: str, hash_or_digest: int | bytes) -> Absence:
        """Return the reason why L1 lacked a key."""
        if self.expired_keys.is_empty and self.evicted_keys.is_empty and self._last_flip is None:
            return "cold_start"
        local_key = generation, table, hash_or_digest
        if local_key in self.expired_keys:
            return "expired"
        if local_key in self.evicted_keys:
            return "evicted"
        if (previous_generation := self._previous_generation(generation)) is not None:
            previous_key = previous_generation, table, hash_or_digest
            if self._is_in_l1(previous_key) or previous_key in self.evicted_keys:
                return "flipped"
        return "cold_start"

    def count_reasons(
        self, generation: str, table: str, hashes_or_digests: Sequence[int | bytes]
    ) -> dict[Absence, int]:
        """Count the reasons why L1 lacked these keys; each key has exactly one reason."""
        if self.expired_keys.is_empty and self._previous_generation(generation) is None:
            if self.evicted_keys.is_empty:
                return {"cold_start": len(hashes_or_digests)}
            evicted_count = self.evicted_keys.count_contained([(generation, table, key) for key in hashes_or_digests])
            return {"evicted": evicted_count, "cold_start": len(hashes_or_digests) - evicted_count}
        count_by_absence: dict[Absence, int] = {}
        for key in hashes_or_digests:
            absence = self.find_reason(generation, table, key)
            count_by_absence[absence] = count_by_absence.get(absence, 0) + 1
        return count_by_absence

    def has_expired(self, generation: str, table: str, hash_or_digest: int | bytes) -> bool:
        """Return whether the key was held until it expired."""
        return not self.expired_keys.is_empty and (generation, table, hash_or_digest) in self.expired_keys

    def _previous_generation(self, generation: str) -> str | None:
        last_flip = self._last_flip
        if last_flip is None:
            return None
        if self._timer() >= last_flip[1]:
            self._last_flip = None
            return None
        return None if last_flip[0] == generation else last_flip[0]


class LossyKeySet:
    """Set of key hashes, one per slot: a later key overwrites an earlier one, so that keys may be forgotten."""

    def __init__(self, slot_count: int = EVICTED_SLOTS) -> None:
        self.is_empty = True
        self._hash_slots = array("q", bytes(8 * slot_count))
        self._hash_array = np.frombuffer(self._hash_slots, np.int64)
        self._slot_mask = slot_count - 1

    def note(self, key: Hashable) -> None:
        """Add a key."""
        self.is_empty = False
        key_hash = hash(key)
        self._hash_slots[key_hash & self._slot_mask] = key_hash

    def note_all(self, keys: Sequence[Hashable]) -> None:
        """Add keys in order."""
        if len(keys) < _VECTORISE_KEYS_MIN:
            for key in keys:
                self.note(key)
            return
        self.is_empty = False
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        self._hash_array[hashes & self._slot_mask] = hashes

    def __contains__(self, key: Hashable) -> bool:
        key_hash = hash(key)
        return self._hash_slots[key_hash & self._slot_mask] == key_hash

    def count_contained(self, keys: Sequence[Hashable]) -> int:
        """Return the number of the keys that the set contains."""
        if len(keys) < _VECTORISE_KEYS_MIN:
            return sum(map(self.__contains__, keys))
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        return int(np.count_nonzero(self._hash_array[hashes & self._slot_mask] == hashes))
