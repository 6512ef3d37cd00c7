"""What differs between what is stored and what the model says."""

import numpy as np
import pytest

from serving.explain.difference import difference


def listed(*items: str, first: float = 1.0) -> dict[str, object]:
    return {"items": list(items), "scores": np.arange(len(items), dtype=np.float32)[::-1] + first}


def test_equal_lists_are_exact() -> None:
    found = difference(listed("a", "b"), listed("a", "b", first=1.5))

    assert found["exact"] and found["overlap"] == 1.0 and found["delta_max"] == 0.5
    assert found["places_moved_max"] == 0


def test_items_in_one_list_only_are_named() -> None:
    found = difference(listed("a", "b", "c"), listed("b", "a", "d", "e"))

    assert not found["exact"] and found["k"] == 4 and found["overlap"] == 0.5
    assert (found["only_stored"], found["only_live"]) == (["c"], ["d", "e"])
    assert found["places_moved_max"] == 1


def test_lists_with_nothing_in_common_have_no_deltas() -> None:
    assert difference(listed("a"), listed("b"))["delta_max"] is None
    assert difference(listed(), listed()) == difference(listed(), listed()) | {
        "exact": True,
        "overlap": 1.0,
    }


@pytest.mark.parametrize("name", ["vector", "values"])
def test_numbers_are_compared_one_by_one(name: str) -> None:
    stored = {name: np.array([3.0, 4.0], np.float32)}
    found = difference(stored, {name: np.array([3.0, 4.5], np.float32)})

    assert not found["exact"] and found["delta_max"] == 0.5 and found["delta_mean"] == 0.25
    assert difference(stored, stored)["cosine"] == pytest.approx(1.0)
    assert difference(stored, stored)["exact"]


def test_vectors_of_two_sizes_are_not_compared() -> None:
    found = difference({"vector": np.zeros(2)}, {"vector": np.zeros(3)})

    assert found == {"exact": False, "sizes": [2, 3]}
