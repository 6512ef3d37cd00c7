"""Sizes of a generation in Redis, on hosts and on disk, and memory of each step: sums over a night's shape. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cache.format.manifest import EntityKind
from cache.records import Layout
from precompute.builds.tables import records_per_page
from precompute.bundles.index import FLAT_ITEMS_MAX, IndexKind, inverted_list_count
from precompute.partitions.shard_input import COUNTED_ROWS_AT_ONCE, SLICE_BYTES_MAX, SLICE_ROWS_MAX
from precompute.scoring.shard_work import CHUNK_BYTES, CHUNKS_MAX
from precompute.sources.readers import BATCH_BYTES_MAX, BATCH_ROWS_MAX

HASH_BYTES = 8

NUMBER_BYTES = 4

CHECKSUM_BYTES = 8

TEXT_BYTES_FACTOR = 5
"""Ratio of a number's bytes as text to its bytes in binary."""

REPORTS_BYTES = 40 << 10
"""Bytes of the manifest and the steps' reports, in a night of few shards."""

_GRAPH_LINKS = 32
"""Neighbours of a node of the graph index; the base level has twice as many."""

PROCESS_BYTES: Final = 350 << 20
"""Memory of a process with Python, NumPy, Arrow, ONNX Runtime and FAISS."""

GROUPED_ROW_BYTES: Final = 150
"""Bytes per row while rows are grouped: columns, sort orders and masks."""

COUNTED_ROW_BYTES: Final = 64
"""Bytes per row while users are counted: hashes, masks and sort orders."""

CHUNKS_BYTES: Final = CHUNKS_MAX * CHUNK_BYTES
"""Bytes of the results of chunks in progress, on a host of many cores."""

TILE_BYTES: Final = 256 << 20
"""Bytes of scores, keys and copies of one tile of items against all queries."""

COUNTED_ITEM_BYTES: Final = 160
"""Bytes per item id in `begin` and `train`: the id twice, two hashes, sort orders and positions, and its count."""

TRAINED_INTERACTION_BYTES: Final = 60
"""Bytes per interaction in `train`: two codes, and the sparse matrix with its copies."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one table: each part has `full_pages` full pages and a last one with the remaining records."""

    parts: int
    full_pages: int
    full_page_bytes: int
    last_page_bytes: int

    @classmethod
    def of(cls, record_count: int, part_count: int, layout: Layout, page_bytes: int) -> "Pages":
        """Lay out records that are evenly distributed over the parts, as hashes nearly are."""
        page_records = records_per_page(layout, page_bytes)
        full_pages, leftover_records = divmod(round(record_count / part_count), page_records)
        return cls(part_count, full_pages, page_records * layout.size_bytes, leftover_records * layout.size_bytes)

    @property
    def count(self) -> int:
        """Number of all pages."""
        return self.parts * (self.full_pages + (self.last_page_bytes > 0))

    @property
    def payload_bytes(self) -> int:
        """Bytes of all records."""
        return self.parts * (self.full_pages * self.full_page_bytes + self.last_page_bytes)

    def sum_costs(self, cost_by_page_bytes: Mapping[int, float]) -> float:
        """Return the total cost of the pages, where a page of n bytes costs `cost_by_page_bytes[n]`."""
        last_cost = cost_by_page_bytes[self.last_page_bytes] if self.last_page_bytes else 0.0
        return self.parts * (
            self.full_pages * (cost_by_page_bytes[self.full_page_bytes] if self.full_pages else 0.0) + last_cost
        )

    @property
    def page_sizes(self) -> set[int]:
        """The sizes in bytes that pages of this table have."""
        return {
            size
            for size, page_count in ((self.full_page_bytes, self.full_pages), (self.last_page_bytes, 1))
            if size and page_count
        }


