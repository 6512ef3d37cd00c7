"""Gates that compare with the live generation: lists and scores may change, but not suddenly, and must find as much."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache.errors import CorruptArtefact, NotJudged
from cache.format.ids import hash_ids
from cache.format.manifest import Manifest, Table
from cache.model.agreement import jaccard
from cache.model.tower import Histories
from cache.records import ABSENT_FLAGS, dequantize
from precompute.bundles.held_out import COMPARED_ITEMS_MAX, SHARE_ABOVE_RANDOM_FACT, shares_above_random
from precompute.gates.evidence.candidate import (
    Candidate,
    Measurement,
    at_least,
    at_most,
    judgement,
    none_of,
    not_measured,
)
from precompute.gates.evidence.evidence import Scan, compared_depth, select_spread_rows
from precompute.gates.evidence.user_sample import read_seen_pairs, sampled_shards
from precompute.partitions.holdout import read_holdout
from precompute.partitions.shard_files import shard_of
from precompute.sources.plausibility import JUDGED_ROWS_MIN

LIVE_RECORDS_AT_ONCE: Final = 200
"""Number of records read from Redis in one round trip."""

PSI_BINS: Final = 10
TOP_ITEMS_SHARE: Final = 0.01
ACTIVE_USERS_MIN: Final = 5
"""Minimum number of users with interactions since the live generation's cut for `stale_lists` to judge."""

VALUES_MIN: Final = 100
"""Minimum number of records in both generations for `value_psi` to judge."""

CLICKS_BY_CHANCE_NOTE: Final = "clicks rank no better than chance"

CHANCE_SHARE: Final = 0.5
"""Expected share of pairs in which one of two random items scores above the other."""

RANK_DEVIATIONS: Final = 2.0
"""Standard errors by which a share must differ from one half."""

HISTORY_ITEMS_PER_CLICK: Final = 5
"""Number of items of a history for each one that is taken out."""

RANKED_USERS_MIN: Final = 20
"""Minimum number of users to judge the ranks of clicks by."""

CHOICES_MIN: Final = 200
"""Minimum number of held-out choices to judge by: with fewer, a single user changes the figure by percents."""


@judgement("top_items")
def top_items(candidate: Candidate) -> Measurement:
    """Measure the share of list slots that the top 1 % of items hold, in the worst table."""
    top_shares = {table.name: _top_items_share(candidate, table) for table in user_list_tables(candidate.manifest)}
    return _measure_highest(top_shares, candidate.thresholds.top_items)


@judgement("single_item")
def single_item(candidate: Candidate) -> Measurement:
    """Measure the share of list slots that any one item holds, in the worst table."""
    largest_shares = {}
    for table in user_list_tables(candidate.manifest):
        scan = candidate.evidence.scans[table.name]
        largest_shares[table.name] = float(scan.slots_by_item.max(initial=0) / max(1, scan.slots_by_item.sum()))
    return _measure_highest(largest_shares, candidate.thresholds.single_item)


@judgement("distinct_lists")
def distinct_lists(candidate: Candidate) -> Measurement:
    """Measure the share of different lists among sampled users, which must not be far below the live generation's."""
    thresholds, worst_measurement = candidate.thresholds, None
    if candidate.unreadable_live_generation is not None:
        return candidate.uncompared_measurement(thresholds.distinct_lists)
    for table in user_list_tables(candidate.manifest):
        positions = _compared_positions(candidate)
        distinct_share = _distinct_share(candidate.evidence.records_of(table, positions))
        # There cannot be more lists of one item than items.
        distinct_share_max = min(1.0, candidate.items.count / max(1, len(positions)))
        floor, note = thresholds.distinct_lists * distinct_share_max, table.name
        live_table = matching_live_table(candidate, table)
        if live_table is not None and len(candidate.evidence.common_user_positions[1]):
            live_share = _distinct_share(
                read_live_lists(candidate, live_table, candidate.evidence.common_user_positions[1]).live_records
            )
            floor = max(floor, thresholds.distinct_lists_of_live * live_share)
            note = f"{table.name}; {live_share:.3f} of the live generation's"
        measurement = at_least(distinct_share, round(floor, 6), note, candidate.baseline_generation)
        if worst_measurement is None or (worst_measurement.passed and not measurement.passed):
            worst_measurement = measurement
    return worst_measurement or not_measured(thresholds.distinct_lists, "no table of lists")


