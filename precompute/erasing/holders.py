"""Generations that still hold an erased entity, looked up in their own files by hash."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cache.errors import CorruptArtefact, StoreError
from cache.format.directory import map_file
from cache.format.ids import hash_ids
from cache.format.manifest import GENERATION, EntityKind, Manifest
from cache.store.artefacts import ArtefactStore, generation_path
from precompute.control.rows import RegistryRow
from precompute.control.states import UNFINISHED
from precompute.erasures.erasure import Erasure
from precompute.erasures.host_records import EntityHolder, copies_on_hosts, left_out
from precompute.partitions import holdout
from precompute.partitions.catalogue import directory_file
from precompute.partitions.shard_files import kinds_of, naming, shard_of
from precompute.sources.unusable import ids_in

Fetch = Callable[[str], Path]
"""Path of a finished file of the generation on this host; raises StoreError when there is none."""


def holders(
    store: ArtefactStore, erasures: Sequence[Erasure], rows: Mapping[str, RegistryRow]
) -> dict[int, tuple[EntityHolder, ...]]:
    """Erasure number -> what still holds its entity; whatever cannot be told counts as holding it.

    `rows` is the registry: an unfinished generation without files may be about to write the entity down.
    """
    stored_generations = [
        generation_id
        for generation_id in store.names("generations")
        if GENERATION.fullmatch(generation_id)
    ]
    unfinished_generations = [
        generation_id
        for generation_id, row in rows.items()
        if row.state in UNFINISHED and generation_id not in stored_generations
    ]
    holders_by_number: dict[int, list[EntityHolder]] = {erasure.number: [] for erasure in erasures}
    for generation in sorted({*stored_generations, *unfinished_generations}):
        for number in _held_by(store, generation, erasures):
            holders_by_number[number].append(EntityHolder(generation))
    copies = _copies(store, but={*stored_generations, *unfinished_generations})
    spared = {
        generation_id: left_out(store, generation_id)
        for generation_id in {copy.generation for copy in copies}
    }
    for copy in copies:
        for number in holders_by_number.keys() - spared[copy.generation]:
            holders_by_number[number].append(copy)
    return {number: tuple(erasure_holders) for number, erasure_holders in holders_by_number.items()}


def _copies(store: ArtefactStore, *, but: Collection[str]) -> list[EntityHolder]:
    """Copies that hosts recorded, and those that lie here unrecorded."""
    recorded = copies_on_hosts(store, but=but)
    unrecorded_generations = (
        set(store.host_copies()) - {copy.generation for copy in recorded} - set(but)
    )
    return [
        *recorded,
        *(EntityHolder(generation, "this host") for generation in sorted(unrecorded_generations)),
    ]


def _held_by(store: ArtefactStore, generation: str, erasures: Sequence[Erasure]) -> Collection[int]:
    def read(name: str) -> bytes | None:
        return store.read(generation_path(generation, name))

    def fetch(name: str) -> Path:
        path = store.fetch(generation_path(generation, name))
        if not path.is_file():
            raise StoreError(f"{name} of {generation} is not there")
        return path

    try:
        raw = read("work/begin.json")
        begin_report: dict[str, Any] | None = None if raw is None else orjson.loads(raw)
        left_out = set((begin_report or {}).get("erased", ()))
        erasures_to_check = [erasure for erasure in erasures if erasure.number not in left_out]
        if not erasures_to_check or begin_report is None:
            return {erasure.number for erasure in erasures_to_check}
        raw = read("manifest.json")
        manifest = None if raw is None else Manifest.from_bytes(raw)
    except (CorruptArtefact, StoreError, orjson.JSONDecodeError):
        return {erasure.number for erasure in erasures}
    held_numbers: set[int] = set()
    for kind in ("user", "item"):
        erasures_of_kind = [erasure for erasure in erasures_to_check if erasure.kind == kind]
        try:
            held_numbers |= (
                _looked_up(kind, erasures_of_kind, begin_report, manifest, fetch)
                if erasures_of_kind
                else set()
            )
        except (CorruptArtefact, StoreError, OSError, KeyError, ValueError, pa.ArrowException):
            held_numbers |= {erasure.number for erasure in erasures_of_kind}
    return held_numbers


def _looked_up(
    kind: EntityKind,
    erasures: Sequence[Erasure],
    begin_report: Mapping[str, Any],
    manifest: Manifest | None,
    fetch: Fetch,
) -> set[int]:
    """Numbers of those in the directory, the partition, the reports or among the interactions beyond the cut."""
    seed, shards = begin_report[f"{kind}_seed"], len(begin_report["bounds"]) - 1
    hashes = hash_ids([erasure.raw for erasure in erasures], seed)
    unusable_ids = ids_in(begin_report.get("unusable", {}))
    unusable_ids |= ids_in({} if manifest is None else manifest.facts.get("unusable", {}))
    held_numbers = {erasure.number for erasure in erasures if erasure.entity in unusable_ids}
    for shard in np.unique(shard_of(hashes, shards)).tolist():
        shard_indices = np.flatnonzero(shard_of(hashes, shards) == shard)
        if kind == "item" or manifest is not None:
            path = fetch(directory_file(kind, shard))
            if path.stat().st_size:
                is_in = np.isin(hashes[shard_indices], map_file(path, "<u8"))
                held_numbers |= {erasures[index].number for index in shard_indices[is_in].tolist()}
        missed = [
            erasures[index]
            for index in shard_indices.tolist()
            if erasures[index].number not in held_numbers
        ]
        if kind == "user" and missed:
            held_numbers |= _in_partition(missed, shard, naming(kinds_of(begin_report)), fetch)
    if len(held_numbers) < len(erasures):
        held_numbers |= _beyond_cut(kind, erasures, fetch)
    return held_numbers


def _in_partition(
    erasures: Sequence[Erasure], shard: int, kinds: Sequence[str], fetch: Fetch
) -> set[int]:
    """Numbers of those in a shard's partition: a user without usable input has no record, but lies there."""
    ids = pa.array([erasure.entity for erasure in erasures], pa.string())
    held_numbers = set()
    for name in kinds:
        with pa.memory_map(str(fetch(f"work/partition/{shard:04d}.{name}"))) as source:
            users = pa.ipc.open_stream(source).read_all().column("user")
            is_in = pc.is_in(ids, value_set=pc.unique(users)).to_pylist()
        held_numbers |= {
            erasure.number
            for erasure, is_present in zip(erasures, is_in, strict=True)
            if is_present
        }
    return held_numbers


def _beyond_cut(kind: EntityKind, erasures: Sequence[Erasure], fetch: Fetch) -> set[int]:
    items_by_user: dict[str, list[str]] = orjson.loads(fetch(holdout.FILE).read_bytes())
    names = (
        set(items_by_user)
        if kind == "user"
        else {item for items in items_by_user.values() for item in items}
    )
    return {erasure.number for erasure in erasures if erasure.entity in names}
