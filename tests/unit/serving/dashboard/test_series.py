"""Bins as columns."""

from serving.dashboard.series import REASONS_MAX, row, series
from serving.dashboard.time_bins import BIN_S
from serving.metrics.log_buckets import finer

BOUNDS = finer((0.001, 1.0))


def test_columns_have_one_place_per_bin_and_zeros_where_nothing_was_told() -> None:
    rows = {
        100: row({"r": 2, "a:l1": 1, "a:live": 1, "s:live": 1_500_000, "h:live:90": 1}, BOUNDS),
        120: row({"r": 1, "m:evicted": 4}, BOUNDS),
        130: row({"r": 7}, BOUNDS),
    }
    found = series(rows, until=130)

    assert (found["at"], found["step_s"]) == ([100, 110, 120], BIN_S)
    assert found["requests"] == [2, 0, 1]
    assert found["answers"]["l1"] == [1, 0, 0] and found["answers"]["default"] == [0, 0, 0]
    assert found["stages"]["live"] == [1.5, 0.0, 0.0]
    assert found["misses"] == {"evicted": [0, 0, 4]}
    (first, *rest) = found["seconds"]["live"]["p99"]
    assert BOUNDS[89] < first < BOUNDS[90] and rest == [None, None]


def test_nothing_is_known_yet() -> None:
    found = series({}, until=130)

    assert found["at"] == [] and found["answers"]["l1"] == [] and found["misses"] == {}


def test_rare_reasons_are_summed_up() -> None:
    many = {f"m:reason-{number:02}": 100 - number for number in range(REASONS_MAX + 3)}
    found = series({0: row(many, BOUNDS)}, until=10)["misses"]

    assert len(found) == REASONS_MAX + 1
    assert found["other"] == [sum(sorted(many.values())[:3])]
    assert sum(n for (n,) in found.values()) == sum(many.values())
