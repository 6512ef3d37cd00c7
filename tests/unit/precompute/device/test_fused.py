"""The kernels of the top-K: the operators' and the processor's bits. Without a GPU by Triton's interpreter."""

import logging

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.model.ranking import score, unit_rows
from cache.model.tower import Histories
from cache.topk.flat import ComparableItems
from cache.topk.topk import Scorer
from tests.devices import DEVICE, long_case, long_where_interpreted
from tests.unit.precompute.exactness import make

torch = pytest.importorskip("torch", reason="scoring on a device needs torch: make torch-env")
pytest.importorskip("triton", reason="the kernels are Triton's: make torch-env")

from precompute.device import fused  # noqa: E402
from precompute.device import scorer as device_scorer  # noqa: E402
from precompute.device import search as operators  # noqa: E402
from precompute.device.columns import BLOCK_GROUPS  # noqa: E402
from precompute.device.fused import FETCH_MAX, SEGMENTS, choose_tiles, plan_estimating_stages, plan_stages  # noqa: E402
from precompute.device.items import UNDERFLOW_ERROR, WORST, DeviceItems  # noqa: E402
from precompute.device.kernels.keep import keep  # noqa: E402
from precompute.device.scorer import DeviceScorer  # noqa: E402

WHERE = torch.device(DEVICE)
AGREES = fused.agrees_with_torch


@pytest.fixture(scope="module")
def agreed():
    """Has the kernels probed once, and no more: the interpreter takes its time."""
    assert fused.agrees_with_torch(24, WHERE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "agrees_with_torch", lambda *_: True)
        yield


@pytest.fixture
def looked_again(monkeypatch):
    """Users that the kernels left to the operators, from now on."""
    searched_user_counts = []
    original_search = operators.search

    def spy(items, columns, queries, excluded_pairs, k, shape):
        searched_user_counts.append(len(queries.user_codes))
        return original_search(items, columns, queries, excluded_pairs, k, shape)

    monkeypatch.setattr(device_scorer, "search", spy)
    return searched_user_counts


def by_kernels(items, metric="inner_product"):
    scorer = DeviceScorer.of(items, metric, DEVICE, dtype=torch.float16, fused=True)
    assert scorer is not None
    return scorer


def has_same_bits(left_lists, right):
    """Same ordinals, same bits."""
    return np.array_equal(left_lists[0], right[0]) and np.array_equal(
        left_lists[1].view(np.uint32), right[1].view(np.uint32)
    )


def assert_same(users, items, k, excluded, metric="inner_product", allowed=None):
    expected_lists = Scorer.of(items, metric, engine=False).top(users, k, excluded, allowed=allowed)
    assert has_same_bits(by_kernels(items, metric).top(users, k, excluded, allowed=allowed), expected_lists)


@pytest.mark.usefixtures("agreed")
@pytest.mark.parametrize(
    ("users", "items", "dims", "k", "metric"),
    [
        (1, 1, 1, 1, "cosine"),
        (20, 300, 37, 20, "inner_product"),
        long_case(1, 1, 1, 1, "inner_product"),
        long_case(20, 300, 37, 20, "cosine"),
        long_case(9, 2500, 128, 100, "inner_product"),
        long_case(9, 2500, 128, 100, "cosine"),
        long_case(2, 1300, 9, 1000, "inner_product"),
        long_case(2, 1300, 9, 1000, "cosine"),
    ],
)
def test_lists_have_the_bits_of_the_processor(looked_again, metric, users, items, dims, k):
    queries, vectors, excluded = make(users, items, dims, seed=dims)

    assert_same(queries, vectors, k, excluded, metric)

    assert sum(looked_again) <= users // 4


@pytest.mark.usefixtures("agreed")
def test_some_items_only_and_histories_of_everything():
    queries, vectors, _ = make(5, 400, 20, seed=1)
    vectors[11] = vectors[300] = 0
    queries[2] = 0
    rng = np.random.default_rng(2)
    excluded = Histories.of([np.arange(400), [], np.arange(395), rng.permutation(400)[:200], [-1, 9999]])

    for allowed in (None, rng.random(400) < 0.2, np.zeros(400, np.bool_)):
        assert_same(queries, vectors, 30, excluded, allowed=allowed)


@pytest.mark.usefixtures("agreed")
def test_near_ties_and_masses_of_ties_are_settled_by_their_bits():
    rng = np.random.default_rng(8)
    alike = np.ones((1500, 12), np.float32)
    nearly = alike + rng.integers(-3, 4, alike.shape).astype(np.float32) * np.float32(2**-22)
    users = np.concatenate([np.ones((1, 12)), rng.standard_normal((3, 12))]).astype(np.float32)
    excluded = Histories.of([[0, 2], [], [1499, 1498], [7]])

    for items in (alike, nearly):
        assert_same(users, items, 25, excluded)


