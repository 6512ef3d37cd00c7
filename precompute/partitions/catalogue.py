"""Catalogue: which items a generation knows, in ordinal order, with their vectors and feature columns."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.format.directory import Directory, map_file
from cache.format.ids import hash_ids
from cache.format.item_table import ItemTable
from cache.format.manifest import EntityKind
from cache.model.tower_spec import InputSpec, TowerSpec
from cache.store.artefacts import write_atomically
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.config.settings import NightConfig
from precompute.partitions.grouping import sort_unique
from precompute.partitions.shard_files import first_hash
from precompute.partitions.shard_input import Hasher
from precompute.sources.columns import Ids, as_rows, raws_of, text_hashes
from precompute.sources.features import (
    NO_VALUES,
    EntityValues,
    read_values,
    union_of_masks,
    wide,
    with_event_values,
    without_long_texts,
)
from precompute.sources.files import SourceFile, feature_file, source_file
from precompute.sources.readers import read_features
from precompute.sources.unusable import (
    CASES,
    EVENTS,
    LISTED_BEFORE,
    NO_VALUE,
    TOO_LONG,
    Case,
    UnusableRows,
)
from precompute.sources.vocabulary import VOCABULARY_ROWS, repeats_in

IDS, OFFSETS, MODEL_INDEX, VECTORS, ITEM_FEATURES = (
    "items/ids.bin",
    "items/offsets.bin",
    "items/model_index.i64",
    "items/vectors.f32",
    "work/item_features.arrow",
)

ITEM_TOWER = "item_tower"
ITEM_ROWS = "item_features"
"""Name of the feature table of items in reports."""

FEATURE_ROWS_AT_ONCE = 1 << 14
"""Items whose values are read at once: a text becomes a Python object, of which no step holds one for each item."""


class CatalogueFields(TypedDict):
    """Catalogue as the report of `begin` has it; items of shard `s` are `bounds[s]` to `bounds[s + 1]`."""

    item_seed: int
    items: int
    items_without_vector: int
    bounds: list[int]


def feature_inputs(bundle: Bundle, entity: EntityKind) -> list[InputSpec]:
    """Inputs that models of one kind of entities take from feature columns."""
    return _feature_inputs(bundle.models, entity)


def _feature_inputs(models: Sequence[BundleModel], entity: EntityKind) -> list[InputSpec]:
    return [
        feature for model in models if model.entity == entity for feature in model.spec.features
    ]


def needs_index(bundle: Bundle) -> bool:
    """True if a model of items can only answer for items of the bundle's own vocabulary."""
    return any(
        input_spec.bind == "item_index"
        for model in bundle.models
        if model.entity == "item"
        for input_spec in model.spec.inputs
    )


def write_catalogue(
    config: NightConfig,
    bundle: Bundle,
    root: Path,
    *,
    hasher: Hasher = hash_ids,
    erased: Collection[bytes] = (),
    left_out: Any = None,
    values: EntityValues = NO_VALUES,
    event_item_ids: Collection[bytes] = (),
    unusable: UnusableRows | None = None,
) -> CatalogueFields:
    """Write ids, offsets, model indices and the item directory; return the seed and counts, also of items left out.

    The items are those of the feature table if there is one, with those that events `event_item_ids`, else the
    bundle's. An item that the models cannot answer for (not in their vocabulary, where they want an index; or among
    `left_out`, Arrow strings) is left out and counted; an erased one is just not there. A row without an id, with one
    that came before, or whose features (with the `values` that events set) the item tower cannot use is left out and
    noted in `unusable`.
    """
    vocabulary = bundle.vocabulary
    unusable_rows = UnusableRows() if unusable is None else unusable
    catalogue_ids = read_feature_items(config, bundle.models, values, event_item_ids, unusable_rows)
    if catalogue_ids is None:
        catalogue_ids = vocabulary.texts
    erased_ids = pa.array(sorted(raw.decode() for raw in erased), pa.string())
    catalogue_ids = catalogue_ids.filter(pc.invert(pc.is_in(catalogue_ids, value_set=erased_ids)))
    model_indices = vocabulary.find_positions(catalogue_ids)
    answered = model_indices >= 0 if needs_index(bundle) else np.ones(len(catalogue_ids), np.bool_)
    if left_out is not None:
        answered &= as_rows(pc.invert(pc.is_in(catalogue_ids, value_set=left_out)))
    usable, model_indices = catalogue_ids.filter(pa.array(answered)), model_indices[answered]
    if not len(usable):
        raise _unknown_catalogue(len(catalogue_ids))
    seed, hash_all = 0, text_hashes if hasher is hash_ids else _hashed_by(hasher)
    while (order := sort_unique(hashes := hash_all(usable, seed))) is None:
        seed += 1
    hashes = hashes[order]
    _write_ids(root, usable, order)
    write_atomically(root / MODEL_INDEX, model_indices[order].astype("<i8").tobytes())
    firsts = np.array(
        [first_hash(shard, config.shards) for shard in range(config.shards)], np.uint64
    )
    bounds = [*hashes.searchsorted(firsts).tolist(), len(hashes)]
    for shard in range(config.shards):
        part = hashes[bounds[shard] : bounds[shard + 1]]
        write_atomically(root / directory_file("item", shard), part.astype("<u8").tobytes())
    return {
        "item_seed": seed,
        "items": len(hashes),
        "items_without_vector": len(catalogue_ids) - len(usable),
        "bounds": bounds,
    }


