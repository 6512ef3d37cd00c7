"""Holders of an erased entity: generations, by their own files, and hosts, by the copies that they recorded."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cache.control.control_keys import RegistryRow
from cache.control.states import GenerationState
from cache.errors import Conflict, CorruptArtefact, StoreError
from cache.format.directory import map_file
from cache.format.ids import hash_ids
from cache.format.manifest import GENERATION_PATTERN, EntityKind, Manifest
from cache.store.artefacts import COPIES_FOLDER, ArtefactStore, copies_record_path, generation_path
from cache.store.erasures import Erasure
from precompute.builds.reports import BeginReport
from precompute.partitions import holdout
from precompute.partitions.catalogue import directory_file_path
from precompute.partitions.shard_files import partition_file_kinds, shard_of, user_naming_kinds
from precompute.sources.erasures import ErasedEntities
from precompute.sources.unusable import UNKNOWN_ITEMS_NAMED_FIELD, ids_named_in

_LEFT_OUT_FILE = "begun.json"
"""File with the erasures that a generation left out; it outlives the generation's own files."""

FetchFile = Callable[[str], Path]
"""Function that returns the local path of a finished file of the generation, and raises StoreError without one."""


@dataclass(frozen=True, slots=True)
class EntityHolder:
    """Holder of an entity: a generation; or, with `host`, only that host's copies of it.

    The copies exist since `copied_at` (Unix seconds, by that host's clock).
    """

    generation: str
    host: str = ""
    copied_at: float = 0.0

    @property
    def is_copy(self) -> bool:
        """True if this is a copy on a host, not the generation in the store."""
        return bool(self.host)


def holders_by_erasure_number(
    store: ArtefactStore, erasures: Sequence[Erasure], registry_rows: Mapping[str, RegistryRow]
) -> dict[int, tuple[EntityHolder, ...]]:
    """Return erasure number -> holders of its entity; a generation that cannot be checked counts as a holder.

    `registry_rows` is the registry: an unfinished generation without files may be about to write the entity, and one
    whose files a store that was put back lacks has pages in Redis until it is retired.
    """
    stored_generations = [
        generation_id for generation_id in store.names("generations") if GENERATION_PATTERN.fullmatch(generation_id)
    ]
    generations_without_files = [
        generation_id
        for generation_id, row in registry_rows.items()
        if row.state is not GenerationState.RETIRED and generation_id not in stored_generations
    ]
    holders_by_number: dict[int, list[EntityHolder]] = {erasure.number: [] for erasure in erasures}
    for generation in sorted({*stored_generations, *generations_without_files}):
        for erasure_number in _held_erasure_numbers(store, generation, erasures):
            holders_by_number[erasure_number].append(EntityHolder(generation))
    copies = _list_copies(store, left_out_generations={*stored_generations, *generations_without_files})
    left_out_by_generation = {
        generation_id: left_out_erasures(store, generation_id) for generation_id in {copy.generation for copy in copies}
    }
    for copy in copies:
        for erasure_number in holders_by_number.keys() - left_out_by_generation[copy.generation]:
            holders_by_number[erasure_number].append(copy)
    return {erasure_number: tuple(erasure_holders) for erasure_number, erasure_holders in holders_by_number.items()}


def _list_copies(store: ArtefactStore, *, left_out_generations: Collection[str]) -> list[EntityHolder]:
    """Return the copies that hosts recorded, and unrecorded copies on this host."""
    recorded_copies = copies_on_hosts(store, left_out_generations=left_out_generations)
    unrecorded_generations = (
        set(store.host_copy_generations()) - {copy.generation for copy in recorded_copies} - set(left_out_generations)
    )
    return [*recorded_copies, *(EntityHolder(generation, "this host") for generation in sorted(unrecorded_generations))]


