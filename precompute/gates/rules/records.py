"""Gates on records: every entity has exactly one, and each record is complete."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.format.directory import Directory
from cache.format.ids import FINGERPRINT_SEED, hash_ids
from cache.format.manifest import Table
from cache.records import ABSENT_FLAGS
from precompute.gates.evidence.candidate import (
    Candidate,
    Measurement,
    at_least,
    at_most,
    integrity,
    judgement,
    none_of,
    not_measured,
)
from precompute.gates.evidence.user_sample import read_user_ids, sampled_shards
from precompute.partitions.catalogue import item_id_texts
from precompute.sources.columns import text_hashes
from precompute.sources.plausibility import unknown_item_share
from precompute.sources.readers import EVENT_INTERACTIONS_SOURCE
from precompute.sources.unusable import UNKNOWN_ITEMS_NAMED_FIELD, find_worst_source
from precompute.sources.vocabulary import CHUNK_ROWS_MAX

VECTORS_AT_ONCE: Final = 16_384

_LIST_FAULT_TEXTS = {
    "slots": "lists with a hole, or with items after their end",
    "ordinals": "lists with an item that the item table does not have",
    "twice": "lists with an item twice",
    "order": "lists whose scores rise",
}


@integrity("page_sums")
def page_sums(candidate: Candidate) -> Measurement:
    """Check that page files are complete, and that their pages have the checksums that Redis is compared with."""
    return _count_faults(candidate, {"pages": "page file", "sums": "page checksum"})


@integrity("record_headers")
def record_headers(candidate: Candidate) -> Measurement:
    """Check format, count and time of every record."""
    return _count_faults(candidate, {"headers": "record header"})


@integrity("finite")
def finite(candidate: Candidate) -> Measurement:
    """Check that no number of a record or an item vector is NaN or infinite."""
    vectors = candidate.items.vectors
    for first_row in range(0, len(vectors), VECTORS_AT_ONCE):
        nonfinite_count = int((~np.isfinite(vectors[first_row : first_row + VECTORS_AT_ONCE]).all(axis=1)).sum())
        if nonfinite_count:
            return none_of(nonfinite_count, "item vectors with a number that is not finite")
    return _count_faults(candidate, {"finite": "records with a number that is not finite"})


@integrity("lists_whole")
def lists_whole(candidate: Candidate) -> Measurement:
    """Check that lists name items of the item table, each once, best first, without a hole."""
    return _count_faults(candidate, _LIST_FAULT_TEXTS)


@judgement("empty_lists")
def empty_lists(candidate: Candidate) -> Measurement:
    """Measure the share of users without any item, in the worst table."""
    empty_share_by_table = {
        table_name: scan.empty_count / max(1, scan.record_count - scan.absent_count)
        for table_name, scan in candidate.evidence.unfiltered_scans.items()
        if scan.table.kind == "topk"
    }
    worst = max(empty_share_by_table, key=lambda table_name: empty_share_by_table[table_name], default="")
    return at_most(empty_share_by_table.get(worst, 0.0), candidate.thresholds.empty_lists, f"in {worst}")


@judgement("short_lists")
def short_lists(candidate: Candidate) -> Measurement:
    """Measure the share of lists shorter than K although the catalogue, without exclusions, has enough items.

    It is the night's count over all users, and a count over a sample of users and all items.
    """
    facts, evidence = candidate.manifest.facts, candidate.evidence
    short_share_by_table = {"the night's own count": facts["short_lists"] / max(1, facts["users_scored"])}
    seen_counts = evidence.seen_items.indptr[1:] - evidence.seen_items.indptr[:-1]
    for table_name, scan in evidence.unfiltered_scans.items():
        if scan.table.kind != "topk":
            continue
        width, item_count = scan.table.layout.width, candidate.items.count
        if scan.table.entity == "user":
            records = evidence.records_of(scan.table, evidence.users.directory_positions)
            is_present = records["flags"] != ABSENT_FLAGS
            list_lengths, possible_lengths = (
                records["count"][is_present],
                (item_count - seen_counts[is_present]).clip(0, width),
            )
            short_share_by_table[table_name] = (
                float((list_lengths < possible_lengths).mean()) if len(list_lengths) else 0.0
            )
        else:
            short_count = int(scan.lists_by_length[: min(width, item_count - 1)].sum())
            short_share_by_table[table_name] = short_count / max(1, scan.record_count)
    worst = max(short_share_by_table, key=lambda table_name: short_share_by_table[table_name])
    return at_most(short_share_by_table[worst], candidate.thresholds.short_lists, f"in {worst}")


def _count_faults(candidate: Candidate, text_by_fault_kind: dict[str, str]) -> Measurement:
    fault_count, fault_note = 0, ""
    for table_name, scan in candidate.evidence.scans.items():
        for fault_kind, fault_text in text_by_fault_kind.items():
            fault_count += scan.fault_counts[fault_kind]
            if scan.fault_counts[fault_kind] and not fault_note:
                fault_note = f"{fault_text} in {table_name}: {scan.first_location_by_fault[fault_kind]}"
    return none_of(fault_count, fault_note)


@judgement("coverage_of_source")
def coverage_of_source(candidate: Candidate) -> Measurement:
    """Measure the share of the sources' users with an answer, in the worst table.

    It is the night's count, and a count of the users with a record in the partition's own files.
    """
    manifest, user_sample, evidence = (candidate.manifest, candidate.evidence.users, candidate.evidence)
    source_user_count = max(1, manifest.facts["users_in_source"])
    recorded_user_count = manifest.entity_sets["user"].count
    answer_count_by_table = {
        table_name: recorded_user_count - scan.absent_count
        for table_name, scan in evidence.unfiltered_scans.items()
        if scan.table.entity == "user"
    }
    worst = min(answer_count_by_table, key=lambda table_name: answer_count_by_table[table_name], default="")
    counted_coverage = answer_count_by_table.get(worst, recorded_user_count) / source_user_count
    sampled_coverage = user_sample.recorded_user_count / max(1, user_sample.source_user_count)
    note = (
        f"{answer_count_by_table.get(worst, recorded_user_count):,} of {source_user_count:,} users"
        f"{f' in {worst}' if worst else ''}"
    )
    if lacking := user_sample.unrecorded_by_missing_input:
        lacking_text = ", ".join(f"{user_count:,} {missing_input}" for missing_input, user_count in lacking.items())
        note += f"; of {user_sample.source_user_count:,} users that were checked these lack an input: {lacking_text}"
    return at_least(min(counted_coverage, sampled_coverage), candidate.thresholds.coverage_of_source, note)


@judgement("coverage_of_live")
def coverage_of_live(candidate: Candidate) -> Measurement:
    """Compare the number of users with the live generation's."""
    return _against_live(candidate, "user", candidate.thresholds.coverage_of_live)


