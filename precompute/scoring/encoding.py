"""Answers as records of a table, whatever a few of them hold."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import UnfitValue
from cache.format.records.codec import Flags, absent, encode_numbers, encode_topk
from cache.format.records.layout import Layout
from cache.format.records.quantization import unfit

Answers = tuple[NDArray[np.uint32], NDArray[np.float32]] | NDArray[np.float32]
"""(ordinals, scores) of lists, or the numbers of vectors and values; a row for each entity."""

AT_ONCE = 2048
"""Records encoded at once."""


def encode(
    layout: Layout,
    fingerprints: NDArray[np.uint64],
    answers: Answers,
    has_answer: NDArray[np.bool_],
    at: int,
    flags: Flags = 0,
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """(records[n], which of those with an answer do not fit their precision): both kinds of the others are absent.

    An absent one has an answer in another table of the same entities only, and none of the `flags`.
    """
    if has_answer.all():
        try:
            return _encode(layout, fingerprints, answers, at, flags), np.zeros(
                len(fingerprints), np.bool_
            )
        except UnfitValue:
            pass
    numbers = answers[1] if isinstance(answers, tuple) else answers
    is_unfit = unfit(layout, numbers) & has_answer
    rows = np.flatnonzero(has_answer & ~is_unfit)
    row_answers = (answers[0][rows], numbers[rows]) if isinstance(answers, tuple) else numbers[rows]
    records = absent(layout, fingerprints, at)
    some_flags = flags if isinstance(flags, int) else flags[rows]
    records[rows] = _encode(layout, fingerprints[rows], row_answers, at, some_flags)
    return records, is_unfit


def finite_rows(numbers: NDArray[np.float32]) -> NDArray[np.bool_]:
    """bool [n]; a sum is finite only if all are, so only the rare row whose sum is not is looked at closely."""
    with np.errstate(over="ignore", invalid="ignore"):
        finite: NDArray[np.bool_] = np.isfinite(numbers.sum(axis=1))
    suspects = np.flatnonzero(~finite)
    finite[suspects] = np.isfinite(numbers[suspects]).all(axis=1)
    return finite


def _encode(
    layout: Layout, fingerprints: NDArray[np.uint64], answers: Answers, at: int, flags: Flags
) -> NDArray[Any]:
    """Records of rows that all have answers, AT_ONCE at a time: what is between stays in a core's caches."""
    if len(fingerprints) <= AT_ONCE:
        return _encode_some(layout, fingerprints, answers, at, flags)
    records = np.empty(len(fingerprints), layout.dtype)
    for start in range(0, len(fingerprints), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        row_answers = (
            (answers[0][rows], answers[1][rows]) if isinstance(answers, tuple) else answers[rows]
        )
        some_flags = flags if isinstance(flags, int) else flags[rows]
        row_records = _encode_some(layout, fingerprints[rows], row_answers, at, some_flags)
        # As bytes: numpy copies records field by field.
        records[rows].view(np.uint8)[:] = row_records.view(np.uint8)
    return records


def _encode_some(
    layout: Layout, fingerprints: NDArray[np.uint64], answers: Answers, at: int, flags: Flags
) -> NDArray[Any]:
    if isinstance(answers, tuple):
        return encode_topk(layout, fingerprints, *answers, at, flags=flags)
    return encode_numbers(layout, fingerprints, answers, at, flags=flags)
