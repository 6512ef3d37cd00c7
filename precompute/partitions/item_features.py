"""Feature columns of items: pinned by `begin`, a row per ordinal; later steps map them and read some rows at a time."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.format.item_table import ItemTable
from cache.model.tower_spec import InputSpec, TowerSpec
from cache.store.artefacts import write_atomically
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig
from precompute.partitions.catalogue import (
    ITEM_FEATURES,
    ITEM_ROWS,
    feature_inputs,
    ordinals_of_texts,
)
from precompute.sources.event_values import NO_VALUES, EntityValues, with_event_values
from precompute.sources.features import read_values, wide, without_long_texts
from precompute.sources.files import SourceFile, feature_file
from precompute.sources.readers import read_features
from precompute.sources.unusable import TOO_LONG, Case, UnusableRows

ROWS_AT_ONCE = 1 << 14
"""Items whose values are read at once: a text becomes a Python object, of which no step holds one for each item."""


class ItemFeatures:
    """Inputs that one model of items takes from feature columns, as `write_item_features` left these."""

    def __init__(self, columns: Mapping[str, Any], spec: TowerSpec, count: int) -> None:
        self._columns = columns
        self._inputs = spec.features
        self._count = count

    @classmethod
    def open(cls, file: Path, spec: TowerSpec, count: int) -> Self:
        """Maps the columns of all `count` items; a model without features needs no file."""
        if not spec.features:
            return cls({}, spec, count)
        with pa.memory_map(str(file)) as source:
            table = pa.ipc.open_stream(source).read_all()
        return cls(
            {str(feature.column): table.column(feature.column) for feature in spec.features},
            spec,
            count,
        )

    def of(self, rows: NDArray[np.int64]) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
        """(values of these ordinals by the tower's input names, which of them have all); the others' mean nothing."""
        usable, values_by_input, arrow_rows = np.ones(len(rows), np.bool_), {}, pa.array(rows)
        for input_spec in self._inputs:
            column = self._columns[str(input_spec.column)].take(arrow_rows).combine_chunks()
            values = read_values(column, input_spec)
            values_by_input[input_spec.name] = values.numbers
            usable &= values.usable
        return values_by_input, usable

    def usable(self) -> NDArray[np.bool_]:
        """bool [items]: the items that have every input."""
        usable_masks = [self.of(rows)[1] for rows in _pieces(self._count)]
        return np.concatenate([np.empty(0, np.bool_), *usable_masks])


def write_item_features(
    config: NightConfig,
    bundle: Bundle,
    items: ItemTable,
    root: Path,
    *,
    values: EntityValues = NO_VALUES,
    event_item_ids: Collection[bytes] = (),
    unusable: UnusableRows | None = None,
) -> str | None:
    """Pin the feature columns that models of items want, a row per ordinal; the file, None when none is wanted.

    They have the `values` that events set, and items that events `event_item_ids` these alone. Those that a value model
    cannot use are noted: the item has no record of it.
    """
    inputs = feature_inputs(bundle, "item")
    columns = sorted({str(input_spec.column) for input_spec in inputs})
    if not columns:
        return None
    path = feature_file(config, "item", columns[0])
    unusable_rows = UnusableRows() if unusable is None else unusable
    placed = columns_by_ordinal(
        path, config.sources.item_column, columns, items,
        values=values, event_item_ids=event_item_ids, inputs=inputs, unusable=unusable_rows,
    )  # fmt: skip
    for spec in {
        feature
        for model in bundle.values.values()
        if model.entity == "item"
        for feature in model.spec.features
    }:
        _note_unusable(
            items, placed[str(spec.column)], spec, unusable_rows, config.feature_text_bytes
        )
    for name in {str(input_spec.column) for input_spec in inputs if input_spec.dtype == "string"}:
        placed[name], _ = without_long_texts(placed[name], config.feature_text_bytes)
    table = pa.table(placed)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    write_atomically(root / ITEM_FEATURES, memoryview(sink.getvalue()))
    return ITEM_FEATURES


def columns_by_ordinal(
    path: SourceFile,
    id_column: str,
    columns: Sequence[str],
    items: ItemTable,
    *,
    values: EntityValues = NO_VALUES,
    event_item_ids: Collection[bytes] = (),
    inputs: Sequence[InputSpec] = (),
    unusable: UnusableRows | None = None,
) -> dict[str, Any]:
    """Columns of a feature table as Arrow arrays with a value for each item, null for one that is not in it.

    With the `values` that events set; those that their column cannot hold, or one of `inputs` not use, are noted.
    """
    unusable_rows = UnusableRows() if unusable is None else unusable
    read = read_features(path, id_column, columns)
    batches = list(with_event_values(
        read, values, kind="item", unusable=unusable_rows, inputs=inputs, adds=event_item_ids
    ))  # fmt: skip
    ordinals = np.concatenate([_ordinals(items, ids.texts()) for ids, _ in batches])
    matched_indexes = np.flatnonzero(ordinals >= 0)[
        ::-1
    ]  # of an item that comes twice, its first row
    rows = np.full(items.count, -1, np.int64)
    rows[ordinals[matched_indexes]] = matched_indexes
    arrow_rows = pa.array(rows, mask=rows < 0)
    return {
        name: pa.concat_arrays([wide(batch[name]) for _, batch in batches]).take(arrow_rows)
        for name in columns
    }


def _note_unusable(
    items: ItemTable, column: Any, spec: InputSpec, unusable: UnusableRows, text_bytes: int
) -> None:
    unusable.looked_at(source := f"{ITEM_ROWS}.{spec.column}", len(column))
    for rows in _pieces(len(column)):
        first = int(rows[0])
        values = column.slice(first, len(rows))
        bad_mask_by_reason = read_values(values, spec).unusable_mask_by_reason
        if spec.dtype == "string" and (is_long := without_long_texts(values, text_bytes)[1]).any():
            bad_mask_by_reason[f"{spec.column}: {TOO_LONG}"] = is_long
        if bad_mask_by_reason:
            unusable.note_rows(source, bad_mask_by_reason, partial(_case, items, first))


def _case(items: ItemTable, first: int, row: int) -> Case:
    return {"item": items.id_of(first + row)}


def _ordinals(items: ItemTable, texts: Any) -> NDArray[np.int64]:
    pieces = [texts.slice(int(rows[0]), len(rows)) for rows in _pieces(len(texts))]
    return ordinals_of_texts(items, pa.chunked_array(pieces, pa.string()))


def _pieces(count: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, count, ROWS_AT_ONCE):
        yield np.arange(start, min(start + ROWS_AT_ONCE, count))
