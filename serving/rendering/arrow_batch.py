"""The answers of a batch as Arrow columns, one row per entity, in the order asked. Pure."""

import itertools
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.format.item_bytes import Named
from cache.format.manifest import Table
from cache.native import loader
from serving.answers.fields import ORIGIN, PREDICTION, Origin, fields_of
from serving.arrow_ipc.schema import Field
from serving.arrow_ipc.writer import (
    Column,
    fixed_lists,
    flags,
    lists,
    no_flags,
    no_numbers,
    no_text,
    numbers,
    same_text,
    stream,
    texts,
    whole_texts,
)
from serving.rendering.answer_fields import Answer

TABLE = "table"
"""Schema metadata key whose value names the table that was asked."""

_ID = fields_of(Origin)[0].arrow
_ORIGIN = tuple([each.arrow for each in ORIGIN])
_FIELDS = (_ID, *_ORIGIN)
_PREDICTION = {kind: tuple([each.arrow for each in PREDICTION[kind]]) for kind in PREDICTION}

Row = tuple[Any, ...]
"""Values of the origin's columns in one row."""


class StoredRows(NamedTuple):
    """Rows that stand as plain records: scores of whole lists, vectors or values float32[n, width]."""

    places: NDArray[np.int64]
    by_tier: tuple[Row, Row]
    """Origin of rows from L1, and of rows from L2."""
    is_l2: NDArray[np.bool_]
    numbers: NDArray[np.float32]
    items: Named
    """Item ids of the lists, if the rows are lists."""


NO_ITEMS = Named.of(b"", np.zeros((0, 0), np.int32))
_NOTHING = StoredRows(
    np.zeros(0, np.int64), ((), ()), np.zeros(0, bool), np.zeros((0, 0), np.float32), NO_ITEMS
)


def answers_stream(
    table: Table,
    ids: Sequence[bytes | None],
    answers: Mapping[int, Answer],
    stored: StoredRows = _NOTHING,
) -> bytes:
    """The body of the response: row i is one of `stored`, or else `answers[i]`."""
    rows = len(ids)
    columns = [_ids(ids), *_origins(rows, answers, stored)]
    predicted = _PREDICTION[table.kind]
    if table.kind == "topk":
        columns += _top_columns(rows, answers, stored)
        return _stream(table, (*_FIELDS, *predicted), columns, rows)
    field, column = _vectors(predicted[0], rows, answers, stored, table.layout.width)
    fields = (*_FIELDS, field, *predicted[1:])
    columns.append(column)
    if table.kind == "value":
        own = table.labels
        listed = [answers[place]["labels"] if place in answers else own for place in range(rows)]
        columns.append(_text_lists(listed))
    return _stream(table, fields, columns, rows)


def _stream(table: Table, fields: tuple[Field, ...], columns: list[Column], rows: int) -> bytes:
    return stream(fields, columns, rows, ((TABLE, table.name),), loader.kernels.stream)


def _ids(ids: Sequence[bytes | None]) -> Column:
    found = loader.kernels.joined(ids)
    return texts(ids) if found is None else Column(((len(ids), 0),), (b"", *found))


def _origins(rows: int, answers: Mapping[int, Answer], stored: StoredRows) -> list[Column]:
    l1, l2 = stored.by_tier
    if not answers and (count := np.count_nonzero(stored.is_l2)) in (0, rows):
        one = l2 if count else l1
        return [_same(field, value, rows) for field, value in zip(_ORIGIN, one, strict=True)]
    origins: list[Row] = [()] * rows
    for place, is_l2 in zip(stored.places.tolist(), stored.is_l2.tolist(), strict=True):
        origins[place] = l2 if is_l2 else l1
    for place, answer in answers.items():
        origins[place] = row_of(answer)
    by_field = zip(_ORIGIN, zip(*origins, strict=True), strict=True)
    return [_column(field, values) for field, values in by_field]