@pytest.mark.usefixtures("agreed")
@pytest.mark.parametrize("scale", [1e-30, long_case(1e-12), long_case(1e17), 1e30])
def test_tiny_and_huge_vectors_are_exact(scale):
    users, items, excluded = make(6, 400, 16, seed=9)
    users[::2] *= np.float32(scale)
    items[::3] *= np.float32(scale if scale < 1e20 else 1)
    items[5] = -0.0
    users[1, :8] = -1e-42

    assert_same(users, items, 15, excluded)


@pytest.mark.usefixtures("agreed")
@pytest.mark.parametrize(
    ("tiny", "metric"),
    [
        (3e-38, "cosine"),
        *[long_case(tiny, "inner_product") for tiny in (0.0, 1e-44, 1e-40, 1e-39, 3e-38, 1e38)],
        *[long_case(tiny, "cosine") for tiny in (0.0, 1e-44, 1e-40, 1e-39, 1e38)],
    ],
)
def test_a_user_like_no_other_leaves_the_others_their_lists(looked_again, metric, tiny):
    users, items, excluded = make(8, 3000, 32, seed=4)
    users[3] = tiny
    users[5] = 0
    users[5, 7] = tiny

    assert_same(users, items, 10, excluded, metric)

    assert sum(looked_again) <= 2


def any_case(data, max_items):
    items = data.draw(st.sampled_from([1, 2, 255, 257, max_items]), "items")
    dims = data.draw(st.sampled_from([1, 3, 16, 17, 40, 66]), "dims")
    users = data.draw(st.sampled_from([1, 2, 17]), "users")
    k = data.draw(st.integers(1, 90), "k")
    metric = data.draw(st.sampled_from(["inner_product", "cosine"]), "metric")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    queries, vectors, excluded = make(
        users, items, dims, seed=int(rng.integers(1 << 30)), longest=data.draw(st.sampled_from([3, 300]))
    )
    if data.draw(st.booleans(), "whole numbers, many ties"):
        queries, vectors = np.rint(queries), np.rint(vectors)
    if data.draw(st.booleans(), "all scores negative"):
        queries, vectors = -np.abs(queries), np.abs(vectors)
    vectors[rng.random(items) < 0.1] = 0
    queries[rng.random(users) < 0.1] = 0
    if not vectors.any():
        vectors[0] = 1
    allowed = rng.random(items) < 0.5 if data.draw(st.booleans(), "some allowed") else None
    assert_same(queries, vectors, k, excluded, metric, allowed)


@pytest.mark.usefixtures("agreed")
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_case_is_exact(data):
    any_case(data, 900)


@pytest.mark.storm
@pytest.mark.usefixtures("agreed")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_cases_are_exact(data):
    any_case(data, 9000)


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 30]),
    st.sampled_from([0, 1, 6]),
    st.sampled_from(["inner_product", "cosine"]),
)
def test_no_score_is_above_its_groups_bound_and_the_bound_is_close(seed, dims, spread, metric):
    rng = np.random.default_rng(seed)
    items = (rng.standard_normal((900, dims)) * np.exp(spread * rng.standard_normal((900, 1)))).astype("f4")
    users = (rng.standard_normal((16, dims)) * np.exp(rng.standard_normal((16, 1)))).astype("f4")
    device_items = DeviceItems.of(ComparableItems.of(items, metric), WHERE, torch.float16, 4)
    queried = unit_rows(users) if metric == "cosine" else users
    queries, columns = device_items.encode_queries(users, queried), device_items.all_columns

    bounds = fused.compute_bounds(device_items, columns, queries, choose_tiles(16, queries.user_codes.shape[1], WHERE))

    ordinals = columns.item_ordinals.cpu().numpy()
    exact = score(users, items, np.tile(np.minimum(ordinals, 899), (16, 1)), metric).astype(np.float64)
    exact *= queries.user_scales.double().cpu().numpy()[:, None] * device_items.vector_scale
    exact[:, ordinals == 900] = -np.inf
    members = columns.columns_of(torch.arange(len(columns.longest_by_group)))
    highest = exact[:, members.numpy()].max(2)
    computed_bounds, real = bounds.double().cpu().numpy(), highest.max(0) > -np.inf
    margin = (
        device_items.score_margins(columns, slice(None), queries.scaled_lengths, queries.residual_lengths).cpu().numpy()
    )
    reach, weight = (
        queries.scaled_lengths + queries.residual_lengths,
        fused.compute_block_weights(device_items, columns, queries),
    )
    # The groups of a block share a margin, and all users the largest share of the residual.
    widest = (reach[:, None] * weight.repeat_interleave(BLOCK_GROUPS)).cpu().numpy() + UNDERFLOW_ERROR
    assert (computed_bounds >= highest).all()
    assert (computed_bounds <= highest + margin + widest * (1 + 1e-6) + 1e-6)[:, real].all()
    assert np.isneginf(computed_bounds[:, ~real]).all()


