"""Gates on what the records say: computed again in float64, apart from how the night computed it.

Nothing here is shared with the code that is judged, nor with `cache.model.agreement`: an error in it would agree with
itself.
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

ROUNDING: Final = 2e-5
"""Rounding tolerance of a score, relative to the lengths of both vectors: twice what a user's vector may be off on a
device (`scoring.towers.DEVICE_LENGTH_AGREEMENT`), and the rounding of a float32 product."""

OUTPUT_ROUNDING: Final = 1e-4
"""Rounding tolerance of a model's outputs between batches and devices, relative to the row's largest; as
`scoring.towers.DEVICE_AGREEMENT`."""

COLUMN_ROUNDING: Final = 1e-5
"""Further rounding tolerance of a value, relative to the largest of its label in the sample: a regressor's sum of trees
is rounded at the size of its terms, in another order in each batch, and may itself be near 0."""

ITEMS_AT_ONCE: Final = 8_192
ROWS_AT_ONCE: Final = 512

Floats = NDArray[np.float64]


@integrity("item_vectors")
def item_vectors(candidate: Candidate) -> Measurement:
    """Compare vectors of sampled items with the outputs of the bundle's item tower."""
    evidence = candidate.evidence
    model, rows = evidence.bundle.item_tower, evidence.item_rows
    exact = evidence.run(model, evidence.item_inputs(model, rows))
    right = _rows_equal(exact, candidate.items.vectors[rows], OUTPUT_ROUNDING)
    return at_least(
        _fraction_true(right), candidate.thresholds.exact, f"of {len(rows)} sampled items"
    )


@integrity("exact_lists")
def exact_lists(candidate: Candidate) -> Measurement:
    """Stored lists and scores of sampled entities are the best that there are, recomputed over all items."""
    right_shares: dict[str, float] = {}
    for table in candidate.manifest.stored_tables.values():
        if table.kind == "topk" and table.producer.kind in ("topk", "similar"):
            right_shares[table.name] = _fraction_true(_right_lists(candidate, table))
    return _worst(candidate, right_shares)


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
        expected, positions = _outputs(candidate, model)
        records = evidence.records_of(table, positions)
        is_present = records["flags"] != ABSENT_FLAGS  # how many are not, coverage judges
        expected, stored_numbers = (
            expected[is_present],
            dequantize(table.layout, records[is_present], np.float64),
        )
        tolerance = OUTPUT_ROUNDING + NUMBER_STEP_BY_PRECISION[table.layout.precision]
        of_column = COLUMN_ROUNDING if table.kind == "value" else 0.0
        right_shares[table.name] = _fraction_true(
            _rows_equal(expected, stored_numbers, tolerance, of_column)
        )
    return _worst(candidate, right_shares)


@integrity("history_in_lists")
def history_in_lists(candidate: Candidate) -> Measurement:
    """Lists of sampled users hold no item of their own history, lists of items never the item itself."""
    evidence, leaks, note = candidate.evidence, 0, ""
    for table in candidate.manifest.stored_tables.values():
        if table.kind != "topk" or table.is_facet:
            continue
        if table.entity == "user":
            positions, excluded = evidence.users.positions, evidence.seen_items
        else:
            positions = evidence.item_rows
            excluded = Histories.of([[row] for row in positions.tolist()])
        records = evidence.records_of(table, positions)
        for row, record in enumerate(records):
            excluded_items = excluded.indices[excluded.indptr[row] : excluded.indptr[row + 1]]
            if np.isin(record["items"][: record["count"]], excluded_items).any():
                leaks += 1
                note = note or f"lists of {table.name} with an item that must not be in them"
    return none_of(leaks, note)


def _worst(candidate: Candidate, right_shares: dict[str, float]) -> Measurement:
    threshold = candidate.thresholds.exact
    if not right_shares:
        return not_measured(threshold, "no table to recompute")
    named, worst = worst_of(right_shares)
    return at_least(worst, threshold, f"sampled records of {named}")


def _fraction_true(right: NDArray[np.bool_]) -> float:
    return float(right.mean()) if len(right) else float("nan")


def _outputs(candidate: Candidate, model: BundleModel) -> tuple[Floats, NDArray[np.int64]]:
    """(a model's outputs in full precision, the positions of the entities they are for)."""
    evidence = candidate.evidence
    if model.entity == "item":
        positions = evidence.item_rows_for(model)
        return evidence.run(model, evidence.item_inputs(model, positions)).astype(
            np.float64
        ), positions
    if model.name == evidence.bundle.user_tower.name:
        vectors, rows = evidence.user_vectors
    else:
        inputs, rows = evidence.user_inputs(model)
        vectors = evidence.run(model, inputs)
    return vectors.astype(np.float64), evidence.users.positions[rows]