@judgement("items_of_live")
def items_of_live(candidate: Candidate) -> Measurement:
    """Compare the number of items with the live generation's: neither far fewer nor far more."""
    thresholds = candidate.thresholds
    measurement = _against_live(candidate, "item", thresholds.items_of_live)
    if (
        measurement.passed
        and isinstance(measurement.measured_value, float)
        and measurement.measured_value > thresholds.items_of_live_most
    ):
        return at_most(
            measurement.measured_value, thresholds.items_of_live_most, measurement.note, measurement.baseline_generation
        )
    return measurement


def _against_live(candidate: Candidate, entity: str, threshold: float) -> Measurement:
    if candidate.live is None:
        return candidate.uncompared_measurement(threshold)
    live_count, candidate_count = (
        manifest.entity_sets[entity].count for manifest in (candidate.live, candidate.manifest)
    )
    live_count -= _erased_of_live(candidate, entity)
    return at_least(
        candidate_count / max(1, live_count),
        threshold,
        f"{candidate_count:,} {entity}s, {live_count:,} before",
        candidate.baseline_generation,
    )


def _erased_of_live(candidate: Candidate, entity: str) -> int:
    """Return how many of the live generation's entities were erased, and so do not count as missing."""
    evidence, erased = candidate.evidence, candidate.erased
    if entity == "user" and erased.users and evidence.live_user_directory is not None:
        hashes = hash_ids(sorted(erased.users), evidence.live_user_directory.seed)
        return int((evidence.live_user_directory.find_positions(hashes) >= 0).sum())
    if entity == "item" and erased.items and evidence.live_items is not None:
        return int((evidence.live_items.ordinals_of(sorted(erased.items)) >= 0).sum())
    return 0


