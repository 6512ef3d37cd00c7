"""Evidence of several gates, gathered once and without Redis, and scans of all records."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from cache.format.directory import Directory
from cache.format.item_table import ItemTable, Ordinals
from cache.format.manifest import FEATURE_ONLY_USERS_FACT, Manifest, Table, TablePart
from cache.model.tower import Histories, Inputs, Tower
from cache.model.tower_spec import TowerSpec
from cache.records import ABSENT_FLAGS, NO_ITEM, are_nightly, dequantize
from cache.store.artefacts import generation_path
from precompute.builds.seal import WITHOUT_INTERACTIONS_FACT
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.bundles.index import vector_lengths
from precompute.gates.evidence.user_sample import UserSample, sample_users
from precompute.partitions.catalogue import ITEM_FEATURES_FILE, ItemFeatures, item_id_texts, ordinals_of_texts
from precompute.partitions.marks import marks_file_path
from precompute.partitions.shard_input import ShardInput
from precompute.scoring.input_samples import draw_histories
from precompute.scoring.towers import bind_inputs, select_usable_inputs
from precompute.sources.columns import text_hashes

CHUNK_BYTES: Final = 16 << 20
"""Bytes of a page file that are read at once."""

FINGERPRINTS_AT_ONCE: Final = 1 << 22
"""Number of fingerprints in memory while repeated ones are counted."""

STRATUM_ITEMS_MAX = 64
"""Maximum number of items in a stratum."""

COMPARED_ITEMS_MAX: Final = 2_000
"""Number of items whose values are compared with those in the live generation."""

DRAWN_SEED = 1
"""Seed of drawn histories; it differs from that of the histories for calibration."""


FindAllowedItems = Callable[[Path, Manifest, ItemTable], Mapping[str, NDArray[np.bool_]]]
"""Function that returns masks bool [items] of the allowed items by table, from a folder and its manifest."""


class FingerprintFile:
    """Fingerprints of a table's records in their order, in an unnamed file: 8 bytes each on disk."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long-lived as the scan
        self.count = 0

    def append(self, fingerprints: NDArray[np.uint64]) -> None:
        """Append the fingerprints of the next records."""
        self._file.write(np.ascontiguousarray(fingerprints, np.uint64).data)
        self.count += len(fingerprints)

    def read(self, first_index: int, fingerprint_count: int) -> NDArray[np.uint64]:
        """Return uint64[count]: fingerprints from a record on."""
        self._file.flush()
        return np.frombuffer(os.pread(self._file.fileno(), 8 * fingerprint_count, 8 * first_index), np.uint64)

    def count_repeated(self) -> int:
        """Count repeated fingerprints; each pass covers a range of the 64 bits, to bound memory."""
        range_count = -(-self.count // FINGERPRINTS_AT_ONCE)
        return sum(self._count_repeated_in(range_index, range_count) for range_index in range(range_count))

    def _count_repeated_in(self, range_index: int, range_count: int) -> int:
        first_fingerprint, last_fingerprint = (np.uint64(bound) for bound in _range_bounds(range_index, range_count))
        fingerprints_in_range = [np.empty(0, np.uint64)]
        for first_index in range(0, self.count, FINGERPRINTS_AT_ONCE):
            fingerprints = self.read(first_index, min(FINGERPRINTS_AT_ONCE, self.count - first_index))
            fingerprints_in_range.append(
                fingerprints[(fingerprints >= first_fingerprint) & (fingerprints <= last_fingerprint)]
            )
        fingerprints = np.sort(np.concatenate(fingerprints_in_range))
        return int((fingerprints[1:] == fingerprints[:-1]).sum())


@dataclass(slots=True, eq=False)
class Scan:
    """Result of a scan of one table; `fault_counts` are by kind, `first_location_by_fault` locates each kind's first.

    `absent_count` counts records without an answer whose entity has an answer in another table of the directory.

    For lists: `slots_by_item` int64[items] counts the slots of lists with each item, `empty_count` lists without an
    item, `lists_by_length` int64[K + 1] lists by length. For values: `first_values` are those of the first record,
    `differing_count` counts records with other values.
    """

    table: Table
    slots_by_item: NDArray[np.int64]
    lists_by_length: NDArray[np.int64]
    record_count: int = 0
    absent_count: int = 0
    empty_count: int = 0
    first_values: NDArray[np.float64] | None = None
    differing_count: int = 0
    fault_counts: Counter[str] = field(default_factory=Counter)
    first_location_by_fault: dict[str, str] = field(default_factory=dict)
    fingerprints: FingerprintFile = field(default_factory=FingerprintFile)

    def note_faults(self, fault_kind: str, faults: Any, location: str) -> None:
        """Count faults: bool[n] of a chunk's records, or a number of cases."""
        fault_count = int(np.count_nonzero(faults)) if isinstance(faults, np.ndarray) else int(faults)
        if fault_count:
            location_in_chunk = (
                f", record {int(np.argmax(faults))} of the chunk" if isinstance(faults, np.ndarray) else ""
            )
            self.fault_counts[fault_kind] += fault_count
            self.first_location_by_fault.setdefault(fault_kind, f"{location}{location_in_chunk}")


class Evidence:
    """Facts of one candidate, gathered at first use; if that fails, each gate that uses the fact raises the error."""

    def __init__(
        self,
        manifest: Manifest,
        root: Path,
        items: ItemTable,
        history_limit: int,
        live: Manifest | None,
        live_root: Path | None,
        allowed_items: tuple[FindAllowedItems, ...] = (),
    ) -> None:
        self.manifest = manifest
        self.root = root
        self.items = items
        self._history_limit = history_limit
        self._live = live
        self._live_root = live_root
        self._allowed_items = allowed_items

    @cached_property
    def scans(self) -> Mapping[str, Scan]:
        """Scans of every table, those under filters included."""
        return {
            table_name: scan_table(self.root, self.manifest, table)
            for table_name, table in self.manifest.stored_tables.items()
        }

    @cached_property
    def unfiltered_scans(self) -> Mapping[str, Scan]:
        """Scans of the tables without a filter: lists under a filter may be short, and very similar."""
        tables = self.manifest.tables.items()
        return {table_name: self.scans[table_name] for table_name, table in tables if not table.is_facet}

    @cached_property
    def allowed_items_by_table(self) -> Mapping[str, NDArray[np.bool_]]:
        """Masks bool [items] of the allowed items by table; a table without a mask may list all items."""
        return {
            table: mask
            for allowed_by_table in self._allowed_items
            for table, mask in allowed_by_table(self.root, self.manifest, self.items).items()
        }

    @cached_property
    def directories(self) -> Mapping[str, Directory]:
        """Directories by entity set."""
        return {
            entity_name: Directory.open(self.root, entities)
            for entity_name, entities in self.manifest.entity_sets.items()
        }

    @cached_property
    def bundle(self) -> Bundle:
        """Bundle that `begin` pinned, with its own checksums verified."""
        return Bundle.open(self.root / "bundle")

    @cached_property
    def users(self) -> UserSample:
        """Sampled users with their inputs."""
        return sample_users(
            self.root / "work/partition",
            self.manifest.entity_sets["user"],
            self.directories["user"],
            history_limit=self._history_limit,
            event_marks_path=self._event_marks_path,
            answers_without_history=self._computes_feature_only_users,
            counts_feature_only_users=self._computes_feature_only_users or not self.bundle.needs_history,
        )

    @property
    def _computes_feature_only_users(self) -> bool:
        return bool(self.manifest.facts.get(FEATURE_ONLY_USERS_FACT, False))

    @property
    def _event_marks_path(self) -> Path | None:
        """File of the users for whom events set values; None if some model answers for users with features alone."""
        marks_path = self.root / marks_file_path("user")
        return marks_path if self.bundle.needs_history and marks_path.is_file() else None

    @cached_property
    def live_items(self) -> ItemTable | None:
        """Item table of the live generation; None for the first generation."""
        if self._live is None:
            return None
        if self._live_root is None:
            raise CorruptArtefact(f"the files of {generation_path(self._live.generation)} are not on this host")
        return ItemTable.open(self._live_root, self._live)

    @cached_property
    def live_user_directory(self) -> Directory | None:
        """Directory of users of the live generation; None for the first generation."""
        return self._live_directory("user")

    @cached_property
    def live_item_directory(self) -> Directory | None:
        """Directory of items of the live generation; None for the first generation."""
        return self._live_directory("item")

    def _live_directory(self, entity: str) -> Directory | None:
        if self._live is None:
            return None
        if self._live_root is None:
            raise CorruptArtefact(f"the files of {generation_path(self._live.generation)} are not on this host")
        return Directory.open(self._live_root, self._live.entity_sets[entity])

    @cached_property
    def live_ordinals(self) -> NDArray[np.int64]:
        """Ordinals int64[live items] of the live generation's items; distinct negative numbers for removed items."""
        if self.live_items is None:
            return np.empty(0, np.int64)
        ordinals = ordinals_of_texts(self.items, item_id_texts(self.live_items))
        return np.where(ordinals >= 0, ordinals, -1 - np.arange(len(ordinals)))

    @cached_property
    def common_user_positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions (here, in the live generation) of the sampled users that are in both generations."""
        if self.live_user_directory is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        hashes = text_hashes(self.users.users.entity_ids, self.live_user_directory.seed)
        live_positions = self.live_user_directory.find_positions(hashes)
        return self.users.directory_positions[live_positions >= 0], live_positions[live_positions >= 0]

    @cached_property
    def common_item_positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions (here, in the live generation) of items in both generations, spread over the item table."""
        directory, live_directory = self.directories["item"], self.live_item_directory
        if live_directory is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        compared_ordinals = select_spread_rows(np.arange(self.items.count), COMPARED_ITEMS_MAX)
        texts = item_id_texts(self.items)
        positions = directory.find_positions(text_hashes(texts, directory.seed)[compared_ordinals])
        live_positions = live_directory.find_positions(text_hashes(texts, live_directory.seed)[compared_ordinals])
        is_in_both = (positions >= 0) & (live_positions >= 0)
        return positions[is_in_both], live_positions[is_in_both]

    @cached_property
    def item_strata(self) -> Mapping[str, NDArray[np.int64]]:
        """Ordinals of items with the longest vectors (head), the shortest, new against the live generation, and any."""
        lengths = vector_lengths(self.items.vectors)
        by_descending_length = np.argsort(-lengths, kind="stable")
        spread_ordinals = np.unique(np.linspace(0, self.items.count - 1, 2 * STRATUM_ITEMS_MAX).astype(np.int64))
        strata = {
            "head": by_descending_length[:STRATUM_ITEMS_MAX],
            "tail": by_descending_length[-STRATUM_ITEMS_MAX:],
            "spread": spread_ordinals,
        }
        if self.live_items is not None:
            new_ordinals = np.flatnonzero(ordinals_of_texts(self.live_items, item_id_texts(self.items)) < 0)
            strata["new"] = new_ordinals[:STRATUM_ITEMS_MAX]
        return {stratum: ordinals for stratum, ordinals in strata.items() if len(ordinals)}

    @cached_property
    def sampled_item_ordinals(self) -> NDArray[np.int64]:
        """Ordinals of all sampled items, ascending."""
        return np.unique(np.concatenate(list(self.item_strata.values())))

    @cached_property
    def _users_with_drawn_histories(self) -> ShardInput:
        return draw_histories(self.users.users, self.items, self.bundle.metric, seed=DRAWN_SEED)

    def compared_users(self, model: BundleModel) -> ShardInput:
        """Return the sampled users, on whose inputs the forms of a model are compared.

        If the model needs a history but users have vectors instead, histories are drawn at random.
        """
        users = self.users.users
        has_histories = not self.manifest.facts.get(WITHOUT_INTERACTIONS_FACT)
        is_drawn = not has_histories and users.entity_vectors is not None and model.spec.history is not None
        return self._users_with_drawn_histories if is_drawn else users

    def user_inputs(self, model: BundleModel, users: ShardInput | None = None) -> tuple[Inputs, NDArray[np.int64]]:
        """Return (inputs, their rows) for a user model, of the sampled users or of the given ones."""
        usable_rows, histories, features = select_usable_inputs(
            self.items, self.users.users if users is None else users, {model.name: model.spec}
        )
        model_inputs = bind_inputs(
            model.spec,
            histories=histories.select_rows(usable_rows),
            features={
                input_name: input_values[usable_rows] for input_name, input_values in features[model.name].items()
            },
        )
        return model_inputs, usable_rows

    def item_inputs(self, model: BundleModel, ordinals: NDArray[np.int64]) -> Inputs:
        """Return the inputs of items for an item model."""
        features, _ = self.item_features(model.spec).of(ordinals)
        return bind_inputs(model.spec, features=features, item_indices=self.items.model_indices_of(Ordinals(ordinals)))

    def usable_item_ordinals(self, model: BundleModel) -> NDArray[np.int64]:
        """Return the ordinals of the sampled items that have the inputs of an item model."""
        return self.sampled_item_ordinals[self.item_features(model.spec).of(self.sampled_item_ordinals)[1]]

    def item_features(self, spec: TowerSpec) -> ItemFeatures:
        """Return the feature inputs of items, as `begin` pinned them."""
        return ItemFeatures.open(self.root / ITEM_FEATURES_FILE, spec, self.items.count)

    def run_model(self, model: BundleModel, inputs: Inputs) -> NDArray[np.float32]:
        """Run a model in full precision, from the bundle's own file."""
        return Tower.open(model.path, model.spec).run(inputs)

    @cached_property
    def user_vectors(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return vectors float32 [n, dims] and their rows of the sample: those of the sources, else the tower's."""
        inputs, usable_rows = self.user_inputs(self.bundle.user_tower)
        tower_vectors = self.run_model(self.bundle.user_tower, inputs)
        vectors = np.full((len(self.users.users.entity_ids), self.bundle.dims), np.nan, np.float32)
        vectors[usable_rows] = tower_vectors
        if (source_vectors := self.users.users.entity_vectors) is not None:
            vectors = np.where(np.isnan(source_vectors), vectors, source_vectors)
        is_finite = np.isfinite(vectors).all(axis=1)  # a user whose vector is not finite has no record
        return vectors[is_finite], np.flatnonzero(is_finite)

    @cached_property
    def seen_items(self) -> Histories:
        """Return the ordinals of each sampled user's history, which must not be recommended."""
        return Histories(self.users.users.history_indptr, self.users.users.history_ordinals)

    def records_of(self, table: Table, directory_positions: NDArray[np.int64]) -> NDArray[Any]:
        """Read the records at positions of the table's directory from the page files."""
        part_ends = np.cumsum([part.count for part in table.parts])
        part_indices = np.searchsorted(part_ends, directory_positions, "right")
        part_starts = np.concatenate([[0], part_ends[:-1]])
        return read_records(self.root, table, part_indices, directory_positions - part_starts[part_indices])


def select_spread_rows(row_indexes: NDArray[np.int64], count_max: int) -> NDArray[np.int64]:
    """Select at most `count_max` of the rows, evenly spread."""
    picked_indices = np.linspace(0, len(row_indexes) - 1, min(count_max, len(row_indexes)))
    return row_indexes[np.unique(picked_indices.astype(np.int64))]


def compared_depth(list_length: int, item_count: int) -> int:
    """Return the number of compared slots of a list: 20, but fewer if that were most of a small catalogue."""
    return max(1, min(list_length, 20, item_count // 8))


def scan_table(root: Path, manifest: Manifest, table: Table) -> Scan:
    """Scan all page files of a table, with one chunk in memory at a time."""
    item_count = manifest.items.count
    scan = Scan(
        table,
        np.zeros(item_count, np.int64),
        np.zeros(table.layout.width + 1, np.int64),
        fingerprints=FingerprintFile(root),
    )
    for part in table.parts:
        _scan_part(root, manifest, part, scan)
    return scan


def read_records(
    root: Path, table: Table, part_indices: NDArray[np.int64], positions_in_part: NDArray[np.int64]
) -> NDArray[Any]:
    """Read the records at `positions_in_part` within `part_indices` from the page files."""
    records = np.zeros(len(part_indices), table.layout.dtype)
    for part_index in np.unique(part_indices).tolist():
        rows_of_part = np.flatnonzero(part_indices == part_index)
        part_records = np.memmap(root / table.parts[part_index].file.path, table.layout.dtype, "r")
        records[rows_of_part] = part_records[positions_in_part[rows_of_part]]
    return records


def _scan_part(root: Path, manifest: Manifest, part: TablePart, scan: Scan) -> None:
    table, path = scan.table, root / part.file.path
    record_bytes, page_checksums = (table.layout.size_bytes, np.fromfile(root / part.sums.path, "<u8"))
    file_bytes = path.stat().st_size
    if file_bytes != part.count * record_bytes or part.pages != -(-part.count // table.records_per_page):
        scan.note_faults("pages", 1, f"{part.file.path}: {file_bytes} bytes for {part.count} records")
        return
    if len(page_checksums) != part.pages:
        scan.note_faults("sums", 1, f"{part.sums.path}: {len(page_checksums)} checksums for {part.pages} pages")
        return
    if not part.count:
        return
    page_data = np.memmap(path, np.uint8, "r")
    pages_at_once = max(1, CHUNK_BYTES // table.page_bytes)
    for first_page in range(0, part.pages, pages_at_once):
        chunk = np.array(page_data[first_page * table.page_bytes : (first_page + pages_at_once) * table.page_bytes])
        for page_number, page_offset in enumerate(range(0, len(chunk), table.page_bytes), first_page):
            if xxhash.xxh3_64_intdigest(chunk[page_offset : page_offset + table.page_bytes].data) != int(
                page_checksums[page_number]
            ):
                scan.note_faults("sums", 1, f"{part.file.path}, page {page_number}")
        _scan_records(chunk.view(table.layout.dtype), manifest, f"{part.file.path} from page {first_page}", scan)


def _scan_records(table_records: NDArray[Any], manifest: Manifest, location: str, scan: Scan) -> None:
    layout = scan.table.layout
    scan.record_count += len(table_records)
    scan.fingerprints.append(table_records["fingerprint"])
    if (is_absent := table_records["flags"] == ABSENT_FLAGS).any():
        scan.note_faults("headers", is_absent & (table_records["count"] != 0), f"{location}: count")
        scan.absent_count += int(is_absent.sum())
        table_records = table_records[~is_absent]
    flags, counts = table_records["flags"], table_records["count"].astype(np.int64)
    scan.note_faults("headers", ~are_nightly(flags), f"{location}: flags")
    scan.note_faults("headers", table_records["scored_at"] != manifest.data_until, f"{location}: scored at another cut")
    numbers = table_records["numbers"]
    is_finite = np.isfinite(numbers).all(axis=1)
    if layout.precision == "i1":
        is_finite &= np.isfinite(table_records["scale"])
    scan.note_faults("finite", ~is_finite, location)
    if layout.kind != "topk":
        scan.note_faults("headers", counts != layout.width, f"{location}: count")
        if layout.kind == "value" and len(table_records):
            record_values = dequantize(layout, table_records, np.float64)
            scan.first_values = record_values[0] if scan.first_values is None else scan.first_values
            scan.differing_count += int((record_values != scan.first_values).any(axis=1).sum())
        return
    item_ordinals, is_used = table_records["items"], np.arange(layout.width) < counts[:, None]
    scan.note_faults("headers", counts > layout.width, f"{location}: count")
    scan.note_faults("slots", ((item_ordinals != NO_ITEM) != is_used).any(axis=1), f"{location}: unused slots")
    scan.note_faults("ordinals", ((item_ordinals >= manifest.items.count) & is_used).any(axis=1), location)
    sorted_ordinals = np.sort(item_ordinals, axis=1)
    is_repeated = (sorted_ordinals[:, 1:] == sorted_ordinals[:, :-1]) & (sorted_ordinals[:, 1:] != NO_ITEM)
    scan.note_faults("twice", is_repeated.any(axis=1), location)
    # Records with the same exponent: the stored numbers have the order of the scores.
    is_rising = (numbers[:, 1:] > numbers[:, :-1]) & is_used[:, 1:]
    scan.note_faults("order", is_rising.any(axis=1), location)
    scan.empty_count += int((counts == 0).sum())
    scan.lists_by_length += np.bincount(counts.clip(0, layout.width), minlength=layout.width + 1)
    used_ordinals = item_ordinals[is_used]
    scan.slots_by_item += np.bincount(
        used_ordinals[used_ordinals < len(scan.slots_by_item)], minlength=len(scan.slots_by_item)
    )


def _range_bounds(range_index: int, range_count: int) -> tuple[int, int]:
    return (range_index << 64) // range_count, ((range_index + 1) << 64) // range_count - 1
