"""Rows that count twice are counted, within a file and in two of them, in bounded memory."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from precompute.sources.columns import Ids
from precompute.sources.repeated_rows import RepeatedRows


def add(repeated: RepeatedRows, path: Path, rows: NDArray[np.int64], times: NDArray[np.int64] | None = None) -> None:
    """Add rows by their numbers."""
    users, items = (
        pa.array([f"{kind}{row % count}" for row in rows.tolist()]) for kind, count in (("u", 997), ("i", 89))
    )
    repeated.add(path, Ids.of(users), Ids.of(items), rows if times is None else times)


def test_of_more_rows_than_are_kept_a_share_of_the_users_is_compared() -> None:
    repeated = RepeatedRows(rows_compared_max=10_000)
    one, other = Path("1/a.csv"), Path("2/a.csv")
    add(repeated, one, np.arange(1, 40_001))
    add(repeated, one, np.arange(40_001, 60_001))
    add(repeated, other, np.arange(50_001, 110_001))

    (remark,) = repeated.remarks()

    assert remark.startswith("1/a.csv and 2/a.csv hold about ") and "rows in common" in remark
    count = int(remark.split("about ")[1].split(" ")[0].replace(",", ""))
    assert abs(count - 10_000) < 1_500
    assert repeated._compared_row_count <= 10_000


def test_clicks_without_times_that_come_again_are_usual() -> None:
    rows = np.random.default_rng(0).integers(1, 3_000, 10_000)
    repeated = RepeatedRows()
    add(repeated, Path("a.csv"), rows[:5_000], np.zeros(5_000, np.int64))
    add(repeated, Path("b.csv"), rows[5_000:], np.zeros(5_000, np.int64))

    assert repeated.remarks() == []


def test_a_few_rows_in_a_hundred_thousand_are_no_remark() -> None:
    repeated = RepeatedRows()
    add(repeated, Path("a.csv"), np.arange(1, 100_001))
    add(repeated, Path("a.csv"), np.arange(1, 101))

    assert repeated.remarks() == []
