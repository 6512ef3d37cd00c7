"""A batch of the hot route as an Arrow IPC stream, straight from the arrays that it was resolved to. Pure."""

import numpy as np

from serving.arrow_answers import Origin, Stored, answers_stream
from serving.resolved import Lookup, Resolved
from serving.rows import numbers

_NO_SIZES = np.zeros((0, 0), np.int32)


def resolved_stream(lookup: Lookup, resolved: Resolved, now: float, stale: str | None) -> bytes:
    """The body of the response; `now` in Unix seconds, `stale` as the service says it of itself."""
    live, table, k = lookup.holding.live, lookup.table, lookup.k
    age = round(now - live.manifest.data_until, 3)
    after = ("batch", live.generation, age, live.published_at, None, None, None, stale)
    by_tier: tuple[Origin, Origin] = ("l1", *after), ("l2", *after)
    origins = [by_tier[is_l2] for is_l2 in resolved.is_l2.tolist()]
    found = numbers(table, resolved.rows, k)
    if table.kind == "topk":
        ordinals = resolved.rows["items"][:, :k]
        items, sizes = live.items.raw_texts.rows(ordinals), live.items.sizes(ordinals)
        stored = Stored(resolved.places, origins, found, items, sizes)
    else:
        stored = Stored(resolved.places, origins, found, (), _NO_SIZES)
    return answers_stream(table, lookup.raws, resolved.answers, stored)
