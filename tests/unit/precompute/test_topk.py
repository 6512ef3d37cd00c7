"""The exact top-K against a float64 brute force."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import ConfigError
from cache.records import NO_ITEM
from cache.tower import Histories
from precompute import topk
from precompute.topk import Scorer, exact_topk

TOLERANCE = 1e-5


def brute(users, items, k, excluded, metric="inner_product"):
    """Ordinals and scores of the best k in float64, ties by ordinal."""
    wide_users, wide_items = users.astype(np.float64), items.astype(np.float64)
    if metric == "cosine":
        wide_users = wide_users / np.maximum(
            np.linalg.norm(wide_users, axis=1, keepdims=True), 1e-300
        )
        wide_items = wide_items / np.maximum(
            np.linalg.norm(wide_items, axis=1, keepdims=True), 1e-300
        )
    scores = wide_users @ wide_items.T
    for row in range(len(users)):
        scores[row, excluded.indices[excluded.indptr[row] : excluded.indptr[row + 1]]] = -np.inf
    return np.argsort(-scores, axis=1, kind="stable")[:, :k], scores


def assert_exact(users, items, k, excluded, metric="inner_product", **how):
    """Same items wherever score gaps exceed the tolerance, nothing excluded, right lengths and order."""
    ordinals, scores = exact_topk(users, items, k, excluded, metric=metric, **how)
    wanted, truth = brute(users, items, k, excluded, metric)
    assert ordinals.shape == scores.shape == (len(users), k)
    for row in range(len(users)):
        used = ordinals[row][ordinals[row] != NO_ITEM].astype(np.int64)
        assert len(used) == min(k, int((truth[row] > -np.inf).sum()))
        assert len(set(used.tolist())) == len(used)
        ours, theirs = truth[row][used], truth[row][wanted[row][: len(used)]]
        longest = np.linalg.norm(items.astype(np.float64), axis=1).max(initial=0)
        reach = 1.0 if metric == "cosine" else np.linalg.norm(users[row]) * longest
        # Scores that are small only by cancellation are rounded like the terms they come from.
        slack = max(TOLERANCE * np.abs(theirs).max(initial=0), TOLERANCE / 10 * reach)
        assert np.isfinite(ours).all()
        assert np.abs(ours - theirs).max(initial=0) <= slack
        assert np.abs(scores[row][: len(used)] - ours).max(initial=0) <= slack
        pairs = list(zip((-scores[row][: len(used)]).tolist(), used.tolist(), strict=True))
        assert pairs == sorted(pairs)


def make(users, items, dims, *, seed=0, skewed=True, longest=20):
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((items, dims)).astype(np.float32)
    if skewed:
        vectors *= np.exp(1.2 * rng.standard_normal((items, 1))).astype(np.float32)
    queries = rng.standard_normal((users, dims)).astype(np.float32)
    excluded = Histories.of(
        [
            rng.choice(items, rng.integers(0, min(longest, items)), replace=False)
            for _ in range(users)
        ]
    )
    return queries, vectors, excluded


@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
@pytest.mark.parametrize("k", [1, 7, 100, 1000])
def test_lists_equal_a_float64_brute_force(metric, k):
    users, items, excluded = make(60, 1500, 32)

    assert_exact(users, items, k, excluded, metric)


@pytest.mark.parametrize("skewed", [True, False])
def test_small_and_large_chunks_give_the_same_lists(monkeypatch, skewed):
    users, items, excluded = make(200, 3000, 16, skewed=skewed, seed=2)
    assert_exact(users, items, 20, excluded)
    plain = exact_topk(users, items, 20, excluded)
    monkeypatch.setattr(topk, "_CHUNK_CANDIDATES", 500)

    small = exact_topk(users, items, 20, excluded)

    assert np.array_equal(plain[0], small[0])
    assert np.array_equal(plain[1].view(np.uint32), small[1].view(np.uint32))


def test_lists_that_cannot_be_certified_are_scored_against_every_item(monkeypatch):
    users, items, excluded = make(40, 800, 16, seed=4)
    plain = exact_topk(users, items, 20, excluded)
    monkeypatch.setattr(topk, "_ROUNDING", 1.0)

    scanned = exact_topk(users, items, 20, excluded)

    assert np.array_equal(plain[0], scanned[0])
    assert np.array_equal(plain[1].view(np.uint32), scanned[1].view(np.uint32))


def test_batches_and_threads_change_no_bit():
    users, items, excluded = make(70, 900, 24, seed=3)
    whole = exact_topk(users, items, 15, excluded, threads=2)

    for size in (1, 3, 19, 20, 21):
        rows = np.arange(size)
        part = exact_topk(users[:size], items, 15, excluded.take(rows), threads=1)
        assert np.array_equal(part[0], whole[0][:size])
        assert np.array_equal(part[1].view(np.uint32), whole[1][:size].view(np.uint32))


def test_ties_in_masses_are_settled_by_ordinal():
    # Given items that are all alike, and many more than any over-fetch
    items = np.ones((2000, 8), np.float32)
    users = np.ones((3, 8), np.float32)
    excluded = Histories.of([[0, 2], [], [1999]])

    ordinals, _ = exact_topk(users, items, 5, excluded)

    assert ordinals.tolist() == [[1, 3, 4, 5, 6], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_a_user_without_direction_gets_the_first_items():
    users, items, _ = make(1, 500, 8)

    ordinals, scores = exact_topk(users * 0, items, 4, Histories.of([[1]]))

    assert ordinals.tolist() == [[0, 2, 3, 4]]
    assert not scores.any()


def test_a_user_who_has_everything_gets_an_empty_list():
    users, items, _ = make(2, 30, 8)

    ordinals, scores = exact_topk(users, items, 3, Histories.of([np.arange(30), [-1]]))

    assert (ordinals[0] == NO_ITEM).all()
    assert not scores[0].any()
    assert (ordinals[1] != NO_ITEM).all()


def test_no_users_is_fine():
    users, items, _ = make(1, 30, 8)

    ordinals, _ = exact_topk(users[:0], items, 3)

    assert ordinals.shape == (0, 3)


@pytest.mark.parametrize("k", [0, 1001])
def test_k_out_of_range_is_refused(k):
    users, items, _ = make(1, 30, 8)

    with pytest.raises(ConfigError, match=str(k)):
        exact_topk(users, items, k)


def test_progress_counts_every_user_once():
    users, items, excluded = make(50, 300, 8)
    told: list[int] = []

    exact_topk(users, items, 5, excluded, progress=told.append)

    assert sum(told) == 50


def test_memory_does_not_grow_with_the_number_of_users(monkeypatch):
    # Given tiles of 64 users (pitfall P16)
    monkeypatch.setattr(topk, "_CHUNK_CANDIDATES", 5000)

    def peak(users):
        queries, items, excluded = make(users, 2000, 8, longest=8)
        scorer = Scorer.of(items)
        tracemalloc.start()
        scorer.top(queries, 50, excluded, threads=1)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most - users * 50 * 8  # what it returns

    # When four times the users are scored, then the peak stays
    assert peak(2048) < 1.5 * peak(512)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_small_case_is_exact(data):
    items = data.draw(st.integers(1, 60), "items")
    dims = data.draw(st.integers(1, 6), "dims")
    users = data.draw(st.integers(1, 5), "users")
    k = data.draw(st.integers(1, 70), "k")
    metric = data.draw(st.sampled_from(["inner_product", "cosine"]), "metric")
    # Small whole numbers make ties common.
    whole = st.integers(-3, 3)
    vectors = np.array(
        data.draw(
            st.lists(st.lists(whole, min_size=dims, max_size=dims), min_size=items, max_size=items)
        ),
        np.float32,
    )
    queries = np.array(
        data.draw(
            st.lists(st.lists(whole, min_size=dims, max_size=dims), min_size=users, max_size=users)
        ),
        np.float32,
    )
    excluded = Histories.of(
        [data.draw(st.lists(st.integers(0, items - 1), unique=True)) for _ in range(users)]
    )

    assert_exact(queries, vectors, k, excluded, metric)


def test_whole_numbers_tie_exactly_and_ordinals_decide():
    rng = np.random.default_rng(5)
    items = rng.integers(-2, 3, (700, 4)).astype(np.float32)
    users = rng.integers(-2, 3, (40, 4)).astype(np.float32)
    excluded = Histories.of([rng.choice(700, 9, replace=False) for _ in range(40)])

    ordinals, _ = exact_topk(users, items, 25, excluded)

    assert ordinals.tolist() == brute(users, items, 25, excluded)[0].tolist()