@pytest.fixture
def little_room(monkeypatch):
    """A third stage from 16,385 items on, a second from 4,097."""
    monkeypatch.setattr(fused, "segment_capacity", lambda *_, **__: 32)


@pytest.mark.usefixtures("little_room")
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_groups_are_kept_by_their_bounds_and_what_is_left_out_is_bounded(data):
    check_kept_groups(data, [100, 1300, 5000])


@long_where_interpreted
@pytest.mark.usefixtures("little_room")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_groups_of_three_stages_are_kept_by_their_bounds(data):
    check_kept_groups(data, [1300, 5000, 17_000])


def check_kept_groups(data, item_counts):
    """Groups are kept by their bounds, and the limit of those that are left out bounds them."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    count = data.draw(st.sampled_from(item_counts), "items")
    kind = data.draw(st.sampled_from(["normal", "ties", "alike", "falling", "rising"]), "vectors")
    items, users = (rng.standard_normal((row_count, 8)).astype("f4") for row_count in (count, 3))
    if kind == "ties":
        items, users = np.rint(items), np.rint(users)
    if kind == "alike":
        items[:] = items[0]
    if kind in ("falling", "rising"):  # the first to be seen are the best, or the worst
        items = np.abs(items) * np.exp(rng.standard_normal((count, 1))).astype("f4")
        users = np.abs(users) * (1 if kind == "falling" else -1)
    device_items = DeviceItems.of(ComparableItems.of(items, "inner_product"), WHERE, torch.float16, fused.GROUP)
    queries, columns = device_items.encode_queries(users, users), device_items.all_columns
    tiles = choose_tiles(3, queries.user_codes.shape[1], WHERE)
    required_counts = torch.tensor([1, 20, 32], dtype=torch.int32, device=WHERE)

    is_estimating = data.draw(st.booleans(), "estimating")

    kept_entries, left_out = fused.select_entries(
        device_items, columns, queries, required_counts, 64, tiles, estimating=is_estimating
    )

    bounds = fused.compute_bounds(device_items, columns, queries, tiles)
    for row in range(3):
        kept_groups = kept_entries[row, :, 1][kept_entries[row, :, 1] != fused.NO_GROUP]
        remaining_bounds = np.delete(bounds[row].cpu().numpy(), kept_groups.cpu().numpy())
        limit, real = left_out[row].item(), (count + 3) // 4
        assert len(set(kept_groups.tolist())) == len(kept_groups)
        assert remaining_bounds.max(initial=-np.inf) <= limit
        if kind not in ("ties", "alike") and not is_estimating:
            assert len(kept_groups) >= min(required_counts[row], real)
            assert limit <= bounds[row].sort()[0][-required_counts[row]]


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_the_best_entries_are_kept_and_no_other_users_are_touched(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    kind = data.draw(st.sampled_from(["normal", "ties", "alike", "special", "endless"]), "bounds")
    capacity, required_counts, room = 64, np.array([1, 20, 63, 64]), 32
    bounds = rng.standard_normal((4, SEGMENTS * room)).astype("f4")
    if kind == "ties":
        bounds = np.rint(bounds * 3)
    if kind == "alike":
        bounds[:] = 0.5
    if kind == "special":
        bounds = rng.choice([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38], bounds.shape).astype("f4")
    if kind == "endless":
        bounds = rng.choice([np.inf, -np.inf, 1.0], bounds.shape).astype("f4")
    counts = rng.integers(0, room + 1, (4, SEGMENTS)).astype("i4")
    is_filled = (np.arange(room) < counts[..., None]).reshape(4, -1)
    numbers = np.tile(np.arange(bounds.shape[1], dtype="i4"), (4, 1))
    entries = np.stack([bounds.view("i4"), numbers, numbers + 7, numbers * 3], 2)
    kernel_inputs = [torch.from_numpy(array).to(WHERE) for array in (entries, counts, required_counts.astype("i4"))]
    guard = torch.full((6, capacity, 4), -7, dtype=torch.int32, device=WHERE)
    guard[1:5] = fused.NO_GROUP
    limits, left_out = (torch.full((4,), -torch.inf, device=WHERE) for _ in range(2))

    keep[1,](
        *kernel_inputs, guard[1:], limits, left_out, 4,
        height=4, segments=SEGMENTS, room=room, capacity=capacity, halvings=14, num_warps=4,
    )  # fmt: skip

    assert (guard[[0, 5]] == -7).all()
    for row in range(4):
        kept_entries = guard[1 + row][guard[1 + row, :, 1] != fused.NO_GROUP].cpu().numpy()
        kept_numbers = kept_entries[:, 1]
        assert np.array_equal(kept_entries, entries[row][kept_numbers])
        remaining_bounds = np.delete(bounds[row], np.union1d(kept_numbers, np.flatnonzero(~is_filled[row])))
        assert len(set(kept_numbers.tolist())) == len(kept_numbers) and is_filled[row][kept_numbers].all()
        assert remaining_bounds.max(initial=-np.inf) <= left_out[row].item() or kind == "endless"
        filled_bounds = np.sort(bounds[row][is_filled[row]])
        if kind == "normal":
            last_required = filled_bounds[-required_counts[row]]
            # After so many halvings of the limit, more entries than fit may reach it: then only those above it are
            # kept.
            resolution = (filled_bounds[-1] - filled_bounds[0]) * 2.0**-13
            assert len(kept_numbers) >= (filled_bounds > last_required + resolution).sum()
            if (filled_bounds >= last_required - resolution).sum() <= capacity:
                assert len(kept_numbers) >= min(required_counts[row], len(filled_bounds))
                assert left_out[row].item() <= last_required


def test_a_member_whose_product_was_rounded_down_is_scored():
    # Given a group whose second member is slightly above the best left-out score, but not after rounding to half
    # precision
    device_items = DeviceItems.of(
        ComparableItems.of(np.ones((4, 1), np.float32), "inner_product"), WHERE, torch.float16, fused.GROUP
    )
    users = np.ones((1, 1), np.float32)
    scores, margin = np.array([0.001, -0.50026, -0.9, -0.9], np.float32), np.float32(0.01)
    assert np.float16(scores[1]) < scores[1] - 2e-4
    entry = np.full((1, 32, 4), fused.NO_GROUP, np.int32)
    entry[0, 0, 0] = (scores.max() + margin).view(np.int32)
    entry[0, 0, 1] = 0
    entry[0, 0, 2:] = scores.astype(np.float16).view(np.int32)
    left_out = torch.tensor([float(scores[1] + margin) - 1e-5], device=WHERE)
    no_indices = torch.empty(0, dtype=torch.int64, device=WHERE)
    hidden = fused.sort_hidden_ordinals((no_indices, no_indices), 1, 4)

    keys = fused.compute_exact_keys(
        device_items, device_items.all_columns, device_items.encode_queries(users, users), hidden,
        torch.from_numpy(entry).to(WHERE),
        left_out, choose_tiles(1, 8, WHERE),
    )  # fmt: skip

    assert (keys != WORST).sum() == 2


@pytest.mark.parametrize(("wide", "k"), [(4, 1), (64, 10), (64, 64), (64, 70), (2048, 5)])
def test_the_best_keys_are_those_of_the_operators(wide, k):
    keys = torch.randint(-(2**62), 2**62, (5, 4, wide), device=WHERE)
    keys[:, :, ::3] = WORST
    keys[:, 2:] = WORST
    keys[3, 3, -1] = 2**62
    tiles = choose_tiles(5, 16, WHERE)

    assert torch.equal(fused.select_leading_keys(keys, k, tiles), operators.select_best_keys(keys.flatten(1), k))


@pytest.mark.parametrize("room", [32, 64, 512])
@pytest.mark.parametrize("blocks", [1, 32, 33, 129, 3907, 16_384])
def test_stages_look_at_every_block_once(blocks, room):
    stages = list(plan_stages(blocks, room))

    block_numbers = [stage.block(at) for stage in stages for at in range(stage.block_count)]

    assert sorted(block_numbers) == list(range(blocks))
    assert stages[0].block_count <= SEGMENTS * room // BLOCK_GROUPS


@pytest.mark.parametrize("room", [32, 64])
@pytest.mark.parametrize("blocks", [1, 8, 16, 17, 33, 79, 150, 977, 3907, 39_070])
def test_estimating_stages_look_at_every_block_once_and_first_at_the_middle(blocks, room):
    stages = list(plan_estimating_stages(blocks, room))

    block_numbers = [stage.block(at) for stage in stages for at in range(stage.block_count)]

    assert sorted(block_numbers) == list(range(blocks))
    assert 0 < stages[0].block_count <= SEGMENTS * room // BLOCK_GROUPS
    for stage in stages[:-1]:  # neither the longest items nor the shortest are looked at more than others
        early = np.array([stage.block(at) for at in range(stage.block_count)])
        assert abs(early.mean() - (blocks - 1) / 2) <= blocks / 8


def test_ranks_of_a_sample_have_the_best_of_all():
    # Given samples of a quarter and a hundredth of all scores
    rng = np.random.default_rng(3)
    required_counts = torch.tensor([20, 160, 1000], dtype=torch.int32)
    for sample_fraction in (0.25, 0.01):
        ranks = fused.estimate_ranks(required_counts, sample_fraction).tolist()
        for required_count, rank in zip(required_counts.tolist(), ranks, strict=True):
            in_sample = rng.binomial(required_count, sample_fraction, 2000)
            assert rank <= required_count and (in_sample > rank).mean() < 0.01
    assert torch.equal(fused.estimate_ranks(required_counts, 1.0), required_counts)


@long_where_interpreted
@pytest.mark.usefixtures("agreed", "little_room")
def test_items_in_clusters_are_found_though_estimates_are_wrong(looked_again):
    # Given nearly identical items, 250 of each kind: one block says little about the next
    rng = np.random.default_rng(4)
    centres = rng.standard_normal((70, 12)).astype("f4")
    items = np.repeat(centres, 250, 0) + rng.standard_normal((17_500, 12)).astype("f4") * 1e-4
    users = rng.standard_normal((4, 12)).astype("f4")

    assert_same(users, items, 30, Histories.of([[]] * 4))

    assert sum(looked_again) <= 4


@long_where_interpreted
@pytest.mark.usefixtures("agreed", "little_room")
@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
def test_lists_have_the_bits_of_the_processor_after_several_stages(looked_again, metric):
    queries, vectors, excluded = make(3, 17_000, 20, seed=5)

    assert_same(queries, vectors, 30, excluded, metric)

    assert not looked_again


def test_kernels_that_disagree_are_not_used(monkeypatch, caplog):
    # Given kernels whose bounds are a little too low
    monkeypatch.setattr(fused, "agrees_with_torch", AGREES)
    original_bounds_of = fused.compute_bounds
    monkeypatch.setattr(fused, "compute_bounds", lambda *given: original_bounds_of(*given) - 0.02)

    scorer = DeviceScorer.of(np.ones((5, 4), np.float32), "inner_product", DEVICE, dtype=torch.float16, fused=True)

    assert scorer is not None and scorer._fused is None
    assert "kernels' lists differ" in caplog.text


def test_kernels_that_cannot_be_run_are_not_used(monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(fused, "agrees_with_torch", broken)

    scorer = DeviceScorer.of(np.ones((5, 4), np.float32), "inner_product", DEVICE, dtype=torch.float16, fused=True)

    assert scorer is not None and scorer._fused is None
    assert "RuntimeError: no compiler" in caplog.text


@pytest.mark.usefixtures("agreed")
def test_out_of_memory_halves_the_users_of_a_search(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    users, items, excluded = make(8, 200, 8, seed=6)
    scorer = by_kernels(items)
    original_search = fused.search

    def small_device(items, columns, queries, excluded_pairs, k, shape):
        if len(queries.user_codes) > 4:
            raise torch.OutOfMemoryError("no room")
        return original_search(items, columns, queries, excluded_pairs, k, shape)

    monkeypatch.setattr(fused, "search", small_device)
    monkeypatch.setattr(DeviceScorer, "_room_bytes", lambda _: 200_000)

    device_lists = scorer.top(users, 10, excluded)

    assert has_same_bits(device_lists, Scorer.of(items, engine=False).top(users, 10, excluded))
    assert not scorer.has_failed and "out of memory" in caplog.text


@pytest.mark.usefixtures("agreed")
def test_long_lists_and_wide_vectors_are_left_to_the_operators():
    narrow_items = by_kernels(np.ones((2000, 8), np.float32))._items
    wide = by_kernels(np.ones((70, 600), np.float32))._items

    assert fused.supports_search(narrow_items, narrow_items.all_columns, FETCH_MAX)
    assert not fused.supports_search(narrow_items, narrow_items.all_columns, FETCH_MAX + 1)
    assert not fused.supports_search(wide, wide.all_columns, 10)
