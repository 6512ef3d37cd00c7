"""Batch reads of many records of one table: one look at L1, one flight, one run of replies."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache.errors import TierUnavailable
from cache.format.records.layout import RECORD_FORMAT, are_answers_of, peek_fingerprint
from cache.l2.commands import L2Result
from cache.l2.data_plane import DataPlane
from cache.l2.replies import Frames
from cache.native import loader
from cache.tiers.addressing import FlightKey, FlightKeys, page_reads
from cache.tiers.batches import RecordKeys, Rows
from cache.tiers.l1 import Entry, LocalTier
from cache.tiers.results import (
    MISS_BY_REASON,
    Counters,
    Miss,
    MissReason,
    ReadResult,
    View,
    unavailable,
    unsound,
)
from cache.tiers.singleflight import SingleFlight

T = TypeVar("T")


class FlightRecords(Sequence[Entry | Miss]):
    """Records that a flight of many keys brought: as rows for who asked for them, one by one for who joined.

    `rows[i]` means nothing where `missed` has `i`.
    """

    def __init__(self, rows: NDArray[Any], missed: dict[int, Miss]) -> None:
        self.rows = rows
        self.missed = missed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Entry | Miss:  # type: ignore[override]
        if (missed := self.missed.get(index)) is not None:
            return missed
        record = self.rows[index].tobytes()
        return Entry(record, peek_fingerprint(record))


class RowReader:
    """Reads `RecordKeys` through both tiers; its flights are those of single reads too."""

    def __init__(
        self,
        local: LocalTier,
        flights: SingleFlight[FlightKey, Entry | Miss],
        flight_keys: FlightKeys,
        remote: DataPlane,
        counters: Counters,
    ) -> None:
        self._local = local
        self._flights = flights
        self._flight_keys = flight_keys
        self._remote = remote
        self._counters = counters

    async def read(self, view: View, record_keys: RecordKeys, left_s: float | None) -> Rows:
        """Rows, one per want, or why there is none; `left_s` None: the deadline of L2 itself is the caller's too."""
        entries = (
            self._local.get_many(record_keys.local_keys(view.generation)) if self._local else ()
        )
        if not any(entries):
            return await self._read(view, record_keys, left_s)
        absent = [index for index, entry in enumerate(entries) if entry is None]
        if not absent:
            return _checked(
                record_keys, _rows_of(record_keys, [entry.record for entry in entries if entry])
            )
        hit_indexes = [index for index, entry in enumerate(entries) if entry is not None]
        read = await self._read(view, record_keys.select(absent), left_s)
        records = np.empty(len(record_keys), record_keys.table.layout.dtype)
        _put(
            records,
            hit_indexes,
            _rows_of(record_keys, [entry.record for entry in entries if entry]),
        )
        _put(records, absent, read.records)
        rows = _checked(record_keys, records)
        rows.is_l2[absent] = True
        for index, read_result in read.result_by_index.items():
            rows.result_by_index[absent[index]] = read_result
        return rows

    async def _read(self, view: View, record_keys: RecordKeys, left_s: float | None) -> Rows:
        """Rows from L2 alone; L2_TIMEOUT for all of them when `left_s` is over."""

        def work(new: Sequence[int]) -> asyncio.Future[Sequence[Entry | Miss]]:
            return self._fetch(view, record_keys.select(new))

        is_l2 = np.ones(len(record_keys), bool)
        start = self._flight_keys.start(view.generation, record_keys.table.name)
        try:
            new, landed, entry_by_index = await self._wait(
                list(map(start.__add__, record_keys.keys)), work, left_s
            )
        except TimeoutError:
            late = dict.fromkeys(range(len(record_keys)), MISS_BY_REASON[MissReason.L2_TIMEOUT])
            return Rows(np.zeros(len(record_keys), record_keys.table.layout.dtype), is_l2, {**late})
        if type(landed) is not FlightRecords:
            entry_by_index.update(zip(new, landed, strict=True))
        elif len(new) == len(record_keys):
            return Rows(landed.rows, is_l2, {**landed.missed})
        missed: dict[int, ReadResult] = {}
        joined: dict[int, bytes] = {}
        prints = record_keys.fingerprints
        own_landed: FlightRecords | None = None
        if type(landed) is FlightRecords:
            own_landed = landed
            missed = {new[index]: miss for index, miss in landed.missed.items()}
        for batch_index, entry in entry_by_index.items():
            if isinstance(entry, Miss):
                missed[batch_index] = entry
            elif entry.fingerprint != prints.item(batch_index):
                missed[batch_index] = MISS_BY_REASON[MissReason.CORRUPT]
            else:
                joined[batch_index] = entry.record
        return Rows(_spread(record_keys, own_landed, new, joined), is_l2, missed)

    async def _wait(
        self,
        keys: Sequence[FlightKey],
        work: Callable[[Sequence[int]], asyncio.Future[Sequence[Entry | Miss]]],
        left_s: float | None,
    ) -> tuple[Sequence[int], Sequence[Entry | Miss], dict[int, Entry | Miss]]:
        if left_s is None:
            return await self._flights.do_batch(keys, work)
        if left_s <= 0:
            raise TimeoutError
        async with asyncio.timeout(left_s):
            return await self._flights.do_batch(keys, work)

    def _fetch(self, view: View, record_keys: RecordKeys) -> asyncio.Future[Sequence[Entry | Miss]]:
        self._counters.l2_reads += len(record_keys)

        def keep(answers: Sequence[L2Result]) -> Sequence[Entry | Miss]:
            landed = _landed(record_keys, answers)
            # L1 is filled inside the flight: a caller that comes after it finds the record, not a second read.
            self._fill(view, record_keys, landed, answers)
            return landed

        return self._remote.submit(page_reads(view, record_keys), keep)

    def _fill(
        self,
        view: View,
        record_keys: RecordKeys,
        landed: FlightRecords,
        answers: Sequence[L2Result],
    ) -> None:
        missed = landed.missed
        if not self._local.can_fit(record_keys.table.layout.size_bytes):
            self._local.too_large += len(record_keys) - len(missed)
            return
        prints, keys = record_keys.fingerprints.tolist(), record_keys.local_keys(view.generation)
        records: Sequence[Any] = answers.payloads() if isinstance(answers, Frames) else answers
        if missed:
            hit_indexes = [index for index in range(len(record_keys)) if index not in missed]
            prints = [prints[index] for index in hit_indexes]
            keys, records = (
                [keys[index] for index in hit_indexes],
                [records[index] for index in hit_indexes],
            )
        self._local.fill(keys, records, prints)


