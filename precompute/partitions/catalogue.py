"""Catalogue: the items of a generation in ordinal order, with their vectors and feature columns."""

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
from precompute.partitions.grouping import order_if_distinct
from precompute.partitions.shard_files import first_hash
from precompute.partitions.shard_input import HashIds
from precompute.sources.columns import Ids, as_numpy_mask, text_hashes, to_raw_ids
from precompute.sources.features import (
    NO_ENTITY_VALUES,
    EntityValues,
    read_feature_values,
    union_of_masks,
    with_64_bit_offsets,
    with_event_values,
    without_long_texts,
)
from precompute.sources.files import SourceFile, feature_file, source_file
from precompute.sources.readers import read_features
from precompute.sources.unusable import (
    CASES_MAX,
    EVENTS_SOURCE_PREFIX,
    LISTED_BEFORE_REASON,
    NO_VALUE_REASON,
    TEXT_TOO_LONG_REASON,
    RowCase,
    UnusableRows,
)
from precompute.sources.vocabulary import CHUNK_ROWS_MAX, repeated_text_rows

ITEM_IDS_FILE, ITEM_OFFSETS_FILE, MODEL_INDEX_FILE, ITEM_VECTORS_FILE, ITEM_FEATURES_FILE = (
    "items/ids.bin",
    "items/offsets.bin",
    "items/model_index.i64",
    "items/vectors.f32",
    "work/item_features.arrow",
)

ITEM_TOWER_NAME = "item_tower"
ITEM_FEATURES_SOURCE = "item_features"
"""Name of the feature table of items in reports."""

FEATURE_ROWS_AT_ONCE = 1 << 14
"""Items whose values are read at once. It bounds memory, since each text becomes a Python object."""


class CatalogueFields(TypedDict):
    """Fields on the catalogue in the report of `begin`; shard `s` holds items `bounds[s]` to `bounds[s + 1]`."""

    item_seed: int
    items: int
    items_without_vector: int
    bounds: list[int]


def feature_inputs(bundle: Bundle, entity: EntityKind) -> list[InputSpec]:
    """Return the inputs that the models of this kind of entity take from feature columns."""
    return _feature_inputs(bundle.models, entity)


def _feature_inputs(models: Sequence[BundleModel], entity: EntityKind) -> list[InputSpec]:
    return [input_spec for model in models if model.entity == entity for input_spec in model.spec.features]


def needs_item_index(bundle: Bundle) -> bool:
    """True if a model of items takes an item index, so that it knows only the items of the bundle's vocabulary."""
    return any(
        input_spec.bind == "item_index"
        for model in bundle.models
        if model.entity == "item"
        for input_spec in model.spec.inputs
    )