@judgement("top_items_of_live")
def top_items_of_live(candidate: Candidate) -> Measurement:
    """Measure the ratio of the share of slots that the top 1 % of items hold to that share in the live generation."""
    ratio_by_table = {}
    for table, live_table in _pair_tables(candidate):
        depth = compared_depth(min(table.layout.width, live_table.layout.width), candidate.items.count)
        candidate_records = candidate.evidence.records_of(table, candidate.evidence.common_user_positions[0])
        live = read_live_lists(candidate, live_table, candidate.evidence.common_user_positions[1])
        live_share = _share_of_top(_count_slots_by_item(live.live_records, depth), len(live.candidate_ordinals))
        ratio_by_table[table.name] = _share_of_top(
            _count_slots_by_item(candidate_records, depth), candidate.items.count
        ) / max(live_share, 1e-9)
    return _compare_with_live(candidate, ratio_by_table, candidate.thresholds.top_items_of_live)


@judgement("score_psi")
def score_psi(candidate: Candidate) -> Measurement:
    """Measure the population stability index of the scores against the live generation's, in tenths of the latter.

    PSI as in credit scoring (Siddiqi, 2006): below 0.1 the shift is negligible, above 0.25 large. A retrained bundle
    may score on another scale, so it has its own threshold.
    """
    psi_by_table = {}
    for table, live_table in _pair_tables(candidate):
        candidate_records = candidate.evidence.records_of(table, candidate.evidence.common_user_positions[0])
        live = read_live_lists(candidate, live_table, candidate.evidence.common_user_positions[1])
        psi_by_table[table.name] = psi(
            _stored_scores(table, candidate_records), _stored_scores(live_table, live.live_records)
        )
    if candidate.is_retrained:
        return _compare_with_live(candidate, psi_by_table, candidate.thresholds.score_psi_retrained)
    return _compare_with_live(candidate, psi_by_table, candidate.thresholds.score_psi)


@judgement("distinct_values")
def distinct_values(candidate: Candidate) -> Measurement:
    """Count the different outputs in a table of values, up to 2: a constant model does not distinguish entities."""
    scans = [
        scan
        for scan in candidate.evidence.unfiltered_scans.values()
        if scan.table.kind == "value" and scan.record_count - scan.absent_count >= JUDGED_ROWS_MIN
    ]
    if not scans:
        return not_measured(2, f"no table of values with {JUDGED_ROWS_MIN} records or more")
    for scan in scans:
        if not scan.differing_count and not _is_single_probability(scan):
            record_count = scan.record_count - scan.absent_count
            note = f"{scan.table.name}: all {record_count:,} records have the same values"
            return Measurement(False, 1, 2, note)
    return Measurement(True, 2, 2)


def _is_single_probability(scan: Scan) -> bool:
    """True if each record is the probability of the only label, which is always 1."""
    return scan.first_values is not None and scan.first_values.tolist() == [1.0]


@judgement("value_psi")
def value_psi(candidate: Candidate) -> Measurement:
    """Measure the PSI (see `score_psi`) of each number of a table of values against the live generation's.

    Numbers of the same label are compared, over the same users or items, rounded to five digits: another host may round
    the last ones differently. With the same model, numbers of the same position are compared, whatever their labels
    are.
    """
    thresholds = candidate.thresholds
    threshold = thresholds.score_psi_retrained if candidate.is_retrained else thresholds.score_psi
    if candidate.live is None:
        return candidate.uncompared_measurement(threshold)
    psi_by_value: dict[str, float] = {}
    for table in candidate.manifest.tables.values():
        live_table = matching_live_table(candidate, table) if table.kind == "value" else None
        if live_table is not None:
            psi_by_value |= _value_shifts(candidate, table, live_table)
    if not psi_by_value:
        note = f"no value of {VALUES_MIN} of the same users or items is in the live generation"
        return not_measured(threshold, note)
    return _compare_with_live(candidate, psi_by_value, threshold)


