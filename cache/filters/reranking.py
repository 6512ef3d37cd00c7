"""Parser of re-rankings: boosts of scores, then a bound on the likeness of an answer's items. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cache.errors import InvalidInput
from cache.filters.expression import TEXT_BYTES_MAX, Filter, InvalidFilter, read_filter

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
