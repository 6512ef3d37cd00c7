"""Columns with values set anew are, array by array, those of a table that had these values from the start."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.filters.attributes import NUMBER_TOO_LARGE, TEXT_TOO_LONG, ItemAttributes, ItemValue, set_item_values
from cache.filters.expression import read_filter
from cache.filters.filtering import Filtering
from tests.unit.cache.filters.columns import KINDS, attributes_of, passes
from tests.unit.cache.filters.test_masks import EXPRESSIONS, ITEM, TEXTS

MOMENT = 1_700_000_000
NEW: dict[str, st.SearchStrategy[Any]] = {
    "brand": st.sampled_from([*TEXTS, "new", "ÿ"]),
    "tags": st.lists(st.sampled_from([*TEXTS, "new"]), max_size=3),
    "price": st.sampled_from([-1, 0.25, 7, 2**53]),
    "stock": st.booleans(),
    "since": st.sampled_from([0, MOMENT, "2023-11-14T22:13:20.5Z"]),
}


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[Any], list[list[ItemValue]]]:
    items = draw(st.lists(ITEM, min_size=1, max_size=12))
    item_value_strategy = st.sampled_from(sorted(KINDS)).flatmap(
        lambda name: st.builds(ItemValue, st.integers(0, len(items) - 1), st.just(name), st.none() | NEW[name])
    )
    return items, draw(st.lists(st.lists(item_value_strategy, max_size=8), min_size=1, max_size=3))


def table_with(items: list[Any], values: list[ItemValue]) -> list[Any]:
    """The items as a table would have them."""
    changed_items = [dict(item) for item in items]
    for ordinal, name, value in values:
        if value is None or (name == "tags" and not value):
            changed_items[ordinal].pop(name, None)
        elif name == "since":
            seconds = {0: 0, MOMENT: MOMENT}.get(value, MOMENT + 0.5)
            changed_items[ordinal][name] = round(seconds * 1_000_000)
        else:
            changed_items[ordinal][name] = tuple(value) if isinstance(value, list) else value
    return changed_items


def arrays(attributes: ItemAttributes) -> dict[str, list[Any]]:
    """Bytes of each column's arrays."""
    arrays_by_column: dict[str, list[Any]] = {}
    for name, column in attributes.columns.items():
        parts = [column.values, column.item_offsets]
        if column.dictionary is not None:
            parts += [column.dictionary.joined_texts, column.dictionary.text_offsets]
        arrays_by_column[name] = [None if part is None else (part.dtype, part.tobytes()) for part in parts]
    return arrays_by_column


@given(changes(), EXPRESSIONS)
def test_changed_columns_are_those_of_the_changed_table(drawn: Any, expression: Any) -> None:
    items, batches = drawn
    filtering = Filtering(attributes_of(items), np.zeros((len(items), 2), np.float32))
    filter_ = read_filter(expression)
    for batch in batches:
        previous_filtering, filtering = filtering, filtering.with_item_values(batch)[0]
        previous_filtering.evaluate(filter_)  # what it keeps of it must not be taken over where it differs
        items = table_with(items, batch)

        expected_attributes = attributes_of(items)
        assert arrays(filtering.attributes) == arrays(expected_attributes)
        mask = [passes(filter_.root_expression, item) for item in items]
        np.testing.assert_array_equal(filtering.evaluate(filter_).ordinals(), np.flatnonzero(mask))


