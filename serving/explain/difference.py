"""Difference between what is stored and what the model says now. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.model.agreement import absolute_errors, cosine, overlap

Prediction = Mapping[str, Any]


def difference(stored_prediction: Prediction, live: Prediction) -> dict[str, Any]:
    """Difference of two predictions of one kind: lists, vectors or values.

    `exact`: the same items in the same order, or numbers equal to the bit. Scores have deltas (live minus stored) where
    an item stands in both lists; `overlap` is the share of the longer list that stands in both.
    """
    if "items" in stored_prediction:
        return _of_lists(
            stored_prediction["items"], stored_prediction["scores"], live["items"], live["scores"]
        )
    name = "vector" if "vector" in stored_prediction else "values"
    return _of_numbers(np.asarray(stored_prediction[name]), np.asarray(live[name]))


def _of_lists(
    stored_items: Sequence[str],
    stored_scores: NDArray[np.float32],
    live: Sequence[str],
    live_scores: NDArray[np.float32],
) -> dict[str, Any]:
    stored_score_by_item = dict(zip(stored_items, map(float, stored_scores), strict=True))
    after = dict(zip(live, map(float, live_scores), strict=True))
    common_items = [item for item in stored_items if item in after]
    scores = (
        np.array([scored[item] for item in common_items])
        for scored in (after, stored_score_by_item)
    )
    k = max(len(stored_items), len(live))
    live_rank_by_item = {item: number for number, item in enumerate(live)}
    moved = [
        abs(number - live_rank_by_item[item])
        for number, item in enumerate(stored_items)
        if item in live_rank_by_item
    ]
    return {
        "exact": list(stored_items) == list(live),
        "k": k,
        "overlap": overlap(stored_items, live, k),
        "only_stored": [item for item in stored_items if item not in after],
        "only_live": [item for item in live if item not in stored_score_by_item],
        "places_moved_max": max(moved, default=0),
        **_deltas(*scores),
    }


def _of_numbers(stored_numbers: NDArray[np.float32], live: NDArray[np.float32]) -> dict[str, Any]:
    if stored_numbers.shape != live.shape:
        return {"exact": False, "sizes": [len(stored_numbers), len(live)]}
    return {
        "exact": bool(np.array_equal(stored_numbers, live)),
        "cosine": cosine(stored_numbers, live),
        **_deltas(live.astype(np.float64), stored_numbers),
    }


def _deltas(
    live: NDArray[np.float64], stored_numbers: NDArray[np.floating]
) -> dict[str, float | None]:
    if not len(live):
        return {"delta_max": None, "delta_mean": None}
    errors = absolute_errors(live, stored_numbers)
    return {"delta_max": errors.largest, "delta_mean": errors.mean}
