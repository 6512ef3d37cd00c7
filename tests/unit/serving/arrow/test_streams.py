"""Arrow streams: what is written, pyarrow reads; what pyarrow writes is read; everything else is refused."""

import contextlib
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.arrow.reader import UnsupportedStream, read_frame
from serving.arrow.schema import Field, MalformedStream
from serving.arrow.writer import (
    Column,
    fixed_list_column,
    flag_column,
    list_column,
    number_column,
    text_column,
    write_stream,
)
from serving.client.answers import read_arrow_answers
from serving.client.calls import write_arrow_ids
from serving.client.errors import Garbled
from serving.requests.errors import Problem
from serving.requests.negotiation import Forms, parse_forms
from serving.requests.options import Limits
from serving.requests.parsing import id_batch_from_stream, lookup_from_body, read_arrow_lookup

LIMITS = Limits(max_batch=50, max_history=8, max_exclude=8, deadline_ms=100, deadline_max_ms=1_000)
FIELDS = (
    Field("id", "utf8", True),
    Field("items", "list", True, Field("item", "utf8")),
    Field("scores", "list", False, Field("item", "f4")),
    Field("vector", "fixed", True, Field("item", "f4"), 3),
    Field("short", "bool", True),
    Field("dropped", "i4", True),
    Field("age", "f8"),
)
FLOATS = st.floats(width=32, allow_nan=False)
ROWS = st.lists(
    st.tuples(
        st.none() | st.text(max_size=5),
        st.none() | st.lists(st.text(max_size=4), max_size=3),
        st.lists(FLOATS, max_size=3),
        st.none() | st.lists(FLOATS, min_size=3, max_size=3),
        st.none() | st.booleans(),
        st.none() | st.integers(-(2**31), 2**31 - 1),
        st.floats(allow_nan=False),
    ),
    max_size=20,
)


def written(rows: list[tuple[Any, ...]]) -> bytes:
    ids, items, scores, vectors, short, dropped_counts, age = zip(*rows, strict=True) if rows else ((),) * 7
    flat = [item.encode() for row in items for item in row or ()]
    columns = [
        text_column([None if id_ is None else id_.encode() for id_ in ids]),
        list_column(ends(items), text_column(flat), [item_list is not None for item_list in items]),
        list_column(ends(scores), number_column(np.array([n for row in scores for n in row], np.float32))),
        fixed_list_column(
            len(rows),
            number_column(np.array([row or [0] * 3 for row in vectors], np.float32).ravel()),
            [vector is not None for vector in vectors],
        ),
        flag_column([bool(is_short) for is_short in short], [is_short is not None for is_short in short]),
        number_column(
            np.array([dropped_count or 0 for dropped_count in dropped_counts], np.int32),
            [dropped_count is not None for dropped_count in dropped_counts],
        ),
        number_column(np.array(age, np.float64)),
    ]
    return write_stream(FIELDS, columns, len(rows), (("table", "t"), ("ü", "")))


def ends(lists_: tuple[Any, ...]) -> NDArray[np.int32]:
    return np.cumsum([0, *(len(list_ or ()) for list_ in lists_)], dtype=np.int32)


@given(rows=ROWS)
@example(rows=[])
def test_pyarrow_reads_what_is_written_and_so_do_we(rows: list[tuple[Any, ...]]) -> None:
    raw = written(rows)

    table = pa.ipc.open_stream(raw).read_all()
    table.validate(full=True)
    frame = read_frame(raw, len(rows))

    assert table.schema.metadata == {b"table": b"t", "ü".encode(): b""}
    for name, at in zip(table.column_names, range(7), strict=True):
        expected = [row[at] for row in rows]
        assert table[name].to_pylist() == expected
        cells = [list(cell) if isinstance(cell, tuple | np.ndarray) else cell for cell in frame.values_by_column[name]]
        assert cells == expected
    assert frame.row_count == len(rows) and frame.schema_metadata == {"table": "t", "ü": ""}


def body(*arrays: pa.Array, names: list[str] | None = None, **metadata: str) -> bytes:
    schema = pa.schema(
        [pa.field(name, array.type) for name, array in zip(names or ["id"], arrays, strict=True)],
        metadata=metadata or None,
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(list(arrays), schema=schema), custom_metadata=None)
    arrow_stream: bytes = sink.getvalue().to_pybytes()
    return arrow_stream


