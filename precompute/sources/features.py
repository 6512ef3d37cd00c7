"""Feature columns as the arrays that models take, and values that events set in them."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.format.manifest import EntityKind
from cache.model.tower_spec import InputSpec
from precompute.sources.columns import Ids, UnusableMaskByReason, as_numpy_mask, is_text_type, utf_8_mask
from precompute.sources.unusable import EVENTS_SOURCE_PREFIX, UnusableRows

EntityValues = Mapping[bytes, Mapping[str, Any]]
"""Newest values by id and attribute; None for a cleared value."""

NO_ENTITY_VALUES: Final[EntityValues] = MappingProxyType({})

_LIST_TYPE_PREDICATES = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)

_FeatureBatch = tuple[Ids, dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class FeatureValues:
    """Values of a model input, a row per entity: [n] or [n, width]; missing or unusable rows are undefined."""

    input_numbers: NDArray[Any]
    missing_mask: NDArray[np.bool_]
    unusable_mask_by_reason: UnusableMaskByReason

    @property
    def usable_mask(self) -> NDArray[np.bool_]:
        """Mask of the rows that are neither missing nor unusable, bool [n]."""
        usable_rows_mask: NDArray[np.bool_] = ~np.logical_or.reduce(
            [self.missing_mask, *self.unusable_mask_by_reason.values()]
        )
        return usable_rows_mask


def read_feature_values(column: Any, spec: InputSpec) -> FeatureValues:
    """Return the input's values from an Arrow array; raise SourceError if the column's type does not fit.

    Unusable rows are masked and raise nothing.
    """
    demand_column_type(column.type, spec, "features")
    if spec.width is None:
        return _read_scalars(column, spec)
    if not _is_list(column.type):  # scalars for an input [n, 1]
        scalar_values = _read_scalars(column, replace(spec, width=None))
        return replace(scalar_values, input_numbers=scalar_values.input_numbers.reshape(-1, 1))
    missing_mask, list_widths = as_numpy_mask(column.is_null()), pc.list_value_length(column)
    has_right_width = as_numpy_mask(pc.fill_null(pc.equal(list_widths, spec.width), False))
    fitting_lists = column if has_right_width.all() else column.filter(pa.array(has_right_width))
    element_values = _read_scalars(fitting_lists.flatten(), replace(spec, width=None))
    numbers = element_values.input_numbers.reshape(-1, spec.width)
    bad_mask_by_reason: UnusableMaskByReason = {
        reason: np.asarray(element_mask.reshape(-1, spec.width).any(axis=1))
        for reason, element_mask in {
            f"{spec.column}: a null in a list": element_values.missing_mask,
            **element_values.unusable_mask_by_reason,
        }.items()
    }
    if not has_right_width.all():
        filler = "" if spec.dtype == "string" else 0
        spread_numbers = np.full((len(column), spec.width), filler, numbers.dtype)
        spread_numbers[has_right_width] = numbers
        numbers = spread_numbers
        bad_mask_by_reason = {
            reason: _spread_mask(row_mask, has_right_width) for reason, row_mask in bad_mask_by_reason.items()
        }
    bad_mask_by_reason[f"{spec.column}: not of width {spec.width}"] = ~has_right_width & ~missing_mask
    return FeatureValues(
        numbers, missing_mask, {reason: row_mask for reason, row_mask in bad_mask_by_reason.items() if row_mask.any()}
    )


def _read_scalars(column: Any, spec: InputSpec) -> FeatureValues:
    missing_mask = as_numpy_mask(column.is_null())
    if spec.dtype == "string":
        is_utf_8_text = utf_8_mask(column.cast(pa.large_binary()))
        is_usable_text = pa.array(is_utf_8_text & ~missing_mask)
        texts = pc.if_else(is_usable_text, column, pa.scalar("", column.type))
        bad_mask_by_reason = {} if is_utf_8_text.all() else {f"{spec.column}: not UTF-8": ~is_utf_8_text}
        return FeatureValues(np.array(texts.to_pylist(), object), missing_mask, bad_mask_by_reason)
    source_numbers = np.asarray(pc.fill_null(column, 0) if column.null_count else column)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = source_numbers.astype(spec.dtype)
    if spec.dtype == "float32":
        reason, fits = "not finite as float32", np.isfinite(numbers)
    else:
        reason, fits = f"too large for {spec.dtype}", np.asarray(numbers == source_numbers)
    return FeatureValues(numbers, missing_mask, {} if fits.all() else {f"{spec.column}: {reason}": ~fits})


def union_of_masks(mask_mappings: Iterable[UnusableMaskByReason]) -> UnusableMaskByReason:
    """Merge the masks of several inputs of one column: by reason, the rows that any input cannot use."""
    union_by_reason: UnusableMaskByReason = {}
    for mask_by_reason in mask_mappings:
        for reason, row_mask in mask_by_reason.items():
            union_by_reason[reason] = row_mask | union_by_reason[reason] if reason in union_by_reason else row_mask
    return union_by_reason


def _spread_mask(partial_mask: NDArray[np.bool_], spread_to_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    full_mask = np.zeros(len(spread_to_mask), np.bool_)
    full_mask[spread_to_mask] = partial_mask
    return full_mask


def demand_column_type(arrow_type: Any, spec: InputSpec, table_name: str) -> None:
    """Raise SourceError unless a column of this Arrow type can hold the input's values."""
    is_list = _is_list(arrow_type)
    element_type = arrow_type.value_type if is_list else arrow_type
    fits_by_dtype = {
        "string": is_text_type(element_type),
        "float32": pa.types.is_floating(element_type) or pa.types.is_integer(element_type),
        "int32": pa.types.is_integer(element_type),
        "int64": pa.types.is_integer(element_type),
    }
    width = arrow_type.list_size if pa.types.is_fixed_size_list(arrow_type) else spec.width
    has_right_width = width == spec.width is not None if is_list else spec.width in (None, 1)
    if not fits_by_dtype[spec.dtype] or not has_right_width:
        shape_text = "" if spec.width is None else f", lists of width {spec.width}"
        raise SourceError(
            f"{table_name}: column {spec.column!r} is {arrow_type}, but the model's input {spec.name!r} takes "
            f"{spec.dtype}{shape_text}",
            column=spec.column,
        )


