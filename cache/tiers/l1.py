"""L1: records of this process, bounded by bytes, and a bounded memory of what it let go."""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from sys import getsizeof
from typing import Any, Literal, NamedTuple

import numpy as np
from cachetools import TTLCache

Absence = Literal["cold_start", "evicted", "expired", "flipped"]
"""Absences: never here in this generation (or forgotten since); let go; its life was over; here, but in the generation
before."""

OVERHEAD_BYTES = 328
"""Memory per entry besides the record and the table: key, entry, two numbers, and what the allocator rounds up."""

LIVE_BYTES = 96
"""Memory that digest and expiry of a live answer add to an entry."""

READY_BYTES = 416
"""Memory per ready answer besides its texts, request and id; its key is the request's own bytes."""

EVICTED_SLOTS = 1 << 17
"""Slots of 8 bytes, a mebibyte: the last hundred thousand entries or so that were let go."""

EXPIRED_SLOTS = 1 << 13

FLIPPED_S = 300.0
"""Seconds after a flip in which a record that the generation before had in L1 counts as `flipped`."""

_FILLED_AT_ONCE = 32
"""Records that may be too many for a moment."""

_BOUND_TO_FILLED_RATIO = 64
"""Ratio, at least, of a tier's bound to what is filled in at once."""

_VECTORISE_KEYS_MIN = 16
"""Number of keys from which on numpy's fixed cost pays."""


class LocalKey(NamedTuple):
    """Key of a record in L1; the generation is part of it, so nothing is ever invalidated."""

    generation: str
    table: str
    key: int | bytes


class Entry(NamedTuple):
    """A record in L1; `digest` and `expires_at` (monotonic seconds) are None for what the night computed."""

    record: bytes
    fingerprint: int
    digest: bytes | None = None
    expires_at: float | None = None


class ReadyAnswer(NamedTuple):
    """An answer as it is sent, but for its age, which goes between `head` and `tail`.

    `stamp` is that of what it was made from: under any other it counts for nothing. `table_and_id`: table and id.
    `access`: its spot and bytes in the sample of what L1 is asked for, if it is in there. `events`: those
    in memory of the user with this id, the very object: with another one it counts for nothing; `is_newer` if it counts
    any.
    """

    stamp: int
    head: bytes
    tail: bytes
    data_until: int
    table_and_id: tuple[str, bytes]
    request: bytes
    access: tuple[int, int] | None = None
    events: bytes | None = None
    is_newer: bool = False


def size_of(entry: Entry | ReadyAnswer) -> int:
    """Bytes of one entry without its place in the table."""
    if isinstance(entry, ReadyAnswer):
        sent_bytes = len(entry.head) + len(entry.tail) + len(entry.request)
        return sent_bytes + len(entry.table_and_id[1]) + len(entry.events or b"") + READY_BYTES
    live = 0 if entry.digest is None else LIVE_BYTES
    return len(entry.record) + OVERHEAD_BYTES + live


