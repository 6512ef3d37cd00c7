"""The compiled top-K at every level against the float64 brute force and, bit for bit, against FAISS and numpy."""

import logging
import os
import shutil
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import ConfigError
from cache.model.tower import Histories
from cache.topk import compiled
from cache.topk.topk import Scorer
from tests.unit.precompute.exactness import assert_exact, make

BUILT = compiled.load_kernel({})
LEVELS = range(BUILT.level + 1) if BUILT else []
ENGINES = [False, *(compiled.load_kernel({"LARDER_KERNEL": str(level)}) for level in LEVELS)]
NAMES = ["faiss", *(f"level{level}" for level in LEVELS)]
engines = pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
kernels = pytest.mark.parametrize("engine", ENGINES[1:], ids=NAMES[1:])


def has_same_bits(left_lists, right):
    """Same ordinals, same bits."""
    return np.array_equal(left_lists[0], right[0]) and np.array_equal(
        left_lists[1].view(np.uint32), right[1].view(np.uint32)
    )


@engines
@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
@pytest.mark.parametrize(("k", "dims"), [(1, 1), (7, 32), (100, 50), (1000, 128)])
def test_every_engine_equals_a_float64_brute_force(engine, metric, k, dims):
    users, items, excluded = make(70, 2100, dims, seed=k)

    assert_exact(users, items, k, excluded, metric, engine=engine)


@kernels
@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
@pytest.mark.parametrize("skewed", [True, False])
def test_the_kernel_gives_the_bits_of_faiss_and_numpy(engine, metric, skewed):
    users, items, excluded = make(300, 5000, 37, skewed=skewed, seed=6)
    users[7] = 0
    items[11] = items[4000] = 0

    kernel_lists = Scorer.of(items, metric, engine=engine).top(users, 60, excluded, threads=2)

    assert has_same_bits(kernel_lists, Scorer.of(items, metric, engine=False).top(users, 60, excluded, threads=1))
    rows = np.arange(100, 117)
    part = Scorer.of(items, metric, engine=engine).top(users[rows], 60, excluded.select_rows(rows))
    assert has_same_bits(part, (kernel_lists[0][rows], kernel_lists[1][rows]))


@engines
def test_ties_in_masses_are_settled_by_ordinal(engine):
    # Given identical items, many more than there is room for candidates
    items, users = np.ones((6000, 8), np.float32), np.ones((3, 8), np.float32)
    excluded = Histories.of([[0, 2], [], [5999, -1]])

    ordinals, _ = Scorer.of(items, engine=engine).top(users, 5, excluded)

    assert ordinals.tolist() == [[1, 3, 4, 5, 6], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


@kernels
def test_shuffled_near_ties_come_in_the_order_of_their_bits(engine):
    # Given scores that differ only in their last bits, not ordered by the items' lengths
    rng = np.random.default_rng(8)
    items = np.ones((4000, 24), np.float32)
    items += rng.integers(-3, 4, items.shape).astype(np.float32) * np.float32(2**-22)
    users = rng.standard_normal((9, 24)).astype(np.float32)
    excluded = Histories.of([rng.choice(4000, 40, replace=False) for _ in range(9)])

    kernel_lists = Scorer.of(items, engine=engine).top(users, 50, excluded)

    assert has_same_bits(kernel_lists, Scorer.of(items, engine=False).top(users, 50, excluded))


@engines
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e17])
def test_tiny_and_huge_vectors_are_exact(engine, scale):
    users, items, excluded = make(20, 700, 16, seed=9)
    users[::2] *= np.float32(scale)
    items[::3] *= np.float32(scale)

    assert_exact(users, items, 30, excluded, engine=engine)


@engines
def test_only_what_is_allowed_appears(engine):
    users, items, excluded = make(40, 3000, 16, seed=10)
    allowed = np.random.default_rng(0).random(3000) < 0.03
    users[3] = 0

    assert_exact(users, items, 100, excluded, engine=engine, allowed=allowed)
    empty_mask = np.zeros(3000, np.bool_)
    assert_exact(users, items, 5, excluded, engine=engine, allowed=empty_mask)


