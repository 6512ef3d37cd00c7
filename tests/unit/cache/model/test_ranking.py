import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.model.ranking import pack_sort_keys, rank, score, top_sort_keys, unpack_sort_keys
from cache.records import NO_ITEM


def test_order_is_score_then_ordinal():
    items = np.array([[1.0], [3.0], [1.0], [3.0]], np.float32)
    users = np.array([[1.0]], np.float32)

    ordinals, scores = rank(users, items, np.array([[3, 2, 1, 0]]), None, 4)

    assert ordinals.tolist() == [[1, 3, 0, 2]]
    assert scores.tolist() == [[3.0, 3.0, 1.0, 1.0]]


def test_excluded_and_unused_candidates_never_appear():
    items = np.arange(6, dtype=np.float32)[:, None]
    users = np.ones((2, 1), np.float32)
    candidates = np.array([[5, 4, 3, -1], [5, 4, 3, 2]])
    # -1 stands for an id that the generation does not know; as an index it must not exclude the last candidate.
    excluded = [np.array([4]), np.array([-1])]

    ordinals, scores = rank(users, items, candidates, excluded, 3)

    assert ordinals.tolist() == [[5, 3, NO_ITEM], [5, 4, 3]]
    assert scores[0].tolist() == [5.0, 3.0, 0.0]


def test_a_row_is_ranked_alike_in_any_batch_and_order():
    rng = np.random.default_rng(3)
    items = rng.standard_normal((500, 37)).astype(np.float32)
    users = rng.standard_normal((64, 37)).astype(np.float32)
    candidates = np.stack([rng.permutation(500)[:90] for _ in range(64)])

    batch_ranking = rank(users, items, candidates, None, 20)

    for row in range(64):
        shuffled = rng.permutation(candidates[row])[None]
        alone = rank(users[row : row + 1], items, shuffled, None, 20)
        assert np.array_equal(alone[0][0], batch_ranking[0][row])
        assert np.array_equal(alone[1][0].view(np.uint32), batch_ranking[1][row].view(np.uint32))


def test_scores_agree_with_float64():
    rng = np.random.default_rng(4)
    items = rng.standard_normal((50, 256)).astype(np.float32)
    users = rng.standard_normal((3, 256)).astype(np.float32)
    candidates = np.tile(np.arange(50), (3, 1))

    inner = score(users, items, candidates)
    cosine = score(users, items, candidates, "cosine")

    wide = users.astype(np.float64) @ items.T.astype(np.float64)
    lengths = np.linalg.norm(users, axis=1)[:, None] * np.linalg.norm(items, axis=1)
    assert np.allclose(inner, wide, rtol=1e-5, atol=1e-4)
    assert np.allclose(cosine, wide / lengths, rtol=1e-5, atol=1e-6)


def test_cosine_with_a_zero_vector_is_zero():
    zero, ones = np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)

    assert score(zero, ones, np.array([[0]]), "cosine").tolist() == [[0.0]]
    assert score(ones, zero, np.array([[0]]), "cosine").tolist() == [[0.0]]


@given(
    st.lists(
        st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, NO_ITEM - 1)),
        min_size=1,
        max_size=40,
        unique_by=lambda pair: pair[1],
    ),
    st.integers(1, 50),
)
def test_packed_pairs_sort_and_unpack_like_pairs(pairs, k):
    scores = np.array([pair[0] for pair in pairs], np.float32)
    ordinals = np.array([pair[1] for pair in pairs], np.int64)

    best_ordinals, values = unpack_sort_keys(top_sort_keys(pack_sort_keys(scores, ordinals)[None], k), k)

    expected_pairs = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:k]
    assert best_ordinals[0, : len(expected_pairs)].tolist() == [pair[1] for pair in expected_pairs]
    assert values[0, : len(expected_pairs)].tolist() == [pair[0] for pair in expected_pairs]
    assert (best_ordinals[0, len(expected_pairs) :] == NO_ITEM).all()


@pytest.mark.parametrize("k", [1, 7])
def test_no_candidates_leave_every_slot_unused(k):
    empty = np.empty((2, 0), np.int64)

    ordinals, scores = rank(np.ones((2, 3), np.float32), np.ones((4, 3), np.float32), empty, None, k)

    assert (ordinals == NO_ITEM).all()
    assert not scores.any()
