"""The top-K on a torch device: the bits of FAISS and numpy, whatever it is cut into and whatever fails."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.errors import ConfigError
from cache.model.tower import Histories
from cache.topk.topk import Scorer
from tests.devices import DEVICE
from tests.unit.precompute.exactness import make

torch = pytest.importorskip("torch", reason="scoring on a device needs torch: make torch-env")

from precompute.device import scorer as device_scorer  # noqa: E402
from precompute.device import search as device_search  # noqa: E402
from precompute.device.scorer import DeviceScorer  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def on_device(items, metric="inner_product", dtype=torch.float16):
    scorer = DeviceScorer.of(items, metric, DEVICE, dtype=dtype, fused=False)
    assert scorer is not None
    return scorer


def has_same_bits(left_lists, right):
    """Same ordinals, same bits."""
    return np.array_equal(left_lists[0], right[0]) and np.array_equal(
        left_lists[1].view(np.uint32), right[1].view(np.uint32)
    )


def searches(monkeypatch):
    """(users, columns) of each search from now on."""
    search_shapes = []
    original_search = device_search.search

    def spy(items, columns, queries, excluded_pairs, k, shape):
        search_shapes.append((len(queries.user_codes), shape.column_count))
        return original_search(items, columns, queries, excluded_pairs, k, shape)

    monkeypatch.setattr(device_scorer, "search", spy)
    return search_shapes


def products(monkeypatch):
    """Rows times columns of each product from now on."""
    product_sizes = []
    original_scan_tile = device_search._scan_tile

    def spy(items, columns, queries, candidates, rows, hidden_pairs, tile):
        product_sizes.append(len(rows) * (tile.stop - tile.start))
        return original_scan_tile(items, columns, queries, candidates, rows, hidden_pairs, tile)

    monkeypatch.setattr(device_search, "_scan_tile", spy)
    return product_sizes


@dtypes
@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
@pytest.mark.parametrize(
    ("users", "items", "dims", "k"), [(300, 5000, 37, 60), (40, 30, 1, 100), (60, 9000, 128, 1000)]
)
def test_lists_have_the_bits_of_faiss_and_numpy(dtype, metric, users, items, dims, k):
    queries, vectors, excluded = make(users, items, dims, seed=dims)
    queries[7] = 0
    vectors[11] = vectors[items // 2] = 0
    allowed = np.random.default_rng(k).random(items) < 0.2
    torch_scorer = on_device(vectors, metric, dtype)
    theirs = Scorer.of(vectors, metric, engine=False)

    for allowed_mask in (None, allowed, np.zeros(items, np.bool_)):
        expected_lists = theirs.top(queries, k, excluded, allowed=allowed_mask)
        assert has_same_bits(torch_scorer.top(queries, k, excluded, allowed=allowed_mask), expected_lists)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_case_is_exact_in_any_pieces(monkeypatch, data):
    items = data.draw(st.sampled_from([1, 2, 255, 257, 3000, 20_000]), "items")
    dims = data.draw(st.integers(1, 40), "dims")
    users = data.draw(st.integers(1, 35), "users")
    k = data.draw(st.integers(1, 200), "k")
    metric = data.draw(st.sampled_from(["inner_product", "cosine"]), "metric")
    room = data.draw(st.sampled_from([1, 1 << 16, 1 << 20, 1 << 26]), "bytes")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    queries, vectors, excluded = make(users, items, dims, seed=int(rng.integers(1 << 30)))
    if data.draw(st.booleans(), "whole numbers, many ties"):
        queries, vectors = np.rint(queries), np.rint(vectors)
    if data.draw(st.booleans(), "peaks"):
        vectors[:, 0] *= 100
    vectors[rng.random(items) < 0.1] = 0
    queries[rng.random(users) < 0.1] = 0
    if not vectors.any():
        vectors[0] = 1
    allowed = rng.random(items) < 0.5 if data.draw(st.booleans(), "some allowed") else None
    monkeypatch.setattr(DeviceScorer, "_room_bytes", lambda _: room)

    torch_scorer = on_device(vectors, metric, data.draw(st.sampled_from(DTYPES), "dtype"))

    expected_lists = Scorer.of(vectors, metric, engine=False).top(queries, k, excluded, allowed=allowed)
    assert has_same_bits(torch_scorer.top(queries, k, excluded, allowed=allowed), expected_lists)


def test_ties_in_masses_are_settled_by_ordinal():
    # Given identical items, many more than are ever fetched as candidates
    items, users = np.ones((6000, 8), np.float32), np.ones((3, 8), np.float32)
    excluded = Histories.of([[0, 2], [], [5999, -1]])

    ordinals, _ = on_device(items).top(users, 5, excluded)

    assert ordinals.tolist() == [[1, 3, 4, 5, 6], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


@dtypes
def test_near_ties_come_in_the_order_of_their_bits(dtype):
    # Given scores that differ only in their last bits, not ordered by the items' lengths
    rng = np.random.default_rng(8)
    items = np.ones((4000, 24), np.float32)
    items += rng.integers(-3, 4, items.shape).astype(np.float32) * np.float32(2**-22)
    users = rng.standard_normal((9, 24)).astype(np.float32)
    excluded = Histories.of([rng.choice(4000, 40, replace=False) for _ in range(9)])

    device_lists = on_device(items, dtype=dtype).top(users, 50, excluded)

    assert has_same_bits(device_lists, Scorer.of(items, engine=False).top(users, 50, excluded))


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e17, 1e30])
def test_tiny_and_huge_vectors_are_exact(scale):
    users, items, excluded = make(20, 700, 16, seed=9)
    users[::2] *= np.float32(scale)
    items[::3] *= np.float32(scale if scale < 1e20 else 1)

    device_lists = on_device(items).top(users, 30, excluded)

    assert has_same_bits(device_lists, Scorer.of(items, engine=False).top(users, 30, excluded))


def test_items_too_short_or_too_long_are_left_to_the_processor(caplog):
    for items in (np.zeros((5, 4), np.float32), np.full((5, 4), 1e37, np.float32)):
        assert DeviceScorer.of(items, "inner_product", DEVICE) is None
    assert DeviceScorer.of(np.full((5, 4), 1e-30, np.float32), "cosine", DEVICE) is None

    assert sum("lengths" in line for line in caplog.messages) == 3


def test_a_device_that_adds_in_another_order_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(device_scorer, "has_same_bits", lambda *_: False)

    assert DeviceScorer.of(np.ones((5, 4), np.float32), "inner_product", DEVICE) is None
    assert "adds in another order" in caplog.text


@dtypes
def test_products_that_are_rougher_than_their_dtype_are_not_used(monkeypatch, caplog, dtype):
    # Given a device that sums in half precision, one term after the other
    vectors = np.random.default_rng(0).random((300, 128), np.float32)
    assert DeviceScorer.of(vectors, "inner_product", DEVICE, dtype=dtype) is not None

    def rough(left_matrix, right):
        total = torch.zeros(len(left_matrix), right.shape[1], dtype=torch.bfloat16, device=left_matrix.device)
        for step in range(left_matrix.shape[1]):
            total += left_matrix[:, step, None].bfloat16() * right[None, step].bfloat16()
        return (
            total.to(left_matrix.dtype) if left_matrix.dtype != torch.float64 else original_matmul(left_matrix, right)
        )

    original_matmul = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", rough)

    assert DeviceScorer.of(vectors, "inner_product", DEVICE, dtype=dtype) is None
    assert "less accurate" in caplog.text


def test_users_without_a_chance_are_not_multiplied_with_short_items(monkeypatch):
    # Given item lengths as skewed as real ones, and more blocks than are multiplied at once
    users, items, excluded = make(200, 60_000, 32, skewed=True, seed=4)
    scorer = on_device(items)
    product_sizes = products(monkeypatch)

    device_lists = scorer.top(users, 20, excluded)

    assert sum(product_sizes) < 0.5 * users.shape[0] * items.shape[0]
    assert has_same_bits(device_lists, Scorer.of(items, engine=False).top(users, 20, excluded))


def test_memory_at_once_is_bounded_by_the_room_there_is(monkeypatch):
    users, items, excluded = make(600, 30_000, 16, seed=5)
    scorer = on_device(items)
    expected_lists = scorer.top(users, 50, excluded)
    monkeypatch.setattr(DeviceScorer, "_room_bytes", lambda _: 8 << 20)
    search_shapes = searches(monkeypatch)

    device_lists = scorer.top(users, 50, excluded)

    assert max(rows * columns * 2 for rows, columns in search_shapes) <= 8 << 20
    assert has_same_bits(device_lists, expected_lists)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no room"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")],
    ids=["torch", "cublas"],
)
def test_out_of_memory_halves_what_is_done_at_once(monkeypatch, caplog, error):
    caplog.set_level(logging.INFO)
    users, items, excluded = make(300, 9000, 16, seed=6)
    scorer = on_device(items)
    expected_lists = scorer.top(users, 50, excluded)
    original_search = device_search.search
    searched_user_counts = []

    def small_device(items, columns, queries, excluded_pairs, k, shape):
        if len(queries.user_codes) * shape.column_count > 500_000:
            raise error
        searched_user_counts.append(len(queries.user_codes))
        return original_search(items, columns, queries, excluded_pairs, k, shape)

    monkeypatch.setattr(device_scorer, "search", small_device)
    progress_counts: list[int] = []

    device_lists = scorer.top(users, 50, excluded, progress=progress_counts.append)

    assert has_same_bits(device_lists, expected_lists)
    assert not scorer.has_failed
    assert sum(searched_user_counts) == sum(progress_counts) == 300
    assert "out of memory" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_that_fails_for_good_leaves_the_rest_to_the_processor(monkeypatch, caplog, error):
    users, items, excluded = make(300, 2000, 16, seed=7)
    scorer = on_device(items)
    expected_lists = scorer.top(users, 50, excluded)
    monkeypatch.setattr(device_search, "_ROWS_MAX", 100)
    original_search = device_search.search
    calls = []

    def breaks(*search_arguments):
        calls.append(1)
        if len(calls) > 1:
            raise error("broken")
        return original_search(*search_arguments)

    monkeypatch.setattr(device_scorer, "search", breaks)
    progress_counts: list[int] = []

    all_device_lists = [scorer.top(users, 50, excluded, progress=progress_counts.append) for _ in range(2)]

    assert all(has_same_bits(device_lists, expected_lists) for device_lists in all_device_lists)
    assert scorer.has_failed
    assert sum(progress_counts) == 600
    assert sum("the processor is used from now on" in line for line in caplog.messages) == 1


def with_kernels(items, kernels):
    """A scorer whose kernels are a function in the place of their search."""
    scorer = on_device(items)
    scorer._fused = SimpleNamespace(supports_search=lambda *_: True, shape_of=device_search.shape_of, search=kernels)
    return scorer


@pytest.mark.parametrize(
    ("error", "has_failed", "has_kernels"),
    [
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True, True),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True, True),
        (RuntimeError("PassManager::run failed"), False, False),
        (OSError(28, "No space left on device"), False, False),
        (type("OutOfResources", (Exception,), {})("out of resource: shared memory"), False, False),
    ],
    ids=["launch", "device", "compiler", "cache", "resources"],
)
def test_what_fails_in_a_kernel_ends_no_night(caplog, error, has_failed, has_kernels):
    users, items, excluded = make(300, 2000, 16, seed=7)
    expected_lists = on_device(items).top(users, 50, excluded)
    calls = []

    def breaks(*_):
        calls.append(1)
        raise error

    scorer = with_kernels(items, breaks)

    assert all(has_same_bits(scorer.top(users, 50, excluded), expected_lists) for _ in range(2))
    assert (scorer.has_failed, scorer._fused is not None) == (has_failed, has_kernels)
    assert len(calls) == 1
    assert len([message for message in caplog.messages if str(error.args[0]) in message]) == 1


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Triton Error [CUDA]: out of memory"), torch.AcceleratorError("CUDA error: out of memory")],
    ids=["launch", "pinned"],
)
def test_a_kernel_that_finds_no_memory_is_given_less(error):
    users, items, excluded = make(300, 2000, 16, seed=7)
    sizes = []

    def small(device_items, columns, queries, excluded_pairs, k, shape):
        sizes.append(len(queries.user_codes))
        if sizes[-1] > 100:
            raise error
        return device_search.search(device_items, columns, queries, excluded_pairs, k, shape)

    scorer = with_kernels(items, small)

    assert has_same_bits(scorer.top(users, 50, excluded), on_device(items).top(users, 50, excluded))
    assert not scorer.has_failed and scorer._fused is not None
    assert min(sizes) <= 100 < max(sizes)


def test_a_mistake_is_no_failing_device(monkeypatch):
    def mistaken(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(device_scorer, "search", mistaken)

    with pytest.raises(RuntimeError, match="shapes"):
        on_device(np.ones((30, 8), np.float32)).top(np.ones((2, 8), np.float32), 3)


def test_lists_that_are_not_certain_are_looked_for_once_more(monkeypatch):
    # Given a first attempt that fetches hardly more than needed, with imprecise products
    users, items, excluded = make(100, 5000, 24, skewed=False, seed=3)
    monkeypatch.setattr(device_scorer, "_FETCH_MARGINS", ((4, 2), (4, 480)))
    scorer = on_device(items, dtype=torch.bfloat16)
    search_shapes = searches(monkeypatch)

    device_lists = scorer.top(users, 2, excluded)

    assert len(search_shapes) == 2 and 0 < search_shapes[1][0] < 100
    assert "_few" not in vars(scorer)
    assert has_same_bits(device_lists, Scorer.of(items, engine=False).top(users, 2, excluded))


@pytest.mark.parametrize(
    ("change", "message_pattern"),
    [
        ({"k": 0}, "k must be 1"),
        ({"users": np.ones((2, 7), np.float32)}, "7 dimensions, the items 8"),
        ({"users": np.full((2, 8), np.nan, np.float32)}, "row 0 is not"),
        ({"excluded": Histories.of([[]])}, "2 users, not 1"),
        ({"allowed": np.ones(29, np.bool_)}, r"bool \[30\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, message_pattern):
    scorer = on_device(np.ones((30, 8), np.float32))
    top_arguments = {"users": np.ones((2, 8), np.float32), "k": 3} | change

    with pytest.raises(ConfigError, match=message_pattern):
        scorer.top(**top_arguments)


def test_no_users_is_fine():
    device_lists = on_device(np.ones((30, 8), np.float32)).top(np.ones((0, 8), np.float32), 3)

    assert device_lists[0].shape == device_lists[1].shape == (0, 3)
