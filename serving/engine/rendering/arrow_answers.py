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
    false_flag_column,
    fixed_list_column,
    flag_column,
    list_column,
    null_number_column,
    null_text_column,
    number_column,
    repeated_text_column,
    text_column,
    whole_text_column,
    write_stream,
)
from serving.engine.rendering.answer_fields import AnswerJson
from serving.requests.answers import ORIGIN_FIELDS, PREDICTION_FIELDS_BY_KIND, Origin, declared_fields

TABLE_METADATA_KEY = "table"
"""Schema metadata key with the name of the requested table."""

_ID_COLUMN = declared_fields(Origin)[0].arrow_field
_ORIGIN_COLUMNS = tuple([answer_field.arrow_field for answer_field in ORIGIN_FIELDS])
_ID_AND_ORIGIN_COLUMNS = (_ID_COLUMN, *_ORIGIN_COLUMNS)
_PREDICTION_COLUMNS_BY_KIND = {
    kind: tuple([answer_field.arrow_field for answer_field in PREDICTION_FIELDS_BY_KIND[kind]])
    for kind in PREDICTION_FIELDS_BY_KIND
}
_STRUCT_FORMAT_BY_KIND = {"f8": "<d", "i4": "<i"}

OriginRow = tuple[Any, ...]
"""Values of the origin's columns in one row."""


class StoredRows(NamedTuple):
    """Rows of plain records: scores of complete lists, vectors or values float32[n, width]."""

    answer_indices: NDArray[np.int64]
    origin_by_tier: tuple[OriginRow, OriginRow]
    """Origin of rows from L1, and of rows from L2."""
    row_is_from_l2: NDArray[np.bool_]
    row_numbers: NDArray[np.float32]
    list_item_ids: IdBytes
    """Item ids of each list, if the rows are lists."""


NO_ITEMS = IdBytes.of(b"", np.zeros((0, 0), np.int32))
_NO_STORED_ROWS = StoredRows(np.zeros(0, np.int64), ((), ()), np.zeros(0, bool), np.zeros((0, 0), np.float32), NO_ITEMS)


def answers_stream(
    table: Table,
    entity_ids: Sequence[bytes | None],
    answer_by_row: Mapping[int, AnswerJson],
    stored_rows: StoredRows = _NO_STORED_ROWS,
) -> bytes:
    """Return the body of the response; row i is one of `stored_rows`, or else `answers[i]`."""
    row_count = len(entity_ids)
    columns = [_id_column(entity_ids), *_origin_columns(row_count, answer_by_row, stored_rows)]
    prediction_columns = _PREDICTION_COLUMNS_BY_KIND[table.kind]
    if table.kind == "topk":
        columns += _top_columns(row_count, answer_by_row, stored_rows)
        return _write_table_stream(table, (*_ID_AND_ORIGIN_COLUMNS, *prediction_columns), columns, row_count)
    field, vector_column = _vector_column(
        prediction_columns[0], row_count, answer_by_row, stored_rows, table.layout.width
    )
    fields = (*_ID_AND_ORIGIN_COLUMNS, field, *prediction_columns[1:])
    columns.append(vector_column)
    if table.kind == "value":
        table_labels = table.labels
        label_lists = [
            answer_by_row[row]["labels"] if row in answer_by_row else table_labels for row in range(row_count)
        ]
        columns.append(_text_list_column(label_lists))
    return _write_table_stream(table, fields, columns, row_count)


def _write_table_stream(table: Table, fields: tuple[Field, ...], columns: list[Column], row_count: int) -> bytes:
    return write_stream(fields, columns, row_count, ((TABLE_METADATA_KEY, table.name),), loader.kernels.stream)


def _id_column(entity_ids: Sequence[bytes | None]) -> Column:
    joined_ids = loader.kernels.joined(entity_ids)
    return text_column(entity_ids) if joined_ids is None else Column(((len(entity_ids), 0),), (b"", *joined_ids))


def _origin_columns(row_count: int, answer_by_row: Mapping[int, AnswerJson], stored_rows: StoredRows) -> list[Column]:
    l1_origin, l2_origin = stored_rows.origin_by_tier
    if not answer_by_row and (l2_count := np.count_nonzero(stored_rows.row_is_from_l2)) in (0, row_count):
        origin_row = l2_origin if l2_count else l1_origin
        return [
            _constant_column(field, value, row_count) for field, value in zip(_ORIGIN_COLUMNS, origin_row, strict=True)
        ]
    origins: list[OriginRow] = [()] * row_count
    for row, is_l2 in zip(stored_rows.answer_indices.tolist(), stored_rows.row_is_from_l2.tolist(), strict=True):
        origins[row] = l2_origin if is_l2 else l1_origin
    for row, answer in answer_by_row.items():
        origins[row] = row_of(answer)
    fields_and_values = zip(_ORIGIN_COLUMNS, zip(*origins, strict=True), strict=True)
    return [field_column(field, values) for field, values in fields_and_values]


def _constant_column(field: Field, constant_value: Any, row_count: int) -> Column:
    """Return a column with one value in each row."""
    if field.kind == "utf8":
        return (
            null_text_column(row_count)
            if constant_value is None
            else repeated_text_column(constant_value.encode(), row_count)
        )
    if constant_value is None and field.kind == "i4":
        return null_number_column(row_count)
    if constant_value is None or field.kind == "bool":
        return field_column(field, [constant_value] * row_count)
    return Column(((row_count, 0),), (b"", struct.pack(_STRUCT_FORMAT_BY_KIND[field.kind], constant_value) * row_count))