def _is_list(arrow_type: Any) -> bool:
    return any(is_list_type(arrow_type) for is_list_type in _LIST_TYPE_PREDICATES)


def with_64_bit_offsets(column: Any) -> Any:
    """Return the column with 64-bit offsets: a whole catalogue may have more values than 32 bits can count."""
    arrow_type = column.type
    if pa.types.is_list(arrow_type):
        return column.cast(pa.large_list(arrow_type.value_type))
    if pa.types.is_string(arrow_type) or pa.types.is_binary(arrow_type):
        return column.cast(pa.large_string() if pa.types.is_string(arrow_type) else pa.large_binary())
    return column


def without_long_texts(column: Any, text_bytes_max: int) -> tuple[Any, NDArray[np.bool_]]:
    """Return (column with null for rows with a text longer than `text_bytes_max`, mask of these rows, bool [n])."""
    is_list = _is_list(column.type)
    if not is_text_type(column.type.value_type if is_list else column.type):
        return column, np.zeros(len(column), np.bool_)
    texts = column.flatten() if is_list else column
    is_long = as_numpy_mask(pc.fill_null(pc.greater(pc.binary_length(texts), text_bytes_max), False))
    if not is_long.any():
        return column, np.zeros(len(column), np.bool_)
    long_text_rows = np.asarray(pc.list_parent_indices(column))[is_long] if is_list else is_long
    has_long_text = np.zeros(len(column), np.bool_)
    has_long_text[long_text_rows] = True
    return pc.if_else(pa.array(has_long_text), pa.scalar(None, column.type), column), has_long_text


