"""A caller's feature values, checked against what the tower takes and turned into its arrays. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import InvalidInput
from cache.format.ids import FeatureValue
from cache.model.tower_spec import InputSpec

_RANGES = {name: np.iinfo(name) for name in ("int32", "int64")}
_FLOAT_MAX = float(np.finfo(np.float32).max)


def check_features(
    inputs: Sequence[InputSpec], features: Mapping[str, FeatureValue]
) -> dict[str, FeatureValue]:
    """Values by input name; raises InvalidInput (`field`) for a missing, unknown or unfit feature."""
    columns = {str(each.column): each for each in inputs}
    for name in features:
        if name not in columns:
            known = ", ".join(sorted(columns)) or "none"
            raise InvalidInput(f"the model has no feature {name!r}; it takes {known}", field=name)
    checked: dict[str, FeatureValue] = {}
    for column, each in columns.items():
        if column not in features:
            raise InvalidInput(f"feature {column!r} is missing", field=column)
        checked[each.name] = _fitting(each, features[column])
    return checked


def stack_features(each: InputSpec, values: Sequence[FeatureValue]) -> NDArray[Any]:
    """Array of a feature's values for a batch, [n] or [n, width]."""
    return np.array(values, object if each.dtype == "string" else each.dtype)


def _fitting(each: InputSpec, value: FeatureValue) -> FeatureValue:
    if each.width is None:
        return _scalar(each, value)
    if each.width == 1 and not isinstance(value, tuple):
        # Libraries export inputs of one column as [n, 1]; a table and a caller have the value alone.
        return (_scalar(each, value),)  # type: ignore[return-value]
    if not isinstance(value, tuple) or len(value) != each.width:
        unit = "texts" if each.dtype == "string" else "numbers"
        found = f"{len(value)} {unit}" if isinstance(value, tuple) else type(value).__name__
        raise InvalidInput(
            f"feature {each.column!r} takes {each.width} {unit}, not {found}", field=each.column
        )
    # One look per distinct type, not per number: a batch may hold millions of them.
    for kind in set(map(type, value)):
        _scalar(each, kind(0))
    if each.dtype != "string":
        _scalar(each, min(value))
        _scalar(each, max(value))
        _scalar(each, next((part for part in value if part != part), value[0]))
    return value


def _scalar(each: InputSpec, value: FeatureValue) -> FeatureValue:
    match each.dtype:
        case "string" if isinstance(value, str):
            return value
        case "float32" if isinstance(value, int | float) and not isinstance(value, bool):
            if math.isfinite(value) and abs(value) <= _FLOAT_MAX:
                return value
            raise InvalidInput(
                f"feature {each.column!r} is {value}, not a float32", field=each.column
            )
        case "int32" | "int64" if isinstance(value, int) and not isinstance(value, bool):
            if _RANGES[each.dtype].min <= value <= _RANGES[each.dtype].max:
                return value
            raise InvalidInput(
                f"feature {each.column!r} is {value}, not an {each.dtype}", field=each.column
            )
    raise InvalidInput(
        f"feature {each.column!r} is {each.dtype}, not {type(value).__name__}", field=each.column
    )
