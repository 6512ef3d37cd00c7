"""Values of attributes that events set, for users and items: read from files of events, and put into feature tables."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from cache.events.attribute_events import AttributeEvents
from cache.events.event import Event
from cache.events.new_items import brings_item
from cache.events.position import Position
from cache.model.tower_spec import InputSpec
from precompute.sources.columns import Ids, is_text
from precompute.sources.features import read_values
from precompute.sources.files import SourceFile, readable
from precompute.sources.formats import BATCH_ROWS
from precompute.sources.readers import reading
from precompute.sources.unusable import EVENTS, UnusableRows

Kind = Literal["user", "item"]
EntityValues = Mapping[bytes, Mapping[str, Any]]
"""Newest values by id and attribute, None for one that was cleared."""
NO_VALUES: Final[EntityValues] = MappingProxyType({})

_FeatureBatch = tuple[Ids, dict[str, Any]]


class EventValues(NamedTuple):
    """Values that events set for users and for items; the newest position counts, whatever a table says.

    Items that events `event_item_ids`, with features or a vector, get a row where no table has one.
    """

    users: EntityValues = NO_VALUES
    items: EntityValues = NO_VALUES
    event_item_ids: frozenset[bytes] = frozenset()

    @classmethod
    def read(
        cls,
        files: Sequence[SourceFile],
        without: Mapping[Kind, Iterable[bytes]],
        attributes_by_kind: Mapping[Kind, Collection[str]],
        behind: int = 0,
    ) -> Self:
        """Reads files of events, in the order of their positions, but for who was erased.

        Values count that were set `behind` a position's number. Of the attributes those that are `attributes_by_kind`:
        whatever else is sent takes no memory, nor anything's place. Raises SourceError naming a file that cannot be
        read, CorruptArtefact for what is no event.
        """
        attribute_events, event_item_ids = AttributeEvents(), set()
        for position, event in _read_events(files):
            if event.item is not None and position.number > behind and brings_item(event):
                event_item_ids.add(event.item)
            if position.number > behind:  # older ones count for nothing, so they take no memory
                attribute_events.add(position, _only(event, attributes_by_kind))
        for kind, raws in without.items():
            for raw in raws:
                attribute_events.forget(kind, raw)
        present_item_ids = frozenset(event_item_ids.difference(without.get("item", ())))
        return cls(
            attribute_events.all_values("user", behind),
            attribute_events.all_values("item", behind),
            present_item_ids,
        )


def counted_behind(keep_values_days: float, cut_s: float) -> int:
    """Number of the position behind which events set values that a night with this cut (Unix seconds) counts."""
    return Position(max(0, int((cut_s - keep_values_days * 86_400) * 1000)), 0).number


def brought_vectors(files: Sequence[SourceFile], behind: int = 0) -> dict[bytes, tuple[float, ...]]:
    """Vectors that events `behind` a position brought along for items, the newest of each, in the order of the ids.

    Raises SourceError naming a file that cannot be read, CorruptArtefact for what is no event.
    """
    vector_by_item = {
        event.item: event.vector
        for position, event in _read_events(files)
        if event.item is not None and event.vector is not None and position.number > behind
    }
    return dict(sorted(vector_by_item.items()))


def _read_events(files: Sequence[SourceFile]) -> Iterator[tuple[Position, Event]]:
    """Events that are no interactions, in the order of their positions."""
    for path in files:
        with reading(path), readable(path) as raw, pa.parquet.ParquetFile(raw) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=["position", "event"]):
                event_batch = batch.filter(batch.column("event").is_valid())
                numbers, texts = (
                    event_batch.column(name).to_pylist() for name in ("position", "event")
                )
                for number, text in zip(numbers, texts, strict=True):
                    yield Position.of_number(number), Event.from_bytes(text.encode())


def _only(event: Event, attributes_by_kind: Mapping[Kind, Collection[str]]) -> Event:
    """The event with these values alone, features as attributes."""
    kind = event.kind
    if kind == "interaction" or not (values := event.values):
        return event
    value_by_attribute = {
        name: value for name, value in values.items() if name in attributes_by_kind[kind]
    }
    return replace(event, attributes=value_by_attribute, features=None)


def digest_of(values: EntityValues, columns: Iterable[str]) -> str:
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
    kind: Kind,
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
                name: _set(column, rows, raws, columns[name])
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
    kind: Kind,
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


def _set(column: Any, rows: Any, raws: Sequence[bytes], value_by_id: Mapping[bytes, Any]) -> Any:
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
