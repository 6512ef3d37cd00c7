"""Facets: for each value of an attribute, a list of its items with the best mean scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from cache.errors import ConfigError
from cache.filters.attributes import NO_CODE, AttributeColumn, ItemAttributes
from cache.format.ids import fingerprints, hash_ids
from cache.format.item_table import ItemTable
from cache.format.manifest import FACET_PREFIX
from cache.records import NO_ITEM, encode_topk
from precompute.builds.build import Build, data_until_of
from precompute.builds.reports import AttributeFiles, FacetEntry, FacetFields, file_entry
from precompute.builds.tables import facet_layout
from precompute.partitions.catalogue import directory_file_path
from precompute.partitions.grouping import order_if_distinct
from precompute.scoring.pages import GrowingFile, PageFile, describe_pages

FACET_VALUES_MAX: Final = 1_000_000
"""Maximum number of values of a facet's attribute."""
_RECORDS_PER_BATCH: Final = 4_096


def write_facets(
    build: Build, attributes: Mapping[str, AttributeFiles], items: ItemTable, item_scores: NDArray[np.float32]
) -> FacetFields:
    """Write and publish the table of each facet, by `item_scores` float32 [items]; ties are ordered by ordinal.

    Returns `facets` for a step's report if there are any: the seed, directory and pages of each. Raises ConfigError for
    an attribute with more than a million values.
    """
    facets = build.config.facets
    if not facets:
        return {}
    columns = ItemAttributes.of_files(build.root, attributes, items.count).columns
    score_ranks = np.empty(items.count, np.int64)
    score_ranks[np.lexsort((np.arange(items.count), -item_scores))] = np.arange(items.count)
    return {"facets": {
        name: _write_facet(
            build, name, facet.k, AttributeValues.of(name, columns[facet.attribute], score_ranks), item_scores
        )
        for name, facet in facets.items()
    }}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class AttributeValues:
    """Values of an attribute: their ids, and the items with each value between `value_starts`, best first."""

    value_ids: list[bytes]
    value_starts: NDArray[np.int64]
    item_ordinals: NDArray[np.uint32]

    @classmethod
    def of(cls, attribute_name: str, column: AttributeColumn, item_score_ranks: NDArray[np.int64]) -> Self:
        """Build from a column of texts; `item_score_ranks` is each item's rank by score."""
        value_names = column.dictionary
        assert value_names is not None  # noqa: S101 - facets of other kinds were refused
        if len(value_names) > FACET_VALUES_MAX:
            raise ConfigError(
                f"[facets.{attribute_name}]: its attribute has {len(value_names):,} values, more than "
                f"{FACET_VALUES_MAX:,}",
                field="facets",
            )
        if column.item_offsets is None:
            owner_ordinals = np.flatnonzero(column.values != NO_CODE)
            codes = column.values[owner_ordinals]
        else:
            value_counts = (column.item_offsets[1:] - column.item_offsets[:-1]).astype(np.int64)
            owner_ordinals = np.repeat(np.arange(len(item_score_ranks)), value_counts)
            codes = column.values[: len(owner_ordinals)]
        sort_order = np.lexsort((item_score_ranks[owner_ordinals], codes))
        codes, owner_ordinals = codes[sort_order], owner_ordinals[sort_order]
        is_first = np.ones(len(codes), np.bool_)  # an item may name a value more than once
        is_first[1:] = (codes[1:] != codes[:-1]) | (owner_ordinals[1:] != owner_ordinals[:-1])
        codes, owner_ordinals = codes[is_first], owner_ordinals[is_first]
        value_ids = [value_names.text_bytes(code) for code in range(len(value_names))]
        starts = np.searchsorted(codes, np.arange(len(value_ids) + 1))
        return cls(value_ids, starts, owner_ordinals.astype(np.uint32))

    def best_item_lists(self, value_rows: NDArray[np.int64], k: int) -> NDArray[np.uint32]:
        """Return ordinals uint32 [rows, k] of the best items with each value, padded with NO_ITEM."""
        owner_indexes = self.value_starts[value_rows][:, None] + np.arange(k)
        is_item = owner_indexes < self.value_starts[value_rows + 1][:, None]
        return np.where(is_item, self.item_ordinals[np.where(is_item, owner_indexes, 0)], NO_ITEM)


def _write_facet(
    build: Build, facet_name: str, k: int, values: AttributeValues, item_scores: NDArray[np.float32]
) -> FacetEntry:
    # An empty text is not an id, so no request can ask for it.
    value_rows = np.array([row for row, raw in enumerate(values.value_ids) if raw], np.int64)
    value_ids = [values.value_ids[row] for row in value_rows.tolist()]
    seed = 0
    while (sort_order := order_if_distinct(hashes := hash_ids(value_ids, seed))) is None:
        seed += 1
    layout, cut_at = facet_layout(k), data_until_of(build.generation)
    pages_path, directory_path = (
        f"tables/{facet_name}/0000.pages",
        directory_file_path(f"{FACET_PREFIX}{facet_name}", 0),
    )
    with (
        PageFile(build.path(pages_path), layout, build.config.page_bytes) as page_file,
        GrowingFile(build.path(directory_path)) as hashes_file,
    ):
        hashes_file.write(hashes[sort_order].astype("<u8").tobytes())
        for start in range(0, len(sort_order), _RECORDS_PER_BATCH):
            batch_indexes = sort_order[start : start + _RECORDS_PER_BATCH]
            list_ordinals = values.best_item_lists(value_rows[batch_indexes], k)
            list_scores = np.where(
                list_ordinals == NO_ITEM,
                np.float32(0),
                item_scores[np.where(list_ordinals == NO_ITEM, 0, list_ordinals)],
            )
            value_fingerprints = fingerprints([value_ids[row] for row in batch_indexes.tolist()])
            page_file.append(encode_topk(layout, value_fingerprints, list_ordinals, list_scores, cut_at))
    table = describe_pages(build, page_file)
    build.finish(directory_path, table["file"]["path"], table["sums"]["path"])
    return {"seed": seed, "directory": file_entry(build.describe(directory_path)), "table": table}