@integrity("directories_sorted")
def directories_sorted(candidate: Candidate) -> Measurement:
    """Check that hashes ascend strictly within their shard's range: no entity twice, none in a wrong shard."""
    expected_order = "strictly ascending"
    for entities in candidate.manifest.entity_sets.values():
        directory = Directory.open(candidate.root, entities)
        if directory.count != entities.count:
            return Measurement(False, directory.count, entities.count, f"{entities.name}: count")
        filled_parts = [part for part in directory.hash_parts if len(part)]
        neighbouring_parts = zip(filled_parts[1:], filled_parts, strict=False)
        is_ascending = all(_is_ascending(part) for part in filled_parts) and all(
            later[0] > earlier[-1] for later, earlier in neighbouring_parts
        )
        has_right_starts = all(
            not len(part) or part[0] >= np.uint64(entry.first_hash)
            for part, entry in zip(directory.hash_parts, entities.parts, strict=True)
        )
        if not (is_ascending and has_right_starts):
            return Measurement(False, "out of order", expected_order, entities.name)
    return Measurement(True, expected_order, expected_order)


def _is_ascending(id_hashes: NDArray[np.uint64]) -> bool:
    chunk_starts = range(0, len(id_hashes), CHUNK_ROWS_MAX)
    chunks = (id_hashes[start : start + CHUNK_ROWS_MAX + 1] for start in chunk_starts)
    return all(bool((chunk[1:] > chunk[:-1]).all()) for chunk in chunks)


@integrity("known_ids")
def known_ids(candidate: Candidate) -> Measurement:
    """Check that every hash of a directory is of an id in the sources or the item table."""
    directories = candidate.evidence.directories
    hashes = text_hashes(item_id_texts(candidate.items), directories["item"].seed)
    wrong_count = int((hashes != directories["item"].hashes()).sum())
    if wrong_count or not _is_ascending(hashes):
        return none_of(max(1, wrong_count), "items whose id and place differ, or twice")
    entities, unknown_count = candidate.manifest.entity_sets["user"], 0
    for shard in sampled_shards(entities):
        shard_hashes = directories["user"].hash_parts[shard]
        is_named = np.zeros(len(shard_hashes), np.bool_)
        for _, positions in named_entities(candidate, shard):
            is_named[positions] = True
        unknown_count += int((~is_named).sum())
    return none_of(unknown_count, "users with a record whom the sources do not name")


def named_entities(candidate: Candidate, shard: int) -> Iterator[tuple[Any, NDArray[np.int64]]]:
    """Yield (Arrow strings, their positions) of a shard's users that the sources name and that have a record."""
    entities = candidate.manifest.entity_sets["user"]
    shard_hashes = candidate.evidence.directories["user"].hash_parts[shard]
    for user_ids in read_user_ids(candidate.root / "work/partition", shard) if len(shard_hashes) else ():
        hashes = text_hashes(user_ids, entities.seed)
        positions = np.minimum(shard_hashes.searchsorted(hashes), len(shard_hashes) - 1)
        is_known = shard_hashes[positions] == hashes
        yield user_ids.filter(pa.array(is_known)), positions[is_known]


