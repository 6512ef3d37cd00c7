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
from precompute.sources.unusable import TOO_LONG, Case, Unusable

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
            {str(each.column): table.column(each.column) for each in spec.features}, spec, count
        )

    def of(self, rows: NDArray[np.int64]) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
        """(values of these ordinals by the tower's input names, which of them have all); the others' mean nothing."""
        usable, found, places = np.ones(len(rows), np.bool_), {}, pa.array(rows)
        for each in self._inputs:
            column = self._columns[str(each.column)].take(places).combine_chunks()
            values = read_values(column, each)
            found[each.name] = values.numbers
            usable &= values.usable
        return found, usable

    def usable(self) -> NDArray[np.bool_]:
        """bool [items]: the items that have every input."""
        found = [self.of(rows)[1] for rows in _pieces(self._count)]
        return np.concatenate([np.empty(0, np.bool_), *found])


def write_item_features(
    config: NightConfig,
    bundle: Bundle,
    items: ItemTable,
    root: Path,
    *,
    values: EntityValues = NO_VALUES,
    brought: Collection[bytes] = (),
    unusable: Unusable | None = None,
) -> str | None:
    """Pin the feature columns that models of items want, a row per ordinal; the file, None when none is wanted.

    They have the `values` that events set, and items that events `brought` these alone. Those that a value model cannot
    use are noted: the item has no record of it.
    """
    inputs = feature_inputs(bundle, "item")
    columns = sorted({str(each.column) for each in inputs})
    if not columns:
        return None
    path = feature_file(config, "item", columns[0])
    noted = Unusable() if unusable is None else unusable
    placed = columns_by_ordinal(
        path, config.sources.item_column, columns, items,
        values=values, brought=brought, inputs=inputs, unusable=noted,
    )  # fmt: skip
    for spec in {
        each
        for model in bundle.values.values()
        if model.entity == "item"
        for each in model.spec.features
    }:
        _note_unusable(items, placed[str(spec.column)], spec, noted, config.feature_text_bytes)
    for name in {str(each.column) for each in inputs if each.dtype == "string"}:
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
    brought: Collection[bytes] = (),
    inputs: Sequence[InputSpec] = (),
    unusable: Unusable | None = None,
) -> dict[str, Any]:
    """Columns of a feature table as Arrow arrays with a value for each item, null for one that is not in it.

    With the `values` that events set; those that their column cannot hold, or one of `inputs` not use, are noted.
    """
    noted = Unusable() if unusable is None else unusable
    read = read_features(path, id_column, columns)
    batches = list(with_event_values(
        read, values, kind="item", unusable=noted, inputs=inputs, adds=brought
    ))  # fmt: skip
    ordinals = np.concatenate([_ordinals(items, ids.texts()) for ids, _ in batches])
    known = np.flatnonzero(ordinals >= 0)[::-1]  # of an item that comes twice, its first row
    rows = np.full(items.count, -1, np.int64)
    rows[ordinals[known]] = known
    places = pa.array(rows, mask=rows < 0)
    return {
        name: pa.concat_arrays([wide(batch[name]) for _, batch in batches]).take(places)
        for name in columns
    }


def _note_unusable(
    items: ItemTable, column: Any, spec: InputSpec, unusable: Unusable, text_bytes: int
) -> None:
    unusable.looked_at(source := f"{ITEM_ROWS}.{spec.column}", len(column))
    for rows in _pieces(len(column)):
        first = int(rows[0])
        values = column.slice(first, len(rows))
        bad = read_values(values, spec).bad
        if spec.dtype == "string" and (is_long := without_long_texts(values, text_bytes)[1]).any():
            bad[f"{spec.column}: {TOO_LONG}"] = is_long
        if bad:
            unusable.note_rows(source, bad, partial(_case, items, first))


def _case(items: ItemTable, first: int, row: int) -> Case:
    return {"item": items.id_of(first + row)}


def _ordinals(items: ItemTable, texts: Any) -> NDArray[np.int64]:
    pieces = [texts.slice(int(rows[0]), len(rows)) for rows in _pieces(len(texts))]
    return ordinals_of_texts(items, pa.chunked_array(pieces, pa.string()))


def _pieces(count: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, count, ROWS_AT_ONCE):
        yield np.arange(start, min(start + ROWS_AT_ONCE, count))
