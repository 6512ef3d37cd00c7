"""Whatever ids hold, what the renderers write is read back as what was asked."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache.format.ids import ID_BYTES_MAX, canonical_id
from cache.native import loader, pure
from cache.records import Layout, encode_numbers, encode_topk
from cache.tiers.reads import Hit
from serving.client.calls import write_arrow_ids
from serving.engine.batch_lookup import list_items
from serving.engine.rendering import json_answers
from serving.engine.rendering.arrow_answers import NO_ITEMS, StoredRows, answers_stream
from serving.engine.rendering.json_answers import answer_start
from serving.requests.options import Limits
from serving.requests.parsing import id_batch_from_stream, read_arrow_lookup
from tests import hostile
from tests.unit.serving.engine.rendering.test_compiled_rows import COLUMNS, snapshot, some_row, table

LAYOUTS = (Layout("topk", 2, "f2"), Layout("vector", 2, "f4"), Layout("value", 2, "f4"))
END = b',"source":"l1"}'
LIMITS = Limits(max_batch=500, max_history=8, max_exclude=8, deadline_ms=100, deadline_max_ms=100)

some_ids = st.lists(hostile.ids, min_size=1, max_size=6)
each_way = pytest.mark.parametrize("columns", [COLUMNS, pure], ids=["compiled", "interpreted"])
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind)


def records(layout: Layout, count: int, items: int) -> NDArray[Any]:
    prints = np.arange(count, dtype=np.uint64)
    numbers = np.tile(np.array([0.5, 0.25], np.float32), (count, 1))
    if layout.kind == "topk":
        ordinals = (np.arange(2 * count, dtype=np.uint32) % items).reshape(count, 2)
        return encode_topk(layout, prints, ordinals, numbers, 1)
    return encode_numbers(layout, prints, numbers, 1)


def wanted(layout: Layout, ids: list[str], names: list[str]) -> list[dict[str, Any]]:
    """What anybody would answer."""
    answers: list[dict[str, Any]] = []
    for at, id_ in enumerate(ids):
        item_pair = names[2 * at % len(names)], names[(2 * at + 1) % len(names)]
        predictions: dict[str, dict[str, Any]] = {
            "topk": {"items": [*item_pair], "scores": [0.5, 0.25], "short": False},
            "vector": {"vector": [0.5, 0.25]},
            "value": {"values": [0.5, 0.25], "labels": ["a", "a"]},
        }
        answers.append({"id": id_, "table": "t", **predictions[layout.kind], "source": "l1"})
    return answers


def test_the_hostile_ids_are_ids() -> None:
    lengths = [len(canonical_id(hostile_id)) for hostile_id in hostile.EVERY]

    assert max(lengths) == ID_BYTES_MAX and len(hostile.EVERY) > 100


@each_layout
@each_way
@settings(deadline=None, max_examples=60)
@given(ids=some_ids, names=some_ids)
@example(ids=['a",', "b"], names=["i"])
@example(ids=['",', '",', ","], names=['",', '",', ","])
@example(ids=["\\", '\\"', '\\",', "b"], names=["\0", "a\0"])
@example(ids=list(hostile.EVERY), names=list(hostile.EVERY))
def test_rows_written_at_once_are_each_the_json_of_one(
    columns: Any, layout: Layout, ids: list[str], names: list[str]
) -> None:
    """An id that ended in a quote and a comma was cut in two, and its neighbour's answer with it."""
    live, good = snapshot(names), records(layout, len(ids), len(names))

    with patch.object(loader, "kernels", columns):
        texts = json_answers.answer_texts(live, table(layout), ids, good, 2, [END] * len(ids))

    assert [orjson.loads(text) for text in texts] == wanted(layout, ids, names)


@each_layout
@settings(deadline=None, max_examples=60)
@given(id_=hostile.ids, names=some_ids)
@example(id_='a",', names=list(hostile.EVERY))
def test_one_row_is_written_as_one_of_many(layout: Layout, id_: str, names: list[str]) -> None:
    live, (record,) = snapshot(names), records(layout, 1, len(names))
    live.blocked_item_numbers = frozenset()

    start = answer_start(live, table(layout), Hit(record.tobytes(), "l1", False, None), id_, 2)

    assert start is not None
    assert orjson.loads(start + END) == wanted(layout, [id_], names)[0]


@each_way
@settings(deadline=None, max_examples=60)
@given(ids=some_ids, names=some_ids)
@example(ids=list(hostile.EVERY), names=list(hostile.EVERY))
def test_a_stream_of_answers_holds_the_ids_as_they_are(columns: Any, ids: list[str], names: list[str]) -> None:
    layout = LAYOUTS[0]
    live, good = snapshot(names), records(layout, len(ids), len(names))
    lookup: Any = SimpleNamespace(table=table(layout), k=2, served=SimpleNamespace(live=live))
    row = some_row("l1")

    with patch.object(loader, "kernels", columns):
        named = list_items(lookup, SimpleNamespace(record_rows=good), slice(None))  # type: ignore[arg-type]
        numbers = json_answers.record_numbers(table(layout), good, 2)
        stored_rows = StoredRows(np.arange(len(ids)), (row, row), np.zeros(len(ids), bool), numbers, named)
        arrow_stream = answers_stream(table(layout), [id_.encode() for id_ in ids], {}, stored_rows)

    read = pa.ipc.open_stream(arrow_stream).read_all()
    read.validate(full=True)
    assert read["id"].to_pylist() == ids
    assert read["items"].to_pylist() == [answer["items"] for answer in wanted(layout, ids, names)]
    assert named is not NO_ITEMS


@each_way
@settings(deadline=None, max_examples=60)
@given(ids=some_ids)
@example(ids=list(hostile.EVERY))
def test_a_stream_of_questions_is_read_as_it_was_asked(columns: Any, ids: list[str]) -> None:
    with patch.object(loader, "kernels", columns):
        id_batch = id_batch_from_stream(read_arrow_lookup(write_arrow_ids(ids, {}), LIMITS))

    assert id_batch is not None and [raw.decode() for raw in id_batch.raw_ids] == ids
