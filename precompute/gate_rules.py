"""The rules of the gates: all that a candidate proves by its own figures and the live one's, and by its pages."""

import numpy as np

from cache.directory import Directory
from cache.manifest import Manifest
from precompute.load import BadPage, parts_of, verify_part
from precompute.verdict import Candidate, Verdict, at_least, at_most, worst_of

READ_CHUNK_BYTES = 1 << 20


def maxmemory_policy(candidate: Candidate) -> Verdict:
    """Redis may evict overlays only."""
    return Verdict(
        "maxmemory_policy", True, candidate.control.check_policy(), "volatile-* or noeviction"
    )


def pages_in_redis(candidate: Candidate) -> Verdict:
    """Every page, read back from Redis, has its checksum."""
    client, keys, manifest = candidate.control.client, candidate.control.keys, candidate.manifest
    pages, bad = 0, []
    for part in parts_of(manifest):
        # Every part is read, also after a bad one: one more `load` must repair them all.
        try:
            pages += verify_part(
                client, keys, manifest, candidate.root, part, chunk_bytes=READ_CHUNK_BYTES
            )
        except BadPage as error:
            bad.append(error.message)
    return Verdict(
        "pages_in_redis",
        not bad,
        pages,
        manifest_pages(manifest),
        bad[0] if bad else "pages whose checksum matched",
    )


def manifest_pages(manifest: Manifest) -> int:
    """Pages of all tables."""
    return sum(table.pages for table in manifest.tables.values())


def coverage_of_source(candidate: Candidate) -> Verdict:
    """Entities scored, of all that the sources name."""
    facts = candidate.manifest.facts
    share = facts["users_scored"] / max(1, facts["users_in_source"])
    return at_least("coverage_of_source", share, candidate.thresholds.coverage_of_source)


def coverage_of_live(candidate: Candidate) -> Verdict:
    """Entities of this generation against the live one's."""
    return _against_live(
        "coverage_of_live", candidate, "user", candidate.thresholds.coverage_of_live
    )


def items_of_live(candidate: Candidate) -> Verdict:
    """Items of this generation against the live one's."""
    return _against_live("items_of_live", candidate, "item", candidate.thresholds.items_of_live)


def _against_live(rule: str, candidate: Candidate, entity: str, threshold: float) -> Verdict:
    if candidate.live is None:
        return Verdict(
            rule, True, None, threshold, "the first generation has nothing to be compared with"
        )
    before = candidate.live.entity_sets[entity].count
    return at_least(rule, candidate.manifest.entity_sets[entity].count / max(1, before), threshold)


def directories_sorted(candidate: Candidate) -> Verdict:
    """Hashes strictly ascending within their shard's range: no entity twice, none in a wrong place."""
    for entities in candidate.manifest.entity_sets.values():
        directory = Directory.open(candidate.root, entities)
        hashes = directory.hashes()
        if len(hashes) != entities.count:
            return Verdict(
                "directories_sorted", False, len(hashes), entities.count, f"{entities.name}: count"
            )
        ascending = bool((hashes[1:] > hashes[:-1]).all())
        starts_well = all(
            not len(part) or part[0] >= np.uint64(entry.first_hash)
            for part, entry in zip(directory.parts, entities.parts, strict=True)
        )
        if not (ascending and starts_well):
            return Verdict(
                "directories_sorted", False, "out of order", "strictly ascending", entities.name
            )
    return Verdict("directories_sorted", True, "strictly ascending", "strictly ascending")


def short_lists(candidate: Candidate) -> Verdict:
    """Share of users with fewer than K items although the catalogue, less their history, has enough."""
    facts = candidate.manifest.facts
    share = facts["short_lists"] / max(1, facts["users_scored"])
    return at_most("short_lists", share, candidate.thresholds.short_lists)


def index_recall(candidate: Candidate) -> Verdict:
    """The worst recall of the FAISS indexes against the exact pass."""
    recalls = [index.recall for index in candidate.manifest.indexes.values()]
    if not recalls:
        return Verdict(
            "index_recall", True, None, candidate.thresholds.index_recall, "no table uses an index"
        )
    worst = worst_of(float("nan") if recall is None else recall for recall in recalls)
    return at_least("index_recall", worst, candidate.thresholds.index_recall)


def int8_agreement(candidate: Candidate) -> Verdict:
    """The worst overlap of a quantized model's answers with the full-precision ones.

    Of the user tower's top 20; of the best label of every model that a value table shows.
    """
    manifest, threshold = candidate.manifest, candidate.thresholds.int8_overlap
    figures = {"user_tower": "overlap_at_20"} | {
        str(table.producer.model): "overlap_at_1"
        for table in manifest.tables.values()
        if table.producer.kind == "value"
    }
    overlaps = {
        name: float(manifest.models[name].agreement.get(figure, float("nan")))
        for name, figure in figures.items()
        if manifest.models[name].agreement.get("precision") != "fp32"
    }
    if not overlaps:
        why = manifest.models["user_tower"].agreement.get("why", "")
        return Verdict("int8_agreement", True, None, threshold, f"no model is quantized: {why}")
    worst = worst_of(overlaps.values())
    named = next(name for name, value in overlaps.items() if value is worst)
    note = f"{figures[named]} of {named} with fp32, the worst of {', '.join(overlaps)}"
    return at_least("int8_agreement", worst, threshold, note)