def row_of(origin: AnswerJson) -> OriginRow:
    """Return the origin columns' values of an answer."""
    return tuple([origin.get(field.name) for field in _ORIGIN_COLUMNS])


def field_column(field: Field, cell_values: Sequence[Any]) -> Column:
    """Return the column of a declared field that is no list, with at least one value; None is null."""
    if field.kind == "utf8":
        if cell_values.count(cell_values[0]) == len(cell_values):
            return _constant_column(field, cell_values[0], len(cell_values))
        return text_column([None if cell_text is None else cell_text.encode() for cell_text in cell_values])
    if field.kind == "f8" and None not in cell_values:
        return number_column(np.array(cell_values, np.float64))
    is_present = [cell_value is not None for cell_value in cell_values]
    if field.kind == "bool":
        return flag_column(list(map(bool, cell_values)), is_present)
    return number_column(np.array([cell_value or 0 for cell_value in cell_values], field.kind), is_present)


def _top_columns(
    row_count: int, answer_by_row: Mapping[int, AnswerJson], stored_rows: StoredRows
) -> tuple[Column, Column, Column]:
    if not answer_by_row:
        list_count, width = stored_rows.row_numbers.shape
        list_ends = np.arange(list_count + 1, dtype=np.int32) * np.int32(width)
        name_column = _name_column(stored_rows.list_item_ids)
        score_column = number_column(stored_rows.row_numbers.ravel())
        return (list_column(list_ends, name_column), list_column(list_ends, score_column), false_flag_column(row_count))
    width, short_flags = stored_rows.row_numbers.shape[1], [False] * row_count
    joined_names_by_row, names_by_row = [b""] * row_count, {}
    item_count_by_row = np.zeros(row_count, np.int32)
    item_count_by_row[stored_rows.answer_indices] = width
    name_cuts = [0, *np.cumsum(stored_rows.list_item_ids.id_sizes.sum(axis=1)).tolist()]
    for row, (cut_start, cut_end) in zip(stored_rows.answer_indices.tolist(), pairwise(name_cuts), strict=True):
        joined_names_by_row[row] = stored_rows.list_item_ids.joined_ids[cut_start:cut_end]
    for row, answer in answer_by_row.items():
        names_by_row[row] = item_names = [item_id.encode() for item_id in answer["items"]]
        joined_names_by_row[row], item_count_by_row[row], short_flags[row] = (
            b"".join(item_names),
            len(item_names),
            answer["short"],
        )
    list_ends = np.zeros(row_count + 1, np.int32)
    np.cumsum(item_count_by_row, out=list_ends[1:])
    name_sizes, flat_scores = np.empty(list_ends[-1], np.int32), np.empty(list_ends[-1], np.float32)
    stored_slots = list_ends[stored_rows.answer_indices][:, None] + np.arange(width, dtype=np.int32)
    if len(stored_rows.answer_indices):  # an empty table has no sizes to read the width from
        name_sizes[stored_slots], flat_scores[stored_slots] = (
            stored_rows.list_item_ids.id_sizes,
            stored_rows.row_numbers,
        )
    for row, answer in answer_by_row.items():
        row_slice = slice(list_ends[row], list_ends[row + 1])
        name_sizes[row_slice], flat_scores[row_slice] = (list(map(len, names_by_row[row])), answer["scores"])
    name_column = _name_column(IdBytes.of(b"".join(joined_names_by_row), name_sizes))
    return (
        list_column(list_ends, name_column),
        list_column(list_ends, number_column(flat_scores)),
        flag_column(short_flags),
    )


def _name_column(item_names: IdBytes) -> Column:
    return Column(((len(item_names.offset_bytes) // 4 - 1, 0),), (b"", item_names.offset_bytes, item_names.joined_ids))


def _vector_column(
    field: Field, row_count: int, answer_by_row: Mapping[int, AnswerJson], stored_rows: StoredRows, vector_width: int
) -> tuple[Field, Column]:
    """Return the vector column of the table's width; of lists of any size if another night's answers differ."""
    vector_by_row: list[NDArray[np.float32] | None] = [None] * row_count
    for row, vector in zip(stored_rows.answer_indices.tolist(), stored_rows.row_numbers, strict=True):
        vector_by_row[row] = vector
    for row, answer in answer_by_row.items():
        vector_by_row[row] = answer[field.name]
    is_present = [row_vector is not None for row_vector in vector_by_row]
    present_vectors = [row_vector for row_vector in vector_by_row if row_vector is not None]
    if all(len(row_vector) == vector_width for row_vector in present_vectors):
        matrix = np.zeros((row_count, vector_width), np.float32)
        if present_vectors:
            matrix[np.flatnonzero(is_present)] = present_vectors
        fixed_field = field._replace(kind="fixed", fixed_list_size=vector_width)
        return fixed_field, fixed_list_column(row_count, number_column(matrix.ravel()), is_present)
    vector_sizes = [0 if row_vector is None else len(row_vector) for row_vector in vector_by_row]
    flat_numbers = np.concatenate(present_vectors)
    return field, list_column(_list_ends(vector_sizes), number_column(flat_numbers), is_present)


def _text_list_column(text_lists: Sequence[Sequence[str]]) -> Column:
    flat_texts = [text.encode() for text in itertools.chain.from_iterable(text_lists)]
    return list_column(_list_ends([len(row_texts) for row_texts in text_lists]), whole_text_column(flat_texts))


def _list_ends(list_sizes: Sequence[int]) -> NDArray[np.int32]:
    return np.fromiter(itertools.accumulate(list_sizes, initial=0), np.int32, len(list_sizes) + 1)
