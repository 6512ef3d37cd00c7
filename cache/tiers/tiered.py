"""The read path: L1, then one read per key from L2. Judges what the tiers say; the ladder below it is serving's."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from cache.errors import TierUnavailable
from cache.format.records.codec import pack_overlay
from cache.format.records.layout import is_answer_of
from cache.format.redis_keys import hash_hex
from cache.l2.commands import L2Result, Overlay, OverlayWrite
from cache.l2.data_plane import DataPlane
from cache.l2.lease_commands import LeaseMark
from cache.process.background_loops import BackgroundLoops
from cache.tiers.access_sample import AccessTrace
from cache.tiers.addressing import FlightKey, FlightKeys, reads_of
from cache.tiers.batch_reader import RowReader
from cache.tiers.batches import RecordKeys, Rows
from cache.tiers.checks import check_live, is_answer, judge, live_key, overlay_entry
from cache.tiers.l1 import Entry, LocalKey, LocalTier, NegativeCache, ReadyAnswer
from cache.tiers.results import (
    MISS_BY_REASON,
    OUTAGES,
    STANDS_IN,
    Counters,
    Hit,
    Miss,
    MissReason,
    ReadResult,
    RecordKey,
    View,
    unavailable,
    unsound,
)
from cache.tiers.singleflight import SingleFlight
from cache.tiers.write_behind import WriteBehind

__all__ = [
    "Counters",
    "Hit",
    "Miss",
    "MissReason",
    "ReadResult",
    "RecordKey",
    "TieredCache",
    "View",
]

T = TypeVar("T")


class TieredCache:
    """Both tiers as one: `get` reads one record, `get_many` several, `get_rows` a batch of one table as columns.

    `flights` joins readers of the same key, whatever input each of them sent.
    """

    def __init__(
        self,
        local: LocalTier,
        negative: NegativeCache,
        remote: DataPlane,
        *,
        writes_max_bytes: int = 8 << 20,
        timer: Callable[[], float] = time.monotonic,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self.local = local
        self.negative = negative
        self.counters = Counters()
        self.trace = AccessTrace()
        self.flights: SingleFlight[FlightKey, Entry | Miss] = SingleFlight()
        self._flight_keys = FlightKeys()
        self.writes = WriteBehind(remote.write_overlays, writes_max_bytes, timer, loops)
        self._remote = remote
        self._rows = RowReader(local, self.flights, self._flight_keys, remote, self.counters)
        self._timer = timer

    def peek(self, view: View, record_key: RecordKey) -> Hit | None:
        """The record if L1 has it, without awaiting; counts a hit, and leaves a miss to `get`."""
        entry = self.local.get(LocalKey(view.generation, record_key.table.name, record_key.key))
        if entry is None or not isinstance(read_result := judge(entry, record_key, "l1"), Hit):
            return None
        self.counters.records += 1
        self.trace.note_read(view.generation, record_key, read_result)
        return read_result

    def inspect(self, view: View, record_key: RecordKey) -> Hit | None:
        """The record if L1 has it, for somebody who only looks: nothing is counted, and what goes first stays."""
        entry = self.local.inspect(LocalKey(view.generation, record_key.table.name, record_key.key))
        read_result = None if entry is None else judge(entry, record_key, "l1")
        return read_result if isinstance(read_result, Hit) else None

    async def get(
        self, view: View, record_key: RecordKey, deadline: float | None = None
    ) -> ReadResult:
        """The record, or why there is none; `deadline` is monotonic and this caller's own, None: L2's is enough."""
        key = LocalKey(view.generation, record_key.table.name, record_key.key)
        if (outcome := self._read_local(key, record_key)) is None:
            outcome = self._judged(
                key, await self._read_one(view, key, record_key, deadline), record_key
            )
        self._count(view, (record_key,), (outcome,))
        return outcome

    async def get_many(
        self,
        view: View,
        record_keys: Sequence[RecordKey],
        deadline: float,
        *,
        is_counted: bool = True,
    ) -> list[ReadResult]:
        """Outcomes, one per want, in order; all that L1 lacks is read from L2 together."""
        if len(record_keys) == 1 and is_counted:
            return [await self.get(view, record_keys[0], deadline)]
        keys = [
            LocalKey(view.generation, record_key.table.name, record_key.key)
            for record_key in record_keys
        ]
        outcomes = [
            self._read_local(key, record_key)
            for key, record_key in zip(keys, record_keys, strict=True)
        ]
        missed = [index for index, outcome in enumerate(outcomes) if outcome is None]
        if absent := {index: (keys[index], record_keys[index]) for index in missed}:
            entries = await self._read(view, list(absent.values()), deadline)
            for (index, (key, record_key)), entry in zip(absent.items(), entries, strict=True):
                outcomes[index] = self._judged(key, entry, record_key)
        results = cast(list[ReadResult], outcomes)
        if is_counted:
            self._count(view, record_keys, results)
        return results

    async def get_rows(self, view: View, record_keys: RecordKeys, deadline: float | None) -> Rows:
        """Rows for entities of one table that the night knows; `deadline` None: L2's own deadline is enough."""
        rows = await self._rows.read(view, record_keys, self._within_s(deadline))
        for index, outcome in rows.result_by_index.items():
            if isinstance(outcome, Miss):
                key = LocalKey(view.generation, record_keys.table.name, record_keys.keys[index])
                rows.result_by_index[index] = self._judged(
                    key, outcome, record_keys.record_key_at(index)
                )
        self.counters.count_rows(rows.is_l2, rows.result_by_index)
        self.trace.note_reads(view.generation, record_keys, rows.result_by_index)
        return rows

    async def read_overlay_again(self, view: View, record_key: RecordKey) -> Hit | None:
        """The answer that another process may have stored for this very input since it was missed; L1 keeps it, too."""
        key = LocalKey(view.generation, record_key.table.name, record_key.key)
        if isinstance(read_result := self._read_local(key, record_key), Hit):
            return read_result
        self.local.discard(key)  # an answer to another input, which a read would not replace
        entry = await self._read_one(view, key, record_key, None)
        if isinstance(entry, Entry):
            self.negative.discard(key)
        outcome = self._judged(key, entry, record_key)
        return outcome if isinstance(outcome, Hit) else None

    def probe(self, view: View, record_key: RecordKey, on_reply: Callable[[bool], None]) -> None:
        """Asks Redis whether it holds an answer to this input; L1 learns nothing, `on_reply` gets Redis' reply."""
        self.counters.l2_reads += 1
        asked_at = self._timer()

        def keep(answers: Sequence[L2Result]) -> None:
            if (answer := answers[0]) is None or isinstance(answer, Overlay):
                on_reply(answer is not None and is_answer(record_key, answer, asked_at))

        self._remote.submit(reads_of(view, (record_key,)), keep)

    def put_live(
        self,
        view: View,
        record_key: RecordKey,
        record: bytes,
        digest: bytes,
        ttl_s: float,
        lease_mark: LeaseMark | None = None,
    ) -> None:
        """Keeps a live answer: in L1, and in L2 (in the background) only if the night did not know the entity.

        `lease_mark` is the lease that ends when the answer is stored. Raises ValueError for anything but a whole live
        record of this entity: defaults and partial answers are never stored.
        """
        check_live(record_key, record)
        key = LocalKey(view.generation, record_key.table.name, record_key.key)
        entry = Entry(record, record_key.fingerprint, digest, self._timer() + ttl_s)
        if record_key.position >= 0:
            # Beside the batch record, never in its place: whoever sent nothing gets what the night computed.
            self.local.put(live_key(key, digest), entry)
            return
        self.local.put(key, entry)
        self.trace.note_put(view.generation, record_key, len(record))
        self.negative.discard(key)
        payload = pack_overlay(record, digest)
        self.writes.put(
            OverlayWrite(
                view.generation,
                record_key.table.name,
                hash_hex(record_key.key),
                payload,
                ttl_s,
                lease_mark,
            )
        )

    def keep(self, view: View, record_key: RecordKey, ready: ReadyAnswer) -> None:
        """Keeps an answer of the live generation in L1, beside its record."""
        self.local.keep(self.trace.attach_access(view.generation, record_key.fingerprint, ready))

    def discard(self, view: View, record_key: RecordKey) -> None:
        """Forgets what L1 holds of this entity, for a record that turned out to be damaged."""
        key = LocalKey(view.generation, record_key.table.name, record_key.key)
        self.local.discard(key)
        if record_key.digest is not None:
            self.local.discard(live_key(key, record_key.digest))

    async def aclose(self, timeout_s: float = 1.0) -> None:
        """Stores the overlays still queued, as far as `timeout_s` allows; the rest counts as dropped."""
        await self.writes.aclose(timeout_s)

    def _count(
        self, view: View, record_keys: Sequence[RecordKey], outcomes: Sequence[ReadResult]
    ) -> None:
        self.counters.count(outcomes)
        for record_key, outcome in zip(record_keys, outcomes, strict=True):
            self.trace.note_read(view.generation, record_key, outcome)

    def _within_s(self, deadline: float | None) -> float | None:
        """Seconds that a caller has for L2; None if L2's own deadline is enough."""
        return None if deadline is None else deadline - self._timer()

    def _read_local(self, key: LocalKey, record_key: RecordKey) -> ReadResult | None:
        """The outcome without L2; None if L2 has to be asked."""
        if (entry := self.local.get(key)) is not None:
            return judge(entry, record_key, "l1")
        if record_key.skips_overlay:
            return MISS_BY_REASON[MissReason.UNREAD]
        if record_key.position < 0 and key in self.negative:
            return MISS_BY_REASON[MissReason.NEGATIVE]
        return None

    def _judged(self, key: LocalKey, entry: Entry | Miss, record_key: RecordKey) -> ReadResult:
        """The outcome of a read of L2; a live answer kept beside the page counts only while that gives none."""
        if isinstance(entry, Entry):
            return judge(entry, record_key, "l2")
        if record_key.position < 0 or record_key.digest is None or entry.reason not in STANDS_IN:
            return entry
        live_entry = self.local.get(live_key(key, record_key.digest))
        outcome = entry if live_entry is None else judge(live_entry, record_key, "l1")
        if not isinstance(outcome, Hit):
            return entry
        # Without a record of the night it is what is stored of this id, and no substitute.
        reason = entry.reason if entry.reason in OUTAGES else None
        return outcome._replace(reason=reason)

    async def _read_one(
        self, view: View, key: LocalKey, record_key: RecordKey, deadline: float | None
    ) -> Entry | Miss:
        within_s = self._within_s(deadline)
        if within_s is None or within_s > 0:
            flight = self._flight_keys.of(view.generation, record_key)
            fetch = functools.partial(self._fetch_one, view, key, record_key)
            with contextlib.suppress(TimeoutError):
                return await self.flights.do(flight, fetch, within_s)
        return MISS_BY_REASON[MissReason.L2_TIMEOUT]

    async def _read(
        self, view: View, key_pairs: Sequence[tuple[LocalKey, RecordKey]], deadline: float
    ) -> Sequence[Entry | Miss]:
        within_s = self._within_s(deadline)
        if within_s is not None and within_s <= 0:
            return [MISS_BY_REASON[MissReason.L2_TIMEOUT]] * len(key_pairs)
        flights = [self._flight_keys.of(view.generation, record_key) for _, record_key in key_pairs]
        by_flight = dict(zip(flights, key_pairs, strict=True))

        def work(new: Sequence[FlightKey]) -> asyncio.Future[list[Entry | Miss]]:
            return self._fetch(view, [by_flight[flight_key] for flight_key in new])

        try:
            # A flight ends within the tier's deadline; a caller's own, if shorter, ends nobody else's waiting.
            async with asyncio.timeout(within_s):
                return await self.flights.do_many(flights, work)
        except TimeoutError:
            return [MISS_BY_REASON[MissReason.L2_TIMEOUT]] * len(key_pairs)

    def _fetch(
        self, view: View, key_pairs: Sequence[tuple[LocalKey, RecordKey]]
    ) -> asyncio.Future[list[Entry | Miss]]:
        self.counters.l2_reads += len(key_pairs)
        # What is left of a life is left from then on: an answer that comes late must not make it longer.
        asked_at = self._timer()

        # L1 is filled inside the flight: a caller that comes after it finds the record, not a second read.
        def keep(answers: Sequence[L2Result]) -> list[Entry | Miss]:
            return [
                self._keep(key, record_key, answer, asked_at)
                for (key, record_key), answer in zip(key_pairs, answers, strict=True)
            ]

        return self._remote.submit(
            reads_of(view, [record_key for _, record_key in key_pairs]), keep
        )

    def _fetch_one(
        self, view: View, key: LocalKey, record_key: RecordKey
    ) -> asyncio.Future[Entry | Miss]:
        self.counters.l2_reads += 1
        asked_at = self._timer()  # as for many
        return self._remote.submit(
            reads_of(view, (record_key,)),
            lambda answers: self._keep(key, record_key, answers[0], asked_at),
        )

    def _keep(
        self, key: LocalKey, record_key: RecordKey, answer: L2Result, asked_at: float
    ) -> Entry | Miss:
        if type(answer) is bytes:
            if not is_answer_of(answer, record_key.fingerprint):
                return MISS_BY_REASON[unsound(answer, record_key.fingerprint)]
            entry: Entry | Miss = Entry(answer, record_key.fingerprint)
        elif isinstance(answer, TierUnavailable):
            return unavailable(answer)
        elif record_key.position >= 0:
            return MISS_BY_REASON[MissReason.PAGE_MISSING]
        # Written by this process while the read was under way: newer than what the read found.
        elif (newer_entry := self.local.get(key)) is not None:
            return newer_entry
        elif answer is None:
            self.negative.add(key)
            return MISS_BY_REASON[MissReason.NOT_IN_GENERATION]
        else:
            entry = overlay_entry(record_key, cast(Overlay, answer), asked_at)
        if isinstance(entry, Entry):
            self.local.put(key, entry)
        return entry
