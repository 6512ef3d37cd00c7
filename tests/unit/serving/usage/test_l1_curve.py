"""The advisors of several workers are told as one, each counted by its reads."""

from typing import Any

import pytest

from serving.usage.l1_advisor import (
    LARGEST_DOUBLING,
    SMALLEST_DOUBLING,
    STEPS_PER_DOUBLING,
    HitRatioCurve,
    format_size,
    merge_curves,
)

POINTS = (LARGEST_DOUBLING - SMALLEST_DOUBLING) * STEPS_PER_DOUBLING + 1


def told(ratio: float, reads: float, *, budget: int = 1 << 20) -> dict[str, Any]:
    """A worker whose curve rises to `ratio` at its budget, and no further."""
    sizes = [round(budget * 2 ** (SMALLEST_DOUBLING + at / STEPS_PER_DOUBLING)) for at in range(POINTS)]
    ratios = [min(1.0, size / budget) * ratio for size in sizes]
    return HitRatioCurve(budget, sizes, ratios, [10] * POINTS, 0.5, 100, reads).to_json()


def test_workers_count_by_their_reads() -> None:
    merged_curve = merge_curves([told(0.8, 3_000), None, told(0.4, 1_000)])

    assert merged_curve is not None
    assert merged_curve["hit_ratio"] == pytest.approx(0.7)
    assert (merged_curve["sampled"], merged_curve["reads"], merged_curve["sampling_rate"]) == (200, 4_000, 0.5)
    assert merged_curve["sentence"] == "L1 of 1 MiB gives 70.0 %, doubling adds nothing, halving costs 35.0"
    assert [point["bytes"] for point in merged_curve["curve"]] == [point["bytes"] for point in told(1, 1)["curve"]]


def test_one_is_told_as_it_is() -> None:
    assert merge_curves([told(0.5, 700)]) == told(0.5, 700)


def test_of_several_budgets_the_one_with_most_reads_is_told() -> None:
    merged_curve = merge_curves([told(0.8, 10), told(0.3, 900, budget=1 << 21), told(0.8, 20)])

    assert merged_curve is not None and (merged_curve["budget_bytes"], merged_curve["reads"]) == (1 << 21, 900)


def test_nobody_knows_anything_yet() -> None:
    assert merge_curves([None, None]) is None
    idle = merge_curves([told(0.5, 0), told(0.5, 0)])
    assert idle is not None and idle["hit_ratio"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(12, "12 B"), (1_536, "1.5 KiB"), (256 << 20, "256 MiB"), (1_023 << 20, "1023 MiB")]
)
def test_sizes_are_told_in_binary_units(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
