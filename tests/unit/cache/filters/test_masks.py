"""What passes a filter is what passes by a look at each item; what is kept of it is bounded."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.filters.expression import InvalidFilter, read_filter
from cache.filters.filtering import MaskCache, UnknownAttribute, mask_cost, mask_of
from cache.model.filter_mask import FilterMask
from tests.unit.cache.filters.columns import KINDS, attributes_of, passes

TEXTS = ["", "a", "b", "ä", "aa", "z"]
TIMES = [
    0, 1_700_000_000, 1_700_000_000.5, "2023-11-14T22:13:20Z", "2023-11-14T22:13:20.500000", "1970-01-01",
]  # fmt: skip
NUMBERS = [-1, 0, 0.5, 1, 2.5, 2**53]

ITEM = st.fixed_dictionaries(
    {},
    optional={
        "brand": st.sampled_from(TEXTS),
        "tags": st.lists(st.sampled_from(TEXTS), max_size=3, unique=True).map(tuple),
        "price": st.sampled_from(NUMBERS),
        "stock": st.booleans(),
        "since": st.sampled_from([0, 1_700_000_000_000_000, 1_700_000_000_500_000]),
    },
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "text": st.sampled_from([*TEXTS, "nobody"]), "texts": st.sampled_from([*TEXTS, "nobody"]),
    "number": st.sampled_from(NUMBERS), "flag": st.booleans(), "time": st.sampled_from(TIMES),
}  # fmt: skip
OPERATORS = {
    "text": ["=="], "texts": ["contains"], "flag": ["=="], "number": ["==", "<", "<=", ">", ">="],
    "time": ["==", "<", "<=", ">", ">="],
}  # fmt: skip


@st.composite
def comparisons(draw: st.DrawFn) -> Any:
    name = draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[name]
    operator = draw(st.sampled_from([*OPERATORS[kind], "exists", *(["in"] if kind != "texts" else [])]))
    if operator == "exists":
        return {"exists": name}
    if operator == "in":
        return {"in": [name, draw(st.lists(VALUES[kind], min_size=1, max_size=3))]}
    return {operator: [name, draw(VALUES[kind])]}


EXPRESSIONS = st.recursive(
    comparisons(),
    lambda part: st.one_of(
        part.map(lambda operand: {"not": operand}),
        st.lists(part, min_size=1, max_size=3).map(lambda operands: {"and": operands}),
        st.lists(part, min_size=1, max_size=3).map(lambda operands: {"or": operands}),
    ),
    max_leaves=6,
)


@given(st.lists(ITEM, min_size=1, max_size=20), EXPRESSIONS)
def test_what_passes_is_what_passes_one_by_one(items: list[Any], expression: Any) -> None:
    root = read_filter(expression).root_expression
    expected_mask = np.array([passes(root, item) for item in items])

    filter_mask = FilterMask.of(mask_of(root, attributes_of(items)))

    assert filter_mask.passing_count == expected_mask.sum()
    np.testing.assert_array_equal(filter_mask.among(np.arange(len(items))), expected_mask)
    np.testing.assert_array_equal(filter_mask.ordinals(), np.flatnonzero(expected_mask))


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ({"<": ["brand", "a"]}, "brand is of kind text, which takes ==, in, exists"),
        ({"==": ["tags", "a"]}, "tags is of kind texts, which takes contains, exists"),
        ({"contains": ["brand", "a"]}, "brand is of kind text"),
        ({">": ["stock", True]}, "stock is of kind flag"),
        ({"==": ["brand", 7]}, "brand is compared with a text"),
        ({"contains": ["tags", 7]}, "tags is compared with a text"),
        ({"<": ["price", "7"]}, "price is compared with a number"),
        ({"==": ["price", True]}, "price is compared with a number"),
        ({"==": ["stock", 1]}, "stock is compared with true or false"),
        ({">": ["since", "yesterday"]}, "since is compared with a time"),
        ({">": ["since", 1e15]}, "since is compared with a time"),
        ({"in": ["since", [0, True]]}, "since is compared with a time"),
    ],
)
def test_a_filter_that_does_not_fit_the_attributes_is_refused(expression: Any, reason: str) -> None:
    attributes = attributes_of([{"brand": "a", "tags": ("a",)}])

    with pytest.raises(InvalidFilter) as refused:
        mask_of(read_filter({"and": [expression]}).root_expression, attributes)

    (operator,) = expression
    assert reason in refused.value.message
    assert refused.value.details["field"] == f"and[0].{operator}"


def test_an_attribute_that_items_lack_is_refused_with_those_they_have() -> None:
    with pytest.raises(UnknownAttribute) as refused:
        mask_of(read_filter({"exists": "colour"}).root_expression, attributes_of([{}]))

    assert refused.value.details["attributes"] == KINDS
    assert "'colour'; they have brand, price, since, stock, tags" in refused.value.message


def test_what_is_kept_is_bounded_and_the_oldest_goes() -> None:
    masks = MaskCache(attributes_of([{"price": price} for price in range(8_000)]), masks_bytes_max=10 * 2_024)
    filters = [read_filter({"<": ["price", price]}) for price in range(50)]

    for filter_ in filters:
        assert masks.of(filter_).passing_count == int(filter_.root_expression.values[0])  # type: ignore[union-attr]

    is_cached = [masks.get_cached(filter_) is not None for filter_ in filters]
    assert sum(is_cached) == 10 and all(is_cached[-10:])
    assert masks.of(filters[-1]) is masks.get_cached(filters[-1])


def test_a_mask_larger_than_the_cache_is_computed_every_time() -> None:
    masks = MaskCache(attributes_of([{"price": 1}] * 100), masks_bytes_max=10)
    filter_ = read_filter({"exists": "price"})

    assert masks.of(filter_).passing_count == 100 and masks.get_cached(filter_) is None


def test_what_a_filter_costs_grows_with_items_comparisons_and_values() -> None:
    small_attributes, large_attributes = (
        attributes_of([{"price": 1, "tags": ("a", "b")} for _ in range(count)]) for count in (10, 1_000)
    )

    def cost(expression: Any, attributes: Any = large_attributes) -> int:
        return mask_cost(read_filter(expression).root_expression, attributes)

    cheap_expression, heavy = {"<": ["price", 2]}, {"in": ["price", list(range(31))]}
    assert cost(cheap_expression, small_attributes) == 10 and cost(cheap_expression) == 1_000
    assert cost(heavy) == 31 * cost(cheap_expression)
    assert cost({"or": [cheap_expression] * 31}) > 31 * cost(cheap_expression)
    assert cost({"contains": ["tags", "a"]}) > 10 * cost(cheap_expression), "each of an item's texts is looked at"
    assert cost({"<": ["unknown", 2]}) == 0
