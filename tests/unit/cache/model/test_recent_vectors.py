"""Recent vectors: the nearest is the nearest, and no more of them are kept than allowed."""

import numpy as np

from serving.near.near_matches import RecentVectors


def test_the_nearest_is_found_exactly_while_vectors_come_and_go() -> None:
    rng = np.random.default_rng(0)
    recent: RecentVectors[int] = RecentVectors(50, 6)
    vector_by_number: dict[int, np.ndarray] = {}
    used: list[int] = []  # longest unused first
    for number in range(200):
        vector = rng.standard_normal(6).astype(np.float32)
        if len(vector_by_number) == 50:
            del vector_by_number[used.pop(0)]
        recent.add(vector, number)
        vector_by_number[number] = vector
        used.append(number)
        queries = rng.standard_normal((3, 6)).astype(np.float32)

        for query, nearest in zip(queries, recent.find_nearest(queries), strict=True):
            apart = {entry: np.linalg.norm(query - of) for entry, of in vector_by_number.items()}
            expected_entry = min(apart, key=lambda entry: apart[entry])
            assert nearest is not None and nearest.entry == expected_entry
            assert abs(nearest.relative_distance - apart[expected_entry] / np.linalg.norm(query)) < 1e-5
            if number % 3 == 0:
                recent.mark_used(nearest.vector_slot)
                used.remove(nearest.entry)
                used.append(nearest.entry)
    assert len(recent) == 50


def test_a_query_of_no_length_and_an_empty_index_find_nothing() -> None:
    recent: RecentVectors[str] = RecentVectors(4, 2)
    assert recent.find_nearest(np.ones((2, 2), np.float32)) == [None, None]
    recent.add(np.ones(2, np.float32), "a")

    assert recent.find_nearest(np.zeros((1, 2), np.float32)) == [None]
    recent.clear()
    assert len(recent) == 0 and recent.find_nearest(np.ones((1, 2), np.float32)) == [None]


def test_vectors_that_are_no_numbers_are_near_nothing() -> None:
    recent: RecentVectors[str] = RecentVectors(4, 2)
    recent.add(np.ones(2, np.float32), "a")

    (nearest,) = recent.find_nearest(np.array([[np.nan, 1]], np.float32))
    assert nearest is None or not nearest.relative_distance < 1