def _value_shifts(candidate: Candidate, table: Table, live_table: Table) -> dict[str, float]:
    """Return the PSI by table and label; empty if too few entities, or no label, are in both generations."""
    evidence = candidate.evidence
    common_positions = evidence.common_item_positions if table.entity == "item" else evidence.common_user_positions
    if len(common_positions[0]) < VALUES_MIN:
        return {}
    records = evidence.records_of(table, common_positions[0])
    live_records = _read_live_records(candidate, live_table, common_positions[1])
    is_present = (records["flags"] != ABSENT_FLAGS) & (live_records["flags"] != ABSENT_FLAGS)
    if is_present.sum() < VALUES_MIN:
        return {}
    value_names, live_names = _value_names(table), _value_names(live_table)
    if _digest_and_spec(live_table, candidate.live) == _digest_and_spec(table, candidate.manifest):
        live_names = value_names
    values_by_name, live_values_by_name = (
        dict(zip(labels, dequantize(label_table.layout, table_records[is_present], np.float64).T, strict=True))
        for labels, label_table, table_records in (
            (value_names, table, records),
            (live_names, live_table, live_records),
        )
    )
    return {
        f"{table.name}, {value_name}": psi(
            _round_to_five_digits(column), _round_to_five_digits(live_values_by_name[value_name])
        )
        for value_name, column in values_by_name.items()
        if value_name in live_values_by_name
    }


def _value_names(table: Table) -> tuple[str, ...]:
    return table.labels or tuple(f"number {number}" for number in range(1, table.layout.width + 1))


def _digest_and_spec(table: Table, manifest: Manifest | None) -> tuple[str, Mapping[str, Any]] | None:
    """Return digest and specification of a table's model: two outputs of one file count as two models."""
    if manifest is None:
        return None
    model = manifest.models[str(table.producer.model)]
    return model.digest, model.spec


def changed_labels_in_words(manifest: Manifest, live: Manifest) -> list[str]:
    """Return a remark on each table of values whose labels, or their order, differ from the live generation's."""
    remarks = []
    for table_name, table in manifest.tables.items():
        live_table = live.tables.get(table_name)
        if live_table is None or not table.labels or table.labels == (live_table.labels or ()):
            continue
        change_text = f"labels of {table_name} were {', '.join(live_table.labels)} in {live.generation}, and are "
        change_text += ", ".join(table.labels)
        if set(table.labels) == set(live_table.labels):
            change_text += ", so that each number has another position"
        remarks.append(f"{change_text}: inform those who use the values")
    return remarks


