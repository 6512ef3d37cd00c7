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
from precompute.builds.reports import (AttributeFiles, BEGIN_REPORT)
from precompute.config.settings import NightConfig
from precompute.partitions.catalogue import (ITEM_FEATURES_SOURCE, columns_by_ordinal)
from precompute.sources.columns import (as_numpy_mask, is_text_type)
from precompute.sources.features import (EntityValues, NO_ENTITY_VALUES)
from precompute.sources.files import SourceFile, feature_file
from precompute.sources.times import (parse_times)
from precompute.sources.unusable import (EVENTS_SOURCE_PREFIX, NOT_FINITE_REASON, UnusableRows)

ATTRIBUTES_FOLDER: Final = "items/attributes"
_EXACT: Final = 2**53

Arrays = dict[str, NDArray[Any]]
"""Arrays of an attribute by the names that `cache.format.manifest.Attribute` has for their files."""


def write_item_attributes(
    config: NightConfig,
    items: ItemTable,
    root: Path,
    *,
    values: EntityValues = NO_ENTITY_VALUES,
    unusable: UnusableRows | None = None,
) -> dict[str, AttributeFiles]:
    """Write a column for each configured attribute; returns its kind and files by name.

    They have the `values` that events set, put in as the service does. A value that cannot be kept is noted,
    and the item lacks that attribute. Raises SourceError for a column that is not there, or of a type that no attribute
    has, ConfigError for a facet of one without texts.
    """
    names = config.sources.item_attributes
    if not names:
        return {}
    path = feature_file(config, "item", names[0])
    placed = columns_by_ordinal(path, config.sources.item_column, names, items)
    unusable_rows = UnusableRows() if unusable is None else unusable
    read = {name: _column(placed[name], path, name, items, unusable_rows) for name in names}
    columns = _with_values(read, items, values, unusable_rows)
    files_by_attribute = {
        name: _write(root, number, columns[name]) for number, name in enumerate(names)
    }
    for facet, facet_config in config.facets.items():
        if (kind := files_by_attribute[facet_config.attribute][0]) not in ("text", "texts"):
            raise ConfigError(
                f"[facets.{facet}]: {facet_config.attribute} is of kind {kind}, facets are of text and texts",
                field="facets",
            )
    return files_by_attribute


def _with_values(
    columns: Mapping[str, tuple[AttributeKind, Arrays]],
    items: ItemTable,
    values: EntityValues,
    unusable: UnusableRows,
) -> Mapping[str, tuple[AttributeKind, Arrays]]:
    """The columns with what events set for items that there are; other attributes of theirs are no concern here."""
    raws = list(values)
    ordinal_id_pairs = zip(items.ordinals_of(raws).tolist(), raws, strict=True)
    item_values = [
        ItemValue(ordinal, name, value)
        for ordinal, raw in ordinal_id_pairs
        if ordinal >= 0
        for name, value in values[raw].items()
        if name in columns
    ]
    if not item_values:
        return columns
    count = items.count
    changed_columns = set_item_values(
        ItemAttributes(
            count, {n: _as_column(*typed_arrays) for n, typed_arrays in columns.items()}
        ),
        item_values,
    )
    for name, rows in Counter(item_value.attribute for item_value in item_values).items():
        unusable.count_checked(f"{EVENTS_SOURCE_PREFIX}.{name}", rows)
    for name, reasons in changed_columns.unfit_ordinals.items():
        for reason, ordinals in reasons.items():
            cases = ({"item": items.id_of(ordinal)} for ordinal in ordinals)
            unusable.note(f"{EVENTS_SOURCE_PREFIX}.{name}", reason, len(ordinals), cases)
    return {
        name: (column.kind, _as_arrays(column))
        for name, column in changed_columns.attributes.columns.items()
    }


def _as_column(kind: AttributeKind, arrays: Arrays) -> AttributeColumn:
    names = None
    if "names" in arrays:
        names = TextDictionary(arrays["names"], arrays["name_offsets"])
    return AttributeColumn(kind, arrays["values"], arrays.get("offsets"), names)


def _as_arrays(column: AttributeColumn) -> Arrays:
    arrays = {"values": column.values}
    if column.offsets is not None:
        arrays["offsets"] = column.offsets
    if column.dictionary is not None:
        arrays |= {"names": column.dictionary.data, "name_offsets": column.dictionary.offsets}
    return arrays


