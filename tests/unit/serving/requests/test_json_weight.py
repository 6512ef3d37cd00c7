"""What a body may hold is bounded before anything is made of it."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.admission.work_pacer import YieldPacer
from serving.arrow.reader import BATCHES_MAX
from serving.requests import json_fields, parsing
from serving.requests.errors import Problem
from serving.requests.json_fields import has_more_values
from serving.requests.models import RequestedEntity
from serving.requests.parsing import (
    LARGE_BODY_BYTES,
    lookup_from_body,
    peek_content,
    pop_content,
    run_in_thread_if_large,
    store_refusal,
)
from tests import hostile
from tests.unit.serving.world import LIMITS

VALUES = st.recursive(
    st.integers(-9, 9) | hostile.ids,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(hostile.ids, inner, max_size=4),
    max_leaves=20,
)


def separators(value: object) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inner, list):
        return 0
    return max(1, len(inner)) + sum(map(separators, inner))


@settings(deadline=None, max_examples=60)
@given(value=VALUES, chunk=st.integers(5, 50) | st.just(1 << 16))
@example(value=["\\", "\\\\", ',"'], chunk=1)
@example(value=[",[{" * 50, "x"], chunk=4)
def test_what_a_text_holds_is_counted_outside_its_strings(value: object, chunk: int) -> None:
    text = orjson.dumps(value)
    count = separators(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving.requests.json_fields._SCAN_CHUNK_BYTES", chunk)

        assert not has_more_values(text, count)
        assert count == 0 or has_more_values(text, count - 1)


@given(text=st.binary(max_size=40), values_max=st.integers(0, 5))
def test_any_bytes_can_be_weighed(text: bytes, values_max: int) -> None:
    assert has_more_values(text, values_max) in (True, False)


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'"",', b"1,"])
def test_a_body_of_more_than_any_request_may_hold_is_not_parsed(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB of empty lists held the loop for 0.7 s, whatever came of them."""
    body = b'{"entities":[' + unit * ((8 << 20) // len(unit)) + b"0]}"
    monkeypatch.setattr(json_fields, "orjson", None)

    with pytest.raises(Problem) as caught:
        lookup_from_body({}, body, "json", "t", LIMITS)

    assert (caught.value.status, caught.value.reason) == (422, "too_many_values")
    assert caught.value.details["limit"] == LIMITS.max_values


def test_what_is_allowed_by_number_is_never_too_much_by_weight() -> None:
    limits = replace(LIMITS, max_batch=30, max_ids=100, max_numbers=100)
    entities: list[dict[str, Any]] = [
        {"table": "t", "id": ",[{", "history": [",", "x", "["], "features": {}} for _ in range(30)
    ]
    for entity in entities[:10]:
        entity["features"] = {f"f{at}": [] for at in range(10)}  # each counts as one
    body = {"entities": entities, "exclude": ["{"] * 10, "k": 1, "fresh": False}

    lookup = lookup_from_body({}, orjson.dumps(body), "json", None, limits)

    assert len(lookup.entities) == 30


@pytest.mark.parametrize("features", [{"x": [0.5] * 50}, {f"f{at}": 1 for at in range(50)}])
def test_all_features_together_are_limited(features: dict[str, Any]) -> None:
    limits = replace(LIMITS, max_numbers=100)
    entity = {"id": "a", "features": features}
    two, three = ({"entities": [entity] * count} for count in (2, 3))

    assert len(lookup_from_body({}, orjson.dumps(two), "json", "t", limits).entities) == 2
    with pytest.raises(Problem) as caught:
        lookup_from_body({}, orjson.dumps(three), "json", "t", limits)
    assert (caught.value.status, caught.value.reason) == (422, "too_many_numbers")


def stream(columns: dict[str, pa.Array], batches: int) -> bytes:
    batch = pa.record_batch(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(batches):
            writer.write_batch(batch)
    arrow_stream: bytes = sink.getvalue().to_pybytes()
    return arrow_stream


@pytest.mark.parametrize("columns", [{}, {"x": pa.array([], pa.float32())}])
def test_a_stream_of_other_columns_is_refused_before_its_batches_are_read(columns: dict[str, pa.Array]) -> None:
    raw = stream(columns, 0)[:-8] + b"whatever stands here" * 1_000

    with pytest.raises(Problem) as caught:
        lookup_from_body({}, raw, "arrow", "t", LIMITS)

    assert caught.value.reason == "invalid_field"


def test_a_stream_has_few_batches_with_or_without_rows() -> None:
    none, one_row = pa.array([], pa.string()), pa.array(["a"])
    assert len(lookup_from_body({}, stream({"id": one_row}, 40), "arrow", "t", LIMITS).entities) == 40

    for column, batches in ((none, BATCHES_MAX + 1), (none, 50_000), (one_row, BATCHES_MAX + 1)):
        with pytest.raises(Problem, match="more than 64 record batches") as caught:
            lookup_from_body({}, stream({"id": column}, batches), "arrow", "t", LIMITS)
        assert (caught.value.reason, caught.value.details["limit"]) == ("too_many_values", BATCHES_MAX)


def test_a_body_is_read_once_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def read_json(body: bytes, values_max: int) -> object:
        read.append(1)
        return json_fields.read_json(body, values_max)

    monkeypatch.setattr(parsing, "read_json", read_json)
    scope: dict[str, Any] = {}

    first = peek_content(scope, b'{"a": 1}', "json", LIMITS)
    assert pop_content(scope, b'{"a": 1}', "json", LIMITS) is first and read == [1]
    assert scope == {}, "what was taken is not held"

    store_refusal(scope, Problem(422, "x", "why"))
    for read_content in (peek_content, pop_content):
        with pytest.raises(Problem, match="why"):
            read_content(scope, b"{}", "json", LIMITS)
    assert read == [1] and scope == {}


async def test_a_large_body_is_read_beside_the_loop() -> None:
    where = [
        await run_in_thread_if_large(b" " * size, threading.get_ident)
        for size in (LARGE_BODY_BYTES, LARGE_BODY_BYTES + 1)
    ]

    assert where[0] == threading.get_ident() != where[1]


async def test_long_features_give_way_as_long_histories_do() -> None:
    iterations: list[int] = []
    asyncio.get_running_loop().call_soon(iterations.append, 1)

    await YieldPacer().count_entity(RequestedEntity("t", None, None, "e", features={"x": (0.5,) * 1_024}))

    assert iterations == [1]
