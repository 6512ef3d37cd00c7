"""Preparation of callers' inputs for a tower, in batches: features are checked, history ids mapped to indices. Pure."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.errors import InvalidInput
from cache.format.ids import FeatureValue
from cache.format.item_table import ItemTable, Ordinals
from cache.model.tower_spec import InputSpec, TowerSpec

HISTORY_LIMIT: Final = "history_limit"
"""Fact of a manifest: the number of newest history items that models were given in the night."""

_INTEGER_RANGES = {name: np.iinfo(name) for name in ("int32", "int64")}
_FLOAT_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class LiveInput:
    """Input that a caller sent for a live answer; `item_ordinal` is the ordinal if the table's entities are items."""

    history: tuple[bytes, ...] | None = None
    features: Mapping[str, FeatureValue] | None = None
    item_ordinal: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedInput:
    """Input for a tower.

    Items in `excluded_ordinals` are left out of the answer, `unknown_id_count` ids are unknown to the model.
    """

    table: str
    history: NDArray[np.int64]
    features: Mapping[str, FeatureValue]
    item_index: int
    excluded_ordinals: NDArray[np.int64]
    unknown_id_count: int


def prepare_all(
    table: str, spec: TowerSpec, items: ItemTable, sources: Sequence[LiveInput], history_limit: int = sys.maxsize
) -> list[PreparedInput | InvalidInput | None]:
    """Prepare each input: for the tower, None if it contains nothing usable, or InvalidInput for its features.

    The tower receives the newest `history_limit` items of a history, as in the night; the whole history is excluded
    from the answer. All histories are mapped together, so that numpy's cost per call is paid once per batch.
    """
    history_ids: list[bytes] = []
    ends = [0]
    for source in sources:
        if source.history:
            history_ids += keep_last_occurrences(source.history)
        ends.append(len(history_ids))
    ordinals = items.ordinals_of(history_ids)
    indices = items.model_indices_of(ordinals)
    known_indices, known_ends = _drop_unknown(indices, ends)
    excluded, excluded_ends = _drop_unknown(ordinals, ends)
    item_ordinals = np.array(
        [-1 if source.item_ordinal is None else source.item_ordinal for source in sources], np.int64
    )
    own_indices = (
        items.model_indices_of(Ordinals(item_ordinals)).tolist() if item_ordinals.max(initial=-1) >= 0 else None
    )
    binds = {input_spec.bind for input_spec in spec.inputs}
    prepared_inputs: list[PreparedInput | InvalidInput | None] = []
    for row, source in enumerate(sources):
        history = known_indices[known_ends[row] : known_ends[row + 1]]
        dropped_count = ends[row + 1] - ends[row] - len(history)
        excluded_ordinals = excluded[excluded_ends[row] : excluded_ends[row + 1]]
        if len(excluded_ordinals) > history_limit:
            newest_indices = items.model_indices_of(Ordinals(excluded_ordinals[-history_limit:]))
            history = newest_indices[newest_indices >= 0]
        item_index = -1
        if source.item_ordinal is not None:
            item_index = -1 if own_indices is None else own_indices[row]
            excluded_ordinals = np.union1d(excluded_ordinals, [source.item_ordinal])
        try:
            raw_features = source.features
            features = {} if raw_features is None else check_features(spec.features, raw_features)
        except InvalidInput as error:
            prepared_inputs.append(
                error.with_traceback(None)
            )  # break the reference cycle: the traceback holds this list
            continue
        has_required_inputs = not (
            ("feature" in binds and source.features is None)
            or ("item_index" in binds and item_index < 0)
            or (binds == {"history"} and not len(history))
        )
        prepared_inputs.append(
            PreparedInput(table, history, features, item_index, excluded_ordinals, dropped_count)
            if has_required_inputs
            else None
        )
    return prepared_inputs


def keep_last_occurrences(history: Sequence[bytes]) -> list[bytes]:
    """Return a history with each item once, at its last position, as the night does."""
    return list(dict.fromkeys(reversed(history)))[::-1]


def _drop_unknown(
    ordinals_or_indices: NDArray[np.int64], row_offsets: Sequence[int]
) -> tuple[NDArray[np.int64], list[int]]:
    """Return the numbers other than -1, and the end offset of each row among them."""
    is_known = ordinals_or_indices >= 0
    known_counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_known)])
    return ordinals_or_indices[is_known], known_counts[np.asarray(row_offsets)].tolist()


def check_features(inputs: Sequence[InputSpec], features: Mapping[str, FeatureValue]) -> dict[str, FeatureValue]:
    """Return the values by input name; raise InvalidInput (`field`) for a missing, unknown or unfit feature."""
    spec_by_column = {str(input_spec.column): input_spec for input_spec in inputs}
    for name in features:
        if name not in spec_by_column:
            column_names = ", ".join(sorted(spec_by_column)) or "none"
            raise InvalidInput(f"the model has no feature {name!r}; it takes {column_names}", field=name)
    value_by_input: dict[str, FeatureValue] = {}
    for column, input_spec in spec_by_column.items():
        if column not in features:
            raise InvalidInput(f"feature {column!r} is missing", field=column)
        value_by_input[input_spec.name] = _fitting_value(input_spec, features[column])
    return value_by_input


def stack_features(input_spec: InputSpec, values: Sequence[FeatureValue]) -> NDArray[Any]:
    """Stack a feature's values for a batch into an array [n] or [n, width]."""
    return np.array(values, object if input_spec.dtype == "string" else input_spec.dtype)


def _fitting_value(input_spec: InputSpec, value: FeatureValue) -> FeatureValue:
    if input_spec.width is None:
        return _scalar_value(input_spec, value)
    if input_spec.width == 1 and not isinstance(value, tuple):
        # Libraries export inputs of one column as [n, 1]; tables and callers provide the single value.
        return (_scalar_value(input_spec, value),)  # type: ignore[return-value]
    if not isinstance(value, tuple) or len(value) != input_spec.width:
        unit = "texts" if input_spec.dtype == "string" else "numbers"
        actual_kind = f"{len(value)} {unit}" if isinstance(value, tuple) else type(value).__name__
        raise InvalidInput(
            f"feature {input_spec.column!r} takes {input_spec.width} {unit}, not {actual_kind}", field=input_spec.column
        )
    # Check each distinct type once, not each number: a batch may contain millions of numbers.
    for value_type in set(map(type, value)):
        _scalar_value(input_spec, value_type(0))
    if input_spec.dtype != "string":
        _scalar_value(input_spec, min(value))
        _scalar_value(input_spec, max(value))
        _scalar_value(input_spec, next((part for part in value if part != part), value[0]))
    return value


def _scalar_value(input_spec: InputSpec, value: FeatureValue) -> FeatureValue:
    match input_spec.dtype:
        case "string" if isinstance(value, str):
            return value
        case "float32" if isinstance(value, int | float) and not isinstance(value, bool):
            if math.isfinite(value) and abs(value) <= _FLOAT_MAX:
                return value
            raise InvalidInput(f"feature {input_spec.column!r} is {value}, not a float32", field=input_spec.column)
        case "int32" | "int64" if isinstance(value, int) and not isinstance(value, bool):
            if _INTEGER_RANGES[input_spec.dtype].min <= value <= _INTEGER_RANGES[input_spec.dtype].max:
                return value
            raise InvalidInput(
                f"feature {input_spec.column!r} is {value}, not an {input_spec.dtype}", field=input_spec.column
            )
    raise InvalidInput(
        f"feature {input_spec.column!r} is {input_spec.dtype}, not {type(value).__name__}", field=input_spec.column
    )