class LocalTier:
    """An LRU cache bounded by bytes; an entry past its life is never returned.

    The table is counted as it is, not per entry: under churn Python sizes it for three to six times what it holds.
    """

    def __init__(self, max_bytes: int, timer: Callable[[], float] = time.monotonic) -> None:
        self.too_large = 0
        self.ready_tables: set[str] = set()
        """Tables of which an answer was ever kept."""
        self._timer = timer
        self.max_bytes = max_bytes
        self._entries: OrderedDict[LocalKey | bytes, Entry | ReadyAnswer] = OrderedDict()
        self._find, self._move_to_end = self._entries.get, self._entries.move_to_end
        self._bytes = 0
        self.eviction_history = EvictionHistory(self._entries.__contains__, timer)

    def get(self, key: LocalKey) -> Entry | None:
        """The entry, unless it is absent or its life is over."""
        entry: Entry | None = self._find(key)  # type: ignore[assignment]  # a LocalKey names a record
        if entry is None:
            return None
        if entry[3] is None or entry[3] > self._timer():
            self._move_to_end(key)
            return entry
        self._drop(key)
        self.eviction_history.expired.note(key)
        return None

    def inspect(self, key: LocalKey) -> Entry | None:
        """The entry as `get` would find it, for somebody who only looks: what is held and what goes first stay."""
        entry: Entry | None = self._find(key)  # type: ignore[assignment]  # as above
        is_over = entry is None or (entry[3] is not None and entry[3] <= self._timer())
        return None if is_over else entry

    def get_many(self, keys: Sequence[LocalKey]) -> list[Entry | None]:
        """Entries of many keys, None for each that is absent or whose life is over."""
        entries: list[Any] = list(map(self._find, keys))
        return [self.get(key) for key in keys] if any(entries) else entries

    def can_fit(self, size_bytes: int) -> bool:
        """True if a record of this size fits at all; one that does not is counted when it comes."""
        return size_bytes + OVERHEAD_BYTES <= self.max_bytes

    def ready(self, request: bytes) -> ReadyAnswer | None:
        """The answer kept for exactly this request; whether it still counts is for its stamp to say."""
        ready = self._find(request)
        if ready is not None:
            self._move_to_end(request)
        return ready  # type: ignore[return-value]  # bytes name a ready answer

    def keep(self, ready: ReadyAnswer) -> None:
        """Keeps an answer beside its record, within the same bound."""
        self.ready_tables.add(ready.table_and_id[0])
        self.put(ready.request, ready)

    def unsampled(self, ready: ReadyAnswer) -> None:
        """Marks a ready answer that the sample has left out: from now on its readers write nothing."""
        if self._find(ready.request) is ready:
            self._entries[ready.request] = ready._replace(access=None)

    def fill(
        self, keys: Sequence[LocalKey], records: Sequence[bytes], prints: Sequence[int]
    ) -> None:
        """Stores records of one size that the night computed; room is made for some of them at a time."""
        entries, size_bytes = self._entries, len(records[0]) + OVERHEAD_BYTES if records else 0
        # A table grows for those who come at once: in a small tier that would push out more than they need.
        at_once = max(
            1, min(_FILLED_AT_ONCE, self.max_bytes // (_BOUND_TO_FILLED_RATIO * max(1, size_bytes)))
        )
        for start in range(0, len(keys), at_once):
            chunk = slice(start, start + at_once)
            for key, entry in zip(
                keys[chunk], map(Entry, records[chunk], prints[chunk]), strict=True
            ):
                if (previous_entry := entries.get(key)) is not None:
                    self._bytes -= size_of(previous_entry)
                    self._move_to_end(key)
                entries[key] = entry
                self._bytes += size_bytes
            self._make_room()

    def put(self, key: LocalKey | bytes, entry: Entry | ReadyAnswer) -> None:
        """Stores or replaces; an entry larger than the whole tier is left out and counted."""
        entries, size_bytes = self._entries, size_of(entry)
        if (previous_entry := entries.get(key)) is not None:
            self._bytes -= size_of(previous_entry)
            self._move_to_end(key)
        entries[key] = entry
        self._bytes += size_bytes
        if size_bytes > self.max_bytes:
            self._drop(key)
            self.too_large += 1
        self._make_room()

    def _make_room(self) -> None:
        entries, bytes_max, evicted_keys = self._entries, self.max_bytes, list[Hashable]()
        while self._bytes + getsizeof(entries) > bytes_max and entries:
            key, oldest = entries.popitem(last=False)
            if type(oldest) is Entry and oldest[2] is None:
                self._bytes -= len(oldest[0]) + OVERHEAD_BYTES
            else:
                self._bytes -= size_of(oldest)
            if type(key) is not bytes:  # of a ready answer the record may still be here
                evicted_keys.append(key)
        if evicted_keys:
            self.eviction_history.evicted.note_all(evicted_keys)
        if not entries:
            entries.clear()  # an emptied table keeps its memory

    def _drop(self, key: LocalKey | bytes) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._bytes -= size_of(entry)

    def discard(self, key: LocalKey) -> None:
        """Forgets the key if it is there."""
        self._drop(key)
        self.eviction_history.evicted.note(key)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of all entries and their table, never above `max_bytes`."""
        return self._bytes + getsizeof(self._entries) if self._entries else 0

    @property
    def place_bytes(self) -> int:
        """Bytes of the table per entry; 0 while there is none."""
        return getsizeof(self._entries) // len(self._entries) if self._entries else 0


class NegativeCache:
    """Keys that were looked up a moment ago and are nowhere; apart from L1, so a flood of them evicts nothing."""

    def __init__(
        self, max_entries: int, ttl_s: float, timer: Callable[[], float] = time.monotonic
    ) -> None:
        # cachetools takes no entry into a cache of none.
        self._keys: TTLCache[LocalKey, None] = TTLCache(max(0, max_entries), ttl_s, timer)

    def __contains__(self, key: LocalKey) -> bool:
        return key in self._keys

    def add(self, key: LocalKey) -> None:
        """Remembers the key for its time; the one not added for longest makes room."""
        if self._keys.maxsize >= 1:
            self._keys[key] = None

    def discard(self, key: LocalKey) -> None:
        """Forgets the key: a record for it exists now."""
        if key in self._keys:  # nearly always not, and then at a third of what `pop` or `del` cost
            self._keys.pop(key, None)

    def __len__(self) -> int:
        return len(self._keys)


class EvictionHistory:
    """Bounded memory of what L1 let go, by which it judges keys that L1 lacks; `holds` says what L1 holds.

    An end of life outweighs an eviction, both a flip.
    """

    def __init__(
        self,
        is_cached: Callable[[tuple[str, str, int | bytes]], bool] = lambda _key: False,
        timer: Callable[[], float] = time.monotonic,
        slots: int = EVICTED_SLOTS,
    ) -> None:
        self.evicted = LossyKeySet(slots)
        self.expired = LossyKeySet(min(slots, EXPIRED_SLOTS))
        self._is_in_l1 = is_cached
        self._timer = timer
        self._last_flip: tuple[str, float] | None = None

    def flipped(self, previous_generation: str) -> None:
        """Records a flip: another generation is live from now on; `previous_generation` is the one that was."""
        self._last_flip = previous_generation, self._timer() + FLIPPED_S

    def find_reason(self, generation: str, table: str, key: int | bytes) -> Absence:
        """The one reason why L1 lacked a key."""
        if self.expired.is_empty and self.evicted.is_empty and self._last_flip is None:
            return "cold_start"
        local_key = generation, table, key
        if local_key in self.expired:
            return "expired"
        if local_key in self.evicted:
            return "evicted"
        if (previous_generation := self._earlier(generation)) is not None:
            earlier = previous_generation, table, key
            if self._is_in_l1(earlier) or earlier in self.evicted:
                return "flipped"
        return "cold_start"

    def count(self, generation: str, table: str, keys: Sequence[int | bytes]) -> dict[Absence, int]:
        """Number of the keys that L1 lacked for each reason; each key has exactly one."""
        if self.expired.is_empty and self._earlier(generation) is None:
            if self.evicted.is_empty:
                return {"cold_start": len(keys)}
            evicted = self.evicted.count([(generation, table, key) for key in keys])
            return {"evicted": evicted, "cold_start": len(keys) - evicted}
        count_by_absence: dict[Absence, int] = {}
        for key in keys:
            absence = self.find_reason(generation, table, key)
            count_by_absence[absence] = count_by_absence.get(absence, 0) + 1
        return count_by_absence

    def is_over(self, generation: str, table: str, key: int | bytes) -> bool:
        """True if a record was here until its life was over."""
        return not self.expired.is_empty and (generation, table, key) in self.expired

    def _earlier(self, generation: str) -> str | None:
        previous_flip = self._last_flip
        if previous_flip is None:
            return None
        if self._timer() >= previous_flip[1]:
            self._last_flip = None
            return None
        return None if previous_flip[0] == generation else previous_flip[0]


class LossyKeySet:
    """Hashes of keys, one per slot: a later one takes the place of an earlier, so some are forgotten, none made up."""

    def __init__(self, slots: int = EVICTED_SLOTS) -> None:
        self.is_empty = True
        self._slots = array("q", bytes(8 * slots))
        self._view = np.frombuffer(self._slots, np.int64)
        self._mask = slots - 1

    def note(self, key: Hashable) -> None:
        """Records that this key is not held any more."""
        self.is_empty = False
        hash_ = hash(key)
        self._slots[hash_ & self._mask] = hash_

    def note_all(self, keys: Sequence[Hashable]) -> None:
        """Records that none of these keys is held any more, in this order."""
        if len(keys) < _VECTORISE_KEYS_MIN:
            for key in keys:
                self.note(key)
            return
        self.is_empty = False
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        self._view[hashes & self._mask] = hashes

    def __contains__(self, key: Hashable) -> bool:
        hash_ = hash(key)
        return self._slots[hash_ & self._mask] == hash_

    def count(self, keys: Sequence[Hashable]) -> int:
        """Number of these keys that are remembered as let go."""
        if len(keys) < _VECTORISE_KEYS_MIN:
            return sum(map(self.__contains__, keys))
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        return int(np.count_nonzero(self._view[hashes & self._mask] == hashes))
