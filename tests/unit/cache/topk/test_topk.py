"""The exact top-K against a float64 brute force."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.errors import ConfigError
from cache.model.tower import Histories
from cache.records import NO_ITEM
from cache.topk import flat, topk
from cache.topk.topk import Scorer
from tests.unit.precompute.exactness import assert_exact, brute, make


@pytest.fixture(params=["kernel", "flat"], autouse=True)
def engine(request, monkeypatch):
    """Every test runs with what is installed, and as if the kernel had not been built."""
    if request.param == "flat":
        monkeypatch.setattr(topk, "find_kernel", lambda: None)
    return request.param


@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
@pytest.mark.parametrize("k", [1, 7, 100, 1000])
def test_lists_equal_a_float64_brute_force(metric, k):
    users, items, excluded = make(60, 1500, 32)

    assert_exact(users, items, k, excluded, metric)


@pytest.mark.parametrize("skewed", [True, False])
def test_small_and_large_chunks_give_the_same_lists(monkeypatch, skewed):
    users, items, excluded = make(200, 3000, 16, skewed=skewed, seed=2)
    assert_exact(users, items, 20, excluded)
    default_lists = Scorer.of(items).top(users, 20, excluded)
    monkeypatch.setattr(flat, "_CHUNK_CANDIDATES_MAX", 500)

    small = Scorer.of(items).top(users, 20, excluded)

    assert np.array_equal(default_lists[0], small[0])
    assert np.array_equal(default_lists[1].view(np.uint32), small[1].view(np.uint32))


def test_lists_that_cannot_be_certified_are_scored_against_every_item(monkeypatch):
    users, items, excluded = make(40, 800, 16, seed=4)
    certified_lists = Scorer.of(items).top(users, 20, excluded)
    monkeypatch.setattr(flat, "_FLOAT32_ROUNDING", 1.0)

    scanned = Scorer.of(items).top(users, 20, excluded)

    assert np.array_equal(certified_lists[0], scanned[0])
    assert np.array_equal(certified_lists[1].view(np.uint32), scanned[1].view(np.uint32))


def test_batches_and_threads_change_no_bit():
    users, items, excluded = make(70, 900, 24, seed=3)
    full_batch_lists = Scorer.of(items).top(users, 15, excluded, threads=2)

    for size in (1, 3, 19, 20, 21):
        rows = np.arange(size)
        part = Scorer.of(items).top(users[:size], 15, excluded.select_rows(rows), threads=1)
        assert np.array_equal(part[0], full_batch_lists[0][:size])
        assert np.array_equal(part[1].view(np.uint32), full_batch_lists[1][:size].view(np.uint32))


def test_ties_in_masses_are_settled_by_ordinal():
    # Given identical items, many more than are ever fetched in excess
    items = np.ones((2000, 8), np.float32)
    users = np.ones((3, 8), np.float32)
    excluded = Histories.of([[0, 2], [], [1999]])

    ordinals, _ = Scorer.of(items).top(users, 5, excluded)

    assert ordinals.tolist() == [[1, 3, 4, 5, 6], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_a_user_without_direction_gets_the_first_items():
    users, items, _ = make(1, 500, 8)

    ordinals, scores = Scorer.of(items).top(users * 0, 4, Histories.of([[1]]))

    assert ordinals.tolist() == [[0, 2, 3, 4]]
    assert not scores.any()


def test_a_user_who_has_everything_gets_an_empty_list():
    users, items, _ = make(2, 30, 8)

    ordinals, scores = Scorer.of(items).top(users, 3, Histories.of([np.arange(30), [-1]]))

    assert (ordinals[0] == NO_ITEM).all()
    assert not scores[0].any()
    assert (ordinals[1] != NO_ITEM).all()


def test_no_users_is_fine():
    users, items, _ = make(1, 30, 8)

    ordinals, _ = Scorer.of(items).top(users[:0], 3)

    assert ordinals.shape == (0, 3)


@pytest.mark.parametrize("k", [0, 1001])
def test_k_out_of_range_is_refused(k):
    users, items, _ = make(1, 30, 8)

    with pytest.raises(ConfigError, match=str(k)):
        Scorer.of(items).top(users, k)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 20_000), st.integers(1, 64))
def test_slabs_are_all_rows_once_and_end_small(users, threads):
    slabs = [range(slab.start, slab.stop) for slab in topk.user_slabs(users, threads)]

    assert [row for slab in slabs for row in slab] == list(range(users))
    sizes = [len(slab) for slab in slabs]
    assert sorted(sizes, reverse=True) == sizes and max(sizes, default=0) <= 1024
    if users > 2048 * threads:
        assert sizes[0] == 1024 and sizes[-1] <= 256


def test_progress_counts_every_user_once():
    users, items, excluded = make(50, 300, 8)
    progress_counts: list[int] = []

    Scorer.of(items).top(users, 5, excluded, progress=progress_counts.append)

    assert sum(progress_counts) == 50


def test_memory_does_not_grow_with_the_number_of_users(engine, monkeypatch):
    # Given tiles of 64 users
    monkeypatch.setattr(flat, "_CHUNK_CANDIDATES_MAX", 5000)

    def peak(users):
        queries, items, excluded = make(users, 2000, 8, longest=8)
        scorer = Scorer.of(items)
        peaks = []
        for _ in range(4):  # the first loads what is loaded once; another thread only ever adds
            tracemalloc.start()
            scorer.top(queries, 50, excluded, threads=1)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return min(peaks) - users * 50 * 8  # what it returns

    # When four times the users are scored
    bytes_per_user = (peak(2048) - peak(512)) / (2048 - 512)

    # Then one more user costs only its marks and its share of a slab, against 400 bytes of result
    assert bytes_per_user < {"kernel": 8, "flat": 48}[engine], f"{bytes_per_user:.1f} bytes for each further user"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_small_case_is_exact(data):
    items = data.draw(st.integers(1, 60), "items")
    dims = data.draw(st.integers(1, 6), "dims")
    users = data.draw(st.integers(1, 5), "users")
    k = data.draw(st.integers(1, 70), "k")
    metric = data.draw(st.sampled_from(["inner_product", "cosine"]), "metric")
    # Small whole numbers often give ties.
    whole_numbers = st.integers(-3, 3)
    vectors = np.array(
        data.draw(st.lists(st.lists(whole_numbers, min_size=dims, max_size=dims), min_size=items, max_size=items)),
        np.float32,
    )
    queries = np.array(
        data.draw(st.lists(st.lists(whole_numbers, min_size=dims, max_size=dims), min_size=users, max_size=users)),
        np.float32,
    )
    excluded = Histories.of([data.draw(st.lists(st.integers(0, items - 1), unique=True)) for _ in range(users)])

    assert_exact(queries, vectors, k, excluded, metric)


def test_whole_numbers_tie_exactly_and_ordinals_decide():
    rng = np.random.default_rng(5)
    items = rng.integers(-2, 3, (700, 4)).astype(np.float32)
    users = rng.integers(-2, 3, (40, 4)).astype(np.float32)
    excluded = Histories.of([rng.choice(700, 9, replace=False) for _ in range(40)])

    ordinals, _ = Scorer.of(items).top(users, 25, excluded)

    assert ordinals.tolist() == brute(users, items, 25, excluded)[0].tolist()


@pytest.mark.parametrize(("requested_threads", "expected_threads"), [(None, 3), (2, 2)])
def test_without_a_number_as_many_threads_run_as_cores_may_be_used(monkeypatch, requested_threads, expected_threads):
    """A pod of four processors on a host of 96 took 96 threads."""
    users, items, excluded = make(30, 200, 8)
    scorer, numbers = Scorer.of(items), []

    class RecordingExecutor(ThreadPoolExecutor):
        def __init__(self, threads):
            numbers.append(threads)
            super().__init__(threads)

    monkeypatch.setattr(topk, "usable_cores", lambda: 3)
    monkeypatch.setattr(topk, "ThreadPoolExecutor", RecordingExecutor)

    scorer.top(users, 5, excluded, threads=requested_threads)

    assert numbers and set(numbers) == {expected_threads}
