"""Many stored records at once: which of them are plain answers, their numbers, their JSON. Pure."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.keys import FORMAT
from cache.manifest import Table
from cache.records import SAFE_EXPONENT
from serving.render import JSON
from serving.snapshot import Snapshot

_OUTSIDE = {"f2": ("<u2", 0x7C00), "f4": ("<u4", 0x7F800000)}
"""The bits of a number that are all set when it is not finite."""


def plain(snapshot: Snapshot, table: Table, rows: NDArray[Any], k: int) -> NDArray[np.bool_]:
    """bool[n]: records of the night that are whole and need nothing left out: `k` items each, or all numbers."""
    flags, counts, width = rows["flags"], rows["count"], table.layout.width
    least = k if table.kind == "topk" else width
    usable: NDArray[np.bool_] = (flags == FORMAT << 4) & (counts >= least) & (counts <= width)
    if table.layout.precision == "i1":
        with np.errstate(over="ignore", invalid="ignore"):
            return usable & np.isfinite(rows["scale"] * np.float32(128))
    if table.layout.precision == "f2":
        usable &= rows["exponent"] <= SAFE_EXPONENT
    kind, mask = _OUTSIDE[table.layout.precision]
    bits = rows["numbers"].view(kind) & mask
    if np.maximum.reduce(bits, axis=None, initial=0) == mask:
        usable &= (bits != mask).all(axis=1)
    if table.kind == "topk":
        usable &= _are_listable(snapshot, rows["items"], counts)
    return usable


def _are_listable(
    snapshot: Snapshot, items: NDArray[np.uint32], counts: NDArray[np.uint16]
) -> NDArray[np.bool_]:
    # Beyond a record's count its slots are no item: only what is used must be of the catalogue.
    width = items.shape[1]
    is_full = np.count_nonzero(counts == width) == len(items)
    used = items if is_full else np.where(np.arange(width) < counts[:, None], items, 0)
    listable = np.ones(len(items), bool)
    if np.maximum.reduce(used, axis=None, initial=0) >= snapshot.items.count:
        listable = used.max(axis=1) < snapshot.items.count
    if len(snapshot.blocked_ordinals):
        listable &= ~np.isin(used, snapshot.blocked_ordinals).any(axis=1)
    return listable


def numbers(table: Table, rows: NDArray[Any], k: int) -> NDArray[np.float32]:
    """float32[n, k] scores, or all numbers of a vector or of values, of records that are `plain`."""
    width = k if table.kind == "topk" else table.layout.width
    found = rows["numbers"][:, :width].astype(np.float32, order="C")
    if table.layout.precision == "f2":
        found *= np.ldexp(np.float32(1), rows["exponent"].astype(np.int32))[:, None]
    elif table.layout.precision == "i1":
        found *= rows["scale"][:, None]
    return found


def texts_of(
    snapshot: Snapshot,
    table: Table,
    ids: Sequence[str],
    rows: NDArray[Any],
    k: int,
    ends: Sequence[bytes],
) -> list[bytes]:
    """The JSON of each answer from a `plain` record; `ends` begin after the prediction."""
    # One call for all numbers and one for all ids; quotes inside a string are escaped, so the cuts are sound.
    lists = [each[2:] for each in _lists(numbers(table, rows, k))]
    names = orjson.dumps(ids)[2:-2].split(b'","')
    head, named = repeat(b'{"id":"'), b'","table":%b' % orjson.dumps(table.name)
    if table.kind == "topk":
        middle, after = repeat(named + b',"items":['), repeat(b'],"scores":[')
        items = snapshot.items.texts.lines(rows["items"][:, :k])
        short = repeat(b'],"short":false')
        pieces = head, names, middle, items, after, lists, short, ends
        return [b"".join(each) for each in zip(*pieces, strict=False)]
    field, last = (b',"vector":[', b"]")
    if table.kind == "value":
        field, last = b',"values":[', b'],"labels":' + orjson.dumps(table.labels)
    middle = repeat(named + field)
    parts = head, names, middle, lists, repeat(last), ends
    return [b"".join(each) for each in zip(*parts, strict=False)]


def _lists(found: NDArray[np.float32]) -> list[bytes]:
    """The JSON of each row, behind two bytes of what lay before it: cutting at one byte beats cutting at three."""
    return (b"," + orjson.dumps(found, option=JSON)[1:-2]).split(b"]")
