"""Many stored records at once: which of them are plain answers, their numbers, their JSON. Pure."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.keys import FORMAT
from cache.format.manifest import Table
from cache.format.records import SAFE_EXPONENT
from cache.native import loader
from cache.native.number_text import Numerals
from serving.answers.fields import PREDICTION
from serving.generations.snapshot import Snapshot
from serving.rendering.answer_fields import JSON

_ITEM_LIST, _SCORE_LIST, _SHORT = [each.key for each in PREDICTION["topk"]]
_ITEMS, _SCORES, _WHOLE = _ITEM_LIST + b"[", b"]" + _SCORE_LIST + b"[", b"]" + _SHORT + b"false"
(_VECTOR,), (_VALUES, _LABELS) = [
    [each.key for each in PREDICTION[kind]] for kind in ("vector", "value")
]
_NUMERALS = Numerals()
_OUTSIDE = {"f2": ("<u2", 0x7C00), "f4": ("<u4", 0x7F800000)}
"""The bits of a number that are all set when it is not finite."""


def plain(snapshot: Snapshot, table: Table, rows: NDArray[Any], k: int) -> NDArray[np.bool_]:
    """Mask bool[n] of nightly records that are whole and need nothing left out: `k` items each, or all numbers."""
    layout, columns = table.layout, loader.columns()
    width, is_list = layout.width, table.kind == "topk"
    least = k if is_list else width
    if columns is not None and layout.precision != "i1" and not len(snapshot.blocked_ordinals):
        found = columns.plain(
            rows, width, is_list, layout.precision == "f2", FORMAT << 4, least, SAFE_EXPONENT,
            snapshot.items.count,
        )  # fmt: skip
        return np.frombuffer(bytearray(found), np.bool_)
    flags, counts = rows["flags"], rows["count"]
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
    """Numbers float32[n, k]: scores, or all numbers of a vector or of values, of records that are `plain`."""
    layout, is_list, columns = table.layout, table.kind == "topk", loader.columns()
    width = k if is_list else layout.width
    if columns is not None and layout.precision != "i1":
        is_half = layout.precision == "f2"
        sent = columns.numbers(rows, layout.width, is_list, is_half, width)
        return np.frombuffer(sent, np.float32).reshape(len(rows), width)
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
    names = _names(ids)
    named = b'","table":%b' % orjson.dumps(table.name)
    if table.kind == "topk":
        found = _compiled(snapshot, table, names, named, rows, k, ends)
        if found is not None:
            return found
    lists = [each[2:] for each in _lists(numbers(table, rows, k))]
    head = repeat(b'{"id":"')
    if table.kind == "topk":
        middle, after = repeat(named + _ITEMS), repeat(_SCORES)
        items = snapshot.items.texts.lines(rows["items"][:, :k])
        pieces = head, names, middle, items, after, lists, repeat(_WHOLE), ends
        return [b"".join(each) for each in zip(*pieces, strict=False)]
    field, last = _VECTOR, b"]"
    if table.kind == "value":
        field, last = _VALUES, b"]" + _LABELS + orjson.dumps(table.labels)
    middle = repeat(named + field + b"[")
    parts = head, names, middle, lists, repeat(last), ends
    return [b"".join(each) for each in zip(*parts, strict=False)]


def _names(ids: Sequence[str]) -> list[bytes]:
    """JSON of each id, without its quotes."""
    # One call for all. A quote inside a string is escaped, so only an id that ends in `",` looks like two.
    dumped = orjson.dumps(ids)[2:-2]
    if b'\\","' in dumped:
        return [orjson.dumps(each)[1:-1] for each in ids]
    return dumped.split(b'","')


def _compiled(
    snapshot: Snapshot,
    table: Table,
    names: list[bytes],
    named: bytes,
    rows: NDArray[Any],
    k: int,
    ends: Sequence[bytes],
) -> list[bytes] | None:
    """Lists by what is compiled, if that is there and can write them; `names` and `named` end and begin in a quote."""
    columns, layout = loader.columns(), table.layout
    if columns is None:
        return None
    for _ in range(2):
        found = columns.answers(
            rows, layout.width, layout.precision == "f2", k, *snapshot.items.lent, _NUMERALS.table,
            b'{"id":"', names, named + _ITEMS, _SCORES, _WHOLE, list(ends),
        )  # fmt: skip
        if not isinstance(found, tuple):
            return found
        _NUMERALS.write(found)
    return None


def _lists(found: NDArray[np.float32]) -> list[bytes]:
    """The JSON of each row, behind two bytes of what lay before it: cutting at one byte beats cutting at three."""
    return (b"," + orjson.dumps(found, option=JSON)[1:-2]).split(b"]")
