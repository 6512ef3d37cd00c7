"""Rule for copying lists: none of the items was removed or changed, and no new or changed item can enter.

An entering item's score is bounded from above, the stored list's last score from below; in doubt, the list is computed.
Pure.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.model.ranking import Metric
from cache.model.tower import Histories
from cache.records import Layout

ENTERING_SHARE_MAX: Final = 1 / 16
"""Largest share of new or changed items; with more, nearly every list is affected."""

_ITEMS_AT_ONCE = 1024
_LISTS_AT_ONCE = 1 << 14
_ROUNDING = 2.0**-24 * 1.01
"""A float32 sum of d products is off by at most d * 2**-24 * |user| * |item|, plus 1 % for higher orders."""
_SUM_COUNT_BY_METRIC: Final[dict[Metric, int]] = {"inner_product": 2, "cosine": 3}
"""Number of such sums in the two compared scores: one product each; for cosine half of each squared length, too."""
_OTHER_ROUNDINGS = 32
"""Roundings apart from the sums: for cosine, of the lengths and their quotient."""
_SAFE_LENGTHS: Final = (1e-15, 1e18)
"""Lengths of vectors between which no square, and no sum of products in any order, under- or overflows in float32."""


def find_lists_with_lost_items(records: NDArray[Any], is_lost: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the mask [n] of lists with an item in `is_lost` [items + 1], whose last entry is for free slots."""
    has_lost_item = np.zeros(len(records), np.bool_)
    if not is_lost.any():
        return has_lost_item
    for first_list in range(0, len(records), _LISTS_AT_ONCE):
        list_slice = slice(first_list, first_list + _LISTS_AT_ONCE)
        listed_items = np.minimum(records["items"][list_slice], np.uint32(len(is_lost) - 1))
        has_lost_item[list_slice] = is_lost[listed_items].any(axis=1)
    return has_lost_item


def find_score_floors(layout: Layout, records: NDArray[Any]) -> NDArray[np.float64]:
    """Return a lower bound [n] of each list's last score before rounding; -inf for a list with a free slot."""
    last_numbers = records["numbers"][:, -1]
    if layout.precision == "f2":
        next_lower_numbers = np.nextafter(last_numbers, np.float16(-np.inf)).astype(np.float64)
        lower_bounds = np.ldexp(next_lower_numbers, records["exponent"].astype(np.int32))
    else:
        lower_bounds = last_numbers.astype(np.float64)
    return np.where(records["count"] == layout.width, lower_bounds, -np.inf)


def could_enter(
    user_vectors: NDArray[np.float32],
    entering_vectors: NDArray[np.float32],
    entering_ordinals: NDArray[np.int64],
    score_floors: NDArray[np.float64],
    exclusions: Histories,
    metric: Metric,
) -> NDArray[np.bool_]:
    """Return the mask [n] of users for whom one of the entering items may reach `score_floors` [n].

    `user_vectors` float32 [n, dims]; `entering_vectors` are those of the items with `entering_ordinals`; a user's
    `exclusions` cannot enter. False is certain: the item's score is below the floor. True is not.
    """
    can_enter = np.zeros(len(user_vectors), np.bool_)
    if not len(user_vectors) or not len(entering_ordinals):
        return can_enter
    dims = user_vectors.shape[1]
    user_lengths = np.sqrt(np.einsum("nd,nd->n", user_vectors, user_vectors, dtype=np.float64))
    excluded_rows = np.repeat(np.arange(len(exclusions)), np.diff(exclusions.indptr))
    for first_item in range(0, len(entering_ordinals), _ITEMS_AT_ONCE):
        chunk_vectors, chunk_ordinals = (
            entering_vectors[first_item : first_item + _ITEMS_AT_ONCE],
            entering_ordinals[first_item : first_item + _ITEMS_AT_ONCE],
        )
        item_lengths = np.sqrt(np.einsum("nd,nd->n", chunk_vectors, chunk_vectors, dtype=np.float64))
        scores = (user_vectors @ chunk_vectors.T).astype(np.float64)
        length_products = user_lengths[:, None] * item_lengths
        margins = (_SUM_COUNT_BY_METRIC[metric] * dims + _OTHER_ROUNDINGS) * _ROUNDING * length_products
        if metric == "cosine":
            scores, margins = (
                np.divide(score_matrix, length_products, out=np.zeros_like(score_matrix), where=length_products > 0)
                for score_matrix in (scores, margins)
            )
        is_bounded = _are_safe_lengths(user_lengths)[:, None] & _are_safe_lengths(item_lengths) | (length_products == 0)
        user_rows, item_columns = np.nonzero(~(is_bounded & (scores + margins < score_floors[:, None])))
        if len(user_rows):
            candidate_pairs = user_rows * np.int64(1 << 32) + chunk_ordinals[item_columns]
            is_in_chunk = np.isin(exclusions.indices, chunk_ordinals)
            excluded_pairs = excluded_rows[is_in_chunk] * np.int64(1 << 32) + exclusions.indices[is_in_chunk]
            can_enter[user_rows[~np.isin(candidate_pairs, excluded_pairs)]] = True
    return can_enter


def _are_safe_lengths(vector_lengths: NDArray[np.float64]) -> NDArray[np.bool_]:
    is_in_range: NDArray[np.bool_] = (vector_lengths > _SAFE_LENGTHS[0]) & (vector_lengths < _SAFE_LENGTHS[1])
    return is_in_range