def digest_of_event_values(event_values: EntityValues, column_names: Iterable[str]) -> str:
    """Return the digest of the values of some attributes; empty if none was set."""
    attribute_names = set(column_names)
    values_by_id = {
        raw.decode(): digested_values
        for raw, value_by_attribute in event_values.items()
        if (digested_values := {name: value for name, value in value_by_attribute.items() if name in attribute_names})
    }
    canonical_json = orjson.dumps(values_by_id, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(canonical_json).hexdigest() if values_by_id else ""


def with_event_values(
    batches: Iterable[_FeatureBatch],
    event_values: EntityValues,
    *,
    entity_kind: EntityKind,
    unusable: UnusableRows,
    input_specs: Iterable[InputSpec] = (),
    addable_ids: Collection[bytes] = (),
) -> Iterator[_FeatureBatch]:
    """Yield the batches of a feature table with the values that events set in its columns.

    A value that does not fit its column's type, or that one of `input_specs` cannot use, is noted under the events'
    source and becomes null, like a cleared value. Ids of `addable_ids` without a row get a row if they have a value.
    """
    remaining_batches = iter(batches)
    first_batch = next(remaining_batches, None) if event_values else None
    if first_batch is None:
        yield from remaining_batches
        return
    type_by_column = {name: column.type for name, column in first_batch[1].items()}
    values_by_column = read_event_values(type_by_column, event_values, entity_kind, list(input_specs), unusable)
    valued_ids = sorted(set().union(*values_by_column.values()))
    valued_id_texts = pa.array([raw.decode() for raw in valued_ids], pa.string())
    has_row = np.zeros(len(valued_ids), np.bool_)
    for ids, column_by_name in chain([first_batch], remaining_batches):
        valued_id_indexes = np.asarray(pc.fill_null(pc.index_in(ids.distinct_ids, value_set=valued_id_texts), -1))
        has_row[valued_id_indexes[valued_id_indexes >= 0]] = True
        row_id_indexes = valued_id_indexes[ids.id_codes]
        yield (
            ids,
            {
                name: _with_event_values(column, row_id_indexes, valued_ids, values_by_column[name])
                for name, column in column_by_name.items()
            },
        )
    if addable_ids and (
        added_ids := [raw for raw in _new_ids_with_values(valued_ids, has_row, values_by_column) if raw in addable_ids]
    ):
        ids = Ids.of(pa.array([raw.decode() for raw in added_ids], pa.string()))
        yield (
            ids,
            {
                name: _arrow_array([values_by_column[name].get(raw) for raw in added_ids], column_type)
                for name, column_type in type_by_column.items()
            },
        )


def _new_ids_with_values(
    valued_ids: Sequence[bytes], has_row: Any, values_by_column: Mapping[str, Mapping[bytes, Any]]
) -> list[bytes]:
    """Return the ids that have a value and no row."""
    return [
        raw
        for raw, id_has_row in zip(valued_ids, has_row.tolist(), strict=True)
        if not id_has_row and any(value_by_id.get(raw) is not None for value_by_id in values_by_column.values())
    ]


def read_event_values(
    type_by_column: Mapping[str, Any],
    event_values: EntityValues,
    kind: EntityKind,
    input_specs: Sequence[InputSpec],
    unusable: UnusableRows,
) -> dict[str, dict[bytes, Any]]:
    """Return Arrow values by column and id; None for cleared values and unusable ones, which are noted."""
    values_by_column: dict[str, dict[bytes, Any]] = {name: {} for name in type_by_column}
    reasons_by_column: dict[str, dict[bytes, str]] = {name: {} for name in type_by_column}
    for raw, value_by_attribute in event_values.items():
        for name in value_by_attribute.keys() & type_by_column.keys():
            fitted = _fit_value(value_by_attribute[name], type_by_column[name])
            values_by_column[name][raw] = fitted[0] if fitted else None
            if not fitted:
                reasons_by_column[name][raw] = f"{name}: no {type_by_column[name]}"
    for spec in input_specs:
        if value_by_id := values_by_column.get(str(spec.column)):
            unusable_mask_by_reason = read_feature_values(
                _arrow_array(list(value_by_id.values()), type_by_column[str(spec.column)]), spec
            ).unusable_mask_by_reason
            for reason, unusable_mask in unusable_mask_by_reason.items():
                for row in np.flatnonzero(unusable_mask).tolist():
                    reasons_by_column[str(spec.column)].setdefault(list(value_by_id)[row], reason)
    for name, value_by_id in values_by_column.items():
        if value_by_id:
            unusable.count_checked(f"{EVENTS_SOURCE_PREFIX}.{name}", len(value_by_id))
        for raw, reason in reasons_by_column[name].items():
            value_by_id[raw] = None
            unusable.note(f"{EVENTS_SOURCE_PREFIX}.{name}", reason, 1, [{kind: raw.decode()}])
    return values_by_column


def _with_event_values(
    column: Any, row_id_indexes: Any, valued_ids: Sequence[bytes], value_by_id: Mapping[bytes, Any]
) -> Any:
    """Return the column with the values of these ids; `row_id_indexes` has each row's index in `valued_ids`, or -1."""
    changed_rows = [
        row for row in np.flatnonzero(row_id_indexes >= 0).tolist() if valued_ids[row_id_indexes[row]] in value_by_id
    ]
    if not changed_rows:
        return column
    new_values = _arrow_array([value_by_id[valued_ids[row_id_indexes[row]]] for row in changed_rows], column.type)
    take_indexes = np.arange(len(column))
    take_indexes[changed_rows] = len(column) + np.arange(len(changed_rows))
    return pa.concat_arrays([column, new_values]).take(pa.array(take_indexes))


def _arrow_array(event_values: list[Any], arrow_type: Any) -> Any:
    if pa.types.is_dictionary(arrow_type):
        return pa.array(event_values, arrow_type.value_type).dictionary_encode().cast(arrow_type)
    return pa.array(event_values, arrow_type)


def _fit_value(event_value: Any, arrow_type: Any) -> tuple[Any] | None:
    """Return the value converted for a feature's Arrow type, in a tuple; None if it does not fit."""
    if event_value is None:
        return (None,)
    if pa.types.is_dictionary(arrow_type):
        return _fit_value(event_value, arrow_type.value_type)
    fitted_value: Any
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        if not isinstance(event_value, list):
            return None
        fitted_elements = [_fit_value(element, arrow_type.value_type) for element in event_value]
        fitted_value = (
            None
            if None in fitted_elements
            else [fitted_element[0] for fitted_element in fitted_elements if fitted_element]
        )
    elif is_text_type(arrow_type):
        fitted_value = event_value if isinstance(event_value, str) else None
    else:
        fitted_value = _fit_number(event_value, arrow_type)
    if fitted_value is None:
        return None
    try:
        pa.scalar(fitted_value, arrow_type)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return None
    return (fitted_value,)


def _fit_number(event_value: Any, arrow_type: Any) -> int | float | None:
    if isinstance(event_value, bool) or not isinstance(event_value, int | float):
        return None
    if pa.types.is_integer(arrow_type):
        return int(event_value) if float(event_value).is_integer() else None
    return float(event_value) if pa.types.is_floating(arrow_type) else None
