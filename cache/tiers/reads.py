"""Reads of the tiers as values: record keys, commands for L2, checks of replies, results and counters."""

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
"""Tier that answered: this process or Redis."""

FlightKey = int | tuple[int, bytes]
_NUMBERED_TABLES_MAX = 4_096


class DescribedEnum(StrEnum):
    """Enumeration of the values of an answer field, each with its `meaning` as a sentence for documents."""

    meaning: str

    def __new__(cls, label: str, meaning: str, *_: object) -> Self:
        """Create a member that equals its label."""
        member = str.__new__(cls, label)
        member._value_ = label
        member.meaning = meaning
        return member


@dataclass(frozen=True, slots=True, kw_only=True)
class MissTraits:
    """Properties of a miss reason, on which the tiers, the ladder and the counts depend."""

    is_internal: bool = False
    """Answers, metrics and explanations say `not_in_generation` instead."""
    is_nowhere: bool = False
    """The night did not know the id, and no record of it is stored."""
    is_outage: bool = False
    """The nightly record exists but is temporarily unavailable."""
    allows_stand_in: bool = False
    """A live answer in L1 may temporarily replace the nightly record of an entity."""
    is_looked_up: bool = False
    """A lookup missed; the live model may recently have computed an answer for the same input."""
    is_shared: bool = False
    """Another process may have the same miss at this moment, and the answer is stored for both.

    False for `fresh` and `too_old`: a stored answer of another process may be older than requested.
    """
    allows_stored: bool = False
    """A stored record may still be answered if the live model has no answer."""
    has_stored_answer: bool = False
    """Not a miss: a request for a fresh answer received a stored one."""
    holds_for_previous: bool = False
    """The reason applies to the previous generation as well."""


_OUTAGE = MissTraits(is_outage=True, allows_stand_in=True)


class MissReason(DescribedEnum):
    """Reasons why an answer is not a simple hit, those of the tiers first; each miss has exactly one.

    `public_reason` is the reason in answers, metrics and explanations.
    """

    traits: MissTraits
    public_reason: "MissReason"

    def __init__(self, _label: str, _meaning: str, traits: MissTraits = MissTraits()) -> None:
        self.traits = traits

    NOT_IN_GENERATION = (
        "not_in_generation",
        "The generation has no record of this id in this table, and no live answer to it is stored",
        MissTraits(is_nowhere=True, allows_stand_in=True, is_looked_up=True, is_shared=True),
    )
    NEGATIVE = (
        "negative",
        "Like `not_in_generation`, remembered from another request",
        MissTraits(is_internal=True, is_nowhere=True, is_looked_up=True, is_shared=True),
    )
    UNREAD = (
        "overlay_unread",
        "Like `not_in_generation`, without a lookup of stored live answers",
        MissTraits(is_internal=True, is_nowhere=True, is_looked_up=True),
    )
    EXPIRED = (
        "expired",
        "The stored live answer to this id has expired",
        MissTraits(is_looked_up=True, is_shared=True),
    )
    INPUT_CHANGED = (
        "input_changed",
        "The stored live answer was computed from another input",
        MissTraits(is_looked_up=True, is_shared=True),
    )
    PAGE_MISSING = "page_missing", "The page of its record is not in Redis", _OUTAGE
    CORRUPT = "corrupt", "Its record in Redis is damaged", _OUTAGE
    L2_TIMEOUT = "l2_timeout", "Redis did not answer in time, or the deadline left no time to ask it", _OUTAGE
    L2_DOWN = "l2_down", "Redis cannot be reached", _OUTAGE
    BREAKER_OPEN = ("breaker_open", "Redis failed several times in a row and is not asked for a short time", _OUTAGE)

    NEWER_EVENTS = ("newer_events", "The user has newer events, and no answer that includes them is stored yet")
    FRESH = "fresh", "A fresh answer was requested"
    TOO_OLD = ("too_old", "The stored answer is older than `max_age_seconds`", MissTraits(allows_stored=True))
    EXHAUSTED = (
        "exhausted",
        "Exclusions leave nothing, or fewer than k items where live has more; a record of the night is then `short`",
        MissTraits(allows_stored=True, holds_for_previous=True),
    )
    FILTERED = (
        "filtered",
        "Fewer than k items of the list pass the filter, and there was no vector to search by, or no time left",
    )
    ENTITY_BLOCKED = ("entity_blocked", "The id itself is on the blocklist", MissTraits(holds_for_previous=True))
    INTERNAL_ERROR = "internal_error", "The service failed on this id and has logged the error"

    NOTHING_TO_COMPUTE_FROM = (
        "nothing_to_compute_from",
        "A fresh answer was requested, but no input was sent to compute it from: this is the stored answer",
        MissTraits(has_stored_answer=True),
    )
    FRESH_UNAVAILABLE = (
        "fresh_unavailable",
        "A fresh answer was requested, but live has none (`live` says why): this is the stored answer",
        MissTraits(has_stored_answer=True),
    )


