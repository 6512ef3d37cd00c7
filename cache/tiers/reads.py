"""Reads of the tiers as values: record keys, commands for L2, checks of replies, outcomes and counters."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import repeat
from typing import Any, Literal, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from cache.errors import TierUnavailable
from cache.format.directory import Directory
from cache.format.manifest import Table
from cache.format.redis_keys import hash_hex
from cache.l2.commands import Overlay, OverlayRead, PageRead, PageReads, Read
from cache.records import RECORD_FORMAT, is_absent, is_live, peek_fingerprint, peek_format, unpack_overlay
from cache.tiers.l1 import Entry, LocalKey

Tier = Literal["l1", "l2"]
"""Tiers: this process and Redis."""

FlightKey = int | tuple[int, bytes]
_NUMBERED_TABLES_MAX = 4_096


class DescribedEnum(StrEnum):
    """Enumeration of the words of an answer field, each with its `meaning` in a sentence for documents."""

    meaning: str

    def __new__(cls, label: str, meaning: str, *_: object) -> Self:
        """Make a member that equals its word."""
        member = str.__new__(cls, label)
        member._value_ = label
        member.meaning = meaning
        return member


@dataclass(frozen=True, slots=True, kw_only=True)
class MissTraits:
    """Properties of a reason of a miss, by which the tiers, the ladder and the counts decide."""

    is_internal: bool = False
    """Answers, metrics and explanations say `not_in_generation`, and not how the absence was found."""
    is_nowhere: bool = False
    """The night did not know the id, and nothing is stored for it."""
    is_outage: bool = False
    """The nightly record exists but is out of reach for a while."""
    allows_stand_in: bool = False
    """An entity with a nightly position may for a while have a live answer of L1 instead."""
    is_looked_up: bool = False
    """A lookup missed, whose input may be one that live computed a moment ago."""
    is_shared: bool = False
    """Another process may have the miss at this moment, too, and the answer is stored for both.

    Not `fresh` and `too_old`: a stored answer of another process may be older than requested.
    """
    allows_stored: bool = False
    """A stored record is still an answer if live has none."""
    has_stored_answer: bool = False
    """A request for a fresh answer was given a stored one: no miss."""
    holds_for_previous: bool = False
    """The reason holds for the previous generation as well."""


_OUTAGE = MissTraits(is_outage=True, allows_stand_in=True)


class MissReason(DescribedEnum):
    """Reasons why an answer is no plain hit, the tiers' own first; each miss has exactly one.

    `public` is the reason in answers, metrics and explanations.
    """

    traits: MissTraits
    public: "MissReason"

    def __init__(self, _label: str, _meaning: str, traits: MissTraits = MissTraits()) -> None:
        self.traits = traits

    NOT_IN_GENERATION = (
        "not_in_generation",
        "The generation has no record of this id in this table, and no live answer to it is stored",
        MissTraits(is_nowhere=True, allows_stand_in=True, is_looked_up=True, is_shared=True),
    )
    NEGATIVE = (
        "negative",
        "The same, remembered from another request",
        MissTraits(is_internal=True, is_nowhere=True, is_looked_up=True, is_shared=True),
    )
    UNREAD = (
        "overlay_unread",
        "The same, and a stored live answer was not looked for",
        MissTraits(is_internal=True, is_nowhere=True, is_looked_up=True),
    )
    EXPIRED = ("expired", "The stored live answer to this id has ended", MissTraits(is_looked_up=True, is_shared=True))
    INPUT_CHANGED = (
        "input_changed",
        "The stored live answer was computed from another input",
        MissTraits(is_looked_up=True, is_shared=True),
    )
    PAGE_MISSING = "page_missing", "The page of its record is not in Redis", _OUTAGE
    CORRUPT = "corrupt", "Its record in Redis is damaged", _OUTAGE
    L2_TIMEOUT = "l2_timeout", "Redis did not answer in time, or the deadline left it none", _OUTAGE
    L2_DOWN = "l2_down", "Redis cannot be reached", _OUTAGE
    BREAKER_OPEN = ("breaker_open", "Redis failed several times and is not asked for a moment", _OUTAGE)

    NEWER_EVENTS = ("newer_events", "The user has newer events, and no answer that counts them is stored yet")
    FRESH = "fresh", "A fresh answer was demanded"
    TOO_OLD = ("too_old", "What is stored is older than `max_age_seconds`", MissTraits(allows_stored=True))
    EXHAUSTED = (
        "exhausted",
        "Nothing of a list is left without what is excluded, or fewer than k where live has more; see `short`, too",
        MissTraits(allows_stored=True, holds_for_previous=True),
    )
    FILTERED = (
        "filtered",
        "Fewer than k of the list pass the filter, and no vector to search by could be had, or no time was left",
    )
    ENTITY_BLOCKED = ("entity_blocked", "The id itself is on the blocklist", MissTraits(holds_for_previous=True))
    INTERNAL_ERROR = "internal_error", "The service failed on this id, and has logged why"

    NOTHING_TO_COMPUTE_FROM = (
        "nothing_to_compute_from",
        "A fresh answer was demanded and nothing was sent to compute it from: this is what is stored",
        MissTraits(has_stored_answer=True),
    )
    FRESH_UNAVAILABLE = (
        "fresh_unavailable",
        "A fresh answer was demanded and live has none (`live` says why): this is what is stored",
        MissTraits(has_stored_answer=True),
    )


for _reason in MissReason:
    _reason.public = MissReason.NOT_IN_GENERATION if _reason.traits.is_internal else _reason


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """Fields of a snapshot that a read needs, captured once per request."""

    generation: str
    directories: Mapping[str, Directory]


class RecordKey(NamedTuple):
    """Request for one entity's record in one table.

    `key` is the hash of the id, or the 16-byte digest of an id-less input; `position` is -1 when the night did not
    know it; `digest` is that of the input the caller sent, None if it sent none; `skips_overlay`: if L1 lacks the
    record, do not read the overlay.
    """

    table: Table
    key: int | bytes
    fingerprint: int
    position: int
    digest: bytes | None = None
    skips_overlay: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RecordKeys:
    """Entities that the night knows, of callers that sent no input; the columns of as many `RecordKey`s.

    `positions` are int64[n], none of them negative; `fingerprints` uint64[n].
    """

    table: Table
    keys: Sequence[int]
    fingerprints: NDArray[np.uint64]
    positions: NDArray[np.int64]
    digest: bytes | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def local_keys(self, generation: str) -> list[LocalKey]:
        """Return the keys in L1: plain tuples, which are equal to and hash like the named ones."""
        key_tuples = zip(repeat(generation), repeat(self.table.name), self.keys)
        return cast(list[LocalKey], list(key_tuples))

    def select(self, indexes: Sequence[int]) -> "RecordKeys":
        """Return the record keys at `indexes`, as columns."""
        if len(indexes) == len(self.keys):
            return self
        keys = [self.keys[index] for index in indexes]
        index_array = np.array(indexes, np.intp)
        return RecordKeys(self.table, keys, self.fingerprints[index_array], self.positions[index_array], self.digest)

    def record_key_at(self, index: int) -> RecordKey:
        """Return the record key at `index`."""
        fingerprint, position = int(self.fingerprints[index]), int(self.positions[index])
        digest = self.digest if position >= 0 else None
        return RecordKey(self.table, self.keys[index], fingerprint, position, digest)


class Hit(NamedTuple):
    """Record with the expected fingerprint; `expires_at` (monotonic) is None for a record of the night.

    `reason` is set if this record stands in for one of the night that is out of reach for a while.
    """

    record: bytes
    tier: Tier
    is_live: bool
    expires_at: float | None
    reason: MissReason | None = None


class Miss(NamedTuple):
    """Miss: no stored answer, and the reason."""

    reason: MissReason


ReadResult = Hit | Miss


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that a read of `RecordKeys` returned, in their order.

    `records` are of the table's dtype, with the expected fingerprint; those at the positions in `result_by_index` mean
    nothing. `is_l2`: bool[n], False if the row is from L1.
    """

    records: NDArray[Any]
    is_l2: NDArray[np.bool_]
    result_by_index: dict[int, ReadResult]


