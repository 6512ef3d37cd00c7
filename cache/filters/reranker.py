"""Re-ranking of candidates by a request's boosts and its bounds on similarity. Pure."""

from collections import Counter
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.filters.attributes import NO_CODE, NO_FLAG, NO_TIME, AttributeColumn, ItemAttributes
from cache.filters.filtering import unknown_attribute_error
from cache.filters.reranking import Diversify, Reranking
from cache.model.filter_mask import FilterMask


class Reranker:
    """Re-ranks items of one generation; thread-safe.

    Ties keep the order of the candidates, so that results are deterministic.
    """

    def __init__(
        self,
        reranking: Reranking,
        boosted_masks: tuple[FilterMask, ...],
        attributes: ItemAttributes | None,
        item_vectors: NDArray[np.float32],
    ) -> None:
        self._boosts = tuple(
            (filter_mask, boost.score_factor)
            for boost, filter_mask in zip(reranking.boosts, boosted_masks, strict=True)
        )
        self._diversify = reranking.diversify or Diversify()
        self._column = _diversified_column(self._diversify, attributes)
        self._vectors = item_vectors

    def rerank(
        self, candidate_ordinals: NDArray[np.uint32], candidate_scores: NDArray[np.float32], k: int
    ) -> NDArray[np.int64]:
        """Return positions int64 of at most k candidates in their new order; the candidates must come best first."""
        boosted = candidate_scores.astype(np.float64)
        for filter_mask, factor in self._boosts:
            mask = filter_mask.among(candidate_ordinals)
            boosted[mask] *= np.where(boosted[mask] >= 0, factor, 1 / factor)
        order = np.argsort(-boosted, kind="stable")
        if self._column is None and self._diversify.mmr is None:
            return order[:k]
        room = _ValueQuota(self._column, self._diversify.per_value_max or 0, candidate_ordinals[order])
        if self._diversify.mmr is None:
            chosen_positions = list(islice(filter(room.try_add, range(len(order))), k))
        else:
            units = _unit_vectors(self._vectors[candidate_ordinals[order]])
            chosen_positions = _mmr_positions(_scaled_scores(boosted[order]), units, self._diversify.mmr, room, k)
        return order[chosen_positions]


def _mmr_positions(
    relevance: NDArray[np.float64],
    unit_vectors: NDArray[np.float32],
    relevance_weight: float,
    value_quota: "_ValueQuota",
    k: int,
) -> list[int]:
    """Choose at most k positions by maximal marginal relevance: relevance less similarity to items chosen before."""
    worth, likeness = relevance_weight * relevance, np.zeros(len(unit_vectors), np.float32)
    chosen_positions: list[int] = []
    for _ in range(len(unit_vectors)):
        position = int(np.argmax(worth - (1 - relevance_weight) * likeness))
        worth[position] = -np.inf
        if value_quota.try_add(position):
            chosen_positions.append(position)
            if len(chosen_positions) == k:
                break
            np.maximum(likeness, unit_vectors @ unit_vectors[position], out=likeness)
    return chosen_positions


class _ValueQuota:
    """Count of chosen items per attribute value; an item without the attribute is not counted."""

    def __init__(
        self, column: AttributeColumn | None, items_per_value_max: int, candidate_ordinals: NDArray[np.uint32]
    ) -> None:
        self._column = column
        self._per_value_max = items_per_value_max
        self._ordinals = candidate_ordinals.tolist()
        self._count_by_value: Counter[Any] = Counter()

    def try_add(self, candidate_position: int) -> bool:
        """Count the item and return True, unless one of its values has reached the limit."""
        if self._column is None:
            return True
        values = _attribute_values(self._column, self._ordinals[candidate_position])
        if any(self._count_by_value[attribute_value] >= self._per_value_max for attribute_value in values):
            return False
        self._count_by_value.update(values)
        return True


def _attribute_values(column: AttributeColumn, ordinal: int) -> tuple[Any, ...]:
    if column.item_offsets is not None:
        first, last = int(column.item_offsets[ordinal]), int(column.item_offsets[ordinal + 1])
        return tuple(set(column.values[first:last].tolist()))
    value = column.values[ordinal].item()
    return (
        () if value == _ABSENT_VALUE_BY_KIND.get(column.kind) or value != value else (value,)
    )  # NaN: the item has no number


_ABSENT_VALUE_BY_KIND: Final = {"text": int(NO_CODE), "flag": NO_FLAG, "time": int(NO_TIME)}


def _diversified_column(diversify: Diversify, attributes: ItemAttributes | None) -> AttributeColumn | None:
    if diversify.attribute is None:
        return None
    column = None if attributes is None else attributes.columns.get(diversify.attribute)
    if column is None:
        kind_by_attribute = {} if attributes is None else attributes.kind_by_attribute
        raise unknown_attribute_error(diversify.attribute, kind_by_attribute, "diversify.attribute")
    return column


def _scaled_scores(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale scores to the range 0 to 1; if all are equal, they become 1."""
    span = np.ptp(scores) if len(scores) else 0.0
    return (scores - scores.min()) / span if span > 0 else np.ones_like(scores)


def _unit_vectors(item_vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale vectors to length 1; vectors of length 0 stay zero and are similar to no other."""
    lengths = np.linalg.norm(item_vectors, axis=1, keepdims=True)
    unit_vectors: NDArray[np.float32] = np.zeros_like(item_vectors)
    np.divide(item_vectors, lengths, out=unit_vectors, where=lengths > 0)
    return unit_vectors
