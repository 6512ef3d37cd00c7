"""What looks odd about interactions is said once, in words that name the figure."""

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cache.errors import SourceError
from precompute.config.settings import Sources
from precompute.sources.plausibility import (
    GATE_USERS_MIN,
    InteractionFigures,
    RowCounts,
    demand_enough_ids,
    few_in_words,
    has_lists_of_ids,
    plausibility_remarks,
    unknown_item_share,
)
from precompute.sources.readers import read_interactions

NOW_S = 1_700_000_000


def shape_of(folder: Path, rows: list[str], **sources: str) -> InteractionFigures:
    """Shape of a CSV file of these rows of user, item and time."""
    (folder / "a.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    (batch,) = read_interactions(Sources(("a.csv",), **sources), folder)  # type: ignore[arg-type]
    return InteractionFigures.of_batch(batch)


def make_usual_rows(rows: int = 1000) -> list[str]:
    return [f"u{row % 150},i{row % 40},{NOW_S + row}" for row in range(rows)]


def test_labels_of_a_classifier_are_no_items_that_are_too_few() -> None:
    remark = few_in_words(40, None)

    assert remark is not None and "40 users; shares" in remark and "item" not in remark
    assert few_in_words(GATE_USERS_MIN, None) is None


def test_of_usual_interactions_nothing_is_said(tmp_path: Path) -> None:
    assert plausibility_remarks(shape_of(tmp_path, make_usual_rows())) == []


def test_one_id_with_a_fifth_of_the_rows_is_named(tmp_path: Path) -> None:
    rows = make_usual_rows() + [f"0,i{row % 40},{NOW_S}" for row in range(300)]

    (remark,) = plausibility_remarks(shape_of(tmp_path, rows))

    assert remark.startswith("the user '0' has 23% of all rows")


def test_items_that_come_only_once_are_reported_with_fields_that_hold_several(tmp_path: Path) -> None:
    rows = [f"u{row},i{row} j{row} k{row},{NOW_S}" for row in range(200)]

    (remark,) = plausibility_remarks(shape_of(tmp_path, rows))

    assert "200 items in 200 rows: nearly every item occurs once, and most hold several words" in remark


def test_times_that_are_all_older_than_any_log_are_reported(tmp_path: Path) -> None:
    rows = [row.rpartition(",")[0] + f",{number + 1}" for number, row in enumerate(make_usual_rows())]

    (remark,) = plausibility_remarks(shape_of(tmp_path, rows))

    assert remark.startswith("the newest time is 1970-01-01")


@pytest.mark.parametrize("newest", ["2100-01-01", "4102444800"])
def test_a_newest_time_in_the_future_is_told(tmp_path: Path, newest: str) -> None:
    (remark,) = plausibility_remarks(shape_of(tmp_path, [*make_usual_rows(), f"u1,i1,{newest}"]))

    assert remark.startswith("the newest time is 2100-01-01")


def test_times_of_another_zone_are_told_and_a_clock_a_little_ahead_is_not(tmp_path: Path) -> None:
    ahead_s = int(time.time()) + 3 * 3600
    (remark,) = plausibility_remarks(shape_of(tmp_path, [*make_usual_rows(), f"u1,i1,{ahead_s}"]))

    assert "3.0 h ahead of this host's clock" in remark and "time zone" in remark
    assert plausibility_remarks(shape_of(tmp_path, [*make_usual_rows(), f"u1,i1,{int(time.time()) + 300}"])) == []


def test_times_before_1980_among_later_ones_are_told(tmp_path: Path) -> None:
    (remark,) = plausibility_remarks(shape_of(tmp_path, [*make_usual_rows(), "u1,i1,1971-05-06", "u1,i1,86400"]))

    assert remark.startswith("2 of 1,002 rows have a time before 1980")


def test_the_share_of_rows_without_a_time_is_reported(tmp_path: Path) -> None:
    rows = [row.rpartition(",")[0] + ",0" for row in make_usual_rows(100)] + make_usual_rows(900)

    (remark,) = plausibility_remarks(shape_of(tmp_path, rows))

    assert remark.startswith("10% of the rows have no time")
    assert plausibility_remarks(shape_of(tmp_path, rows, timestamp_column="")) == []


def test_too_little_data_is_said_with_what_is_needed(tmp_path: Path) -> None:
    (remark,) = plausibility_remarks(shape_of(tmp_path, ["u1,i1,1700000000", "u2,i2,1700000000"]))

    assert "too little data to judge by: 2 users and 2 items" in remark
    assert "about 100 users and 20 items" in remark
    with pytest.raises(SourceError, match="1 user and 1 item; at least 2 users and 2 items"):
        demand_enough_ids(1, 1)
    demand_enough_ids(2, 2)


def test_counts_of_two_parts_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(4)
    hashes = rng.integers(0, 1 << 63, 1000).astype(np.uint64) * np.uint64(2)
    times = rng.integers(0, 3, 1000)
    all_counts, parts = RowCounts(), RowCounts()
    all_counts.add(hashes, times)
    parts.add(hashes[700:], times[700:])

    parts = RowCounts.of_report(parts.to_json())
    parts.add(hashes[:700], times[:700])

    assert parts.to_json() == all_counts.to_json()
    assert all_counts.rows_by_user_bucket.sum() == 1000 and all_counts.newest_time_us == 2
    assert all_counts.row_count_before_1980 == (times > 0).sum()


def test_few_ids_and_ids_of_one_word_are_no_histories() -> None:
    assert not has_lists_of_ids(pa.array(["a b"] * 30))
    assert not has_lists_of_ids(pa.array([f"a b{row}" for row in range(5)]))
    assert not has_lists_of_ids(pa.array([f"item-{row}" for row in range(30)]))
    assert has_lists_of_ids(pa.array([f"a,b{row}" for row in range(30)]))


def test_a_column_in_which_most_fields_hold_several_ids_holds_histories() -> None:
    histories = [f"i{row} j{row} k{row}" for row in range(60)]
    assert has_lists_of_ids(pa.array([*histories, *["i1"] * 40]))
    assert not has_lists_of_ids(pa.array([*histories, *["i1"] * 80]))
    assert not has_lists_of_ids(pa.array(["The Third Man", "Some Like It Hot"] * 30))


def test_few_rows_without_a_time_are_reported_by_their_number() -> None:
    shape = InteractionFigures(
        row_count=4_200, user_count=300, item_count=120, most_rows_of_user=20, most_rows_of_item=90,
        untimed_row_count=1, newest_time_us=10**15
    )  # fmt: skip
    assert any(remark.startswith("1 of 4,200 rows have no time") for remark in plausibility_remarks(shape))


def test_events_make_the_share_of_unknown_items_no_larger() -> None:
    """Anybody sends events: those on invented items would refuse every night."""
    assert unknown_item_share(100, 60, 0) == 0.6
    assert unknown_item_share(100 + 900, 10 + 900, 900) == 0.1
    assert unknown_item_share(100 + 900, 60 + 300, 900) == 0.0
    assert unknown_item_share(19, 19, 0) is None
