import subprocess
import sys
from collections.abc import Callable

import numpy as np
import orjson
import pytest

from serving.client import Entity, NewEvent, Options, Unanswered
from serving.client.calls import as_id, build_get, build_post, event_calls, feedback, many_binary, score, split
from serving.client.errors import InvalidArgument


@pytest.mark.parametrize("wrong", [True, 1.5, None, b"u-1"])
def test_what_is_no_id_is_refused_before_it_leaves(wrong: object) -> None:
    with pytest.raises(TypeError, match="an id must be"):
        as_id(wrong)


@pytest.mark.parametrize(
    "build_calls",
    [
        lambda: list(split("u-1", Options(), 10, 10)),
        lambda: build_post("t", [Entity("u-1", history="i-1")], Options()),
        lambda: build_post("t", ["u-1"], Options(exclude="i-1")),
        lambda: score("u-1", "i-1", Options()),
    ],
)
def test_a_text_is_not_taken_for_a_list_of_its_letters(build_calls: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="not the text"):
        build_calls()


HALF = "half an emoji: \ud83d"
NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("build_call", "field"),
    [
        (lambda: build_get("t", HALF, Options()), "id"),
        (lambda: build_get(HALF, "u-1", Options()), "table"),
        (lambda: build_get("t", "u-1", Options(generation=HALF)), "generation"),
        (lambda: build_get("t", "u-1", Options(filter={"==": ["brand", HALF]})), "filter.==[1]"),
        (lambda: build_get("t", "u-1", Options(canary_key=HALF)), "canary_key"),
        (lambda: build_post("t", ["u-1", HALF], Options()), "entities[1]"),
        (lambda: build_post("t", ["u-1", Entity(HALF)], Options()), "entities[1].id"),
        (lambda: build_post("t", ["u-1", Entity(history=["a", HALF])], Options()), "entities[1].history[1]"),
        (lambda: build_post("t", ["u-1"], Options(exclude=["a", HALF])), "exclude[1]"),
        (lambda: build_post(None, [Entity("u-1", table=HALF)], Options()), "entities[0].table"),
        (lambda: many_binary("t", ["u-1", HALF], Options()), "entities[1]"),
        (lambda: score(HALF, ["i"], Options()), "user"),
        (lambda: score("u-1", ["i", HALF], Options()), "items[1]"),
        (lambda: score(Entity(features={"name": HALF}), ["i"], Options()), "user.features.name"),
        (lambda: feedback("click", HALF, None, None, 1), "generation"),
        (lambda: event_calls([NewEvent("e", user=HALF)], 10), "events[0].user"),
        (lambda: build_post("t", [Entity(features={"price": object()})], Options()), "body"),
        (lambda: Options(deadline_ms=-1), "deadline_ms"),
    ],
)
def test_what_cannot_be_sent_is_named_by_its_place(build_call: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        build_call()

    assert caught.value.field == field and field in str(caught.value)
    assert isinstance(caught.value, Unanswered)


@pytest.mark.parametrize("number", [NAN, INFINITY, -INFINITY, np.float32("nan"), np.float64("inf")])
@pytest.mark.parametrize(
    ("build_call", "field"),
    [
        (lambda number: build_post("t", ["a", Entity("u", features={"price": number})], Options()),
         "entities[1].features.price"),
        (lambda number: build_post("t", [Entity(features={"v": [0.5, number]})], Options()),
         "entities[0].features.v[1]"),
        (lambda number: build_post("t", [Entity(features={"v": np.array([0.5, number])})], Options()),
         "entities[0].features.v[1]"),
        (lambda number: score(Entity(features={"v": (number, "x")}), ["i"], Options()), "user.features.v[0]"),
        (lambda number: build_get("t", "u", Options(max_age_seconds=number)), "max_age_seconds"),
        (lambda number: build_get("t", "u", Options(filter={"<": ["price", number]})), "filter.<[1]"),
        (lambda number: build_post("t", ["u"], Options(rerank={"diversify": {"mmr": number}})), "rerank.diversify.mmr"),
        (lambda number: feedback("click", None, "k", None, number), "count"),
        (lambda number: event_calls([NewEvent("a"), NewEvent("e", weight=number)], 10), "events[1].weight"),
        (lambda number: event_calls([NewEvent("e", time=number)], 10), "events[0].time"),
        (lambda number: event_calls([NewEvent("e", vector=[1, number])], 10), "events[0].vector[1]"),
        (lambda number: event_calls([NewEvent("e", attributes={"a": number})], 10), "events[0].attributes.a"),
        (lambda number: event_calls([NewEvent("e", features={"a": number})], 10), "events[0].features.a"),
    ],
)  # fmt: skip
def test_a_number_that_json_does_not_have_never_becomes_null(
    build_call: Callable[[float], object], field: str, number: float
) -> None:
    with pytest.raises(InvalidArgument, match="must be a finite number") as caught:
        build_call(number)

    assert caught.value.field == field and field in str(caught.value)


def test_numbers_texts_and_arrays_go_as_they_are() -> None:
    features = {"price": 1.5, "tags": ["é", "b"], "v": np.array([0.5, 1], np.float32), "big": [2**62, 0.5], "n": 3}

    body = orjson.loads(build_post("t", [Entity("é", features=features)], Options()).request_body or b"")

    assert body["entities"] == [{"id": "é", "features": features | {"v": [0.5, 1.0]}}]


def test_an_id_beyond_64_bits_travels_as_its_decimal_form() -> None:
    body = orjson.loads(build_post("t", [2**80], Options()).request_body or b"")

    assert body["entities"] == [{"id": str(2**80)}]


def test_options_that_are_not_set_are_left_to_the_service() -> None:
    call = build_get("t", "u-1", Options(k=3, fresh=True, canary_key=9))

    assert call.query_parameters == {"k": "3", "fresh": "true", "canary_key": "9"}


def test_a_url_has_no_room_for_exclude() -> None:
    with pytest.raises(ValueError, match="lookup_many"):
        build_get("t", "u-1", Options(exclude=["i-1"]))


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (1, [1]), (3, [3]), (4, [3, 1]), (7, [3, 3, 1])])  # fmt: skip
def test_a_batch_is_cut_where_the_service_would_refuse_it(count: int, sizes: list[int]) -> None:
    parts = list(split(list(range(count)), Options(), 3, 100))

    assert [len(part) for part in parts] == sizes
    assert [entity_id for part in parts for entity_id in part] == list(range(count))


