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
from precompute.gates.evidence.user_sample import names_of, sampled_shards
from precompute.partitions.catalogue import item_id_texts
from precompute.sources.columns import text_hashes
from precompute.sources.plausibility import unknown_item_share
from precompute.sources.readers import EVENT_INTERACTIONS_SOURCE
from precompute.sources.unusable import UNKNOWN_ITEMS_NAMED_FIELD, find_worst_source
from precompute.sources.vocabulary import CHUNK_ROWS_MAX

VECTORS_AT_ONCE: Final = 16_384

_LIST_FAULTS = {
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
    for start in range(0, len(vectors), VECTORS_AT_ONCE):
        nonfinite_count = int(
            (~np.isfinite(vectors[start : start + VECTORS_AT_ONCE]).all(axis=1)).sum()
        )
        if nonfinite_count:
            return none_of(nonfinite_count, "item vectors with a number that is not finite")
    return _count_faults(candidate, {"finite": "records with a number that is not finite"})


@integrity("lists_whole")
def lists_whole(candidate: Candidate) -> Measurement:
    """Check that lists name items of the item table, each once, best first, without a hole."""
    return _count_faults(candidate, _LIST_FAULTS)


@judgement("empty_lists")
def empty_lists(candidate: Candidate) -> Measurement:
    """Measure the share of users with no item at all, in the worst table."""
    empty_share_by_table = {
        name: scan.empty / max(1, scan.records - scan.absent)
        for name, scan in candidate.evidence.asked_scans.items()
        if scan.table.kind == "topk"
    }
    worst = max(empty_share_by_table, key=lambda name: empty_share_by_table[name], default="")
    return at_most(
        empty_share_by_table.get(worst, 0.0), candidate.thresholds.empty_lists, f"in {worst}"
    )


@judgement("short_lists")
def short_lists(candidate: Candidate) -> Measurement:
    """Measure the share of lists shorter than K although the catalogue, without exclusions, has enough.

    As the night counted them over all users, and as a sample of users and all items have them.
    """
    facts, evidence = candidate.manifest.facts, candidate.evidence
    short_share_by_table = {
        "the night's own count": facts["short_lists"] / max(1, facts["users_scored"])
    }
    seen_counts = evidence.seen_items.indptr[1:] - evidence.seen_items.indptr[:-1]
    for name, scan in evidence.asked_scans.items():
        if scan.table.kind != "topk":
            continue
        width, count = scan.table.layout.width, candidate.items.count
        if scan.table.entity == "user":
            records = evidence.records_of(scan.table, evidence.users.positions)
            is_present = records["flags"] != ABSENT_FLAGS
            list_lengths, possible = (
                records["count"][is_present],
                (count - seen_counts[is_present]).clip(0, width),
            )
            short_share_by_table[name] = (
                float((list_lengths < possible).mean()) if len(list_lengths) else 0.0
            )
        else:
            short = int(scan.counts[: min(width, count - 1)].sum())
            short_share_by_table[name] = short / max(1, scan.records)
    worst = max(short_share_by_table, key=lambda name: short_share_by_table[name])
    return at_most(short_share_by_table[worst], candidate.thresholds.short_lists, f"in {worst}")


def _count_faults(candidate: Candidate, kinds: dict[str, str]) -> Measurement:
    count, fault_note = 0, ""
    for name, scan in candidate.evidence.scans.items():
        for kind, fault_text in kinds.items():
            count += scan.faults[kind]
            if scan.faults[kind] and not fault_note:
                fault_note = f"{fault_text} in {name}: {scan.first_location_by_fault[kind]}"
    return none_of(count, fault_note)


@judgement("coverage_of_source")
def coverage_of_source(candidate: Candidate) -> Measurement:
    """Measure the share of the sources' users with an answer, in the worst table.

    As counted by the night, and as the partition's own files name users with a record.
    """
    manifest, users, evidence = candidate.manifest, candidate.evidence.users, candidate.evidence
    named = max(1, manifest.facts["users_in_source"])
    count = manifest.entity_sets["user"].count
    answers = {
        name: count - scan.absent
        for name, scan in evidence.asked_scans.items()
        if scan.table.entity == "user"
    }
    worst = min(answers, key=lambda name: answers[name], default="")
    counted_coverage = answers.get(worst, count) / named
    measured = users.with_record / max(1, users.in_source)
    note = f"{answers.get(worst, count):,} of {named:,} users{f' in {worst}' if worst else ''}"
    if lacking := users.without_record:
        lacking_text = ", ".join(
            f"{count:,} {missing_input}" for missing_input, count in lacking.items()
        )
        note += f"; of {users.in_source:,} that were looked at these lack something: {lacking_text}"
    return at_least(min(counted_coverage, measured), candidate.thresholds.coverage_of_source, note)


@judgement("coverage_of_live")
def coverage_of_live(candidate: Candidate) -> Measurement:
    """Compare the number of users with the live generation's."""
    return _against_live(candidate, "user", candidate.thresholds.coverage_of_live)


@judgement("items_of_live")
def items_of_live(candidate: Candidate) -> Measurement:
    """Compare the number of items with the live generation's: neither far fewer nor far more."""
    thresholds = candidate.thresholds
    measured = _against_live(candidate, "item", thresholds.items_of_live)
    if (
        measured.passed
        and isinstance(measured.value, float)
        and measured.value > thresholds.items_of_live_most
    ):
        return at_most(
            measured.value, thresholds.items_of_live_most, measured.note, measured.baseline
        )
    return measured


def _against_live(candidate: Candidate, entity: str, threshold: float) -> Measurement:
    if candidate.live is None:
        return candidate.uncompared(threshold)
    live_count, candidate_count = (
        manifest.entity_sets[entity].count for manifest in (candidate.live, candidate.manifest)
    )
    live_count -= _erased_of_live(candidate, entity)
    return at_least(
        candidate_count / max(1, live_count),
        threshold,
        f"{candidate_count:,} {entity}s, {live_count:,} before",
        candidate.baseline,
    )


def _erased_of_live(candidate: Candidate, entity: str) -> int:
    """Return how many of the live generation's entities were erased, and so are not missing."""
    evidence, erased = candidate.evidence, candidate.erased
    if entity == "user" and erased.users and evidence.live_users is not None:
        hashes = hash_ids(sorted(erased.users), evidence.live_users.seed)
        return int((evidence.live_users.find_many(hashes) >= 0).sum())
    if entity == "item" and erased.items and evidence.live_items is not None:
        return int((evidence.live_items.ordinals_of(sorted(erased.items)) >= 0).sum())
    return 0


@integrity("directories_sorted")
def directories_sorted(candidate: Candidate) -> Measurement:
    """Check that hashes ascend strictly within their shard's range: no entity twice, none in a wrong place."""
    expected_order = "strictly ascending"
    for entities in candidate.manifest.entity_sets.values():
        directory = Directory.open(candidate.root, entities)
        if directory.count != entities.count:
            return Measurement(False, directory.count, entities.count, f"{entities.name}: count")
        filled = [part for part in directory.parts if len(part)]
        pairs = zip(filled[1:], filled, strict=False)
        ascending = all(_ascends(part) for part in filled) and all(
            later[0] > earlier[-1] for later, earlier in pairs
        )
        starts_well = all(
            not len(part) or part[0] >= np.uint64(entry.first_hash)
            for part, entry in zip(directory.parts, entities.parts, strict=True)
        )
        if not (ascending and starts_well):
            return Measurement(False, "out of order", expected_order, entities.name)
    return Measurement(True, expected_order, expected_order)


def _ascends(hashes: NDArray[np.uint64]) -> bool:
    starts = range(0, len(hashes), CHUNK_ROWS_MAX)
    chunks = (hashes[start : start + CHUNK_ROWS_MAX + 1] for start in starts)
    return all(bool((chunk[1:] > chunk[:-1]).all()) for chunk in chunks)


@integrity("known_ids")
def known_ids(candidate: Candidate) -> Measurement:
    """Check that every hash of a directory is of an id in the sources or the item table."""
    directories = candidate.evidence.directories
    hashes = text_hashes(item_id_texts(candidate.items), directories["item"].seed)
    wrong = int((hashes != directories["item"].hashes()).sum())
    if wrong or not _ascends(hashes):
        return none_of(max(1, wrong), "items whose id and place differ, or twice")
    entities, unknown = candidate.manifest.entity_sets["user"], 0
    for shard in sampled_shards(entities):
        part = directories["user"].parts[shard]
        named = np.zeros(len(part), np.bool_)
        for _, positions in named_entities(candidate, shard):
            named[positions] = True
        unknown += int((~named).sum())
    return none_of(unknown, "users with a record whom the sources do not name")


def named_entities(candidate: Candidate, shard: int) -> Iterator[tuple[Any, NDArray[np.int64]]]:
    """Yield (Arrow strings, their positions) of a shard's users that the sources name and that have a record."""
    entities = candidate.manifest.entity_sets["user"]
    part = candidate.evidence.directories["user"].parts[shard]
    for texts in names_of(candidate.root / "work/partition", shard) if len(part) else ():
        hashes = text_hashes(texts, entities.seed)
        positions = np.minimum(part.searchsorted(hashes), len(part) - 1)
        is_known = part[positions] == hashes
        yield texts.filter(pa.array(is_known)), positions[is_known]


@integrity("record_ids")
def record_ids(candidate: Candidate) -> Measurement:
    """Check that each record has the fingerprint of its position's id, in every table, and that none is repeated.

    All items, and all users whose partition gates read.
    """
    wrong, note = 0, ""
    tables = list(candidate.manifest.stored_tables.values())
    faults = {table.name: _out_of_place(candidate, table) for table in tables}
    complete_tables = [table for table in tables if not faults[table.name]]
    for table in complete_tables:
        faults[table.name] = candidate.evidence.scans[table.name].fingerprints.repeated()
    for entity, start, expected in _expected_fingerprints(candidate):
        for table in complete_tables:
            if table.entity == entity:
                fingerprints = candidate.evidence.scans[table.name].fingerprints.read(
                    start, len(expected)
                )
                misplaced = (fingerprints != expected) & (expected != 0)
                faults[table.name] += int(np.count_nonzero(misplaced))
    for name, fault_count in faults.items():
        note = note or (
            f"records of {name} that belong to another entity, or twice" if fault_count else ""
        )
        wrong += fault_count
    return none_of(wrong, note)


def _out_of_place(candidate: Candidate, table: Table) -> int:
    """Return the number of records too many or too few for the table's directory; at least 1 if its parts differ."""
    scan, directory = (
        candidate.evidence.scans[table.name],
        candidate.evidence.directories[table.entity],
    )
    counts = [part.count for part in table.parts]
    if counts != [len(part) for part in directory.parts] or scan.records != directory.count:
        return int(max(1, abs(scan.records - directory.count)))
    return 0


def _expected_fingerprints(candidate: Candidate) -> Iterator[tuple[str, int, NDArray[np.uint64]]]:
    """Yield (entity, first position, fingerprints), a shard of users at a time; 0 for an unknown id."""
    yield "item", 0, text_hashes(item_id_texts(candidate.items), FINGERPRINT_SEED)
    parts = candidate.evidence.directories["user"].parts
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    for shard in sampled_shards(candidate.manifest.entity_sets["user"]):
        expected = np.zeros(len(parts[shard]), np.uint64)
        for texts, positions in named_entities(candidate, shard):
            expected[positions] = text_hashes(texts, FINGERPRINT_SEED)
        yield "user", starts[shard], expected


@judgement("unusable_rows")
def unusable_rows(candidate: Candidate) -> Measurement:
    """Measure the share of unusable rows, values and answers, in the worst source; a single one always passes.

    Unless the threshold is 0. Values that events set are reported, not judged: one sender could refuse every night.
    """
    threshold = candidate.thresholds.unusable_rows
    unusable_by_source: dict[str, Any] = candidate.manifest.facts.get("unusable", {})
    worst, share = find_worst_source(unusable_by_source, threshold)
    if not worst:  # an older Larder began the night
        return not_measured(threshold, "nothing was counted")
    source = unusable_by_source[worst]
    note = f"{source['left_out']:,} of {source['rows']:,} of {worst}"
    reasons_text = "; ".join(
        f"{reason}: {reason_counts['rows']:,}"
        for reason, reason_counts in source["reasons"].items()
    )
    return Measurement(
        share <= threshold,
        round(share, 6),
        threshold,
        f"{note}: {reasons_text}" if reasons_text else note,
    )


@judgement("unknown_items")
def unknown_items(candidate: Candidate) -> Measurement:
    """Measure the share of the team's interactions whose item the catalogue lacks: ids may be in another form."""
    threshold, facts = candidate.thresholds.unknown_items, candidate.manifest.facts
    event_rows = facts.get("unusable", {}).get(EVENT_INTERACTIONS_SOURCE, {}).get("rows", 0)
    interactions, unknown = facts["interactions"], facts["interactions_with_unknown_items"]
    share = unknown_item_share(interactions, unknown, event_rows)
    if share is None:
        return not_measured(threshold, "too few interactions")
    note = (
        f"{unknown:,} of {interactions:,} interactions name items that the catalogue does not have"
    )
    if named := facts.get(UNKNOWN_ITEMS_NAMED_FIELD):
        note += f", such as {' and '.join(map(repr, named))}"
    return at_most(share, threshold, note)
