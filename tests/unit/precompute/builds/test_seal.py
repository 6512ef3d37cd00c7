"""What the manifest says of how long a night took."""

from typing import Any

import pytest

from precompute.builds.seal import scoring_seconds


def report(began_at: float, ended_at: float) -> dict[str, Any]:
    return {"began_at": began_at, "ended_at": ended_at}


@pytest.mark.parametrize(
    ("reports", "seconds"),
    [
        ([report(5, 8)], 3),
        ([report(5, 8), report(6, 10), report(10, 11)], 6),  # overlapping, then at once
        ([report(100, 103), report(5, 8)], 6),  # one was tried again long after
        ([report(5, 20), report(6, 7)], 15),  # within another
        ([{"shard": 0}, report(5, 8)], 3),  # begun by a program that did not note it
    ],
)
def test_scoring_took_as_long_as_any_shard_was_under_way(
    reports: list[dict[str, Any]], seconds: float
) -> None:
    assert scoring_seconds(reports) == pytest.approx(seconds)
