"""Searches under a filter whose callers have left: none is begun, and what passes is not behind them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

from cache.model.ranking import Metric
from serving.ranking.filters import Filters, Search

VECTOR = np.ones(4, np.float32)
METRIC: Metric = "inner_product"


class Filtering:
    """Searches that wait until they are let go, and are counted."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = threading.Event()
        self.attributes = SimpleNamespace(count=1 << 20)

    def best(self, *_: Any) -> int:
        self.begun += 1
        assert self.go.wait(30)
        return self.begun

    def kept(self, _filter: Any) -> None:
        return None

    def passing(self, _filter: Any) -> str:
        return "what passes"


async def test_searches_that_nobody_waits_for_are_not_begun() -> None:
    now = 100.0
    filtering = Filtering()
    snapshot: Any = SimpleNamespace(filtering=filtering)
    passing: Any = SimpleNamespace(count=1 << 20)
    searches = [Search(VECTOR, np.empty(0, np.int64), 5, METRIC)] * 3
    with ThreadPoolExecutor(1) as executor:
        filters: Any = Filters(executor, timer=lambda: now)

        found = await asyncio.gather(
            *(filters.search(snapshot, passing, searches, now + 0.05) for _ in range(20))
        )
        assert found == [None] * 20
        assert filtering.begun == 1 and await filters._known(snapshot, "any") == "what passes"

        now += 1  # the one that is under way sees that it is late
        filtering.go.set()
        answered = await filters.search(snapshot, passing, searches, now + 30)
    assert filtering.begun == 1 + 3
    assert answered == [2, 3, 4]
