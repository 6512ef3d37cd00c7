"""Batch reads of many records of one table: one look at L1, one flight, one run of replies."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache.errors import TierUnavailable
from cache.format.keys import FORMAT
from cache.format.records import peek_fingerprint
from cache.l2.commands import Answer, PageReads
from cache.l2.replies import Frames
from cache.native import loader
from cache.tiers.addressing import FlightKey, FlightKeys, page_reads
from cache.tiers.batches import Rows, Wants
from cache.tiers.l1 import Entry, LocalTier
from cache.tiers.results import (
    MISSED,
    Counters,
    Missed,
    MissReason,
    Outcome,
    View,
    unavailable,
    unsound,
)
from cache.tiers.singleflight import SingleFlight

T = TypeVar("T")


class PageSource(Protocol):
    """L2 as far as batch reads need it."""

    def submit(self, reads: PageReads, keep: Callable[[Sequence[Answer]], T]) -> asyncio.Future[T]:
        """A future of what `keep` makes of the answers, one per read."""


class Landed(Sequence[Entry | Missed]):
    """Records that a flight of many keys brought: as rows for who asked for them, one by one for who joined.

    `rows[i]` means nothing where `missed` has `i`.
    """

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
        flights: SingleFlight[FlightKey, Entry | Missed],
        flight_keys: FlightKeys,
        remote: PageSource,
        counters: Counters,
    ) -> None:
        self._local = local
        self._flights = flights
        self._flight_keys = flight_keys
        self._remote = remote
        self._counters = counters

    async def read(self, view: View, wants: Wants, left_s: float | None) -> Rows:
        """Rows, one per want, or why there is none; `left_s` None: the deadline of L2 itself is the caller's too."""
        entries = self._local.get_many(wants.local_keys(view.generation)) if self._local else ()
        if not any(entries):
            return await self._read(view, wants, left_s)
        absent = [place for place, entry in enumerate(entries) if entry is None]
        if not absent:
            return _checked(wants, _rows_of(wants, [entry.record for entry in entries if entry]))
        there = [place for place, entry in enumerate(entries) if entry is not None]
        read = await self._read(view, wants.of(absent), left_s)
        records = np.empty(len(wants), wants.table.layout.dtype)
        _put(records, there, _rows_of(wants, [entry.record for entry in entries if entry]))
        _put(records, absent, read.records)
        rows = _checked(wants, records)
        rows.is_l2[absent] = True
        for place, other in read.others.items():
            rows.others[absent[place]] = other
        return rows

    async def _read(self, view: View, wants: Wants, left_s: float | None) -> Rows:
        """Rows from L2 alone; L2_TIMEOUT for all of them when `left_s` is over."""

        def work(new: Sequence[int]) -> asyncio.Future[Sequence[Entry | Missed]]:
            return self._fetch(view, wants.of(new))

        is_l2 = np.ones(len(wants), bool)
        start = self._flight_keys.start(view.generation, wants.table.name)
        try:
            new, landed, others = await self._wait(
                list(map(start.__add__, wants.keys)), work, left_s
            )
        except TimeoutError:
            late = dict.fromkeys(range(len(wants)), MISSED[MissReason.L2_TIMEOUT])
            return Rows(np.zeros(len(wants), wants.table.layout.dtype), is_l2, {**late})
        if type(landed) is not Landed:
            others.update(zip(new, landed, strict=True))
        elif len(new) == len(wants):
            return Rows(landed.rows, is_l2, {**landed.missed})
        missed: dict[int, Outcome] = {}
        joined: dict[int, bytes] = {}
        prints = wants.fingerprints
        own: Landed | None = None
        if type(landed) is Landed:
            own = landed
            missed = {new[index]: each for index, each in landed.missed.items()}
        for place, entry in others.items():
            if isinstance(entry, Missed):
                missed[place] = entry
            elif entry.fingerprint != prints.item(place):
                missed[place] = MISSED[MissReason.CORRUPT]
            else:
                joined[place] = entry.record
        return Rows(_spread(wants, own, new, joined), is_l2, missed)

    async def _wait(
        self,
        keys: Sequence[FlightKey],
        work: Callable[[Sequence[int]], asyncio.Future[Sequence[Entry | Missed]]],
        left_s: float | None,
    ) -> tuple[Sequence[int], Sequence[Entry | Missed], dict[int, Entry | Missed]]:
        if left_s is None:
            return await self._flights.do_batch(keys, work)
        if left_s <= 0:
            raise TimeoutError
        async with asyncio.timeout(left_s):
            return await self._flights.do_batch(keys, work)

    def _fetch(self, view: View, wants: Wants) -> asyncio.Future[Sequence[Entry | Missed]]:
        self._counters.l2_reads += len(wants)

        def keep(answers: Sequence[Answer]) -> Sequence[Entry | Missed]:
            landed = _landed(wants, answers)
            # L1 is filled inside the flight: a caller that comes after it finds the record, not a second read.
            self._fill(view, wants, landed, answers)
            return landed

        return self._remote.submit(page_reads(view, wants), keep)

    def _fill(self, view: View, wants: Wants, landed: Landed, answers: Sequence[Answer]) -> None:
        missed = landed.missed
        if not self._local.takes(wants.table.layout.size_bytes):
            self._local.too_large += len(wants) - len(missed)
            return
        prints, keys = wants.fingerprints.tolist(), wants.local_keys(view.generation)
        records: Sequence[Any] = answers.payloads() if isinstance(answers, Frames) else answers
        if missed:
            there = [place for place in range(len(wants)) if place not in missed]
            prints = [prints[place] for place in there]
            keys, records = [keys[place] for place in there], [records[place] for place in there]
        self._local.fill(keys, records, prints)