for _reason in MissReason:
    _reason.public_reason = MissReason.NOT_IN_GENERATION if _reason.traits.is_internal else _reason


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """Fields of a snapshot that a read needs; captured once per request."""

    generation: str
    directories: Mapping[str, Directory]


class RecordKey(NamedTuple):
    """Request for one entity's record in one table.

    `hash_or_digest` is the hash of the id, or the 16-byte digest of an input without id. `directory_position` is -1 if
    the night did not know the id. `input_digest` is that of the caller's input, None without one. `skips_overlay`: if
    L1 lacks the record, do not read the overlay.
    """

    table: Table
    hash_or_digest: int | bytes
    fingerprint: int
    directory_position: int
    input_digest: bytes | None = None
    skips_overlay: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RecordKeys:
    """Entities that the night knows, for callers without an input; the columns of `RecordKey`s.

    `directory_positions` are int64[n], all non-negative; `fingerprints` uint64[n].
    """

    table: Table
    entity_hashes: Sequence[int]
    fingerprints: NDArray[np.uint64]
    directory_positions: NDArray[np.int64]
    input_digest: bytes | None = None

    def __len__(self) -> int:
        return len(self.entity_hashes)

    def local_keys(self, generation: str) -> list[LocalKey]:
        """Return the keys in L1, as plain tuples, which equal `LocalKey`s and have the same hashes."""
        key_tuples = zip(repeat(generation), repeat(self.table.name), self.entity_hashes)
        return cast(list[LocalKey], list(key_tuples))

    def select(self, indexes: Sequence[int]) -> "RecordKeys":
        """Return the record keys at `indexes`, as columns."""
        if len(indexes) == len(self.entity_hashes):
            return self
        keys = [self.entity_hashes[index] for index in indexes]
        index_array = np.array(indexes, np.intp)
        return RecordKeys(
            self.table, keys, self.fingerprints[index_array], self.directory_positions[index_array], self.input_digest
        )

    def record_key_at(self, index: int) -> RecordKey:
        """Return the record key at `index`."""
        fingerprint, position = int(self.fingerprints[index]), int(self.directory_positions[index])
        digest = self.input_digest if position >= 0 else None
        return RecordKey(self.table, self.entity_hashes[index], fingerprint, position, digest)


class Hit(NamedTuple):
    """Record with the expected fingerprint; `expires_at` (monotonic) is None for a nightly record.

    `reason` is set if the record replaces a nightly one that is temporarily unavailable.
    """

    record: bytes
    tier: Tier
    is_live: bool
    expires_at: float | None
    reason: MissReason | None = None


class Miss(NamedTuple):
    """No stored answer, and the reason."""

    reason: MissReason


ReadResult = Hit | Miss


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that a read of `RecordKeys` returned, in order.

    `records` have the table's dtype and the expected fingerprints; rows at the indexes in `result_by_index` are
    undefined. `l2_row_mask`: bool[n], False if the row is from L1.
    """

    records: NDArray[Any]
    l2_row_mask: NDArray[np.bool_]
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
    # A caller without an input accepts any stored answer; a caller with an input needs an answer to that input.
    if (
        entry.input_digest is not None
        and record_key.input_digest is not None
        and entry.input_digest != record_key.input_digest
    ):
        return MISS_BY_REASON[MissReason.INPUT_CHANGED]
    return Hit(entry.record, tier, entry.input_digest is not None, entry.expires_at)


def overlay_entry(record_key: RecordKey, overlay: Overlay, asked_at: float) -> Entry | Miss:
    """Convert an overlay requested at `asked_at` (monotonic) to an entry, or to a miss with its reason."""
    record_and_digest = unpack_overlay(record_key.table.layout, overlay.overlay_value)
    if record_and_digest is None or peek_format(record_and_digest[0]) != RECORD_FORMAT:
        return MISS_BY_REASON[MissReason.CORRUPT]
    if overlay.remaining_ttl_s <= 0:
        return MISS_BY_REASON[MissReason.EXPIRED]
    record, digest = record_and_digest
    if peek_fingerprint(record) != record_key.fingerprint:
        return MISS_BY_REASON[MissReason.CORRUPT]
    return Entry(record, record_key.fingerprint, digest, asked_at + overlay.remaining_ttl_s)


def is_overlay_answer(record_key: RecordKey, overlay: Overlay, asked_at: float) -> bool:
    """Return whether an overlay requested at `asked_at` (monotonic) is an answer to exactly this input."""
    entry = overlay_entry(record_key, overlay, asked_at)
    return isinstance(entry, Entry) and isinstance(judge_entry(entry, record_key, "l2"), Hit)


def live_key(key: LocalKey, input_digest: bytes) -> LocalKey:
    """Return the key in L1 of a live answer to this input, which is stored in addition to the nightly record."""
    raw_key = key.hash_or_digest if isinstance(key.hash_or_digest, bytes) else key.hash_or_digest.to_bytes(8, "little")
    return key._replace(hash_or_digest=raw_key + input_digest)


def check_live_record(record_key: RecordKey, record: bytes) -> None:
    """Raise ValueError unless this is a complete live record of the requested entity."""
    size_bytes = record_key.table.layout.size_bytes
    if len(record) != size_bytes:
        raise ValueError(f"a record of {record_key.table.name} must have {size_bytes} bytes, not {len(record)}")
    if peek_fingerprint(record) != record_key.fingerprint or not is_live(record):
        raise ValueError(f"not a live record of the requested entity in {record_key.table.name}")


def unsound_reason(record: bytes, fingerprint: int) -> MissReason:
    """Return why a page's record is not an answer: the night had none for this entity, or the record is corrupt."""
    was_absent = is_absent(record, fingerprint)
    return MissReason.NOT_IN_GENERATION if was_absent else MissReason.CORRUPT


