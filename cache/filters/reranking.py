"""Parser of re-rankings: boosts of scores, then bounds on the similarity of an answer's items. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cache.errors import InvalidInput
from cache.filters.expression import TEXT_BYTES_MAX, Filter, InvalidFilter, read_filter

BOOSTS_MAX: Final = 8
"""Largest number of boosts in one request; each has a filter."""

_RERANKING_FIELDS: Final = ("boost", "diversify")
_BOOST_FIELDS: Final = ("filter", "factor")
_DIVERSIFY_FIELDS: Final = ("attribute", "most", "mmr")


class InvalidReranking(InvalidInput):
    """A re-ranking is malformed or out of range; `details["field"]` is the path of the wrong part."""

    code = "invalid_rerank"


@dataclass(frozen=True, slots=True)
class Boost:
    """Factor for the scores of the items that pass a filter; scores below zero are divided by it."""

    filter: Filter
    score_factor: float


@dataclass(frozen=True, slots=True)
class Diversify:
    """Bounds on the similarity of an answer's items: `per_value_max` items per attribute value, `mmr` on their vectors.

    `mmr` is the weight of an item's score against its similarity to the items chosen before (Carbonell and Goldstein,
    "The use of MMR, diversity-based reranking", SIGIR 1998).
    """

    attribute: str | None = None
    per_value_max: int | None = None
    mmr: float | None = None


@dataclass(frozen=True, slots=True)
class Reranking:
    """Boosts of a request, and the similarity bounds applied after them."""

    boosts: tuple[Boost, ...] = ()
    diversify: Diversify | None = None

    @property
    def is_heavy(self) -> bool:
        """Whether each chosen item costs a product with all candidates."""
        return self.diversify is not None and self.diversify.mmr is not None

    @property
    def part_names(self) -> str:
        """Names of the parts, for the answer: `boost`, `diversify` or `boost+diversify`."""
        return "+".join((("boost",) if self.boosts else ()) + (("diversify",) if self.diversify else ()))


def read_reranking(json_value: object, boost_factor_max: float) -> Reranking:
    """Parse a JSON value, such as `{"boost": [{"filter": {...}, "factor": 2}], "diversify": {"mmr": 0.7}}`.

    Factors must be within 1 / `boost_factor_max` and `boost_factor_max`. Raises InvalidReranking, or InvalidFilter for
    a boost's filter.
    """
    fields = _checked_fields(json_value, "", _RERANKING_FIELDS)
    if not fields:
        raise _reranking_error("a re-ranking must have boost, diversify or both", "")
    raw_boosts = fields.get("boost", ())
    if not isinstance(raw_boosts, list | tuple) or ("boost" in fields and not raw_boosts):
        raise _reranking_error("boost must be a list of one or more boosts", "boost")
    if len(raw_boosts) > BOOSTS_MAX:
        raise _reranking_error(f"there are at most {BOOSTS_MAX} boosts", "boost", limit=BOOSTS_MAX)
    boosts = tuple(
        _parse_boost(raw_boost, f"boost[{index}]", boost_factor_max) for index, raw_boost in enumerate(raw_boosts)
    )
    return Reranking(boosts, _parse_diversify(fields["diversify"]) if "diversify" in fields else None)


def _parse_boost(json_value: object, field_path: str, boost_factor_max: float) -> Boost:
    fields = _checked_fields(json_value, field_path, _BOOST_FIELDS)
    factor = _checked_number(fields.get("factor"), f"{field_path}.factor")
    if not 1 / boost_factor_max <= factor <= boost_factor_max:
        raise _reranking_error(
            f"factor must be {1 / boost_factor_max:g} to {boost_factor_max:g}, not {factor:g}",
            f"{field_path}.factor",
            limit=boost_factor_max,
        )
    try:
        return Boost(read_filter(fields.get("filter")), factor)
    except InvalidFilter as error:
        raise with_error_path(error, f"{field_path}.filter") from error


def _parse_diversify(json_value: object) -> Diversify:
    field_path = "diversify"
    fields = _checked_fields(json_value, field_path, _DIVERSIFY_FIELDS)
    attribute, items_per_value_max, mmr = (fields.get(name) for name in _DIVERSIFY_FIELDS)
    if (attribute is None) != (items_per_value_max is None) or (attribute is None and mmr is None):
        raise _reranking_error("diversify must have attribute and most, or mmr, or all three", field_path)
    if attribute is not None and (
        not isinstance(attribute, str) or len(attribute.encode(errors="replace")) > TEXT_BYTES_MAX
    ):
        raise _reranking_error("attribute must be the name of an attribute", f"{field_path}.attribute")
    if items_per_value_max is not None and (
        isinstance(items_per_value_max, bool) or not isinstance(items_per_value_max, int) or items_per_value_max < 1
    ):
        raise _reranking_error("most must be a whole number, 1 or more", f"{field_path}.most")
    if mmr is not None and not 0 < (mmr := _checked_number(mmr, f"{field_path}.mmr")) <= 1:
        raise _reranking_error(f"mmr must be above 0 and at most 1, not {mmr:g}", f"{field_path}.mmr")
    return Diversify(attribute, items_per_value_max, mmr)


def _checked_fields(json_value: object, field_path: str, field_names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(json_value, Mapping):
        raise _reranking_error(
            f"{field_path or 'a re-ranking'} is a JSON object of {', '.join(field_names)}", field_path
        )
    for name in json_value:
        if name not in field_names:
            raise _reranking_error(
                f"there is no field {str(name)[:40]!r} here; there are {', '.join(field_names)}", field_path
            )
    return json_value


def _checked_number(json_value: object, field_path: str) -> float:
    if isinstance(json_value, bool) or not isinstance(json_value, int | float) or not math.isfinite(json_value):
        raise _reranking_error(f"{field_path.rpartition('.')[2]} is a finite number", field_path)
    return float(json_value)


def _reranking_error(message: str, field_path: str, **details: object) -> InvalidReranking:
    return InvalidReranking(message, **({"field": field_path} if field_path else {}), **details)


def with_error_path(error: InvalidFilter, outer_path: str) -> InvalidFilter:
    """Return a copy of the error with `outer_path` before its field, for a filter nested at that path."""
    inner_field = error.details.get("field")
    details = error.details | {"field": outer_path if inner_field is None else f"{outer_path}.{inner_field}"}
    return type(error)(error.message, **details)
