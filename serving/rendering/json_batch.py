"""Many stored records at once: which of them are plain answers, their numbers, their JSON. Pure."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.manifest import Table
from cache.format.records.layout import NIGHTLY, plain_bits
from cache.format.records.quantization import SAFE_EXPONENT, dequantize
from cache.native import loader
from cache.native.number_text import Numerals
from serving.answers.fields import PREDICTION
from serving.generations.snapshot import Snapshot
from serving.rendering.answer_fields import JSON

_ITEM_LIST, _SCORE_LIST, _SHORT = [answer_field.key for answer_field in PREDICTION["topk"]]
_ITEMS, _SCORES, _NOT_SHORT = _ITEM_LIST + b"[", b"]" + _SCORE_LIST + b"[", b"]" + _SHORT + b"false"
(_VECTOR,), (_VALUES, _LABELS) = [
    [answer_field.key for answer_field in PREDICTION[kind]] for kind in ("vector", "value")
]
_NUMERALS = Numerals()


def plain_record_mask(
    snapshot: Snapshot, table: Table, rows: NDArray[Any], k: int
) -> NDArray[np.bool_]:
    """Mask bool[n] of whole nightly records with nothing to tell or to leave out: `k` items each, or all numbers."""
    layout, is_list = table.layout, table.kind == "topk"
    width, min_count = layout.width, k if is_list else layout.width
    if layout.precision == "i1":
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite = np.isfinite(rows["scale"] * np.float32(128))
        is_nightly = rows["flags"] & plain_bits() == NIGHTLY
        usable: NDArray[np.bool_] = is_nightly & (rows["count"] == width) & is_finite
        return usable
    raw_mask = loader.kernels.plain_record_mask(
        rows, width, is_list, layout.precision == "f2", plain_bits(), NIGHTLY, min_count, SAFE_EXPONENT,
        snapshot.items.count,
    )  # fmt: skip
    usable = np.frombuffer(bytearray(raw_mask), np.bool_)
    if is_list and len(snapshot.blocked_ordinals):
        used = np.arange(width) < rows["count"][:, None]
        usable = usable & ~(np.isin(rows["items"], snapshot.blocked_ordinals) & used).any(axis=1)
    return usable


def numbers(table: Table, rows: NDArray[Any], k: int) -> NDArray[np.float32]:
    """Numbers float32[n, k] of records that `plain_record_mask` marks: scores, or all numbers of a vector or value."""
    layout, is_list = table.layout, table.kind == "topk"
    if layout.precision == "i1":
        return dequantize(layout, rows, np.float32)
    width, is_half = k if is_list else layout.width, layout.precision == "f2"
    packed_numbers = loader.kernels.numbers(rows, layout.width, is_list, is_half, width)
    return np.frombuffer(packed_numbers, np.float32).reshape(len(rows), width)


def texts_of(
    snapshot: Snapshot,
    table: Table,
    ids: Sequence[str],
    rows: NDArray[Any],
    k: int,
    ends: Sequence[bytes],
) -> list[bytes]:
    """The JSON of each answer from a record that `plain_record_mask` marks; `ends` begin after the prediction."""
    names = _names(ids)
    named = b'","table":%b' % orjson.dumps(table.name)
    if table.kind == "topk":
        compiled_texts = _compiled(snapshot, table, names, named, rows, k, ends)
        if compiled_texts is not None:
            return compiled_texts
    lists = [list_text[2:] for list_text in _lists(numbers(table, rows, k))]
    head = repeat(b'{"id":"')
    if table.kind == "topk":
        middle, after = repeat(named + _ITEMS), repeat(_SCORES)
        items = snapshot.items.texts.lines(rows["items"][:, :k])
        pieces = head, names, middle, items, after, lists, repeat(_NOT_SHORT), ends
        return [b"".join(answer_pieces) for answer_pieces in zip(*pieces, strict=False)]
    field, last = _VECTOR, b"]"
    if table.kind == "value":
        field, last = _VALUES, b"]" + _LABELS + orjson.dumps(table.labels)
    middle = repeat(named + field + b"[")
    parts = head, names, middle, lists, repeat(last), ends
    return [b"".join(answer_pieces) for answer_pieces in zip(*parts, strict=False)]


def _names(ids: Sequence[str]) -> list[bytes]:
    """JSON of each id, without its quotes."""
    # One call for all. A quote inside a string is escaped, so only an id that ends in `",` looks like two.
    dumped = orjson.dumps(ids)[2:-2]
    if b'\\","' in dumped:
        return [orjson.dumps(entity_id)[1:-1] for entity_id in ids]
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
    """Lists by what is compiled, if that can write them; `names` and `named` end and begin in a quote."""
    layout = table.layout
    for _ in range(2):
        kernel_result = loader.kernels.answers(
            rows, layout.width, layout.precision == "f2", k, *snapshot.items.lent, _NUMERALS.table,
            b'{"id":"', names, named + _ITEMS, _SCORES, _NOT_SHORT, list(ends),
        )  # fmt: skip
        if not isinstance(kernel_result, tuple):
            return kernel_result
        _NUMERALS.write(kernel_result)
    return None


def _lists(row_numbers: NDArray[np.float32]) -> list[bytes]:
    """The JSON of each row, behind two bytes of what lay before it: cutting at one byte beats cutting at three."""
    return (b"," + orjson.dumps(row_numbers, option=JSON)[1:-2]).split(b"]")
