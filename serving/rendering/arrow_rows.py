"""A batch of the hot route as an Arrow IPC stream, straight from the arrays that it was resolved to. Pure."""

from collections.abc import Sequence

import numpy as np

from cache.format.item_bytes import Named
from cache.native import loader
from serving.answers.sources import Source
from serving.rendering.answer_fields import origin_of
from serving.rendering.arrow_batch import NO_ITEMS, StoredRows, answers_stream, row_of
from serving.rendering.batch_result import BatchRequest, ResolvedBatch
from serving.rendering.json_batch import numbers


def items_of(lookup: BatchRequest, resolved: ResolvedBatch, part: slice) -> Named:
    """The ids of each list in a part of the rows; none where the table has no lists."""
    if lookup.table.kind != "topk":
        return NO_ITEMS
    layout, rows, lent = lookup.table.layout, resolved.rows[part], lookup.served.live.items.lent
    is_half = layout.precision == "f2"
    data, cuts = loader.kernels.names(rows, layout.width, is_half, lookup.k, *lent)
    return Named(data, cuts, lookup.k)


def resolved_stream(
    lookup: BatchRequest,
    resolved: ResolvedBatch,
    items: Sequence[Named],
    now_s: float,
    stale: str | None,
) -> bytes:
    """The body of the response, from `items_of` all rows; `now_s` in Unix seconds, `stale` as the service says it."""
    live, table = lookup.served.live, lookup.table
    # Both tiers say the same but for the source, which is the first of the columns.
    _, *common_fields = row_of(origin_of(live, Source.L1, "batch", now_s, stale=stale))
    by_tier = (Source.L1, *common_fields), (Source.L2, *common_fields)
    row_numbers = numbers(table, resolved.rows, lookup.k)
    stored_rows = StoredRows(
        resolved.answer_indices, by_tier, resolved.is_l2, row_numbers, _concatenate(items)
    )
    return answers_stream(table, lookup.raws, resolved.answers, stored_rows)


def _concatenate(parts: Sequence[Named]) -> Named:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return NO_ITEMS
    return Named.of(
        b"".join([part.data for part in parts]), np.concatenate([part.sizes for part in parts])
    )
