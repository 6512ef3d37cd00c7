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
from precompute.control.rows import Row
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
    store: ArtefactStore, erasures: Sequence[Erasure], rows: Mapping[str, Row]
) -> dict[int, tuple[EntityHolder, ...]]:
    """Erasure number -> what still holds its entity; whatever cannot be told counts as holding it.

    `rows` is the registry: an unfinished generation without files may be about to write the entity down.
    """
    stored = [each for each in store.names("generations") if GENERATION.fullmatch(each)]
    begun = [each for each, row in rows.items() if row.state in UNFINISHED and each not in stored]
    found: dict[int, list[EntityHolder]] = {each.number: [] for each in erasures}
    for generation in sorted({*stored, *begun}):
        for number in _held_by(store, generation, erasures):
            found[number].append(EntityHolder(generation))
    copies = _copies(store, but={*stored, *begun})
    spared = {each: left_out(store, each) for each in {copy.generation for copy in copies}}
    for copy in copies:
        for number in found.keys() - spared[copy.generation]:
            found[number].append(copy)
    return {number: tuple(each) for number, each in found.items()}


def _copies(store: ArtefactStore, *, but: Collection[str]) -> list[EntityHolder]:
    """Copies that hosts recorded, and those that lie here unrecorded."""
    recorded = copies_on_hosts(store, but=but)
    here = set(store.host_copies()) - {each.generation for each in recorded} - set(but)
    return [*recorded, *(EntityHolder(each, "this host") for each in sorted(here))]


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
        begun: dict[str, Any] | None = None if raw is None else orjson.loads(raw)
        left_out = set((begun or {}).get("erased", ()))
        asked = [each for each in erasures if each.number not in left_out]
        if not asked or begun is None:
            return {each.number for each in asked}
        raw = read("manifest.json")
        manifest = None if raw is None else Manifest.from_bytes(raw)
    except (CorruptArtefact, StoreError, orjson.JSONDecodeError):
        return {each.number for each in erasures}
    found: set[int] = set()
    for kind in ("user", "item"):
        ours = [each for each in asked if each.kind == kind]
        try:
            found |= _looked_up(kind, ours, begun, manifest, fetch) if ours else set()
        except (CorruptArtefact, StoreError, OSError, KeyError, ValueError, pa.ArrowException):
            found |= {each.number for each in ours}
    return found


def _looked_up(
    kind: EntityKind,
    erasures: Sequence[Erasure],
    begun: Mapping[str, Any],
    manifest: Manifest | None,
    fetch: Fetch,
) -> set[int]:
    """Numbers of those in the directory, the partition, the reports or among the interactions beyond the cut."""
    seed, shards = begun[f"{kind}_seed"], len(begun["bounds"]) - 1
    hashes = hash_ids([each.raw for each in erasures], seed)
    told = ids_in(begun.get("unusable", {}))
    told |= ids_in({} if manifest is None else manifest.facts.get("unusable", {}))
    found = {each.number for each in erasures if each.entity in told}
    for shard in np.unique(shard_of(hashes, shards)).tolist():
        ours = np.flatnonzero(shard_of(hashes, shards) == shard)
        if kind == "item" or manifest is not None:
            path = fetch(directory_file(kind, shard))
            if path.stat().st_size:
                is_in = np.isin(hashes[ours], map_file(path, "<u8"))
                found |= {erasures[each].number for each in ours[is_in].tolist()}
        missed = [erasures[each] for each in ours.tolist() if erasures[each].number not in found]
        if kind == "user" and missed:
            found |= _in_partition(missed, shard, naming(kinds_of(begun)), fetch)
    if len(found) < len(erasures):
        found |= _beyond_cut(kind, erasures, fetch)
    return found


def _in_partition(
    erasures: Sequence[Erasure], shard: int, kinds: Sequence[str], fetch: Fetch
) -> set[int]:
    """Numbers of those in a shard's partition: a user without usable input has no record, but lies there."""
    ids = pa.array([each.entity for each in erasures], pa.string())
    found = set()
    for name in kinds:
        with pa.memory_map(str(fetch(f"work/partition/{shard:04d}.{name}"))) as source:
            users = pa.ipc.open_stream(source).read_all().column("user")
            is_in = pc.is_in(ids, value_set=pc.unique(users)).to_pylist()
        found |= {each.number for each, there in zip(erasures, is_in, strict=True) if there}
    return found


def _beyond_cut(kind: EntityKind, erasures: Sequence[Erasure], fetch: Fetch) -> set[int]:
    kept: dict[str, list[str]] = orjson.loads(fetch(holdout.FILE).read_bytes())
    names = set(kept) if kind == "user" else {item for items in kept.values() for item in items}
    return {each.number for each in erasures if each.entity in names}