@integrity("record_ids")
def record_ids(candidate: Candidate) -> Measurement:
    """Check that each record has the fingerprint of the id at its position, in every table, and that none is repeated.

    All items are checked, and all users whose partition files gates read.
    """
    wrong_count, note = 0, ""
    tables = list(candidate.manifest.stored_tables.values())
    fault_count_by_table = {table.name: _count_out_of_place(candidate, table) for table in tables}
    complete_tables = [table for table in tables if not fault_count_by_table[table.name]]
    for table in complete_tables:
        fault_count_by_table[table.name] = candidate.evidence.scans[table.name].fingerprints.count_repeated()
    for entity, first_position, expected_fingerprints in _expected_fingerprints(candidate):
        for table in complete_tables:
            if table.entity == entity:
                fingerprints = candidate.evidence.scans[table.name].fingerprints.read(
                    first_position, len(expected_fingerprints)
                )
                misplaced = (fingerprints != expected_fingerprints) & (expected_fingerprints != 0)
                fault_count_by_table[table.name] += int(np.count_nonzero(misplaced))
    for table_name, fault_count in fault_count_by_table.items():
        note = note or (f"records of {table_name} that belong to another entity, or twice" if fault_count else "")
        wrong_count += fault_count
    return none_of(wrong_count, note)


def _count_out_of_place(candidate: Candidate, table: Table) -> int:
    """Return by how many records a table and its directory differ; at least 1 if their parts differ."""
    scan, directory = (candidate.evidence.scans[table.name], candidate.evidence.directories[table.entity])
    counts = [part.count for part in table.parts]
    if counts != [len(part) for part in directory.hash_parts] or scan.record_count != directory.count:
        return int(max(1, abs(scan.record_count - directory.count)))
    return 0


def _expected_fingerprints(candidate: Candidate) -> Iterator[tuple[str, int, NDArray[np.uint64]]]:
    """Yield (entity, first position, fingerprints), for a shard of users at a time; 0 for an unknown id."""
    yield "item", 0, text_hashes(item_id_texts(candidate.items), FINGERPRINT_SEED)
    parts = candidate.evidence.directories["user"].hash_parts
    first_positions = np.cumsum([0, *map(len, parts)]).tolist()
    for shard in sampled_shards(candidate.manifest.entity_sets["user"]):
        expected_fingerprints = np.zeros(len(parts[shard]), np.uint64)
        for user_ids, positions in named_entities(candidate, shard):
            expected_fingerprints[positions] = text_hashes(user_ids, FINGERPRINT_SEED)
        yield "user", first_positions[shard], expected_fingerprints


@judgement("unusable_rows")
def unusable_rows(candidate: Candidate) -> Measurement:
    """Measure the share of unusable rows, values and answers, in the worst source; a single one always passes.

    It does not pass if the threshold is 0. Values that events set are reported, but not judged: one sender could block
    every night.
    """
    threshold = candidate.thresholds.unusable_rows
    unusable_by_source: dict[str, Any] = candidate.manifest.facts.get("unusable", {})
    worst_source_name, share = find_worst_source(unusable_by_source, threshold)
    if not worst_source_name:  # the night was begun by a release without these counts
        return not_measured(threshold, "nothing was counted")
    worst_source_counts = unusable_by_source[worst_source_name]
    note = f"{worst_source_counts['left_out']:,} of {worst_source_counts['rows']:,} of {worst_source_name}"
    reasons_text = "; ".join(
        f"{reason}: {reason_counts['rows']:,}" for reason, reason_counts in worst_source_counts["reasons"].items()
    )
    return Measurement(
        share <= threshold, round(share, 6), threshold, f"{note}: {reasons_text}" if reasons_text else note
    )


@judgement("unknown_items")
def unknown_items(candidate: Candidate) -> Measurement:
    """Measure the share of the team's interactions whose item the catalogue lacks: ids may be in another form."""
    threshold, facts = candidate.thresholds.unknown_items, candidate.manifest.facts
    event_rows = facts.get("unusable", {}).get(EVENT_INTERACTIONS_SOURCE, {}).get("rows", 0)
    interaction_count, unknown_count = (facts["interactions"], facts["interactions_with_unknown_items"])
    share = unknown_item_share(interaction_count, unknown_count, event_rows)
    if share is None:
        return not_measured(threshold, "too few interactions")
    note = f"{unknown_count:,} of {interaction_count:,} interactions name items that the catalogue does not have"
    if unknown_ids := facts.get(UNKNOWN_ITEMS_NAMED_FIELD):
        note += f", such as {' and '.join(map(repr, unknown_ids))}"
    return at_most(share, threshold, note)