def _held_erasure_numbers(store: ArtefactStore, generation: str, erasures: Sequence[Erasure]) -> Collection[int]:
    def read(file_name: str) -> bytes | None:
        return store.read(generation_path(generation, file_name))

    def fetch(file_name: str) -> Path:
        local_path = store.fetch(generation_path(generation, file_name))
        if not local_path.is_file():
            raise StoreError(f"{file_name} of {generation} is missing")
        return local_path

    try:
        raw_document = read("work/begin.json")
        begin_report: BeginReport | None = None if raw_document is None else orjson.loads(raw_document)
        left_out_numbers = set(() if begin_report is None else begin_report.get("erased", ()))
        erasures_to_check = [erasure for erasure in erasures if erasure.number not in left_out_numbers]
        if not erasures_to_check or begin_report is None:
            return {erasure.number for erasure in erasures_to_check}
        raw_document = read("manifest.json")
        manifest = None if raw_document is None else Manifest.from_bytes(raw_document)
    except (CorruptArtefact, StoreError, orjson.JSONDecodeError):
        return {erasure.number for erasure in erasures}
    held_numbers: set[int] = set()
    for kind in ("user", "item"):
        erasures_of_kind = [erasure for erasure in erasures_to_check if erasure.kind == kind]
        try:
            held_numbers |= (
                _find_held_erasures(kind, erasures_of_kind, begin_report, manifest, fetch)
                if erasures_of_kind
                else set()
            )
        except (CorruptArtefact, StoreError, OSError, KeyError, ValueError, pa.ArrowException):
            held_numbers |= {erasure.number for erasure in erasures_of_kind}
    return held_numbers


def _find_held_erasures(
    kind: EntityKind,
    erasures: Sequence[Erasure],
    begin_report: BeginReport,
    manifest: Manifest | None,
    fetch: FetchFile,
) -> set[int]:
    """Return the numbers of erasures whose entity the generation's files or reports name.

    They are its directory, partition, reports, and interactions beyond the cut.
    """
    seed = begin_report["user_seed"] if kind == "user" else begin_report["item_seed"]
    shard_count = len(begin_report["bounds"]) - 1
    hashes = hash_ids([erasure.raw_id for erasure in erasures], seed)
    unusable_ids = ids_named_in(begin_report.get("unusable", {}))
    unusable_ids |= ids_named_in({} if manifest is None else manifest.facts.get("unusable", {}))
    if kind == "item":
        unusable_ids |= set(begin_report.get(UNKNOWN_ITEMS_NAMED_FIELD, ()))
    held_numbers = {erasure.number for erasure in erasures if erasure.entity in unusable_ids}
    for shard in np.unique(shard_of(hashes, shard_count)).tolist():
        shard_indexes = np.flatnonzero(shard_of(hashes, shard_count) == shard)
        if kind == "item" or manifest is not None:
            directory_path = fetch(directory_file_path(kind, shard))
            if directory_path.stat().st_size:
                is_in_directory = np.isin(hashes[shard_indexes], map_file(directory_path, "<u8"))
                held_numbers |= {erasures[index].number for index in shard_indexes[is_in_directory].tolist()}
        missed_erasures = [
            erasures[index] for index in shard_indexes.tolist() if erasures[index].number not in held_numbers
        ]
        if kind == "user" and missed_erasures:
            file_kinds = user_naming_kinds(partition_file_kinds(begin_report.get("user_vectors", False)))
            held_numbers |= _find_in_partition(missed_erasures, shard, file_kinds, fetch)
    if len(held_numbers) < len(erasures):
        held_numbers |= _find_beyond_cut(kind, erasures, fetch)
    return held_numbers


def _find_in_partition(
    erasures: Sequence[Erasure], shard: int, file_kinds: Sequence[str], fetch: FetchFile
) -> set[int]:
    """Return the numbers of erasures found in a shard's partition, which also has users without a record."""
    entity_ids = pa.array([erasure.entity for erasure in erasures], pa.string())
    held_numbers = set()
    for file_kind in file_kinds:
        with pa.memory_map(str(fetch(f"work/partition/{shard:04d}.{file_kind}"))) as mapped_file:
            partition_users = pa.ipc.open_stream(mapped_file).read_all().column("user")
            is_in_partition = pc.is_in(entity_ids, value_set=pc.unique(partition_users)).to_pylist()
        held_numbers |= {
            erasure.number for erasure, is_present in zip(erasures, is_in_partition, strict=True) if is_present
        }
    return held_numbers


