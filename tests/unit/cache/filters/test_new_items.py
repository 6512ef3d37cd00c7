"""Filters over items and new ones behind them are those over one table of all."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache.filters.attributes import (
    DTYPE_BY_KIND,
    NO_CODE,
    AttributeColumn,
    ItemAttributes,
    TextDictionary,
    attributes_of_new_items,
)
from cache.filters.expression import read_filter
from cache.filters.filtering import Filtering
from cache.format.manifest import AttributeKind

KINDS: dict[str, AttributeKind] = {
    "brand": "text", "tags": "texts", "price": "number", "stock": "flag", "since": "time",
}  # fmt: skip
ROW = st.fixed_dictionaries(
    {},
    optional={
        "brand": st.sampled_from(["x", "y", "é"]),
        "tags": st.lists(st.sampled_from(["t", "s"]), max_size=2, unique=True),
        "price": st.integers(0, 3),
        "stock": st.booleans(),
        "since": st.sampled_from([0, 10, "2026-01-01"]),
        "other": st.just(1),
    },
)
FILTERS = [
    {"==": ["brand", "x"]}, {"in": ["brand", ["y", "é"]]}, {"contains": ["tags", "s"]}, {">=": ["price", 2]},
    {"==": ["stock", True]}, {"exists": "since"}, {"not": {"==": ["brand", "x"]}},
    {"and": [{"<": ["price", 3]}, {"exists": "tags"}]},
]  # fmt: skip


def nothing_of() -> ItemAttributes:
    """Attributes of no item at all."""
    empty = TextDictionary(np.empty(0, np.uint8), np.zeros(1, np.uint64))
    return ItemAttributes(0, {
        name: AttributeColumn(
            kind, np.empty(0, DTYPE_BY_KIND[kind]),
            np.zeros(1, np.uint64) if kind == "texts" else None,
            empty if kind in ("text", "texts") else None,
        )
        for name, kind in KINDS.items()
    })  # fmt: skip


def attributes_of(rows: list[dict[str, Any]]) -> ItemAttributes:
    return attributes_of_new_items(nothing_of(), rows)


def test_an_item_without_values_lacks_every_attribute() -> None:
    attributes = attributes_of([{}, {"brand": "x", "other": 1}])
    assert attributes.item_count == 2 and attributes.kind_by_attribute == dict(sorted(KINDS.items()))
    assert attributes.columns["brand"].values.tolist() == [int(NO_CODE), 0]
    assert np.isnan(attributes.columns["price"].values).all()


@given(
    st.lists(ROW, min_size=1, max_size=18), st.lists(ROW, max_size=9), st.sampled_from(FILTERS),
    st.integers(1, 5), st.integers(0, 2**31),
)  # fmt: skip
def test_what_passes_and_its_best_are_those_of_all_items(
    own: list[dict[str, Any]], new: list[dict[str, Any]], expression: Any, k: int, seed: int
) -> None:
    rng, filter_ = np.random.default_rng(seed), read_filter(expression)
    count = len(own) + len(new)
    vectors = rng.integers(-1, 2, size=(count, 3)).astype(np.float32)
    exclusions = np.unique(rng.integers(0, count, size=2))
    vector = rng.integers(-1, 2, size=3).astype(np.float32)
    every = Filtering(attributes_of(own + new), vectors)

    filtering = Filtering(attributes_of(own), vectors[: len(own)]).with_new_items(new, vectors[len(own) :])

    filter_mask, expected_mask = filtering.evaluate(filter_), every.evaluate(filter_)
    assert filter_mask.passing_count == expected_mask.passing_count
    assert filter_mask.ordinals().tolist() == expected_mask.ordinals().tolist()
    numbers = np.arange(count)
    assert filter_mask.among(numbers).tolist() == expected_mask.among(numbers).tolist()
    cached_mask = filtering.get_cached(filter_)
    assert cached_mask is not None and cached_mask.ordinals().tolist() == expected_mask.ordinals().tolist()
    ranked_items = filtering.search(vector, filter_mask, exclusions, k, "inner_product")
    exact = every.search(vector, expected_mask, exclusions, k, "inner_product")
    assert ranked_items[0].tolist() == exact[0].tolist() and ranked_items[1].tolist() == exact[1].tolist()
    assert (
        filtering.with_new_items([], vectors[:0]).evaluate(filter_).passing_count
        == Filtering(attributes_of(own), vectors).evaluate(filter_).passing_count
    )