def write_catalogue(
    config: NightConfig,
    bundle: Bundle,
    generation_folder: Path,
    *,
    hasher: HashIds = hash_ids,
    erased_raw_ids: Collection[bytes] = (),
    left_out_ids: Any = None,
    event_values: EntityValues = NO_ENTITY_VALUES,
    event_item_ids: Collection[bytes] = (),
    unusable: UnusableRows | None = None,
) -> CatalogueFields:
    """Write ids, offsets, model indices and the item directory; return the seed, the counts and the shards' bounds.

    The items are those of the feature table and `event_item_ids`; without a feature table, those of the bundle's
    vocabulary. Erased items are dropped. Items for which the models have no output are left out and counted: they are
    not in the vocabulary although a model takes an item index, or they are among `left_out_ids` (Arrow strings). A row
    is left out and noted in `unusable` if it has no id, if an earlier row has its id, or if the item tower cannot use
    its features (with the `event_values` that events set).
    """
    vocabulary = bundle.vocabulary
    unusable_rows = UnusableRows() if unusable is None else unusable
    catalogue_ids = read_feature_items(config, bundle.models, event_values, event_item_ids, unusable_rows)
    if catalogue_ids is None:
        catalogue_ids = vocabulary.id_texts
    erased_ids = pa.array(sorted(raw_id.decode() for raw_id in erased_raw_ids), pa.string())
    catalogue_ids = catalogue_ids.filter(pc.invert(pc.is_in(catalogue_ids, value_set=erased_ids)))
    model_indices = vocabulary.find_positions(catalogue_ids)
    is_answered = model_indices >= 0 if needs_item_index(bundle) else np.ones(len(catalogue_ids), np.bool_)
    if left_out_ids is not None:
        is_answered &= as_numpy_mask(pc.invert(pc.is_in(catalogue_ids, value_set=left_out_ids)))
    answered_ids, model_indices = (catalogue_ids.filter(pa.array(is_answered)), model_indices[is_answered])
    if not len(answered_ids):
        raise _unknown_catalogue_error(len(catalogue_ids))
    hash_seed, hash_texts = 0, text_hashes if hasher is hash_ids else _text_hasher_of(hasher)
    while (hash_order := order_if_distinct(hashes := hash_texts(answered_ids, hash_seed))) is None:
        hash_seed += 1
    hashes = hashes[hash_order]
    _write_id_files(generation_folder, answered_ids, hash_order)
    write_atomically(generation_folder / MODEL_INDEX_FILE, model_indices[hash_order].astype("<i8").tobytes())
    first_hashes = np.array([first_hash(shard, config.shards) for shard in range(config.shards)], np.uint64)
    shard_bounds = [*hashes.searchsorted(first_hashes).tolist(), len(hashes)]
    for shard in range(config.shards):
        shard_hashes = hashes[shard_bounds[shard] : shard_bounds[shard + 1]]
        write_atomically(generation_folder / directory_file_path("item", shard), shard_hashes.astype("<u8").tobytes())
    return {
        "item_seed": hash_seed,
        "items": len(hashes),
        "items_without_vector": len(catalogue_ids) - len(answered_ids),
        "bounds": shard_bounds,
    }


def answerable_item_mask(bundle: Bundle, item_ids: Any) -> NDArray[np.bool_]:
    """Return bool [n]: the Arrow strings that are in the vocabulary; all of them if no model takes an item index.

    Raises SourceError if no string is in the vocabulary.
    """
    if not needs_item_index(bundle):
        return np.ones(len(item_ids), np.bool_)
    is_known_item = bundle.vocabulary.find_positions(item_ids) >= 0
    if not is_known_item.any():
        raise _unknown_catalogue_error(len(item_ids))
    return is_known_item


def _unknown_catalogue_error(item_count: int) -> SourceError:
    return SourceError(f"the model knows none of the {item_count} items of the catalogue")


