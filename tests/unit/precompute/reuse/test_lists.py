"""The rule of lists: it never says no where the exact score puts an item into a list."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache.model.ranking import Metric, rank
from cache.model.tower import Histories
from cache.records import ABSENT_FLAGS, NO_ITEM, Layout, Precision, encode_topk
from precompute.reuse.lists import could_enter, find_lists_with_lost_items, find_score_floors
from precompute.scoring.copies import renumber_items
from precompute.scoring.pages import encode_records

METRICS: tuple[Metric, ...] = ("inner_product", "cosine")
PRECISIONS: tuple[Precision, ...] = ("f2", "f4")
KINDS = ("usual", "ties", "spread", "huge", "tiny", "mixed")


def drawn(rng: np.random.Generator, kind: str, count: int, dims: int) -> NDArray[np.float32]:
    """Vectors of a kind, some of them zero."""
    drawn_vectors = rng.standard_normal((count, dims))
    if kind == "ties":
        drawn_vectors = rng.integers(-1, 2, (count, dims)).astype(np.float64)
    powers = {
        "usual": (0.0, 0.0), "ties": (0.0, 0.0), "spread": (-12.0, 12.0), "huge": (17.0, 37.5),
        "tiny": (-45.0, -16.0), "mixed": (-45.0, 37.0),
    }[kind]  # fmt: skip
    drawn_vectors *= 10.0 ** rng.uniform(*powers, (count, 1))
    drawn_vectors[rng.random(count) < 0.1] = 0
    with np.errstate(over="ignore"):
        vectors = drawn_vectors.astype(np.float32)
    return np.where(np.isfinite(vectors), vectors, np.float32(3e38)).astype(np.float32)


def every(users: int, items: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.tile(items, (users, 1))


@given(
    seed=st.integers(0, 2**32 - 1), users=st.integers(1, 8), items=st.integers(2, 24), dims=st.integers(1, 70),
    k=st.integers(1, 12), kind=st.sampled_from(KINDS), metric=st.sampled_from(METRICS),
    precision=st.sampled_from(PRECISIONS),
)  # fmt: skip
def test_a_no_is_certain(
    seed: int, users: int, items: int, dims: int, k: int, kind: str, metric: Metric,
    precision: Precision,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    vectors, catalogue = drawn(rng, kind, users, dims), drawn(rng, kind, items, dims)
    entering = np.flatnonzero(rng.random(items) < 0.3)
    if kind == "ties" and len(entering):
        catalogue[entering[0]] = catalogue[(entering[0] + 1) % items]
    earlier_items = np.setdiff1d(np.arange(items), entering)
    seen_items = [rng.choice(items, rng.integers(0, items), replace=False) for _ in range(users)]
    with np.errstate(all="ignore"):
        earlier_lists = rank(vectors, catalogue, every(users, earlier_items), seen_items, k, metric=metric)
        new_lists = rank(vectors, catalogue, every(users, np.arange(items)), seen_items, k, metric=metric)
    layout = Layout("topk", k, precision)
    with np.errstate(all="ignore"):
        records, _ = encode_records(layout, np.zeros(users, np.uint64), earlier_lists, np.ones(users, np.bool_), 0)
    present_rows = np.flatnonzero(records["flags"] != ABSENT_FLAGS)

    with np.errstate(all="ignore"):
        yes = could_enter(
            vectors[present_rows], catalogue[entering], entering, find_score_floors(layout, records[present_rows]),
            Histories.of([seen_items[row] for row in present_rows.tolist()]), metric,
        )  # fmt: skip

    for row in present_rows[~yes].tolist():
        assert (new_lists[0][row] == earlier_lists[0][row]).all()
        assert new_lists[1][row].tobytes() == earlier_lists[1][row].tobytes()


@pytest.mark.parametrize("metric", METRICS)
def test_far_from_the_last_score_the_answer_is_no(metric: Metric) -> None:
    """Else nothing would be copied: of usual items few reach lists of few."""
    rng = np.random.default_rng(1)
    vectors, catalogue = drawn(rng, "usual", 400, 32), drawn(rng, "usual", 500, 32)
    earlier_lists = rank(vectors, catalogue, every(400, np.arange(10, 500)), None, 10, metric=metric)
    new_lists = rank(vectors, catalogue, every(400, np.arange(500)), None, 10, metric=metric)
    layout = Layout("topk", 10, "f2")
    records = encode_topk(layout, np.zeros(400, np.uint64), *earlier_lists, 0)

    yes = could_enter(
        vectors, catalogue[:10], np.arange(10), find_score_floors(layout, records),
        Histories.of([[]] * 400), metric,
    )  # fmt: skip

    is_changed = (new_lists[0] != earlier_lists[0]).any(axis=1)
    assert yes[is_changed].all()
    assert yes.sum() <= is_changed.sum() + 4


def test_what_a_user_has_had_does_not_enter() -> None:
    vectors = np.ones((2, 3), np.float32)
    seen_items = Histories.of([[7], [8]])

    yes = could_enter(
        vectors, vectors[:1], np.array([7]), np.zeros(2), seen_items, "inner_product"
    )  # fmt: skip

    assert yes.tolist() == [False, True]


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=11, max_size=11),
)
def test_a_list_holds_what_is_lost(lists: list[list[int]], lost: list[bool]) -> None:
    records = records_of(lists)
    mask = np.array(lost)

    has_lost_item = find_lists_with_lost_items(records, mask)

    assert has_lost_item.tolist() == [
        any(lost[item] for item in ordinals) or (len(ordinals) < 4 and lost[10]) for ordinals in lists
    ]


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), min_size=1, max_size=8), st.permutations(range(12))
)
def test_items_are_numbered_by_their_places(lists: list[list[int]], places: list[int]) -> None:
    records = records_of(lists)

    renumber_items(records, np.array(places[:10]))

    expected = [[places[item] for item in ordinals] + [NO_ITEM] * (4 - len(ordinals)) for ordinals in lists]
    assert records["items"].tolist() == expected


def records_of(lists: list[list[int]]) -> NDArray[np.void]:
    items = np.array([ordinals + [NO_ITEM] * (4 - len(ordinals)) for ordinals in lists], np.uint32)
    scores = np.zeros(items.shape, np.float32)
    layout = Layout("topk", 4, "f2")
    return encode_topk(layout, np.zeros(len(lists), np.uint64), items, scores, 0)


def test_the_floor_is_below_every_score_that_a_half_stands_for() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = np.concatenate([halves, (halves[1:] + halves[:-1]) / 2])
    near = np.concatenate([between, *(np.nextafter(between, np.float32(to)) for to in (-np.inf, np.inf))])
    last = np.unique(np.concatenate([near, -near]))
    last = last[np.abs(last) < 20_000]
    assert_below(np.stack([np.full(len(last), 20_000, np.float32), last], axis=1), "f2")


@given(st.integers(0, 2**32 - 1), st.integers(-90, 90), st.sampled_from(PRECISIONS), st.booleans())
def test_the_floor_is_below_every_score(seed: int, power: int, precision: Precision, falls: bool) -> None:
    rng = np.random.default_rng(seed)
    scores = np.ldexp(rng.standard_normal((50, 3)) * 2.0 ** -rng.integers(0, 12, (50, 3)), power)
    float32_scores = scores.astype(np.float32)
    assert_below(np.sort(-np.abs(float32_scores) if falls else float32_scores, axis=1)[:, ::-1], precision)


def assert_below(scores: NDArray[np.float32], precision: Precision) -> None:
    layout, count = Layout("topk", scores.shape[1], precision), len(scores)
    items = np.tile(np.arange(scores.shape[1], dtype=np.uint32), (count, 1))
    full_items, short = items.copy(), items.copy()
    short[:, -1] = NO_ITEM
    fingerprints, has_answer = np.zeros(count, np.uint64), np.ones(count, np.bool_)
    records, _ = encode_records(layout, fingerprints, (full_items, scores), has_answer, 0)
    is_present = records["flags"] != ABSENT_FLAGS

    assert is_present.any()
    assert (find_score_floors(layout, records[is_present]) <= scores[is_present, -1].astype(np.float64)).all()
    records, _ = encode_records(layout, fingerprints, (short, scores), has_answer, 0)
    assert np.isneginf(find_score_floors(layout, records[records["flags"] != ABSENT_FLAGS])).all()