@engines
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_case_is_exact(engine, data):
    items = data.draw(st.sampled_from([1, 15, 16, 17, 65, 513, 1500]), "items")
    dims = data.draw(st.integers(1, 40), "dims")
    users = data.draw(st.integers(1, 35), "users")
    k = data.draw(st.integers(1, 200), "k")
    metric = data.draw(st.sampled_from(["inner_product", "cosine"]), "metric")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    queries, vectors, excluded = make(users, items, dims, seed=int(rng.integers(1 << 30)))
    if data.draw(st.booleans(), "whole numbers, many ties"):
        queries, vectors = np.rint(queries), np.rint(vectors)
    if data.draw(st.booleans(), "peaks"):
        vectors[:, 0] *= 100
    vectors[rng.random(items) < 0.1] = 0
    queries[rng.random(users) < 0.1] = 0
    allowed = rng.random(items) < 0.5 if data.draw(st.booleans(), "some allowed") else None

    engine_lists = assert_exact(queries, vectors, k, excluded, metric, engine=engine, allowed=allowed, threads=2)

    reference_lists = Scorer.of(vectors, metric, engine=False).top(queries, k, excluded, allowed=allowed)
    assert has_same_bits(engine_lists, reference_lists)


@engines
@pytest.mark.parametrize(
    ("change", "message_pattern"),
    [
        ({"users": np.ones((2, 8))}, "float64"),
        ({"users": np.ones((2, 7), np.float32)}, "7 dimensions, the items 8"),
        ({"users": np.ones(8, np.float32)}, "matrix"),
        ({"users": np.full((2, 8), np.nan, np.float32)}, "row 0 is not"),
        ({"users": np.full((2, 8), np.inf, np.float32)}, "finite"),
        ({"excluded": Histories.of([[]])}, "2 users, not 1"),
        ({"excluded": Histories(np.array([0, 2, 1]), np.arange(1))}, "ascending"),
        ({"excluded": Histories(np.array([0, 0, 1]), np.arange(1, dtype=np.int32))}, "int32"),
        ({"allowed": np.ones(29, np.bool_)}, r"bool \[30\]"),
        ({"allowed": np.ones(30, np.uint8)}, "uint8"),
    ],
)
def test_what_does_not_fit_is_refused(engine, change, message_pattern):
    scorer = Scorer.of(np.ones((30, 8), np.float32), engine=engine)
    top_arguments = {"users": np.ones((2, 8), np.float32), "k": 3} | change

    with pytest.raises(ConfigError, match=message_pattern):
        scorer.top(**top_arguments)


def test_items_that_are_no_numbers_are_refused():
    with pytest.raises(ConfigError, match="row 1 is not"):
        Scorer.of(np.array([[1.0], [np.nan]], np.float32))


def test_switched_off_or_not_built_it_is_left_out_and_said_once(caplog, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "LARDER_KERNEL", "off")
    compiled.find_kernel.cache_clear()
    caplog.set_level(logging.INFO)

    scorers = [Scorer.of(np.ones((3, 2), np.float32)) for _ in range(2)]

    compiled.find_kernel.cache_clear()
    assert [scorer.kernel_and_items for scorer in scorers] == [None, None]
    assert sum("without the compiled kernel" in line for line in caplog.messages) == 1
    assert compiled.load_kernel({}, tmp_path) is None
    with pytest.raises(ConfigError, match="maybe"):
        compiled.load_kernel({"LARDER_KERNEL": "maybe"})


@pytest.mark.skipif(BUILT is None, reason="the kernel was not built")
def test_a_numpy_that_adds_in_another_order_means_no_kernel(monkeypatch):
    monkeypatch.setattr(compiled, "score", lambda *_: np.ones((1, 64), np.float32))

    assert BUILT is not None
    assert Scorer.of(np.ones((3, 2), np.float32), engine=BUILT).kernel_and_items is None


@pytest.mark.skipif(BUILT is None, reason="nothing is compiled here")
def test_a_file_that_cannot_be_loaded_leaves_the_next_candidate(tmp_path):
    # Given a tree that was copied from another machine, and this machine's own build in it
    built_library = next(Path(compiled.__file__).parent.glob("_topk*.so"))
    first, *_, last = EXTENSION_SUFFIXES
    (tmp_path / f"_topk{first}").write_bytes(b"another machine's")
    shutil.copy(built_library, tmp_path / f"_topk{last}")

    assert compiled.load_kernel({}, tmp_path) is not None
