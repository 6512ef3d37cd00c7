"""The read path: L1, then one read per key from L2. Judges what the tiers say; the ladder below it is serving's."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol, TypeVar, cast

from cache.errors import TierUnavailable
from cache.format.keys import FORMAT, hash_hex
from cache.format.records import (
    FLAG_LIVE,
    pack_overlay,
    peek_fingerprint,
    peek_format,
    unpack_overlay,
)
from cache.l2.commands import Answer, Overlay, OverlayWrite, Read
from cache.l2.lease_commands import Mark
from cache.tiers.access_sample import Trace
from cache.tiers.addressing import reads_of
from cache.tiers.batch_reader import RowReads
from cache.tiers.batches import Rows, Wants
from cache.tiers.flight_keys import FlightKey, FlightKeys
from cache.tiers.l1 import Entry, LocalKey, LocalTier, NegativeCache, Ready
from cache.tiers.results import (
    MISSED,
    STANDS_IN,
    Counters,
    Found,
    Missed,
    MissReason,
    Outcome,
    View,
    Want,
    unavailable,
    unsound,
)
from cache.tiers.singleflight import SingleFlight
from cache.tiers.write_behind import WriteBehind

__all__ = ["Counters", "Found", "MissReason", "Missed", "Outcome", "Tiered", "View", "Want"]


T = TypeVar("T")


class Remote(Protocol):
    """L2 as far as the read path needs it."""

    def submit(
        self, reads: Sequence[Read], keep: Callable[[Sequence[Answer]], T]
    ) -> asyncio.Future[T]:
        """A future of what `keep` makes of the answers, one per command."""

    async def write_overlays(self, writes: Sequence[OverlayWrite]) -> list[TierUnavailable | None]:
        """Stores overlays; returns None for each that was stored, else why it was not."""


FLAGS_AT = 14
"""Offset of the flags in a record's header."""


