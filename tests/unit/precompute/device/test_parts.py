"""What the exact top-K on a device rests on: sums with numpy's bits, keys that sort alike, margins that hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.model.ranking import pack_sort_keys, score, unit_rows, unpack_sort_keys
from cache.topk.flat import ComparableItems
from tests.devices import DEVICE

torch = pytest.importorskip("torch", reason="scoring on a device needs torch: make torch-env")

from precompute.device.items import (  # noqa: E402
    WORST,
    DeviceItems,
    arrange_in_sum_order,
    exact_dots,
    has_same_bits,
    pack_keys,
    unpack_keys,
    unpack_scores,
)
from precompute.device.search import split_into_tiles  # noqa: E402

WHERE = torch.device(DEVICE)
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 0.1], np.float32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 150), st.integers(0, 2**32 - 1))
def test_sums_have_the_bits_of_numpy(dims, seed):
    rng = np.random.default_rng(seed)
    users = rng.standard_normal((5, dims)).astype(np.float32)
    items = (rng.standard_normal((9, dims)) * np.exp(rng.standard_normal((9, 1)) * 5)).astype("f4")
    candidate_ordinals = rng.integers(0, 9, (5, 7))

    dot_products = exact_dots(
        arrange_in_sum_order(torch.from_numpy(users).to(WHERE)),
        arrange_in_sum_order(torch.from_numpy(items).to(WHERE))[torch.from_numpy(candidate_ordinals).to(WHERE)],
    )

    assert (
        dot_products.cpu().numpy().view(np.uint32).tolist()
        == score(users, items, candidate_ordinals).view("u4").tolist()
    )
    assert has_same_bits(dims, WHERE)


def test_another_order_of_summation_is_noticed(monkeypatch):
    monkeypatch.setattr("precompute.device.items.exact_dots", lambda users, items: (items * users[:, None]).sum((2, 3)))

    assert not has_same_bits(100, WHERE)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_keys_sort_and_read_like_those_of_the_night(values):
    scores = np.concatenate([np.array(values, np.float32), SPECIAL])
    ordinals = np.arange(len(scores))[::-1].copy()

    keys = pack_keys(torch.from_numpy(scores).to(WHERE), torch.from_numpy(ordinals).to(WHERE))

    unsigned = keys.cpu().numpy().view(np.uint64) ^ np.uint64(1 << 63)
    assert unsigned.tolist() == pack_sort_keys(scores, ordinals).tolist()
    assert keys.cpu().argsort().tolist() == pack_sort_keys(scores, ordinals).argsort().tolist()
    assert np.array_equal(unpack_scores(keys).cpu().numpy(), scores)
    device_lists = unpack_keys(torch.cat([keys, torch.tensor([WORST], device=WHERE)])[None])
    expected_lists = unpack_sort_keys(np.append(unsigned, np.uint64(0))[None], len(keys) + 1)
    assert np.array_equal(device_lists[0].cpu().numpy().view(np.uint32), expected_lists[0])
    assert np.array_equal(device_lists[1].cpu().numpy().view(np.uint32), expected_lists[1].view(np.uint32))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_product_is_further_from_the_score_than_its_margin(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), "dtype")
    metric = data.draw(st.sampled_from(["inner_product", "cosine"]), "metric")
    dims = data.draw(st.integers(1, 200), "dims")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    spread = data.draw(st.sampled_from([0, 1, 4]), "spread of lengths")
    items = (rng.standard_normal((700, dims)) * np.exp(spread * rng.standard_normal((700, 1)))).astype("f4")
    users = (rng.standard_normal((20, dims)) * np.exp(rng.standard_normal((20, 1)))).astype("f4")
    compared = ComparableItems.of(items, metric)
    device_items = DeviceItems.of(compared, WHERE, dtype)
    queried = unit_rows(users) if metric == "cosine" else users
    queries, columns = device_items.encode_queries(users, queried), device_items.all_columns
    real = (columns.item_ordinals < 700).cpu().numpy()

    product = (queries.user_codes @ columns.item_codes.T).double().cpu().numpy()

    item_ordinals = np.minimum(columns.item_ordinals.cpu().numpy(), 699)
    exact = score(users, items, np.tile(item_ordinals, (20, 1)), metric).astype(np.float64)
    exact *= queries.user_scales.double().cpu().numpy()[:, None] * device_items.vector_scale
    margin = (
        device_items.score_margins(columns, slice(None), queries.scaled_lengths, queries.residual_lengths).cpu().numpy()
    )
    group = groups_of(columns)
    over = np.abs(product - exact)[:, real] / margin[:, group][:, real]
    assert over.max() <= 1
    if dtype != torch.float32 and dims > 1:
        assert over.max() > 1e-3  # and it is no margin that would hide anything


def groups_of(columns):
    """The group of each column; every column is in one."""
    members = columns.columns_of(torch.arange(len(columns.longest_by_group), device=WHERE)).cpu().numpy()
    assert np.array_equal(np.sort(members, None), np.arange(len(columns.item_ordinals)))
    return np.argsort(members, None) // columns.group_size


@pytest.mark.parametrize("group", [2, 4, 8, 64])
def test_the_largest_of_a_group_is_that_of_its_columns(group):
    vectors = np.random.default_rng(0).standard_normal((1000, 8)).astype("f4")
    device_items = DeviceItems.of(ComparableItems.of(vectors, "inner_product"), WHERE, torch.float16, group)
    columns = device_items.all_columns
    product = torch.randn(5, len(columns.item_ordinals), device=WHERE)

    group_maxima = columns.largest_by_group(product)

    members = columns.columns_of(torch.arange(len(columns.longest_by_group), device=WHERE))
    assert torch.equal(group_maxima, product[:, members].amax(2))


def test_a_columns_place_and_its_groups_bounds_are_those_of_its_item():
    rng = np.random.default_rng(3)
    items = (rng.standard_normal((5000, 8)) * np.exp(rng.standard_normal((5000, 1)))).astype("f4")
    device_items = DeviceItems.of(ComparableItems.of(items, "inner_product"), WHERE, torch.float16)

    for columns, count in (
        (device_items.all_columns, 5000),
        (device_items.columns_of_allowed(torch.arange(5000, device=WHERE) % 7 == 0), 715),
    ):
        ordinals = columns.item_ordinals.cpu().numpy()
        real = np.flatnonzero(ordinals < 5000)
        assert len(real) == len(set(ordinals[real].tolist())) == count
        assert np.array_equal(columns.column_by_ordinal.cpu().numpy()[ordinals[real]], real)
        assert (columns.column_by_ordinal.cpu().numpy() >= 0).sum() == count
        assert np.array_equal(columns.padding_columns.cpu().numpy(), np.flatnonzero(ordinals == 5000))
        group = groups_of(columns)[real]
        sizes = np.linalg.norm(items[ordinals[real]].astype(np.float64), axis=1) * device_items.vector_scale
        assert (columns.longest_by_group.cpu().numpy()[group] >= sizes).all()
        starts = columns.longest_by_group.cpu().numpy()
        assert (starts[1:] <= starts[:-1]).all()


@pytest.fixture(scope="module")
def device_columns():
    vectors = np.random.default_rng(0).standard_normal((40_000, 2)).astype("f4")
    return DeviceItems.of(ComparableItems.of(vectors, "inner_product"), WHERE, torch.float16).all_columns


@given(st.integers(1, 200_000))
def test_tiles_cover_every_column_once_in_whole_blocks(device_columns, most):
    total, block = len(device_columns.item_ordinals), device_columns.block_column_count

    column_tiles = list(split_into_tiles(device_columns, most))

    assert [tile.start for tile in column_tiles] == [0, *(tile.stop for tile in column_tiles[:-1])]
    assert column_tiles[-1].stop == total
    assert all((tile.stop - tile.start) % block == 0 for tile in column_tiles)
    assert all(tile.stop - tile.start <= max(most, block) for tile in column_tiles)
