"""Answers from records are the same, byte for byte, whether what is compiled makes them or numpy does."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache.errors import UnfitValue
from cache.format.item_table import ItemJsonTexts, SharedIdArrays
from cache.format.manifest import Producer, Table
from cache.native import loader, pure
from cache.native.loader import Numerals
from cache.records import NIGHTLY_FLAGS, NO_ITEM, Layout, encode_topk
from serving.arrow import writer
from serving.arrow.reader import read_frame
from serving.arrow.schema import Field
from serving.engine.batch_lookup import list_items
from serving.engine.rendering import json_answers
from serving.engine.rendering.arrow_answers import OriginRow, StoredRows, answers_stream, row_of
from serving.requests.answers import ORIGIN_FIELDS

COLUMNS: Any = loader.load_kernels({})
pytestmark = pytest.mark.skipif(COLUMNS is pure, reason="cache.native._columns was not built")
NAMES = ["i-1", "ü", 'a"b', "c\\d", "e\nf", "x" * 256, "7", "/"]
PLAIN = ["i-1", "ü", "7", "/", "x" * 256, "\x7f"]


@pytest.fixture(autouse=True, scope="module")
def switched_on() -> Iterator[None]:
    with patch.object(loader, "kernels", COLUMNS):
        yield


@contextmanager
def interpreted() -> Iterator[None]:
    with patch.object(loader, "kernels", pure):
        yield


def snapshot(names: Sequence[str], blocked: Sequence[int] = ()) -> Any:
    raws = [name.encode() for name in names]
    longest = max(map(len, raws))

    def ids_of(ordinals: NDArray[Any]) -> list[str]:
        return [names[ordinal] for ordinal in ordinals.ravel().tolist()]

    offsets = np.cumsum([0, *map(len, raws)]).astype(np.uint64)
    items = SimpleNamespace(
        count=len(names),
        shared_ids=SharedIdArrays(np.frombuffer(b"".join(raws), np.uint8), offsets),
        json_texts=ItemJsonTexts(len(names), ids_of, longest),
    )
    return SimpleNamespace(items=items, blocked_item_ordinals=np.array(blocked, np.int64))


def table(layout: Layout) -> Table:
    return Table("t", "user", Producer("topk"), layout, 8, (), ("a",) * layout.width)


@settings(deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(["topk", "vector", "value"]),
    precision=st.sampled_from(["f2", "f4"]),
    width=st.integers(1, 9),
    blocked=st.lists(st.integers(0, 7), max_size=1),
)
def test_what_is_plain_is_plain_whatever_bytes_a_record_has(
    data: st.DataObject, kind: Any, precision: Any, width: int, blocked: list[int]
) -> None:
    layout = Layout(kind, width, precision)
    count = data.draw(st.integers(0, 4))
    size = count * layout.size_bytes
    raw = data.draw(st.binary(min_size=size, max_size=size))
    rows = np.frombuffer(bytearray(raw), layout.dtype)
    k = data.draw(st.integers(1, width))
    if data.draw(st.booleans()):  # most of it as it should be
        rows["flags"], rows["count"] = NIGHTLY_FLAGS, data.draw(st.integers(0, width + 1))
        if kind == "topk":
            rows["items"] %= np.uint32(len(NAMES) + 1)
    live = snapshot(NAMES, blocked)

    is_plain = json_answers.plain_record_mask(live, table(layout), rows, k)

    with interpreted():
        assert is_plain.tolist() == json_answers.plain_record_mask(live, table(layout), rows, k).tolist()
    good = rows[is_plain]
    if len(good):
        same(live, table(layout), good, k)


def same(live: Any, of: Table, good: NDArray[Any], k: int) -> None:
    ids, ends = [f'"{at}ü",' for at in range(len(good))], [b"}"] * len(good)
    numbers = json_answers.record_numbers(of, good, k)
    texts = [json_answers.answer_texts(live, of, ids, good, k, ends) for _ in range(2)][1]
    lookup: Any = SimpleNamespace(table=of, k=k, served=SimpleNamespace(live=live))
    resolved: Any = SimpleNamespace(record_rows=good)
    named = list_items(lookup, resolved, slice(None))
    streamed = answers_stream(of, [b"i"] * len(good), {}, stored(numbers, named))
    with interpreted():
        pure_numbers = json_answers.record_numbers(of, good, k)
        assert numbers.view(np.uint32).tolist() == pure_numbers.view(np.uint32).tolist()
        assert texts == json_answers.answer_texts(live, of, ids, good, k, ends)
        pure_items = list_items(lookup, resolved, slice(None))
        assert named == pure_items and named.id_sizes.tolist() == pure_items.id_sizes.tolist()
        assert streamed == answers_stream(of, [b"i"] * len(good), {}, stored(pure_numbers, pure_items))
    assert all(orjson.loads(text)["id"] == name for text, name in zip(texts, ids, strict=True))


def some_row(source: str) -> OriginRow:
    """A row of the origin's columns, with something in each that always has something."""
    value_by_kind: dict[str, Any] = {"utf8": "g", "f8": 1.5, "i4": 1, "bool": True}
    always = [answer_field for answer_field in ORIGIN_FIELDS if answer_field.declaration.present_when == "always"]
    return row_of(
        {answer_field.name: value_by_kind[answer_field.arrow_field.kind] for answer_field in always}
        | {"source": source}
    )


