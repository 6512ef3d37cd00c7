"""Attributes of items by ordinal, the named filters tried on them, and the items that each filtered table may list."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.errors import ConfigError, SourceError
from cache.filters.attributes import (
    DTYPE_BY_KIND,
    NO_CODE,
    NO_FLAG,
    NO_TIME,
    NUMBER_TOO_LARGE,
    TEXT_TOO_LONG,
    AttributeColumn,
    ItemAttributes,
    ItemValue,
    TextDictionary,
    set_item_values,
)
from cache.filters.expression import TEXT_BYTES_MAX, Filter, InvalidFilter, read_filter
from cache.filters.filtering import Filtering, mask_of
from cache.format.item_table import ItemTable
from cache.format.manifest import AttributeKind, Manifest
from cache.model.filter_mask import FilterMask
from cache.store.artefacts import write_atomically
from precompute.builds.build import Build, attribute_paths
from precompute.builds.reports import BEGIN_REPORT, AttributeFiles
from precompute.config.settings import NightConfig
from precompute.partitions.catalogue import ITEM_FEATURES_SOURCE, columns_by_ordinal
from precompute.sources.columns import as_numpy_mask, is_text_type
from precompute.sources.features import NO_ENTITY_VALUES, EntityValues
from precompute.sources.files import SourceFile, feature_file
from precompute.sources.times import parse_times
from precompute.sources.unusable import EVENTS_SOURCE_PREFIX, NOT_FINITE_REASON, UnusableRows

ATTRIBUTES_FOLDER: Final = "items/attributes"
_EXACT_INTEGER_MAX: Final = 2**53

ArrayByName = dict[str, NDArray[Any]]
"""Arrays of an attribute by the field names of its files in `cache.format.manifest.Attribute`."""


def write_item_attributes(
    config: NightConfig,
    items: ItemTable,
    root: Path,
    *,
    event_values: EntityValues = NO_ENTITY_VALUES,
    unusable: UnusableRows | None = None,
) -> dict[str, AttributeFiles]:
    """Write a column for each configured attribute; return its kind and files by name.

    Values of `event_values` replace those of the tables, as in the service. A value that cannot be stored is noted, and
    the item lacks that attribute. Raises SourceError for a column that is missing, or of a type that no attribute has,
    ConfigError for a facet of an attribute without texts.
    """
    attribute_names = config.sources.item_attributes
    if not attribute_names:
        return {}
    attribute_file = feature_file(config, "item", attribute_names[0])
    column_by_name = columns_by_ordinal(attribute_file, config.sources.item_column, attribute_names, items)
    unusable_rows = UnusableRows() if unusable is None else unusable
    arrays_by_name = {
        attribute_name: _attribute_arrays(
            column_by_name[attribute_name], attribute_file, attribute_name, items, unusable_rows
        )
        for attribute_name in attribute_names
    }
    updated_arrays_by_name = _with_event_values(arrays_by_name, items, event_values, unusable_rows)
    files_by_attribute = {
        attribute_name: _write_attribute(root, attribute_index, updated_arrays_by_name[attribute_name])
        for attribute_index, attribute_name in enumerate(attribute_names)
    }
    for facet, facet_config in config.facets.items():
        if (kind := files_by_attribute[facet_config.attribute][0]) not in ("text", "texts"):
            raise ConfigError(
                f"[facets.{facet}]: {facet_config.attribute} is of kind {kind}, but facets are of text and texts",
                field="facets",
            )
    return files_by_attribute


def _with_event_values(
    arrays_by_name: Mapping[str, tuple[AttributeKind, ArrayByName]],
    items: ItemTable,
    event_values: EntityValues,
    unusable: UnusableRows,
) -> Mapping[str, tuple[AttributeKind, ArrayByName]]:
    """Return the columns with the values that events set for existing items; other attributes are ignored."""
    item_ids = list(event_values)
    ordinal_id_pairs = zip(items.ordinals_of(item_ids).tolist(), item_ids, strict=True)
    item_values = [
        ItemValue(ordinal, name, attribute_value)
        for ordinal, item_id in ordinal_id_pairs
        if ordinal >= 0
        for name, attribute_value in event_values[item_id].items()
        if name in arrays_by_name
    ]
    if not item_values:
        return arrays_by_name
    item_count = items.count
    changed_columns = set_item_values(
        ItemAttributes(
            item_count,
            {attribute_name: _as_column(*typed_arrays) for attribute_name, typed_arrays in arrays_by_name.items()},
        ),
        item_values,
    )
    for name, value_count in Counter(item_value.attribute for item_value in item_values).items():
        unusable.count_checked(f"{EVENTS_SOURCE_PREFIX}.{name}", value_count)
    for name, reasons in changed_columns.unfit_ordinals.items():
        for reason, ordinals in reasons.items():
            examples = ({"item": items.id_of(ordinal)} for ordinal in ordinals)
            unusable.note(f"{EVENTS_SOURCE_PREFIX}.{name}", reason, len(ordinals), examples)
    return {name: (column.kind, _as_arrays(column)) for name, column in changed_columns.attributes.columns.items()}


def _as_column(kind: AttributeKind, arrays: ArrayByName) -> AttributeColumn:
    text_names = None
    if "names" in arrays:
        text_names = TextDictionary(arrays["names"], arrays["name_offsets"])
    return AttributeColumn(kind, arrays["values"], arrays.get("offsets"), text_names)


def _as_arrays(column: AttributeColumn) -> ArrayByName:
    arrays = {"values": column.values}
    if column.item_offsets is not None:
        arrays["offsets"] = column.item_offsets
    if column.dictionary is not None:
        arrays |= {"names": column.dictionary.joined_texts, "name_offsets": column.dictionary.text_offsets}
    return arrays


def _attribute_arrays(
    arrow_column: Any, source_file: SourceFile, attribute_name: str, items: ItemTable, unusable: UnusableRows
) -> tuple[AttributeKind, ArrayByName]:
    """Return (kind, arrays by the field name of their file) of an Arrow array with a value for each item."""
    if pa.types.is_dictionary(arrow_column.type):
        arrow_column = arrow_column.dictionary_decode()
    arrow_type = arrow_column.type
    missing_mask = as_numpy_mask(arrow_column.is_null())
    bad_mask_by_reason: dict[str, NDArray[np.bool_]] = {}
    typed_arrays: tuple[AttributeKind, ArrayByName]
    if is_text_type(arrow_type):
        too_long_mask = as_numpy_mask(pc.fill_null(pc.greater(pc.binary_length(arrow_column), TEXT_BYTES_MAX), False))
        bad_mask_by_reason = {TEXT_TOO_LONG: too_long_mask}
        codes, name_arrays = _encode_texts(arrow_column, missing_mask | too_long_mask)
        typed_arrays = "text", {"values": codes, **name_arrays}
    elif pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        if not is_text_type(arrow_type.value_type):
            raise _unfit_type_error(source_file, attribute_name, arrow_type)
        typed_arrays = "texts", _encode_text_lists(arrow_column)
    elif pa.types.is_boolean(arrow_type):
        flags = as_numpy_mask(pc.fill_null(arrow_column, False)).astype(np.uint8)
        typed_arrays = "flag", {"values": np.where(missing_mask, np.uint8(NO_FLAG), flags)}
    elif pa.types.is_integer(arrow_type):
        numbers = np.asarray(pc.fill_null(arrow_column, 0))
        too_large_mask = ((numbers > _EXACT_INTEGER_MAX) | (numbers < -_EXACT_INTEGER_MAX)) & ~missing_mask
        bad_mask_by_reason = {NUMBER_TOO_LARGE: too_large_mask}
        typed_arrays = (
            "number",
            {"values": np.where(missing_mask | too_large_mask, np.nan, numbers.astype(np.float64))},
        )
    elif pa.types.is_floating(arrow_type) or pa.types.is_decimal(arrow_type):
        numbers = np.asarray(pc.fill_null(arrow_column.cast(pa.float64()), np.nan))
        bad_mask_by_reason = {NOT_FINITE_REASON: np.isinf(numbers)}
        typed_arrays = "number", {"values": np.where(np.isfinite(numbers), numbers, np.nan)}
    elif pa.types.is_timestamp(arrow_type) or pa.types.is_date(arrow_type):
        times_us, no_time_mask_by_reason = parse_times(arrow_column, source_file, attribute_name)
        bad_mask_by_reason = {reason: bad_mask & ~missing_mask for reason, bad_mask in no_time_mask_by_reason.items()}
        timeless_mask = np.logical_or.reduce([missing_mask, *bad_mask_by_reason.values()])
        typed_arrays = "time", {"values": np.where(timeless_mask, NO_TIME, times_us)}
    else:
        raise _unfit_type_error(source_file, attribute_name, arrow_type)
    row_source = f"{ITEM_FEATURES_SOURCE}.{attribute_name}"
    unusable.count_checked(row_source, len(arrow_column))
    if any(bad_mask.any() for bad_mask in bad_mask_by_reason.values()):
        unusable.note_rows(row_source, bad_mask_by_reason, lambda row: {"item": items.id_of(row)})
    return typed_arrays


def _encode_texts(attribute_texts: Any, left_out_mask: NDArray[np.bool_]) -> tuple[NDArray[np.uint32], ArrayByName]:
    """Return codes of texts uint32 [n], NO_CODE where `left_out_mask`, and the texts in the order of their bytes."""
    usable_texts = attribute_texts.filter(pa.array(~left_out_mask)).cast(pa.large_string())
    dictionary_array = usable_texts.dictionary_encode()
    raw_texts = dictionary_array.dictionary.cast(pa.large_binary())
    sort_order = np.asarray(pc.sort_indices(raw_texts))
    text_ranks = np.empty(len(sort_order), np.uint32)
    text_ranks[sort_order] = np.arange(len(sort_order), dtype=np.uint32)
    codes = np.full(len(attribute_texts), NO_CODE, np.uint32)
    codes[~left_out_mask] = text_ranks[np.asarray(dictionary_array.indices)]
    _, offset_buffer, data_buffer = raw_texts.take(pa.array(sort_order)).buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[: len(sort_order) + 1]
    joined_bytes = np.frombuffer(data_buffer, np.uint8)[: offsets[-1]] if data_buffer else np.empty(0, np.uint8)
    return codes, {"names": joined_bytes, "name_offsets": offsets.astype(np.uint64)}


def _encode_text_lists(list_column: Any) -> ArrayByName:
    """Return codes of all texts of lists, list by list, and where each begins; nulls and long texts are left out."""
    lists = list_column.cast(pa.large_list(pa.large_string()))
    list_sizes = np.asarray(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)
    flat_texts = pc.list_flatten(lists)
    dropped_mask = as_numpy_mask(
        pc.fill_null(pc.greater(pc.binary_length(flat_texts), TEXT_BYTES_MAX), True)  # a null has no length
    )
    list_indexes = np.repeat(np.arange(len(list_sizes)), list_sizes)
    codes, name_arrays = _encode_texts(flat_texts, dropped_mask)
    text_counts = np.bincount(list_indexes[~dropped_mask], minlength=len(list_sizes))
    offsets = np.concatenate([np.zeros(1, np.uint64), np.cumsum(text_counts).astype(np.uint64)])
    return {"values": codes[~dropped_mask], "offsets": offsets, **name_arrays}


def _write_attribute(
    root: Path, attribute_index: int, typed_arrays: tuple[AttributeKind, ArrayByName]
) -> AttributeFiles:
    kind, arrays = typed_arrays
    path_by_part = {}
    dtype_by_array = {"values": DTYPE_BY_KIND[kind], "offsets": "<u8", "names": "u1", "name_offsets": "<u8"}
    for array_name, array in arrays.items():
        path_by_part[array_name] = f"{ATTRIBUTES_FOLDER}/{attribute_index:04d}.{array_name}"
        write_atomically(root / path_by_part[array_name], array.astype(dtype_by_array[array_name]).tobytes())
    return kind, path_by_part


def _unfit_type_error(source_file: SourceFile, attribute_name: str, arrow_type: Any) -> SourceError:
    return SourceError(
        f"{source_file}: column {attribute_name!r} is {arrow_type}; attributes must be texts, lists of texts, "
        "numbers, booleans "
        "or times",
        column=attribute_name,
    )


def named_filters(config: NightConfig) -> dict[str, Filter]:
    """Return the declared filters by name; raise ConfigError for an invalid expression."""
    filter_by_name = {}
    for filter_name, filter_config in config.filters.items():
        try:
            filter_by_name[filter_name] = read_filter(filter_config.filter)
        except InvalidFilter as error:
            raise _filter_error(filter_name, error) from error
    return filter_by_name


def passing_filters(
    config: NightConfig, root: Path, attributes: Mapping[str, Any], item_count: int
) -> dict[str, FilterMask]:
    """Return a mask bool [items] for each declared filter, of `item_count` items whose attributes are below `root`.

    Raises ConfigError for a filter that does not fit the attributes.
    """
    filter_by_name = named_filters(config)
    if not filter_by_name:
        return {}
    columns, mask_by_filter = ItemAttributes.of_files(root, attributes, item_count), {}
    for filter_name, declared_filter in filter_by_name.items():
        try:
            mask_by_filter[filter_name] = FilterMask.of(mask_of(declared_filter.root_expression, columns))
        except InvalidFilter as error:
            raise _filter_error(filter_name, error) from error
    return mask_by_filter


def _filter_error(filter_name: str, error: InvalidFilter) -> ConfigError:
    field_path = error.details.get("field")
    field_text = f"[filters.{filter_name}]" if field_path is None else f"[filters.{filter_name}] at {field_path}"
    return ConfigError(f"{field_text}: {error.message}", field="filters")


def allowed_items(build: Build) -> dict[str, NDArray[np.bool_]]:
    """Return a mask bool [items] for each table with a filter, by the table's own name."""
    filtered_tables = build.config.table_and_filter_by_name
    if not filtered_tables:
        return {}
    begin_report = build.need_report(BEGIN_REPORT)
    for attribute_path in attribute_paths(begin_report["attributes"]):
        build.fetch(attribute_path)
    item_count = begin_report["items"]
    filter_mask_by_name = passing_filters(build.config, build.root, begin_report["attributes"], item_count)
    all_ordinals = np.arange(item_count)
    return {
        table_name: filter_mask_by_name[filter_name].among(all_ordinals)
        for table_name, (_, filter_name) in filtered_tables.items()
    }


def allowed_by_manifest(root: Path, manifest: Manifest, items: ItemTable) -> dict[str, NDArray[np.bool_]]:
    """Return a mask bool [items] for each filtered table, by the table's own name, computed as in the service."""
    filtering = Filtering.open(root, manifest, items)
    mask_by_table: dict[str, NDArray[np.bool_]] = {}
    if filtering is not None:
        for filter_name, named_filter in manifest.filters.items():
            allowed_mask = filtering.evaluate(filter_name).among(np.arange(items.count))
            mask_by_table |= {table.name: allowed_mask for table in named_filter.tables.values()}
    return mask_by_table


def attributes_of_night(
    config: NightConfig, items: ItemTable, root: Path, values: EntityValues, unusable: UnusableRows
) -> dict[str, AttributeFiles]:
    """Write all attributes, and try each declared filter on them; return kind and files by name."""
    attributes = write_item_attributes(config, items, root, event_values=values, unusable=unusable)
    passing_filters(config, root, attributes, items.count)
    return attributes


def demand_filters(config: NightConfig) -> None:
    """Raise ConfigError for a declared filter with an invalid expression."""
    named_filters(config)
