"""Quotas: requests a second, entities a second, requests in flight, counted in memory that workers share.

Rates are GCRA (ITU-T I.371): a token's charges are paid off at a moment; it may go on if that moment is past.
"""

import contextlib
import fcntl
import hashlib
import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

from cache.errors import ConfigError
from serving.requests.errors import Problem

QuotaKind = Literal["requests_per_s", "entities_per_s", "in_flight"]

BURST_S = 1.0
"""Seconds of its rate that a rested token may use at once; over T seconds it gets rate x (T + this)."""

_SLACK_S = 1e-9
"""Tolerance in seconds for rounding, which must not refuse every other request of a caller exactly at its rate."""

_SLOT_WAIT_S = 1.0
"""Seconds in `Retry-After` for too many requests in flight, whose end is unknown."""

TABLE_ROWS = 512
"""Rows for tokens, twice as many as a file may hold. A removed token's row is reused once it is fresh."""

_TABLE_HEADER = struct.Struct("<8sI")
_TABLE_MAGIC = b"larderq1"
_TABLE_HEADER_BYTES = 64
_ROW_KEY_BYTES = 16

_ROW_FIXED_BYTES = 32
"""Bytes of a row before its counts: the key, and two times."""


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Limits of one token over all workers of a service; None: no limit."""

    requests_per_s: float | None = None
    entities_per_s: float | None = None
    in_flight: int | None = None

    def __bool__(self) -> bool:
        return (self.requests_per_s, self.entities_per_s, self.in_flight) != (None, None, None)


class Shortage(NamedTuple):
    """Exceeded quota: its kind, its limit, and the seconds to wait."""

    kind: QuotaKind
    limit: float
    wait_s: float


class QuotaState(NamedTuple):
    """Usage of one token: times (monotonic) until which its rates are paid for, and requests in flight."""

    requests_until: float = 0.0
    entities_until: float = 0.0
    in_flight: int = 0

    def is_fresh(self, now_s: float) -> bool:
        """True if the state equals that of an unused token."""
        return not self.in_flight and max(self.requests_until, self.entities_until) <= now_s


class Quota:
    """Quota of one token, counted in `rows`."""

    __slots__ = ("_key", "_rows", "_timer", "limits")

    def __init__(
        self, key: bytes, limits: QuotaLimits, rows: "QuotaTable", timer: Callable[[], float]
    ) -> None:
        self.limits = limits
        self._key, self._rows, self._timer = key, rows, timer

    def enter(self, entities: int) -> Shortage | None:
        """Charge one request and its known entities; it is in flight until `close` or `give_back`."""
        return self._rows.charge(self._key, self.limits, self._timer(), 1, entities)

    def spend(self, entities: int) -> Shortage | None:
        """Charge entities of a request that has entered."""
        if self.limits.entities_per_s is None:
            return None
        return self._rows.charge(self._key, self.limits, self._timer(), 0, entities)

    def close(self) -> None:
        """End a request in flight."""
        self._rows.leave(self._key)

    def give_back(self, entities: int) -> None:
        """Undo `enter` of a request that is passed on to another route, where it enters again."""
        self._rows.give_back(self._key, self.limits, 1, entities)


def quota_exceeded(short: Shortage) -> Problem:
    """Return the refusal (429) of a request that exceeds a quota."""
    return Problem(
        429, "quota_exceeded",
        f"the quota {short.kind} of this token ({short.limit:g}) has no room; come again after Retry-After",
        quota=short.kind, limit=short.limit, retry_after_seconds=math.ceil(short.wait_s * 1_000) / 1_000,
    )  # fmt: skip


def after_taking(
    standing: QuotaState, limits: QuotaLimits, now_s: float, requests: int, entities: int
) -> QuotaState | Shortage:
    """Return the state after a charge, or the shortage; all of it is charged or nothing.

    A charge larger than a burst is accepted once a full burst is available, and is paid off afterwards.
    """
    in_flight_max = limits.in_flight
    if in_flight_max is not None and requests and standing.in_flight + requests > in_flight_max:
        return Shortage("in_flight", in_flight_max, _SLOT_WAIT_S)
    for_requests = _pay_rate(standing.requests_until, now_s, requests, limits.requests_per_s)
    if isinstance(for_requests, _Wait):
        return Shortage("requests_per_s", limits.requests_per_s or 0.0, for_requests.seconds)
    for_entities = _pay_rate(standing.entities_until, now_s, entities, limits.entities_per_s)
    if isinstance(for_entities, _Wait):
        return Shortage("entities_per_s", limits.entities_per_s or 0.0, for_entities.seconds)
    return QuotaState(for_requests, for_entities, standing.in_flight + requests)


class _Wait(NamedTuple):
    seconds: float


def _pay_rate(paid_until_s: float, now_s: float, amount: int, per_s: float | None) -> float | _Wait:
    if not amount or per_s is None:
        return paid_until_s
    begin, burst_limit_s = max(paid_until_s, now_s), burst_s(per_s)
    cost = amount / per_s
    late_s = begin + min(cost, burst_limit_s) - (now_s + burst_limit_s)
    return _Wait(late_s) if late_s > _SLACK_S else begin + cost


def burst_s(per_s: float) -> float:
    """Return the seconds of a rate that may be used at once: a rate below one a second has room for one."""
    return max(BURST_S, 1.0 / per_s)


def row_key(name: str) -> bytes:
    """Return the key of a token's row."""
    return hashlib.sha256(name.encode()).digest()[:_ROW_KEY_BYTES]