class Tiered:
    """Both tiers as one; `flights` joins readers of the same key, whatever input each of them sent.

    `l2_deadline_s` is the one that `remote` keeps by itself: callers with more time than that need no clock of theirs.
    """

    def __init__(
        self,
        local: LocalTier,
        negative: NegativeCache,
        remote: Remote,
        *,
        l2_deadline_s: float = float("inf"),
        writes_max_bytes: int = 8 << 20,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.local = local
        self.negative = negative
        self.counters = Counters()
        self.trace = Trace()
        self.flights: SingleFlight[FlightKey, Entry | Missed] = SingleFlight()
        self._flight_keys = FlightKeys()
        self.writes = WriteBehind(remote.write_overlays, writes_max_bytes, timer)
        self._remote = remote
        self._rows = RowReads(local, self.flights, self._flight_keys, remote, self.counters)
        self._l2_deadline_s = l2_deadline_s
        self._timer = timer

    def peek(self, view: View, want: Want) -> Found | None:
        """The record if L1 has it: the hot path, no awaiting; counts a hit, and leaves a miss to `get`."""
        found = self._local(view, want)
        if isinstance(found, Found):
            self.counters.records += 1
            self.trace.one(view.generation, want, found)
            return found
        return None

    async def read(self, view: View, want: Want) -> Outcome:
        """The record of an id that the night knows, which L1 lacks, within the deadline of L2 itself."""
        key = LocalKey(view.generation, want.table.name, want.key)
        flight = self._flight_keys.of(view.generation, want)
        entry = await self.flights.do_one(flight, lambda: self._fetch(view, (key,), (want,)))
        outcome = self._judged(key, entry, want)
        self._count(view, (want,), (outcome,))
        return outcome

    async def get(self, view: View, want: Want, deadline: float) -> Outcome:
        """The record, or why there is none; `deadline` is monotonic and this caller's own."""
        outcome = await self._resolve_one(view, want, deadline)
        self._count(view, (want,), (outcome,))
        return outcome

    async def get_many(self, view: View, wants: Sequence[Want], deadline: float) -> list[Outcome]:
        """Outcomes, one per want, in order; all that L1 lacks is read from L2 together."""
        if len(wants) == 1:
            outcomes = [await self._resolve_one(view, wants[0], deadline)]
        else:
            outcomes = await self._resolve(view, wants, deadline)
        self._count(view, wants, outcomes)
        return outcomes

    async def get_rows(self, view: View, wants: Wants, deadline: float | None) -> Rows:
        """Rows for entities of one table that the night knows; `deadline` None: L2's own deadline is enough."""
        left_s = None if deadline is None else deadline - self._timer()
        if left_s is not None and left_s >= self._l2_deadline_s:
            left_s = None
        rows = await self._rows.read(view, wants, left_s)
        for place, outcome in rows.others.items():
            if isinstance(outcome, Missed):
                key = LocalKey(view.generation, wants.table.name, wants.keys[place])
                rows.others[place] = self._judged(key, outcome, wants.one(place))
        self.counters.count_rows(rows.is_l2, rows.others)
        self.trace.rows(view.generation, wants, rows.others)
        return rows

    async def warm(self, view: View, wants: Sequence[Want], deadline: float) -> int:
        """Reads into L1 ahead of requests, uncounted; returns how many records are there now."""
        outcomes = await self._resolve(view, wants, deadline)
        return sum(isinstance(each, Found) for each in outcomes)

    async def look_again(self, view: View, want: Want) -> Found | None:
        """The answer that another process may have stored for this very input since it was missed; L1 keeps it, too."""
        key = LocalKey(view.generation, want.table.name, want.key)
        if isinstance(found := self._local(view, want), Found):
            return found
        self.local.discard(key)  # an answer to another input, which a read would not replace
        flight = self._flight_keys.of(view.generation, want)
        entry = await self.flights.do_one(flight, lambda: self._fetch(view, (key,), (want,)))
        if isinstance(entry, Entry):
            self.negative.discard(key)
        outcome = self._judged(key, entry, want)
        return outcome if isinstance(outcome, Found) else None

    def probe(self, view: View, want: Want, tell: Callable[[bool], None]) -> None:
        """Asks Redis whether it holds an answer to this very input; `tell` gets nothing if it cannot be asked.

        L1 learns nothing of it, and nobody waits.
        """
        self.counters.l2_reads += 1
        asked_at = self._timer()

        def keep(answers: Sequence[Answer]) -> None:
            if isinstance(answer := answers[0], Overlay):
                entry = overlay_entry(want, answer, asked_at)
                tell(isinstance(entry, Entry) and isinstance(judge(entry, want, "l2"), Found))
            elif answer is None:
                tell(False)

        self._remote.submit(reads_of(view, (want,)), keep)

    def put_live(
        self,
        view: View,
        want: Want,
        record: bytes,
        digest: bytes,
        ttl_s: float,
        mark: Mark | None = None,
    ) -> None:
        """Keeps a live answer: in L1, and in L2 (in the background) only if the night did not know the entity.

        `mark` is the lease that ends when the answer is stored. Raises ValueError for anything but a whole live record
        of this entity: defaults and partial answers are never stored.
        """
        _check_live(want, record)
        key = LocalKey(view.generation, want.table.name, want.key)
        entry = Entry(record, want.fingerprint, digest, self._timer() + ttl_s)
        if want.position >= 0:
            # Beside the batch record, never in its place: whoever sent nothing gets what the night computed.
            self.local.put(live_key(key, digest), entry)
            return
        self.local.put(key, entry)
        self.trace.put(view.generation, want, len(record))
        self.negative.discard(key)
        payload = pack_overlay(record, digest)
        self.writes.put(
            OverlayWrite(view.generation, want.table.name, hash_hex(want.key), payload, ttl_s, mark)
        )

    def keep(self, view: View, want: Want, ready: Ready) -> None:
        """Keeps an answer of the live generation in L1, beside its record."""
        self.local.keep(self.trace.kept(view.generation, want.fingerprint, ready))

    def discard(self, view: View, want: Want) -> None:
        """Forgets what L1 holds of this entity, for a record that turned out to be damaged."""
        key = LocalKey(view.generation, want.table.name, want.key)
        self.local.discard(key)
        if want.digest is not None:
            self.local.discard(live_key(key, want.digest))

    async def aclose(self, timeout_s: float = 1.0) -> None:
        """Stores the overlays still queued, as far as `timeout_s` allows; the rest counts as dropped."""
        await self.writes.aclose(timeout_s)

    def _count(self, view: View, wants: Sequence[Want], outcomes: Sequence[Outcome]) -> None:
        self.counters.count(outcomes)
        for want, outcome in zip(wants, outcomes, strict=True):
            self.trace.one(view.generation, want, outcome)

    def _local(self, view: View, want: Want) -> Outcome | None:
        key = LocalKey(view.generation, want.table.name, want.key)
        entry = self.local.get(key)
        return None if entry is None else judge(entry, want, "l1")

    async def _resolve_one(self, view: View, want: Want, deadline: float) -> Outcome:
        key = LocalKey(view.generation, want[0].name, want[1])
        if (here := self.local.get(key)) is not None:
            return judge(here, want, "l1")
        if want.here_only:
            return MISSED[MissReason.UNREAD]
        if want[3] < 0 and key in self.negative:
            return MISSED[MissReason.NEGATIVE]
        entry: Entry | Missed = MISSED[MissReason.L2_TIMEOUT]
        if (left_s := deadline - self._timer()) > 0:
            flight = self._flight_keys.of(view.generation, want)
            within_s = None if left_s >= self._l2_deadline_s else left_s
            # A flight ends within the tier's deadline; a caller's own, if shorter, ends nobody else's waiting.
            with contextlib.suppress(TimeoutError):
                entry = await self.flights.do_one(
                    flight, lambda: self._fetch(view, (key,), (want,)), within_s
                )
        return self._judged(key, entry, want)

    async def _resolve(self, view: View, wants: Sequence[Want], deadline: float) -> list[Outcome]:
        generation, get = view.generation, self.local.get
        outcomes: list[Outcome | None] = []
        absent: dict[int, LocalKey] = {}
        for index, want in enumerate(wants):
            key = LocalKey(generation, want[0].name, want[1])
            entry = get(key)
            if entry is not None:
                outcomes.append(judge(entry, want, "l1"))
            elif want.here_only:
                outcomes.append(MISSED[MissReason.UNREAD])
            elif want[3] < 0 and key in self.negative:
                outcomes.append(MISSED[MissReason.NEGATIVE])
            else:
                outcomes.append(None)
                absent[index] = key
        if absent:
            entries = await self._read(view, [wants[index] for index in absent], deadline)
            for index, read in zip(absent, entries, strict=True):
                outcomes[index] = self._judged(absent[index], read, wants[index])
        return cast(list[Outcome], outcomes)

    def _judged(self, key: LocalKey, entry: Entry | Missed, want: Want) -> Outcome:
        """The outcome of a read of L2; a live answer kept beside the page counts only while that gives none."""
        if isinstance(entry, Entry):
            return judge(entry, want, "l2")
        if want.position < 0 or want.digest is None or entry.reason not in STANDS_IN:
            return entry
        kept = self.local.get(live_key(key, want.digest))
        outcome = entry if kept is None else judge(kept, want, "l1")
        return outcome._replace(reason=entry.reason) if isinstance(outcome, Found) else entry

    async def _read(
        self,
        view: View,
        wants: Sequence[Want],
        deadline: float,
    ) -> Sequence[Entry | Missed]:
        left_s = deadline - self._timer()
        if left_s <= 0:
            return [MISSED[MissReason.L2_TIMEOUT]] * len(wants)
        keys = [self._flight_keys.of(view.generation, want) for want in wants]
        by_key = dict(zip(keys, wants, strict=True))

        def work(new: Sequence[FlightKey]) -> Awaitable[Sequence[Entry | Missed]]:
            named = [by_key[key] for key in new]
            locals_ = [LocalKey(view.generation, want.table.name, want.key) for want in named]
            return self._fetch(view, locals_, named)

        try:
            # A flight ends within the tier's deadline; a caller's own, if shorter, ends nobody else's waiting.
            if left_s >= self._l2_deadline_s:
                return await self.flights.do_many(keys, work)
            async with asyncio.timeout(left_s):
                return await self.flights.do_many(keys, work)
        except TimeoutError:
            return [MISSED[MissReason.L2_TIMEOUT]] * len(keys)

    def _fetch(
        self, view: View, keys: Sequence[LocalKey], wants: Sequence[Want]
    ) -> asyncio.Future[list[Entry | Missed]]:
        self.counters.l2_reads += len(keys)
        # What is left of a life is left from then on: an answer that comes late must not make it longer.
        asked_at = self._timer()

        def keep(answers: Sequence[Answer]) -> list[Entry | Missed]:
            # L1 is filled inside the flight: a caller that comes after it finds the record, not a second read.
            return [
                self._keep(key, want, answer, asked_at)
                for key, want, answer in zip(keys, wants, answers, strict=True)
            ]

        return self._remote.submit(reads_of(view, wants), keep)

    def _keep(self, key: LocalKey, want: Want, answer: Answer, asked_at: float) -> Entry | Missed:
        if type(answer) is bytes:
            if answer[14] >> 4 != FORMAT or int.from_bytes(answer[:8], "little") != want[2]:
                return MISSED[unsound(answer, want[2])]
            entry = Entry(answer, want[2])
            self.local.put(key, entry)
            return entry
        if isinstance(answer, TierUnavailable):
            return unavailable(answer)
        if want.position >= 0:
            return MISSED[MissReason.PAGE_MISSING]
        # Written by this process while the read was under way: newer than what the read found.
        if (newer := self.local.get(key)) is not None:
            return newer
        if answer is None:
            self.negative.add(key)
            return MISSED[MissReason.NOT_IN_GENERATION]
        return self._keep_overlay(key, want, cast(Overlay, answer), asked_at)

    def _keep_overlay(
        self, key: LocalKey, want: Want, overlay: Overlay, asked_at: float
    ) -> Entry | Missed:
        entry = overlay_entry(want, overlay, asked_at)
        if isinstance(entry, Entry):
            self.local.put(key, entry)
        return entry


def overlay_entry(want: Want, overlay: Overlay, asked_at: float) -> Entry | Missed:
    """The entry in an overlay asked for at `asked_at` (monotonic), or why it is a miss."""
    unpacked = unpack_overlay(want.table.layout, overlay.payload)
    if unpacked is None or peek_format(unpacked[0]) != FORMAT:
        return MISSED[MissReason.CORRUPT]
    if overlay.ttl_s <= 0:
        return MISSED[MissReason.EXPIRED]
    record, digest = unpacked
    if peek_fingerprint(record) != want.fingerprint:
        return MISSED[MissReason.CORRUPT]
    return Entry(record, want.fingerprint, digest, asked_at + overlay.ttl_s)


def live_key(key: LocalKey, digest: bytes) -> LocalKey:
    """Key in L1 of a live answer to this input, which is kept beside the record of the night."""
    raw = key.key if isinstance(key.key, bytes) else key.key.to_bytes(8, "little")
    return key._replace(key=raw + digest)


def judge(entry: Entry, want: Want, tier: Literal["l1", "l2"]) -> Outcome:
    """The outcome of what a tier holds for this want: found, corrupt, or from another input."""
    if entry.fingerprint != want.fingerprint:
        return MISSED[MissReason.CORRUPT]
    # Whoever sent nothing may have what is stored; whoever sent something gets an answer to that.
    if entry.digest is not None and want.digest is not None and entry.digest != want.digest:
        return MISSED[MissReason.INPUT_CHANGED]
    return Found(entry.record, tier, entry.digest is not None, entry.expires_at)


def _check_live(want: Want, record: bytes) -> None:
    size_bytes = want.table.layout.size_bytes
    if len(record) != size_bytes:
        raise ValueError(f"a record of {want.table.name} has {size_bytes} bytes, not {len(record)}")
    if peek_fingerprint(record) != want.fingerprint or not record[FLAGS_AT] & FLAG_LIVE:
        raise ValueError(f"not a live record of the wanted entity in {want.table.name}")