def _rows_of(wants: Wants, records: Sequence[bytes]) -> NDArray[Any]:
    return np.frombuffer(b"".join(records), wants.table.layout.dtype)


def _put(records: NDArray[Any], places: Sequence[int], rows: NDArray[Any]) -> None:
    """`records[places] = rows`, without looking at the fields."""
    whole = np.dtype((np.void, records.itemsize))
    records.view(whole)[np.asarray(places, np.intp)] = rows.view(whole)


def _spread(
    wants: Wants, landed: Landed | None, new: Sequence[int], joined: dict[int, bytes]
) -> NDArray[Any]:
    """Records of this flight at the places `new`, of others at theirs; else zeros."""
    dtype = wants.table.layout.dtype
    columns = loader.columns()
    if columns is not None and landed is not None and type(new) is list:
        found = columns.spread(len(wants), dtype.itemsize, landed.rows, new, joined)
        return np.frombuffer(found, dtype)
    records = np.zeros(len(wants), dtype)
    if landed is not None:
        _put(records, new, landed.rows)
    if joined:
        _put(records, list(joined), _rows_of(wants, list(joined.values())))
    return records


def _checked(wants: Wants, records: NDArray[Any]) -> Rows:
    """Rows of L1 and of other flights, corrupt where a record is not its entity's."""
    others: dict[int, Outcome] = {}
    is_own = records["fingerprint"] == wants.fingerprints
    if np.count_nonzero(is_own) < len(is_own):
        others = dict.fromkeys(np.flatnonzero(~is_own).tolist(), MISSED[MissReason.CORRUPT])
    return Rows(records, np.zeros(len(wants), bool), others)


def _landed(wants: Wants, answers: Sequence[Answer]) -> Landed:
    """Answers as rows, each of them checked to be its entity's."""
    layout = wants.table.layout
    missed: dict[int, Missed] = {}
    if type(answers) is Frames:
        found = answers.sound(layout.dtype, wants.fingerprints, FORMAT)
        if found is not None:
            return Landed(found, missed)
        rows = answers.rows(layout.dtype)
    else:
        blank = bytes(layout.size_bytes)
        rows = _rows_of(wants, [each if isinstance(each, bytes) else blank for each in answers])
        for place, each in enumerate(answers):
            if isinstance(each, TierUnavailable):
                missed[place] = unavailable(each)
            elif not isinstance(each, bytes):
                missed[place] = MISSED[MissReason.PAGE_MISSING]
    sound = (rows["fingerprint"] == wants.fingerprints) & (rows["flags"] >> 4 == FORMAT)
    if np.count_nonzero(sound) < len(sound):
        for place in np.flatnonzero(~sound).tolist():
            record, mark = rows[place].tobytes(), wants.fingerprints.item(place)
            missed.setdefault(place, MISSED[unsound(record, mark)])
    return Landed(rows, missed)