def _rows_equal(
    expected: NDArray[np.floating],
    actual: NDArray[np.floating],
    tolerance: float,
    of_column: float = 0.0,
) -> NDArray[np.bool_]:
    """bool [n]: no number differs by more than `tolerance` of its row's largest plus `of_column` of its column's."""
    sizes = np.abs(expected.astype(np.float64))
    errors = np.abs(expected.astype(np.float64) - actual.astype(np.float64))
    allowed = tolerance * sizes.max(axis=1, keepdims=True, initial=0)
    allowed = allowed + of_column * np.fmax.reduce(sizes, axis=0, initial=0)  # NaN is of its row
    equal: NDArray[np.bool_] = (errors <= allowed).all(axis=1)
    return equal


def _right_lists(candidate: Candidate, table: Table) -> NDArray[np.bool_]:
    evidence = candidate.evidence
    if table.entity == "user":
        vectors, rows = evidence.user_vectors
        positions, excluded = evidence.users.positions[rows], evidence.seen_items.select_rows(rows)
    else:
        positions = evidence.item_rows
        vectors = candidate.items.vectors[positions]
        excluded = Histories.of([[row] for row in positions.tolist()])
    records = evidence.records_of(table, positions)
    present_rows = np.flatnonzero(records["flags"] != ABSENT_FLAGS)
    vectors, excluded, records = (
        vectors[present_rows],
        excluded.select_rows(present_rows),
        records[present_rows],
    )
    right = np.zeros(len(present_rows), np.bool_)
    for start in range(0, len(present_rows), ROWS_AT_ONCE):
        chunk_rows = np.arange(start, min(start + ROWS_AT_ONCE, len(present_rows)))
        right[chunk_rows] = _compare(
            vectors[chunk_rows].astype(np.float64), candidate.items.vectors, excluded.select_rows(chunk_rows),
            records["items"][chunk_rows], records["count"][chunk_rows].astype(np.int64),
            dequantize(table.layout, records[chunk_rows], np.float64), table.layout, str(table.producer.index),
            evidence.allowed.get(table.name),
        )  # fmt: skip
    return right


def _compare(
    queries: Floats,
    vectors: NDArray[np.float32],
    excluded: Histories,
    items: NDArray[np.uint32],
    counts: NDArray[np.int64],
    numbers: Floats,
    layout: Layout,
    metric: str,
    allowed: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """bool [lists]: the true scores of its items are, place by place, the best that there are, and stored so.

    Of the items `allowed` bool [items] alone, where that is given.
    """
    width, total = layout.width, len(vectors)
    best_scores = np.full((len(queries), width), -np.inf)
    listed_scores = np.full((len(queries), width), -np.inf)
    longest = 0.0
    if metric == "cosine":
        queries = queries / np.maximum(np.linalg.norm(queries, axis=1, keepdims=True), 1e-300)
    row_of = np.repeat(np.arange(len(queries)), np.diff(excluded.indptr))
    used = np.arange(width) < counts[:, None]
    for start in range(0, total, ITEMS_AT_ONCE):
        part = vectors[start : start + ITEMS_AT_ONCE].astype(np.float64)
        lengths = np.linalg.norm(part, axis=1, keepdims=True)
        if metric == "cosine":
            part, lengths = part / np.maximum(lengths, 1e-300), np.minimum(lengths, 1.0)
        longest = max(longest, float(lengths.max(initial=0)))
        scores = queries @ part.T
        if allowed is not None:
            scores[:, ~allowed[start : start + len(part)]] = -np.inf
        inside = used & (items >= start) & (items < start + len(part))
        rows, slots = np.nonzero(inside)
        listed_scores[rows, slots] = scores[rows, items[rows, slots].astype(np.int64) - start]
        is_excluded = (excluded.indices >= start) & (excluded.indices < start + len(part))
        scores[row_of[is_excluded], excluded.indices[is_excluded] - start] = -np.inf
        if scores.shape[1] > width:
            scores.partition(scores.shape[1] - width, axis=1)
        merged_scores = np.concatenate([best_scores, scores[:, -width:]], axis=1)
        best_scores = np.partition(merged_scores, merged_scores.shape[1] - width, axis=1)[
            :, -width:
        ]
    best_scores = -np.sort(-best_scores, axis=1)
    possible = (best_scores > -np.inf).sum(axis=1)
    tolerance = ROUNDING * np.linalg.norm(queries, axis=1, keepdims=True) * longest
    step = NUMBER_STEP_BY_PRECISION[layout.precision] * np.abs(numbers).max(
        axis=1, initial=0, keepdims=True
    )
    with np.errstate(invalid="ignore"):
        as_good = ~used | (np.abs(listed_scores - best_scores) <= tolerance)
        as_said = ~used | (np.abs(listed_scores - numbers) <= tolerance + step)
    right: NDArray[np.bool_] = (counts == possible) & as_good.all(axis=1) & as_said.all(axis=1)
    return right
