"""L1: records of this process, bounded by bytes."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cachetools import LRUCache

OVERHEAD_BYTES = 540
"""Memory per entry besides the record: key, entry and the LRU's three dictionaries; measured 405 to 555, most just
after the dictionaries have grown."""

READY_BYTES = 620
"""The same for a ready answer, whose key is the request's own bytes."""


class LocalKey(NamedTuple):
    """What a record is called here; the generation is part of it, so nothing is ever invalidated."""

    generation: str
    table: str
    key: int | bytes


class Entry(NamedTuple):
    """One record; `digest` and `expires_at` (monotonic seconds) are None for what the night computed."""

    record: bytes
    fingerprint: int
    digest: bytes | None = None
    expires_at: float | None = None


class Ready(NamedTuple):
    """An answer as it is sent, but for its age, which goes between `head` and `tail`.

    `stamp` is that of what it was made from: under any other it counts for nothing. `asked`: table and id.
    """

    stamp: int
    head: bytes
    tail: bytes
    data_until: int
    asked: tuple[str, bytes]
    request: bytes


def _size_bytes(entry: Entry | Ready | None) -> int:
    if type(entry) is Entry:
        return len(entry.record) + OVERHEAD_BYTES
    if not isinstance(entry, Ready):
        return 0
    return len(entry.head) + len(entry.tail) + len(entry.request) + READY_BYTES


class _Entries(LRUCache[LocalKey | bytes, Entry | Ready | None]):
    """An absent key is None and no exception: a miss is as common as a hit, and raising costs more than looking."""

    def __missing__(self, key: LocalKey | bytes) -> None:
        return None


class LocalTier:
    """Least recently used records go first; an entry past its life is never returned."""

    def __init__(self, max_bytes: int, timer: Callable[[], float] = time.monotonic) -> None:
        self.too_large = 0
        self._timer = timer
        self._max_bytes = max_bytes
        self._entries = _Entries(max_bytes, _size_bytes)

    def get(self, key: LocalKey) -> Entry | None:
        """The entry, unless it is absent or its life is over."""
        entry: Entry | None = self._entries[key]  # type: ignore[assignment]  # a LocalKey names a record
        if entry is None or entry[3] is None or entry[3] > self._timer():
            return entry
        del self._entries[key]
        return None

    def get_many(self, keys: Sequence[LocalKey]) -> list[Entry | None]:
        """`get` of each."""
        return [self.get(key) for key in keys] if len(self._entries) else [None] * len(keys)

    def takes(self, size_bytes: int) -> bool:
        """Whether a record of this size fits at all; one that does not is counted when it comes."""
        return size_bytes + OVERHEAD_BYTES <= self._max_bytes

    def ready(self, request: bytes) -> Ready | None:
        """What was kept for exactly this request; whether it still counts is for its stamp to say."""
        return self._entries[request]  # type: ignore[return-value]  # bytes name a ready answer

    def keep(self, ready: Ready) -> None:
        """Keeps an answer beside its record, within the same bound."""
        self._put(ready.request, ready)

    def put(self, key: LocalKey, entry: Entry) -> None:
        """Stores or replaces; an entry larger than the whole tier is left out and counted."""
        self._put(key, entry)

    def _put(self, key: LocalKey | bytes, entry: Entry | Ready) -> None:
        if _size_bytes(entry) <= self._max_bytes:
            self._entries[key] = entry
        else:
            self._entries.pop(key, None)
            self.too_large += 1

    def discard(self, key: LocalKey) -> None:
        """Forgets the key if it is there."""
        self._entries.pop(key, None)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Records and overhead of all entries, never above `max_bytes`."""
        return int(self._entries.currsize)

    @property
    def max_bytes(self) -> int:
        """The bound."""
        return int(self._entries.maxsize)


class NegativeCache:
    """Keys that were looked up a moment ago and are nowhere; apart from L1, so a flood of them evicts nothing."""

    def __init__(
        self, max_entries: int, ttl_s: float, timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._timer = timer
        # One life for all: insertion order is expiry order.
        self._expires_at: dict[LocalKey, float] = {}

    def __contains__(self, key: LocalKey) -> bool:
        expires_at = self._expires_at.get(key)
        if expires_at is None:
            return False
        if expires_at <= self._timer():
            del self._expires_at[key]
            return False
        return True

    def add(self, key: LocalKey) -> None:
        """Remembers the key for `ttl_s`; the oldest makes room."""
        if self._max_entries < 1:
            return
        self._expires_at.pop(key, None)
        while len(self._expires_at) >= self._max_entries:
            del self._expires_at[next(iter(self._expires_at))]
        self._expires_at[key] = self._timer() + self._ttl_s

    def discard(self, key: LocalKey) -> None:
        """Forgets the key: a record for it exists now."""
        self._expires_at.pop(key, None)

    def __len__(self) -> int:
        return len(self._expires_at)
