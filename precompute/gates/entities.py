"""Gates on who has a record: ids neither lost, invented, doubled nor exchanged."""

import numpy as np
from numpy.typing import NDArray

from cache.directory import Directory
from cache.keys import fingerprints, hash_ids
from cache.manifest import Table
from precompute.gates.candidate import Candidate
from precompute.gates.user_sample import read_ids, sampled_shards
from precompute.gates.verdict import Verdict, at_least, none_of


def coverage_of_source(candidate: Candidate) -> Verdict:
    """Users with a record, of all that the sources name: as counted by the night and in the partition's own files."""
    manifest, users = candidate.manifest, candidate.evidence.users
    counted = manifest.entity_sets["user"].count / max(1, manifest.facts["users_in_source"])
    measured = users.with_record / max(1, users.in_source)
    return at_least(
        "coverage_of_source",
        min(counted, measured),
        candidate.thresholds.coverage_of_source,
        f"{manifest.entity_sets['user'].count:,} of {manifest.facts['users_in_source']:,} users",
    )


def coverage_of_live(candidate: Candidate) -> Verdict:
    """Users of this generation against the live one's."""
    return _against_live(
        "coverage_of_live", candidate, "user", candidate.thresholds.coverage_of_live
    )


def items_of_live(candidate: Candidate) -> Verdict:
    """Items of this generation against the live one's."""
    return _against_live("items_of_live", candidate, "item", candidate.thresholds.items_of_live)


def _against_live(rule: str, candidate: Candidate, entity: str, threshold: float) -> Verdict:
    if candidate.live is None:
        return candidate.uncompared(rule, threshold)
    before, now = (each.entity_sets[entity].count for each in (candidate.live, candidate.manifest))
    before -= _erased_of_live(candidate, entity)
    return at_least(
        rule,
        now / max(1, before),
        threshold,
        f"{now:,} {entity}s, {before:,} before",
        candidate.baseline,
    )


def _erased_of_live(candidate: Candidate, entity: str) -> int:
    """How many of the live generation's entities had to go: nobody misses them."""
    evidence, erased = candidate.evidence, candidate.erased
    if entity == "user" and erased.users and evidence.live_users is not None:
        hashes = hash_ids(sorted(erased.users), evidence.live_users.seed)
        return int((evidence.live_users.find_many(hashes) >= 0).sum())
    if entity == "item" and erased.items and evidence.live_items is not None:
        return int((evidence.live_items.ordinals_of(sorted(erased.items)) >= 0).sum())
    return 0


def directories_sorted(candidate: Candidate) -> Verdict:
    """Hashes strictly ascending within their shard's range: no entity twice, none in a wrong place."""
    rule, wanted = "directories_sorted", "strictly ascending"
    for entities in candidate.manifest.entity_sets.values():
        directory = Directory.open(candidate.root, entities)
        hashes = directory.hashes()
        if len(hashes) != entities.count:
            return Verdict(rule, False, len(hashes), entities.count, f"{entities.name}: count")
        ascending = bool((hashes[1:] > hashes[:-1]).all())
        starts_well = all(
            not len(part) or part[0] >= np.uint64(entry.first_hash)
            for part, entry in zip(directory.parts, entities.parts, strict=True)
        )
        if not (ascending and starts_well):
            return Verdict(rule, False, "out of order", wanted, entities.name)
    return Verdict(rule, True, wanted, wanted)


def known_ids(candidate: Candidate) -> Verdict:
    """Every hash of a directory is that of an id which the sources or the item table name."""
    items, directories = candidate.items, candidate.evidence.directories
    raws = [items.raw_id(ordinal) for ordinal in range(items.count)]
    hashes = hash_ids(raws, directories["item"].seed)
    wrong = int((hashes != directories["item"].hashes()).sum())
    if wrong or len(set(raws)) != len(raws):
        return none_of("known_ids", max(1, wrong), "items whose id and place differ, or twice")
    entities, unknown = candidate.manifest.entity_sets["user"], 0
    for shard in sampled_shards(entities):
        named = hash_ids(read_ids(candidate.root / "work/partition", shard), entities.seed)
        unknown += int(np.isin(directories["user"].parts[shard], named, invert=True).sum())
    return none_of("known_ids", unknown, "users with a record whom the sources do not name")


def record_ids(candidate: Candidate) -> Verdict:
    """Each record carries the fingerprint of the id in whose place it lies, in every table, and none comes twice.

    All items, and all users whose partition gates read.
    """
    wrong, noted = 0, ""
    expected = {
        "item": _item_fingerprints(candidate),
        "user": _user_fingerprints(candidate),
    }
    for table in candidate.manifest.tables.values():
        if (found := _misplaced(candidate, table, expected[table.entity])) and not noted:
            noted = f"records of {table.name} that belong to another entity, or twice"
        wrong += found
    return none_of("record_ids", wrong, noted)


def _misplaced(candidate: Candidate, table: Table, expected: NDArray[np.uint64]) -> int:
    scan, directory = (
        candidate.evidence.scans[table.name],
        candidate.evidence.directories[table.entity],
    )
    counts = [part.count for part in table.parts]
    if counts != [len(part) for part in directory.parts] or scan.records != directory.count:
        return int(max(1, abs(scan.records - directory.count)))
    found = np.concatenate([*scan.fingerprints, np.empty(0, np.uint64)])
    known = expected != 0
    misplaced = int(np.count_nonzero((found != expected) & known))
    return misplaced + len(found) - len(np.unique(found))


def _item_fingerprints(candidate: Candidate) -> NDArray[np.uint64]:
    items = candidate.items
    return fingerprints([items.raw_id(ordinal) for ordinal in range(items.count)])


def _user_fingerprints(candidate: Candidate) -> NDArray[np.uint64]:
    """By position; 0 where nobody says whose the record is."""
    directory = candidate.evidence.directories["user"]
    entities, found = candidate.manifest.entity_sets["user"], np.zeros(directory.count, np.uint64)
    for shard in sampled_shards(entities):
        raws = read_ids(candidate.root / "work/partition", shard)
        positions = directory.find_many(hash_ids(raws, entities.seed))
        known = positions >= 0
        found[positions[known]] = fingerprints(raws)[known]
    return found
