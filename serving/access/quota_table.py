"""Standings of all quotas, in memory that the workers of a service share; a lock for each, so that limits are exact."""

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
from pathlib import Path
from typing import Self

from cache.errors import ConfigError
from serving.access.quota import QuotaLimits, QuotaState, Shortage, after_taking

ROWS = 512
"""Places for tokens, twice as many as a file may hold. One whose token is gone is used again once it is fresh."""

_HEADER = struct.Struct("<8sI")
_MAGIC = b"larderq1"
_HEADER_BYTES = 64
_KEY_BYTES = 16
_FIXED_BYTES = 32
"""Bytes of a row before its counts: the key, and two moments."""


def key_of(name: str) -> bytes:
    """Key of a token's row."""
    return hashlib.sha256(name.encode()).digest()[:_KEY_BYTES]


class QuotaTable:
    """Rows in a mapped file, or in memory where this process is the whole service; for one thread of each process.

    Each worker counts its requests in flight in a column of its own, which its successor, or its parent, clears: what
    a killed worker held comes back. Locks are POSIX record locks: a process that dies leaves none.
    """

    def __init__(self, memory: mmap.mmap, column: int, file: int | None = None) -> None:
        magic, self._columns = _HEADER.unpack_from(memory)
        if magic != _MAGIC or not 0 <= column < self._columns:
            raise ConfigError(f"the table of quotas has no column {column}")
        self._file, self._column = file, column
        self._row_bytes = _row_bytes(self._columns)
        self._memory = memory
        self._moments = memoryview(memory).cast("d")
        self._counts = memoryview(memory).cast("I")
        self._row_by_key: dict[bytes, int] = {}

    @classmethod
    def private(cls) -> Self:
        """Table of a service of one process."""
        return cls(_sized(mmap.mmap(-1, _size(1)), 1), 0)

    @classmethod
    def create(cls, path: Path, columns: int) -> None:
        """Creates an empty table for workers with slots below `columns`."""
        with path.open("xb+") as file:
            file.truncate(_size(columns))
            with mmap.mmap(file.fileno(), 0) as memory:
                _sized(memory, columns)

    @classmethod
    def open(cls, path: Path, column: int) -> Self:
        """Opens the workers' table; the column's counts, of whoever had it before, begin anew."""
        file = os.open(
            path, os.O_RDWR | os.O_CLOEXEC
        )  # open for life: closing any descriptor of it drops all locks
        table = cls(mmap.mmap(file, 0), column, file)
        table.clear(column)
        return table

    @classmethod
    def clear_in(cls, path: Path, column: int) -> None:
        """Ends whatever a worker that is gone had in flight."""
        with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
            cls(mmap.mmap(file.fileno(), 0), column).clear(column)

    def clear(self, column: int) -> None:
        """Sets the counts of a column to none."""
        for row in range(ROWS):
            self._counts[self._count_at(row) + column] = 0

    def charge(
        self, key: bytes, limits: QuotaLimits, now_s: float, requests: int, entities: int
    ) -> Shortage | None:
        """Takes from a token's standing, or tells why not; requests stay in flight until they end."""
        row = self._lock(key, now_s)
        try:
            standing_or_shortage = after_taking(
                self._read_state(row), limits, now_s, requests, entities
            )
            if isinstance(standing_or_shortage, Shortage):
                return standing_or_shortage
            self._pay(row, standing_or_shortage)
            self._counts[self._count_at(row) + self._column] += requests
        finally:
            self._release(row)
        return None

    def give_back(self, key: bytes, limits: QuotaLimits, requests: int, entities: int) -> None:
        """Takes back what was taken in vain; the requests are no longer in flight."""
        row = self._lock(key, 0.0)
        try:
            standing = self._read_state(row)
            self._pay(row, standing._replace(
                requests_until=standing.requests_until - requests / (limits.requests_per_s or 1e300),
                entities_until=standing.entities_until - entities / (limits.entities_per_s or 1e300),
            ))  # fmt: skip
            self._counts[self._count_at(row) + self._column] -= requests
        finally:
            self._release(row)

    def leave(self, key: bytes) -> None:
        """Ends one request in flight: its row stays its own, for none with requests in flight is given away."""
        self._counts[self._count_at(self._row_by_key[key]) + self._column] -= 1

    def read_state(self, key: bytes, now_s: float) -> QuotaState:
        """Standing of a token."""
        row = self._lock(key, now_s)
        try:
            return self._read_state(row)
        finally:
            self._release(row)

    def _lock(self, key: bytes, now_s: float) -> int:
        """The token's row, which is locked and to be released."""
        while True:
            if (row := self._row_by_key.get(key)) is None:
                row = self._row_by_key[key] = self._find_or_claim_row(key, now_s)
            self._acquire(row)
            if self._key(row) == key:
                return row
            self._release(row)  # another token has it since
            del self._row_by_key[key]

    def _find_or_claim_row(self, key: bytes, now_s: float) -> int:
        """The row of this key, else an empty one or one nobody would miss, which it gets."""
        self._acquire(ROWS)  # finding a place is for one at a time
        try:
            begin, free = int.from_bytes(key[:4], "little"), list[int]()
            for step in range(ROWS):
                row = (begin + step) % ROWS
                row_key = self._key(row)
                if row_key == key:
                    return row
                free.append(row)
                if not any(row_key):  # no key was ever put behind an empty row
                    break
            for row in free:
                if self._is_given(row, key, now_s):
                    return row
        finally:
            self._release(ROWS)
        raise ConfigError(f"more than {ROWS} tokens have quotas in use")

    def _is_given(self, row: int, key: bytes, now_s: float) -> bool:
        """Gives a row to this key; False if it is another's who would miss it."""
        self._acquire(row)
        try:
            if not self._read_state(row).is_fresh(now_s):
                return False
            at = self._at(row)
            self._memory[at : at + _FIXED_BYTES] = key.ljust(_FIXED_BYTES, b"\0")
            return True
        finally:
            self._release(row)

    def _acquire(self, row: int) -> None:
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, row)

    def _release(self, row: int) -> None:
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, row)

    def _read_state(self, row: int) -> QuotaState:
        at, first = self._at(row) // 8, self._count_at(row)
        in_flight = sum(self._counts[first : first + self._columns])
        return QuotaState(self._moments[at + 2], self._moments[at + 3], in_flight)

    def _pay(self, row: int, standing: QuotaState) -> None:
        at = self._at(row) // 8
        self._moments[at + 2] = standing.requests_until
        self._moments[at + 3] = standing.entities_until

    def _key(self, row: int) -> bytes:
        at = self._at(row)
        return self._memory[at : at + _KEY_BYTES]

    def _at(self, row: int) -> int:
        return _HEADER_BYTES + row * self._row_bytes

    def _count_at(self, row: int) -> int:
        return (self._at(row) + _FIXED_BYTES) // 4


def _row_bytes(columns: int) -> int:
    return -(-(_FIXED_BYTES + 4 * columns) // 8) * 8


def _size(columns: int) -> int:
    return _HEADER_BYTES + ROWS * _row_bytes(columns)


def _sized(memory: mmap.mmap, columns: int) -> mmap.mmap:
    _HEADER.pack_into(memory, 0, _MAGIC, columns)
    return memory
