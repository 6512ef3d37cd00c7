"""Quotas: requests per second, entities per second and requests in flight, counted in memory that workers share.

Rates use GCRA (ITU-T I.371): a token has a time until which its charges are paid for, and may send again after it.
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
"""Burst of an idle token, in seconds of its rate: in T seconds it may use at most rate x (T + burst)."""

_ROUNDING_TOLERANCE_S = 1e-9
"""Tolerance in seconds: without it rounding errors would refuse requests of a caller that sends exactly at its rate."""

_IN_FLIGHT_RETRY_S = 1.0
"""Seconds in `Retry-After` if too many requests are in flight, since their end is unknown."""

TABLE_ROWS = 512
"""Rows of the table: twice as many as a tokens file may have tokens. A removed token's row is reused once
`is_fresh`."""

_TABLE_HEADER = struct.Struct("<8sI")
_TABLE_MAGIC = b"larderq1"
_TABLE_HEADER_BYTES = 64
_ROW_KEY_BYTES = 16

_ROW_FIXED_BYTES = 32
"""Bytes of a row before its counts: the key and two times."""


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Limits of one token over all workers of a service; None: no limit."""

    requests_per_s: float | None = None
    entities_per_s: float | None = None
    in_flight: int | None = None

    def __bool__(self) -> bool:
        return (self.requests_per_s, self.entities_per_s, self.in_flight) != (None, None, None)


class Shortage(NamedTuple):
    """An exceeded quota: its kind, its limit, and the seconds to wait."""

    kind: QuotaKind
    limit: float
    wait_s: float


class QuotaState(NamedTuple):
    """Usage of one token: times (monotonic) until which its rates are paid for, and requests in flight."""

    requests_paid_until: float = 0.0
    entities_paid_until: float = 0.0
    in_flight: int = 0

    def is_fresh(self, now_s: float) -> bool:
        """True if the state equals that of an unused token."""
        return not self.in_flight and max(self.requests_paid_until, self.entities_paid_until) <= now_s


class Quota:
    """Quota of one token, counted in its table."""

    __slots__ = ("_row_key", "_table", "_timer", "limits")

    def __init__(
        self, quota_row_key: bytes, limits: QuotaLimits, quota_table: "QuotaTable", timer: Callable[[], float]
    ) -> None:
        self.limits = limits
        self._row_key, self._table, self._timer = quota_row_key, quota_table, timer

    def enter_request(self, entity_count: int) -> Shortage | None:
        """Charge one request and its known entities; the request is in flight until `close` or `give_back`."""
        return self._table.charge(self._row_key, self.limits, self._timer(), 1, entity_count)

    def charge_entities(self, entity_count: int) -> Shortage | None:
        """Charge entities of a request that has entered."""
        if self.limits.entities_per_s is None:
            return None
        return self._table.charge(self._row_key, self.limits, self._timer(), 0, entity_count)

    def close(self) -> None:
        """End a request in flight."""
        self._table.leave(self._row_key)

    def give_back(self, entity_count: int) -> None:
        """Undo `enter_request` for a request that is passed on to another route, where it enters again."""
        self._table.give_back(self._row_key, self.limits, 1, entity_count)


def quota_exceeded(shortage: Shortage) -> Problem:
    """Return the refusal (429) of a request that exceeds a quota."""
    return Problem(
        429, "quota_exceeded",
        f"this token has used up its quota {shortage.kind} ({shortage.limit:g}); try again after Retry-After",
        quota=shortage.kind, limit=shortage.limit, retry_after_seconds=math.ceil(shortage.wait_s * 1_000) / 1_000,
    )  # fmt: skip


def state_after_charge(
    quota_state: QuotaState, limits: QuotaLimits, now_s: float, request_count: int, entity_count: int
) -> QuotaState | Shortage:
    """Return the state after a charge, or the shortage; a charge is never applied in part.

    A charge larger than a burst is accepted once a full burst is available, and is paid off afterwards.
    """
    in_flight_max = limits.in_flight
    if in_flight_max is not None and request_count and quota_state.in_flight + request_count > in_flight_max:
        return Shortage("in_flight", in_flight_max, _IN_FLIGHT_RETRY_S)
    requests_paid_until = _charge_rate(quota_state.requests_paid_until, now_s, request_count, limits.requests_per_s)
    if isinstance(requests_paid_until, _RateWait):
        return Shortage("requests_per_s", limits.requests_per_s or 0.0, requests_paid_until.seconds)
    entities_paid_until = _charge_rate(quota_state.entities_paid_until, now_s, entity_count, limits.entities_per_s)
    if isinstance(entities_paid_until, _RateWait):
        return Shortage("entities_per_s", limits.entities_per_s or 0.0, entities_paid_until.seconds)
    return QuotaState(requests_paid_until, entities_paid_until, quota_state.in_flight + request_count)