@dataclass(frozen=True, slots=True)
class NightShape:
    """Shape of a night: entities with records, their layouts, and the sizes of ids and models.

    `model_bytes` and `defaults_bytes` are those of the existing bundle, of `model_items` items of `model_dims`
    dimensions.
    """

    users: int
    items: int
    dims: int
    shards: int
    page_bytes: int
    layouts: Mapping[str, tuple[EntityKind, Layout]]
    item_id_bytes: float
    model_bytes: Mapping[str, int]
    model_items: int
    model_dims: int
    metric_count: int
    index: IndexKind = "auto"
    defaults_bytes: int = 0
    work_bytes: int = 0
    """Bytes of a night's files that are no artefacts: the partition of its sources, and the probe."""
    interactions: int = 0
    feature_bytes: float = 0.0
    """Bytes of a user's features."""
    item_feature_bytes: float = 0.0
    publishes_seen_items: bool = False
    """True if the items of users' histories are published, for filters."""
    publishes_inputs: bool = False
    facets: Mapping[str, tuple[int, Layout]] = field(default_factory=dict)
    """Number of values and list layout of each facet."""

    def pages(self) -> dict[str, Pages]:
        """Pages of each table."""
        return {
            table_name: Pages.of(self.users if entity == "user" else self.items, self.shards, layout, self.page_bytes)
            for table_name, (entity, layout) in self.layouts.items()
        } | {
            table_name: Pages.of(value_count, 1, layout, self.page_bytes)
            for table_name, (value_count, layout) in self.facets.items()
        }

    @property
    def payload_bytes(self) -> int:
        """Bytes of the records of all tables."""
        return sum(table_pages.payload_bytes for table_pages in self.pages().values())

    @property
    def directory_bytes(self) -> int:
        """Bytes of the hashes of all users, items and facet values."""
        value_count = sum(count for count, _ in self.facets.values())
        return HASH_BYTES * (self.users + self.items + value_count)

    @property
    def item_bytes(self) -> int:
        """Bytes of the item table: ids, offsets, model indices, vectors."""
        id_bytes = round(self.item_id_bytes * self.items)
        return id_bytes + HASH_BYTES * (2 * self.items + 1) + self._vector_bytes

    @property
    def _vector_bytes(self) -> int:
        return NUMBER_BYTES * self.items * self.dims

    @property
    def index_bytes(self) -> int:
        """Bytes of the FAISS files, one per metric; a large catalogue with `auto` counts as an inverted file."""
        extra_bytes = 0
        if self.index == "ivf" or (self.index == "auto" and self.items >= FLAT_ITEMS_MAX):
            extra_bytes = HASH_BYTES * self.items + NUMBER_BYTES * self.dims * inverted_list_count(self.items)
        elif self.index == "hnsw":
            extra_bytes = self.items * (2 * _GRAPH_LINKS * NUMBER_BYTES + 3 * NUMBER_BYTES)
        return self.metric_count * (self._vector_bytes + extra_bytes)

    @property
    def fp32_bytes(self) -> int:
        """Bytes of the fp32 models, which grow with items and dimensions."""
        growth = self.items * self.dims / (self.model_items * self.model_dims)
        return round(sum(self.model_bytes.values()) * growth)

    @property
    def mapped_bytes(self) -> int:
        """Bytes that a reader's host maps of one generation; an int8 model has a scale per table row."""
        int8_bytes = round(self.fp32_bytes * (1 + NUMBER_BYTES / self.dims) / NUMBER_BYTES)
        model_bytes = self.fp32_bytes + int8_bytes
        return (
            self.directory_bytes + self.item_bytes + self.index_bytes + model_bytes + self.defaults_bytes
            + self.input_bytes
        )  # fmt: skip

    @property
    def input_bytes(self) -> int:
        """Upper bound on the bytes of published user inputs: every interaction counts, and features count as texts."""
        size_bytes = 0
        if self.publishes_seen_items or self.publishes_inputs:
            size_bytes += HASH_BYTES * self.users + NUMBER_BYTES * self.interactions
        if self.publishes_inputs:
            feature_bytes = round(TEXT_BYTES_FACTOR * self.users * self.feature_bytes)
            size_bytes += HASH_BYTES * (self.users + self.interactions) + feature_bytes
        return size_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the generation's folder: mapped files, pages with checksums, the bundle's copy, and work files."""
        checksum_bytes = CHECKSUM_BYTES * sum(table_pages.count for table_pages in self.pages().values())
        artefact_bytes = self.mapped_bytes + self.payload_bytes + checksum_bytes + self.fp32_bytes
        return artefact_bytes + self.work_bytes + REPORTS_BYTES


def step_bytes(shape: NightShape) -> Mapping[str, int]:
    """Return the peak resident memory of each step in bytes, mapped files that the system may drop included.

    Item vectors count once for each copy: mapped, prepared for comparison, and inside a model or an index.
    """
    vector_bytes = NUMBER_BYTES * shape.items * shape.dims
    id_bytes = shape.items * COUNTED_ITEM_BYTES
    feature_bytes = round(shape.items * shape.item_feature_bytes)
    model_bytes = shape.fp32_bytes // max(1, len(shape.model_bytes))
    slice_bytes = _slice_bytes(shape)
    index_bytes = shape.index_bytes // max(1, shape.metric_count)
    # All models and the item tower at once, each twice: as the file is read, and as it is run.
    open_model_bytes = 2 * (shape.fp32_bytes + model_bytes)
    peak_bytes_by_step = {
        "train": shape.interactions * TRAINED_INTERACTION_BYTES + id_bytes + 6 * vector_bytes,
        "begin": open_model_bytes + 3 * _batch_bytes(shape) + 2 * COUNTED_ROWS_AT_ONCE * COUNTED_ROW_BYTES + id_bytes
        + 3 * feature_bytes,
        "embed_items": 2 * model_bytes + feature_bytes,
        "score": 2 * slice_bytes + CHUNKS_BYTES + vector_bytes + (shape.metric_count + 1) * 3 * vector_bytes // 2
        + 2 * model_bytes + feature_bytes,
        "assemble": 0,
        "index": slice_bytes + TILE_BYTES + vector_bytes + 3 * index_bytes + 2 * model_bytes,
        "quantize": slice_bytes + TILE_BYTES + vector_bytes + 4 * model_bytes + feature_bytes,
        "load": 2 * (64 << 20),
        "verify": slice_bytes + 2 * TILE_BYTES + vector_bytes + index_bytes + 4 * model_bytes + feature_bytes
        + HASH_BYTES * (shape.users // shape.shards + 4 * shape.items) + shape.directory_bytes,
    }  # fmt: skip
    return {step: PROCESS_BYTES + peak_bytes for step, peak_bytes in peak_bytes_by_step.items()}


def _batch_bytes(shape: NightShape) -> int:
    return max(BATCH_ROWS_MAX * GROUPED_ROW_BYTES, min(BATCH_BYTES_MAX, round(BATCH_ROWS_MAX * shape.feature_bytes)))


def _slice_bytes(shape: NightShape) -> int:
    """Return the bytes of a slice while it is grouped: its rows, and three copies of its features."""
    interactions_per_shard = -(-shape.interactions // shape.shards)
    feature_bytes = round(shape.users / shape.shards * shape.feature_bytes)
    return min(interactions_per_shard, SLICE_ROWS_MAX) * GROUPED_ROW_BYTES + 3 * min(feature_bytes, SLICE_BYTES_MAX)
