"""A batch of the hot route as an Arrow IPC stream, straight from the arrays that it was resolved to. Pure."""

from collections.abc import Sequence

import numpy as np

from serving.arrow_answers import Origin, Stored, answers_stream
from serving.resolved import Lookup, Resolved
from serving.rows import numbers

_NO_SIZES = np.zeros((0, 0), np.int32)


def items_of(lookup: Lookup, resolved: Resolved, part: slice) -> list[list[bytes]]:
    """The ids of each list in a part of the rows; none where the table has no lists."""
    if lookup.table.kind != "topk":
        return []
    ordinals = resolved.rows["items"][part, : lookup.k]
    return lookup.holding.live.items.raw_texts.rows(ordinals)


def resolved_stream(
    lookup: Lookup,
    resolved: Resolved,
    items: Sequence[Sequence[bytes]],
    now: float,
    stale: str | None,
) -> bytes:
    """The body of the response, from `items_of` all rows; `now` in Unix seconds, `stale` as the service says it."""
    live, table, k = lookup.holding.live, lookup.table, lookup.k
    age = round(now - live.manifest.data_until, 3)
    after = ("batch", live.generation, age, live.published_at, None, None, None, stale)
    by_tier: tuple[Origin, Origin] = ("l1", *after), ("l2", *after)
    origins = [by_tier[is_l2] for is_l2 in resolved.is_l2.tolist()]
    found = numbers(table, resolved.rows, k)
    sizes = live.items.sizes(resolved.rows["items"][:, :k]) if table.kind == "topk" else _NO_SIZES
    stored = Stored(resolved.places, origins, found, items, sizes)
    return answers_stream(table, lookup.raws, resolved.answers, stored)
