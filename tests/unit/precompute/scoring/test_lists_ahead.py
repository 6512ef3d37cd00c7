"""Lists made ahead: under a filter those that a search finds, of a value those that a look at each item finds."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.filters.attributes import NO_CODE, AttributeColumn
from cache.filters.filtering import SubsetSearch
from cache.model.ranking import Metric
from cache.model.tower import Histories
from cache.records import NO_ITEM
from cache.topk.topk import Scorer
from precompute.filters.facets import AttributeValues
from precompute.scoring.defaults import compute_mean_scores, find_favourites
from tests.unit.cache.filters.columns import names_of

TEXTS = ["a", "b", "ü", "zz", ""]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), count=st.integers(1, 80), k=st.integers(1, 30),
    allowed_share=st.floats(0, 1), metric=st.sampled_from(["inner_product", "cosine"]), distinct=st.booleans(),
)  # fmt: skip
def test_a_list_under_a_filter_is_the_one_that_a_search_by_vector_finds(
    seed: int, count: int, k: int, allowed_share: float, metric: Metric, *, distinct: bool
) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 6)).astype(np.float32)
    if not distinct:  # many ties
        vectors = np.round(vectors)
    users, mask = rng.standard_normal((3, 6)).astype(np.float32), rng.random(count) < allowed_share
    exclusions = Histories.of([rng.permutation(count)[: rng.integers(0, count + 1)] for _ in users])

    ordinals, scores = Scorer.of(vectors, metric).top(users, k, exclusions, allowed=mask, threads=1)

    subset_search = SubsetSearch(vectors)
    for row, user in enumerate(users):
        excluded_ordinals = exclusions.indices[exclusions.indptr[row] : exclusions.indptr[row + 1]]
        allowed_ordinals = np.setdiff1d(np.flatnonzero(mask), excluded_ordinals)
        expected_ordinals, theirs = subset_search.search(user, allowed_ordinals, k, metric)
        used = ordinals[row] != NO_ITEM
        np.testing.assert_array_equal(ordinals[row][used], expected_ordinals)
        np.testing.assert_array_equal(scores[row][used], theirs)


@settings(max_examples=60, deadline=None)
@given(
    tags=st.lists(st.lists(st.sampled_from(TEXTS), max_size=5), min_size=1, max_size=30),
    k=st.integers(1, 6), is_list=st.booleans(), data=st.data(),
)  # fmt: skip
def test_lists_of_a_value_are_the_best_items_that_have_it(
    tags: list[list[str]], k: int, data: st.DataObject, *, is_list: bool
) -> None:
    tags_by_item = tags if is_list else [item_tags[:1] for item_tags in tags]
    scores = data.draw(st.lists(st.integers(0, 3), min_size=len(tags_by_item), max_size=len(tags_by_item)))
    names, codes = names_of({text for item_tags in tags_by_item for text in item_tags})
    if is_list:
        flat = np.array([codes[text] for item_tags in tags_by_item for text in item_tags], np.uint32)
        offsets = np.cumsum([0, *map(len, tags_by_item)]).astype(np.uint64)
        column = AttributeColumn("texts", flat, offsets, names)
    else:
        item_codes = [codes[item_tags[0]] if item_tags else NO_CODE for item_tags in tags_by_item]
        column = AttributeColumn("text", np.array(item_codes, np.uint32), None, names)
    order = sorted(range(len(tags_by_item)), key=lambda at: (-scores[at], at))
    rank_by_item = np.argsort(order)

    values = AttributeValues.of("shelf", column, rank_by_item)
    lists = values.best_item_lists(np.arange(len(values.value_ids)), k)

    assert [raw.decode() for raw in values.value_ids] == sorted(codes, key=str.encode)
    for raw, listed_ordinals in zip(values.value_ids, lists.tolist(), strict=True):
        expected_ordinals = [at for at in order if raw.decode() in tags_by_item[at]][:k]
        assert listed_ordinals == expected_ordinals + [int(NO_ITEM)] * (k - len(expected_ordinals))


def test_mean_scores_are_those_of_the_defaults() -> None:
    rng = np.random.default_rng(5)
    vectors, users = (rng.standard_normal((5_000, 7), np.float32), rng.standard_normal((9, 7), np.float32))
    items: Any = SimpleNamespace(count=5_000, vectors=vectors, ids_of=lambda ordinals: ordinals.tolist())
    for metric in ("inner_product", "cosine"):
        ids, scores = find_favourites(items, users, metric, 50)
        item_scores = compute_mean_scores(items, users, metric)

        order = np.lexsort((np.arange(5_000), -item_scores))[:50]
        assert order.tolist() == list(ids)
        np.testing.assert_array_equal(item_scores[order], np.array(scores, np.float32))