class QuotaTable:
    """Rows in a mapped file, or in memory if this process is the whole service; for one thread of each process.

    Each worker counts its requests in flight in a column of its own, which its successor, or its parent, clears: the
    requests of a killed worker end. Locks are POSIX record locks: a process that dies leaves none.
    """

    def __init__(self, memory: mmap.mmap, column: int, file: int | None = None) -> None:
        magic, self._columns = _TABLE_HEADER.unpack_from(memory)
        if magic != _TABLE_MAGIC or not 0 <= column < self._columns:
            raise ConfigError(f"the table of quotas has no column {column}")
        self._file, self._column = file, column
        self._row_bytes = _row_bytes(self._columns)
        self._memory = memory
        self._moments = memoryview(memory).cast("d")
        self._counts = memoryview(memory).cast("I")
        self._row_by_key: dict[bytes, int] = {}

    @classmethod
    def private(cls) -> Self:
        """Create the table of a service of one process."""
        return cls(_with_header(mmap.mmap(-1, _table_bytes(1)), 1), 0)

    @classmethod
    def create(cls, path: Path, columns: int) -> None:
        """Create an empty table for workers with slots below `columns`."""
        with path.open("xb+") as file:
            file.truncate(_table_bytes(columns))
            with mmap.mmap(file.fileno(), 0) as memory:
                _with_header(memory, columns)

    @classmethod
    def open(cls, path: Path, column: int) -> Self:
        """Open the workers' table and clear the column's counts, which a former worker may have left."""
        file = os.open(
            path, os.O_RDWR | os.O_CLOEXEC
        )  # open for life: closing any descriptor of it drops all locks
        table = cls(mmap.mmap(file, 0), column, file)
        table.clear(column)
        return table

    @classmethod
    def clear_in(cls, path: Path, column: int) -> None:
        """Clear the counts of a worker that has ended, if the table exists."""
        with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
            cls(mmap.mmap(file.fileno(), 0), column).clear(column)

    def clear(self, column: int) -> None:
        """Set all counts of a column to zero."""
        for row in range(TABLE_ROWS):
            self._counts[self._count_at(row) + column] = 0

    def charge(
        self, key: bytes, limits: QuotaLimits, now_s: float, requests: int, entities: int
    ) -> Shortage | None:
        """Charge a token, or return the shortage; requests stay in flight until they end."""
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
        """Undo a charge; its requests are no longer in flight."""
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
        """End one request in flight; its row cannot have been reassigned, because it has requests in flight."""
        self._counts[self._count_at(self._row_by_key[key]) + self._column] -= 1

    def read_state(self, key: bytes, now_s: float) -> QuotaState:
        """Return the state of a token."""
        row = self._lock(key, now_s)
        try:
            return self._read_state(row)
        finally:
            self._release(row)

    def _lock(self, key: bytes, now_s: float) -> int:
        """Lock and return the token's row; the caller releases it."""
        while True:
            if (row := self._row_by_key.get(key)) is None:
                row = self._row_by_key[key] = self._find_or_claim_row(key, now_s)
            self._acquire(row)
            if self._key(row) == key:
                return row
            self._release(row)  # another token has it since
            del self._row_by_key[key]

    def _find_or_claim_row(self, key: bytes, now_s: float) -> int:
        """Return the row of this key, else assign it an empty or fresh one; raise ConfigError if there is none."""
        self._acquire(TABLE_ROWS)  # finding a place is for one at a time
        try:
            begin, free = int.from_bytes(key[:4], "little"), list[int]()
            for step in range(TABLE_ROWS):
                row = (begin + step) % TABLE_ROWS
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
            self._release(TABLE_ROWS)
        raise ConfigError(f"more than {TABLE_ROWS} tokens have quotas in use")

    def _is_given(self, row: int, key: bytes, now_s: float) -> bool:
        """Assign the row to this key if its state is fresh; return whether it was."""
        self._acquire(row)
        try:
            if not self._read_state(row).is_fresh(now_s):
                return False
            at = self._at(row)
            self._memory[at : at + _ROW_FIXED_BYTES] = key.ljust(_ROW_FIXED_BYTES, b"\0")
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
        return self._memory[at : at + _ROW_KEY_BYTES]

    def _at(self, row: int) -> int:
        return _TABLE_HEADER_BYTES + row * self._row_bytes

    def _count_at(self, row: int) -> int:
        return (self._at(row) + _ROW_FIXED_BYTES) // 4


def _row_bytes(columns: int) -> int:
    return -(-(_ROW_FIXED_BYTES + 4 * columns) // 8) * 8


def _table_bytes(columns: int) -> int:
    return _TABLE_HEADER_BYTES + TABLE_ROWS * _row_bytes(columns)


def _with_header(memory: mmap.mmap, columns: int) -> mmap.mmap:
    _TABLE_HEADER.pack_into(memory, 0, _TABLE_MAGIC, columns)
    return memory
