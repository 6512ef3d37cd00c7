"""Answers of a batch as Arrow columns, one row per entity, in the order of the request. Pure."""

import itertools
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.format.item_table import IdBytes
from cache.format.manifest import Table
from cache.native import loader
from serving.arrow.schema import Field
from serving.arrow.writer import (
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
from serving.engine.rendering.answer_fields import AnswerJson
from serving.requests.answers import ORIGIN_FIELDS, PREDICTION_FIELDS, Origin, fields_of

TABLE = "table"
"""Schema metadata key with the name of the requested table."""

_ID = fields_of(Origin)[0].arrow
_ORIGIN = tuple([answer_field.arrow for answer_field in ORIGIN_FIELDS])
_FIELDS = (_ID, *_ORIGIN)
_PREDICTION = {
    kind: tuple([answer_field.arrow for answer_field in PREDICTION_FIELDS[kind]])
    for kind in PREDICTION_FIELDS
}
_PACKED = {"f8": "<d", "i4": "<i"}

Row = tuple[Any, ...]
"""Values of the origin's columns in one row."""


class StoredRows(NamedTuple):
    """Rows of plain records: scores of complete lists, vectors or values float32[n, width]."""

    answer_indices: NDArray[np.int64]
    by_tier: tuple[Row, Row]
    """Origin of rows from L1, and of rows from L2."""
    is_l2: NDArray[np.bool_]
    numbers: NDArray[np.float32]
    items: IdBytes
    """Item ids of the lists, if the rows are lists."""


NO_ITEMS = IdBytes.of(b"", np.zeros((0, 0), np.int32))
_NO_STORED_ROWS = StoredRows(
    np.zeros(0, np.int64), ((), ()), np.zeros(0, bool), np.zeros((0, 0), np.float32), NO_ITEMS
)


def answers_stream(
    table: Table,
    ids: Sequence[bytes | None],
    answers: Mapping[int, AnswerJson],
    stored_rows: StoredRows = _NO_STORED_ROWS,
) -> bytes:
    """Return the body of the response; row i is one of `stored_rows`, or else `answers[i]`."""
    row_count = len(ids)
    columns = [_ids(ids), *_origins(row_count, answers, stored_rows)]
    predicted = _PREDICTION[table.kind]
    if table.kind == "topk":
        columns += _top_columns(row_count, answers, stored_rows)
        return _stream(table, (*_FIELDS, *predicted), columns, row_count)
    field, vectors = _vectors(predicted[0], row_count, answers, stored_rows, table.layout.width)
    fields = (*_FIELDS, field, *predicted[1:])
    columns.append(vectors)
    if table.kind == "value":
        table_labels = table.labels
        label_lists = [
            answers[row]["labels"] if row in answers else table_labels for row in range(row_count)
        ]
        columns.append(_text_lists(label_lists))
    return _stream(table, fields, columns, row_count)


def _stream(table: Table, fields: tuple[Field, ...], columns: list[Column], rows: int) -> bytes:
    return stream(fields, columns, rows, ((TABLE, table.name),), loader.kernels.stream)


def _ids(ids: Sequence[bytes | None]) -> Column:
    joined_ids = loader.kernels.joined(ids)
    return texts(ids) if joined_ids is None else Column(((len(ids), 0),), (b"", *joined_ids))


def _origins(rows: int, answers: Mapping[int, AnswerJson], stored_rows: StoredRows) -> list[Column]:
    l1, l2 = stored_rows.by_tier
    if not answers and (count := np.count_nonzero(stored_rows.is_l2)) in (0, rows):
        origin_row = l2 if count else l1
        return [
            _constant_column(field, value, rows)
            for field, value in zip(_ORIGIN, origin_row, strict=True)
        ]
    origins: list[Row] = [()] * rows
    for row, is_l2 in zip(
        stored_rows.answer_indices.tolist(), stored_rows.is_l2.tolist(), strict=True
    ):
        origins[row] = l2 if is_l2 else l1
    for row, answer in answers.items():
        origins[row] = row_of(answer)
    by_field = zip(_ORIGIN, zip(*origins, strict=True), strict=True)
    return [column(field, values) for field, values in by_field]


def _constant_column(field: Field, value: Any, rows: int) -> Column:
    """Return a column with one value in each row."""
    if field.kind == "utf8":
        return no_text(rows) if value is None else same_text(value.encode(), rows)
    if value is None and field.kind == "i4":
        return no_numbers(rows)
    if value is None or field.kind == "bool":
        return column(field, [value] * rows)
    return Column(((rows, 0),), (b"", struct.pack(_PACKED[field.kind], value) * rows))


def row_of(origin: AnswerJson) -> Row:
    """Return the row of an answer, or of its origin alone, in the origin's columns."""
    return tuple([origin.get(field.name) for field in _ORIGIN])


def column(field: Field, values: Sequence[Any]) -> Column:
    """Return the column of a declared field that is no list, with at least one value; None is null."""
    if field.kind == "utf8":
        if values.count(values[0]) == len(values):
            return _constant_column(field, values[0], len(values))
        return texts([None if text is None else text.encode() for text in values])
    if field.kind == "f8" and None not in values:
        return numbers(np.array(values, np.float64))
    is_present = [cell_value is not None for cell_value in values]
    if field.kind == "bool":
        return flags(list(map(bool, values)), is_present)
    return numbers(np.array([cell_value or 0 for cell_value in values], field.kind), is_present)


def _top_columns(
    rows: int, answers: Mapping[int, AnswerJson], stored_rows: StoredRows
) -> tuple[Column, Column, Column]:
    if not answers:
        count, width = stored_rows.numbers.shape
        ends = np.arange(count + 1, dtype=np.int32) * np.int32(width)
        named = _names(stored_rows.items)
        scores = numbers(stored_rows.numbers.ravel())
        return lists(ends, named), lists(ends, scores), no_flags(rows)
    width, short = stored_rows.numbers.shape[1], [False] * rows
    items, names_by_row = [b""] * rows, {}
    counts = np.zeros(rows, np.int32)
    counts[stored_rows.answer_indices] = width
    cuts = [0, *np.cumsum(stored_rows.items.id_sizes.sum(axis=1)).tolist()]
    for row, (start, end) in zip(stored_rows.answer_indices.tolist(), pairwise(cuts), strict=True):
        items[row] = stored_rows.items.joined_ids[start:end]
    for row, answer in answers.items():
        names_by_row[row] = names = [item_id.encode() for item_id in answer["items"]]
        items[row], counts[row], short[row] = b"".join(names), len(names), answer["short"]
    ends = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    sizes, flat = np.empty(ends[-1], np.int32), np.empty(ends[-1], np.float32)
    slots = ends[stored_rows.answer_indices][:, None] + np.arange(width, dtype=np.int32)
    if len(stored_rows.answer_indices):  # without any, even the width of their sizes is nothing
        sizes[slots], flat[slots] = stored_rows.items.id_sizes, stored_rows.numbers
    for row, answer in answers.items():
        row_slice = slice(ends[row], ends[row + 1])
        sizes[row_slice], flat[row_slice] = list(map(len, names_by_row[row])), answer["scores"]
    named = _names(IdBytes.of(b"".join(items), sizes))
    return lists(ends, named), lists(ends, numbers(flat)), flags(short)


def _names(named: IdBytes) -> Column:
    return Column(
        ((len(named.offset_bytes) // 4 - 1, 0),), (b"", named.offset_bytes, named.joined_ids)
    )


def _vectors(
    field: Field, rows: int, answers: Mapping[int, AnswerJson], stored_rows: StoredRows, width: int
) -> tuple[Field, Column]:
    """Return the vector column of the table's width; of lists of any size if another night's answers differ."""
    values: list[NDArray[np.float32] | None] = [None] * rows
    for row, vector in zip(stored_rows.answer_indices.tolist(), stored_rows.numbers, strict=True):
        values[row] = vector
    for row, answer in answers.items():
        values[row] = answer[field.name]
    is_present = [row_values is not None for row_values in values]
    present = [row_values for row_values in values if row_values is not None]
    if all(len(row_values) == width for row_values in present):
        matrix = np.zeros((rows, width), np.float32)
        if present:
            matrix[np.flatnonzero(is_present)] = present
        fixed = field._replace(kind="fixed", width=width)
        return fixed, fixed_lists(rows, numbers(matrix.ravel()), is_present)
    sizes = [0 if row_values is None else len(row_values) for row_values in values]
    flat = np.concatenate(present)
    return field, lists(_ends(sizes), numbers(flat), is_present)


def _text_lists(values: Sequence[Sequence[str]]) -> Column:
    flat = [text.encode() for text in itertools.chain.from_iterable(values)]
    return lists(_ends([len(row_texts) for row_texts in values]), whole_texts(flat))


def _ends(sizes: Sequence[int]) -> NDArray[np.int32]:
    return np.fromiter(itertools.accumulate(sizes, initial=0), np.int32, len(sizes) + 1)