@given(changes())
def test_it_says_which_attributes_differ_and_copies_no_other(drawn: Any) -> None:
    items, (batch, *_) = drawn
    original_attributes = attributes_of(items)

    changed_columns = set_item_values(original_attributes, batch)

    unchanged_names = {
        name for name in KINDS if changed_columns.attributes.columns[name] is original_attributes.columns[name]
    }
    assert set(changed_columns.changed_attributes) == set(KINDS) - unchanged_names
    expected_arrays = arrays(attributes_of(table_with(items, batch)))
    assert set(changed_columns.changed_attributes) == {
        name for name in KINDS if expected_arrays[name] != arrays(original_attributes)[name]
    }


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("brand", 7, "not a text"), ("brand", ["a"], "not a text"), ("brand", "x" * 257, TEXT_TOO_LONG),
        ("tags", "a", "not a list of texts"), ("tags", ["a", 1], "not a list of texts"),
        ("price", "7", "not a finite number"), ("price", True, "not a finite number"),
        ("price", 2**53 + 1, NUMBER_TOO_LARGE), ("price", float("inf"), "not a finite number"),
        ("stock", 1, "not true or false"), ("stock", "yes", "not true or false"),
        ("since", "yesterday", "not a time"), ("since", 1e15, "not a time"), ("since", True, "not a time"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused_with_a_reason_and_the_item_lacks(
    name: str, value: Any, reason: str
) -> None:
    full = {"brand": "a", "tags": ("a",), "price": 1, "stock": True, "since": 0}
    filtering = Filtering(attributes_of([full, full]), np.zeros((2, 2), np.float32))

    filtering, changed_columns = filtering.with_item_values([ItemValue(1, name, value), ItemValue(0, name, None)])

    ((actual_reason, ordinals),) = changed_columns.unfit_ordinals[name].items()
    assert actual_reason.startswith(reason) and ordinals == (1,)
    assert filtering.evaluate(read_filter({"exists": name})).passing_count == 0
    assert filtering.changed_attributes == {name} and changed_columns.unknown_attribute_value_count == 0


def test_an_unknown_attribute_is_counted_and_changes_nothing() -> None:
    filtering = Filtering(attributes_of([{"price": 1}]), np.zeros((1, 2), np.float32))

    unchanged_filtering, changed_columns = filtering.with_item_values(
        [ItemValue(0, "colour", "red"), ItemValue(0, "price", 1)]
    )

    assert (
        unchanged_filtering is filtering
        and changed_columns.unknown_attribute_value_count == 1
        and not changed_columns.unfit_ordinals
    )


def test_what_is_known_of_other_attributes_is_kept() -> None:
    items: list[Any] = [{"price": price, "stock": True} for price in range(50)]
    filtering = Filtering(attributes_of(items), np.zeros((50, 2), np.float32))
    cheap, stocked = read_filter({"<": ["price", 10]}), read_filter({"==": ["stock", True]})
    cheap_and_stocked = read_filter({"and": [{"<": ["price", 5]}, {"not": {"==": ["stock", False]}}]})
    cheap_mask = filtering.evaluate(cheap)
    for filter_ in (stocked, cheap_and_stocked):
        filtering.evaluate(filter_)

    changed_filtering, _ = filtering.with_item_values([ItemValue(0, "stock", False)])

    assert changed_filtering.get_cached(cheap) is cheap_mask
    assert changed_filtering.get_cached(stocked) is None and changed_filtering.get_cached(cheap_and_stocked) is None
    assert changed_filtering.evaluate(stocked).passing_count == 49 and filtering.evaluate(stocked).passing_count == 50


def test_declared_filters_differ_by_what_they_compare() -> None:
    declared = {"cheap": read_filter({"<": ["price", 10]}), "stocked": read_filter({"==": ["stock", True]})}
    items: list[Any] = [{"price": 1}]
    filtering = Filtering(attributes_of(items), np.zeros((1, 2), np.float32), filter_by_name=declared)
    assert not filtering.may_differ_from_night("cheap")

    changed_filtering, _ = filtering.with_item_values([ItemValue(0, "price", 20)])

    assert (
        changed_filtering.may_differ_from_night("cheap")
        and not changed_filtering.may_differ_from_night("stocked")
        and not changed_filtering.may_differ_from_night("no")
    )
    assert changed_filtering.evaluate("cheap").passing_count == 0


@given(st.lists(ITEM, min_size=1, max_size=12), st.sampled_from([*TEXTS, "nobody"]))
def test_a_column_finds_items_with_a_text_or_with_a_list_that_has_it(items: list[Any], text: str) -> None:
    attributes, ordinals = attributes_of(items), np.arange(len(items), dtype=np.uint32)[::-1]

    brands = attributes.columns["brand"].mask_having_text(text, ordinals)
    tags = attributes.columns["tags"].mask_having_text(text, ordinals)

    assert brands.tolist() == [item.get("brand") == text for item in reversed(items)]
    assert tags.tolist() == [text in item.get("tags", ()) for item in reversed(items)]
