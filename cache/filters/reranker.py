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
        boosted: tuple[FilterMask, ...],
        attributes: ItemAttributes | None,
        vectors: NDArray[np.float32],
    ) -> None:
        self._boosts = tuple(
            (filter_mask, boost.factor) for boost, filter_mask in zip(reranking.boosts, boosted, strict=True)
        )
        self._diversify = reranking.diversify or Diversify()
        self._column = _column(self._diversify, attributes)
        self._vectors = vectors

    def rerank(self, ordinals: NDArray[np.uint32], scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """Return positions int64 of at most k candidates in their new order; the candidates must come best first."""
        boosted = scores.astype(np.float64)
        for filter_mask, factor in self._boosts:
            mask = filter_mask.among(ordinals)
            boosted[mask] *= np.where(boosted[mask] >= 0, factor, 1 / factor)
        order = np.argsort(-boosted, kind="stable")
        if self._column is None and self._diversify.mmr is None:
            return order[:k]
        room = _ValueQuota(self._column, self._diversify.per_value_max or 0, ordinals[order])
        if self._diversify.mmr is None:
            chosen_positions = list(islice(filter(room.try_add, range(len(order))), k))
        else:
            units = _units(self._vectors[ordinals[order]])
            chosen_positions = _least_alike(_scaled(boosted[order]), units, self._diversify.mmr, room, k)
        return order[chosen_positions]


def _least_alike(
    relevance: NDArray[np.float64], units: NDArray[np.float32], weight: float, room: "_ValueQuota", k: int
) -> list[int]:
    """Choose at most k positions by maximal marginal relevance: relevance less similarity to items chosen before."""
    worth, likeness = weight * relevance, np.zeros(len(units), np.float32)
    chosen_positions: list[int] = []
    for _ in range(len(units)):
        position = int(np.argmax(worth - (1 - weight) * likeness))
        worth[position] = -np.inf
        if room.try_add(position):
            chosen_positions.append(position)
            if len(chosen_positions) == k:
                break
            np.maximum(likeness, units @ units[position], out=likeness)
    return chosen_positions


class _ValueQuota:
    """Count of chosen items per attribute value; an item without the attribute is not counted."""

    def __init__(self, column: AttributeColumn | None, items_per_value_max: int, ordinals: NDArray[np.uint32]) -> None:
        self._column = column
        self._per_value_max = items_per_value_max
        self._ordinals = ordinals.tolist()
        self._counts: Counter[Any] = Counter()

    def try_add(self, position: int) -> bool:
        """Count the item and return True, unless one of its values has reached the limit."""
        if self._column is None:
            return True
        values = _values(self._column, self._ordinals[position])
        if any(self._counts[attribute_value] >= self._per_value_max for attribute_value in values):
            return False
        self._counts.update(values)
        return True


def _values(column: AttributeColumn, ordinal: int) -> tuple[Any, ...]:
    if column.offsets is not None:
        first, last = int(column.offsets[ordinal]), int(column.offsets[ordinal + 1])
        return tuple(set(column.values[first:last].tolist()))
    value = column.values[ordinal].item()
    return () if value == _ABSENT.get(column.kind) or value != value else (value,)  # NaN: the item has no number


_ABSENT: Final = {"text": int(NO_CODE), "flag": NO_FLAG, "time": int(NO_TIME)}


def _column(diversify: Diversify, attributes: ItemAttributes | None) -> AttributeColumn | None:
    if diversify.attribute is None:
        return None
    column = None if attributes is None else attributes.columns.get(diversify.attribute)
    if column is None:
        kind_by_attribute = {} if attributes is None else attributes.kinds
        raise unknown_attribute_error(diversify.attribute, kind_by_attribute, "diversify.attribute")
    return column


def _scaled(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale scores to the range 0 to 1; if all are equal, they become 1."""
    span = np.ptp(scores) if len(scores) else 0.0
    return (scores - scores.min()) / span if span > 0 else np.ones_like(scores)


def _units(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale vectors to length 1; vectors of length 0 stay zero and are similar to no other."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: NDArray[np.float32] = np.zeros_like(vectors)
    np.divide(vectors, lengths, out=units, where=lengths > 0)
    return units