def answered_by(bundle: Bundle, item_ids: Any) -> NDArray[np.bool_]:
    """Mask of Arrow strings: the items that the models can answer for, as far as their vocabulary decides.

    Raises SourceError if it is none of them.
    """
    if not needs_index(bundle):
        return np.ones(len(item_ids), np.bool_)
    is_known = bundle.vocabulary.find_positions(item_ids) >= 0
    if not is_known.any():
        raise _unknown_catalogue(len(item_ids))
    return is_known


def _unknown_catalogue(count: int) -> SourceError:
    return SourceError(f"the model knows none of the {count} items of the catalogue")


def read_feature_items(
    config: NightConfig,
    models: Sequence[BundleModel],
    events: EntityValues,
    event_item_ids: Collection[bytes],
    unusable: UnusableRows,
) -> Any:
    """Items of the feature table that the item tower can use, each once: its first row counts."""
    if not config.sources.item_features:
        return None
    path = source_file(config.sources.item_features, config.path("."))
    specs = [
        feature for model in models if model.name == ITEM_TOWER for feature in model.spec.features
    ]
    columns = sorted({str(feature.column) for feature in specs})
    chunks, usable = [], [np.empty(0, np.bool_)]
    read = _some_rows(
        read_features(
            path, config.sources.item_column, columns, source=ITEM_ROWS, unusable=unusable
        ),
        path,
    )
    changed_ids = pa.array(
        [
            raw.decode()
            for raw, value_by_attribute in events.items()
            if not value_by_attribute.keys().isdisjoint(columns)
        ],
        pa.string(),
    )
    # What an event set wrongly is noted where the columns are pinned.
    for ids, values in with_event_values(
        read, events, kind="item", unusable=UnusableRows(), inputs=_feature_inputs(models, "item"),
        adds=event_item_ids,
    ):  # fmt: skip
        chunks.append(ids.texts())
        too_long, values = {}, dict(values)
        for name in sorted({str(feature.column) for feature in specs if feature.dtype == "string"}):
            values[name], too_long[name] = without_long_texts(
                values[name], config.feature_text_bytes
            )
        is_changed = as_rows(pc.is_in(chunks[-1], value_set=changed_ids))
        usable.append(
            _note_values(chunks[-1], values, too_long, specs, path.name, is_changed, unusable)
        )
    if (
        event_item_ids and not columns
    ):  # no column says anything of them: their vectors are in the bundle
        named = pa.array(sorted(raw.decode() for raw in event_item_ids), pa.string())
        is_in_table = pc.is_in(
            named, value_set=pa.chunked_array(chunks, pa.string()).combine_chunks()
        )
        chunks.append(named.filter(pc.invert(is_in_table)))
        usable.append(np.ones(len(chunks[-1]), np.bool_))
    item_ids, is_kept = pa.chunked_array(chunks, pa.string()), np.concatenate(usable)
    if len(repeated_rows := repeats_in(item_ids)):
        cases = (
            {"item": item_ids[row].as_py(), "file": path.name}
            for row in repeated_rows[:CASES].tolist()
        )
        unusable.note(ITEM_ROWS, LISTED_BEFORE, len(repeated_rows), cases)
        is_kept[repeated_rows] = False
    if not is_kept.any():
        unusable.demand_some(ITEM_ROWS, path.name)
        raise SourceError(f"{path} names no item that can be used", path=str(path))
    return item_ids.filter(pa.array(is_kept))