def read_feature_items(
    config: NightConfig,
    models: Sequence[BundleModel],
    event_values: EntityValues,
    event_item_ids: Collection[bytes],
    unusable_rows: UnusableRows,
) -> Any:
    """Return the ids of the feature table's items that the item tower can use, each once: its first row counts.

    Returns None if no feature table is configured.
    """
    if not config.sources.item_features:
        return None
    path = source_file(config.sources.item_features, config.path("."))
    item_tower_specs = [
        input_spec for model in models if model.name == ITEM_TOWER_NAME for input_spec in model.spec.features
    ]
    feature_columns = sorted({str(input_spec.column) for input_spec in item_tower_specs})
    id_chunks, usable_masks = [], [np.empty(0, np.bool_)]
    table_batches = _demand_any_rows(
        read_features(
            path,
            config.sources.item_column,
            feature_columns,
            source_name=ITEM_FEATURES_SOURCE,
            unusable_rows=unusable_rows,
        ),
        path,
    )
    changed_ids = pa.array(
        [
            raw_id.decode()
            for raw_id, value_by_attribute in event_values.items()
            if not value_by_attribute.keys().isdisjoint(feature_columns)
        ],
        pa.string(),
    )
    # Unusable values of events are noted when the feature columns are pinned.
    for ids, column_by_name in with_event_values(
        table_batches, event_values, entity_kind="item", unusable=UnusableRows(), input_specs=_feature_inputs(models,
        "item"),
        addable_ids=event_item_ids,
    ):  # fmt: skip
        id_chunks.append(ids.row_texts())
        too_long_mask_by_column, column_by_name = {}, dict(column_by_name)
        for column_name in sorted(
            {str(input_spec.column) for input_spec in item_tower_specs if input_spec.dtype == "string"}
        ):
            column_by_name[column_name], too_long_mask_by_column[column_name] = without_long_texts(
                column_by_name[column_name], config.feature_text_bytes
            )
        is_changed = as_numpy_mask(pc.is_in(id_chunks[-1], value_set=changed_ids))
        usable_masks.append(
            _usable_value_mask(
                id_chunks[-1],
                column_by_name,
                too_long_mask_by_column,
                item_tower_specs,
                path.name,
                is_changed,
                unusable_rows,
            )
        )
    if event_item_ids and not feature_columns:  # such items need no features: the bundle has their vectors
        event_id_texts = pa.array(sorted(raw_id.decode() for raw_id in event_item_ids), pa.string())
        is_in_table = pc.is_in(event_id_texts, value_set=pa.chunked_array(id_chunks, pa.string()).combine_chunks())
        id_chunks.append(event_id_texts.filter(pc.invert(is_in_table)))
        usable_masks.append(np.ones(len(id_chunks[-1]), np.bool_))
    item_ids, is_kept = pa.chunked_array(id_chunks, pa.string()), np.concatenate(usable_masks)
    if len(repeated_rows := repeated_text_rows(item_ids)):
        row_cases = ({"item": item_ids[row].as_py(), "file": path.name} for row in repeated_rows[:CASES_MAX].tolist())
        unusable_rows.note(ITEM_FEATURES_SOURCE, LISTED_BEFORE_REASON, len(repeated_rows), row_cases)
        is_kept[repeated_rows] = False
    if not is_kept.any():
        unusable_rows.demand_some(ITEM_FEATURES_SOURCE, path.name)
        raise SourceError(f"{path} names no item that can be used", path=str(path))
    return item_ids.filter(pa.array(is_kept))


def _demand_any_rows(
    table_batches: Iterable[tuple[Ids, dict[str, Any]]], path: SourceFile
) -> Iterator[tuple[Ids, dict[str, Any]]]:
    """Yield the batches of a table of items; raise SourceError if the table has no rows.

    The whole vocabulary is no substitute: it includes items that were withdrawn after the model was trained.
    """
    row_count = 0
    for ids, column_by_name in table_batches:
        row_count += len(ids)
        yield ids, column_by_name
    if not row_count:
        raise SourceError(
            f"{path} has no rows, so no item could be recommended: write the items that may be recommended, or remove "
            "sources.item_features to use all items that the model knows",
            path=str(path),
        )


def _usable_value_mask(
    item_ids: Any,
    column_by_name: Mapping[str, Any],
    too_long_mask_by_column: Mapping[str, NDArray[np.bool_]],
    input_specs: Sequence[InputSpec],
    file_name: str,
    is_changed: NDArray[np.bool_],
    unusable_rows: UnusableRows,
) -> NDArray[np.bool_]:
    """Return bool [rows], True for rows with a usable value for every input; note the other rows, also missing values.

    Rows with values set by events (`is_changed`) are noted under the events' source.
    """
    usable_mask = np.ones(len(item_ids), np.bool_)
    events_source = f"{EVENTS_SOURCE_PREFIX}.{ITEM_FEATURES_SOURCE}"
    if is_changed.any():
        unusable_rows.count_checked(events_source, int(is_changed.sum()))

    def describe_row(row_index: int) -> RowCase:
        return {"item": item_ids[row_index].as_py(), "file": file_name}

    for spec in input_specs:
        column_values = read_feature_values(column_by_name[str(spec.column)], spec)
        bad_mask_by_reason = {
            f"{spec.column}: {NO_VALUE_REASON}": column_values.missing_mask,
            **column_values.unusable_mask_by_reason,
        }
        if (is_long := too_long_mask_by_column.get(str(spec.column))) is not None:
            bad_mask_by_reason = {
                f"{spec.column}: {TEXT_TOO_LONG_REASON}": is_long,
                **bad_mask_by_reason,
            }  # first, as only a row's first reason is counted
        for source, source_mask in (
            (ITEM_FEATURES_SOURCE, usable_mask & ~is_changed),
            (events_source, usable_mask & is_changed),
        ):
            unusable_rows.note_rows(
                source,
                {reason: bad_mask & source_mask for reason, bad_mask in bad_mask_by_reason.items()},
                describe_row,
            )
        usable_mask &= column_values.usable_mask
    return usable_mask