def _same(field: Field, value: Any, rows: int) -> Column:
    """A column with one value in each row."""
    if field.kind == "f8":
        return Column(((rows, 0),), (b"", struct.pack("<d", value) * rows))
    if value is None:
        return no_text(rows) if field.kind == "utf8" else no_numbers(rows)
    return same_text(value.encode(), rows)


def row_of(origin: Answer) -> Row:
    """Row of an answer, or of its origin alone, in the origin's columns."""
    return tuple([origin.get(field.name) for field in _ORIGIN])


def _column(field: Field, values: Sequence[Any]) -> Column:
    if field.kind == "utf8":
        if values.count(values[0]) == len(values):
            return _same(field, values[0], len(values))
        return texts([None if each is None else each.encode() for each in values])
    if field.kind == "f8":
        return numbers(np.array(values, np.float64))
    there = [each is not None for each in values]
    return numbers(np.array([each or 0 for each in values], np.int32), there)


def _top_columns(
    rows: int, answers: Mapping[int, Answer], stored: StoredRows
) -> tuple[Column, Column, Column]:
    if not answers:
        count, width = stored.numbers.shape
        ends = np.arange(count + 1, dtype=np.int32) * np.int32(width)
        column = _names(stored.items)
        scores = numbers(stored.numbers.ravel())
        return lists(ends, column), lists(ends, scores), no_flags(rows)
    width, short = stored.numbers.shape[1], [False] * rows
    items, sent = [b""] * rows, {}
    counts = np.zeros(rows, np.int32)
    counts[stored.places] = width
    cuts = [0, *np.cumsum(stored.items.sizes.sum(axis=1)).tolist()]
    for place, (start, end) in zip(stored.places.tolist(), pairwise(cuts), strict=True):
        items[place] = stored.items.data[start:end]
    for place, answer in answers.items():
        sent[place] = names = [each.encode() for each in answer["items"]]
        items[place], counts[place], short[place] = b"".join(names), len(names), answer["short"]
    ends = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    sizes, flat = np.empty(ends[-1], np.int32), np.empty(ends[-1], np.float32)
    slots = ends[stored.places][:, None] + np.arange(width, dtype=np.int32)
    if len(stored.places):  # without any, even the width of their sizes is nothing
        sizes[slots], flat[slots] = stored.items.sizes, stored.numbers
    for place, answer in answers.items():
        own = slice(ends[place], ends[place + 1])
        sizes[own], flat[own] = list(map(len, sent[place])), answer["scores"]
    column = _names(Named.of(b"".join(items), sizes))
    return lists(ends, column), lists(ends, numbers(flat)), flags(short)


def _names(named: Named) -> Column:
    return Column(((len(named.cuts) // 4 - 1, 0),), (b"", named.cuts, named.data))


def _vectors(
    field: Field, rows: int, answers: Mapping[int, Answer], stored: StoredRows, width: int
) -> tuple[Field, Column]:
    """Field and column of the table's width; where another night's answers have another, of lists of any size."""
    values: list[NDArray[np.float32] | None] = [None] * rows
    for place, vector in zip(stored.places.tolist(), stored.numbers, strict=True):
        values[place] = vector
    for place, answer in answers.items():
        values[place] = answer[field.name]
    there = [each is not None for each in values]
    present = [each for each in values if each is not None]
    if all(len(each) == width for each in present):
        whole = np.zeros((rows, width), np.float32)
        if present:
            whole[np.flatnonzero(there)] = present
        fixed = field._replace(kind="fixed", width=width)
        return fixed, fixed_lists(rows, numbers(whole.ravel()), there)
    sizes = [0 if each is None else len(each) for each in values]
    flat = np.concatenate(present)
    return field, lists(_ends(sizes), numbers(flat), there)


def _text_lists(values: Sequence[Sequence[str]]) -> Column:
    flat = [each.encode() for each in itertools.chain.from_iterable(values)]
    return lists(_ends([len(each) for each in values]), whole_texts(flat))


def _ends(sizes: Sequence[int]) -> NDArray[np.int32]:
    return np.fromiter(itertools.accumulate(sizes, initial=0), np.int32, len(sizes) + 1)
