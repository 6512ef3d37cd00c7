"""Another order of candidates: by boosts, by values of an attribute, by likeness; each as by a look at every item."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import InvalidInput
from cache.filters.expression import read_filter
from cache.filters.filtering import UnknownAttribute, mask_of
from cache.filters.reranker import Reranker
from cache.filters.reranking import read_reranking
from cache.model.filter_mask import FilterMask
from tests.unit.cache.filters.columns import KINDS, Item, attributes_of, passes
from tests.unit.cache.filters.test_masks import EXPRESSIONS, ITEM

BOOST = st.builds(
    lambda filter_, factor: {"filter": filter_, "factor": factor}, EXPRESSIONS, st.sampled_from([0.25, 0.5, 1, 1.5, 4])
)
SCORES = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0])
ATTRIBUTES = ["brand", "tags", "price", "stock", "since"]


def reranker_of(items: list[Item], reranking_json: Any, vectors: Any = None) -> Reranker:
    reranking, attributes = read_reranking(reranking_json, 4.0), attributes_of(items)
    boosted = tuple(FilterMask.of(mask_of(boost.filter.root_expression, attributes)) for boost in reranking.boosts)
    drawn = np.random.default_rng(5).standard_normal((len(items), 4)).astype(np.float32)
    return Reranker(reranking, boosted, attributes, drawn if vectors is None else vectors)


def ordered(scores: list[float]) -> tuple[Any, Any]:
    """Ordinals and scores, best first."""
    order = np.argsort(-np.array(scores), kind="stable").astype(np.uint32)
    return order, np.array(scores, np.float32)[order]


def boosted_by_hand(items: list[Item], ordinals: Any, scores: Any, boosts: list[Any]) -> list[float]:
    boosted_scores = []
    for ordinal, score in zip(ordinals.tolist(), scores.tolist(), strict=True):
        for boost in boosts:
            if passes(read_filter(boost["filter"]).root_expression, items[ordinal]):
                score = score * boost["factor"] if score >= 0 else score / boost["factor"]
        boosted_scores.append(score)
    return boosted_scores


@given(st.lists(st.tuples(ITEM, SCORES), min_size=1, max_size=12), st.lists(BOOST, min_size=1, max_size=3),
       st.integers(1, 14))  # fmt: skip
def test_boosts_move_what_passes(drawn: Any, boosts: list[Any], k: int) -> None:
    items = [item for item, _ in drawn]
    ordinals, scores = ordered([score for _, score in drawn])

    positions = reranker_of(items, {"boost": boosts}).rerank(ordinals, scores, k)

    by_hand = boosted_by_hand(items, ordinals, scores, boosts)
    expected_positions = sorted(range(len(items)), key=lambda position: -by_hand[position])[:k]
    assert positions.tolist() == expected_positions


@given(st.lists(st.tuples(ITEM, SCORES), min_size=1, max_size=12), st.sampled_from(ATTRIBUTES),
       st.integers(1, 3), st.integers(1, 14))  # fmt: skip
def test_at_most_so_many_have_one_value(drawn: Any, attribute: str, most: int, k: int) -> None:
    items = [item for item, _ in drawn]
    ordinals, scores = ordered([score for _, score in drawn])
    reranking_json = {"diversify": {"attribute": attribute, "most": most}}

    positions = reranker_of(items, reranking_json).rerank(ordinals, scores, k).tolist()

    counts: Counter[Any] = Counter()
    expected_positions: list[int] = []
    for position, ordinal in enumerate(ordinals.tolist()):
        value = items[ordinal].get(attribute, ())
        values = set(value) if isinstance(value, tuple) else {value}
        if len(expected_positions) < k and all(counts[attribute_value] < most for attribute_value in values):
            counts.update(values)
            expected_positions.append(position)
    assert positions == expected_positions


@given(st.lists(SCORES, min_size=1, max_size=12), st.sampled_from([0.1, 0.5, 0.9, 1.0]), st.integers(1, 14),
       st.integers(0, 5))  # fmt: skip
def test_likeness_costs_what_the_weight_leaves(drawn: list[float], mmr: float, k: int, seed: int) -> None:
    ordinals, scores = ordered(drawn)
    vectors = np.random.default_rng(seed).standard_normal((len(drawn), 3)).astype(np.float32)
    vectors[0] = 0
    items: list[Item] = [{}] * len(drawn)

    reranking_json = {"diversify": {"mmr": mmr}}
    positions = reranker_of(items, reranking_json, vectors).rerank(ordinals, scores, k).tolist()

    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = np.where(lengths > 0, vectors / np.where(lengths > 0, lengths, 1), 0)[ordinals]
    span = max(drawn) - min(drawn)
    relevance = [(score - min(drawn)) / span if span else 1.0 for score in scores.tolist()]
    chosen_positions: list[int] = []
    while len(chosen_positions) < min(k, len(drawn)):
        values = {
            position: mmr * relevance[position]
            - (1 - mmr)
            * max([0.0, *(float(units[position] @ units[chosen_position]) for chosen_position in chosen_positions)])
            for position in range(len(drawn))
            if position not in chosen_positions
        }
        highest_value = max(values.values())
        picked = positions[len(chosen_positions)]
        assert values[picked] == pytest.approx(highest_value, abs=1e-6)
        chosen_positions.append(picked)
    assert len(positions) == len(chosen_positions)


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


@pytest.mark.parametrize(("reranking_json", "field_path"), WRONG)
def test_a_wrong_one_is_refused_with_its_place(reranking_json: Any, field_path: str | None) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_reranking(reranking_json, 4.0)
    assert refused.value.details.get("field") == field_path


def test_an_attribute_that_items_lack_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownAttribute) as refused:
        reranker_of([{"price": 1.0}], {"diversify": {"attribute": "colour", "most": 1}})
    assert refused.value.details["field"] == "diversify.attribute"
    assert refused.value.details["attributes"] == KINDS