IDS = st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=50)


@given(ids=IDS, type_=st.sampled_from([pa.string(), pa.large_string()]), cut=st.integers(0, 3))
def test_ids_from_pyarrow_are_read_from_slices_and_many_batches(ids: list[str], type_: pa.DataType, cut: int) -> None:
    column = pa.array(["before", *ids], type_)
    table = pa.table({"id": column.slice(1)}).replace_schema_metadata({"pandas": "{}", "k": "7"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=cut + 1)

    id_batch = id_batch_from_stream(read_arrow_lookup(sink.getvalue().to_pybytes(), LIMITS))

    assert id_batch == ([id_.encode() for id_ in ids], 7)


@given(ids=IDS)
def test_the_clients_question_is_what_pyarrow_would_send(ids: list[str]) -> None:
    raw = write_arrow_ids(ids, {"k": "3", "deadline_ms": "20.5"})

    assert pa.ipc.open_stream(raw).read_all()["id"].to_pylist() == ids
    lookup = lookup_from_body({}, raw, "arrow", "t", LIMITS)
    assert [entity.id for entity in lookup.entities] == ids
    assert (lookup.options.k, lookup.options.deadline_s) == (3, 0.0205)


def compressed() -> bytes:
    sink = pa.BufferOutputStream()
    column = pa.record_batch({"id": ["u" * 999] * 40})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, column.schema, options=options) as writer:
        writer.write_batch(column)
    arrow_stream: bytes = sink.getvalue().to_pybytes()
    return arrow_stream


