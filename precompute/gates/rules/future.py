"""The gate on the future: do lists hold what users chose after the cut, as often as the live generation's do?"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.format.ids import hash_ids
from cache.format.manifest import Table
from precompute.gates.evidence.candidate import Candidate
from precompute.gates.evidence.gate import judgement
from precompute.gates.evidence.live_lists import matching_table, read_live
from precompute.gates.evidence.user_sample import sampled_shards, seen_by
from precompute.gates.evidence.verdict import Measured, at_least, not_measured
from precompute.partitions.holdout import read_holdout
from precompute.partitions.shard_files import shard_of

PAIRS_MIN: Final = 200
"""Least number of held-out choices to judge by: below it, one user more or less would move the figure by percents."""


@judgement("heldout_recall", wants_interactions=True)
def heldout_recall(candidate: Candidate) -> Measured:
    """Share of sampled users' newer choices that their lists hold, against the live generation's lists.

    Choices that are new to the user: the same question to both generations. Without interactions newer
    than the cut there is nothing to measure.
    """
    thresholds = candidate.thresholds
    held = read_holdout(candidate.root)
    tables = [
        table
        for table in candidate.manifest.tables.values()
        if table.kind == "topk" and table.entity == "user"
    ]
    if not held or not tables:
        return not_measured(thresholds.heldout_recall, "no interaction is newer than the cut")
    found = [_one(candidate, table, held) for table in tables]
    return next((each for each in found if not each.passed), found[0])


def _one(candidate: Candidate, table: Table, held: Any) -> Measured:
    thresholds = candidate.thresholds
    users, positions, choices = _choices(candidate, held)
    pairs = sum(len(each) for each in choices)
    if pairs < PAIRS_MIN:
        return not_measured(thresholds.heldout_recall, f"only {pairs} newer choices of known users")
    records = candidate.evidence.records_of(table, positions)
    lists = [record["items"][: record["count"]].astype(np.int64) for record in records]
    before, directory = matching_table(candidate, table), candidate.evidence.live_users
    if before is None or directory is None:
        note = f"{table.name}, {pairs} newer choices; no live generation to be compared with"
        return at_least(_recall(lists, choices), thresholds.heldout_recall, note)
    then = directory.find_many(hash_ids(users, directory.seed))
    both = np.flatnonzero(then >= 0)
    live = read_live(candidate, before, then[both])
    theirs = [
        live.ids[record["items"][: record["count"]].astype(np.int64)] for record in live.records
    ]
    asked = [choices[row] for row in both.tolist()]
    if sum(len(each) for each in asked) < PAIRS_MIN:
        return not_measured(
            thresholds.heldout_recall, f"only {pairs} newer choices of users of both"
        )
    width = min(table.layout.width, before.layout.width)
    ours = _recall([lists[row][:width] for row in both.tolist()], asked)
    other = _recall([each[:width] for each in theirs], asked)
    floor = max(thresholds.heldout_recall, thresholds.heldout_of_live * other)
    note = f"{table.name}, {pairs} newer choices, of which the live generation's lists hold {other:.4f}"
    return at_least(ours, round(floor, 6), note, candidate.baseline)


def _choices(
    candidate: Candidate, held: dict[str, list[str]]
) -> tuple[list[bytes], NDArray[np.int64], list[NDArray[np.int64]]]:
    """Users with a record, their positions, and the ordinals of their newer choices, less what they had before."""
    directory, entities = (
        candidate.evidence.directories["user"],
        candidate.manifest.entity_sets["user"],
    )
    hashes = hash_ids([name.encode() for name in held], directory.seed)
    positions, shards = directory.find_many(hashes), shard_of(hashes, len(entities.parts))
    every = list(held)
    users, places, choices = [], [], []
    for shard in sampled_shards(entities):
        rows = np.flatnonzero((shards == shard) & (positions >= 0)).tolist()
        names = [every[row] for row in rows]
        seen = seen_by(candidate.root / "work/partition", shard, names)
        for row, name in zip(rows, names, strict=True):
            ordinals = np.asarray(
                candidate.items.ordinals_of([each.encode() for each in held[name]])
            )
            fresh = [each for each in ordinals.tolist() if each >= 0 and (name, each) not in seen]
            if fresh:
                users.append(name.encode())
                places.append(positions[row])
                choices.append(np.array(fresh, np.int64))
    return users, np.array(places, np.int64), choices


def _recall(lists: list[NDArray[np.int64]], choices: list[NDArray[np.int64]]) -> float:
    hits = sum(
        int(np.isin(wanted, found).sum()) for found, wanted in zip(lists, choices, strict=True)
    )
    return hits / max(1, sum(len(wanted) for wanted in choices))