def _rows_of(record_keys: RecordKeys, records: Sequence[bytes]) -> NDArray[Any]:
    return np.frombuffer(b"".join(records), record_keys.table.layout.dtype)


def _put(records: NDArray[Any], indexes: Sequence[int], rows: NDArray[Any]) -> None:
    """`records[places] = rows`, without looking at the fields."""
    opaque_dtype = np.dtype((np.void, records.itemsize))
    records.view(opaque_dtype)[np.asarray(indexes, np.intp)] = rows.view(opaque_dtype)


def _spread(
    record_keys: RecordKeys,
    landed: FlightRecords | None,
    new: Sequence[int],
    joined: dict[int, bytes],
) -> NDArray[Any]:
    """Records of this flight at the places `new`, of others at theirs; else zeros."""
    dtype = record_keys.table.layout.dtype
    indexes, rows = ([], b"") if landed is None else (list(new), landed.rows)
    record_buffer = loader.kernels.spread(len(record_keys), dtype.itemsize, rows, indexes, joined)
    return np.frombuffer(record_buffer, dtype)


def _checked(record_keys: RecordKeys, records: NDArray[Any]) -> Rows:
    """Rows of L1 and of other flights, corrupt where a record is not its entity's."""
    result_by_index: dict[int, ReadResult] = {}
    is_own = records["fingerprint"] == record_keys.fingerprints
    if np.count_nonzero(is_own) < len(is_own):
        result_by_index = dict.fromkeys(
            np.flatnonzero(~is_own).tolist(), MISS_BY_REASON[MissReason.CORRUPT]
        )
    return Rows(records, np.zeros(len(record_keys), bool), result_by_index)


def _landed(record_keys: RecordKeys, answers: Sequence[L2Result]) -> FlightRecords:
    """Answers as rows, each of them checked to be its entity's."""
    layout = record_keys.table.layout
    missed: dict[int, Miss] = {}
    if type(answers) is Frames:
        sound_rows = answers.sound(layout.dtype, record_keys.fingerprints, RECORD_FORMAT)
        if sound_rows is not None:
            return FlightRecords(sound_rows, missed)
        rows = answers.rows(layout.dtype)
    else:
        blank = bytes(layout.size_bytes)
        rows = _rows_of(
            record_keys, [answer if isinstance(answer, bytes) else blank for answer in answers]
        )
        for index, answer in enumerate(answers):
            if isinstance(answer, TierUnavailable):
                missed[index] = unavailable(answer)
            elif not isinstance(answer, bytes):
                missed[index] = MISS_BY_REASON[MissReason.PAGE_MISSING]
    sound = are_answers_of(rows, record_keys.fingerprints)
    if np.count_nonzero(sound) < len(sound):
        for index in np.flatnonzero(~sound).tolist():
            record, fingerprint = rows[index].tobytes(), record_keys.fingerprints.item(index)
            missed.setdefault(index, MISS_BY_REASON[unsound(record, fingerprint)])
    return FlightRecords(rows, missed)
