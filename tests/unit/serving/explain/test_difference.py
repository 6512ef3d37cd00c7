"""What differs between what is stored and what the model says."""

import numpy as np
import pytest

from serving.explain.explainer import prediction_difference


def make_list(*items: str, first: float = 1.0) -> dict[str, object]:
    return {"items": list(items), "scores": np.arange(len(items), dtype=np.float32)[::-1] + first}


def test_equal_lists_are_exact() -> None:
    comparison = prediction_difference(make_list("a", "b"), make_list("a", "b", first=1.5))

    assert comparison["exact"] and comparison["overlap"] == 1.0 and comparison["delta_max"] == 0.5
    assert comparison["places_moved_max"] == 0


def test_items_in_one_list_only_are_named() -> None:
    comparison = prediction_difference(make_list("a", "b", "c"), make_list("b", "a", "d", "e"))

    assert not comparison["exact"] and comparison["k"] == 4 and comparison["overlap"] == 0.5
    assert (comparison["only_stored"], comparison["only_live"]) == (["c"], ["d", "e"])
    assert comparison["places_moved_max"] == 1


def test_lists_with_nothing_in_common_have_no_deltas() -> None:
    assert prediction_difference(make_list("a"), make_list("b"))["delta_max"] is None
    assert prediction_difference(make_list(), make_list()) == prediction_difference(make_list(), make_list()) | {
        "exact": True,
        "overlap": 1.0,
    }


@pytest.mark.parametrize("name", ["vector", "values"])
def test_numbers_are_compared_one_by_one(name: str) -> None:
    stored_record = {name: np.array([3.0, 4.0], np.float32)}
    comparison = prediction_difference(stored_record, {name: np.array([3.0, 4.5], np.float32)})

    assert not comparison["exact"] and comparison["delta_max"] == 0.5 and comparison["delta_mean"] == 0.25
    assert prediction_difference(stored_record, stored_record)["cosine"] == pytest.approx(1.0)
    assert prediction_difference(stored_record, stored_record)["exact"]


def test_vectors_of_two_sizes_are_not_compared() -> None:
    comparison = prediction_difference({"vector": np.zeros(2)}, {"vector": np.zeros(3)})

    assert comparison == {"exact": False, "sizes": [2, 3]}
