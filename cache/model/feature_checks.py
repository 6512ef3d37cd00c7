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
    columns = {str(input_spec.column): input_spec for input_spec in inputs}
    for name in features:
        if name not in columns:
            column_names = ", ".join(sorted(columns)) or "none"
            raise InvalidInput(
                f"the model has no feature {name!r}; it takes {column_names}", field=name
            )
    checked: dict[str, FeatureValue] = {}
    for column, input_spec in columns.items():
        if column not in features:
            raise InvalidInput(f"feature {column!r} is missing", field=column)
        checked[input_spec.name] = _fitting(input_spec, features[column])
    return checked


def stack_features(input_spec: InputSpec, values: Sequence[FeatureValue]) -> NDArray[Any]:
    """Array of a feature's values for a batch, [n] or [n, width]."""
    return np.array(values, object if input_spec.dtype == "string" else input_spec.dtype)


def _fitting(input_spec: InputSpec, value: FeatureValue) -> FeatureValue:
    if input_spec.width is None:
        return _scalar(input_spec, value)
    if input_spec.width == 1 and not isinstance(value, tuple):
        # Libraries export inputs of one column as [n, 1]; a table and a caller have the value alone.
        return (_scalar(input_spec, value),)  # type: ignore[return-value]
    if not isinstance(value, tuple) or len(value) != input_spec.width:
        unit = "texts" if input_spec.dtype == "string" else "numbers"
        actual_kind = f"{len(value)} {unit}" if isinstance(value, tuple) else type(value).__name__
        raise InvalidInput(
            f"feature {input_spec.column!r} takes {input_spec.width} {unit}, not {actual_kind}",
            field=input_spec.column,
        )
    # One look per distinct type, not per number: a batch may hold millions of them.
    for kind in set(map(type, value)):
        _scalar(input_spec, kind(0))
    if input_spec.dtype != "string":
        _scalar(input_spec, min(value))
        _scalar(input_spec, max(value))
        _scalar(input_spec, next((part for part in value if part != part), value[0]))
    return value


def _scalar(input_spec: InputSpec, value: FeatureValue) -> FeatureValue:
    match input_spec.dtype:
        case "string" if isinstance(value, str):
            return value
        case "float32" if isinstance(value, int | float) and not isinstance(value, bool):
            if math.isfinite(value) and abs(value) <= _FLOAT_MAX:
                return value
            raise InvalidInput(
                f"feature {input_spec.column!r} is {value}, not a float32", field=input_spec.column
            )
        case "int32" | "int64" if isinstance(value, int) and not isinstance(value, bool):
            if _RANGES[input_spec.dtype].min <= value <= _RANGES[input_spec.dtype].max:
                return value
            raise InvalidInput(
                f"feature {input_spec.column!r} is {value}, not an {input_spec.dtype}",
                field=input_spec.column,
            )
    raise InvalidInput(
        f"feature {input_spec.column!r} is {input_spec.dtype}, not {type(value).__name__}",
        field=input_spec.column,
    )
