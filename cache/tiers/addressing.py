"""Addresses in Redis of what is wanted. Pure."""

from collections.abc import Sequence

import numpy as np

from cache.format.manifest import Table
from cache.format.redis_keys import hash_hex
from cache.l2.commands import OverlayRead, PageRead, PageReads, Read
from cache.tiers.batches import Wants
from cache.tiers.results import View, Want


def reads_of(view: View, wants: Sequence[Want]) -> list[Read]:
    """Reads of L2, one per want; whatever wants of one table share is looked up once."""
    reads: list[Read] = []
    table: Table | None = None
    name, size_bytes, per_page = "", 0, 1
    for want in wants:
        if want[0] is not table:
            table = want[0]
            name, size_bytes = table.name, table.layout.size_bytes
            per_page, parts = table.records_per_page, table.parts
            place = view.directories[table.entity].place
        if want[3] < 0:
            reads.append(OverlayRead(view.generation, name, hash_hex(want[1])))
            continue
        part, position = place(want[3])
        page, slot = divmod(position, per_page)
        page += parts[part].first_page
        reads.append(PageRead(view.generation, name, page, slot * size_bytes, size_bytes))
    return reads


def page_reads(view: View, wants: Wants) -> PageReads:
    """Reads of the records by page and offset, one per want."""
    table = wants.table
    size_bytes = table.layout.size_bytes
    first_pages = np.array([part.first_page for part in table.parts], np.int64)
    directory = view.directories[table.entity]
    pages, offsets = directory.pages(
        wants.positions, first_pages, table.records_per_page, size_bytes
    )
    return PageReads(view.generation, table.name, pages, offsets, size_bytes)