def _round_to_five_digits(exact_numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    fractions, exponents = np.frexp(exact_numbers)
    return np.ldexp(np.round(fractions, 5), exponents)


@judgement("list_jaccard")
def list_jaccard(candidate: Candidate) -> Measurement:
    """Measure the mean Jaccard index of the same users' lists in both generations, compared by item id."""
    thresholds = candidate.thresholds
    threshold = thresholds.list_jaccard_retrained if candidate.is_retrained else thresholds.list_jaccard
    mean_jaccards = {
        table.name: float(np.mean(_compute_jaccards(candidate, table, live_table)))
        for table, live_table in _pair_tables(candidate)
    }
    if candidate.live is None:
        return candidate.uncompared_measurement(threshold)
    if not len(candidate.evidence.common_user_positions[0]):
        note = "the live generation has none of the sampled users: has the form of ids changed?"
        return Measurement(False, 0.0, threshold, note, candidate.baseline_generation)
    if not mean_jaccards:
        return not_measured(threshold, "the live generation has no such table of lists")
    worst_table = min(mean_jaccards, key=lambda name: mean_jaccards[name])
    return at_least(
        mean_jaccards[worst_table], threshold, _table_note(candidate, worst_table), candidate.baseline_generation
    )


@judgement("stale_lists", wants_interactions=True)
def stale_lists(candidate: Candidate) -> Measurement:
    """Measure the share of users with interactions since the live generation's cut whose lists have not changed.

    Interactions ahead of this night's clock do not count: the live generation may have read them already.
    """
    threshold = candidate.thresholds.stale_lists
    if candidate.live is None:
        return candidate.uncompared_measurement(threshold)
    user_sample = candidate.evidence.users
    choice_times_us = user_sample.last_new_choice_times
    is_active_since_cut = (choice_times_us >= candidate.live.data_until * 1_000_000) & (
        choice_times_us <= candidate.manifest.created_at * 1_000_000
    )
    stale_shares = {}
    for table, live_table in _pair_tables(candidate):
        candidate_positions, _ = candidate.evidence.common_user_positions
        is_active = is_active_since_cut[np.isin(user_sample.directory_positions, candidate_positions)]
        if is_active.sum() < ACTIVE_USERS_MIN:
            continue
        is_unchanged = _compute_jaccards(candidate, table, live_table, is_full_depth=True)[is_active] == 1.0
        stale_shares[table.name] = float(is_unchanged.mean())
    if not stale_shares:
        return not_measured(threshold, "too few users have interactions since the live generation's cut")
    worst_table = max(stale_shares, key=lambda name: stale_shares[name])
    note = f"{worst_table}: of users with new interactions; were these read, and does the model use them?"
    return at_most(stale_shares[worst_table], threshold, note, candidate.baseline_generation)


@judgement("tables_of_live")
def tables_of_live(candidate: Candidate) -> Measurement:
    """Count live tables that are missing or of another kind, and tables of lists without a live counterpart.

    Without this rule a renamed table would pass every comparison. The lists of the first night with lists are not
    counted.
    """
    if candidate.live is None:
        return candidate.uncompared_measurement(0)
    live_tables, tables = candidate.live.tables, candidate.manifest.tables
    notes = [
        f"{table_name} is {'gone' if table_name not in tables else 'of another kind or entity'}"
        for table_name, table in live_tables.items()
        if table_name not in tables or _kind_and_entity(tables[table_name]) != _kind_and_entity(table)
    ]
    if any(table.kind == "topk" for table in live_tables.values()):
        notes += [
            f"{table_name} has no lists to be compared with"
            for table_name, table in tables.items()
            if table.kind == "topk" and not table.is_facet and table_name not in live_tables
        ]
    return none_of(len(notes), "; ".join(notes), candidate.baseline_generation)


@judgement("heldout_recall", wants_interactions=True)
def heldout_recall(candidate: Candidate) -> Measurement:
    """Measure the share of sampled users' newer choices that their lists hold, against the live generation's lists.

    Only choices that are new to the user count, the same ones for both generations. Without interactions newer than the
    cut there is nothing to measure. For towers with features, the rank of clicks taken out of histories is measured,
    too: features may have the codes of another model.
    """
    measurement = _measure_newer_choices(candidate)
    ranks = _rank_clicks(candidate) if measurement.passed else None
    if ranks is None or ranks.share_above_random - RANK_DEVIATIONS * ranks.standard_error > CHANCE_SHARE:
        return measurement
    remark = (
        f"{CLICKS_BY_CHANCE_NOTE}: above a random item in {ranks.share_above_random:.1%} of pairs (standard error "
        f"{ranks.standard_error:.1%}); do the codes and ids of the tables belong to the model?"
    )
    share_at_import = candidate.evidence.bundle.training.get(SHARE_ABOVE_RANDOM_FACT)
    if (
        share_at_import is not None
        and ranks.share_above_random + RANK_DEVIATIONS * ranks.standard_error < CHANCE_SHARE < share_at_import
    ):
        return Measurement(
            False,
            round(ranks.share_above_random, 6),
            CHANCE_SHARE,
            f"{remark} At its import it was {share_at_import:.1%}",
        )
    return replace(measurement, note="; ".join(filter(None, [measurement.note, remark])))


@dataclass(frozen=True, slots=True)
class ClickRanks:
    """Share of pairs in which a click, taken out of its history, scores above a random item; its standard error."""

    share_above_random: float
    standard_error: float


def _rank_clicks(candidate: Candidate) -> ClickRanks | None:
    """Measure the clicks of sampled users; None for too few of them, and for towers without features."""
    evidence, users = candidate.evidence, candidate.evidence.users.users
    model = evidence.bundle.user_tower
    has_features = bool(model.spec.features or evidence.bundle.item_tower.spec.features)
    if not has_features or users.entity_vectors is not None:
        return None
    # Each fifth item, from the last but one on: for a user with one item nothing can be taken out.
    history_lengths = np.diff(users.history_indptr)
    places_from_end = np.repeat(users.history_indptr[1:], history_lengths) - np.arange(len(users.history_ordinals)) - 1
    is_held_out = places_from_end % HISTORY_ITEMS_PER_CLICK == 1
    held_out_indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_held_out)])[users.history_indptr]
    remaining_users = replace(
        users,
        history_indptr=users.history_indptr - held_out_indptr,
        history_ordinals=users.history_ordinals[~is_held_out],
        history_times=None if users.history_times is None else users.history_times[~is_held_out],
    )
    inputs, usable_rows = evidence.user_inputs(model, remaining_users)
    held_out_clicks = Histories(held_out_indptr, users.history_ordinals[is_held_out]).select_rows(usable_rows)
    if len(held_out_clicks.indices) < CHOICES_MIN:
        return None
    item_vectors = candidate.items.vectors
    compared_vectors = np.asarray(item_vectors[select_spread_rows(np.arange(len(item_vectors)), COMPARED_ITEMS_MAX)])
    shares = shares_above_random(
        evidence.run_model(model, inputs),
        item_vectors,
        compared_vectors,
        held_out_clicks,
        len(usable_rows),
        evidence.bundle.metric,
    )
    shares = shares[np.isfinite(shares)]
    if len(shares) < RANKED_USERS_MIN:
        return None
    return ClickRanks(float(shares.mean()), float(shares.std(ddof=1) / np.sqrt(len(shares))))


