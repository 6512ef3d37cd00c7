"""Difference between what is stored and what the model says now. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.model.agreement import absolute_errors, cosine, overlap

Prediction = Mapping[str, Any]


def difference(stored: Prediction, live: Prediction) -> dict[str, Any]:
    """Difference of two predictions of one kind: lists, vectors or values.

    `exact`: the same items in the same order, or numbers equal to the bit. Scores have deltas (live minus stored) where
    an item stands in both lists; `overlap` is the share of the longer list that stands in both.
    """
    if "items" in stored:
        return _of_lists(stored["items"], stored["scores"], live["items"], live["scores"])
    name = "vector" if "vector" in stored else "values"
    return _of_numbers(np.asarray(stored[name]), np.asarray(live[name]))


def _of_lists(
    stored: Sequence[str],
    stored_scores: NDArray[np.float32],
    live: Sequence[str],
    live_scores: NDArray[np.float32],
) -> dict[str, Any]:
    before = dict(zip(stored, map(float, stored_scores), strict=True))
    after = dict(zip(live, map(float, live_scores), strict=True))
    both = [item for item in stored if item in after]
    scores = (np.array([scored[item] for item in both]) for scored in (after, before))
    k = max(len(stored), len(live))
    place = {item: number for number, item in enumerate(live)}
    moved = [abs(number - place[item]) for number, item in enumerate(stored) if item in place]
    return {
        "exact": list(stored) == list(live),
        "k": k,
        "overlap": overlap(stored, live, k),
        "only_stored": [item for item in stored if item not in after],
        "only_live": [item for item in live if item not in before],
        "places_moved_max": max(moved, default=0),
        **_deltas(*scores),
    }


def _of_numbers(stored: NDArray[np.float32], live: NDArray[np.float32]) -> dict[str, Any]:
    if stored.shape != live.shape:
        return {"exact": False, "sizes": [len(stored), len(live)]}
    return {
        "exact": bool(np.array_equal(stored, live)),
        "cosine": cosine(stored, live),
        **_deltas(live.astype(np.float64), stored),
    }


def _deltas(live: NDArray[np.float64], stored: NDArray[np.floating]) -> dict[str, float | None]:
    if not len(live):
        return {"delta_max": None, "delta_mean": None}
    errors = absolute_errors(live, stored)
    return {"delta_max": errors.largest, "delta_mean": errors.mean}
