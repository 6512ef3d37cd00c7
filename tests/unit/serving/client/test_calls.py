import subprocess
import sys
from collections.abc import Callable

import orjson
import pytest

from serving.client import Entity, Options
from serving.client.calls import as_id, build_get, build_post, score, split


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


def test_an_id_beyond_64_bits_travels_as_its_decimal_form() -> None:
    body = orjson.loads(build_post("t", [2**80], Options()).content or b"")

    assert body["entities"] == [{"id": str(2**80)}]


def test_options_that_are_not_set_are_left_to_the_service() -> None:
    call = build_get("t", "u-1", Options(k=3, fresh=True, canary_key=9))

    assert call.params == {"k": "3", "fresh": "true", "canary_key": "9"}


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