def _measure_newer_choices(candidate: Candidate) -> Measurement:
    thresholds = candidate.thresholds
    held_out_by_user = read_holdout(candidate.root)
    tables = [table for table in candidate.manifest.tables.values() if table.kind == "topk" and table.entity == "user"]
    if not held_out_by_user or not tables:
        return not_measured(thresholds.heldout_recall, "no interaction is newer than the cut")
    measurements = [_measure_table_recall(candidate, table, held_out_by_user) for table in tables]
    return next((measurement for measurement in measurements if not measurement.passed), measurements[0])


@dataclass(frozen=True, slots=True, eq=False)
class LiveLists:
    """Records of the live generation; `candidate_ordinals` int64[live items] maps its ordinals to this generation's.

    Each item that this generation lacks has a different negative number, which equals no ordinal.
    """

    live_records: NDArray[Any]
    candidate_ordinals: NDArray[np.int64]


def read_live_lists(candidate: Candidate, table: Table, directory_positions: NDArray[np.int64]) -> LiveLists:
    """Read lists of live users at these positions; raise NotJudged if Redis lacks one of them."""
    records = _read_live_records(candidate, table, directory_positions)
    return LiveLists(records, candidate.evidence.live_ordinals)


def _read_live_records(candidate: Candidate, table: Table, directory_positions: NDArray[np.int64]) -> NDArray[Any]:
    """Read live records at positions of their directory; raise NotJudged if Redis lacks one of them."""
    evidence = candidate.evidence
    directory = evidence.live_item_directory if table.entity == "item" else evidence.live_user_directory
    if candidate.live is None or directory is None:
        raise CorruptArtefact("there is no live generation")
    client, record_bytes = candidate.control.client, table.layout.size_bytes
    raw_records: list[bytes] = []
    for first_index in range(0, len(directory_positions), LIVE_RECORDS_AT_ONCE):
        pipeline = client.pipeline(transaction=False)
        for position in directory_positions[first_index : first_index + LIVE_RECORDS_AT_ONCE].tolist():
            page_number, offset = table.locate_record(*directory.locate_in_part(position))
            page_key = candidate.control.keyspace.page(candidate.live.generation, table.name, page_number)
            pipeline.getrange(page_key, offset, offset + record_bytes - 1)
        raw_records += pipeline.execute()
    if any(len(record) != record_bytes for record in raw_records):
        raise NotJudged(
            f"Redis lacks records of {table.name} of the live generation, so nothing can be compared with it: run "
            "`larder restore`, then verify again"
        )
    return np.frombuffer(b"".join(raw_records), table.layout.dtype)


def matching_live_table(candidate: Candidate, table: Table) -> Table | None:
    """Return the live generation's table of the same name and kind; None if there is none."""
    live_table = None if candidate.live is None else candidate.live.tables.get(table.name)
    return (
        live_table
        if live_table is not None and (live_table.kind, live_table.entity) == (table.kind, table.entity)
        else None
    )


def user_list_tables(manifest: Manifest) -> list[Table]:
    """Return the tables of lists for users."""
    return [table for table in manifest.tables.values() if table.kind == "topk" and table.entity == "user"]


