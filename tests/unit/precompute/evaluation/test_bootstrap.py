"""Intervals of means over users who are drawn again."""

import numpy as np
import pytest

from precompute.evaluation.freshness import bootstrap_means

ALL = np.ones((1, 600), np.bool_)


def test_means_are_over_the_rows_of_a_group():
    users = np.array([0, 0, 1, 2])
    values = np.array([[1.0, 0.5], [0.0, 0.5], [1.0, 0.5], [1.0, 0.5]])
    groups = np.array([[True] * 4, [False, True, True, False]])

    group_estimates = bootstrap_means(users, values, groups, np.random.default_rng(0))

    assert [[estimate.mean_value for estimate in row] for row in group_estimates] == [[0.75, 0.5], [0.5, 0.5]]
    assert (group_estimates[0][1].interval_low, group_estimates[0][1].interval_high) == (0.5, 0.5)
    assert group_estimates[1][0].interval_low == 0.0 and group_estimates[1][0].interval_high == 1.0


def test_an_interval_is_as_wide_as_the_normal_one_where_every_user_has_a_row():
    rng = np.random.default_rng(0)
    values = (rng.random((600, 1)) < 0.3).astype(np.float64)

    estimate = bootstrap_means(np.arange(600), values, ALL, rng)[0][0]

    error = values.std() / np.sqrt(600)
    assert estimate.interval_high - estimate.interval_low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert estimate.interval_low < values.mean() < estimate.interval_high


def test_rows_of_a_user_are_no_evidence_of_their_own():
    # Given 20 users, each with 30 rows of equal value
    values = np.repeat(np.arange(20) % 2, 30).astype(np.float64)[:, None]
    users = np.repeat(np.arange(20), 30)

    alone = bootstrap_means(np.arange(600), values, ALL, np.random.default_rng(0))[0][0]
    grouped_estimate = bootstrap_means(users, values, ALL, np.random.default_rng(0))[0][0]

    assert grouped_estimate.interval_high - grouped_estimate.interval_low > 4 * (
        alone.interval_high - alone.interval_low
    )


def test_the_interval_of_a_difference_is_that_of_pairs():
    rng = np.random.default_rng(0)
    base_values = (rng.random(600) < 0.5).astype(np.float64)
    improved_values = np.where(rng.random(600) < 0.02, 1.0, base_values)
    values = np.stack([base_values, improved_values, improved_values - base_values], axis=1)

    first, second, gain = bootstrap_means(np.arange(600), values, ALL, rng)[0]

    assert gain.mean_value == pytest.approx(second.mean_value - first.mean_value)
    assert gain.interval_high - gain.interval_low < (first.interval_high - first.interval_low) / 2


@pytest.mark.parametrize("seed", range(3))
def test_nineteen_of_twenty_intervals_hold_the_mean(seed):
    rng = np.random.default_rng(seed)
    values = (rng.random((600, 200)) < 0.3).astype(np.float64)

    column_estimates = bootstrap_means(np.arange(600), values, ALL, rng)[0]

    coverage = np.mean([estimate.interval_low <= 0.3 <= estimate.interval_high for estimate in column_estimates])
    assert 0.9 <= coverage <= 0.99


def test_the_same_seed_draws_the_same():
    values = np.random.default_rng(0).random((600, 2))

    first, second = (bootstrap_means(np.arange(600), values, ALL, np.random.default_rng(4)) for _ in "ab")

    assert first == second