def _text_hasher_of(hasher: HashIds) -> Callable[[Any, int], NDArray[np.uint64]]:
    return lambda texts, seed: hasher(to_raw_ids(texts), seed)


def _write_id_files(generation_folder: Path, id_texts: Any, row_order: NDArray[np.int64]) -> None:
    """Write the ids in this order, and offsets: the start of each id, then the end of the last one."""
    large_texts = pa.concat_arrays([chunk.cast(pa.large_string()) for chunk in id_texts.chunks])
    _, offsets_buffer, text_buffer = large_texts.take(pa.array(row_order)).buffers()
    id_offsets = np.frombuffer(offsets_buffer, np.int64)[: len(row_order) + 1]
    write_atomically(generation_folder / ITEM_IDS_FILE, memoryview(text_buffer)[: id_offsets[-1]])
    write_atomically(generation_folder / ITEM_OFFSETS_FILE, id_offsets.astype("<u8").tobytes())


def item_id_texts(items: ItemTable) -> Any:
    """Return the ids of all items in ordinal order, as chunks of Arrow strings over the mapped file."""
    id_bytes, id_offsets = items.shared_ids
    id_chunks = []
    for first_item in range(0, items.count, CHUNK_ROWS_MAX):
        chunk_offsets = id_offsets[first_item : first_item + CHUNK_ROWS_MAX + 1]
        chunk_bytes = id_bytes[int(chunk_offsets[0]) : int(chunk_offsets[-1])]
        relative_offsets = (chunk_offsets - chunk_offsets[0]).astype(np.int32)
        arrow_buffers = pa.py_buffer(relative_offsets), pa.py_buffer(chunk_bytes)
        id_chunks.append(pa.StringArray.from_buffers(len(relative_offsets) - 1, *arrow_buffers))
    return pa.chunked_array(id_chunks, pa.string())


def ordinals_of_texts(items: ItemTable, id_texts: Any) -> NDArray[np.int64]:
    """Return `ItemTable.ordinals_of` the chunked Arrow strings, int64[n]; chunks are looked up one after the other."""
    chunk_ordinals = [np.asarray(items.ordinals_of(to_raw_ids(chunk))) for chunk in id_texts.chunks]
    return np.concatenate([np.empty(0, np.int64), *chunk_ordinals])


def directory_file_path(entity_kind: str, shard: int) -> str:
    """Return the path of one part of the directory, relative to the generation's folder."""
    return f"directory/{entity_kind}/{shard:04d}.u64"


def open_items(generation_folder: Path, catalogue_fields: CatalogueFields, *, dims: int = 0) -> ItemTable:
    """Open the item table of a build, with its vectors if `dims` is not 0."""
    shard_bounds = catalogue_fields["bounds"]
    shard_count = len(shard_bounds) - 1
    directory_parts = [
        map_file(generation_folder / directory_file_path("item", shard), "<u8")
        if shard_bounds[shard + 1] > shard_bounds[shard]
        else np.empty(0, np.uint64)
        for shard in range(shard_count)
    ]
    directory = Directory(
        catalogue_fields["item_seed"], [first_hash(shard, shard_count) for shard in range(shard_count)], directory_parts
    )
    vectors: NDArray[np.float32] = np.empty((0, 0), np.float32)
    if dims:
        vectors = map_file(generation_folder / ITEM_VECTORS_FILE, "<f4", (catalogue_fields["items"], dims))
    return ItemTable(
        directory,
        map_file(generation_folder / ITEM_IDS_FILE, "u1"),
        map_file(generation_folder / ITEM_OFFSETS_FILE, "<u8"),
        vectors,
        map_file(generation_folder / MODEL_INDEX_FILE, "<i8"),
    )


