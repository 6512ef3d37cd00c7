"""Bins as columns."""

from serving.dashboard.aggregator import SHOWN_REASONS_MAX, build_series, draw_bin
from serving.dashboard.counters import BIN_S
from serving.metrics.collectors import refine_bounds

BOUNDS = refine_bounds((0.001, 1.0))


def test_columns_have_one_entry_per_bin_and_zeros_where_nothing_was_reported() -> None:
    rows = {
        100: draw_bin({"r": 2, "a:l1": 1, "a:live": 1, "s:live": 1_500_000, "h:live:90": 1}, BOUNDS),
        120: draw_bin({"r": 1, "m:evicted": 4}, BOUNDS),
        130: draw_bin({"r": 7}, BOUNDS),
    }
    columns = build_series(rows, end_bin_start=130)

    assert (columns["at"], columns["step_s"]) == ([100, 110, 120], BIN_S)
    assert columns["requests"] == [2, 0, 1]
    assert columns["answers"]["l1"] == [1, 0, 0] and columns["answers"]["default"] == [0, 0, 0]
    assert columns["stages"]["live"] == [1.5, 0.0, 0.0]
    assert columns["misses"] == {"evicted": [0, 0, 4]}
    (first, *later_quantiles) = columns["seconds"]["live"]["p99"]
    assert BOUNDS[89] < first < BOUNDS[90] and later_quantiles == [None, None]


def test_nothing_is_known_yet() -> None:
    columns = build_series({}, end_bin_start=130)

    assert columns["at"] == [] and columns["answers"]["l1"] == [] and columns["misses"] == {}


def test_rare_reasons_are_summed_up() -> None:
    counts = {f"m:reason-{number:02}": 100 - number for number in range(SHOWN_REASONS_MAX + 3)}
    miss_columns = build_series({0: draw_bin(counts, BOUNDS)}, end_bin_start=10)["misses"]

    assert len(miss_columns) == SHOWN_REASONS_MAX + 1
    assert miss_columns["other"] == [sum(sorted(counts.values())[:3])]
    assert sum(n for (n,) in miss_columns.values()) == sum(counts.values())
