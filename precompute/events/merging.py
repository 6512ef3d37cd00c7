"""Merging of files of events: small old ones become one, so that hourly nights do not read thousands of them.

A merged file's name tells both its ends: from the moment it is there, those within count no more, and are removed.
"""

import io
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Final

import pyarrow.parquet as pq

from cache.store.artefacts import ArtefactStore
from precompute.erasures.erasure import ErasedEntities, all_erasures
from precompute.events.files import (
    END,
    SCHEMA,
    TakenFile,
    list_taken_files,
    superseded,
    table_of,
    until_of,
)
from precompute.events.forgetting import forget_in_files, without
from precompute.events.stores import EventStores

AT_ONCE: Final = 24
"""Files that become one: a day of hourly nights. The night after that copies no partition, as its files are others."""
MERGED_BYTES: Final = 32 << 20
"""Bytes of files that become one; larger ones cost their rows, whoever reads them, and stay."""
_GROUPS_PER_NIGHT: Final = 2
"""Groups that a night looks at, the newest first: what is too large is not read again by each."""


def merge(stores: EventStores) -> int:
    """Merge old files that no night wrote merged, `AT_ONCE` of them into one; how many became others.

    Of those alone that lie before every generation in the stores: up to where any has events a file has to end. None
    while one is in the making: its retry finds its work by its files. Safe to repeat after a crash anywhere, and side
    by side with another: groups follow from the names of files, so both make the same. Who is erased is left out.
    """
    merged_count, store = 0, stores.home_store
    if not stores.is_any_in_the_making():
        erased = ErasedEntities.of(all_erasures(store))
        for group in _groups(stores)[: -_GROUPS_PER_NIGHT - 1 : -1]:
            if (merged := _merged(store, group, erased)) is not None:
                file, data = merged
                store.write_once(file.path, data)
                merged_count += len(group)
    if superseded(store):  # of one that was killed, too, and whoever was erased beside it
        # Looked at again: a night that began while files were being merged reads those.
        is_read = stores.is_any_in_the_making()
        forget_in_files(store, ErasedEntities.of(all_erasures(store)), keep_superseded=is_read)
    return merged_count


def _groups(stores: EventStores) -> list[list[TakenFile]]:
    """Consecutive files that may become one, by position.

    Counted from where a merged file ends, so that everybody finds the same; never with the newest file, which says
    where the next begins.
    """
    if (bound := min(stores.iter_generation_positions(), default=None)) is None:
        return []
    groups: list[list[TakenFile]] = []
    pairs = pairwise(list_taken_files(stores.home_store))  # a file ends where the next one begins
    for is_old, run in groupby(
        pairs, lambda pair: pair[0].until_position is None and pair[1].after <= bound
    ):
        files = [file for file, _ in run] if is_old else []
        grouped_count = len(files) // AT_ONCE * AT_ONCE
        groups += [files[start : start + AT_ONCE] for start in range(0, grouped_count, AT_ONCE)]
    return groups


def _merged(
    store: ArtefactStore, files: Sequence[TakenFile], erased: ErasedEntities
) -> tuple[TakenFile, bytes] | None:
    """The file that others become, and its bytes; None where they are too large, or another one merges them."""
    raws, size_bytes = [], 0
    for file in files:
        raw = store.read(file.path)
        size_bytes += 0 if raw is None else len(raw)
        if raw is None or size_bytes > MERGED_BYTES:
            return None
        raws.append(raw)
    end_position, buffer = until_of(raws[-1], files[-1].path), io.BytesIO()
    with pq.ParquetWriter(
        buffer, SCHEMA.with_metadata({END: str(end_position).encode()})
    ) as writer:
        for file, raw in zip(files, raws, strict=True):
            if len(rows := without(table_of(raw, file.path), erased)):
                writer.write_table(rows.replace_schema_metadata(writer.schema.metadata))
    return TakenFile(files[0].after, end_position), buffer.getvalue()