def most_popular_items(
    items: ItemTable, interaction_counts: NDArray[np.int64], item_limit: int
) -> tuple[Sequence[str], list[float]]:
    """Return the `item_limit` most popular items and each one's share of all interactions; ties by ordinal."""
    popular_ordinals = np.lexsort((np.arange(items.count), -interaction_counts))[: min(item_limit, items.count)]
    total_interactions = max(1, int(interaction_counts.sum()))
    return items.ids_of(popular_ordinals.astype(np.uint32)), [
        float(interaction_counts[ordinal]) / total_interactions for ordinal in popular_ordinals.tolist()
    ]


class ItemFeatures:
    """Inputs that one model of items takes from the feature columns written by `write_item_features`."""

    def __init__(self, column_by_name: Mapping[str, Any], spec: TowerSpec, item_count: int) -> None:
        self._column_by_name = column_by_name
        self._input_specs = spec.features
        self._item_count = item_count

    @classmethod
    def open(cls, features_path: Path, spec: TowerSpec, item_count: int) -> Self:
        """Map the columns of all `item_count` items; a model without features needs no file."""
        if not spec.features:
            return cls({}, spec, item_count)
        with pa.memory_map(str(features_path)) as source:
            column_table = pa.ipc.open_stream(source).read_all()
        return cls(
            {str(input_spec.column): column_table.column(input_spec.column) for input_spec in spec.features},
            spec,
            item_count,
        )

    def of(self, ordinals: NDArray[np.int64]) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
        """Return (values by input name, mask of ordinals with all inputs); values outside the mask are undefined."""
        has_all_inputs, values_by_input, arrow_rows = (np.ones(len(ordinals), np.bool_), {}, pa.array(ordinals))
        for input_spec in self._input_specs:
            column = self._column_by_name[str(input_spec.column)].take(arrow_rows).combine_chunks()
            feature_values = read_feature_values(column, input_spec)
            values_by_input[input_spec.name] = feature_values.input_numbers
            has_all_inputs &= feature_values.usable_mask
        return values_by_input, has_all_inputs

    def usable_mask(self) -> NDArray[np.bool_]:
        """Return bool [items]: the items that have every input."""
        usable_masks = [self.of(rows)[1] for rows in _row_ranges(self._item_count)]
        return np.concatenate([np.empty(0, np.bool_), *usable_masks])


def write_item_features(
    config: NightConfig,
    bundle: Bundle,
    items: ItemTable,
    generation_folder: Path,
    *,
    event_values: EntityValues = NO_ENTITY_VALUES,
    event_item_ids: Collection[bytes] = (),
    unusable: UnusableRows | None = None,
) -> str | None:
    """Write the feature columns of all item models, one row per ordinal; return the file, None without features.

    Values that events set (`event_values`) replace the table's; items of `event_item_ids` without a row get only values
    set by events. Values that a value model cannot use are noted: the item gets no record of that model.
    """
    input_specs = feature_inputs(bundle, "item")
    feature_columns = sorted({str(input_spec.column) for input_spec in input_specs})
    if not feature_columns:
        return None
    path = feature_file(config, "item", feature_columns[0])
    unusable_rows = UnusableRows() if unusable is None else unusable
    column_by_name = columns_by_ordinal(
        path, config.sources.item_column, feature_columns, items,
        event_values=event_values, event_item_ids=event_item_ids, input_specs=input_specs, unusable=unusable_rows,
    )  # fmt: skip
    value_model_specs = {
        feature for model in bundle.value_models.values() if model.entity == "item" for feature in model.spec.features
    }
    for column_name in sorted({str(feature.column) for feature in value_model_specs}):
        column_specs = [feature for feature in value_model_specs if feature.column == column_name]
        _note_unusable_values(
            items, column_name, column_by_name[column_name], column_specs, unusable_rows, config.feature_text_bytes
        )
    for column_name in {str(input_spec.column) for input_spec in input_specs if input_spec.dtype == "string"}:
        column_by_name[column_name], _ = without_long_texts(column_by_name[column_name], config.feature_text_bytes)
    column_table = pa.table(column_by_name)
    table_buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(table_buffer, column_table.schema) as writer:
        writer.write_table(column_table)
    write_atomically(generation_folder / ITEM_FEATURES_FILE, memoryview(table_buffer.getvalue()))
    return ITEM_FEATURES_FILE


