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
    """Pages of one table: each part has `full_pages_per_part` full pages and a last one with the remaining records."""

    part_count: int
    full_pages_per_part: int
    full_page_bytes: int
    last_page_bytes: int

    @classmethod
    def of(cls, record_count: int, part_count: int, layout: Layout, page_bytes: int) -> "Pages":
        """Lay out records that are evenly distributed over the parts, as hashes nearly are."""
        page_records = records_per_page(layout, page_bytes)
        full_pages, leftover_records = divmod(round(record_count / part_count), page_records)
        return cls(part_count, full_pages, page_records * layout.size_bytes, leftover_records * layout.size_bytes)

    @property
    def page_count(self) -> int:
        """Number of all pages."""
        return self.part_count * (self.full_pages_per_part + (self.last_page_bytes > 0))

    @property
    def payload_bytes(self) -> int:
        """Bytes of all records."""
        return self.part_count * (self.full_pages_per_part * self.full_page_bytes + self.last_page_bytes)

    def sum_costs(self, cost_by_page_bytes: Mapping[int, float]) -> float:
        """Return the total cost of the pages, where a page of n bytes costs `cost_by_page_bytes[n]`."""
        last_cost = cost_by_page_bytes[self.last_page_bytes] if self.last_page_bytes else 0.0
        return self.part_count * (
            self.full_pages_per_part * (cost_by_page_bytes[self.full_page_bytes] if self.full_pages_per_part else 0.0)
            + last_cost
        )

    @property
    def page_sizes(self) -> set[int]:
        """The sizes in bytes that pages of this table have."""
        return {
            size
            for size, page_count in ((self.full_page_bytes, self.full_pages_per_part), (self.last_page_bytes, 1))
            if size and page_count
        }


@dataclass(frozen=True, slots=True)
class NightShape:
    """Shape of a night: entities with records, their layouts, and the sizes of ids and models.

    `bytes_by_model` and `defaults_bytes` are those of the existing bundle, of `model_item_count` items of `model_dims`
    dimensions.
    """

    user_count: int
    item_count: int
    dims: int
    shard_count: int
    page_bytes: int
    layout_by_table: Mapping[str, tuple[EntityKind, Layout]]
    bytes_per_item_id: float
    bytes_by_model: Mapping[str, int]
    model_item_count: int
    model_dims: int
    metric_count: int
    index_kind: IndexKind = "auto"
    defaults_bytes: int = 0
    work_bytes: int = 0
    """Bytes of a night's files that are no artefacts: the partition of its sources, and the probe."""
    interaction_count: int = 0
    feature_bytes_per_user: float = 0.0
    """Bytes of a user's features."""
    feature_bytes_per_item: float = 0.0
    publishes_seen_items: bool = False
    """True if the items of users' histories are published, for filters."""
    publishes_inputs: bool = False
    facets: Mapping[str, tuple[int, Layout]] = field(default_factory=dict)
    """Number of values and list layout of each facet."""

    def pages(self) -> dict[str, Pages]:
        """Pages of each table."""
        return {
            table_name: Pages.of(
                self.user_count if entity == "user" else self.item_count, self.shard_count, layout, self.page_bytes
            )
            for table_name, (entity, layout) in self.layout_by_table.items()
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
        return HASH_BYTES * (self.user_count + self.item_count + value_count)

    @property
    def item_bytes(self) -> int:
        """Bytes of the item table: ids, offsets, model indices, vectors."""
        id_bytes = round(self.bytes_per_item_id * self.item_count)
        return id_bytes + HASH_BYTES * (2 * self.item_count + 1) + self._vector_bytes

    @property
    def _vector_bytes(self) -> int:
        return NUMBER_BYTES * self.item_count * self.dims

    @property
    def index_bytes(self) -> int:
        """Bytes of the FAISS files, one per metric; a large catalogue with `auto` counts as an inverted file."""
        extra_bytes = 0
        if self.index_kind == "ivf" or (self.index_kind == "auto" and self.item_count >= FLAT_ITEMS_MAX):
            extra_bytes = HASH_BYTES * self.item_count + NUMBER_BYTES * self.dims * inverted_list_count(self.item_count)
        elif self.index_kind == "hnsw":
            extra_bytes = self.item_count * (2 * _GRAPH_LINKS * NUMBER_BYTES + 3 * NUMBER_BYTES)
        return self.metric_count * (self._vector_bytes + extra_bytes)

    @property
    def fp32_bytes(self) -> int:
        """Bytes of the fp32 models, which grow with items and dimensions."""
        growth = self.item_count * self.dims / (self.model_item_count * self.model_dims)
        return round(sum(self.bytes_by_model.values()) * growth)

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
            size_bytes += HASH_BYTES * self.user_count + NUMBER_BYTES * self.interaction_count
        if self.publishes_inputs:
            feature_bytes = round(TEXT_BYTES_FACTOR * self.user_count * self.feature_bytes_per_user)
            size_bytes += HASH_BYTES * (self.user_count + self.interaction_count) + feature_bytes
        return size_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the generation's folder: mapped files, pages with checksums, the bundle's copy, and work files."""
        checksum_bytes = CHECKSUM_BYTES * sum(table_pages.page_count for table_pages in self.pages().values())
        artefact_bytes = self.mapped_bytes + self.payload_bytes + checksum_bytes + self.fp32_bytes
        return artefact_bytes + self.work_bytes + REPORTS_BYTES


def step_bytes(shape: NightShape) -> Mapping[str, int]:
    """Return the peak resident memory of each step in bytes, mapped files that the system may drop included.

    Item vectors count once for each copy: mapped, prepared for comparison, and inside a model or an index.
    """
    vector_bytes = NUMBER_BYTES * shape.item_count * shape.dims
    id_bytes = shape.item_count * COUNTED_ITEM_BYTES
    feature_bytes = round(shape.item_count * shape.feature_bytes_per_item)
    model_bytes = shape.fp32_bytes // max(1, len(shape.bytes_by_model))
    slice_bytes = _slice_bytes(shape)
    index_bytes = shape.index_bytes // max(1, shape.metric_count)
    # All models and the item tower at once, each twice: as the file is read, and as it is run.
    open_model_bytes = 2 * (shape.fp32_bytes + model_bytes)
    peak_bytes_by_step = {
        "train": shape.interaction_count * TRAINED_INTERACTION_BYTES + id_bytes + 6 * vector_bytes,
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
        + HASH_BYTES * (shape.user_count // shape.shard_count + 4 * shape.item_count) + shape.directory_bytes,
    }  # fmt: skip
    return {step: PROCESS_BYTES + peak_bytes for step, peak_bytes in peak_bytes_by_step.items()}


def _batch_bytes(shape: NightShape) -> int:
    return max(
        BATCH_ROWS_MAX * GROUPED_ROW_BYTES, min(BATCH_BYTES_MAX, round(BATCH_ROWS_MAX * shape.feature_bytes_per_user))
    )


def _slice_bytes(shape: NightShape) -> int:
    """Return the bytes of a slice while it is grouped: its rows, and three copies of its features."""
    interactions_per_shard = -(-shape.interaction_count // shape.shard_count)
    feature_bytes = round(shape.user_count / shape.shard_count * shape.feature_bytes_per_user)
    return min(interactions_per_shard, SLICE_ROWS_MAX) * GROUPED_ROW_BYTES + 3 * min(feature_bytes, SLICE_BYTES_MAX)
