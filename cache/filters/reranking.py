"""Re-ranking of candidates: boosts of scores, then a bound on the likeness of an answer's items. Pure."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.errors import InvalidInput
from cache.filters.attributes import NO_CODE, NO_FLAG, NO_TIME, AttributeColumn, ItemAttributes
from cache.filters.expression import TEXT_BYTES_MAX, Filter, InvalidFilter, read_filter
from cache.filters.filtering import unknown_attribute
from cache.model.filter_mask import FilterMask

BOOSTS_MAX: Final = 8
"""Boosts of one request; each has a filter."""

_FIELDS: Final = ("boost", "diversify")
_BOOST_FIELDS: Final = ("filter", "factor")
_DIVERSIFY_FIELDS: Final = ("attribute", "most", "mmr")


class InvalidReranking(InvalidInput):
    """A re-ranking is malformed or out of range; `details["field"]` is the path of the wrong part."""

    code = "invalid_rerank"


@dataclass(frozen=True, slots=True)
class Boost:
    """Factor for the scores of the items that pass a filter; scores below zero are divided by it."""

    filter: Filter
    factor: float


@dataclass(frozen=True, slots=True)
class Diversify:
    """Bounds on how alike an answer's items are: `per_value_max` of one value of an attribute, `mmr` on their vectors.

    `mmr` is the weight of an item's score against its likeness to what is chosen already (Carbonell and Goldstein,
    "The use of MMR, diversity-based reranking", SIGIR 1998).
    """

    attribute: str | None = None
    per_value_max: int | None = None
    mmr: float | None = None


@dataclass(frozen=True, slots=True)
class Reranking:
    """Boosts of a request, and the bound on likeness that is applied after them."""

    boosts: tuple[Boost, ...] = ()
    diversify: Diversify | None = None

    @property
    def is_heavy(self) -> bool:
        """True if it takes a product with all candidates for each chosen item."""
        return self.diversify is not None and self.diversify.mmr is not None

    @property
    def named(self) -> str:
        """Names of the parts for the answer: `boost`, `diversify` or `boost+diversify`."""
        return "+".join(
            (("boost",) if self.boosts else ()) + (("diversify",) if self.diversify else ())
        )


def read_reranking(value: object, boost_max: float) -> Reranking:
    """Parse a JSON value, such as `{"boost": [{"filter": {...}, "factor": 2}], "diversify": {"mmr": 0.7}}`.

    Factors are within 1 / `boost_max` to `boost_max`. Raises InvalidReranking, or InvalidFilter for a boost's filter.
    """
    fields = _fields(value, "", _FIELDS)
    if not fields:
        raise _refused("a re-ranking has boost, diversify or both", "")
    raw_boosts = fields.get("boost", ())
    if not isinstance(raw_boosts, list | tuple) or ("boost" in fields and not raw_boosts):
        raise _refused("boost is a list of one or more boosts", "boost")
    if len(raw_boosts) > BOOSTS_MAX:
        raise _refused(f"there are at most {BOOSTS_MAX} boosts", "boost", limit=BOOSTS_MAX)
    boosts = tuple(
        _boost(raw_boost, f"boost[{index}]", boost_max)
        for index, raw_boost in enumerate(raw_boosts)
    )
    return Reranking(boosts, _diversify(fields["diversify"]) if "diversify" in fields else None)


def _boost(value: object, path: str, boost_max: float) -> Boost:
    fields = _fields(value, path, _BOOST_FIELDS)
    factor = _number(fields.get("factor"), f"{path}.factor")
    if not 1 / boost_max <= factor <= boost_max:
        raise _refused(
            f"factor is {1 / boost_max:g} to {boost_max:g} here, not {factor:g}",
            f"{path}.factor",
            limit=boost_max,
        )
    try:
        return Boost(read_filter(fields.get("filter")), factor)
    except InvalidFilter as error:
        raise below(error, f"{path}.filter") from error


def _diversify(value: object) -> Diversify:
    path = "diversify"
    fields = _fields(value, path, _DIVERSIFY_FIELDS)
    attribute, items_per_value_max, mmr = (fields.get(name) for name in _DIVERSIFY_FIELDS)
    if (attribute is None) != (items_per_value_max is None) or (attribute is None and mmr is None):
        raise _refused("diversify has attribute and most, or mmr, or all three", path)
    if attribute is not None and (
        not isinstance(attribute, str) or len(attribute.encode(errors="replace")) > TEXT_BYTES_MAX
    ):
        raise _refused("attribute is the name of one", f"{path}.attribute")
    if items_per_value_max is not None and (
        isinstance(items_per_value_max, bool)
        or not isinstance(items_per_value_max, int)
        or items_per_value_max < 1
    ):
        raise _refused("most is a whole number, 1 or more", f"{path}.most")
    if mmr is not None and not 0 < (mmr := _number(mmr, f"{path}.mmr")) <= 1:
        raise _refused(f"mmr is above 0, up to 1, not {mmr:g}", f"{path}.mmr")
    return Diversify(attribute, items_per_value_max, mmr)


def _fields(value: object, path: str, field_names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refused(
            f"{path or 'a re-ranking'} is a JSON object of {', '.join(field_names)}", path
        )
    for name in value:
        if name not in field_names:
            raise _refused(
                f"there is no field {str(name)[:40]!r} here; there are {', '.join(field_names)}",
                path,
            )
    return value


def _number(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refused(f"{path.rpartition('.')[2]} is a finite number", path)
    return float(value)


def _refused(message: str, path: str, **details: object) -> InvalidReranking:
    return InvalidReranking(message, **({"field": path} if path else {}), **details)


def below(error: InvalidFilter, path: str) -> InvalidFilter:
    """Return a copy of the error whose field starts with `path`, for a filter nested at that path."""
    inner = error.details.get("field")
    details = error.details | {"field": path if inner is None else f"{path}.{inner}"}
    return type(error)(error.message, **details)


class Reranker:
    """Re-ranking of one generation's items; for any thread.

    Ties stay in the order of the candidates, so that a list is the same whenever it is made.
    """

    def __init__(
        self,
        reranking: Reranking,
        boosted: tuple[FilterMask, ...],
        attributes: ItemAttributes | None,
        vectors: NDArray[np.float32],
    ) -> None:
        self._boosts = tuple(
            (filter_mask, boost.factor)
            for boost, filter_mask in zip(reranking.boosts, boosted, strict=True)
        )
        self._diversify = reranking.diversify or Diversify()
        self._column = _column(self._diversify, attributes)
        self._vectors = vectors

    def rerank(
        self, ordinals: NDArray[np.uint32], scores: NDArray[np.float32], k: int
    ) -> NDArray[np.int64]:
        """Return positions int64 of at most k candidates in their new order; the candidates come best first."""
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
            chosen_positions = _least_alike(
                _scaled(boosted[order]), units, self._diversify.mmr, room, k
            )
        return order[chosen_positions]


def _least_alike(
    relevance: NDArray[np.float64],
    units: NDArray[np.float32],
    weight: float,
    room: "_ValueQuota",
    k: int,
) -> list[int]:
    """Choose at most k positions by maximal marginal relevance: relevance less likeness to the items chosen before."""
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
    """Count of chosen items by value; an item without the attribute counts for none."""

    def __init__(
        self, column: AttributeColumn | None, items_per_value_max: int, ordinals: NDArray[np.uint32]
    ) -> None:
        self._column = column
        self._per_value_max = items_per_value_max
        self._ordinals = ordinals.tolist()
        self._counts: Counter[Any] = Counter()

    def try_add(self, position: int) -> bool:
        """Count the item if none of its values has reached the limit; return whether it was counted."""
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
    return () if value == _ABSENT.get(column.kind) or value != value else (value,)  # NaN: no number


_ABSENT: Final = {"text": int(NO_CODE), "flag": NO_FLAG, "time": int(NO_TIME)}


def _column(diversify: Diversify, attributes: ItemAttributes | None) -> AttributeColumn | None:
    if diversify.attribute is None:
        return None
    column = None if attributes is None else attributes.columns.get(diversify.attribute)
    if column is None:
        kind_by_attribute = {} if attributes is None else attributes.kinds
        raise unknown_attribute(diversify.attribute, kind_by_attribute, "diversify.attribute")
    return column


def _scaled(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale scores to 0 to 1; all become 1 if they are equal."""
    span = np.ptp(scores) if len(scores) else 0.0
    return (scores - scores.min()) / span if span > 0 else np.ones_like(scores)


def _units(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale vectors to length 1; vectors of length 0 stay zero and are like no other."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: NDArray[np.float32] = np.zeros_like(vectors)
    np.divide(vectors, lengths, out=units, where=lengths > 0)
    return units
