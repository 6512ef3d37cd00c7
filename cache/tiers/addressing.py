"""Addresses of what is wanted: in Redis, and among the reads under way."""

import itertools
from collections.abc import Sequence

import numpy as np

from cache.format.manifest import Table
from cache.format.redis_keys import hash_hex
from cache.l2.commands import OverlayRead, PageRead, PageReads, Read
from cache.tiers.batches import RecordKeys
from cache.tiers.results import RecordKey, View

FlightKey = int | tuple[int, bytes]

_KEPT_MAX = 4_096


def reads_of(view: View, record_keys: Sequence[RecordKey]) -> list[Read]:
    """Reads of L2, one per want; whatever wants of one table share is looked up once."""
    reads: list[Read] = []
    table: Table | None = None
    name, size_bytes, per_page = "", 0, 1
    for record_key in record_keys:
        if record_key.table is not table:
            table = record_key.table
            name, size_bytes = table.name, table.layout.size_bytes
            per_page, parts = table.records_per_page, table.parts
            locate = view.directories[table.entity].locate
        if record_key.position < 0:
            reads.append(OverlayRead(view.generation, name, hash_hex(record_key.key)))
            continue
        part, position = locate(record_key.position)
        page, slot = divmod(position, per_page)
        page += parts[part].first_page
        reads.append(PageRead(view.generation, name, page, slot * size_bytes, size_bytes))
    return reads


def page_reads(view: View, record_keys: RecordKeys) -> PageReads:
    """Reads of the records by page and offset, one per want."""
    table = record_keys.table
    size_bytes = table.layout.size_bytes
    first_pages = np.array([part.first_page for part in table.parts], np.int64)
    directory = view.directories[table.entity]
    pages, offsets = directory.pages(
        record_keys.positions, first_pages, table.records_per_page, size_bytes
    )
    return PageReads(view.generation, table.name, pages, offsets, size_bytes)


class FlightKeys:
    """Keys of reads under way: whole numbers, which a dictionary takes at a fraction of what names cost.

    Tables of generations are numbered, and the records in them from there on: no two records share a key.
    """

    def __init__(self) -> None:
        self._starts: dict[tuple[str, str], int] = {}
        self._numbers = itertools.count(1)

    def start(self, generation: str, table: str) -> int:
        """The number to add to a 64-bit hash; a table that was forgotten gets a new one, never that of another."""
        start = self._starts.get((generation, table))
        if start is None:
            if len(self._starts) >= _KEPT_MAX:
                self._starts.clear()
            start = self._starts[generation, table] = next(self._numbers) << 64
        return start

    def of(self, generation: str, record_key: RecordKey) -> FlightKey:
        """The key of one record."""
        start, key = self.start(generation, record_key[0].name), record_key.key
        return start + key if isinstance(key, int) else (start, key)
