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
    """What a flight of many keys brought: as rows for who asked for them, one by one for who joined."""

    def __init__(self, rows: NDArray[Any], missed: dict[int, Missed]) -> None:
        self.rows = rows
        self.missed = missed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Entry | Missed:  # type: ignore[override]
        if (missed := self.missed.get(index)) is not None:
            return missed
        record = self.rows[index].tobytes()
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
        entries: list[Entry | Missed | None] = list(self._local.get_many(keys))
        absent = [place for place, entry in enumerate(entries) if entry is None]
        is_l2 = np.zeros(len(wants), bool)
        if not absent:
            return _rows(wants, entries, is_l2)
        is_l2[absent] = True
        asked, names = wants.of(absent), [keys[place] for place in absent]

        def work(new: Sequence[int]) -> asyncio.Future[Sequence[Entry | Missed]]:
            return self._fetch(view, asked.of(new), [names[place] for place in new])

        try:
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(left_s):
                new, landed, others = await self._flights.do_batch(names, work)
        except TimeoutError:
            for place in absent:
                entries[place] = MISSED[MissReason.L2_TIMEOUT]
            return _rows(wants, entries, is_l2)
        if len(new) == len(wants) and isinstance(landed, Landed):
            return Rows(landed.rows, is_l2, dict(landed.missed))
        for index, place in enumerate(new):
            entries[absent[place]] = landed[index]
        for place, entry in others.items():
            entries[absent[place]] = entry
        return _rows(wants, entries, is_l2)

    def _fetch(
        self, view: View, wants: Wants, keys: Sequence[LocalKey]
    ) -> asyncio.Future[Sequence[Entry | Missed]]:
        self._counters.l2_reads += len(keys)

        def keep(answers: Sequence[Answer]) -> Sequence[Entry | Missed]:
            landed = _landed(wants, answers)
            # L1 is filled inside the flight: a caller that comes after it finds the record, not a second read.
            self._fill(keys, wants, landed, answers)
            return landed

        return self._remote.submit(page_reads(view, wants), keep)

    def _fill(
        self, keys: Sequence[LocalKey], wants: Wants, landed: Landed, answers: Sequence[Answer]
    ) -> None:
        if not self._local.takes(wants.table.layout.size_bytes):
            self._local.too_large += len(keys) - len(landed.missed)
            return
        records = answers.payloads() if isinstance(answers, Frames) else answers
        prints = wants.fingerprints.tolist()
        put, missed = self._local.put, landed.missed
        for place, record in enumerate(records):
            if place not in missed:
                put(keys[place], Entry(record, prints[place]))  # type: ignore[arg-type]


def _landed(wants: Wants, answers: Sequence[Answer]) -> Landed:
    """Answers as rows, each of them checked to be its entity's."""
    layout = wants.table.layout
    missed: dict[int, Missed] = {}
    if isinstance(answers, Frames):
        rows = answers.rows(layout.dtype)
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
    return Landed(rows, missed)


def _rows(wants: Wants, entries: Sequence[Entry | Missed | None], is_l2: NDArray[np.bool_]) -> Rows:
    layout = wants.table.layout
    blank = bytes(layout.size_bytes)
    records = [each.record if type(each) is Entry else blank for each in entries]
    rows = np.frombuffer(b"".join(records), layout.dtype)
    others: dict[int, Outcome] = {
        place: each for place, each in enumerate(entries) if type(each) is Missed
    }
    for place in np.flatnonzero(rows["fingerprint"] != wants.fingerprints).tolist():
        others.setdefault(place, MISSED[MissReason.CORRUPT])
    return Rows(rows, is_l2, others)
