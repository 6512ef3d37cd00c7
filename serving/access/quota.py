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
`is_unused`."""

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
    requests_in_flight_max: int | None = None

    def __bool__(self) -> bool:
        return (self.requests_per_s, self.entities_per_s, self.requests_in_flight_max) != (None, None, None)


class Shortage(NamedTuple):
    """An exceeded quota: its kind, its limit, and the seconds to wait."""

    kind: QuotaKind
    exceeded_limit: float
    retry_after_s: float


class QuotaState(NamedTuple):
    """Usage of one token: times (monotonic) until which its rates are paid for, and requests in flight."""

    requests_paid_until: float = 0.0
    entities_paid_until: float = 0.0
    requests_in_flight: int = 0

    def is_unused(self, now_s: float) -> bool:
        """True if the state equals that of an unused token."""
        return not self.requests_in_flight and max(self.requests_paid_until, self.entities_paid_until) <= now_s


class Quota:
    """Quota of one token, counted in its table."""

    __slots__ = ("_monotonic_clock", "_row_key", "_table", "limits")

    def __init__(
        self, quota_row_key: bytes, limits: QuotaLimits, quota_table: "QuotaTable", monotonic_clock: Callable[[], float]
    ) -> None:
        self.limits = limits
        self._row_key, self._table, self._monotonic_clock = quota_row_key, quota_table, monotonic_clock

    def enter_request(self, entity_count: int) -> Shortage | None:
        """Charge one request and its known entities; the request is in flight until `close` or `give_back`."""
        return self._table.charge(self._row_key, self.limits, self._monotonic_clock(), 1, entity_count)

    def charge_entities(self, entity_count: int) -> Shortage | None:
        """Charge entities of a request that has entered."""
        if self.limits.entities_per_s is None:
            return None
        return self._table.charge(self._row_key, self.limits, self._monotonic_clock(), 0, entity_count)

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
        f"this token has used up its quota {shortage.kind} ({shortage.exceeded_limit:g}); try again after Retry-After",
        quota=shortage.kind, limit=shortage.exceeded_limit,
        retry_after_seconds=math.ceil(shortage.retry_after_s * 1_000) / 1_000,
    )  # fmt: skip


def state_after_charge(
    quota_state: QuotaState, limits: QuotaLimits, now_s: float, request_count: int, entity_count: int
) -> QuotaState | Shortage:
    """Return the state after a charge, or the shortage; a charge is never applied in part.

    A charge larger than a burst is accepted once a full burst is available, and is paid off afterwards.
    """
    in_flight_max = limits.requests_in_flight_max
    if in_flight_max is not None and request_count and quota_state.requests_in_flight + request_count > in_flight_max:
        return Shortage("in_flight", in_flight_max, _IN_FLIGHT_RETRY_S)
    requests_paid_until = _charge_rate(quota_state.requests_paid_until, now_s, request_count, limits.requests_per_s)
    if isinstance(requests_paid_until, _RateWait):
        return Shortage("requests_per_s", limits.requests_per_s or 0.0, requests_paid_until.wait_s)
    entities_paid_until = _charge_rate(quota_state.entities_paid_until, now_s, entity_count, limits.entities_per_s)
    if isinstance(entities_paid_until, _RateWait):
        return Shortage("entities_per_s", limits.entities_per_s or 0.0, entities_paid_until.wait_s)
    return QuotaState(requests_paid_until, entities_paid_until, quota_state.requests_in_flight + request_count)


class _RateWait(NamedTuple):
    wait_s: float


def _charge_rate(paid_until_s: float, now_s: float, charged_count: int, rate_per_s: float | None) -> float | _RateWait:
    if not charged_count or rate_per_s is None:
        return paid_until_s
    charge_start_s, burst_limit_s = max(paid_until_s, now_s), burst_s(rate_per_s)
    cost_s = charged_count / rate_per_s
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

    def __init__(self, table_memory: mmap.mmap, worker_column: int, file_descriptor: int | None = None) -> None:
        magic, self._column_count = _TABLE_HEADER.unpack_from(table_memory)
        if magic != _TABLE_MAGIC or not 0 <= worker_column < self._column_count:
            raise ConfigError(f"the table of quotas has no column {worker_column}")
        self._file_descriptor, self._worker_column = file_descriptor, worker_column
        self._row_bytes = _row_bytes(self._column_count)
        self._memory = table_memory
        self._times_view = memoryview(table_memory).cast("d")
        self._counts_view = memoryview(table_memory).cast("I")
        self._row_index_by_key: dict[bytes, int] = {}

    @classmethod
    def create_private(cls) -> Self:
        """Create the table of a service of one process."""
        return cls(_with_header(mmap.mmap(-1, _table_bytes(1)), 1), 0)

    @classmethod
    def create(cls, table_path: Path, column_count: int) -> None:
        """Create an empty table for workers with slots below `column_count`."""
        with table_path.open("xb+") as file:
            file.truncate(_table_bytes(column_count))
            with mmap.mmap(file.fileno(), 0) as memory:
                _with_header(memory, column_count)

    @classmethod
    def open(cls, table_path: Path, worker_column: int) -> Self:
        """Open the workers' table and clear the column's counts, which may be those of a worker that was killed."""
        file_descriptor = os.open(
            table_path, os.O_RDWR | os.O_CLOEXEC
        )  # never closed: closing any descriptor of the file drops all locks
        table = cls(mmap.mmap(file_descriptor, 0), worker_column, file_descriptor)
        table.clear(worker_column)
        return table

    @classmethod
    def clear_column_in_file(cls, table_path: Path, worker_column: int) -> None:
        """Clear the counts of a worker that has ended, if the table exists."""
        with contextlib.suppress(FileNotFoundError), table_path.open("rb+") as file:
            cls(mmap.mmap(file.fileno(), 0), worker_column).clear(worker_column)

    def clear(self, worker_column: int) -> None:
        """Set all counts of a column to zero."""
        for row_index in range(TABLE_ROWS):
            self._counts_view[self._first_count_index(row_index) + worker_column] = 0

    def charge(
        self, quota_row_key: bytes, limits: QuotaLimits, now_s: float, request_count: int, entity_count: int
    ) -> Shortage | None:
        """Charge a token, or return the shortage; requests stay in flight until they end."""
        row_index = self._lock_row(quota_row_key, now_s)
        try:
            state_or_shortage = state_after_charge(
                self._read_state(row_index), limits, now_s, request_count, entity_count
            )
            if isinstance(state_or_shortage, Shortage):
                return state_or_shortage
            self._write_state(row_index, state_or_shortage)
            self._counts_view[self._first_count_index(row_index) + self._worker_column] += request_count
        finally:
            self._release_row_lock(row_index)
        return None

    def give_back(self, quota_row_key: bytes, limits: QuotaLimits, request_count: int, entity_count: int) -> None:
        """Undo a charge, also of requests in flight."""
        row_index = self._lock_row(quota_row_key, 0.0)
        try:
            quota_state = self._read_state(row_index)
            self._write_state(row_index, quota_state._replace(
                requests_paid_until=quota_state.requests_paid_until - request_count / (limits.requests_per_s or 1e300),
                entities_paid_until=quota_state.entities_paid_until - entity_count / (limits.entities_per_s or 1e300),
            ))  # fmt: skip
            self._counts_view[self._first_count_index(row_index) + self._worker_column] -= request_count
        finally:
            self._release_row_lock(row_index)

    def leave(self, quota_row_key: bytes) -> None:
        """End one request in flight; its row cannot have been reassigned, because it has requests in flight."""
        self._counts_view[self._first_count_index(self._row_index_by_key[quota_row_key]) + self._worker_column] -= 1

    def read_state(self, quota_row_key: bytes, now_s: float) -> QuotaState:
        """Return the state of a token."""
        row_index = self._lock_row(quota_row_key, now_s)
        try:
            return self._read_state(row_index)
        finally:
            self._release_row_lock(row_index)

    def _lock_row(self, quota_row_key: bytes, now_s: float) -> int:
        """Lock and return the token's row; the caller releases it."""
        while True:
            if (row_index := self._row_index_by_key.get(quota_row_key)) is None:
                row_index = self._row_index_by_key[quota_row_key] = self._find_or_claim_row(quota_row_key, now_s)
            self._acquire_row_lock(row_index)
            if self._read_key(row_index) == quota_row_key:
                return row_index
            self._release_row_lock(row_index)  # meanwhile assigned to another token
            del self._row_index_by_key[quota_row_key]

    def _find_or_claim_row(self, quota_row_key: bytes, now_s: float) -> int:
        """Return the row of this key, else assign it an empty or fresh one; raise ConfigError if there is none."""
        self._acquire_row_lock(TABLE_ROWS)  # only one process at a time assigns rows
        try:
            first_row, candidate_rows = int.from_bytes(quota_row_key[:4], "little"), list[int]()
            for probe_offset in range(TABLE_ROWS):
                row_index = (first_row + probe_offset) % TABLE_ROWS
                row_key = self._read_key(row_index)
                if row_key == quota_row_key:
                    return row_index
                candidate_rows.append(row_index)
                if not any(row_key):  # probing ends at an empty row: no key lies beyond it
                    break
            for row_index in candidate_rows:
                if self._try_claim_row(row_index, quota_row_key, now_s):
                    return row_index
        finally:
            self._release_row_lock(TABLE_ROWS)
        raise ConfigError(f"more than {TABLE_ROWS} tokens have quotas in use")

    def _try_claim_row(self, row_index: int, quota_row_key: bytes, now_s: float) -> bool:
        """Assign the row to this key if its state is fresh; return whether it was assigned."""
        self._acquire_row_lock(row_index)
        try:
            if not self._read_state(row_index).is_unused(now_s):
                return False
            row_offset = self._row_offset(row_index)
            self._memory[row_offset : row_offset + _ROW_FIXED_BYTES] = quota_row_key.ljust(_ROW_FIXED_BYTES, b"\0")
            return True
        finally:
            self._release_row_lock(row_index)

    def _acquire_row_lock(self, row_index: int) -> None:
        if self._file_descriptor is not None:
            fcntl.lockf(self._file_descriptor, fcntl.LOCK_EX, 1, row_index)

    def _release_row_lock(self, row_index: int) -> None:
        if self._file_descriptor is not None:
            fcntl.lockf(self._file_descriptor, fcntl.LOCK_UN, 1, row_index)

    def _read_state(self, row_index: int) -> QuotaState:
        row_double_index, first_count_index = (self._row_offset(row_index) // 8, self._first_count_index(row_index))
        in_flight = sum(self._counts_view[first_count_index : first_count_index + self._column_count])
        return QuotaState(self._times_view[row_double_index + 2], self._times_view[row_double_index + 3], in_flight)

    def _write_state(self, row_index: int, quota_state: QuotaState) -> None:
        row_double_index = self._row_offset(row_index) // 8
        self._times_view[row_double_index + 2] = quota_state.requests_paid_until
        self._times_view[row_double_index + 3] = quota_state.entities_paid_until

    def _read_key(self, row_index: int) -> bytes:
        row_offset = self._row_offset(row_index)
        return self._memory[row_offset : row_offset + _ROW_KEY_BYTES]

    def _row_offset(self, row_index: int) -> int:
        return _TABLE_HEADER_BYTES + row_index * self._row_bytes

    def _first_count_index(self, row_index: int) -> int:
        return (self._row_offset(row_index) + _ROW_FIXED_BYTES) // 4


def _row_bytes(column_count: int) -> int:
    return -(-(_ROW_FIXED_BYTES + 4 * column_count) // 8) * 8


def _table_bytes(column_count: int) -> int:
    return _TABLE_HEADER_BYTES + TABLE_ROWS * _row_bytes(column_count)


def _with_header(table_memory: mmap.mmap, column_count: int) -> mmap.mmap:
    _TABLE_HEADER.pack_into(table_memory, 0, _TABLE_MAGIC, column_count)
    return table_memory
