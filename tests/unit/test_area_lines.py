"""No area of the source has more lines than its row allows."""

from pathlib import PurePosixPath

import pytest

from tests.area_lines import Row, area_of, complaints, lines_by_area, lines_of_tree, read_table


def test_no_area_has_more_lines_than_its_row() -> None:
    assert complaints(lines_of_tree(), read_table()) == []


def test_every_row_says_why() -> None:
    assert [area for area, row in read_table().items() if len(row.reason.split()) < 3] == []


@pytest.mark.parametrize(("path", "area"), [
    ("serving/engine/ladder.py", "core of serving"), ("serving/near/attach.py", "near"),
    ("cache/reuse.py", "reuse"), ("precompute/filters/a.py", "filters"), ("dags/a.py", "dags"),
    ("infra/demo/a/b.py", "infra/demo"), ("infra/__init__.py", "infra"),
])  # fmt: skip
def test_a_feature_is_one_area_in_all_packages(path: str, area: str) -> None:
    assert area_of(PurePosixPath(path)) == area


def test_lines_beyond_a_row_and_areas_without_one_are_named() -> None:
    lines = lines_by_area([("cache/a.py", 7), ("cache/b/c.c", 4), ("cache/b/c.md", 90), ("dags/d.py", 1)])

    assert complaints(lines, {"core of cache": Row(10, ""), "near": Row(1, "")}) == [
        "dags has no row",
        "near has a row, and no file",
        "core of cache has 11 lines, 10 are allowed",
    ]
