"""Reference for the exact top-K: a float64 brute force."""

import numpy as np

from cache.model.tower import Histories
from cache.records import NO_ITEM
from cache.topk.topk import Scorer

TOLERANCE = 1e-5
"""Relative; scores closer than this may change places."""


def brute(users, items, k, excluded, metric="inner_product", allowed=None):
    """Return ordinals and scores of the best k in float64, ties by ordinal."""
    wide_users, wide_items = users.astype(np.float64), items.astype(np.float64)
    if metric == "cosine":
        wide_users, wide_items = unit(wide_users), unit(wide_items)
    scores = wide_users @ wide_items.T
    if allowed is not None:
        scores[:, ~allowed] = -np.inf
    for row in range(len(users)):
        excluded_ordinals = excluded.indices[excluded.indptr[row] : excluded.indptr[row + 1]]
        scores[row, excluded_ordinals[(excluded_ordinals >= 0) & (excluded_ordinals < len(items))]] = -np.inf
    return np.argsort(-scores, axis=1, kind="stable")[:, :k], scores


def unit(vectors):
    """Return the rows divided by their lengths."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300)


def assert_exact(users, items, k, excluded, metric="inner_product", *, engine=True, allowed=None, **how):
    """Assert equal items where scores differ by more than the tolerance, no exclusions, right lengths and order."""
    scorer = Scorer.of(items, metric, engine=engine)
    ordinals, scores = scorer.top(users, k, excluded, allowed=allowed, **how)
    expected_ordinals, truth = brute(users, items, k, excluded, metric, allowed)
    assert ordinals.shape == scores.shape == (len(users), k)
    longest = np.linalg.norm(items.astype(np.float64), axis=1).max(initial=0)
    for row in range(len(users)):
        used = ordinals[row][ordinals[row] != NO_ITEM].astype(np.int64)
        assert len(used) == min(k, int((truth[row] > -np.inf).sum()))
        assert len(set(used.tolist())) == len(used)
        listed_true_scores, theirs = (truth[row][used], truth[row][expected_ordinals[row][: len(used)]])
        length = np.linalg.norm(users[row].astype(np.float64))
        reach = 1.0 if metric == "cosine" else length * longest
        # A score that is small only by cancellation has the rounding errors of its larger terms.
        slack = max(TOLERANCE * np.abs(theirs).max(initial=0), TOLERANCE / 10 * reach, 1e-43)
        assert np.isfinite(listed_true_scores).all()
        assert np.abs(listed_true_scores - theirs).max(initial=0) <= slack
        assert np.abs(scores[row][: len(used)] - listed_true_scores).max(initial=0) <= slack
        pairs = list(zip((-scores[row][: len(used)]).tolist(), used.tolist(), strict=True))
        assert pairs == sorted(pairs)
    return ordinals, scores


def make(users, items, dims, *, seed=0, skewed=True, longest=20):
    """Return (users, items, each user's items): Gaussian, with log-normal item lengths if `skewed`."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((items, dims)).astype(np.float32)
    if skewed:
        vectors *= np.exp(1.2 * rng.standard_normal((items, 1))).astype(np.float32)
    queries = rng.standard_normal((users, dims)).astype(np.float32)
    excluded = Histories.of(
        [rng.choice(items, rng.integers(0, min(longest, items)), replace=False) for _ in range(users)]
    )
    return queries, vectors, excluded
