"""Gates on every record of every table, as the page files hold them."""

from typing import Final

import numpy as np

from cache.format.records.layout import ABSENT
from precompute.gates.evidence.candidate import Candidate
from precompute.gates.evidence.gate import integrity, judgement
from precompute.gates.evidence.verdict import Measurement, at_most, none_of

VECTORS_AT_ONCE: Final = 16_384

_LIST_FAULTS = {
    "slots": "lists with a hole, or with items after their end",
    "ordinals": "lists with an item that the item table does not have",
    "twice": "lists with an item twice",
    "order": "lists whose scores rise",
}


@integrity("page_sums")
def page_sums(candidate: Candidate) -> Measurement:
    """Page files are whole, and their pages have the checksums that Redis is compared with."""
    return _count_faults(candidate, {"pages": "page file", "sums": "page checksum"})


@integrity("record_headers")
def record_headers(candidate: Candidate) -> Measurement:
    """Format, count and moment of every record are this generation's own."""
    return _count_faults(candidate, {"headers": "record header"})


@integrity("finite")
def finite(candidate: Candidate) -> Measurement:
    """Numbers of every record, and every item vector, are neither NaN nor infinite."""
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
    """Lists name items of the item table, each once, best first, without a hole."""
    return _count_faults(candidate, _LIST_FAULTS)


@judgement("empty_lists")
def empty_lists(candidate: Candidate) -> Measurement:
    """Share of users with no item at all, in the worst table."""
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
    """Share of lists shorter than K although the catalogue, less what is excluded, has enough.

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
            is_present = records["flags"] != ABSENT
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
