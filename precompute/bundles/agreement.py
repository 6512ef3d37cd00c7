"""Agreement of a model's int8 form with its fp32 form, measured on real inputs."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.model.agreement import recalls, worst_row_errors
from cache.model.ranking import Metric, unpack_sort_keys
from cache.model.tower import Histories, Inputs, Tower, row_count_of
from precompute.bundles.index import iterate_tiles, merge_best_keys

TOP_ITEMS = 20
NEWEST_OVERLAP_FACT = f"overlap_at_{TOP_ITEMS}_newest"
"""Fact of the agreement for histories of one item."""

ROWS_AT_ONCE = 256
_INVARIANCE_ROW_COUNTS = (1, 2, 3, 17, 64)
_TIMED_RUNS = 20


def measure_agreement(
    fp32_tower: Tower,
    int8_tower: Tower,
    inputs: Inputs,
    item_vectors: NDArray[np.float32] | None = None,
    *,
    metric: Metric = "inner_product",
    excluded_ordinals: Histories | None = None,
) -> dict[str, Any]:
    """Measure the agreement of an int8 model with the fp32 model: overlap, score error, batch invariance and speed.

    With `item_vectors` float32 [items, dims], the overlap is that of the top 20 items, and `score_error_p99` is
    relative to the largest score of the row. Without, the overlap is that of the top 1 output, and the error is that of
    the outputs relative to the row's largest. Each row's `excluded_ordinals` (its history) are left out of both lists.
    `overlap_at_20_newest` is the overlap with histories of the newest item alone, which users unknown to the night
    often have.
    """
    exact_outputs, int8_outputs = fp32_tower.run(inputs), int8_tower.run(inputs)
    agreement_facts: dict[str, Any] = {"rows": row_count_of(inputs)}
    if item_vectors is None:
        agreement_facts["overlap_at_1"] = float((exact_outputs.argmax(axis=1) == int8_outputs.argmax(axis=1)).mean())
        agreement_facts["score_error_p99"] = float(np.percentile(worst_row_errors(int8_outputs, exact_outputs), 99))
    else:
        top_count = min(TOP_ITEMS, len(item_vectors))
        row_overlaps, score_errors = _compare_tops(
            exact_outputs, int8_outputs, item_vectors, top_count, metric, excluded_ordinals
        )
        agreement_facts[f"overlap_at_{TOP_ITEMS}"] = float(row_overlaps.mean())
        agreement_facts[f"overlap_at_{TOP_ITEMS}_p1"] = float(np.percentile(row_overlaps, 1))
        agreement_facts["score_error_p99"] = float(np.percentile(score_errors, 99))
        if (newest_item_inputs := with_newest_item(inputs)) is not None:
            row_overlaps, _ = _compare_tops(
                fp32_tower.run(newest_item_inputs),
                int8_tower.run(newest_item_inputs),
                item_vectors,
                top_count,
                metric,
                excluded_ordinals,
            )
            agreement_facts[NEWEST_OVERLAP_FACT] = float(row_overlaps.mean())
    agreement_facts["batch_invariant"] = _is_batch_invariant(int8_tower, inputs, int8_outputs)
    for name, row_count in (("single", 1), ("batch_32", 32)):
        timed_inputs = select_input_rows(inputs, np.arange(min(row_count, row_count_of(inputs))))
        fp32_seconds, int8_seconds = [
            _median_seconds(partial(tower.run, timed_inputs)) for tower in (fp32_tower, int8_tower)
        ]
        agreement_facts[f"speedup_{name}"] = round(fp32_seconds / int8_seconds, 3)
    return agreement_facts


def list_overlaps(
    exact_vectors: NDArray[np.float32],
    approximate_vectors: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    metric: Metric,
    excluded_ordinals: Histories,
) -> NDArray[np.float64]:
    """Return float64 [n]: the share of each row's exact top 20, without its history, that approximate vectors find."""
    top_count = min(TOP_ITEMS, len(item_vectors))
    return _compare_tops(
        exact_vectors, approximate_vectors, np.asarray(item_vectors), top_count, metric, excluded_ordinals
    )[0]


