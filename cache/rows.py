"""Many records of one table at once: one look at L1, one flight, one run of replies."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache.columns import Rows, Wants
from cache.commands import Answer, PageReads
from cache.errors import TierUnavailable
from cache.frames import Frames
from cache.keys import FORMAT
from cache.local import Entry, LocalKey, LocalTier
from cache.locating import page_reads
from cache.outcomes import MISSED, Counters, Missed, MissReason, Outcome, View, unavailable
from cache.records import peek_fingerprint
from cache.singleflight import SingleFlight

T = TypeVar("T")


class Remote(Protocol):
    """What is needed of L2."""

    def submit(self, reads: PageReads, keep: Callable[[Sequence[Answer]], T]) -> asyncio.Future[T]:
        """What `keep` makes of one answer per read."""


class Landed(Sequence[Entry | Missed]):
    """What a flight of many keys brought: as rows for who asked for them, one by one for who joined.

    `records[i]` means nothing where `missed` has `i`.
    """

    def __init__(
        self, rows: NDArray[Any], records: Sequence[bytes], missed: dict[int, Missed]
    ) -> None:
        self.rows = rows
        self.records = records
        self.missed = missed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Entry | Missed:  # type: ignore[override]
        if (missed := self.missed.get(index)) is not None:
            return missed
        record = self.records[index]
        return Entry(record, peek_fingerprint(record))


class RowReads:
    """Reads `Wants` through both tiers; its flights are those of single reads too."""

    def __init__(
        self,
        local: LocalTier,
        flights: SingleFlight[LocalKey, Entry | Missed],
        remote: Remote,
        counters: Counters,
    ) -> None:
        self._local = local
        self._flights = flights
        self._remote = remote
        self._counters = counters

    async def read(self, view: View, wants: Wants, left_s: float | None) -> Rows:
        """One row per want, or why there is none; None: the deadline of L2 itself is the caller's too."""
        keys = wants.local_keys(view.generation)
        entries = self._local.get_many(keys)
        absent = [place for place, entry in enumerate(entries) if entry is None]
        got = _Got(wants, [b"" if entry is None else entry.record for entry in entries])
        if not absent:
            return got.rows()
        got.is_l2[absent] = True
        if len(absent) == len(keys):
            asked, names = wants, keys
        else:
            asked, names = wants.of(absent), [keys[place] for place in absent]

        def work(new: Sequence[int]) -> asyncio.Future[Sequence[Entry | Missed]]:
            return self._fetch(view, asked.of(new), [names[place] for place in new])

        try:
            new, landed, others = await self._wait(names, work, left_s)
        except TimeoutError:
            got.missed.update(dict.fromkeys(absent, MISSED[MissReason.L2_TIMEOUT]))
            return got.rows()
        if not isinstance(landed, Landed):
            others.update(zip(new, landed, strict=True))
        elif len(new) == len(keys):
            return Rows(landed.rows, got.is_l2, dict(landed.missed))
        else:
            for place, record in zip(new, landed.records, strict=True):
                got.records[absent[place]] = record
            for index, missed in landed.missed.items():
                got.missed[absent[new[index]]] = missed
        for place, entry in others.items():
            if type(entry) is Missed:
                got.missed[absent[place]] = entry
            else:
                got.records[absent[place]] = entry.record  # type: ignore[union-attr]
        return got.rows()

    async def _wait(
        self,
        keys: Sequence[LocalKey],
        work: Callable[[Sequence[int]], asyncio.Future[Sequence[Entry | Missed]]],
        left_s: float | None,
    ) -> tuple[Sequence[int], Sequence[Entry | Missed], dict[int, Entry | Missed]]:
        if left_s is None:
            return await self._flights.do_batch(keys, work)
        if left_s <= 0:
            raise TimeoutError
        async with asyncio.timeout(left_s):
            return await self._flights.do_batch(keys, work)

    def _fetch(
        self, view: View, wants: Wants, keys: Sequence[LocalKey]
    ) -> asyncio.Future[Sequence[Entry | Missed]]:
        self._counters.l2_reads += len(keys)

        def keep(answers: Sequence[Answer]) -> Sequence[Entry | Missed]:
            landed = _landed(wants, answers)
            # L1 is filled inside the flight: a caller that comes after it finds the record, not a second read.
            self._fill(keys, wants, landed)
            return landed

        return self._remote.submit(page_reads(view, wants), keep)

    def _fill(self, keys: Sequence[LocalKey], wants: Wants, landed: Landed) -> None:
        if not self._local.takes(wants.table.layout.size_bytes):
            self._local.too_large += len(keys) - len(landed.missed)
            return
        prints = wants.fingerprints.tolist()
        put, missed = self._local.put, landed.missed
        for place, record in enumerate(landed.records):
            if place not in missed:
                put(keys[place], Entry(record, prints[place]))


class _Got:
    """The records of a batch as they come together from both tiers."""

    def __init__(self, wants: Wants, records: list[bytes]) -> None:
        self.records = records
        self.is_l2 = np.zeros(len(records), bool)
        self.missed: dict[int, Outcome] = {}
        self._wants = wants

    def rows(self) -> Rows:
        """All of them, each checked to be its entity's."""
        layout = self._wants.table.layout
        for place in self.missed:
            self.records[place] = bytes(layout.size_bytes)
        rows = np.frombuffer(b"".join(self.records), layout.dtype)
        for place in np.flatnonzero(rows["fingerprint"] != self._wants.fingerprints).tolist():
            self.missed.setdefault(place, MISSED[MissReason.CORRUPT])
        return Rows(rows, self.is_l2, self.missed)


def _landed(wants: Wants, answers: Sequence[Answer]) -> Landed:
    """Answers as rows, each of them checked to be its entity's."""
    layout = wants.table.layout
    missed: dict[int, Missed] = {}
    if isinstance(answers, Frames):
        rows, records = answers.rows(layout.dtype), answers.payloads()
    else:
        blank = bytes(layout.size_bytes)
        records = [each if isinstance(each, bytes) else blank for each in answers]
        rows = np.frombuffer(b"".join(records), layout.dtype)
        for place, each in enumerate(answers):
            if isinstance(each, TierUnavailable):
                missed[place] = unavailable(each)
            elif not isinstance(each, bytes):
                missed[place] = MISSED[MissReason.PAGE_MISSING]
    sound = (rows["fingerprint"] == wants.fingerprints) & (rows["flags"] >> 4 == FORMAT)
    if not sound.all():
        for place in np.flatnonzero(~sound).tolist():
            missed.setdefault(place, MISSED[MissReason.CORRUPT])
    return Landed(rows, records, missed)
