"""Users of a slab that ran out of memory and left some to a second attempt: each keeps her own exclusions."""

import numpy as np
import pytest

from cache.model.tower import Histories
from cache.topk.topk import Scorer
from tests.devices import DEVICE

torch = pytest.importorskip("torch", reason="scoring on a device needs torch: make torch-env")

from precompute.device import scorer as device_scorer  # noqa: E402
from precompute.device import search as device_search  # noqa: E402
from precompute.device.items import slice_of  # noqa: E402
from precompute.device.scorer import DeviceScorer  # noqa: E402
from precompute.device.search import SearchShape  # noqa: E402

UNCERTAIN = [7, 0, 9]


def test_users_left_by_pieces_keep_their_own_exclusions(monkeypatch):
    # Given three users whose scores all tie, in two slabs, of which the first is halved: pieces come last first
    rng = np.random.default_rng(0)
    items = rng.standard_normal((3000, 16), np.float32)
    users = rng.standard_normal((16, 16), np.float32)
    users[UNCERTAIN] = 0
    theirs = Scorer.of(items, engine=False)
    best = theirs.top(users, 5)[0]
    excluded = Histories.of([best[row][:3] if row == 8 else [] for row in range(len(users))])
    ours = DeviceScorer.of(items, "inner_product", DEVICE, dtype=torch.float16, fused=False)
    assert ours is not None
    plain = device_search.search
    searched = []

    def small_device(items, columns, queries, gone, k, shape):
        if len(queries.codes) == 8 and ours._parts == 1:
            raise torch.OutOfMemoryError("no room")
        searched.append(len(queries.codes))
        return plain(items, columns, queries, gone, k, shape)

    def shape_of(self, asked, fetch):
        return SearchShape(8 // self._parts, len(asked.columns.ordinals), fetch)

    monkeypatch.setattr(device_scorer, "search", small_device)
    monkeypatch.setattr(device_scorer, "UNDER_WAY", 1)
    monkeypatch.setattr(DeviceScorer, "_shape", shape_of)

    found = ours.top(users, 5, excluded)

    wanted = theirs.top(users, 5, excluded)
    assert not ours.has_failed and searched[:4] == [4, 4, 4, 4]
    assert found[0].tolist() == wanted[0].tolist()
    assert np.array_equal(found[1].view(np.uint32), wanted[1].view(np.uint32))


def test_only_neighbours_in_order_are_a_slice():
    assert slice_of(np.array([3, 4, 5])) == slice(3, 6)
    for rows in ([7, 0, 9], [5, 4, 3], [1, 1, 3], [2, 5, 4]):
        assert isinstance(slice_of(np.array(rows)), np.ndarray)
