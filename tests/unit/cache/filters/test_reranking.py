"""Another order of candidates: by boosts, by values of an attribute, by likeness; each as by a look at every item."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import InvalidInput
from cache.filters.expression import read_filter
from cache.filters.masks import Passing, UnknownAttribute, mask_of
from cache.filters.reranking import Reranker, read_reranking
from tests.unit.cache.filters.columns import KINDS, Item, attributes_of, passes
from tests.unit.cache.filters.test_masks import EXPRESSIONS, ITEM

BOOST = st.builds(
    lambda filter_, factor: {"filter": filter_, "factor": factor},
    EXPRESSIONS,
    st.sampled_from([0.25, 0.5, 1, 1.5, 4]),
)
SCORES = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0])
ATTRIBUTES = ["brand", "tags", "price", "stock", "since"]


def reranker_of(items: list[Item], sent: Any, vectors: Any = None) -> Reranker:
    reranking, attributes = read_reranking(sent, 4.0), attributes_of(items)
    boosted = tuple(Passing.of(mask_of(each.filter.root, attributes)) for each in reranking.boosts)
    drawn = np.random.default_rng(5).standard_normal((len(items), 4)).astype(np.float32)
    return Reranker(reranking, boosted, attributes, drawn if vectors is None else vectors)


def ordered(scores: list[float]) -> tuple[Any, Any]:
    """Ordinals and scores, best first."""
    order = np.argsort(-np.array(scores), kind="stable").astype(np.uint32)
    return order, np.array(scores, np.float32)[order]


def boosted_by_hand(
    items: list[Item], ordinals: Any, scores: Any, boosts: list[Any]
) -> list[float]:
    found = []
    for ordinal, score in zip(ordinals.tolist(), scores.tolist(), strict=True):
        for each in boosts:
            if passes(read_filter(each["filter"]).root, items[ordinal]):
                score = score * each["factor"] if score >= 0 else score / each["factor"]
        found.append(score)
    return found


@given(st.lists(st.tuples(ITEM, SCORES), min_size=1, max_size=12), st.lists(BOOST, min_size=1, max_size=3),
       st.integers(1, 14))  # fmt: skip
def test_boosts_move_what_passes(drawn: Any, boosts: list[Any], k: int) -> None:
    items = [each for each, _ in drawn]
    ordinals, scores = ordered([score for _, score in drawn])

    places = reranker_of(items, {"boost": boosts}).places(ordinals, scores, k)

    by_hand = boosted_by_hand(items, ordinals, scores, boosts)
    wanted = sorted(range(len(items)), key=lambda place: -by_hand[place])[:k]
    assert places.tolist() == wanted


@given(st.lists(st.tuples(ITEM, SCORES), min_size=1, max_size=12), st.sampled_from(ATTRIBUTES),
       st.integers(1, 3), st.integers(1, 14))  # fmt: skip
def test_at_most_so_many_have_one_value(drawn: Any, attribute: str, most: int, k: int) -> None:
    items = [each for each, _ in drawn]
    ordinals, scores = ordered([score for _, score in drawn])
    sent = {"diversify": {"attribute": attribute, "most": most}}

    places = reranker_of(items, sent).places(ordinals, scores, k).tolist()

    counts: Counter[Any] = Counter()
    wanted: list[int] = []
    for place, ordinal in enumerate(ordinals.tolist()):
        value = items[ordinal].get(attribute, ())
        values = set(value) if isinstance(value, tuple) else {value}
        if len(wanted) < k and all(counts[each] < most for each in values):
            counts.update(values)
            wanted.append(place)
    assert places == wanted


@given(st.lists(SCORES, min_size=1, max_size=12), st.sampled_from([0.1, 0.5, 0.9, 1.0]), st.integers(1, 14),
       st.integers(0, 5))  # fmt: skip
def test_likeness_costs_what_the_weight_leaves(
    drawn: list[float], mmr: float, k: int, seed: int
) -> None:
    ordinals, scores = ordered(drawn)
    vectors = np.random.default_rng(seed).standard_normal((len(drawn), 3)).astype(np.float32)
    vectors[0] = 0
    items: list[Item] = [{}] * len(drawn)

    sent = {"diversify": {"mmr": mmr}}
    places = reranker_of(items, sent, vectors).places(ordinals, scores, k).tolist()

    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = np.where(lengths > 0, vectors / np.where(lengths > 0, lengths, 1), 0)[ordinals]
    span = max(drawn) - min(drawn)
    relevance = [(each - min(drawn)) / span if span else 1.0 for each in scores.tolist()]
    chosen: list[int] = []
    while len(chosen) < min(k, len(drawn)):
        values = {
            place: mmr * relevance[place]
            - (1 - mmr) * max([0.0, *(float(units[place] @ units[each]) for each in chosen)])
            for place in range(len(drawn))
            if place not in chosen
        }
        best = max(values.values())
        picked = places[len(chosen)]
        assert values[picked] == pytest.approx(best, abs=1e-6)
        chosen.append(picked)
    assert len(places) == len(chosen)


WRONG: list[tuple[Any, str | None]] = [
    ([], None), ({}, None), (7, None), ({"boosts": []}, None), ({"boost": []}, "boost"), ({"boost": {}}, "boost"),
    ({"boost": [{"filter": {"exists": "a"}, "factor": 2}] * 9}, "boost"),
    ({"boost": [7]}, "boost[0]"), ({"boost": [{"factor": 2}]}, "boost[0].filter"),
    ({"boost": [{"filter": {"exists": "a"}}]}, "boost[0].factor"),
    ({"boost": [{"filter": {"exists": "a"}, "factor": True}]}, "boost[0].factor"),
    ({"boost": [{"filter": {"exists": "a"}, "factor": "2"}]}, "boost[0].factor"),
    ({"boost": [{"filter": {"exists": "a"}, "factor": 4.1}]}, "boost[0].factor"),
    ({"boost": [{"filter": {"exists": "a"}, "factor": 0.2}]}, "boost[0].factor"),
    ({"boost": [{"filter": {"exists": "a"}, "factor": 0}]}, "boost[0].factor"),
    ({"boost": [{"filter": {"exists": "a"}, "factor": -1}]}, "boost[0].factor"),
    ({"boost": [{"filter": {"exists": "a"}, "factor": float("nan")}]}, "boost[0].factor"),
    ({"boost": [{"filter": {"exists": "a"}, "factor": float("inf")}]}, "boost[0].factor"),
    ({"boost": [{"filter": {"exists": "a"}, "factor": 1, "code": "1+1"}]}, "boost[0]"),
    ({"boost": [{"filter": {"and": [{"?": 1}]}, "factor": 1}]}, "boost[0].filter.and[0]"),
    ({"boost": [{"filter": {"exists": 7}, "factor": 1}]}, "boost[0].filter.exists"),
    ({"diversify": 7}, "diversify"), ({"diversify": {}}, "diversify"),
    ({"diversify": {"attribute": "a"}}, "diversify"), ({"diversify": {"most": 2}}, "diversify"),
    ({"diversify": {"attribute": 7, "most": 2}}, "diversify.attribute"),
    ({"diversify": {"attribute": "a" * 300, "most": 2}}, "diversify.attribute"),
    ({"diversify": {"attribute": "a", "most": 0}}, "diversify.most"),
    ({"diversify": {"attribute": "a", "most": 1.5}}, "diversify.most"),
    ({"diversify": {"attribute": "a", "most": True}}, "diversify.most"),
    ({"diversify": {"mmr": 0}}, "diversify.mmr"), ({"diversify": {"mmr": 1.1}}, "diversify.mmr"),
    ({"diversify": {"mmr": "x"}}, "diversify.mmr"), ({"diversify": {"mmr": 0.5, "lambda": 1}}, "diversify"),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "place"), WRONG)
def test_a_wrong_one_is_refused_with_its_place(sent: Any, place: str | None) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_reranking(sent, 4.0)
    assert refused.value.details.get("field") == place


def test_an_attribute_that_items_lack_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownAttribute) as refused:
        reranker_of([{"price": 1.0}], {"diversify": {"attribute": "colour", "most": 1}})
    assert refused.value.details["field"] == "diversify.attribute"
    assert refused.value.details["attributes"] == KINDS
