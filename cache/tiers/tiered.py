"""Read path: L1, then one L2 read per key, singly or in batches; overlays are written in the background."""

import asyncio
import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from cache.errors import TierUnavailable
from cache.format.redis_keys import hash_hex
from cache.l2.commands import Frames, L2Result, LeaseMark, Overlay, OverlayWrite
from cache.l2.data_plane import DataPlane
from cache.native import loader
from cache.process.background_loops import BackgroundLoops, cancel_and_wait
from cache.records import RECORD_FORMAT, are_answers_of, is_answer_of, pack_overlay, peek_fingerprint
from cache.tiers.access_sample import AccessTrace
from cache.tiers.l1 import Entry, LocalKey, LocalTier, NegativeCache, ReadyAnswer
from cache.tiers.reads import (
    MISS_BY_REASON,
    Counters,
    FlightKey,
    FlightKeys,
    Hit,
    Miss,
    MissReason,
    ReadResult,
    RecordKey,
    RecordKeys,
    Rows,
    SnapshotView,
    check_live_record,
    is_overlay_answer,
    judge_entry,
    live_key,
    overlay_entry,
    page_reads,
    reads_of,
    unavailable_miss,
    unsound_reason,
)
from cache.tiers.singleflight import SingleFlight

WriteOverlays = Callable[[Sequence[OverlayWrite]], Awaitable[list[TierUnavailable | None]]]
_WRITES_AT_ONCE_MAX = 256

_UNCHANGED_LIFE_WAIT_S = 0.001
"""Seconds up to which a write keeps its original life despite waiting."""

T = TypeVar("T")