MISS_BY_REASON = {reason: Miss(reason) for reason in MissReason}

_MISS_BY_L2_REASON = {
    "timeout": MISS_BY_REASON[MissReason.L2_TIMEOUT],
    "connection": MISS_BY_REASON[MissReason.L2_DOWN],
    "breaker_open": MISS_BY_REASON[MissReason.BREAKER_OPEN],
}


def judge_entry(entry: Entry, record_key: RecordKey, tier: Tier) -> ReadResult:
    """Check a tier's entry against the record key: a hit, corrupt, or computed from another input."""
    if entry.fingerprint != record_key.fingerprint:
        return MISS_BY_REASON[MissReason.CORRUPT]
    # Whoever sent nothing may have what is stored; whoever sent something gets an answer to that.
    if entry.digest is not None and record_key.digest is not None and entry.digest != record_key.digest:
        return MISS_BY_REASON[MissReason.INPUT_CHANGED]
    return Hit(entry.record, tier, entry.digest is not None, entry.expires_at)


def overlay_entry(record_key: RecordKey, overlay: Overlay, asked_at: float) -> Entry | Miss:
    """Convert an overlay requested at `asked_at` (monotonic) to an entry, or to the reason of a miss."""
    record_and_digest = unpack_overlay(record_key.table.layout, overlay.payload)
    if record_and_digest is None or peek_format(record_and_digest[0]) != RECORD_FORMAT:
        return MISS_BY_REASON[MissReason.CORRUPT]
    if overlay.ttl_s <= 0:
        return MISS_BY_REASON[MissReason.EXPIRED]
    record, digest = record_and_digest
    if peek_fingerprint(record) != record_key.fingerprint:
        return MISS_BY_REASON[MissReason.CORRUPT]
    return Entry(record, record_key.fingerprint, digest, asked_at + overlay.ttl_s)


