"""Evidence of several gates, gathered once and without Redis, with scans of all records."""

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
from cache.format.manifest import FEATURED_USERS, Manifest, Table, TablePart
from cache.model.tower import Histories, Inputs, Tower
from cache.model.tower_spec import TowerSpec
from cache.records import ABSENT_FLAGS, NO_ITEM, are_nightly, dequantize
from cache.store.artefacts import generation_path
from precompute.builds.seal import WITHOUT_INTERACTIONS_FACT
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.bundles.index import vector_lengths
from precompute.gates.evidence.user_sample import UserSample, sample_users
from precompute.partitions.catalogue import (
    ITEM_FEATURES_FILE,
    ItemFeatures,
    item_id_texts,
    ordinals_of_texts,
)
from precompute.partitions.marks import marks_file_path
from precompute.partitions.shard_input import ShardInput
from precompute.scoring.input_samples import with_drawn_histories
from precompute.scoring.towers import bind, usable_inputs
from precompute.sources.columns import text_hashes

CHUNK_BYTES: Final = 16 << 20
"""Bytes of a page file read at once."""

FINGERPRINTS_AT_ONCE: Final = 1 << 22
"""Fingerprints in memory while repeated ones are counted."""

ITEM_STRATUM = 64
"""Items of a stratum at most."""

ITEMS_COMPARED: Final = 2_000
"""Number of items whose values are compared with those in the live generation."""

DRAWN_SEED = 1
"""Seed of drawn histories, which are others than those that the night calibrates on."""


AllowedByManifest = Callable[[Path, Manifest, ItemTable], Mapping[str, NDArray[np.bool_]]]
"""Function that returns masks bool [items] of the allowed items by table, from a folder and its manifest."""


class FingerprintFile:
    """Fingerprints of a table's records in their order, in an unnamed file: 8 bytes each on disk."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long-lived as the scan
        self.count = 0

    def append(self, fingerprints: NDArray[np.uint64]) -> None:
        """Add the fingerprints of the next records."""
        self._file.write(np.ascontiguousarray(fingerprints, np.uint64).data)
        self.count += len(fingerprints)

    def read(self, start: int, count: int) -> NDArray[np.uint64]:
        """Return uint64[count] from a record on."""
        self._file.flush()
        return np.frombuffer(os.pread(self._file.fileno(), 8 * count, 8 * start), np.uint64)

    def repeated(self) -> int:
        """Count repeated fingerprints in ranges of the 64 bits, so that few are in memory at a time."""
        ranges = -(-self.count // FINGERPRINTS_AT_ONCE)
        return sum(self._repeated_in(number, ranges) for number in range(ranges))

    def _repeated_in(self, number: int, ranges: int) -> int:
        first, last = (np.uint64(bound) for bound in _range_bounds(number, ranges))
        parts_in_range = [np.empty(0, np.uint64)]
        for start in range(0, self.count, FINGERPRINTS_AT_ONCE):
            fingerprints = self.read(start, min(FINGERPRINTS_AT_ONCE, self.count - start))
            parts_in_range.append(fingerprints[(fingerprints >= first) & (fingerprints <= last)])
        fingerprints = np.sort(np.concatenate(parts_in_range))
        return int((fingerprints[1:] == fingerprints[:-1]).sum())


@dataclass(slots=True, eq=False)
class Scan:
    """Result of a scan of one table; `faults` counts by kind, `first_location_by_fault` locates each kind's first.

    `absent`: records that answer nothing, for entities with an answer in another table of their directory.

    For lists: `slots` int64[items] counts how often an item is in one, `empty` the lists without an item, `counts`
    int64[K + 1] the lists by length. For values: `first_values` are those of the first record, `differing` counts the
    records with others.
    """

    table: Table
    slots: NDArray[np.int64]
    counts: NDArray[np.int64]
    records: int = 0
    absent: int = 0
    empty: int = 0
    first_values: NDArray[np.float64] | None = None
    differing: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    first_location_by_fault: dict[str, str] = field(default_factory=dict)
    fingerprints: FingerprintFile = field(default_factory=FingerprintFile)

    def note(self, kind: str, faults: Any, where: str) -> None:
        """Count faults: bool[n] of a chunk's records, or a number of cases."""
        count = int(np.count_nonzero(faults)) if isinstance(faults, np.ndarray) else int(faults)
        if count:
            first = (
                f", record {int(np.argmax(faults))} of the chunk"
                if isinstance(faults, np.ndarray)
                else ""
            )
            self.faults[kind] += count
            self.first_location_by_fault.setdefault(kind, f"{where}{first}")


