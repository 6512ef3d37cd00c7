"""Sums of samples: merged they are what one replica would have had, and their intervals hold what they say."""

from typing import Any

import numpy as np
import orjson
import pytest

from serving.quality.comparison import AnswerComparison
from serving.quality.results import (
    ERROR_BOUNDS,
    CellKey,
    SampleTotals,
    half_width,
    merge_cells,
    pack_cells,
    summarise_parts,
    wilson_interval,
)


def sample(overlap: float, error: float = 0.01, *, is_exact: bool = False) -> AnswerComparison:
    return AnswerComparison("t", "l1", "batch", "1-9", is_exact, overlap, error, 60.0)


def test_parts_of_several_replicas_are_one_whole() -> None:
    key: CellKey = "t", "l1", "batch", "1-9"
    total_cell, parts = SampleTotals(), []
    for part in range(3):
        cell = SampleTotals()
        for number in range(part + 2):
            answer_sample = sample(number / 4, 10.0**-number, is_exact=number == 1)
            cell.add_sample(answer_sample)
            total_cell.add_sample(answer_sample)
        parts.append(orjson.loads(orjson.dumps(pack_cells({key: cell}))))

    merged_cells = merge_cells([*parts, {}])

    *sums, errors = merged_cells[key].to_json()
    assert list(merged_cells) == [key] and errors == total_cell.error_bucket_counts
    assert sums == pytest.approx(total_cell.to_json()[:-1])


def test_errors_are_told_by_their_mean_and_the_bucket_of_the_worst_hundredth() -> None:
    cell = SampleTotals()
    for _ in range(99):
        cell.add_sample(sample(1.0, 0.0015))
    cell.add_sample(sample(1.0, 7.0))

    assert cell.mean_error()["p99"] == 0.002
    cell.add_sample(sample(1.0, 7.0))
    assert cell.mean_error()["p99"] == ERROR_BOUNDS[-1]


def test_nothing_known_is_said_as_such() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert SampleTotals().mean_overlap() == {"mean": 0.0, "low": 0.0, "high": 1.0}
    assert half_width(1.0, 1.0, 1) == 1.0
    part: dict[str, Any] = {"since": 1.0, "drift": {}, "hits": 0, "cells": {}}
    report = summarise_parts([part], worklist_size=None, read_share=None, size_bytes=0)
    assert report["samples"] == 0
    assert {report[field_name] for field_name in ("exact", "overlap", "score_error", "age_s")} == {None}


@pytest.mark.parametrize("of", [1, 3, 7, 66])
def test_bounds_end_where_every_sample_said_the_same(of: int) -> None:
    assert wilson_interval(of, of)[1] == 1.0 and wilson_interval(0, of)[0] == 0.0
    assert 0.0 < wilson_interval(of, of)[0] < 1.0 and 0.0 < wilson_interval(0, of)[1] < 1.0


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.97])
def test_the_interval_of_a_rate_holds_it_19_times_in_20(rate: float) -> None:
    rng = np.random.default_rng(2)
    covered_count = 0
    for hits in rng.binomial(80, rate, 2_000).tolist():
        low, high = wilson_interval(hits, 80)
        covered_count += low <= rate <= high

    assert 0.92 <= covered_count / 2_000 <= 0.99


def test_the_interval_of_a_mean_holds_it_19_times_in_20() -> None:
    rng = np.random.default_rng(3)
    covered_count = 0
    for _ in range(1_000):
        cell = SampleTotals()
        for overlap in rng.beta(8, 2, 100).tolist():
            cell.add_sample(sample(overlap))
        interval = cell.mean_overlap()
        covered_count += interval["low"] <= 0.8 <= interval["high"]

    assert 0.92 <= covered_count / 1_000 <= 0.98
