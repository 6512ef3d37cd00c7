"""Facets: a table for each value of an attribute, of its items with the best mean scores."""

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
from precompute.builds.build import (Build, data_until_of)
from precompute.builds.reports import AttributeFiles, FacetEntry, FacetFields, file_entry
from precompute.builds.tables import facet_layout
from precompute.partitions.catalogue import (directory_file_path)
from precompute.partitions.grouping import (order_if_distinct)
from precompute.scoring.pages import GrowingFile, PageFile, describe_pages

VALUES_MAX: Final = 1_000_000
"""Largest number of values of a facet's attribute."""
_AT_ONCE: Final = 4_096


def write_facets(
    build: Build,
    attributes: Mapping[str, AttributeFiles],
    items: ItemTable,
    scores: NDArray[np.float32],
) -> FacetFields:
    """Write and publish the table of each facet, by `scores` float32 [items], ties by ordinal.

    Returns `facets` for a step's report, if there are any: the seed, directory and pages of each. Raises
    ConfigError for an attribute of more than a million values.
    """
    facets = build.config.facets
    if not facets:
        return {}
    columns = ItemAttributes.of_files(build.root, attributes, items.count).columns
    score_ranks = np.empty(items.count, np.int64)
    score_ranks[np.lexsort((np.arange(items.count), -scores))] = np.arange(items.count)
    return {"facets": {
        name: _write_facet(
            build, name, facet.k, AttributeValues.of(name, columns[facet.attribute], score_ranks), scores
        )
        for name, facet in facets.items()
    }}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class AttributeValues:
    """Values of an attribute: their ids, and the items with each value, best first, between `starts`."""

    ids: list[bytes]
    starts: NDArray[np.int64]
    owners: NDArray[np.uint32]

    @classmethod
    def of(cls, name: str, column: AttributeColumn, score_ranks: NDArray[np.int64]) -> Self:
        """Build from a column of texts; `score_ranks` is each item's rank by score."""
        names = column.dictionary
        assert names is not None  # noqa: S101 - facets of other kinds were refused
        if len(names) > VALUES_MAX:
            raise ConfigError(
                f"[facets.{name}]: its attribute has {len(names):,} values, a facet at most {VALUES_MAX:,}",
                field="facets",
            )
        if column.offsets is None:
            owners = np.flatnonzero(column.values != NO_CODE)
            codes = column.values[owners]
        else:
            counts = (column.offsets[1:] - column.offsets[:-1]).astype(np.int64)
            owners = np.repeat(np.arange(len(score_ranks)), counts)
            codes = column.values[: len(owners)]
        order = np.lexsort((score_ranks[owners], codes))
        codes, owners = codes[order], owners[order]
        first = np.ones(len(codes), np.bool_)  # an item may name a value twice
        first[1:] = (codes[1:] != codes[:-1]) | (owners[1:] != owners[:-1])
        codes, owners = codes[first], owners[first]
        ids = [names.text_bytes(code) for code in range(len(names))]
        starts = np.searchsorted(codes, np.arange(len(ids) + 1))
        return cls(ids, starts, owners.astype(np.uint32))

    def lists(self, rows: NDArray[np.int64], k: int) -> NDArray[np.uint32]:
        """Return ordinals uint32 [rows, k] of the best items with each value, padded with NO_ITEM."""
        owner_indexes = self.starts[rows][:, None] + np.arange(k)
        is_one = owner_indexes < self.starts[rows + 1][:, None]
        return np.where(is_one, self.owners[np.where(is_one, owner_indexes, 0)], NO_ITEM)


def _write_facet(
    build: Build, name: str, k: int, values: AttributeValues, scores: NDArray[np.float32]
) -> FacetEntry:
    # An empty text is no id, so nobody can ask for it.
    rows = np.array([row for row, raw in enumerate(values.ids) if raw], np.int64)
    raws = [values.ids[row] for row in rows.tolist()]
    seed = 0
    while (order := order_if_distinct(hashes := hash_ids(raws, seed))) is None:
        seed += 1
    layout, at = facet_layout(k), data_until_of(build.generation)
    pages, directory = f"tables/{name}/0000.pages", directory_file_path(f"{FACET_PREFIX}{name}", 0)
    with (
        PageFile(build.path(pages), layout, build.config.page_bytes) as file,
        GrowingFile(build.path(directory)) as hashes_file,
    ):
        hashes_file.write(hashes[order].astype("<u8").tobytes())
        for start in range(0, len(order), _AT_ONCE):
            batch_indexes = order[start : start + _AT_ONCE]
            list_ordinals = values.lists(rows[batch_indexes], k)
            numbers = np.where(
                list_ordinals == NO_ITEM,
                np.float32(0),
                scores[np.where(list_ordinals == NO_ITEM, 0, list_ordinals)],
            )
            value_fingerprints = fingerprints([raws[row] for row in batch_indexes.tolist()])
            file.append(encode_topk(layout, value_fingerprints, list_ordinals, numbers, at))
    table = describe_pages(build, file)
    build.finish(directory, table["file"]["path"], table["sums"]["path"])
    return {"seed": seed, "directory": file_entry(build.describe(directory)), "table": table}