def psi(candidate_scores: NDArray[np.float64], live_scores: NDArray[np.float64]) -> float:
    """Return the sum of (p - q) ln(p / q) over tenths of `live_scores`; an empty bin counts as half an observation."""
    if not len(candidate_scores) or not len(live_scores):
        return float("nan")
    bin_edges = np.unique(np.quantile(live_scores, np.linspace(0, 1, PSI_BINS + 1)[1:-1]))
    p, q = (
        np.maximum(np.bincount(np.searchsorted(bin_edges, scores), minlength=len(bin_edges) + 1), 0.5)
        for scores in (candidate_scores, live_scores)
    )
    p, q = p / p.sum(), q / q.sum()
    return float(((p - q) * np.log(p / q)).sum())


def _pair_tables(candidate: Candidate) -> list[tuple[Table, Table]]:
    table_pairs = []
    for table in user_list_tables(candidate.manifest):
        live_table = matching_live_table(candidate, table)
        if live_table is not None and len(candidate.evidence.common_user_positions[0]):
            table_pairs.append((table, live_table))
    return table_pairs


def _compare_with_live(candidate: Candidate, figure_by_name: dict[str, float], threshold: float) -> Measurement:
    if candidate.live is None:
        return candidate.uncompared_measurement(threshold)
    if not figure_by_name:
        return not_measured(threshold, "the live generation has no such list of the same users")
    worst_name = max(
        figure_by_name, key=lambda name: np.inf if np.isnan(figure_by_name[name]) else figure_by_name[name]
    )
    return at_most(
        figure_by_name[worst_name], threshold, _table_note(candidate, worst_name), candidate.baseline_generation
    )


def _table_note(candidate: Candidate, table_name: str) -> str:
    return f"{table_name}, a retrained bundle's threshold" if candidate.is_retrained else table_name


def _measure_highest(share_by_table: dict[str, float], threshold: float) -> Measurement:
    if not share_by_table:
        return not_measured(threshold, "no table of lists")
    worst_table = max(share_by_table, key=lambda name: share_by_table[name])
    return at_most(share_by_table[worst_table], threshold, worst_table)


def _top_items_share(candidate: Candidate, table: Table) -> float:
    return _share_of_top(candidate.evidence.scans[table.name].slots_by_item, candidate.items.count)


def _share_of_top(slots_by_item: NDArray[np.int64], item_count: int) -> float:
    top_count = max(1, int(np.ceil(TOP_ITEMS_SHARE * item_count)))
    return float(np.sort(slots_by_item)[::-1][:top_count].sum() / max(1, slots_by_item.sum()))


def _count_slots_by_item(list_records: NDArray[Any], compared_depth: int) -> NDArray[np.int64]:
    is_used = np.arange(compared_depth) < list_records["count"][:, None]
    return np.bincount(list_records["items"][:, :compared_depth][is_used].astype(np.int64))


def _compared_positions(candidate: Candidate) -> NDArray[np.int64]:
    common_positions = candidate.evidence.common_user_positions[0]
    return common_positions if len(common_positions) else candidate.evidence.users.directory_positions


def _distinct_share(list_records: NDArray[Any]) -> float:
    return len(np.unique(list_records["items"], axis=0)) / max(1, len(list_records))


def _stored_scores(table: Table, list_records: NDArray[Any]) -> NDArray[np.float64]:
    is_used = np.arange(table.layout.width) < list_records["count"][:, None]
    return dequantize(table.layout, list_records, np.float64)[is_used]


def _compute_jaccards(
    candidate: Candidate, table: Table, live_table: Table, *, is_full_depth: bool = False
) -> NDArray[np.float64]:
    candidate_positions, live_positions = candidate.evidence.common_user_positions
    candidate_records = candidate.evidence.records_of(table, candidate_positions)
    live_lists: LiveLists = read_live_lists(candidate, live_table, live_positions)
    width = min(table.layout.width, live_table.layout.width)
    depth = width if is_full_depth else compared_depth(width, candidate.items.count)
    jaccards = np.empty(len(candidate_records))
    for row, (record, live_record) in enumerate(zip(candidate_records, live_lists.live_records, strict=True)):
        candidate_items = record["items"][: min(depth, record["count"])]
        live_items = live_lists.candidate_ordinals[
            live_record["items"][: min(depth, live_record["count"])].astype(np.int64)
        ]
        jaccards[row] = jaccard(candidate_items, live_items)
    return jaccards


