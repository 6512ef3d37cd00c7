"""Feature columns as the arrays that models want, and values that events set put into them."""

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
from precompute.sources.columns import Ids, UnusableMaskByReason, as_rows, is_text, is_utf_8
from precompute.sources.unusable import EVENTS, UnusableRows

EntityValues = Mapping[bytes, Mapping[str, Any]]
"""Newest values by id and attribute, None for one that was cleared."""

NO_VALUES: Final[EntityValues] = MappingProxyType({})

_LIST_TYPES = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)

_FeatureBatch = tuple[Ids, dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class FeatureValues:
    """Model input, a row each: [n], or [n, width]; rows missing or in `unusable_mask_by_reason` mean nothing."""

    numbers: NDArray[Any]
    missing: NDArray[np.bool_]
    unusable_mask_by_reason: UnusableMaskByReason

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Mask of the rows that are neither missing nor bad, bool [n]."""
        is_usable: NDArray[np.bool_] = ~np.logical_or.reduce(
            [self.missing, *self.unusable_mask_by_reason.values()]
        )
        return is_usable


def read_values(column: Any, spec: InputSpec) -> FeatureValues:
    """An Arrow array as an input; raises SourceError for what `demand_type` refuses, never for a row."""
    demand_type(column.type, spec, "features")
    if spec.width is None:
        return _scalars(column, spec)
    if not _is_list(column.type):  # one value a row, for an input [n, 1]
        alone = _scalars(column, replace(spec, width=None))
        return replace(alone, numbers=alone.numbers.reshape(-1, 1))
    missing, widths = as_rows(column.is_null()), pc.list_value_length(column)
    is_wide = as_rows(pc.fill_null(pc.equal(widths, spec.width), False))
    fitting_lists = column if is_wide.all() else column.filter(pa.array(is_wide))
    inner = _scalars(fitting_lists.flatten(), replace(spec, width=None))
    numbers = inner.numbers.reshape(-1, spec.width)
    rows: UnusableMaskByReason = {
        reason: np.asarray(element_mask.reshape(-1, spec.width).any(axis=1))
        for reason, element_mask in {
            f"{spec.column}: a null in a list": inner.missing,
            **inner.unusable_mask_by_reason,
        }.items()
    }
    if not is_wide.all():
        filler = "" if spec.dtype == "string" else 0
        spread = np.full((len(column), spec.width), filler, numbers.dtype)
        spread[is_wide] = numbers
        numbers = spread
        rows = {reason: _spread(row_mask, is_wide) for reason, row_mask in rows.items()}
    rows[f"{spec.column}: not of width {spec.width}"] = ~is_wide & ~missing
    return FeatureValues(
        numbers, missing, {reason: row_mask for reason, row_mask in rows.items() if row_mask.any()}
    )


def _scalars(column: Any, spec: InputSpec) -> FeatureValues:
    missing = as_rows(column.is_null())
    if spec.dtype == "string":
        is_read = is_utf_8(column.cast(pa.large_binary()))
        is_kept = pa.array(is_read & ~missing)
        texts = pc.if_else(is_kept, column, pa.scalar("", column.type))
        bad_mask_by_reason = {} if is_read.all() else {f"{spec.column}: not UTF-8": ~is_read}
        return FeatureValues(np.array(texts.to_pylist(), object), missing, bad_mask_by_reason)
    source_numbers = np.asarray(pc.fill_null(column, 0) if column.null_count else column)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = source_numbers.astype(spec.dtype)
    if spec.dtype == "float32":
        reason, fits = "not finite as float32", np.isfinite(numbers)
    else:
        reason, fits = f"too large for {spec.dtype}", np.asarray(numbers == source_numbers)
    return FeatureValues(
        numbers, missing, {} if fits.all() else {f"{spec.column}: {reason}": ~fits}
    )


def union_of_masks(reports: Iterable[UnusableMaskByReason]) -> UnusableMaskByReason:
    """Masks of several inputs of one column as one: by reason, the rows that any of them cannot use."""
    union: UnusableMaskByReason = {}
    for report in reports:
        for reason, row_mask in report.items():
            union[reason] = row_mask | union[reason] if reason in union else row_mask
    return union


def _spread(partial_mask: NDArray[np.bool_], where: NDArray[np.bool_]) -> NDArray[np.bool_]:
    full_mask = np.zeros(len(where), np.bool_)
    full_mask[where] = partial_mask
    return full_mask


def demand_type(kind: Any, spec: InputSpec, where: str) -> None:
    """Raise SourceError unless a column of this Arrow type can hold the input's values."""
    is_list = _is_list(kind)
    value = kind.value_type if is_list else kind
    fits = {
        "string": is_text(value),
        "float32": pa.types.is_floating(value) or pa.types.is_integer(value),
        "int32": pa.types.is_integer(value),
        "int64": pa.types.is_integer(value),
    }
    width = kind.list_size if pa.types.is_fixed_size_list(kind) else spec.width
    is_shaped = width == spec.width is not None if is_list else spec.width in (None, 1)
    if not fits[spec.dtype] or not is_shaped:
        shape = "" if spec.width is None else f", lists of width {spec.width}"
        raise SourceError(
            f"{where}: column {spec.column!r} is {kind}, the model's input {spec.name!r} wants {spec.dtype}{shape}",
            column=spec.column,
        )


def _is_list(kind: Any) -> bool:
    return any(is_kind(kind) for is_kind in _LIST_TYPES)


def wide(column: Any) -> Any:
    """The column with offsets of 64 bits: all rows of a catalogue hold more numbers than 32 bits can count."""
    kind = column.type
    if pa.types.is_list(kind):
        return column.cast(pa.large_list(kind.value_type))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return column.cast(pa.large_string() if pa.types.is_string(kind) else pa.large_binary())
    return column


def without_long_texts(column: Any, text_bytes: int) -> tuple[Any, NDArray[np.bool_]]:
    """(The column with null for each row that holds a text of over `text_bytes`, mask of these rows, bool [n])."""
    is_list = _is_list(column.type)
    if not is_text(column.type.value_type if is_list else column.type):
        return column, np.zeros(len(column), np.bool_)
    texts = column.flatten() if is_list else column
    is_long = as_rows(pc.fill_null(pc.greater(pc.binary_length(texts), text_bytes), False))
    if not is_long.any():
        return column, np.zeros(len(column), np.bool_)
    rows = np.asarray(pc.list_parent_indices(column))[is_long] if is_list else is_long
    has_long_text = np.zeros(len(column), np.bool_)
    has_long_text[rows] = True
    return pc.if_else(pa.array(has_long_text), pa.scalar(None, column.type), column), has_long_text


def digest_of_values(values: EntityValues, columns: Iterable[str]) -> str:
    """Digest of the values of some attributes; empty where none was set."""
    attribute_names = set(columns)
    values_by_id = {
        raw.decode(): of_entity
        for raw, value_by_attribute in values.items()
        if (
            of_entity := {
                name: value for name, value in value_by_attribute.items() if name in attribute_names
            }
        )
    }
    canonical_json = orjson.dumps(values_by_id, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(canonical_json).hexdigest() if values_by_id else ""


def with_event_values(
    batches: Iterable[_FeatureBatch],
    values: EntityValues,
    *,
    kind: EntityKind,
    unusable: UnusableRows,
    inputs: Iterable[InputSpec] = (),
    adds: Collection[bytes] = (),
) -> Iterator[_FeatureBatch]:
    """Batches of a feature table whose columns have the values that events set.

    A value that is not of its column's type, or that one of `inputs` cannot use, is noted as of the events, and then
    there is none, as for one that was cleared. Of ids that no row has it `adds` a row for these.
    """
    remaining_batches = iter(batches)
    first = next(remaining_batches, None) if values else None
    if first is None:
        yield from remaining_batches
        return
    types = {name: column.type for name, column in first[1].items()}
    columns = read_set_values(types, values, kind, list(inputs), unusable)
    raws = sorted(set().union(*columns.values()))
    names = pa.array([raw.decode() for raw in raws], pa.string())
    has_row = np.zeros(len(raws), np.bool_)
    for ids, column_by_name in chain([first], remaining_batches):
        codes = np.asarray(pc.fill_null(pc.index_in(ids.names, value_set=names), -1))
        has_row[codes[codes >= 0]] = True
        rows = codes[ids.codes]
        yield (
            ids,
            {
                name: _with_set_values(column, rows, raws, columns[name])
                for name, column in column_by_name.items()
            },
        )
    if adds and (more := [raw for raw in _rows_of_new(raws, has_row, columns) if raw in adds]):
        ids = Ids.of(pa.array([raw.decode() for raw in more], pa.string()))
        yield (
            ids,
            {
                name: _array([columns[name].get(raw) for raw in more], type_)
                for name, type_ in types.items()
            },
        )


def _rows_of_new(
    raws: Sequence[bytes], has_row: Any, columns: Mapping[str, Mapping[bytes, Any]]
) -> list[bytes]:
    """Ids that no row had, and that have a value."""
    return [
        raw
        for raw, is_there in zip(raws, has_row.tolist(), strict=True)
        if not is_there
        and any(value_by_id.get(raw) is not None for value_by_id in columns.values())
    ]


def read_set_values(
    types: Mapping[str, Any],
    values: EntityValues,
    kind: EntityKind,
    inputs: Sequence[InputSpec],
    unusable: UnusableRows,
) -> dict[str, dict[bytes, Any]]:
    """Values by column and id, as Arrow takes them; None for one that was cleared, or cannot be used and is noted."""
    columns: dict[str, dict[bytes, Any]] = {name: {} for name in types}
    reasons_by_column: dict[str, dict[bytes, str]] = {name: {} for name in types}
    for raw, value_by_attribute in values.items():
        for name in value_by_attribute.keys() & types.keys():
            fits = _fitting(value_by_attribute[name], types[name])
            columns[name][raw] = fits[0] if fits else None
            if not fits:
                reasons_by_column[name][raw] = f"{name}: no {types[name]}"
    for spec in inputs:
        if value_by_id := columns.get(str(spec.column)):
            unfit = read_values(
                _array(list(value_by_id.values()), types[str(spec.column)]), spec
            ).unusable_mask_by_reason
            for reason, rows in unfit.items():
                for row in np.flatnonzero(rows).tolist():
                    reasons_by_column[str(spec.column)].setdefault(list(value_by_id)[row], reason)
    for name, value_by_id in columns.items():
        if value_by_id:
            unusable.looked_at(f"{EVENTS}.{name}", len(value_by_id))
        for raw, reason in reasons_by_column[name].items():
            value_by_id[raw] = None
            unusable.note(f"{EVENTS}.{name}", reason, 1, [{kind: raw.decode()}])
    return columns


def _with_set_values(
    column: Any, rows: Any, raws: Sequence[bytes], value_by_id: Mapping[bytes, Any]
) -> Any:
    """The column with the values of these ids; `rows` has the place of each row's id among them, -1 for another."""
    changed_rows = [
        row for row in np.flatnonzero(rows >= 0).tolist() if raws[rows[row]] in value_by_id
    ]
    if not changed_rows:
        return column
    new_values = _array([value_by_id[raws[rows[row]]] for row in changed_rows], column.type)
    take_indexes = np.arange(len(column))
    take_indexes[changed_rows] = len(column) + np.arange(len(changed_rows))
    return pa.concat_arrays([column, new_values]).take(pa.array(take_indexes))


def _array(values: list[Any], kind: Any) -> Any:
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    return pa.array(values, kind)


def _fitting(value: Any, kind: Any) -> tuple[Any] | None:
    """The value as Arrow takes it for a type that features have, in a tuple; None if it is of another kind."""
    if value is None:
        return (None,)
    if pa.types.is_dictionary(kind):
        return _fitting(value, kind.value_type)
    fitted_value: Any
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if not isinstance(value, list):
            return None
        parts = [_fitting(element, kind.value_type) for element in value]
        fitted_value = (
            None
            if None in parts
            else [fitted_element[0] for fitted_element in parts if fitted_element]
        )
    elif is_text(kind):
        fitted_value = value if isinstance(value, str) else None
    else:
        fitted_value = _number(value, kind)
    if fitted_value is None:
        return None
    try:
        pa.scalar(fitted_value, kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return None
    return (fitted_value,)


def _number(value: Any, kind: Any) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if pa.types.is_integer(kind):
        return int(value) if float(value).is_integer() else None
    return float(value) if pa.types.is_floating(kind) else None
