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
from cache.l2.commands import Answer, Overlay, OverlayWrite
from cache.l2.data_plane import DataPlane
from cache.l2.lease_commands import Mark
from cache.process.background_loops import BackgroundLoops
from cache.tiers.access_sample import Trace
from cache.tiers.addressing import FlightKey, FlightKeys, reads_of
from cache.tiers.batch_reader import RowReads
from cache.tiers.batches import Rows, Wants
from cache.tiers.checks import check_live, is_answer, judge, live_key, overlay_entry
from cache.tiers.l1 import Entry, LocalKey, LocalTier, NegativeCache, Ready
from cache.tiers.results import (
    MISSED,
    OUTAGES,
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


class Tiered:
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
        self.trace = Trace()
        self.flights: SingleFlight[FlightKey, Entry | Missed] = SingleFlight()
        self._flight_keys = FlightKeys()
        self.writes = WriteBehind(remote.write_overlays, writes_max_bytes, timer, loops)
        self._remote = remote
        self._rows = RowReads(local, self.flights, self._flight_keys, remote, self.counters)
        self._timer = timer

    def peek(self, view: View, want: Want) -> Found | None:
        """The record if L1 has it, without awaiting; counts a hit, and leaves a miss to `get`."""
        entry = self.local.get(LocalKey(view.generation, want.table.name, want.key))
        if entry is None or not isinstance(found := judge(entry, want, "l1"), Found):
            return None
        self.counters.records += 1
        self.trace.one(view.generation, want, found)
        return found

    def look(self, view: View, want: Want) -> Found | None:
        """The record if L1 has it, for somebody who only looks: nothing is counted, and what goes first stays."""
        entry = self.local.look(LocalKey(view.generation, want.table.name, want.key))
        found = None if entry is None else judge(entry, want, "l1")
        return found if isinstance(found, Found) else None

    async def get(self, view: View, want: Want, deadline: float | None = None) -> Outcome:
        """The record, or why there is none; `deadline` is monotonic and this caller's own, None: L2's is enough."""
        key = LocalKey(view.generation, want.table.name, want.key)
        if (outcome := self._here(key, want)) is None:
            outcome = self._judged(key, await self._read_one(view, key, want, deadline), want)
        self._count(view, (want,), (outcome,))
        return outcome

    async def get_many(
        self, view: View, wants: Sequence[Want], deadline: float, *, is_counted: bool = True
    ) -> list[Outcome]:
        """Outcomes, one per want, in order; all that L1 lacks is read from L2 together."""
        if len(wants) == 1 and is_counted:
            return [await self.get(view, wants[0], deadline)]
        keys = [LocalKey(view.generation, want.table.name, want.key) for want in wants]
        outcomes = [self._here(key, want) for key, want in zip(keys, wants, strict=True)]
        missed = [place for place, outcome in enumerate(outcomes) if outcome is None]
        if absent := {place: (keys[place], wants[place]) for place in missed}:
            entries = await self._read(view, list(absent.values()), deadline)
            for (place, (key, want)), entry in zip(absent.items(), entries, strict=True):
                outcomes[place] = self._judged(key, entry, want)
        found = cast(list[Outcome], outcomes)
        if is_counted:
            self._count(view, wants, found)
        return found

    async def get_rows(self, view: View, wants: Wants, deadline: float | None) -> Rows:
        """Rows for entities of one table that the night knows; `deadline` None: L2's own deadline is enough."""
        rows = await self._rows.read(view, wants, self._within_s(deadline))
        for place, outcome in rows.others.items():
            if isinstance(outcome, Missed):
                key = LocalKey(view.generation, wants.table.name, wants.keys[place])
                rows.others[place] = self._judged(key, outcome, wants.one(place))
        self.counters.count_rows(rows.is_l2, rows.others)
        self.trace.rows(view.generation, wants, rows.others)
        return rows

    async def look_again(self, view: View, want: Want) -> Found | None:
        """The answer that another process may have stored for this very input since it was missed; L1 keeps it, too."""
        key = LocalKey(view.generation, want.table.name, want.key)
        if isinstance(found := self._here(key, want), Found):
            return found
        self.local.discard(key)  # an answer to another input, which a read would not replace
        entry = await self._read_one(view, key, want, None)
        if isinstance(entry, Entry):
            self.negative.discard(key)
        outcome = self._judged(key, entry, want)
        return outcome if isinstance(outcome, Found) else None

    def probe(self, view: View, want: Want, tell: Callable[[bool], None]) -> None:
        """Asks Redis whether it holds an answer to this very input; L1 learns nothing, `tell` only what Redis says."""
        self.counters.l2_reads += 1
        asked_at = self._timer()

        def keep(answers: Sequence[Answer]) -> None:
            if (answer := answers[0]) is None or isinstance(answer, Overlay):
                tell(answer is not None and is_answer(want, answer, asked_at))

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
        check_live(want, record)
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

    def _within_s(self, deadline: float | None) -> float | None:
        """Seconds that a caller has for L2; None if L2's own deadline is enough."""
        return None if deadline is None else deadline - self._timer()

    def _here(self, key: LocalKey, want: Want) -> Outcome | None:
        """The outcome without L2; None if L2 has to be asked."""
        if (entry := self.local.get(key)) is not None:
            return judge(entry, want, "l1")
        if want.here_only:
            return MISSED[MissReason.UNREAD]
        if want.position < 0 and key in self.negative:
            return MISSED[MissReason.NEGATIVE]
        return None

    def _judged(self, key: LocalKey, entry: Entry | Missed, want: Want) -> Outcome:
        """The outcome of a read of L2; a live answer kept beside the page counts only while that gives none."""
        if isinstance(entry, Entry):
            return judge(entry, want, "l2")
        if want.position < 0 or want.digest is None or entry.reason not in STANDS_IN:
            return entry
        kept = self.local.get(live_key(key, want.digest))
        outcome = entry if kept is None else judge(kept, want, "l1")
        if not isinstance(outcome, Found):
            return entry
        # Without a record of the night it is what is stored of this id, and no substitute.
        reason = entry.reason if entry.reason in OUTAGES else None
        return outcome._replace(reason=reason)

    async def _read_one(
        self, view: View, key: LocalKey, want: Want, deadline: float | None
    ) -> Entry | Missed:
        within_s = self._within_s(deadline)
        if within_s is None or within_s > 0:
            flight = self._flight_keys.of(view.generation, want)
            fetch = functools.partial(self._fetch_one, view, key, want)
            with contextlib.suppress(TimeoutError):
                return await self.flights.do(flight, fetch, within_s)
        return MISSED[MissReason.L2_TIMEOUT]

    async def _read(
        self, view: View, asked: Sequence[tuple[LocalKey, Want]], deadline: float
    ) -> Sequence[Entry | Missed]:
        within_s = self._within_s(deadline)
        if within_s is not None and within_s <= 0:
            return [MISSED[MissReason.L2_TIMEOUT]] * len(asked)
        flights = [self._flight_keys.of(view.generation, want) for _, want in asked]
        by_flight = dict(zip(flights, asked, strict=True))

        def work(new: Sequence[FlightKey]) -> asyncio.Future[list[Entry | Missed]]:
            return self._fetch(view, [by_flight[each] for each in new])

        try:
            # A flight ends within the tier's deadline; a caller's own, if shorter, ends nobody else's waiting.
            async with asyncio.timeout(within_s):
                return await self.flights.do_many(flights, work)
        except TimeoutError:
            return [MISSED[MissReason.L2_TIMEOUT]] * len(asked)

    def _fetch(
        self, view: View, asked: Sequence[tuple[LocalKey, Want]]
    ) -> asyncio.Future[list[Entry | Missed]]:
        self.counters.l2_reads += len(asked)
        # What is left of a life is left from then on: an answer that comes late must not make it longer.
        asked_at = self._timer()

        # L1 is filled inside the flight: a caller that comes after it finds the record, not a second read.
        def keep(answers: Sequence[Answer]) -> list[Entry | Missed]:
            return [
                self._keep(key, want, answer, asked_at)
                for (key, want), answer in zip(asked, answers, strict=True)
            ]

        return self._remote.submit(reads_of(view, [want for _, want in asked]), keep)

    def _fetch_one(self, view: View, key: LocalKey, want: Want) -> asyncio.Future[Entry | Missed]:
        self.counters.l2_reads += 1
        asked_at = self._timer()  # as for many
        return self._remote.submit(
            reads_of(view, (want,)), lambda answers: self._keep(key, want, answers[0], asked_at)
        )

    def _keep(self, key: LocalKey, want: Want, answer: Answer, asked_at: float) -> Entry | Missed:
        if type(answer) is bytes:
            if not is_answer_of(answer, want.fingerprint):
                return MISSED[unsound(answer, want.fingerprint)]
            entry: Entry | Missed = Entry(answer, want.fingerprint)
        elif isinstance(answer, TierUnavailable):
            return unavailable(answer)
        elif want.position >= 0:
            return MISSED[MissReason.PAGE_MISSING]
        # Written by this process while the read was under way: newer than what the read found.
        elif (newer := self.local.get(key)) is not None:
            return newer
        elif answer is None:
            self.negative.add(key)
            return MISSED[MissReason.NOT_IN_GENERATION]
        else:
            entry = overlay_entry(want, cast(Overlay, answer), asked_at)
        if isinstance(entry, Entry):
            self.local.put(key, entry)
        return entry