REFUSED = {
    "compressed": (compressed(), "unsupported_arrow"),
    "a dictionary": (body(pa.array(["a"]).dictionary_encode()), "unsupported_arrow"),
    "numbers": (body(pa.array([1], pa.int64())), "unsupported_arrow"),
    "a view": (body(pa.array(["a"], pa.string_view())), "unsupported_arrow"),
    "whole numbers": (body(pa.array([1], pa.int32())), "invalid_field"),
    "another name": (body(pa.array(["a"]), names=["user"]), "invalid_field"),
    "another column": (body(pa.array(["a"]), pa.array([1.0]), names=["id", "x"]), "invalid_field"),
    "a name twice": (body(pa.array(["a"]), pa.array(["b"]), names=["id", "id"]), "invalid_arrow"),
    "a null": (body(pa.array(["a", None])), "invalid_field"),
    "an empty id": (body(pa.array(["a", ""])), "invalid_id"),
    "a long id": (body(pa.array(["a" * 257])), "invalid_id"),
    "no rows": (body(pa.array([], pa.string())), "batch_too_long"),
    "one too many": (body(pa.array(["a"] * 51)), "batch_too_long"),
    "far too many": (body(pa.array(["a"] * 5_000)), "invalid_arrow"),
    "an unknown option": (body(pa.array(["a"]), kk="1"), "unknown_field"),
    "a bad k": (body(pa.array(["a"]), k="0"), "invalid_k"),
    "nothing": (b"", "invalid_arrow"),
    "JSON": (b'{"entities":["u-1"]}', "invalid_arrow"),
    "an end only": (b"\xff\xff\xff\xff\0\0\0\0", "invalid_arrow"),
    "a schema only": (body(pa.array([], pa.string()))[:-8], "batch_too_long"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_its_reason(name: str) -> None:
    raw, code = REFUSED[name]

    with pytest.raises(Problem) as refused:
        lookup_from_body({}, raw, "arrow", "t", LIMITS)

    assert (refused.value.status, refused.value.reason) == (422, code)


ID = (Field("id", "utf8"),)


def offsets(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


MALFORMED_COLUMNS = {
    "falling offsets": (Column(((2, 0),), (b"", offsets(0, 2, 1), b"ab")), 2),
    "negative offsets": (Column(((2, 0),), (b"", offsets(-1, 0, 1), b"ab")), 2),
    "too few offsets": (Column(((2, 0),), (b"", offsets(0, 1), b"ab")), 2),
    "texts beyond their bytes": (Column(((2, 0),), (b"", offsets(0, 1, 3), b"ab")), 2),
    "half a character": (Column(((2, 0),), (b"", offsets(0, 1, 2), "ü".encode())), 2),
    "another number of rows": (Column(((1, 0),), (b"", offsets(0, 1), b"a")), 2),
    "more nulls than rows": (Column(((1, 2),), (b"", offsets(0, 1), b"a")), 1),
    "nulls without a bitmap": (Column(((1, 1),), (b"", offsets(0, 1), b"a")), 1),
    "a buffer less": (Column(((1, 0),), (b"", offsets(0, 1))), 1),
    "a buffer more": (Column(((1, 0),), (b"", offsets(0, 1), b"a", b"a")), 1),
    "a column more": (Column(((1, 0), (1, 0)), (b"", offsets(0, 1), b"a")), 1),
    "no column": (Column((), ()), 1),
    "fewer rows than none": (Column(((-1, 0),), (b"", b"", b"")), -1),
    "rows for ever": (Column(((2**62, 0),), (b"", b"", b"")), 2**62),
}


@pytest.mark.parametrize("name", MALFORMED_COLUMNS)
def test_numbers_that_do_not_agree_are_refused(name: str) -> None:
    column, rows = MALFORMED_COLUMNS[name]

    with pytest.raises(MalformedStream):
        read_frame(write_stream(ID, [column], rows), 50)


VALID = body(pa.array(["u-1", "用户", "a/b"]), k="5")


@given(data=st.data())
def test_a_damaged_stream_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    raw = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        width, layout = data.draw(st.sampled_from([(1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q")]))
        at = data.draw(st.integers(0, len(raw) - width))
        number = data.draw(st.integers(0, 256**width - 1) | st.sampled_from([0, 1, 256**width - 1]))
        struct.pack_into(layout, raw, at, number)
    end = data.draw(st.integers(0, len(raw)) | st.just(len(raw)))

    with contextlib.suppress(Problem):  # any other error fails
        lookup = lookup_from_body({}, bytes(raw[:end]), "arrow", "t", LIMITS)
        assert 1 <= len(lookup.entities) <= LIMITS.max_batch
        assert all(entity.raw_id and len(entity.raw_id) <= 256 for entity in lookup.entities)


@given(raw=st.binary(max_size=300), rows=st.integers(0, 3))
def test_what_anybody_answers_is_garbled_at_worst(raw: bytes, rows: int) -> None:
    for answer_body in (raw, VALID[: len(raw)] + raw):
        with pytest.raises(Garbled):
            read_arrow_answers(answer_body, rows)
        with pytest.raises((MalformedStream, UnsupportedStream)):
            read_frame(b"\xff\xff\xff\xff" + answer_body, rows)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, Forms("json", "json")),
        ({"content-type": "application/vnd.apache.arrow.stream"}, Forms("arrow", "json")),
        ({"content-type": "Application/JSON; charset=utf-8", "accept": "*/*"}, Forms("json", "json")),
        ({"content-type": "application/x-www-form-urlencoded"}, Forms("json", "json")),
        ({"accept": "application/vnd.apache.arrow.stream"}, Forms("json", "arrow")),
        ({"accept": "*/*, application/vnd.apache.arrow.stream"}, Forms("json", "arrow")),
        ({"accept": "application/json;q=0.5,application/vnd.apache.arrow.stream; q=0.4"}, Forms("json", "json")),
        ({"accept": "text/html, application/*;q=0.1"}, Forms("json", "json")),
        ({"accept": "text/html"}, 406),
        ({"accept": "application/json;q=0"}, 406),
        ({"accept": "application/json;q=x"}, 406),
        ({"content-type": "application/vnd.apache.arrow.file"}, 415),
        ({"content-type": "text/csv", "accept": "text/html"}, 415),
    ],
)
def test_forms_are_chosen_by_the_headers(headers: dict[str, str], expected: object) -> None:
    assert outcome([(name.encode(), value.encode()) for name, value in headers.items()]) == expected


def outcome(headers: list[tuple[bytes, bytes]]) -> object:
    try:
        return parse_forms(headers)
    except Problem as problem:
        return problem.status
