"""Gates on the contents of records: recomputed in float64, by code other than the night's.

This module shares nothing with the code that it checks, nor with `cache.model.agreement`: an error in shared code would
go unnoticed.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache.format.manifest import Table
from cache.model.tower import Histories
from cache.records import ABSENT_FLAGS, NUMBER_STEP_BY_PRECISION, Layout, dequantize
from precompute.bundles.bundle import BundleModel
from precompute.gates.evidence.candidate import (
    Candidate,
    Measurement,
    at_least,
    integrity,
    none_of,
    not_measured,
    worst_of,
)

SCORE_ROUNDING: Final = 2e-5
"""Rounding tolerance of a score, relative to the lengths of both vectors: twice the error of a user's vector that a
device may have (`scoring.towers.DEVICE_LENGTH_AGREEMENT`), and the rounding of a float32 product."""

OUTPUT_ROUNDING: Final = 1e-4
"""Rounding tolerance of a model's outputs between batches and devices, relative to the row's largest; as in
`scoring.towers.DEVICE_AGREEMENT`."""

COLUMN_ROUNDING: Final = 1e-5
"""Further rounding tolerance of a value, relative to the largest value of its label in the sample: each batch rounds a
regressor's sum of trees in another order, at the size of its terms, and the sum may itself be near 0."""

ITEMS_AT_ONCE: Final = 8_192
ROWS_AT_ONCE: Final = 512

Floats = NDArray[np.float64]


@integrity("item_vectors")
def item_vectors(candidate: Candidate) -> Measurement:
    """Compare vectors of sampled items with the outputs of the bundle's item tower."""
    evidence = candidate.evidence
    model, ordinals = evidence.bundle.item_tower, evidence.sampled_item_ordinals
    expected_vectors = evidence.run_model(model, evidence.item_inputs(model, ordinals))
    is_right = _rows_equal(expected_vectors, candidate.items.vectors[ordinals], OUTPUT_ROUNDING)
    return at_least(_fraction_true(is_right), candidate.thresholds.exact, f"of {len(ordinals)} sampled items")


@integrity("exact_lists")
def exact_lists(candidate: Candidate) -> Measurement:
    """Check that stored lists and scores of sampled entities are the best ones, recomputed over all items."""
    right_shares: dict[str, float] = {}
    for table in candidate.manifest.stored_tables.values():
        if table.kind == "topk" and table.producer.kind in ("topk", "similar"):
            right_shares[table.name] = _fraction_true(_check_lists(candidate, table))
    return _measure_worst(candidate, right_shares)


@integrity("exact_numbers")
def exact_numbers(candidate: Candidate) -> Measurement:
    """Compare stored vectors and values of sampled entities with the outputs of the bundle's models."""
    right_shares: dict[str, float] = {}
    evidence, models = (
        candidate.evidence,
        {bundle_model.name: bundle_model for bundle_model in candidate.evidence.bundle.models},
    )
    for table in candidate.manifest.tables.values():
        if table.kind == "topk" or table.producer.model not in models:
            continue
        model = models[str(table.producer.model)]
        expected, positions = _run_model(candidate, model)
        records = evidence.records_of(table, positions)
        is_present = records["flags"] != ABSENT_FLAGS  # the coverage gates judge how many lack an answer
        expected, stored_numbers = (expected[is_present], dequantize(table.layout, records[is_present], np.float64))
        tolerance = OUTPUT_ROUNDING + NUMBER_STEP_BY_PRECISION[table.layout.precision]
        column_tolerance = COLUMN_ROUNDING if table.kind == "value" else 0.0
        right_shares[table.name] = _fraction_true(_rows_equal(expected, stored_numbers, tolerance, column_tolerance))
    return _measure_worst(candidate, right_shares)