def with_newest_item(inputs: Inputs) -> Inputs | None:
    """Return the inputs with each history cut to its newest item; None without histories."""
    if not any(isinstance(input_value, Histories) for input_value in inputs.values()):
        return None
    return {
        input_name: _newest_items(input_value) if isinstance(input_value, Histories) else input_value
        for input_name, input_value in inputs.items()
    }


def _newest_items(histories: Histories) -> Histories:
    newest_counts = np.minimum(np.diff(histories.indptr), 1)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(newest_counts)])
    return Histories(indptr, histories.indices[histories.indptr[1:][newest_counts > 0] - 1])


def select_input_rows(inputs: Inputs, row_indexes: NDArray[np.int64]) -> dict[str, Histories | NDArray[Any]]:
    """Return the inputs of some of the rows, by the same names."""
    return {
        input_name: input_value.select_rows(row_indexes)
        if isinstance(input_value, Histories)
        else input_value[row_indexes]
        for input_name, input_value in inputs.items()
    }


def _compare_tops(
    exact_vectors: NDArray[np.float32],
    approximate_vectors: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    top_count: int,
    metric: Metric,
    excluded_ordinals: Histories | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    row_overlaps, score_errors = np.empty(len(exact_vectors)), np.empty(len(exact_vectors))
    for batch_start in range(0, len(exact_vectors), ROWS_AT_ONCE):
        batch_rows = np.arange(batch_start, min(batch_start + ROWS_AT_ONCE, len(exact_vectors)))
        exclusions = (
            Histories.of([()] * len(batch_rows))
            if excluded_ordinals is None
            else excluded_ordinals.select_rows(batch_rows)
        )
        list_pair, score_errors[batch_rows] = _top_items_of_both(
            (exact_vectors[batch_rows], approximate_vectors[batch_rows]), item_vectors, top_count, metric, exclusions
        )
        row_overlaps[batch_rows] = recalls(*list_pair)
    return row_overlaps, score_errors


def _top_items_of_both(
    vector_pair: tuple[NDArray[np.float32], NDArray[np.float32]],
    item_vectors: NDArray[np.float32],
    top_count: int,
    metric: Metric,
    exclusions: Histories,
) -> tuple[list[NDArray[np.uint32]], NDArray[np.float64]]:
    """Return (best items of each row by exact and by approximate vectors, largest error relative to the top score)."""
    row_of_exclusion = np.repeat(np.arange(len(exclusions)), np.diff(exclusions.indptr))
    best_keys_by_side = [np.empty((len(exclusions), 0), np.uint64) for _ in vector_pair]
    largest_scores, largest_errors = np.full(len(exclusions), 1e-30), np.zeros(len(exclusions))
    for first_ordinal, item_tile in iterate_tiles(item_vectors, metric):
        exact_scores, approximate_scores = (vectors @ item_tile.T for vectors in vector_pair)
        largest_scores = np.maximum(largest_scores, np.abs(exact_scores).max(axis=1))
        largest_errors = np.maximum(largest_errors, np.abs(exact_scores - approximate_scores).max(axis=1))
        is_in_tile = (exclusions.indices >= first_ordinal) & (exclusions.indices < first_ordinal + len(item_tile))
        for side_index, scores in enumerate((exact_scores, approximate_scores)):
            scores[row_of_exclusion[is_in_tile], exclusions.indices[is_in_tile] - first_ordinal] = -np.inf
            best_keys_by_side[side_index] = merge_best_keys(
                best_keys_by_side[side_index], scores, first_ordinal, top_count
            )
    return [
        unpack_sort_keys(packed_keys, top_count)[0] for packed_keys in best_keys_by_side
    ], largest_errors / largest_scores


def _is_batch_invariant(tower: Tower, inputs: Inputs, full_output: NDArray[np.float32]) -> bool:
    for row_count in _INVARIANCE_ROW_COUNTS:
        first_rows = np.arange(min(row_count, len(full_output)))
        if not np.array_equal(tower.run(select_input_rows(inputs, first_rows)), full_output[first_rows]):
            return False
    return True


def _median_seconds(timed_call: Callable[[], object]) -> float:
    timed_call()
    durations_s = []
    for _ in range(_TIMED_RUNS):
        started_at = time.perf_counter()
        timed_call()
        durations_s.append(time.perf_counter() - started_at)
    return statistics.median(durations_s)