def _some_rows(
    read: Iterable[tuple[Ids, dict[str, Any]]], path: SourceFile
) -> Iterator[tuple[Ids, dict[str, Any]]]:
    """The batches of a table of items; raises SourceError where these have no rows.

    The catalogue is never the whole vocabulary instead: that has every item that was withdrawn since the model learnt.
    """
    rows = 0
    for ids, columns in read:
        rows += len(ids)
        yield ids, columns
    if not rows:
        raise SourceError(
            f"{path} has no rows, so no item could be recommended: write the items that may be, or leave "
            "sources.item_features out for all that the model knows",
            path=str(path),
        )


def _note_values(
    texts: Any,
    values: Mapping[str, Any],
    too_long: Mapping[str, NDArray[np.bool_]],
    specs: Sequence[InputSpec],
    file: str,
    is_changed: NDArray[np.bool_],
    unusable: UnusableRows,
) -> NDArray[np.bool_]:
    """Mask of rows with every value; those that say nothing are noted, missing ones too: an item needs them.

    Those that events changed are noted as of the events.
    """
    usable = np.ones(len(texts), np.bool_)
    of_events = f"{EVENTS}.{ITEM_ROWS}"
    if is_changed.any():
        unusable.looked_at(of_events, int(is_changed.sum()))

    def case(row: int) -> Case:
        return {"item": texts[row].as_py(), "file": file}

    for spec in specs:
        column_values = read_values(values[str(spec.column)], spec)
        bad_mask_by_reason = {
            f"{spec.column}: {NO_VALUE}": column_values.missing,
            **column_values.unusable_mask_by_reason,
        }
        if (is_long := too_long.get(str(spec.column))) is not None:
            bad_mask_by_reason = {
                f"{spec.column}: {TOO_LONG}": is_long,
                **bad_mask_by_reason,
            }  # the first reason counts
        for source, source_mask in (
            (ITEM_ROWS, usable & ~is_changed),
            (of_events, usable & is_changed),
        ):
            unusable.note_rows(
                source,
                {reason: rows & source_mask for reason, rows in bad_mask_by_reason.items()},
                case,
            )
        usable &= column_values.usable
    return usable


def _hashed_by(hasher: Hasher) -> Callable[[Any, int], NDArray[np.uint64]]:
    return lambda texts, seed: hasher(raws_of(texts), seed)


def _write_ids(root: Path, texts: Any, order: NDArray[np.int64]) -> None:
    """The ids in this order, and where each begins and the last one ends."""
    large = pa.concat_arrays([chunk.cast(pa.large_string()) for chunk in texts.chunks])
    _, cuts, data = large.take(pa.array(order)).buffers()
    offsets = np.frombuffer(cuts, np.int64)[: len(order) + 1]
    write_atomically(root / IDS, memoryview(data)[: offsets[-1]])
    write_atomically(root / OFFSETS, offsets.astype("<u8").tobytes())


def item_texts(items: ItemTable) -> Any:
    """The ids of all items in ordinal order, as chunks of Arrow strings over the mapped file."""
    ids, offsets = items.shared_ids
    chunks = []
    for start in range(0, items.count, VOCABULARY_ROWS):
        cuts = offsets[start : start + VOCABULARY_ROWS + 1]
        data = ids[int(cuts[0]) : int(cuts[-1])]
        ends = (cuts - cuts[0]).astype(np.int32)
        buffers = pa.py_buffer(ends), pa.py_buffer(data)
        chunks.append(pa.StringArray.from_buffers(len(ends) - 1, *buffers))
    return pa.chunked_array(chunks, pa.string())