def stored(numbers: NDArray[np.float32], named: Any) -> StoredRows:
    count = len(numbers)
    row = some_row("l2")
    return StoredRows(np.arange(count), (row, row), np.ones(count, bool), numbers, named)


@settings(deadline=None)
@given(
    scores=st.lists(st.lists(st.floats(-60000, 60000, width=16), min_size=3, max_size=3), min_size=1, max_size=5),
    power=st.integers(-120, 90),
    precision=st.sampled_from(["f2", "f4"]),
    names=st.sampled_from([NAMES, PLAIN]),
)
@example(scores=[[0.0, -0.0, 6e-8]], power=0, precision="f2", names=PLAIN)
@example(scores=[[1.0, 0.1, 0.0001]], power=-120, precision="f2", names=PLAIN)
def test_every_score_is_written_as_orjson_writes_it(
    scores: list[list[float]], power: int, precision: Any, names: list[str]
) -> None:
    expected_scores = np.array(scores, np.float32) * np.float32(2.0) ** power
    ordinals = (np.arange(expected_scores.size).reshape(expected_scores.shape) % len(names)).astype(np.uint32)
    ordinals[-1, -1] = NO_ITEM
    prints = np.arange(len(expected_scores), dtype=np.uint64)
    layout = Layout("topk", 3, precision)
    try:
        good = encode_topk(layout, prints, ordinals, expected_scores, 1)
    except UnfitValue:
        return
    live, k = snapshot(names), 2
    is_plain = json_answers.plain_record_mask(live, table(layout), good, k)
    same(live, table(layout), good[is_plain], k)
    (first, *_) = json_answers.answer_texts(live, table(layout), ["x"], good[:1], k, [b"}"])

    decoded = orjson.loads(first)
    assert decoded["items"] == [names[ordinal] for ordinal in ordinals[0, :k].tolist()]
    assert np.array(decoded["scores"], np.float32).tolist() == (
        json_answers.record_numbers(table(layout), good[:1], k)[0].tolist()
    )


def test_numerals_are_written_once_and_long_ones_left_to_others() -> None:
    numerals = Numerals()
    long = np.float32(-1.1754944e-38).view(np.uint32) >> 13  # its text has 14 bytes
    assert not numerals.text_rows.any()
    numerals.write([int(long), 0, 0])
    sizes = numerals.text_rows[:, 0]
    assert np.count_nonzero(sizes) == 2 and bytes(numerals.text_rows[0, 1:4]) == b"0.0"
    every = np.arange(1 << 19, dtype=np.uint32) << np.uint32(13)
    finite = every[np.isfinite(every.view(np.float32))]
    numerals.write((finite[::97] >> np.uint32(13)).tolist())
    for key in (finite[::97] >> np.uint32(13)).tolist():
        text = orjson.dumps(np.uint32(key << 13).view(np.float32), option=orjson.OPT_SERIALIZE_NUMPY)
        assert sizes[key] == min(len(text), 16)
        if len(text) < 16:
            assert bytes(numerals.text_rows[key, 1 : 1 + len(text)]) == text


@given(buffers=st.lists(st.binary(max_size=20), max_size=6), nodes=st.lists(st.integers(0, 9)))
def test_streams_are_put_together_alike(buffers: list[bytes], nodes: list[int]) -> None:
    size = 8 * (2 + len(nodes) + 2 * len(buffers))
    offsets = 0, 8, 16, 16 + 8 * len(nodes)
    arguments = (b"schema", b"\xff" * size, *offsets, 3, nodes, buffers, b"end")

    assert COLUMNS.stream(*arguments) == writer.assemble_stream(*arguments)


@given(
    ids=st.lists(st.text(max_size=5) | st.just(None), max_size=5),
    noise=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
)
def test_a_column_is_cut_alike_and_refused_alike(ids: list[str | None], noise: list[tuple[int, int]]) -> None:
    column = writer.text_column([None if id_ is None else id_.encode() for id_ in ids])
    field = Field("id", "utf8", True)
    damaged_stream = bytearray(writer.write_stream((field,), [column], len(ids)))
    for back, byte in noise:
        damaged_stream[-1 - back % len(damaged_stream)] = byte

    def read_columns(cutter: Any) -> Any:
        try:
            return read_frame(bytes(damaged_stream), 10, texts_as_bytes=True, text_cutter=cutter).values_by_column
        except ValueError as error:
            return type(error), str(error)

    assert read_columns(COLUMNS.cut_texts) == read_columns(pure.cut_texts) == read_columns(None)


@given(ids=st.lists(st.binary(max_size=5) | st.just(None), max_size=5))
def test_ids_become_a_column_alike(ids: list[bytes | None]) -> None:
    buffers = COLUMNS.joined(ids)

    assert (buffers is None) == (None in ids)
    if buffers is not None:
        assert (b"", *buffers) == writer.text_column(ids).column_buffers
