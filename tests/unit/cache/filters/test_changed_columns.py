"""Columns with values set anew are, array by array, those of a table that had these values from the start."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.filters.attributes import ItemAttributes
from cache.filters.changed_columns import BEYOND, TOO_LONG, ItemValue, with_values
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
    one = st.sampled_from(sorted(KINDS)).flatmap(
        lambda name: st.builds(
            ItemValue, st.integers(0, len(items) - 1), st.just(name), st.none() | NEW[name]
        )
    )
    return items, draw(st.lists(st.lists(one, max_size=8), min_size=1, max_size=3))


def table_with(items: list[Any], values: list[ItemValue]) -> list[Any]:
    """The items as a table would have them."""
    found = [dict(each) for each in items]
    for ordinal, name, value in values:
        if value is None or (name == "tags" and not value):
            found[ordinal].pop(name, None)
        elif name == "since":
            seconds = {0: 0, MOMENT: MOMENT}.get(value, MOMENT + 0.5)
            found[ordinal][name] = round(seconds * 1_000_000)
        else:
            found[ordinal][name] = tuple(value) if isinstance(value, list) else value
    return found


def arrays(attributes: ItemAttributes) -> dict[str, list[Any]]:
    """Bytes of each column's arrays."""
    found: dict[str, list[Any]] = {}
    for name, each in attributes.columns.items():
        parts = [each.values, each.offsets]
        if each.names is not None:
            parts += [each.names.data, each.names.offsets]
        found[name] = [None if part is None else (part.dtype, part.tobytes()) for part in parts]
    return found


@given(changes(), EXPRESSIONS)
def test_changed_columns_are_those_of_the_changed_table(drawn: Any, expression: Any) -> None:
    items, batches = drawn
    filtering = Filtering(attributes_of(items), np.zeros((len(items), 2), np.float32))
    filter_ = read_filter(expression)
    for batch in batches:
        before, filtering = filtering, filtering.changed_by(batch)[0]
        before.passing(filter_)  # what it keeps of it must not be taken over where it differs
        items = table_with(items, batch)

        wanted = attributes_of(items)
        assert arrays(filtering.attributes) == arrays(wanted)
        mask = [passes(filter_.root, each) for each in items]
        np.testing.assert_array_equal(filtering.passing(filter_).ordinals(), np.flatnonzero(mask))


@given(changes())
def test_it_says_which_attributes_differ_and_copies_no_other(drawn: Any) -> None:
    items, (batch, *_) = drawn
    before = attributes_of(items)

    found = with_values(before, batch)

    same = {name for name in KINDS if found.attributes.columns[name] is before.columns[name]}
    assert set(found.changed) == set(KINDS) - same
    now = arrays(attributes_of(table_with(items, batch)))
    assert set(found.changed) == {name for name in KINDS if now[name] != arrays(before)[name]}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("brand", 7, "not a text"), ("brand", ["a"], "not a text"), ("brand", "x" * 257, TOO_LONG),
        ("tags", "a", "not a list of texts"), ("tags", ["a", 1], "not a list of texts"),
        ("price", "7", "not a finite number"), ("price", True, "not a finite number"),
        ("price", 2**53 + 1, BEYOND), ("price", float("inf"), "not a finite number"),
        ("stock", 1, "not true or false"), ("stock", "yes", "not true or false"),
        ("since", "yesterday", "not a time"), ("since", 1e15, "not a time"), ("since", True, "not a time"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused_with_a_reason_and_the_item_lacks(
    name: str, value: Any, reason: str
) -> None:
    full = {"brand": "a", "tags": ("a",), "price": 1, "stock": True, "since": 0}
    filtering = Filtering(attributes_of([full, full]), np.zeros((2, 2), np.float32))

    filtering, found = filtering.changed_by([ItemValue(1, name, value), ItemValue(0, name, None)])

    ((why, ordinals),) = found.unfit[name].items()
    assert why.startswith(reason) and ordinals == (1,)
    assert filtering.passing(read_filter({"exists": name})).count == 0
    assert filtering.changed == {name} and found.unknown == 0


def test_an_unknown_attribute_is_counted_and_changes_nothing() -> None:
    filtering = Filtering(attributes_of([{"price": 1}]), np.zeros((1, 2), np.float32))

    same, found = filtering.changed_by([ItemValue(0, "colour", "red"), ItemValue(0, "price", 1)])

    assert same is filtering and found.unknown == 1 and not found.unfit


def test_what_is_known_of_other_attributes_is_kept() -> None:
    items: list[Any] = [{"price": each, "stock": True} for each in range(50)]
    filtering = Filtering(attributes_of(items), np.zeros((50, 2), np.float32))
    cheap, stocked = read_filter({"<": ["price", 10]}), read_filter({"==": ["stock", True]})
    both = read_filter({"and": [{"<": ["price", 5]}, {"not": {"==": ["stock", False]}}]})
    before = filtering.passing(cheap)
    for each in (stocked, both):
        filtering.passing(each)

    changed, _ = filtering.changed_by([ItemValue(0, "stock", False)])

    assert changed.kept(cheap) is before
    assert changed.kept(stocked) is None and changed.kept(both) is None
    assert changed.passing(stocked).count == 49 and filtering.passing(stocked).count == 50


def test_declared_filters_differ_by_what_they_compare() -> None:
    declared = {
        "cheap": read_filter({"<": ["price", 10]}),
        "stocked": read_filter({"==": ["stock", True]}),
    }
    items: list[Any] = [{"price": 1}]
    filtering = Filtering(attributes_of(items), np.zeros((1, 2), np.float32), declared=declared)
    assert not filtering.differs("cheap")

    changed, _ = filtering.changed_by([ItemValue(0, "price", 20)])

    assert changed.differs("cheap") and not changed.differs("stocked") and not changed.differs("no")
    assert changed.passing("cheap").count == 0


@given(st.lists(ITEM, min_size=1, max_size=12), st.sampled_from([*TEXTS, "nobody"]))
def test_who_has_a_text_is_told_of_a_list(items: list[Any], text: str) -> None:
    attributes, ordinals = attributes_of(items), np.arange(len(items), dtype=np.uint32)[::-1]

    brands = attributes.columns["brand"].have(text, ordinals)
    tags = attributes.columns["tags"].have(text, ordinals)

    assert brands.tolist() == [each.get("brand") == text for each in reversed(items)]
    assert tags.tolist() == [text in each.get("tags", ()) for each in reversed(items)]
