"""The soak's judgement: a leak beneath flips' ups and downs is seen, and these alone are none."""

import numpy as np
import pytest

from tests.integration.soak.flat import growth, slope

HOURS_2 = np.arange(0.0, 7200.0, 10.0)
FLIPS = np.where(HOURS_2 % 600 < 40, 30_000.0, 0.0)
"""Kilobytes that a flip takes for forty seconds."""


def test_ups_and_downs_of_flips_are_no_growth() -> None:
    rng = np.random.default_rng(26)
    values = 100_000 + FLIPS + rng.normal(0, 500, len(HOURS_2))

    assert abs(growth(HOURS_2.tolist(), values.tolist())) < 500


def test_a_leak_at_each_flip_is_its_growth() -> None:
    values = 100_000 + FLIPS + 2_000 * np.floor(HOURS_2 / 600)

    assert growth(HOURS_2.tolist(), values.tolist()) == pytest.approx(12_000, rel=0.15)


def test_what_the_first_half_fills_is_left_out() -> None:
    values = np.minimum(HOURS_2 * 100, 300_000.0)

    assert growth(HOURS_2.tolist(), values.tolist()) == 0


def test_one_point_has_no_slope() -> None:
    with pytest.raises(ValueError, match="there are 1"):
        slope(np.zeros(1), np.zeros(1))
