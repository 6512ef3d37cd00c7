"""Agreement of the int8 form of a model with its fp32 form: measured on real inputs, never assumed."""

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
from precompute.bundles.index import best_with, tiles

TOP = 20
NEWEST_OVERLAP = f"overlap_at_{TOP}_newest"
"""Fact of the agreement for histories of one item."""

ROWS_AT_ONCE = 256
_INVARIANCE_SIZES = (1, 2, 3, 17, 64)
_TIMED = 20


def agreement(
    fp32: Tower,
    int8: Tower,
    inputs: Inputs,
    item_vectors: NDArray[np.float32] | None = None,
    *,
    metric: Metric = "inner_product",
    excluded: Histories | None = None,
) -> dict[str, Any]:
    """Overlap of the top 20 (given `item_vectors` float32 [items, dims]), score error, batch invariance, speed.

    `score_error_p99` is relative to the largest score of the row; without item vectors, the error of
    the outputs relative to the row's largest one, and the top 1 instead of the top 20. `excluded`
    holds ordinals per row (their history) that count on neither side. `overlap_at_20_newest` is the overlap with
    histories of the newest item alone, as those of users whom the night does not know often are.
    """
    exact, approximate = fp32.run(inputs), int8.run(inputs)
    facts: dict[str, Any] = {"rows": row_count_of(inputs)}
    if item_vectors is None:
        facts["overlap_at_1"] = float((exact.argmax(axis=1) == approximate.argmax(axis=1)).mean())
        facts["score_error_p99"] = float(np.percentile(worst_row_errors(approximate, exact), 99))
    else:
        top = min(TOP, len(item_vectors))
        overlap, errors = _compare(exact, approximate, item_vectors, top, metric, excluded)
        facts[f"overlap_at_{TOP}"] = float(overlap.mean())
        facts[f"overlap_at_{TOP}_p1"] = float(np.percentile(overlap, 1))
        facts["score_error_p99"] = float(np.percentile(errors, 99))
        if (newest := with_newest_item(inputs)) is not None:
            overlap, _ = _compare(
                fp32.run(newest), int8.run(newest), item_vectors, top, metric, excluded
            )
            facts[NEWEST_OVERLAP] = float(overlap.mean())
    facts["batch_invariant"] = _is_invariant(int8, inputs, approximate)
    for name, rows in (("single", 1), ("batch_32", 32)):
        timed_inputs = select_rows(inputs, np.arange(min(rows, row_count_of(inputs))))
        slow, fast = [_seconds(partial(tower.run, timed_inputs)) for tower in (fp32, int8)]
        facts[f"speedup_{name}"] = round(slow / fast, 3)
    return facts


def list_overlaps(
    exact: NDArray[np.float32],
    approximate: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    metric: Metric,
    excluded: Histories,
) -> NDArray[np.float64]:
    """float64 [n]: the share of each row's exact top 20 that the approximate vectors find, history left out."""
    top = min(TOP, len(item_vectors))
    return _compare(exact, approximate, np.asarray(item_vectors), top, metric, excluded)[0]


def with_newest_item(inputs: Inputs) -> Inputs | None:
    """Return the inputs with each history cut to its newest item; None without histories."""
    if not any(isinstance(value, Histories) for value in inputs.values()):
        return None
    return {
        name: _newest_items(value) if isinstance(value, Histories) else value
        for name, value in inputs.items()
    }


def _newest_items(histories: Histories) -> Histories:
    counts = np.minimum(np.diff(histories.indptr), 1)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return Histories(indptr, histories.indices[histories.indptr[1:][counts > 0] - 1])


def select_rows(inputs: Inputs, rows: NDArray[np.int64]) -> dict[str, Histories | NDArray[Any]]:
    """Inputs of some of the rows, by the names they had."""
    return {
        name: value.select_rows(rows) if isinstance(value, Histories) else value[rows]
        for name, value in inputs.items()
    }


def _compare(
    exact: NDArray[np.float32],
    approximate: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    top: int,
    metric: Metric,
    excluded: Histories | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    overlap, errors = np.empty(len(exact)), np.empty(len(exact))
    for start in range(0, len(exact), ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, len(exact)))
        exclusions = (
            Histories.of([()] * len(rows)) if excluded is None else excluded.select_rows(rows)
        )
        lists, errors[rows] = _tops(
            (exact[rows], approximate[rows]), item_vectors, top, metric, exclusions
        )
        overlap[rows] = recalls(*lists)
    return overlap, errors


def _tops(
    vector_pair: tuple[NDArray[np.float32], NDArray[np.float32]],
    item_vectors: NDArray[np.float32],
    top: int,
    metric: Metric,
    exclusions: Histories,
) -> tuple[list[NDArray[np.uint32]], NDArray[np.float64]]:
    """(the best items of each row, of both kinds of vectors; the largest error by the largest score)."""
    row_of = np.repeat(np.arange(len(exclusions)), np.diff(exclusions.indptr))
    keys = [np.empty((len(exclusions), 0), np.uint64) for _ in vector_pair]
    largest, error = np.full(len(exclusions), 1e-30), np.zeros(len(exclusions))
    for start, part in tiles(item_vectors, metric):
        exact_scores, theirs = (vectors @ part.T for vectors in vector_pair)
        largest = np.maximum(largest, np.abs(exact_scores).max(axis=1))
        error = np.maximum(error, np.abs(exact_scores - theirs).max(axis=1))
        inside = (exclusions.indices >= start) & (exclusions.indices < start + len(part))
        for side_index, scores in enumerate((exact_scores, theirs)):
            scores[row_of[inside], exclusions.indices[inside] - start] = -np.inf
            keys[side_index] = best_with(keys[side_index], scores, start, top)
    return [unpack_sort_keys(packed_keys, top)[0] for packed_keys in keys], error / largest


def _is_invariant(tower: Tower, inputs: Inputs, full_output: NDArray[np.float32]) -> bool:
    for size in _INVARIANCE_SIZES:
        rows = np.arange(min(size, len(full_output)))
        if not np.array_equal(tower.run(select_rows(inputs, rows)), full_output[rows]):
            return False
    return True


def _seconds(run: Callable[[], object]) -> float:
    run()
    spent = []
    for _ in range(_TIMED):
        started = time.perf_counter()
        run()
        spent.append(time.perf_counter() - started)
    return statistics.median(spent)