class Evidence:
    """Facts of one candidate, gathered at first use; one that cannot be gathered raises in every gate that uses it."""

    def __init__(
        self,
        manifest: Manifest,
        root: Path,
        items: ItemTable,
        history_limit: int,
        live: Manifest | None,
        live_root: Path | None,
        allowed_items: tuple[AllowedByManifest, ...] = (),
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
        """Scans of every table, those made under filters included."""
        return {
            name: scan_table(self.root, self.manifest, table)
            for name, table in self.manifest.stored_tables.items()
        }

    @cached_property
    def asked_scans(self) -> Mapping[str, Scan]:
        """Scans of the tables without a filter: lists under a filter may be short, and much alike."""
        tables = self.manifest.tables.items()
        return {name: self.scans[name] for name, table in tables if not table.is_facet}

    @cached_property
    def allowed(self) -> Mapping[str, NDArray[np.bool_]]:
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
            name: Directory.open(self.root, entities)
            for name, entities in self.manifest.entity_sets.items()
        }

    @cached_property
    def bundle(self) -> Bundle:
        """Bundle that `begin` pinned, its own checksums verified."""
        return Bundle.open(self.root / "bundle")

    @cached_property
    def users(self) -> UserSample:
        """Sampled users with their inputs."""
        return sample_users(
            self.root / "work/partition",
            self.manifest.entity_sets["user"],
            self.directories["user"],
            history_limit=self._history_limit,
            set_by_events=self._set_by_events,
            answers_without_history=self._computes_featured,
            counts_featured=self._computes_featured or not self.bundle.needs_history,
        )

    @property
    def _computes_featured(self) -> bool:
        return bool(self.manifest.facts.get(FEATURED_USERS, False))

    @property
    def _set_by_events(self) -> Path | None:
        """File of the users that events set values for; None if some model answers for users with features alone."""
        path = self.root / marks_file_path("user")
        return path if self.bundle.needs_history and path.is_file() else None

    @cached_property
    def live_items(self) -> ItemTable | None:
        """Item table of the live generation; None for the first generation."""
        if self._live is None:
            return None
        if self._live_root is None:
            raise CorruptArtefact(
                f"the files of {generation_path(self._live.generation)} are not here"
            )
        return ItemTable.open(self._live_root, self._live)

    @cached_property
    def live_users(self) -> Directory | None:
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
            raise CorruptArtefact(
                f"the files of {generation_path(self._live.generation)} are not here"
            )
        return Directory.open(self._live_root, self._live.entity_sets[entity])

    @cached_property
    def live_ordinals(self) -> NDArray[np.int64]:
        """Ordinals int64[live items] of the live generation's items; a distinct negative number for a removed one."""
        if self.live_items is None:
            return np.empty(0, np.int64)
        ordinals = ordinals_of_texts(self.items, item_id_texts(self.live_items))
        return np.where(ordinals >= 0, ordinals, -1 - np.arange(len(ordinals)))

    @cached_property
    def users_in_live(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions (here, in the live generation) of the sampled users that both have."""
        if self.live_users is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        hashes = text_hashes(self.users.users.ids, self.live_users.seed)
        live_positions = self.live_users.find_many(hashes)
        return self.users.positions[live_positions >= 0], live_positions[live_positions >= 0]

    @cached_property
    def items_in_live(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions (here, in the live generation) of items, spread over the item table, that both have."""
        directory, live_directory = self.directories["item"], self.live_item_directory
        if live_directory is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        rows = select_spread_rows(np.arange(self.items.count), ITEMS_COMPARED)
        texts = item_id_texts(self.items)
        positions = directory.find_many(text_hashes(texts, directory.seed)[rows])
        live_positions = live_directory.find_many(text_hashes(texts, live_directory.seed)[rows])
        in_both = (positions >= 0) & (live_positions >= 0)
        return positions[in_both], live_positions[in_both]

    @cached_property
    def item_strata(self) -> Mapping[str, NDArray[np.int64]]:
        """Ordinals of items with the longest vectors (head), the shortest, new against the live one, and any."""
        lengths = vector_lengths(self.items.vectors)
        order = np.argsort(-lengths, kind="stable")
        spread = np.unique(np.linspace(0, self.items.count - 1, 2 * ITEM_STRATUM).astype(np.int64))
        strata = {"head": order[:ITEM_STRATUM], "tail": order[-ITEM_STRATUM:], "spread": spread}
        if self.live_items is not None:
            new = np.flatnonzero(ordinals_of_texts(self.live_items, item_id_texts(self.items)) < 0)
            strata["new"] = new[:ITEM_STRATUM]
        return {name: rows for name, rows in strata.items() if len(rows)}

    @cached_property
    def item_rows(self) -> NDArray[np.int64]:
        """Ordinals of all sampled items, ascending."""
        return np.unique(np.concatenate(list(self.item_strata.values())))

    @cached_property
    def _drawn(self) -> ShardInput:
        return with_drawn_histories(
            self.users.users, self.items, self.bundle.metric, seed=DRAWN_SEED
        )

    def compared(self, model: BundleModel) -> ShardInput:
        """Return the users on whose inputs the forms of a model are compared: the sampled ones.

        With drawn histories if the model needs one and users have vectors in its place.
        """
        users = self.users.users
        has_histories = not self.manifest.facts.get(WITHOUT_INTERACTIONS_FACT)
        is_drawn = (
            not has_histories and users.vectors is not None and model.spec.history is not None
        )
        return self._drawn if is_drawn else users

    def user_inputs(
        self, model: BundleModel, users: ShardInput | None = None
    ) -> tuple[Inputs, NDArray[np.int64]]:
        """Return (inputs, their rows) for a user model, of the sampled users or of the given ones."""
        usable, histories, features = usable_inputs(
            self.items, self.users.users if users is None else users, {model.name: model.spec}
        )
        bound = bind(
            model.spec,
            histories=histories.select_rows(usable),
            features={name: value[usable] for name, value in features[model.name].items()},
        )
        return bound, usable

    def item_inputs(self, model: BundleModel, rows: NDArray[np.int64]) -> Inputs:
        """Return the inputs of items for an item model."""
        features, _ = self.item_features(model.spec).of(rows)
        return bind(model.spec, features=features, index=self.items.to_model(Ordinals(rows)))

    def item_rows_for(self, model: BundleModel) -> NDArray[np.int64]:
        """Return the ordinals of the sampled items that have the inputs of an item model."""
        return self.item_rows[self.item_features(model.spec).of(self.item_rows)[1]]

    def item_features(self, spec: TowerSpec) -> ItemFeatures:
        """Return the feature inputs of items, as `begin` pinned them."""
        return ItemFeatures.open(self.root / ITEM_FEATURES_FILE, spec, self.items.count)

    def run(self, model: BundleModel, inputs: Inputs) -> NDArray[np.float32]:
        """Run a model in full precision, from the bundle's own file."""
        return Tower.open(model.path, model.spec).run(inputs)

    @cached_property
    def user_vectors(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Vectors float32 [n, dims] and their rows of the sample: those of the sources, else the tower's."""
        inputs, rows = self.user_inputs(self.bundle.user_tower)
        tower_vectors = self.run(self.bundle.user_tower, inputs)
        vectors = np.full((len(self.users.users.ids), self.bundle.dims), np.nan, np.float32)
        vectors[rows] = tower_vectors
        if (source_vectors := self.users.users.vectors) is not None:
            vectors = np.where(np.isnan(source_vectors), vectors, source_vectors)
        finite = np.isfinite(vectors).all(axis=1)  # whose is not has no record
        return vectors[finite], np.flatnonzero(finite)

    @cached_property
    def seen_items(self) -> Histories:
        """Ordinals of each sampled user's history, which must not be recommended."""
        return Histories(self.users.users.indptr, self.users.users.ordinals)

    def records_of(self, table: Table, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Read the records at positions of the table's directory from the page files."""
        ends = np.cumsum([part.count for part in table.parts])
        parts = np.searchsorted(ends, positions, "right")
        starts = np.concatenate([[0], ends[:-1]])
        return read_records(self.root, table, parts, positions - starts[parts])


def select_spread_rows(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Select at most `count` of the rows, evenly spread."""
    picked = np.linspace(0, len(rows) - 1, min(count, len(rows)))
    return rows[np.unique(picked.astype(np.int64))]


def compared_depth(width: int, items: int) -> int:
    """Return the slots of a list that are compared: 20, fewer if a list would hold most of a small catalogue anyway."""
    return max(1, min(width, 20, items // 8))


def scan_table(root: Path, manifest: Manifest, table: Table) -> Scan:
    """Scan all page files of a table, a chunk in memory at a time."""
    items = manifest.items.count
    scan = Scan(
        table,
        np.zeros(items, np.int64),
        np.zeros(table.layout.width + 1, np.int64),
        fingerprints=FingerprintFile(root),
    )
    for part in table.parts:
        _scan_part(root, manifest, part, scan)
    return scan


def read_records(
    root: Path, table: Table, parts: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[Any]:
    """Read the records at `positions` within `parts` from the page files."""
    records = np.zeros(len(parts), table.layout.dtype)
    for part in np.unique(parts).tolist():
        rows = np.flatnonzero(parts == part)
        file = np.memmap(root / table.parts[part].file.path, table.layout.dtype, "r")
        records[rows] = file[positions[rows]]
    return records


def _scan_part(root: Path, manifest: Manifest, part: TablePart, scan: Scan) -> None:
    table, path = scan.table, root / part.file.path
    size, sums = table.layout.size_bytes, np.fromfile(root / part.sums.path, "<u8")
    found_bytes = path.stat().st_size
    if found_bytes != part.count * size or part.pages != -(-part.count // table.records_per_page):
        scan.note("pages", 1, f"{part.file.path}: {found_bytes} bytes for {part.count} records")
        return
    if len(sums) != part.pages:
        scan.note("sums", 1, f"{part.sums.path}: {len(sums)} checksums for {part.pages} pages")
        return
    if not part.count:
        return
    data = np.memmap(path, np.uint8, "r")
    pages_at_once = max(1, CHUNK_BYTES // table.page_bytes)
    for first in range(0, part.pages, pages_at_once):
        chunk = np.array(
            data[first * table.page_bytes : (first + pages_at_once) * table.page_bytes]
        )
        for page, start in enumerate(range(0, len(chunk), table.page_bytes), first):
            if xxhash.xxh3_64_intdigest(chunk[start : start + table.page_bytes].data) != int(
                sums[page]
            ):
                scan.note("sums", 1, f"{part.file.path}, page {page}")
        _scan_records(
            chunk.view(table.layout.dtype), manifest, f"{part.file.path} from page {first}", scan
        )


def _scan_records(records: NDArray[Any], manifest: Manifest, where: str, scan: Scan) -> None:
    layout = scan.table.layout
    scan.records += len(records)
    scan.fingerprints.append(records["fingerprint"])
    if (is_absent := records["flags"] == ABSENT_FLAGS).any():
        scan.note("headers", is_absent & (records["count"] != 0), f"{where}: count")
        scan.absent += int(is_absent.sum())
        records = records[~is_absent]
    flags, counts = records["flags"], records["count"].astype(np.int64)
    scan.note("headers", ~are_nightly(flags), f"{where}: flags")
    scan.note(
        "headers", records["scored_at"] != manifest.data_until, f"{where}: scored at another cut"
    )
    numbers = records["numbers"]
    finite = np.isfinite(numbers).all(axis=1)
    if layout.precision == "i1":
        finite &= np.isfinite(records["scale"])
    scan.note("finite", ~finite, where)
    if layout.kind != "topk":
        scan.note("headers", counts != layout.width, f"{where}: count")
        if layout.kind == "value" and len(records):
            values = dequantize(layout, records, np.float64)
            scan.first_values = values[0] if scan.first_values is None else scan.first_values
            scan.differing += int((values != scan.first_values).any(axis=1).sum())
        return
    items, used = records["items"], np.arange(layout.width) < counts[:, None]
    scan.note("headers", counts > layout.width, f"{where}: count")
    scan.note("slots", ((items != NO_ITEM) != used).any(axis=1), f"{where}: unused slots")
    scan.note("ordinals", ((items >= manifest.items.count) & used).any(axis=1), where)
    ordered = np.sort(items, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_ITEM)
    scan.note("twice", twice.any(axis=1), where)
    # Records of one exponent: the stored numbers sort as the scores do.
    rising = (numbers[:, 1:] > numbers[:, :-1]) & used[:, 1:]
    scan.note("order", rising.any(axis=1), where)
    scan.empty += int((counts == 0).sum())
    scan.counts += np.bincount(counts.clip(0, layout.width), minlength=layout.width + 1)
    used_items = items[used]
    scan.slots += np.bincount(used_items[used_items < len(scan.slots)], minlength=len(scan.slots))


def _range_bounds(number: int, ranges: int) -> tuple[int, int]:
    return (number << 64) // ranges, ((number + 1) << 64) // ranges - 1