def _column(
    column: Any, path: SourceFile, name: str, items: ItemTable, unusable: UnusableRows
) -> tuple[AttributeKind, Arrays]:
    """(kind, arrays by the name of their file) of an Arrow array with a value for each item."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    missing = as_numpy_mask(column.is_null())
    bad_mask_by_reason: dict[str, NDArray[np.bool_]] = {}
    typed_arrays: tuple[AttributeKind, Arrays]
    if is_text_type(kind):
        long = as_numpy_mask(pc.fill_null(pc.greater(pc.binary_length(column), TEXT_BYTES_MAX), False))
        bad_mask_by_reason = {TEXT_TOO_LONG: long}
        codes, names = _coded(column, missing | long)
        typed_arrays = "text", {"values": codes, **names}
    elif (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        if not is_text_type(kind.value_type):
            raise _unfit(path, name, kind)
        typed_arrays = "texts", _several(column)
    elif pa.types.is_boolean(kind):
        flags = as_numpy_mask(pc.fill_null(column, False)).astype(np.uint8)
        typed_arrays = "flag", {"values": np.where(missing, np.uint8(NO_FLAG), flags)}
    elif pa.types.is_integer(kind):
        numbers = np.asarray(pc.fill_null(column, 0))
        beyond = ((numbers > _EXACT) | (numbers < -_EXACT)) & ~missing
        bad_mask_by_reason = {NUMBER_TOO_LARGE: beyond}
        typed_arrays = (
            "number",
            {"values": np.where(missing | beyond, np.nan, numbers.astype(np.float64))},
        )
    elif pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        numbers = np.asarray(pc.fill_null(column.cast(pa.float64()), np.nan))
        bad_mask_by_reason = {NOT_FINITE_REASON: np.isinf(numbers)}
        typed_arrays = "number", {"values": np.where(np.isfinite(numbers), numbers, np.nan)}
    elif pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        times, no_time = parse_times(column, path, name)
        bad_mask_by_reason = {reason: rows & ~missing for reason, rows in no_time.items()}
        is_timeless = np.logical_or.reduce([missing, *bad_mask_by_reason.values()])
        typed_arrays = "time", {"values": np.where(is_timeless, NO_TIME, times)}
    else:
        raise _unfit(path, name, kind)
    source = f"{ITEM_FEATURES_SOURCE}.{name}"
    unusable.count_checked(source, len(column))
    if any(rows.any() for rows in bad_mask_by_reason.values()):
        unusable.note_rows(source, bad_mask_by_reason, lambda row: {"item": items.id_of(row)})
    return typed_arrays


def _coded(texts: Any, without: NDArray[np.bool_]) -> tuple[NDArray[np.uint32], Arrays]:
    """Codes of texts uint32 [n], NO_CODE for those `without`, and the texts themselves in the order of their bytes."""
    usable_texts = texts.filter(pa.array(~without)).cast(pa.large_string())
    coded = usable_texts.dictionary_encode()
    raws = coded.dictionary.cast(pa.large_binary())
    order = np.asarray(pc.sort_indices(raws))
    text_ranks = np.empty(len(order), np.uint32)
    text_ranks[order] = np.arange(len(order), dtype=np.uint32)
    codes = np.full(len(texts), NO_CODE, np.uint32)
    codes[~without] = text_ranks[np.asarray(coded.indices)]
    _, cuts, data = raws.take(pa.array(order)).buffers()
    offsets = np.frombuffer(cuts, np.int64)[: len(order) + 1]
    joined = np.frombuffer(data, np.uint8)[: offsets[-1]] if data else np.empty(0, np.uint8)
    return codes, {"names": joined, "name_offsets": offsets.astype(np.uint64)}


def _several(column: Any) -> Arrays:
    """Codes of all texts of lists, one list after another, and where each begins; nulls and long texts are left out."""
    lists = column.cast(pa.large_list(pa.large_string()))
    sizes = np.asarray(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)
    flat = pc.list_flatten(lists)
    is_dropped = as_numpy_mask(
        pc.fill_null(
            pc.greater(pc.binary_length(flat), TEXT_BYTES_MAX), True
        )  # a null has no length
    )
    owners = np.repeat(np.arange(len(sizes)), sizes)
    codes, names = _coded(flat, is_dropped)
    text_counts = np.bincount(owners[~is_dropped], minlength=len(sizes))
    offsets = np.concatenate([np.zeros(1, np.uint64), np.cumsum(text_counts).astype(np.uint64)])
    return {"values": codes[~is_dropped], "offsets": offsets, **names}


def _write(root: Path, number: int, column: tuple[AttributeKind, Arrays]) -> AttributeFiles:
    kind, arrays = column
    files = {}
    dtypes = {"values": DTYPE_BY_KIND[kind], "offsets": "<u8", "names": "u1", "name_offsets": "<u8"}
    for part, array in arrays.items():
        files[part] = f"{ATTRIBUTES_FOLDER}/{number:04d}.{part}"
        write_atomically(root / files[part], array.astype(dtypes[part]).tobytes())
    return kind, files


def _unfit(path: SourceFile, name: str, kind: Any) -> SourceError:
    return SourceError(
        f"{path}: column {name!r} is {kind}; attributes are texts, lists of texts, numbers, booleans and times",
        column=name,
    )


def named_filters(config: NightConfig) -> dict[str, Filter]:
    """Declared filters by name; raises ConfigError for an expression that is none."""
    filter_by_name = {}
    for name, filter_config in config.filters.items():
        try:
            filter_by_name[name] = read_filter(filter_config.filter)
        except InvalidFilter as error:
            raise _refused(name, error) from error
    return filter_by_name


def passing_filters(
    config: NightConfig, root: Path, attributes: Mapping[str, Any], count: int
) -> dict[str, FilterMask]:
    """Items that pass each declared filter, of `count` whose attributes were written below `root`.

    Raises ConfigError for a filter that does not fit the attributes.
    """
    declared = named_filters(config)
    if not declared:
        return {}
    columns, mask_by_filter = ItemAttributes.of_files(root, attributes, count), {}
    for name, declared_filter in declared.items():
        try:
            mask_by_filter[name] = FilterMask.of(mask_of(declared_filter.root_expression, columns))
        except InvalidFilter as error:
            raise _refused(name, error) from error
    return mask_by_filter


def _refused(name: str, error: InvalidFilter) -> ConfigError:
    field_path = error.details.get("field")
    where = f"[filters.{name}]" if field_path is None else f"[filters.{name}] at {field_path}"
    return ConfigError(f"{where}: {error.message}", field="filters")


def allowed_items(build: Build) -> dict[str, NDArray[np.bool_]]:
    """Mask bool [items] for each table made under a filter, by the table's own name."""
    filtered = build.config.filtered
    if not filtered:
        return {}
    begin_report = build.need_report(BEGIN_REPORT)
    for path in attribute_paths(begin_report["attributes"]):
        build.fetch(path)
    count = begin_report["items"]
    filter_mask_by_name = passing_filters(
        build.config, build.root, begin_report["attributes"], count
    )
    everything = np.arange(count)
    return {
        name: filter_mask_by_name[filter_].among(everything)
        for name, (_, filter_) in filtered.items()
    }


def allowed_by_manifest(
    root: Path, manifest: Manifest, items: ItemTable
) -> dict[str, NDArray[np.bool_]]:
    """Return a mask bool [items] for each filtered table, by the table's own name, as the service filters."""
    filtering = Filtering.open(root, manifest, items)
    mask_by_table: dict[str, NDArray[np.bool_]] = {}
    if filtering is not None:
        for name, named_filter in manifest.filters.items():
            mask = filtering.evaluate(name).among(np.arange(items.count))
            mask_by_table |= {table.name: mask for table in named_filter.tables.values()}
    return mask_by_table


def attributes_of_night(
    config: NightConfig, items: ItemTable, root: Path, values: EntityValues, unusable: UnusableRows
) -> dict[str, AttributeFiles]:
    """Write all attributes, and try each declared filter on them; return kind and files by name."""
    attributes = write_item_attributes(config, items, root, values=values, unusable=unusable)
    passing_filters(config, root, attributes, items.count)
    return attributes


def demand_filters(config: NightConfig) -> None:
    """Raise ConfigError for a declared filter with an invalid expression."""
    named_filters(config)