def is_overlay_answer(record_key: RecordKey, overlay: Overlay, asked_at: float) -> bool:
    """True if an overlay requested at `asked_at` (monotonic) holds an answer to exactly this input."""
    entry = overlay_entry(record_key, overlay, asked_at)
    return isinstance(entry, Entry) and isinstance(judge_entry(entry, record_key, "l2"), Hit)


def live_key(key: LocalKey, digest: bytes) -> LocalKey:
    """Return the key in L1 of a live answer to this input, kept in addition to the record of the night."""
    raw_key = key.key if isinstance(key.key, bytes) else key.key.to_bytes(8, "little")
    return key._replace(key=raw_key + digest)


def check_live_record(record_key: RecordKey, record: bytes) -> None:
    """Raise ValueError unless this is a complete live record of the requested entity."""
    size_bytes = record_key.table.layout.size_bytes
    if len(record) != size_bytes:
        raise ValueError(f"a record of {record_key.table.name} has {size_bytes} bytes, not {len(record)}")
    if peek_fingerprint(record) != record_key.fingerprint or not is_live(record):
        raise ValueError(f"not a live record of the wanted entity in {record_key.table.name}")


def unsound_reason(record: bytes, fingerprint: int) -> MissReason:
    """Return the reason why a page's record is no answer: the night had none for this entity, or it is corrupt."""
    was_absent = is_absent(record, fingerprint)
    return MissReason.NOT_IN_GENERATION if was_absent else MissReason.CORRUPT


def unavailable_miss(error: TierUnavailable) -> Miss:
    """Return the miss for a read that L2 could not answer."""
    return _MISS_BY_L2_REASON[str(error.details["reason"])]