def columns_by_ordinal(
    path: SourceFile,
    id_column: str,
    feature_columns: Sequence[str],
    items: ItemTable,
    *,
    event_values: EntityValues = NO_ENTITY_VALUES,
    event_item_ids: Collection[bytes] = (),
    input_specs: Sequence[InputSpec] = (),
    unusable: UnusableRows | None = None,
) -> dict[str, Any]:
    """Return feature columns as Arrow arrays with one value per ordinal, null for an item without a row.

    Values that events set (`event_values`) replace the table's. Event values that do not fit their column's type, or
    that one of `input_specs` cannot use, are noted.
    """
    unusable_rows = UnusableRows() if unusable is None else unusable
    table_batches = read_features(path, id_column, feature_columns)
    batches = list(with_event_values(
        table_batches, event_values, entity_kind="item", unusable=unusable_rows, input_specs=input_specs,
        addable_ids=event_item_ids
    ))  # fmt: skip
    row_ordinals = np.concatenate([_ordinals_in_pieces(items, ids.row_texts()) for ids, _ in batches])
    matched_indexes = np.flatnonzero(row_ordinals >= 0)[::-1]  # reversed: of repeated rows the first one counts
    row_by_ordinal = np.full(items.count, -1, np.int64)
    row_by_ordinal[row_ordinals[matched_indexes]] = matched_indexes
    arrow_rows = pa.array(row_by_ordinal, mask=row_by_ordinal < 0)
    return {
        column_name: pa.concat_arrays([with_64_bit_offsets(batch[column_name]) for _, batch in batches]).take(
            arrow_rows
        )
        for column_name in feature_columns
    }


def _note_unusable_values(
    items: ItemTable,
    column_name: str,
    item_column: Any,
    input_specs: Sequence[InputSpec],
    unusable: UnusableRows,
    text_bytes_max: int,
) -> None:
    """Note a column's values that one of its inputs cannot use, each row once."""
    unusable.count_checked(source_name := f"{ITEM_FEATURES_SOURCE}.{column_name}", len(item_column))
    for row_range in _row_ranges(len(item_column)):
        first_ordinal = int(row_range[0])
        column_slice = item_column.slice(first_ordinal, len(row_range))
        bad_mask_by_reason = union_of_masks(
            read_feature_values(column_slice, spec).unusable_mask_by_reason for spec in input_specs
        )
        is_long = without_long_texts(column_slice, text_bytes_max)[1]
        if is_long.any() and any(spec.dtype == "string" for spec in input_specs):
            bad_mask_by_reason[f"{column_name}: {TEXT_TOO_LONG_REASON}"] = is_long
        if bad_mask_by_reason:
            unusable.note_rows(source_name, bad_mask_by_reason, partial(_item_case, items, first_ordinal))


def _item_case(items: ItemTable, first_ordinal: int, row_index: int) -> RowCase:
    return {"item": items.id_of(first_ordinal + row_index)}


def _ordinals_in_pieces(items: ItemTable, id_texts: Any) -> NDArray[np.int64]:
    text_pieces = [id_texts.slice(int(row_range[0]), len(row_range)) for row_range in _row_ranges(len(id_texts))]
    return ordinals_of_texts(items, pa.chunked_array(text_pieces, pa.string()))


def _row_ranges(row_count: int) -> Iterator[NDArray[np.int64]]:
    for first_row in range(0, row_count, FEATURE_ROWS_AT_ONCE):
        yield np.arange(first_row, min(first_row + FEATURE_ROWS_AT_ONCE, row_count))
