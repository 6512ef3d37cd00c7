"""Feature columns as the arrays that models want, and which of their rows cannot be used."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.model.tower_spec import InputSpec
from precompute.sources.columns import UnusableMaskByReason, as_rows, is_text, is_utf_8

_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


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


def demand_type(kind: Any, spec: InputSpec, where: str) -> None:
    """Raises SourceError unless a column of this Arrow type can hold what the input wants."""
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


def _is_list(kind: Any) -> bool:
    return any(is_kind(kind) for is_kind in _LISTS)


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


def _spread(partial_mask: NDArray[np.bool_], where: NDArray[np.bool_]) -> NDArray[np.bool_]:
    full_mask = np.zeros(len(where), np.bool_)
    full_mask[where] = partial_mask
    return full_mask


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
