"""Many stored top-K records as JSON at once: a dozen numpy calls for all of them instead of each. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.keys import FORMAT
from cache.manifest import Table
from cache.outcomes import Found
from cache.records import FLAG_LIVE
from serving.render import JSON
from serving.snapshot import Snapshot

_EXPONENT_MAX = 111
"""Above it a float16 times its record's power of two might leave float32."""

_OUTSIDE = {"f2": ("<u2", 0x7C00), "f4": ("<u4", 0x7F800000)}
"""The bits of a number that are all set when it is not finite."""


def top_lists(
    snapshot: Snapshot,
    table: Table,
    ids: Sequence[str],
    found: Sequence[Found],
    k: int,
    ends: Mapping[str, bytes],
) -> list[bytes | None]:
    """The JSON of each answer with the end of its tier; None for a short, damaged or live record or blocked items."""
    rows = np.frombuffer(b"".join([each.record for each in found]), table.layout.dtype)
    usable = _usable(snapshot, table, rows, k)
    chosen = rows if usable.all() else rows[usable]
    texts: list[bytes | None] = [None] * len(rows)
    if not len(chosen):
        return texts
    numbers = np.ascontiguousarray(chosen["numbers"][:, :k], np.float32)
    if table.layout.precision == "f2":
        numbers *= np.ldexp(np.float32(1), chosen["exponent"].astype(np.int32))[:, None]
    # One call for all numbers and one for all ids; quotes inside a string are escaped, so the cuts are sound.
    scores = orjson.dumps(numbers, option=JSON)[2:-2].split(b"],[")
    places = np.flatnonzero(usable).tolist()
    names = orjson.dumps([ids[place] for place in places])[2:-2].split(b'","')
    items = snapshot.items.texts.rows(chosen["items"][:, :k])
    middle = b'","table":%b,"items":[' % orjson.dumps(table.name)
    for place, name, listed, score in zip(places, names, items, scores, strict=True):
        end = ends[found[place].tier]
        texts[place] = b'{"id":"%b%b%b],"scores":[%b],"short":false%b' % (
            name, middle, b",".join(listed), score, end,
        )  # fmt: skip
    return texts


def _usable(snapshot: Snapshot, table: Table, rows: NDArray[np.void], k: int) -> NDArray[np.bool_]:
    """bool[n]: whole, plain and long enough records."""
    flags, counts, width = rows["flags"], rows["count"], table.layout.width
    usable: NDArray[np.bool_] = (counts >= k) & (counts <= width)
    usable &= (flags >> 4 == FORMAT) & (flags & FLAG_LIVE == 0)
    if table.layout.precision == "f2":
        usable &= rows["exponent"] <= _EXPONENT_MAX
    kind, mask = _OUTSIDE[table.layout.precision]
    bits = rows["numbers"].view(kind) & mask
    items = rows["items"]
    # Beyond a record's count its slots are no item: only what is used must be of the catalogue.
    used = items if (counts == width).all() else np.where(
        np.arange(width) < counts[:, None], items, 0
    )  # fmt: skip
    usable &= (bits != mask).all(axis=1) & (used.max(axis=1) < snapshot.items.count)
    if len(snapshot.blocked_ordinals):
        usable &= ~np.isin(used, snapshot.blocked_ordinals).any(axis=1)
    return usable