class _RateWait(NamedTuple):
    seconds: float


def _charge_rate(paid_until_s: float, now_s: float, charge_count: int, rate_per_s: float | None) -> float | _RateWait:
    if not charge_count or rate_per_s is None:
        return paid_until_s
    charge_start_s, burst_limit_s = max(paid_until_s, now_s), burst_s(rate_per_s)
    cost_s = charge_count / rate_per_s
    excess_s = charge_start_s + min(cost_s, burst_limit_s) - (now_s + burst_limit_s)
    return _RateWait(excess_s) if excess_s > _ROUNDING_TOLERANCE_S else charge_start_s + cost_s


def burst_s(rate_per_s: float) -> float:
    """Return the burst of a rate in seconds, long enough for at least one request."""
    return max(BURST_S, 1.0 / rate_per_s)


def row_key(token_name: str) -> bytes:
    """Return the key of a token's row."""
    return hashlib.sha256(token_name.encode()).digest()[:_ROW_KEY_BYTES]


class QuotaTable:
    """Table of quotas in a mapped file, or in memory for a service of one process; for one thread of each process.

    Each worker counts its requests in flight in its own column. Its successor or its parent clears the column, so that
    requests of a killed worker do not count for ever. Locks are POSIX record locks, which end with their process.
    """

    def __init__(self, memory: mmap.mmap, worker_column: int, file_descriptor: int | None = None) -> None:
        magic, self._column_count = _TABLE_HEADER.unpack_from(memory)
        if magic != _TABLE_MAGIC or not 0 <= worker_column < self._column_count:
            raise ConfigError(f"the table of quotas has no column {worker_column}")
        self._file_descriptor, self._worker_column = file_descriptor, worker_column
        self._row_bytes = _row_bytes(self._column_count)
        self._memory = memory
        self._times_view = memoryview(memory).cast("d")
        self._counts_view = memoryview(memory).cast("I")
        self._row_by_key: dict[bytes, int] = {}

    @classmethod
    def create_private(cls) -> Self:
        """Create the table of a service of one process."""
        return cls(_with_header(mmap.mmap(-1, _table_bytes(1)), 1), 0)

    @classmethod
    def create(cls, path: Path, column_count: int) -> None:
        """Create an empty table for workers with slots below `column_count`."""
        with path.open("xb+") as file:
            file.truncate(_table_bytes(column_count))
            with mmap.mmap(file.fileno(), 0) as memory:
                _with_header(memory, column_count)

    @classmethod
    def open(cls, path: Path, worker_column: int) -> Self:
        """Open the workers' table and clear the column's counts, which may be those of a worker that was killed."""
        file_descriptor = os.open(
            path, os.O_RDWR | os.O_CLOEXEC
        )  # never closed: closing any descriptor of the file drops all locks
        table = cls(mmap.mmap(file_descriptor, 0), worker_column, file_descriptor)
        table.clear(worker_column)
        return table

    @classmethod
    def clear_column_in_file(cls, path: Path, worker_column: int) -> None:
        """Clear the counts of a worker that has ended, if the table exists."""
        with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
            cls(mmap.mmap(file.fileno(), 0), worker_column).clear(worker_column)

    def clear(self, worker_column: int) -> None:
        """Set all counts of a column to zero."""
        for row in range(TABLE_ROWS):
            self._counts_view[self._first_count_index(row) + worker_column] = 0

    def charge(
        self, key: bytes, limits: QuotaLimits, now_s: float, request_count: int, entity_count: int
    ) -> Shortage | None:
        """Charge a token, or return the shortage; requests stay in flight until they end."""
        row = self._lock_row(key, now_s)
        try:
            state_or_shortage = state_after_charge(self._read_state(row), limits, now_s, request_count, entity_count)
            if isinstance(state_or_shortage, Shortage):
                return state_or_shortage
            self._write_state(row, state_or_shortage)
            self._counts_view[self._first_count_index(row) + self._worker_column] += request_count
        finally:
            self._release_row_lock(row)
        return None

    def give_back(self, key: bytes, limits: QuotaLimits, request_count: int, entity_count: int) -> None:
        """Undo a charge, also of requests in flight."""
        row = self._lock_row(key, 0.0)
        try:
            quota_state = self._read_state(row)
            self._write_state(row, quota_state._replace(
                requests_paid_until=quota_state.requests_paid_until - request_count / (limits.requests_per_s or 1e300),
                entities_paid_until=quota_state.entities_paid_until - entity_count / (limits.entities_per_s or 1e300),
            ))  # fmt: skip
            self._counts_view[self._first_count_index(row) + self._worker_column] -= request_count
        finally:
            self._release_row_lock(row)

    def leave(self, key: bytes) -> None:
        """End one request in flight; its row cannot have been reassigned, because it has requests in flight."""
        self._counts_view[self._first_count_index(self._row_by_key[key]) + self._worker_column] -= 1

    def read_state(self, key: bytes, now_s: float) -> QuotaState:
        """Return the state of a token."""
        row = self._lock_row(key, now_s)
        try:
            return self._read_state(row)
        finally:
            self._release_row_lock(row)

    def _lock_row(self, key: bytes, now_s: float) -> int:
        """Lock and return the token's row; the caller releases it."""
        while True:
            if (row := self._row_by_key.get(key)) is None:
                row = self._row_by_key[key] = self._find_or_claim_row(key, now_s)
            self._acquire_row_lock(row)
            if self._read_key(row) == key:
                return row
            self._release_row_lock(row)  # meanwhile assigned to another token
            del self._row_by_key[key]

    def _find_or_claim_row(self, key: bytes, now_s: float) -> int:
        """Return the row of this key, else assign it an empty or fresh one; raise ConfigError if there is none."""
        self._acquire_row_lock(TABLE_ROWS)  # only one process at a time assigns rows
        try:
            first_row, candidate_rows = int.from_bytes(key[:4], "little"), list[int]()
            for probe_offset in range(TABLE_ROWS):
                row = (first_row + probe_offset) % TABLE_ROWS
                row_key = self._read_key(row)
                if row_key == key:
                    return row
                candidate_rows.append(row)
                if not any(row_key):  # probing ends at an empty row: no key lies beyond it
                    break
            for row in candidate_rows:
                if self._try_claim_row(row, key, now_s):
                    return row
        finally:
            self._release_row_lock(TABLE_ROWS)
        raise ConfigError(f"more than {TABLE_ROWS} tokens have quotas in use")

    def _try_claim_row(self, row: int, key: bytes, now_s: float) -> bool:
        """Assign the row to this key if its state is fresh; return whether it was assigned."""
        self._acquire_row_lock(row)
        try:
            if not self._read_state(row).is_fresh(now_s):
                return False
            row_offset = self._row_offset(row)
            self._memory[row_offset : row_offset + _ROW_FIXED_BYTES] = key.ljust(_ROW_FIXED_BYTES, b"\0")
            return True
        finally:
            self._release_row_lock(row)

    def _acquire_row_lock(self, row: int) -> None:
        if self._file_descriptor is not None:
            fcntl.lockf(self._file_descriptor, fcntl.LOCK_EX, 1, row)

    def _release_row_lock(self, row: int) -> None:
        if self._file_descriptor is not None:
            fcntl.lockf(self._file_descriptor, fcntl.LOCK_UN, 1, row)

    def _read_state(self, row: int) -> QuotaState:
        row_double_index, first_count_index = (self._row_offset(row) // 8, self._first_count_index(row))
        in_flight = sum(self._counts_view[first_count_index : first_count_index + self._column_count])
        return QuotaState(self._times_view[row_double_index + 2], self._times_view[row_double_index + 3], in_flight)

    def _write_state(self, row: int, quota_state: QuotaState) -> None:
        row_double_index = self._row_offset(row) // 8
        self._times_view[row_double_index + 2] = quota_state.requests_paid_until
        self._times_view[row_double_index + 3] = quota_state.entities_paid_until

    def _read_key(self, row: int) -> bytes:
        row_offset = self._row_offset(row)
        return self._memory[row_offset : row_offset + _ROW_KEY_BYTES]

    def _row_offset(self, row: int) -> int:
        return _TABLE_HEADER_BYTES + row * self._row_bytes

    def _first_count_index(self, row: int) -> int:
        return (self._row_offset(row) + _ROW_FIXED_BYTES) // 4


def _row_bytes(column_count: int) -> int:
    return -(-(_ROW_FIXED_BYTES + 4 * column_count) // 8) * 8


def _table_bytes(column_count: int) -> int:
    return _TABLE_HEADER_BYTES + TABLE_ROWS * _row_bytes(column_count)


def _with_header(memory: mmap.mmap, column_count: int) -> mmap.mmap:
    _TABLE_HEADER.pack_into(memory, 0, _TABLE_MAGIC, column_count)
    return memory