def _find_beyond_cut(kind: EntityKind, erasures: Sequence[Erasure], fetch: FetchFile) -> set[int]:
    items_by_user: dict[str, list[str]] = orjson.loads(fetch(holdout.HOLDOUT_FILE).read_bytes())
    held_out_ids = (
        set(items_by_user) if kind == "user" else {item for items in items_by_user.values() for item in items}
    )
    return {erasure.number for erasure in erasures if erasure.entity in held_out_ids}


def copies_on_hosts(store: ArtefactStore, *, left_out_generations: Collection[str] = ()) -> list[EntityHolder]:
    """Return recorded copies of generations other than `left_out_generations`; a local store has none."""
    if store.copies is None:
        return []
    generations_and_hosts = [
        (generation, record_name.removesuffix(".json"))
        for generation in store.names(COPIES_FOLDER)
        if generation not in left_out_generations
        for record_name in store.names(f"{COPIES_FOLDER}/{generation}")
        if record_name.endswith(".json") and record_name != _LEFT_OUT_FILE
    ]
    raw_record_by_path = store.read_many(
        [copies_record_path(*generation_and_host) for generation_and_host in generations_and_hosts]
    )
    return [
        EntityHolder(*generation_and_host, _copied_at(raw_record_by_path[path]))
        for generation_and_host in generations_and_hosts
        if (path := copies_record_path(*generation_and_host)) in raw_record_by_path
    ]


def _copied_at(raw_record: bytes) -> float:
    try:
        return float(orjson.loads(raw_record)["at"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return 0.0  # the name of the record has the host and the generation


def declare_hosts_gone(store: ArtefactStore, host_pattern: str) -> list[EntityHolder]:
    """Forget the copies of hosts that will never run again, by name or pattern; raise Conflict if none matches."""
    copies = copies_on_hosts(store)
    gone_copies = [copy for copy in copies if fnmatchcase(copy.host, host_pattern)]
    if not gone_copies:
        hosts_text = ", ".join(sorted({copy.host for copy in copies})) or "no host"
        raise Conflict(f"no copy is recorded for a host {host_pattern!r}; {hosts_text} has some")
    for copy in gone_copies:
        store.delete(copies_record_path(copy.generation, copy.host))
    return gone_copies


def note_left_out(store: ArtefactStore, generation: str, erased_entities: ErasedEntities) -> None:
    """Record the numbers of the erasures that a generation leaves out, before any host has a copy of it."""
    if store.copies is not None:
        raw_record = orjson.dumps({"erased": list(erased_entities.numbers)})
        store.write(f"{COPIES_FOLDER}/{generation}/{_LEFT_OUT_FILE}", raw_record)


def left_out_erasures(store: ArtefactStore, generation: str) -> set[int]:
    """Return the numbers of the erasures that a generation left out; if unknown, none: all then count as held."""
    raw_record = store.read(f"{COPIES_FOLDER}/{generation}/{_LEFT_OUT_FILE}")
    try:
        return set() if raw_record is None else set(orjson.loads(raw_record)["erased"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return set()


def sweep_left_out_notes(store: ArtefactStore, needed_generations: Collection[str]) -> None:
    """Remove the records of generations that neither a host nor the store has any more."""
    if store.copies is None:
        return
    existing_generations = {*store.names("generations"), *needed_generations}
    for generation in store.names(COPIES_FOLDER):
        if generation not in existing_generations and store.names(f"{COPIES_FOLDER}/{generation}") == [_LEFT_OUT_FILE]:
            store.delete(f"{COPIES_FOLDER}/{generation}")
