"""Gate on records that were copied: computed again in full, by the night's own code, they have the same bytes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final
from zlib import crc32

import numpy as np

from cache.format.directory import map_file
from precompute.builds.build import Build, open_bundle
from precompute.builds.reports import (
    BEGIN_REPORT,
    EMBED_ITEMS_REPORT,
    NO_BASE_ENTRY,
    shard_report_name,
)
from precompute.gates.evidence.candidate import Candidate, Measurement, integrity
from precompute.gates.evidence.user_sample import sampled_shards
from precompute.partitions.shard_files import PARTITION_FOLDER
from precompute.partitions.shard_input import scratch_folder
from precompute.scoring.copies import INPUTS, reasons_file
from precompute.scoring.items import ItemWork
from precompute.scoring.programs import computed_by
from precompute.scoring.scorers import Scorers
from precompute.scoring.shard_work import ShardWork
from precompute.scoring.users import recompute_users

USERS: Final = 512
"""Users with copied records that are computed again, over all shards that gates read."""
ITEMS: Final = 256
"""Items that are computed again, likewise."""


@integrity("identity")
def identity(candidate: Candidate) -> Measurement:
    """A random sample of the copied records has the bytes that computing them in full gives."""
    build = candidate.build
    if (
        build is None
        or (build.need_report(BEGIN_REPORT).get("base") or NO_BASE_ENTRY)["generation"] is None
    ):
        return Measurement(True, 0, 0, "nothing was copied")
    shards = sampled_shards(candidate.manifest.entity_sets["user"])
    bundle = open_bundle(build)
    computed_alone = replace(candidate.scoring_hooks, prior=None)
    scorers = Scorers(build.config.device, build.config.device_tasks, computed_alone)
    wrong, looked_at, note, elsewhere = 0, 0, "", []
    for shard in shards:
        # Another processor, or a GPU that is not here, gives a model's outputs other last bits.
        if build.need_report(shard_report_name(shard))["computed_by"] != computed_by(
            scorers.at(shard).device
        ):
            elsewhere.append(shard)
            continue
        users = ShardWork.of(build, bundle, shard, scorers)
        items = ItemWork.of(build, bundle, shard, scorers)
        comparisons = (
            *_users(candidate, users, -(-USERS // len(shards))),
            *_items(candidate, items, shard, -(-ITEMS // len(shards))),
        )
        for table, entity, is_same in comparisons:
            looked_at += 1
            wrong += not is_same
            if not (is_same or note):
                note = f"the record of {entity} in {table} is not what computing it gives"
    summary = f"{looked_at:,} records computed again"
    if elsewhere:
        summary += (
            f"; not those of shards {elsewhere}, which other instructions or devices computed"
        )
    return Measurement(not wrong, wrong, 0, note or summary)


def _seeded_rng(
    candidate: Candidate, shard: int, count: int, sample_size: int
) -> np.random.Generator:
    seed = crc32(f"{candidate.manifest.generation} {shard} {count} {sample_size}".encode())
    return np.random.default_rng(seed)


def _users(
    candidate: Candidate, work: ShardWork, sample_size: int
) -> Iterator[tuple[str, str, bool]]:
    """(table, user, whether the bytes are the same) for some whose records were copied, or some of them."""
    build: Build = work.build
    if build.need_report(shard_report_name(work.number))["users"]["reasons"] is None:
        return
    rows = np.flatnonzero(map_file(build.fetch(reasons_file(work.number)), "u1") != INPUTS)
    rng = _seeded_rng(candidate, work.number, len(rows), sample_size)
    rows = np.sort(rng.choice(rows, min(sample_size, len(rows)), replace=False))
    directory = candidate.evidence.directories["user"]
    first = sum(map(len, directory.parts[: work.number]))
    hashes = np.asarray(directory.parts[work.number])[rows]
    with scratch_folder(build.root / PARTITION_FOLDER) as scratch:
        recomputed_records_by_user_hash = recompute_users(work, hashes, scratch)
    alike = build.need_report(EMBED_ITEMS_REPORT)[
        "regrouped"
    ]  # outputs of other models are not copied
    for name, table in work.tables.items():
        if not alike.get(str(table.value) if table.kind == "value" else "user_tower"):
            continue
        stored_records = candidate.evidence.records_of(
            candidate.manifest.stored_tables[name], first + rows
        )
        for hash_, record in zip(hashes.tolist(), stored_records, strict=True):
            recomputed_bytes = recomputed_records_by_user_hash.get(hash_, {}).get(name)
            yield name, f"the user with hash {hash_:016x}", record.tobytes() == recomputed_bytes


def _items(
    candidate: Candidate, work: ItemWork, shard: int, sample_size: int
) -> Iterator[tuple[str, str, bool]]:
    """(table, item, whether the bytes are the same) for some of the shard's items."""
    bounds = work.build.need_report(BEGIN_REPORT)["bounds"]
    rows = np.arange(bounds[shard], bounds[shard + 1])
    rng = _seeded_rng(candidate, shard, len(rows), sample_size)
    rows = np.sort(rng.choice(rows, min(sample_size, len(rows)), replace=False))
    alike = work.build.need_report(EMBED_ITEMS_REPORT)["regrouped"]
    for name, table in work.tables.items():
        if table.kind == "value" and not alike.get(str(table.value)):
            continue
        stored_records = candidate.evidence.records_of(candidate.manifest.stored_tables[name], rows)
        recomputed_records = work.records(name, rows)
        for row, recomputed_record, theirs in zip(
            rows.tolist(), recomputed_records, stored_records, strict=True
        ):
            yield name, work.items.id_of(row), recomputed_record.tobytes() == theirs.tobytes()