def test_histories_and_exclude_count_as_the_service_counts_them() -> None:
    entities = [Entity(str(index), history=["i"] * 4) for index in range(5)]

    parts = list(split(entities, Options(exclude=["x", "y"]), 100, 10))

    assert [len(part) for part in parts] == [2, 2, 1]


def test_features_count_as_the_service_counts_them() -> None:
    entities = [Entity(str(index), features={"a": [0.5] * 3, "b": "x"}) for index in range(5)]

    parts = list(split(entities, Options(), 100, 10, 10))

    assert [len(part) for part in parts] == [2, 2, 1]


def test_an_entity_beyond_every_limit_still_goes_so_that_the_service_says_so() -> None:
    big = Entity("u-1", history=["i"] * 20)

    assert list(split([big], Options(), 10, 5)) == [[big]]


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan"), float("inf")])
def test_a_deadline_that_no_wait_can_have_is_refused(deadline: float) -> None:
    with pytest.raises(ValueError, match="deadline_ms"):
        Options(deadline_ms=deadline)


def test_a_caller_loads_nothing_of_the_service_itself() -> None:
    heavy = {"fastapi", "faiss", "onnxruntime", "redis", "cache", "precompute"}
    program = f"import serving.client, sys; print(sorted({heavy} & set(sys.modules)))"

    completed_process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert completed_process.stdout.strip() == "[]"