def ordinals_of_texts(items: ItemTable, texts: Any) -> NDArray[np.int64]:
    """int64[n]: `ItemTable.ordinals_of` of chunked Arrow strings, some of them at a time."""
    chunk_ordinals = [np.asarray(items.ordinals_of(raws_of(chunk))) for chunk in texts.chunks]
    return np.concatenate([np.empty(0, np.int64), *chunk_ordinals])


def directory_file(entity: str, shard: int) -> str:
    """Path of one directory part."""
    return f"directory/{entity}/{shard:04d}.u64"


def open_items(root: Path, fields: CatalogueFields, *, dims: int = 0) -> ItemTable:
    """The item table of a build; with `dims`, its vectors as well."""
    bounds = fields["bounds"]
    shards = len(bounds) - 1
    parts = [
        map_file(root / directory_file("item", shard), "<u8")
        if bounds[shard + 1] > bounds[shard]
        else np.empty(0, np.uint64)
        for shard in range(shards)
    ]
    directory = Directory(
        fields["item_seed"], [first_hash(shard, shards) for shard in range(shards)], parts
    )
    vectors: NDArray[np.float32] = np.empty((0, 0), np.float32)
    if dims:
        vectors = map_file(root / VECTORS, "<f4", (fields["items"], dims))
    return ItemTable(
        directory,
        map_file(root / IDS, "u1"),
        map_file(root / OFFSETS, "<u8"),
        vectors,
        map_file(root / MODEL_INDEX, "<i8"),
    )


def popular(
    items: ItemTable, popularity: NDArray[np.int64], k: int
) -> tuple[Sequence[str], list[float]]:
    """The k most popular items and their share of all interactions; ties by ordinal."""
    order = np.lexsort((np.arange(items.count), -popularity))[: min(k, items.count)]
    total = max(1, int(popularity.sum()))
    return items.ids_of(order.astype(np.uint32)), [
        float(popularity[ordinal]) / total for ordinal in order.tolist()
    ]


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
        usable_masks = [self.of(rows)[1] for rows in _row_pieces(self._count)]
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
    judged = {
        feature
        for model in bundle.values.values()
        if model.entity == "item"
        for feature in model.spec.features
    }
    for name in sorted({str(feature.column) for feature in judged}):
        of_column = [feature for feature in judged if feature.column == name]
        _note_unusable(
            items, name, placed[name], of_column, unusable_rows, config.feature_text_bytes
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
    items: ItemTable,
    name: str,
    column: Any,
    inputs: Sequence[InputSpec],
    unusable: UnusableRows,
    text_bytes: int,
) -> None:
    """Note a column's values that one of its inputs cannot use; a row is looked at once."""
    unusable.looked_at(source := f"{ITEM_ROWS}.{name}", len(column))
    for rows in _row_pieces(len(column)):
        first = int(rows[0])
        values = column.slice(first, len(rows))
        bad_mask_by_reason = union_of_masks(
            read_values(values, spec).unusable_mask_by_reason for spec in inputs
        )
        is_long = without_long_texts(values, text_bytes)[1]
        if is_long.any() and any(spec.dtype == "string" for spec in inputs):
            bad_mask_by_reason[f"{name}: {TOO_LONG}"] = is_long
        if bad_mask_by_reason:
            unusable.note_rows(source, bad_mask_by_reason, partial(_item_case, items, first))


def _item_case(items: ItemTable, first: int, row: int) -> Case:
    return {"item": items.id_of(first + row)}


def _ordinals(items: ItemTable, texts: Any) -> NDArray[np.int64]:
    pieces = [texts.slice(int(rows[0]), len(rows)) for rows in _row_pieces(len(texts))]
    return ordinals_of_texts(items, pa.chunked_array(pieces, pa.string()))


def _row_pieces(count: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, count, FEATURE_ROWS_AT_ONCE):
        yield np.arange(start, min(start + FEATURE_ROWS_AT_ONCE, count))