class TieredCache:
    """Both tiers as one: `get` reads one record, `get_many` several, `get_rows` a batch of one table as columns.

    Readers of the same key share a flight, whatever inputs they sent.
    """

    def __init__(
        self,
        local: LocalTier,
        negative: NegativeCache,
        remote: DataPlane,
        *,
        queued_writes_bytes_max: int = 8 << 20,
        monotonic_clock: Callable[[], float] = time.monotonic,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self.local_tier = local
        self.negative_cache = negative
        self.counters = Counters()
        self.access_trace = AccessTrace()
        self.flights: SingleFlight[FlightKey, Entry | Miss] = SingleFlight()
        self._flight_keys = FlightKeys()
        self.write_behind = WriteBehind(remote.write_overlays, queued_writes_bytes_max, monotonic_clock, loops)
        self._remote = remote
        self._row_reader = RowReader(local, self.flights, self._flight_keys, remote, self.counters)
        self._timer = monotonic_clock

    def peek(self, view: SnapshotView, record_key: RecordKey) -> Hit | None:
        """Return the record if L1 has it, without awaiting; counts a hit, but not a miss, which `get` counts."""
        entry = self.local_tier.get(LocalKey(view.generation, record_key.table.name, record_key.hash_or_digest))
        if entry is None or not isinstance(read_result := judge_entry(entry, record_key, "l1"), Hit):
            return None
        self.counters.l1_records += 1
        self.access_trace.note_read(view.generation, record_key, read_result)
        return read_result

    def inspect(self, view: SnapshotView, record_key: RecordKey) -> Hit | None:
        """Return the record if L1 has it; counts nothing and keeps the LRU order."""
        entry = self.local_tier.inspect(LocalKey(view.generation, record_key.table.name, record_key.hash_or_digest))
        read_result = None if entry is None else judge_entry(entry, record_key, "l1")
        return read_result if isinstance(read_result, Hit) else None

    async def get(self, view: SnapshotView, record_key: RecordKey, deadline: float | None = None) -> ReadResult:
        """Return the record or a miss; `deadline` is this caller's, monotonic; None: only L2's own deadline applies."""
        key = LocalKey(view.generation, record_key.table.name, record_key.hash_or_digest)
        if (outcome := self._read_local(key, record_key)) is None:
            outcome = self._judge_or_stand_in(key, await self._read_one(view, key, record_key, deadline), record_key)
        self._count(view, (record_key,), (outcome,))
        return outcome

    async def get_many(
        self, view: SnapshotView, record_keys: Sequence[RecordKey], deadline: float, *, is_counted: bool = True
    ) -> list[ReadResult]:
        """Return one result per record key, in order; all records that L1 lacks are read from L2 together."""
        if len(record_keys) == 1 and is_counted:
            return [await self.get(view, record_keys[0], deadline)]
        keys = [
            LocalKey(view.generation, record_key.table.name, record_key.hash_or_digest) for record_key in record_keys
        ]
        outcomes = [self._read_local(key, record_key) for key, record_key in zip(keys, record_keys, strict=True)]
        missed_indexes = [index for index, outcome in enumerate(outcomes) if outcome is None]
        if absent_by_index := {index: (keys[index], record_keys[index]) for index in missed_indexes}:
            entries = await self._read(view, list(absent_by_index.values()), deadline)
            for (index, (key, record_key)), entry in zip(absent_by_index.items(), entries, strict=True):
                outcomes[index] = self._judge_or_stand_in(key, entry, record_key)
        results = cast(list[ReadResult], outcomes)
        if is_counted:
            self._count(view, record_keys, results)
        return results

    async def get_rows(self, view: SnapshotView, record_keys: RecordKeys, deadline: float | None) -> Rows:
        """Return rows for entities of one table that the night knows.

        `deadline` None: only L2's own deadline applies.
        """
        rows = await self._row_reader.read(view, record_keys, self._remaining_s(deadline))
        for index, outcome in rows.result_by_index.items():
            if isinstance(outcome, Miss):
                key = LocalKey(view.generation, record_keys.table.name, record_keys.entity_hashes[index])
                rows.result_by_index[index] = self._judge_or_stand_in(key, outcome, record_keys.record_key_at(index))
        self.counters.count_rows(rows.l2_row_mask, rows.result_by_index)
        self.access_trace.note_reads(view.generation, record_keys, rows.result_by_index)
        return rows

    async def read_overlay_again(self, view: SnapshotView, record_key: RecordKey) -> Hit | None:
        """Look again for an answer to exactly this input, which another process may have stored; store it in L1."""
        key = LocalKey(view.generation, record_key.table.name, record_key.hash_or_digest)
        if isinstance(read_result := self._read_local(key, record_key), Hit):
            return read_result
        self.local_tier.discard(key)  # L1 has an answer to another input, which a regular read would not replace
        entry = await self._read_one(view, key, record_key, None)
        if isinstance(entry, Entry):
            self.negative_cache.discard(key)
        outcome = self._judge_or_stand_in(key, entry, record_key)
        return outcome if isinstance(outcome, Hit) else None

    def probe(self, view: SnapshotView, record_key: RecordKey, on_reply: Callable[[bool], None]) -> None:
        """Ask Redis whether it has an answer to this input; leaves L1 unchanged and passes the result to `on_reply`."""
        self.counters.l2_reads += 1
        asked_at = self._timer()

        def keep(answers: Sequence[L2Result]) -> None:
            if (answer := answers[0]) is None or isinstance(answer, Overlay):
                on_reply(answer is not None and is_overlay_answer(record_key, answer, asked_at))

        self._remote.submit(reads_of(view, (record_key,)), keep)

    def put_live(
        self,
        view: SnapshotView,
        record_key: RecordKey,
        record: bytes,
        input_digest: bytes,
        ttl_s: float,
        lease_mark: LeaseMark | None = None,
    ) -> None:
        """Store a live answer: in L1, and in L2 (in the background) only if the night did not know the entity.

        `lease_mark` is the lease to mark as done when the answer is stored. Raises ValueError for anything but a
        complete live record of this entity: defaults and partial answers are never stored.
        """
        check_live_record(record_key, record)
        key = LocalKey(view.generation, record_key.table.name, record_key.hash_or_digest)
        entry = Entry(record, record_key.fingerprint, input_digest, self._timer() + ttl_s)
        if record_key.directory_position >= 0:
            # Stored in addition to the nightly record: callers without an input get the nightly record.
            self.local_tier.put(live_key(key, input_digest), entry)
            return
        self.local_tier.put(key, entry)
        self.access_trace.note_put(view.generation, record_key, len(record))
        self.negative_cache.discard(key)
        payload = pack_overlay(record, input_digest)
        self.write_behind.put(
            OverlayWrite(
                view.generation, record_key.table.name, hash_hex(record_key.hash_or_digest), payload, ttl_s, lease_mark
            )
        )

    def keep(self, view: SnapshotView, record_key: RecordKey, ready_answer: ReadyAnswer) -> None:
        """Store a ready answer of the live generation in L1."""
        self.local_tier.keep_ready_answer(
            self.access_trace.attach_access(view.generation, record_key.fingerprint, ready_answer)
        )

    def discard(self, view: SnapshotView, record_key: RecordKey) -> None:
        """Remove L1's entries of this entity, whose record is damaged."""
        key = LocalKey(view.generation, record_key.table.name, record_key.hash_or_digest)
        self.local_tier.discard(key)
        if record_key.input_digest is not None:
            self.local_tier.discard(live_key(key, record_key.input_digest))

    async def aclose(self, timeout_s: float = 1.0) -> None:
        """Store the queued overlays within `timeout_s`; count the others as dropped."""
        await self.write_behind.aclose(timeout_s)

    def _count(self, view: SnapshotView, record_keys: Sequence[RecordKey], outcomes: Sequence[ReadResult]) -> None:
        self.counters.count(outcomes)
        for record_key, outcome in zip(record_keys, outcomes, strict=True):
            self.access_trace.note_read(view.generation, record_key, outcome)

    def _remaining_s(self, deadline: float | None) -> float | None:
        """Return the seconds left for reading L2; None if only L2's own deadline applies."""
        return None if deadline is None else deadline - self._timer()

    def _read_local(self, key: LocalKey, record_key: RecordKey) -> ReadResult | None:
        """Return the result without L2; None if L2 must be read."""
        if (entry := self.local_tier.get(key)) is not None:
            return judge_entry(entry, record_key, "l1")
        if record_key.skips_overlay:
            return MISS_BY_REASON[MissReason.UNREAD]
        if record_key.directory_position < 0 and key in self.negative_cache:
            return MISS_BY_REASON[MissReason.NEGATIVE]
        return None

    def _judge_or_stand_in(self, key: LocalKey, entry: Entry | Miss, record_key: RecordKey) -> ReadResult:
        """Return the result of a read of L2; if there is no entry, L1's live answer to this input may replace it."""
        if isinstance(entry, Entry):
            return judge_entry(entry, record_key, "l2")
        if (
            record_key.directory_position < 0
            or record_key.input_digest is None
            or not entry.reason.traits.allows_stand_in
        ):
            return entry
        live_entry = self.local_tier.get(live_key(key, record_key.input_digest))
        outcome = entry if live_entry is None else judge_entry(live_entry, record_key, "l1")
        if not isinstance(outcome, Hit):
            return entry
        # For an id without a nightly record, the live answer is a regular hit, not a replacement.
        reason = entry.reason if entry.reason.traits.is_outage else None
        return outcome._replace(reason=reason)

    async def _read_one(
        self, view: SnapshotView, key: LocalKey, record_key: RecordKey, deadline: float | None
    ) -> Entry | Miss:
        remaining_s = self._remaining_s(deadline)
        if remaining_s is None or remaining_s > 0:
            flight_key = self._flight_keys.of(view.generation, record_key)
            fetch = functools.partial(self._fetch_one, view, key, record_key)
            try:
                return await self.flights.do(flight_key, fetch, remaining_s)
            except TimeoutError:
                pass
        return MISS_BY_REASON[MissReason.L2_TIMEOUT]

    async def _read(
        self, view: SnapshotView, key_pairs: Sequence[tuple[LocalKey, RecordKey]], deadline: float
    ) -> Sequence[Entry | Miss]:
        remaining_s = self._remaining_s(deadline)
        if remaining_s is not None and remaining_s <= 0:
            return [MISS_BY_REASON[MissReason.L2_TIMEOUT]] * len(key_pairs)
        flight_keys = [self._flight_keys.of(view.generation, record_key) for _, record_key in key_pairs]
        pair_by_flight = dict(zip(flight_keys, key_pairs, strict=True))

        def work(new: Sequence[FlightKey]) -> asyncio.Future[list[Entry | Miss]]:
            return self._fetch(view, [pair_by_flight[flight_key] for flight_key in new])

        try:
            # A flight ends within L2's deadline; a shorter deadline of one caller does not affect other callers.
            async with asyncio.timeout(remaining_s):
                return await self.flights.do_many(flight_keys, work)
        except TimeoutError:
            return [MISS_BY_REASON[MissReason.L2_TIMEOUT]] * len(key_pairs)

    def _fetch(
        self, view: SnapshotView, key_pairs: Sequence[tuple[LocalKey, RecordKey]]
    ) -> asyncio.Future[list[Entry | Miss]]:
        self.counters.l2_reads += len(key_pairs)
        # The remaining life counts from the request: a late reply must not extend it.
        asked_at = self._timer()

        # L1 is filled before the flight ends, so that a later caller finds the record instead of reading again.
        def keep(answers: Sequence[L2Result]) -> list[Entry | Miss]:
            return [
                self._keep_answer(key, record_key, answer, asked_at)
                for (key, record_key), answer in zip(key_pairs, answers, strict=True)
            ]

        return self._remote.submit(reads_of(view, [record_key for _, record_key in key_pairs]), keep)

    def _fetch_one(self, view: SnapshotView, key: LocalKey, record_key: RecordKey) -> asyncio.Future[Entry | Miss]:
        self.counters.l2_reads += 1
        asked_at = self._timer()  # as in `_fetch`
        return self._remote.submit(
            reads_of(view, (record_key,)), lambda answers: self._keep_answer(key, record_key, answers[0], asked_at)
        )

    def _keep_answer(self, key: LocalKey, record_key: RecordKey, answer: L2Result, asked_at: float) -> Entry | Miss:
        if type(answer) is bytes:
            if not is_answer_of(answer, record_key.fingerprint):
                return MISS_BY_REASON[unsound_reason(answer, record_key.fingerprint)]
            entry: Entry | Miss = Entry(answer, record_key.fingerprint)
        elif isinstance(answer, TierUnavailable):
            return unavailable_miss(answer)
        elif record_key.directory_position >= 0:
            return MISS_BY_REASON[MissReason.PAGE_MISSING]
        # This process wrote the entry during the read: it is newer than the reply.
        elif (newer_entry := self.local_tier.get(key)) is not None:
            return newer_entry
        elif answer is None:
            self.negative_cache.add(key)
            return MISS_BY_REASON[MissReason.NOT_IN_GENERATION]
        else:
            entry = overlay_entry(record_key, cast(Overlay, answer), asked_at)
        if isinstance(entry, Entry):
            self.local_tier.put(key, entry)
        return entry


class FlightRecords(Sequence[Entry | Miss]):
    """Records of a flight of many keys: rows for the caller that started it, single entries for callers that joined.

    `rows[i]` is undefined if `miss_by_index` has `i`.
    """

    def __init__(self, rows: NDArray[Any], miss_by_index: dict[int, Miss]) -> None:
        self.rows = rows
        self.miss_by_index = miss_by_index

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Entry | Miss:  # type: ignore[override]
        if (miss := self.miss_by_index.get(index)) is not None:
            return miss
        record = self.rows[index].tobytes()
        return Entry(record, peek_fingerprint(record))


class RowReader:
    """Reader of `RecordKeys` through both tiers; shares flights with single reads."""

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

    async def read(self, view: SnapshotView, record_keys: RecordKeys, remaining_s: float | None) -> Rows:
        """Return rows, one per record key, or misses; `remaining_s` None: only L2's own deadline applies."""
        entries = self._local.get_many(record_keys.local_keys(view.generation)) if self._local else ()
        if not any(entries):
            return await self._read(view, record_keys, remaining_s)
        absent_indexes = [index for index, entry in enumerate(entries) if entry is None]
        if not absent_indexes:
            return _checked_rows(
                record_keys, _rows_from_records(record_keys, [entry.record for entry in entries if entry])
            )
        hit_indexes = [index for index, entry in enumerate(entries) if entry is not None]
        l2_rows = await self._read(view, record_keys.select(absent_indexes), remaining_s)
        records = np.empty(len(record_keys), record_keys.table.layout.dtype)
        _put_rows(records, hit_indexes, _rows_from_records(record_keys, [entry.record for entry in entries if entry]))
        _put_rows(records, absent_indexes, l2_rows.records)
        rows = _checked_rows(record_keys, records)
        rows.l2_row_mask[absent_indexes] = True
        for index, read_result in l2_rows.result_by_index.items():
            rows.result_by_index[absent_indexes[index]] = read_result
        return rows

    async def _read(self, view: SnapshotView, record_keys: RecordKeys, remaining_s: float | None) -> Rows:
        """Return rows from L2 only; L2_TIMEOUT for all of them if `remaining_s` passes."""

        def work(new: Sequence[int]) -> asyncio.Future[Sequence[Entry | Miss]]:
            return self._fetch(view, record_keys.select(new))

        is_l2 = np.ones(len(record_keys), bool)
        flight_key_offset = self._flight_keys.table_offset(view.generation, record_keys.table.name)
        try:
            new, flight_result, entry_by_index = await self._wait(
                list(map(flight_key_offset.__add__, record_keys.entity_hashes)), work, remaining_s
            )
        except TimeoutError:
            timeouts = dict.fromkeys(range(len(record_keys)), MISS_BY_REASON[MissReason.L2_TIMEOUT])
            return Rows(np.zeros(len(record_keys), record_keys.table.layout.dtype), is_l2, {**timeouts})
        if type(flight_result) is not FlightRecords:
            entry_by_index.update(zip(new, flight_result, strict=True))
        elif len(new) == len(record_keys):
            return Rows(flight_result.rows, is_l2, {**flight_result.miss_by_index})
        result_by_index: dict[int, ReadResult] = {}
        record_by_index: dict[int, bytes] = {}
        fingerprints = record_keys.fingerprints
        own_records: FlightRecords | None = None
        if type(flight_result) is FlightRecords:
            own_records = flight_result
            result_by_index = {new[index]: miss for index, miss in flight_result.miss_by_index.items()}
        for batch_index, entry in entry_by_index.items():
            if isinstance(entry, Miss):
                result_by_index[batch_index] = entry
            elif entry.fingerprint != fingerprints.item(batch_index):
                result_by_index[batch_index] = MISS_BY_REASON[MissReason.CORRUPT]
            else:
                record_by_index[batch_index] = entry.record
        return Rows(_spread_rows(record_keys, own_records, new, record_by_index), is_l2, result_by_index)

    async def _wait(
        self,
        keys: Sequence[FlightKey],
        work: Callable[[Sequence[int]], asyncio.Future[Sequence[Entry | Miss]]],
        remaining_s: float | None,
    ) -> tuple[Sequence[int], Sequence[Entry | Miss], dict[int, Entry | Miss]]:
        if remaining_s is None:
            return await self._flights.do_batch(keys, work)
        if remaining_s <= 0:
            raise TimeoutError
        async with asyncio.timeout(remaining_s):
            return await self._flights.do_batch(keys, work)

    def _fetch(self, view: SnapshotView, record_keys: RecordKeys) -> asyncio.Future[Sequence[Entry | Miss]]:
        self._counters.l2_reads += len(record_keys)

        def keep(answers: Sequence[L2Result]) -> Sequence[Entry | Miss]:
            landed = _flight_records(record_keys, answers)
            # L1 is filled before the flight ends, so that a later caller finds the record instead of reading again.
            self._fill(view, record_keys, landed, answers)
            return landed

        return self._remote.submit(page_reads(view, record_keys), keep)

    def _fill(
        self, view: SnapshotView, record_keys: RecordKeys, flight_records: FlightRecords, answers: Sequence[L2Result]
    ) -> None:
        miss_by_index = flight_records.miss_by_index
        if not self._local.can_fit(record_keys.table.layout.size_bytes):
            self._local.too_large_count += len(record_keys) - len(miss_by_index)
            return
        fingerprints, keys = (record_keys.fingerprints.tolist(), record_keys.local_keys(view.generation))
        records: Sequence[Any] = answers.payloads() if isinstance(answers, Frames) else answers
        if miss_by_index:
            hit_indexes = [index for index in range(len(record_keys)) if index not in miss_by_index]
            fingerprints = [fingerprints[index] for index in hit_indexes]
            keys, records = ([keys[index] for index in hit_indexes], [records[index] for index in hit_indexes])
        self._local.fill(keys, records, fingerprints)


def _rows_from_records(record_keys: RecordKeys, records: Sequence[bytes]) -> NDArray[Any]:
    return np.frombuffer(b"".join(records), record_keys.table.layout.dtype)


def _put_rows(records: NDArray[Any], indexes: Sequence[int], rows: NDArray[Any]) -> None:
    """Assign `records[indexes] = rows` as raw bytes, without field access."""
    opaque_dtype = np.dtype((np.void, records.itemsize))
    records.view(opaque_dtype)[np.asarray(indexes, np.intp)] = rows.view(opaque_dtype)


def _spread_rows(
    record_keys: RecordKeys,
    flight_records: FlightRecords | None,
    new_indexes: Sequence[int],
    record_by_index: dict[int, bytes],
) -> NDArray[Any]:
    """Place this flight's records at `new_indexes` and other flights' records at their indexes; zeros elsewhere."""
    dtype = record_keys.table.layout.dtype
    indexes, rows = ([], b"") if flight_records is None else (list(new_indexes), flight_records.rows)
    record_buffer = loader.kernels.spread(len(record_keys), dtype.itemsize, rows, indexes, record_by_index)
    return np.frombuffer(record_buffer, dtype)


def _checked_rows(record_keys: RecordKeys, records: NDArray[Any]) -> Rows:
    """Return rows from L1 and other flights; a record with another entity's fingerprint is corrupt."""
    result_by_index: dict[int, ReadResult] = {}
    own_mask = records["fingerprint"] == record_keys.fingerprints
    if np.count_nonzero(own_mask) < len(own_mask):
        result_by_index = dict.fromkeys(np.flatnonzero(~own_mask).tolist(), MISS_BY_REASON[MissReason.CORRUPT])
    return Rows(records, np.zeros(len(record_keys), bool), result_by_index)


def _flight_records(record_keys: RecordKeys, answers: Sequence[L2Result]) -> FlightRecords:
    """Convert answers to rows and check that each belongs to its entity."""
    layout = record_keys.table.layout
    miss_by_index: dict[int, Miss] = {}
    if type(answers) is Frames:
        sound_rows = answers.checked_records(layout.dtype, record_keys.fingerprints, RECORD_FORMAT)
        if sound_rows is not None:
            return FlightRecords(sound_rows, miss_by_index)
        rows = answers.to_records(layout.dtype)
    else:
        blank_record = bytes(layout.size_bytes)
        rows = _rows_from_records(
            record_keys, [answer if isinstance(answer, bytes) else blank_record for answer in answers]
        )
        for index, answer in enumerate(answers):
            if isinstance(answer, TierUnavailable):
                miss_by_index[index] = unavailable_miss(answer)
            elif not isinstance(answer, bytes):
                miss_by_index[index] = MISS_BY_REASON[MissReason.PAGE_MISSING]
    sound_mask = are_answers_of(rows, record_keys.fingerprints)
    if np.count_nonzero(sound_mask) < len(sound_mask):
        for index in np.flatnonzero(~sound_mask).tolist():
            record, fingerprint = rows[index].tobytes(), record_keys.fingerprints.item(index)
            miss_by_index.setdefault(index, MISS_BY_REASON[unsound_reason(record, fingerprint)])
    return FlightRecords(rows, miss_by_index)


class WriteBehind:
    """Queue of overlay writes, each of which is stored, fails or is dropped.

    Nothing is retried, since overlays can be recomputed. The time in the queue is subtracted from an overlay's life, so
    that it expires together with the answer.
    """

    def __init__(
        self,
        write_overlays: WriteOverlays,
        queued_bytes_max: int,
        monotonic_clock: Callable[[], float] = time.monotonic,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self.stored_count = 0
        self.failed_count = 0
        self.dropped_count = 0
        self._write = write_overlays
        self._max_bytes = queued_bytes_max
        self._queued_bytes = 0
        self._timer = monotonic_clock
        self._loops = BackgroundLoops() if loops is None else loops
        self._queue: deque[tuple[OverlayWrite, float]] = deque()
        self._write_task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, write: OverlayWrite) -> None:
        """Queue the write; drop it if `max_bytes` of payload are already waiting."""
        if self._queued_bytes + len(write.overlay_value) > self._max_bytes:
            self.dropped_count += 1
            return
        self._queued_bytes += len(write.overlay_value)
        self._queue.append((write, self._timer() + write.overlay_ttl_s))
        if self._write_task is None or self._write_task.done():
            self._write_task = self._loops.start("write_behind", self._write_some, is_due=lambda: bool(self._queue))

    async def aclose(self, timeout_s: float) -> None:
        """Store the queued writes within `timeout_s` and drop the others."""
        task = self._write_task
        if task is not None:
            await asyncio.wait({task}, timeout=timeout_s)
            await cancel_and_wait([task])
        self.dropped_count += len(self._queue)
        self._queue.clear()
        self._queued_bytes = 0

    async def _write_some(self) -> None:
        """Store the oldest queued writes; an exception counts all of them as failed."""
        writes = self._dequeue_writes()
        if not writes:
            return
        stored_count = 0
        try:
            stored_count = (await self._write(writes)).count(None)
        finally:
            self.stored_count += stored_count
            self.failed_count += len(writes) - stored_count

    def _dequeue_writes(self) -> list[OverlayWrite]:
        """Take some writes off the queue, with their remaining lives; drop the expired ones."""
        writes: list[OverlayWrite] = []
        now_s = self._timer()
        for _ in range(min(_WRITES_AT_ONCE_MAX, len(self._queue))):
            write, expires_at = self._queue.popleft()
            self._queued_bytes -= len(write.overlay_value)
            remaining_life_s = expires_at - now_s
            if remaining_life_s <= 0:
                self.dropped_count += 1
            elif remaining_life_s >= write.overlay_ttl_s - _UNCHANGED_LIFE_WAIT_S:
                writes.append(write)
            else:
                writes.append(write._replace(overlay_ttl_s=remaining_life_s))
        return writes