@integrity("history_in_lists")
def history_in_lists(candidate: Candidate) -> Measurement:
    """Check that lists of sampled users have no item of their history, and lists of items not the item itself."""
    evidence, leak_count, note = candidate.evidence, 0, ""
    for table in candidate.manifest.stored_tables.values():
        if table.kind != "topk" or table.is_facet:
            continue
        if table.entity == "user":
            positions, excluded = evidence.users.directory_positions, evidence.seen_items
        else:
            positions = evidence.sampled_item_ordinals
            excluded = Histories.of([[row] for row in positions.tolist()])
        records = evidence.records_of(table, positions)
        for row, record in enumerate(records):
            excluded_items = excluded.indices[excluded.indptr[row] : excluded.indptr[row + 1]]
            if np.isin(record["items"][: record["count"]], excluded_items).any():
                leak_count += 1
                note = note or f"lists of {table.name} with an item that must not be in them"
    return none_of(leak_count, note)


def _measure_worst(candidate: Candidate, right_shares: dict[str, float]) -> Measurement:
    threshold = candidate.thresholds.exact
    if not right_shares:
        return not_measured(threshold, "no table to recompute")
    worst_table, worst_share = worst_of(right_shares)
    return at_least(worst_share, threshold, f"sampled records of {worst_table}")


def _fraction_true(is_right: NDArray[np.bool_]) -> float:
    return float(is_right.mean()) if len(is_right) else float("nan")


def _run_model(candidate: Candidate, model: BundleModel) -> tuple[Floats, NDArray[np.int64]]:
    """Return (a model's outputs in full precision, the positions of their entities)."""
    evidence = candidate.evidence
    if model.entity == "item":
        positions = evidence.usable_item_ordinals(model)
        return evidence.run_model(model, evidence.item_inputs(model, positions)).astype(np.float64), positions
    if model.name == evidence.bundle.user_tower.name:
        vectors, usable_rows = evidence.user_vectors
    else:
        inputs, usable_rows = evidence.user_inputs(model)
        vectors = evidence.run_model(model, inputs)
    return vectors.astype(np.float64), evidence.users.directory_positions[usable_rows]


def _rows_equal(
    expected_numbers: NDArray[np.floating],
    actual_numbers: NDArray[np.floating],
    row_tolerance: float,
    column_tolerance: float = 0.0,
) -> NDArray[np.bool_]:
    """Return bool [n]: each number is off by at most `row_tolerance` of its row plus `column_tolerance` of its column.

    The tolerances are relative to the largest absolute values.
    """
    magnitudes = np.abs(expected_numbers.astype(np.float64))
    errors = np.abs(expected_numbers.astype(np.float64) - actual_numbers.astype(np.float64))
    allowed_errors = row_tolerance * magnitudes.max(axis=1, keepdims=True, initial=0)
    allowed_errors = allowed_errors + column_tolerance * np.fmax.reduce(
        magnitudes, axis=0, initial=0
    )  # fmax: a NaN only fails its own row
    is_equal: NDArray[np.bool_] = (errors <= allowed_errors).all(axis=1)
    return is_equal


def _check_lists(candidate: Candidate, table: Table) -> NDArray[np.bool_]:
    evidence = candidate.evidence
    if table.entity == "user":
        vectors, usable_rows = evidence.user_vectors
        positions, excluded = (
            evidence.users.directory_positions[usable_rows],
            evidence.seen_items.select_rows(usable_rows),
        )
    else:
        positions = evidence.sampled_item_ordinals
        vectors = candidate.items.vectors[positions]
        excluded = Histories.of([[row] for row in positions.tolist()])
    records = evidence.records_of(table, positions)
    present_rows = np.flatnonzero(records["flags"] != ABSENT_FLAGS)
    vectors, excluded, records = (vectors[present_rows], excluded.select_rows(present_rows), records[present_rows])
    is_right = np.zeros(len(present_rows), np.bool_)
    for first_row in range(0, len(present_rows), ROWS_AT_ONCE):
        chunk_rows = np.arange(first_row, min(first_row + ROWS_AT_ONCE, len(present_rows)))
        is_right[chunk_rows] = _check_lists_best(
            vectors[chunk_rows].astype(np.float64), candidate.items.vectors, excluded.select_rows(chunk_rows),
            records["items"][chunk_rows], records["count"][chunk_rows].astype(np.int64),
            dequantize(table.layout, records[chunk_rows], np.float64), table.layout, str(table.producer.index),
            evidence.allowed_items_by_table.get(table.name),
        )  # fmt: skip
    return is_right