def unavailable_miss(error: TierUnavailable) -> Miss:
    """Return the miss for an error of L2."""
    return _MISS_BY_L2_REASON[str(error.details["reason"])]


def reads_of(view: SnapshotView, record_keys: Sequence[RecordKey]) -> list[Read]:
    """Return one read of L2 per record key, in order; consecutive keys of the same table share its lookup."""
    reads: list[Read] = []
    table: Table | None = None
    table_name, size_bytes, records_per_page = "", 0, 1
    for record_key in record_keys:
        if record_key.table is not table:
            table = record_key.table
            table_name, size_bytes = table.name, table.layout.size_bytes
            records_per_page, parts = table.records_per_page, table.parts
            locate = view.directories[table.entity].locate_in_part
        if record_key.directory_position < 0:
            reads.append(OverlayRead(view.generation, table_name, hash_hex(record_key.hash_or_digest)))
            continue
        part_index, position = locate(record_key.directory_position)
        page_number, slot_in_page = divmod(position, records_per_page)
        page_number += parts[part_index].first_page
        reads.append(PageRead(view.generation, table_name, page_number, slot_in_page * size_bytes, size_bytes))
    return reads


def page_reads(view: SnapshotView, record_keys: RecordKeys) -> PageReads:
    """Return the reads of nightly records by page and offset, one per record key."""
    table = record_keys.table
    size_bytes = table.layout.size_bytes
    first_pages = np.array([part.first_page for part in table.parts], np.int64)
    directory = view.directories[table.entity]
    page_numbers, offsets = directory.page_locations(
        record_keys.directory_positions, first_pages, table.records_per_page, size_bytes
    )
    return PageReads(view.generation, table.name, page_numbers, offsets, size_bytes)


class FlightKeys:
    """Integer keys of pending reads, which make dictionary operations much cheaper than tuples do.

    Each table of a generation gets an offset, to which records' hashes are added: no two records share a key.
    """

    def __init__(self) -> None:
        self._offset_by_table: dict[tuple[str, str], int] = {}
        self._table_numbers = itertools.count(1)

    def table_offset(self, generation: str, table: str) -> int:
        """Return the table's offset for 64-bit hashes.

        A table that was forgotten gets a new offset, never another table's.
        """
        table_offset = self._offset_by_table.get((generation, table))
        if table_offset is None:
            if len(self._offset_by_table) >= _NUMBERED_TABLES_MAX:
                self._offset_by_table.clear()
            table_offset = self._offset_by_table[generation, table] = next(self._table_numbers) << 64
        return table_offset

    def of(self, generation: str, record_key: RecordKey) -> FlightKey:
        """Return the key of one record."""
        table_offset, key = self.table_offset(generation, record_key[0].name), record_key.hash_or_digest
        return table_offset + key if isinstance(key, int) else (table_offset, key)


@dataclass(slots=True)
class Counters:
    """Counters of reads: each requested record counts once, in `l1_total`, `l2_records` or one of `misses_by_reason`.

    `l1_total` is the sum of `l1_records` and `ready_answers`. Ready answers are counted in batches;
    `add_pending_ready_answers` adds the pending ones.
    """

    l1_records: int = 0
    ready_answers: int = 0
    l2_records: int = 0
    misses_by_reason: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    l2_reads: int = 0
    add_pending_ready_answers: Callable[[], None] = lambda: None

    def count(self, outcomes: Sequence[ReadResult]) -> None:
        """Count the results of one request."""
        for outcome in outcomes:
            if type(outcome) is Miss:
                self.misses_by_reason[outcome.reason] += 1
            elif outcome.tier == "l1":  # type: ignore[union-attr]
                self.l1_records += 1
            else:
                self.l2_records += 1

    def count_rows(self, l2_row_mask: NDArray[np.bool_], result_by_index: Mapping[int, ReadResult]) -> None:
        """Count rows by tier; rows at the indexes in `result_by_index` are counted by those results."""
        l2_count = int(np.count_nonzero(l2_row_mask)) - sum(bool(l2_row_mask[index]) for index in result_by_index)
        self.l2_records += l2_count
        self.l1_records += len(l2_row_mask) - l2_count - len(result_by_index)
        self.count(list(result_by_index.values()))

    @property
    def l1_total(self) -> int:
        """Number of records and ready answers from L1."""
        return self.l1_records + self.ready_answers

    @property
    def result_total(self) -> int:
        """Number of all results."""
        return self.l1_total + self.l2_records + sum(self.misses_by_reason.values())
