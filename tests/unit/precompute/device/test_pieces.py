"""Users of a slab that ran out of memory and left some to a second attempt: each keeps her own exclusions."""

import numpy as np
import pytest

from cache.model.tower import Histories
from cache.topk.topk import Scorer
from tests.devices import DEVICE

torch = pytest.importorskip("torch", reason="scoring on a device needs torch: make torch-env")

from precompute.device import scorer as device_scorer  # noqa: E402
from precompute.device import search as device_search  # noqa: E402
from precompute.device.items import slice_if_consecutive  # noqa: E402
from precompute.device.scorer import DeviceScorer  # noqa: E402
from precompute.device.search import SearchShape  # noqa: E402

UNCERTAIN = [7, 0, 9]


def test_users_left_by_pieces_keep_their_own_exclusions(monkeypatch):
    # Given three users with equal scores, in two slabs, the first of which is halved: pieces are taken last first
    rng = np.random.default_rng(0)
    items = rng.standard_normal((3000, 16), np.float32)
    users = rng.standard_normal((16, 16), np.float32)
    users[UNCERTAIN] = 0
    theirs = Scorer.of(items, engine=False)
    best_ordinals = theirs.top(users, 5)[0]
    excluded = Histories.of([best_ordinals[row][:3] if row == 8 else [] for row in range(len(users))])
    torch_scorer = DeviceScorer.of(items, "inner_product", DEVICE, dtype=torch.float16, fused=False)
    assert torch_scorer is not None
    original_search = device_search.search
    searched = []

    def small_device(items, columns, queries, excluded_pairs, k, shape):
        if len(queries.user_codes) == 8 and torch_scorer._part_count == 1:
            raise torch.OutOfMemoryError("no room")
        searched.append(len(queries.user_codes))
        return original_search(items, columns, queries, excluded_pairs, k, shape)

    def shape_of(self, search_request, fetch):
        return SearchShape(8 // self._part_count, len(search_request.columns.item_ordinals), fetch)

    monkeypatch.setattr(device_scorer, "search", small_device)
    monkeypatch.setattr(device_scorer, "SLABS_UNDER_WAY", 1)
    monkeypatch.setattr(DeviceScorer, "_choose_shape", shape_of)

    device_lists = torch_scorer.top(users, 5, excluded)

    expected_lists = theirs.top(users, 5, excluded)
    assert not torch_scorer.has_failed and searched[:4] == [4, 4, 4, 4]
    assert device_lists[0].tolist() == expected_lists[0].tolist()
    assert np.array_equal(device_lists[1].view(np.uint32), expected_lists[1].view(np.uint32))


def test_only_neighbours_in_order_are_a_slice():
    assert slice_if_consecutive(np.array([3, 4, 5])) == slice(3, 6)
    for rows in ([7, 0, 9], [5, 4, 3], [1, 1, 3], [2, 5, 4]):
        assert isinstance(slice_if_consecutive(np.array(rows)), np.ndarray)