def _check_lists_best(
    query_vectors: Floats,
    all_item_vectors: NDArray[np.float32],
    excluded_items: Histories,
    listed_items: NDArray[np.uint32],
    list_lengths: NDArray[np.int64],
    stored_numbers: Floats,
    layout: Layout,
    metric: str,
    allowed_mask: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """Return bool [lists]: the items' true scores are, position by position, the best ones, and are stored.

    With `allowed_mask` bool [items], only these items count.
    """
    width, item_count = layout.width, len(all_item_vectors)
    best_scores = np.full((len(query_vectors), width), -np.inf)
    listed_scores = np.full((len(query_vectors), width), -np.inf)
    length_max = 0.0
    if metric == "cosine":
        query_vectors = query_vectors / np.maximum(np.linalg.norm(query_vectors, axis=1, keepdims=True), 1e-300)
    excluded_rows = np.repeat(np.arange(len(query_vectors)), np.diff(excluded_items.indptr))
    is_used = np.arange(width) < list_lengths[:, None]
    for first_item in range(0, item_count, ITEMS_AT_ONCE):
        part_vectors = all_item_vectors[first_item : first_item + ITEMS_AT_ONCE].astype(np.float64)
        vector_lengths = np.linalg.norm(part_vectors, axis=1, keepdims=True)
        if metric == "cosine":
            part_vectors, vector_lengths = (
                part_vectors / np.maximum(vector_lengths, 1e-300),
                np.minimum(vector_lengths, 1.0),
            )
        length_max = max(length_max, float(vector_lengths.max(initial=0)))
        scores = query_vectors @ part_vectors.T
        if allowed_mask is not None:
            scores[:, ~allowed_mask[first_item : first_item + len(part_vectors)]] = -np.inf
        is_in_part = is_used & (listed_items >= first_item) & (listed_items < first_item + len(part_vectors))
        list_rows, list_slots = np.nonzero(is_in_part)
        listed_scores[list_rows, list_slots] = scores[
            list_rows, listed_items[list_rows, list_slots].astype(np.int64) - first_item
        ]
        is_excluded = (excluded_items.indices >= first_item) & (excluded_items.indices < first_item + len(part_vectors))
        scores[excluded_rows[is_excluded], excluded_items.indices[is_excluded] - first_item] = -np.inf
        if scores.shape[1] > width:
            scores.partition(scores.shape[1] - width, axis=1)
        merged_scores = np.concatenate([best_scores, scores[:, -width:]], axis=1)
        best_scores = np.partition(merged_scores, merged_scores.shape[1] - width, axis=1)[:, -width:]
    best_scores = -np.sort(-best_scores, axis=1)
    possible_counts = (best_scores > -np.inf).sum(axis=1)
    tolerance = SCORE_ROUNDING * np.linalg.norm(query_vectors, axis=1, keepdims=True) * length_max
    rounding_step = NUMBER_STEP_BY_PRECISION[layout.precision] * np.abs(stored_numbers).max(
        axis=1, initial=0, keepdims=True
    )
    with np.errstate(invalid="ignore"):
        is_as_good = ~is_used | (np.abs(listed_scores - best_scores) <= tolerance)
        has_stored_score = ~is_used | (np.abs(listed_scores - stored_numbers) <= tolerance + rounding_step)
    is_right: NDArray[np.bool_] = (
        (list_lengths == possible_counts) & is_as_good.all(axis=1) & has_stored_score.all(axis=1)
    )
    return is_right
