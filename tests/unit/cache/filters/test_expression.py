"""Filters are read within bounds; each that is none is refused with the place and the reason."""

from typing import Any

import pytest

from cache.filters.expression import (
    DEPTH_MAX,
    NODES_MAX,
    VALUES_MAX,
    CombinationNode,
    ComparisonNode,
    InvalidFilter,
    read_filter,
)


def nested(depth: int) -> Any:
    filter_json: Any = {"exists": "a"}
    for _ in range(depth):
        filter_json = {"not": filter_json}
    return filter_json


INVALID_EXPRESSIONS: list[tuple[Any, str, str]] = [
    (None, "", "a JSON object with one operator"),
    ("price < 20", "", "a JSON object with one operator"),
    ([], "", "a JSON object with one operator"),
    ({}, "", "a JSON object with one operator"),
    ({"==": ["a", 1], "<": ["b", 2]}, "", "a JSON object with one operator"),
    (7, "", "a JSON object with one operator"),
    ({"=": ["a", 1]}, "", "there is no operator '='"),
    ({"$where": "1"}, "", "there is no operator '$where'"),
    ({"regex": ["a", "(x+)+$"]}, "", "there is no operator 'regex'"),
    ({"AND": [{"exists": "a"}]}, "", "there is no operator 'AND'"),
    ({"and": []}, "and", "a list of one or more"),
    ({"or": {}}, "or", "a list of one or more"),
    ({"and": "x"}, "and", "a list of one or more"),
    ({"and": [None]}, "and[0]", "a JSON object with one operator"),
    ({"and": [{"exists": "a"}, {"or": [{"x": 1}]}]}, "and[1].or[0]", "there is no operator 'x'"),
    ({"not": []}, "not", "a JSON object with one operator"),
    ({"not": None}, "not", "a JSON object with one operator"),
    ({"not": {"not": {"in": ["a", []]}}}, "not.not.in[1]", "a list of one or more values"),
    ({"exists": 7}, "exists", "the name of an attribute is a text"),
    ({"exists": ["a"]}, "exists", "the name of an attribute is a text"),
    ({"exists": "x" * 257}, "exists", "at most 256 bytes"),
    ({"==": "a"}, "==", "a list of an attribute and a value"),
    ({"==": ["a"]}, "==", "a list of an attribute and a value"),
    ({"==": ["a", 1, 2]}, "==", "a list of an attribute and a value"),
    ({"==": [1, "a"]}, "==[0]", "the name of an attribute is a text"),
    ({"==": ["a", None]}, "==[1]", "a value is a text, a finite number"),
    ({"==": ["a", [1]]}, "==[1]", "a value is a text, a finite number"),
    ({"==": ["a", {"b": 1}]}, "==[1]", "a value is a text, a finite number"),
    ({"<": ["a", float("nan")]}, "<[1]", "a value is a text, a finite number"),
    ({">": ["a", float("inf")]}, ">[1]", "a value is a text, a finite number"),
    ({"<=": ["a", 2**53 + 1]}, "<=[1]", "a value is a text, a finite number"),
    ({">=": ["a", "x" * 257]}, ">=[1]", "at most 256 bytes"),
    ({"contains": ["a", ["x"]]}, "contains[1]", "a value is a text, a finite number"),
    ({"in": ["a", "x"]}, "in[1]", "a list of one or more values"),
    ({"in": ["a", []]}, "in[1]", "a list of one or more values"),
    ({"in": ["a", ["x", None]]}, "in[1][1]", "a value is a text, a finite number"),
    ({"in": ["a", list(range(VALUES_MAX + 1))]}, "in[1]", f"at most {VALUES_MAX} values"),
    ({"or": [{"in": ["a", [1] * 600]}, {"in": ["a", [1] * 600]}]}, "or[1].in[1]", "at most 1000 values"),
    ({"and": [{"exists": "a"}] * NODES_MAX}, f"and[{NODES_MAX - 1}]", f"at most {NODES_MAX}"),
    (nested(DEPTH_MAX + 1), ".".join(["not"] * (DEPTH_MAX + 1)), f"at most {DEPTH_MAX} deep"),
    (nested(10_000), ".".join(["not"] * (DEPTH_MAX + 1)), f"at most {DEPTH_MAX} deep"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "field_path", "reason"), INVALID_EXPRESSIONS)
def test_a_bad_filter_is_refused_with_place_and_reason(value: Any, field_path: str, reason: str) -> None:
    with pytest.raises(InvalidFilter) as refused:
        read_filter(value)

    assert refused.value.details.get("field", "") == field_path
    assert reason in refused.value.message and "\n" not in refused.value.message


def test_there_are_forty_bad_ones() -> None:
    assert len(INVALID_EXPRESSIONS) >= 40


def test_a_filter_is_read_as_it_was_meant() -> None:
    filter_ = read_filter({"and": [{"<": ["price", 20]}, {"not": {"in": ["brand", ["x", "y"]]}}]})

    assert filter_.root_expression == CombinationNode(
        "and",
        (
            ComparisonNode("<", "price", (20,), "and[0].<"),
            CombinationNode("not", (ComparisonNode("in", "brand", ("x", "y"), "and[1].not.in"),)),
        ),
    )
    assert filter_.canonical_bytes == read_filter(
        {"and": [{"<": ["price", 20]}, {"not": {"in": ["brand", ["x", "y"]]}}]}
    ).canonical_bytes  # fmt: skip


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        ({"and": [{"exists": "a"}] * NODES_MAX}, NODES_MAX),
        (nested(DEPTH_MAX + 1), DEPTH_MAX),
        ({"in": ["a", list(range(VALUES_MAX + 1))]}, VALUES_MAX),
        ({">=": ["a", "x" * 257]}, 256),
    ],
)
def test_a_filter_that_is_too_large_is_refused_with_the_limit(value: Any, limit: int) -> None:
    with pytest.raises(InvalidFilter) as refused:
        read_filter(value)

    assert refused.value.details["limit"] == limit


def test_the_largest_filter_is_taken() -> None:
    read_filter({"and": [{"exists": "a"}] * (NODES_MAX - 1)})
    read_filter({"in": ["a", list(range(VALUES_MAX))]})
    read_filter(nested(DEPTH_MAX))
