"""Columns of whatever type a field of every answer may be declared with."""

from typing import Any

import pyarrow as pa
import pytest

from serving.arrow.schema import ColumnKind, Field
from serving.arrow.writer import write_stream
from serving.engine.rendering.arrow_answers import field_column


@pytest.mark.parametrize(
    ("kind", "first_value", "second_value"),
    [("utf8", "a", "b"), ("f8", 0.5, 0.0), ("i4", -1, 0), ("bool", True, False)],
)
def test_a_field_is_read_back_whether_it_differs_by_row_or_not(
    kind: ColumnKind, first_value: Any, second_value: Any
) -> None:
    for values in (
        [first_value],
        [first_value] * 9,
        [first_value, second_value, first_value],
        [first_value, None, second_value],
        [None] * 3,
    ):
        field = Field("x", kind, None in values)
        arrow_stream = write_stream((field,), [field_column(field, values)], len(values), ())

        read = pa.ipc.open_stream(arrow_stream).read_all()
        read.validate(full=True)

        assert read["x"].to_pylist() == values
