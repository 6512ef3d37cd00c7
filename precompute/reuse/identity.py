"""Gate on copied records: computing them again with the night's own code gives the same bytes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final
from zlib import crc32

import numpy as np

from cache.format.directory import map_file
from precompute.builds.build import Build, open_bundle
from precompute.builds.reports import BEGIN_REPORT, EMBED_ITEMS_REPORT, NO_BASE_ENTRY, shard_report_name
from precompute.gates.evidence.candidate import Candidate, Measurement, integrity
from precompute.gates.evidence.user_sample import sampled_shards
from precompute.partitions.shard_files import PARTITION_FOLDER
from precompute.partitions.shard_input import scratch_folder
from precompute.scoring.copies import INPUTS_REASON, reasons_path
from precompute.scoring.items import ItemWork
from precompute.scoring.programs import computed_by
from precompute.scoring.scorers import Scorers
from precompute.scoring.shard_work import ShardWork
from precompute.scoring.users import recompute_users

USER_SAMPLE_SIZE: Final = 512
"""Users with copied records that are computed again, over all shards that the gate samples."""
ITEM_SAMPLE_SIZE: Final = 256
"""Items that are computed again, over all shards that the gate samples."""


@integrity("identity")
def identity(candidate: Candidate) -> Measurement:
    """Compare a random sample of the copied records with records computed in full: their bytes must be equal."""
    build = candidate.build
    if build is None or (build.need_report(BEGIN_REPORT).get("base") or NO_BASE_ENTRY)["generation"] is None:
        return Measurement(True, 0, 0, "nothing was copied")
    shards = sampled_shards(candidate.manifest.entity_sets["user"])
    bundle = open_bundle(build)
    hooks_without_prior = replace(candidate.scoring_hooks, open_prior=None)
    scorers = Scorers(build.config.device, build.config.device_tasks, hooks_without_prior)
    wrong_count, compared_count, note, skipped_shards = 0, 0, "", []
    for shard in shards:
        # Another processor, or a GPU missing on this host, changes the last bits of a model's outputs.
        if build.need_report(shard_report_name(shard))["computed_by"] != computed_by(
            scorers.device_of_shard(shard).device
        ):
            skipped_shards.append(shard)
            continue
        user_work = ShardWork.of(build, bundle, shard, scorers)
        item_work = ItemWork.of(build, bundle, shard, scorers)
        comparisons = (
            *_compare_users(candidate, user_work, -(-USER_SAMPLE_SIZE // len(shards))),
            *_compare_items(candidate, item_work, shard, -(-ITEM_SAMPLE_SIZE // len(shards))),
        )
        for table, entity_name, is_same in comparisons:
            compared_count += 1
            wrong_count += not is_same
            if not (is_same or note):
                note = f"the record of {entity_name} in {table} differs from the computed one"
    summary = f"{compared_count:,} records computed again"
    if skipped_shards:
        summary += f"; shards {skipped_shards} skipped, computed with other instructions or devices"
    return Measurement(not wrong_count, wrong_count, 0, note or summary)


def _seeded_rng(candidate: Candidate, shard: int, population_size: int, sample_size: int) -> np.random.Generator:
    seed = crc32(f"{candidate.manifest.generation} {shard} {population_size} {sample_size}".encode())
    return np.random.default_rng(seed)


def _compare_users(candidate: Candidate, work: ShardWork, sample_size: int) -> Iterator[tuple[str, str, bool]]:
    """Yield (table, user, whether the bytes are equal) for a sample of users with copied records."""
    build: Build = work.build
    if build.need_report(shard_report_name(work.shard))["users"]["reasons"] is None:
        return
    copied_rows = np.flatnonzero(map_file(build.fetch(reasons_path(work.shard)), "u1") != INPUTS_REASON)
    rng = _seeded_rng(candidate, work.shard, len(copied_rows), sample_size)
    copied_rows = np.sort(rng.choice(copied_rows, min(sample_size, len(copied_rows)), replace=False))
    directory = candidate.evidence.directories["user"]
    first_position = sum(map(len, directory.hash_parts[: work.shard]))
    hashes = np.asarray(directory.hash_parts[work.shard])[copied_rows]
    with scratch_folder(build.root / PARTITION_FOLDER) as scratch:
        recomputed_records_by_user_hash = recompute_users(work, hashes, scratch)
    is_alike_by_model = build.need_report(EMBED_ITEMS_REPORT)["regrouped"]  # no table of another model is copied
    for table_name, table in work.tables.items():
        if not is_alike_by_model.get(str(table.value) if table.kind == "value" else "user_tower"):
            continue
        stored_records = candidate.evidence.records_of(
            candidate.manifest.stored_tables[table_name], first_position + copied_rows
        )
        for user_hash, stored_record in zip(hashes.tolist(), stored_records, strict=True):
            recomputed_bytes = recomputed_records_by_user_hash.get(user_hash, {}).get(table_name)
            yield (table_name, f"the user with hash {user_hash:016x}", stored_record.tobytes() == recomputed_bytes)


def _compare_items(
    candidate: Candidate, work: ItemWork, shard: int, sample_size: int
) -> Iterator[tuple[str, str, bool]]:
    """Yield (table, item, whether the bytes are equal) for a sample of the shard's items."""
    bounds = work.build.need_report(BEGIN_REPORT)["bounds"]
    ordinals = np.arange(bounds[shard], bounds[shard + 1])
    rng = _seeded_rng(candidate, shard, len(ordinals), sample_size)
    ordinals = np.sort(rng.choice(ordinals, min(sample_size, len(ordinals)), replace=False))
    is_alike_by_model = work.build.need_report(EMBED_ITEMS_REPORT)["regrouped"]
    for table_name, table in work.tables.items():
        if table.kind == "value" and not is_alike_by_model.get(str(table.value)):
            continue
        stored_records = candidate.evidence.records_of(candidate.manifest.stored_tables[table_name], ordinals)
        recomputed_records = work.compute_records(table_name, ordinals)
        for ordinal, recomputed_record, stored_record in zip(
            ordinals.tolist(), recomputed_records, stored_records, strict=True
        ):
            yield (table_name, work.items.id_of(ordinal), recomputed_record.tobytes() == stored_record.tobytes())