def reads_of(view: SnapshotView, record_keys: Sequence[RecordKey]) -> list[Read]:
    """Return one read of L2 per record key, in order; consecutive keys of a table share its lookup."""
    reads: list[Read] = []
    table: Table | None = None
    table_name, size_bytes, records_per_page = "", 0, 1
    for record_key in record_keys:
        if record_key.table is not table:
            table = record_key.table
            table_name, size_bytes = table.name, table.layout.size_bytes
            records_per_page, parts = table.records_per_page, table.parts
            locate = view.directories[table.entity].locate
        if record_key.position < 0:
            reads.append(OverlayRead(view.generation, table_name, hash_hex(record_key.key)))
            continue
        part_index, position = locate(record_key.position)
        page_number, slot_in_page = divmod(position, records_per_page)
        page_number += parts[part_index].first_page
        reads.append(PageRead(view.generation, table_name, page_number, slot_in_page * size_bytes, size_bytes))
    return reads


def page_reads(view: SnapshotView, record_keys: RecordKeys) -> PageReads:
    """Return the reads of the records by page and offset, one per record key."""
    table = record_keys.table
    size_bytes = table.layout.size_bytes
    first_pages = np.array([part.first_page for part in table.parts], np.int64)
    directory = view.directories[table.entity]
    page_numbers, offsets = directory.page_locations(
        record_keys.positions, first_pages, table.records_per_page, size_bytes
    )
    return PageReads(view.generation, table.name, page_numbers, offsets, size_bytes)


class FlightKeys:
    """Integer keys of reads under way, which cost a dictionary a fraction of what tuples do.

    Tables of generations are numbered, and the records in them from there on: no two records share a key.
    """

    def __init__(self) -> None:
        self._offset_by_table: dict[tuple[str, str], int] = {}
        self._table_numbers = itertools.count(1)

    def start(self, generation: str, table: str) -> int:
        """Return the table's offset for 64-bit hashes; a forgotten table gets a new one, never another table's."""
        table_offset = self._offset_by_table.get((generation, table))
        if table_offset is None:
            if len(self._offset_by_table) >= _NUMBERED_TABLES_MAX:
                self._offset_by_table.clear()
            table_offset = self._offset_by_table[generation, table] = next(self._table_numbers) << 64
        return table_offset

    def of(self, generation: str, record_key: RecordKey) -> FlightKey:
        """Return the key of one record."""
        table_offset, key = self.start(generation, record_key[0].name), record_key.key
        return table_offset + key if isinstance(key, int) else (table_offset, key)


@dataclass(slots=True)
class Counters:
    """Counters of reads: every requested record is counted once, in `l1`, `l2_records` or one of `misses_by_reason`.

    `l1` sums records found there, `l1_records`, and ready answers, `ready_answers`. Ready answers are counted in
    batches: `add_pending` adds the pending ones.
    """

    l1_records: int = 0
    ready_answers: int = 0
    l2_records: int = 0
    misses_by_reason: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    l2_reads: int = 0
    add_pending: Callable[[], None] = lambda: None

    def count(self, outcomes: Sequence[ReadResult]) -> None:
        """Add one request's outcomes."""
        for outcome in outcomes:
            if type(outcome) is Miss:
                self.misses_by_reason[outcome.reason] += 1
            elif outcome.tier == "l1":  # type: ignore[union-attr]
                self.l1_records += 1
            else:
                self.l2_records += 1

    def count_rows(self, is_l2: NDArray[np.bool_], result_by_index: Mapping[int, ReadResult]) -> None:
        """Add rows by their tier; rows at the positions in `result_by_index` count by their outcomes."""
        l2_count = int(np.count_nonzero(is_l2)) - sum(bool(is_l2[index]) for index in result_by_index)
        self.l2_records += l2_count
        self.l1_records += len(is_l2) - l2_count - len(result_by_index)
        self.count(list(result_by_index.values()))

    @property
    def l1(self) -> int:
        """Number of records and ready answers from L1."""
        return self.l1_records + self.ready_answers

    @property
    def total(self) -> int:
        """Number of all outcomes."""
        return self.l1 + self.l2_records + sum(self.misses_by_reason.values())
