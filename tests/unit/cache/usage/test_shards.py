"""The curve of L1 at other sizes: exact where everything is sampled, close where a part is, bounded always."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.format.ids import HASH_SPACE
from cache.usage.miss_ratio_curve import MissRatioCurve, RecencyStack
from tests.bench.tools.traces import capacities_of, lru_hit_ratio, orm_busy, sampled, trace_file, zipf

SMALL = (0.001, 0.002, 0.005)
LARGE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def spot(number: int) -> int:
    """Of a key, spread over the space as a hash is."""
    return number * 0x9E3779B97F4A7C15 % HASH_SPACE


def read(shards: MissRatioCurve, keys: Sequence[int], sizes: Sequence[int] | None = None) -> None:
    shards.count(len(keys), len(keys))
    for key in keys:
        shards.record_touches([(spot(key), 1 if sizes is None else sizes[key])])


@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=400),
    st.lists(st.integers(1, 50), min_size=20, max_size=20),
    st.sets(st.integers(1, 600), min_size=1, max_size=8).map(sorted),
)
def test_with_everything_sampled_it_is_the_exact_curve_of_lru(
    keys: list[int], sizes: list[int], capacities: list[int]
) -> None:
    shards = MissRatioCurve(capacities, sampled_keys_max=20)

    read(shards, keys, sizes)

    exact = [lru_hit_ratio(keys, sizes, capacity) for capacity in capacities]
    assert shards.rate == 1.0
    assert shards.hit_ratio_by_capacity() == pytest.approx(exact, abs=1e-12)


@given(st.integers(0, 1 << 32), st.integers(1, 400))
def test_slots_that_run_out_and_keys_out_of_reach_change_nothing(seed: int, capacity: int) -> None:
    rng = random.Random(seed)
    keys = [int(rng.paretovariate(0.7)) % 300 for _ in range(3_000)]
    shards = MissRatioCurve([capacity], sampled_keys_max=300)

    read(shards, keys)

    exact = lru_hit_ratio(keys, None, capacity)
    assert shards.hit_ratio_by_capacity() == pytest.approx([exact], abs=1e-12)


@given(
    st.lists(
        st.tuples(st.sampled_from(["touch", "touch", "touch", "forget", "close"]), st.integers(0, 60)),
        max_size=800,
    )
)  # fmt: skip
def test_the_bytes_above_a_key_are_those_touched_since(script: list[tuple[str, int]]) -> None:
    stack, order = RecencyStack(61), list[tuple[int, int]]()
    for at, (action, key) in enumerate(script):
        key_index = next((index for index, (stacked_key, _) in enumerate(order) if stacked_key == key), None)
        if action == "close" or stack.remaining_slots == 0:
            stack.close_up(1e9)
        if action == "touch":
            above = None if key_index is None else sum(size for _, size in order[key_index + 1 :])
            order = [(stacked_key, size) for stacked_key, size in order if stacked_key != key] + [(key, at + 1)]
            assert stack.move_to_top(key, at + 1) == above
        elif action == "forget" and key_index is not None:
            stack.forget(key)
            del order[key_index]
        assert list(stack) == [stacked_key for stacked_key, _ in order]
    newest_sizes = [size for _, size in reversed(order)]
    expected_counts = [
        max(n for n in range(len(newest_sizes) + 1) if sum(newest_sizes[:n]) <= d) for d in (0, 500, 9e9)
    ]
    assert stack.key_counts_within([0, 500, 9e9]) == expected_counts


@given(st.integers(0, 1 << 32), st.sampled_from([1, 2, 300, 900]))
def test_memory_is_bounded_whatever_comes(seed: int, keys_max: int) -> None:
    rng = random.Random(seed)
    shards = MissRatioCurve([1_000, 2_000], keys_max)
    previous_rate = shards.rate
    for _ in range(40):
        spots = [rng.randrange(HASH_SPACE) for _ in range(50)] * 2
        for key_spot in spots:
            shards.record_touches([(key_spot, rng.choice((1, -1)) * rng.randint(1, 9))])

        assert shards.sampled_key_count <= keys_max
        assert len(shards._negated_spot_heap) == len(shards._stack) == shards.sampled_key_count
        assert len(shards._stack._bytes_by_slot) <= max(256, 2 * keys_max + 128)
        assert all(key_spot <= shards.greatest_sampled_spot for key_spot in shards._stack)
        assert shards.rate <= previous_rate
        previous_rate = shards.rate


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_of_zipf_is_within_a_point_of_exact(seed: int) -> None:
    keys = zipf(40_000, 400_000, seed=seed)
    capacities = capacities_of(keys, SMALL + LARGE)
    shards = MissRatioCurve(capacities, sampled_keys_max=16_384)

    sampled(keys, shards, seed=seed)

    key_list = keys.tolist()
    exact = np.array([lru_hit_ratio(key_list, None, capacity) for capacity in capacities])
    error = np.abs(np.array(shards.hit_ratio_by_capacity()) - exact) * 100
    assert 0.4 < shards.rate < 0.6
    assert error[: len(SMALL)].max() <= 4.0, error
    assert error[len(SMALL) :].max() <= 1.0, error


@pytest.mark.skipif(trace_file() is None, reason="LARDER_BENCH_DATA names no folder with traces/")
def test_a_real_trace_is_within_a_point_of_exact() -> None:
    file = trace_file()
    assert file is not None
    keys = orm_busy(file)
    capacities = capacities_of(keys, SMALL + LARGE)
    shards = MissRatioCurve(capacities, sampled_keys_max=16_384)

    sampled(keys, shards)

    key_list = keys.tolist()
    exact = np.array([lru_hit_ratio(key_list, None, capacity) for capacity in capacities])
    error = np.abs(np.array(shards.hit_ratio_by_capacity()) - exact) * 100
    assert 0.15 < shards.rate < 0.3
    assert error[: len(SMALL)].max() <= 3.0, error
    assert error[len(SMALL) :].max() <= 1.0, error


@pytest.mark.parametrize("hot_key_spot", [1, HASH_SPACE - 1], ids=["in the sample", "not in the sample"])
def test_a_key_that_is_asked_for_all_the_time_is_counted_for_what_it_is(hot_key_spot: int) -> None:
    """SHARDS-adj: without it one key would count for as many as the rate says, or for none at all."""
    rng = random.Random(0)
    shards = MissRatioCurve([100, 20_000], sampled_keys_max=500)
    cold = [rng.randrange(HASH_SPACE) for _ in range(5_000)]
    for cold_spot in cold * 2:
        for touched_spot in (cold_spot, hot_key_spot):
            shards.count(1, 1)
            shards.record_touches([(touched_spot, 1)])

    low, high = shards.hit_ratio_by_capacity()

    assert shards.rate < 0.2
    assert low == pytest.approx(0.5, abs=0.06)
    assert high == pytest.approx(0.75, abs=0.06)


def test_what_is_found_nowhere_is_a_miss_at_every_size() -> None:
    shards = MissRatioCurve([10, 20], sampled_keys_max=100)
    read(shards, [1, 2, 1, 2])

    shards.count(hit_count=0, read_count=4)

    assert shards.hit_ratio_by_capacity() == [0.25, 0.25]


def test_a_store_moves_its_key_and_counts_for_nothing() -> None:
    shards = MissRatioCurve([2], sampled_keys_max=100)
    read(shards, [1, 2, 3])
    shards.record_touches([(spot(1), -1), (spot(4), -1)])

    read(shards, [1, 4, 3])

    assert shards.sampled_reads == 6
    assert shards.hit_ratio_by_capacity() == [pytest.approx(2 / 6)]


def test_reads_of_long_ago_count_for_less() -> None:
    shards = MissRatioCurve([1, 10], sampled_keys_max=100)
    read(shards, [1, 2] * 500)
    previous_hit_ratios = shards.hit_ratio_by_capacity()
    shards.age(0.001)

    read(shards, [1, 1] * 500)

    assert previous_hit_ratios == [0.0, pytest.approx(998 / 1_000)]
    assert min(shards.hit_ratio_by_capacity()) > 0.99


def test_a_restart_forgets_keys_and_keeps_what_was_counted() -> None:
    shards = MissRatioCurve([10], sampled_keys_max=2)
    read(shards, [1, 2, 1, 2, 3, 4, 5])
    read_count, rate = shards.reads, shards.rate
    shards.restart()

    read(shards, [1])

    assert rate < 1.0 == shards.rate and shards.sampled_key_count == 1
    assert shards.reads == read_count + 1


def test_a_lower_rate_samples_fewer_keys() -> None:
    shards = MissRatioCurve([10_000], sampled_keys_max=10_000)
    read(shards, list(range(1_000)))

    shards.lower_rate(0.25)
    shards.lower_rate(0.5)

    assert shards.rate == 0.25
    assert shards.sampled_key_count == pytest.approx(250, abs=60)
    shards.lower_rate(0.0)
    assert 0 < shards.rate < 1e-8


def test_the_entries_of_a_capacity_are_those_that_fit() -> None:
    shards = MissRatioCurve([25, 100, 1_000], sampled_keys_max=100)

    read(shards, [0, 1, 2, 3, 4], sizes=[500, 10, 10, 20, 5])

    assert shards.key_count_by_capacity() == [2, 4, 5]


def test_before_the_first_read_every_ratio_is_none() -> None:
    assert MissRatioCurve([1, 2], sampled_keys_max=1).hit_ratio_by_capacity() == [0.0, 0.0]
