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
from precompute.gates.evidence.verdict import Measurement, at_least, not_measured
from precompute.partitions.holdout import read_holdout
from precompute.partitions.shard_files import shard_of

PAIRS_MIN: Final = 200
"""Least number of held-out choices to judge by: below it, one user more or less would move the figure by percents."""


@judgement("heldout_recall", wants_interactions=True)
def heldout_recall(candidate: Candidate) -> Measurement:
    """Share of sampled users' newer choices that their lists hold, against the live generation's lists.

    Choices that are new to the user: the same question to both generations. Without interactions newer
    than the cut there is nothing to measure.
    """
    thresholds = candidate.thresholds
    held_out_by_user = read_holdout(candidate.root)
    tables = [
        table
        for table in candidate.manifest.tables.values()
        if table.kind == "topk" and table.entity == "user"
    ]
    if not held_out_by_user or not tables:
        return not_measured(thresholds.heldout_recall, "no interaction is newer than the cut")
    measurements = [_measure_table(candidate, table, held_out_by_user) for table in tables]
    return next(
        (measurement for measurement in measurements if not measurement.passed), measurements[0]
    )


def _measure_table(candidate: Candidate, table: Table, held_out_by_user: Any) -> Measurement:
    thresholds = candidate.thresholds
    users, positions, choices = _choices(candidate, held_out_by_user)
    pairs = sum(len(user_choices) for user_choices in choices)
    if pairs < PAIRS_MIN:
        return not_measured(thresholds.heldout_recall, f"only {pairs} newer choices of known users")
    records = candidate.evidence.records_of(table, positions)
    lists = [record["items"][: record["count"]].astype(np.int64) for record in records]
    live_table, directory = matching_table(candidate, table), candidate.evidence.live_users
    if live_table is None or directory is None:
        note = f"{table.name}, {pairs} newer choices; no live generation to be compared with"
        return at_least(_recall(lists, choices), thresholds.heldout_recall, note)
    then = directory.find_many(hash_ids(users, directory.seed))
    common_rows = np.flatnonzero(then >= 0)
    live = read_live(candidate, live_table, then[common_rows])
    theirs = [
        live.ids[record["items"][: record["count"]].astype(np.int64)] for record in live.records
    ]
    common_choices = [choices[row] for row in common_rows.tolist()]
    if sum(len(user_choices) for user_choices in common_choices) < PAIRS_MIN:
        return not_measured(
            thresholds.heldout_recall, f"only {pairs} newer choices of users of both"
        )
    width = min(table.layout.width, live_table.layout.width)
    candidate_recall = _recall([lists[row][:width] for row in common_rows.tolist()], common_choices)
    live_recall = _recall([live_list[:width] for live_list in theirs], common_choices)
    floor = max(thresholds.heldout_recall, thresholds.heldout_of_live * live_recall)
    note = f"{table.name}, {pairs} newer choices, of which the live generation's lists hold {live_recall:.4f}"
    return at_least(candidate_recall, round(floor, 6), note, candidate.baseline)


def _choices(
    candidate: Candidate, held_out_by_user: dict[str, list[str]]
) -> tuple[list[bytes], NDArray[np.int64], list[NDArray[np.int64]]]:
    """Users with a record, their positions, and the ordinals of their newer choices, less what they had before."""
    directory, entities = (
        candidate.evidence.directories["user"],
        candidate.manifest.entity_sets["user"],
    )
    hashes = hash_ids([name.encode() for name in held_out_by_user], directory.seed)
    positions, shards = directory.find_many(hashes), shard_of(hashes, len(entities.parts))
    every = list(held_out_by_user)
    users, user_positions, choices = [], [], []
    for shard in sampled_shards(entities):
        rows = np.flatnonzero((shards == shard) & (positions >= 0)).tolist()
        names = [every[row] for row in rows]
        seen_pairs = seen_by(candidate.root / "work/partition", shard, names)
        for row, name in zip(rows, names, strict=True):
            ordinals = np.asarray(
                candidate.items.ordinals_of(
                    [item_id.encode() for item_id in held_out_by_user[name]]
                )
            )
            fresh = [
                ordinal
                for ordinal in ordinals.tolist()
                if ordinal >= 0 and (name, ordinal) not in seen_pairs
            ]
            if fresh:
                users.append(name.encode())
                user_positions.append(positions[row])
                choices.append(np.array(fresh, np.int64))
    return users, np.array(user_positions, np.int64), choices


def _recall(lists: list[NDArray[np.int64]], choices: list[NDArray[np.int64]]) -> float:
    hits = sum(
        int(np.isin(chosen_items, listed_items).sum())
        for listed_items, chosen_items in zip(lists, choices, strict=True)
    )
    return hits / max(1, sum(len(chosen_items) for chosen_items in choices))