def _kind_and_entity(table: Table) -> tuple[str, str]:
    return table.kind, table.entity


def _measure_table_recall(candidate: Candidate, table: Table, held_out_by_user: Any) -> Measurement:
    thresholds = candidate.thresholds
    user_ids, positions, choices_of_users = _find_newer_choices(candidate, held_out_by_user)
    pair_count = sum(len(user_choices) for user_choices in choices_of_users)
    if pair_count < CHOICES_MIN:
        return not_measured(thresholds.heldout_recall, f"only {pair_count} newer choices of known users")
    records = candidate.evidence.records_of(table, positions)
    listed_items = [record["items"][: record["count"]].astype(np.int64) for record in records]
    live_table, directory = (matching_live_table(candidate, table), candidate.evidence.live_user_directory)
    if live_table is None or directory is None:
        note = f"{table.name}, {pair_count} newer choices; no live generation to be compared with"
        return at_least(_recall(listed_items, choices_of_users), thresholds.heldout_recall, note)
    live_positions = directory.find_positions(hash_ids(user_ids, directory.seed))
    common_rows = np.flatnonzero(live_positions >= 0)
    live = read_live_lists(candidate, live_table, live_positions[common_rows])
    live_items = [
        live.candidate_ordinals[record["items"][: record["count"]].astype(np.int64)] for record in live.live_records
    ]
    common_choices = [choices_of_users[row] for row in common_rows.tolist()]
    if sum(len(user_choices) for user_choices in common_choices) < CHOICES_MIN:
        return not_measured(thresholds.heldout_recall, f"only {pair_count} newer choices of users of both")
    width = min(table.layout.width, live_table.layout.width)
    candidate_recall = _recall([listed_items[row][:width] for row in common_rows.tolist()], common_choices)
    live_recall = _recall([live_list[:width] for live_list in live_items], common_choices)
    recall_min = max(thresholds.heldout_recall, thresholds.heldout_of_live * live_recall)
    note = f"{table.name}, {pair_count} newer choices, of which the live generation's lists hold {live_recall:.4f}"
    return at_least(candidate_recall, round(recall_min, 6), note, candidate.baseline_generation)


def _find_newer_choices(
    candidate: Candidate, held_out_by_user: dict[str, list[str]]
) -> tuple[list[bytes], NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return users with a record, their positions, and the ordinals of their newer choices, without earlier items."""
    directory, entities = (candidate.evidence.directories["user"], candidate.manifest.entity_sets["user"])
    hashes = hash_ids([user_id.encode() for user_id in held_out_by_user], directory.seed)
    positions, shards = directory.find_positions(hashes), shard_of(hashes, len(entities.parts))
    user_ids = list(held_out_by_user)
    user_ids_with_choices, user_positions, choices_of_users = [], [], []
    for shard in sampled_shards(entities):
        recorded_rows = np.flatnonzero((shards == shard) & (positions >= 0)).tolist()
        shard_user_ids = [user_ids[row] for row in recorded_rows]
        seen_pairs = read_seen_pairs(candidate.root / "work/partition", shard, shard_user_ids)
        for row, user_id in zip(recorded_rows, shard_user_ids, strict=True):
            ordinals = np.asarray(
                candidate.items.ordinals_of([item_id.encode() for item_id in held_out_by_user[user_id]])
            )
            new_ordinals = [
                ordinal for ordinal in ordinals.tolist() if ordinal >= 0 and (user_id, ordinal) not in seen_pairs
            ]
            if new_ordinals:
                user_ids_with_choices.append(user_id.encode())
                user_positions.append(positions[row])
                choices_of_users.append(np.array(new_ordinals, np.int64))
    return user_ids_with_choices, np.array(user_positions, np.int64), choices_of_users


def _recall(lists_of_users: list[NDArray[np.int64]], choices_of_users: list[NDArray[np.int64]]) -> float:
    hits = sum(
        int(np.isin(chosen_items, listed_items).sum())
        for listed_items, chosen_items in zip(lists_of_users, choices_of_users, strict=True)
    )
    return hits / max(1, sum(len(chosen_items) for chosen_items in choices_of_users))
