"""What a batch costs, learned from the batches before it."""

import math

import pytest

from serving.engine.micro_batcher import BatchCost


def learned(fixed: float, per_job_s: float, sizes: tuple[int, ...] = (1, 8, 32, 64)) -> BatchCost:
    cost = BatchCost()
    for size in sizes * 10:
        cost.add(size, fixed + per_job_s * size)
    return cost


def test_fixed_and_variable_cost_are_separated() -> None:
    assert learned(0.002, 0.0001).expected_batch_s(128) == pytest.approx(0.002 + 0.0128)


def test_before_the_first_batch_everything_is_possible() -> None:
    assert BatchCost().expected_batch_s(64) == 0 and BatchCost().batch_size_within(0.0, 64) == 64


def test_only_as_many_are_taken_as_end_in_time() -> None:
    cost = learned(0.002, 0.0001)

    assert cost.batch_size_within(math.inf, 64) == 64
    assert cost.batch_size_within(0.0041, 64) == pytest.approx(20, abs=1)
    assert cost.batch_size_within(0.001, 64) == 0
    assert cost.batch_size_within(-1.0, 64) == 0


def test_batches_of_one_size_tell_nothing_about_others() -> None:
    assert learned(0.002, 0.0, (4,)).expected_batch_s(64) == pytest.approx(0.002)


def test_a_changed_machine_is_learned_and_a_doubted_estimate_fades() -> None:
    cost = learned(1.0, 0.1)
    for _ in range(50):
        cost.fade()
    assert cost.batch_size_within(0.02, 64) >= 1

    for size in (1, 32) * 100:
        cost.add(size, 0.001 + 0.0001 * size)
    assert cost.expected_batch_s(32) == pytest.approx(0.0042, rel=0.01)
