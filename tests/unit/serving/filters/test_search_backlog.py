"""Filters and searches whose callers have left: none is begun, each is worked out once, nothing else waits behind."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache.filters.expression import InvalidFilter
from cache.model.ranking import Metric
from serving.filters.filtered_lookup import WAITING_FILTERS_MAX, FilterEvaluator, VectorSearch
from serving.requests.errors import Problem
from tests.integration.serving_app import eventually

VECTOR = np.ones(4, np.float32)
METRIC: Metric = "inner_product"
COSTLY = 1 << 30


class Filtering:
    """Searches and filters that wait until they are let go, and are counted."""

    def __init__(self, cost: int = COSTLY) -> None:
        self.begun = 0
        self.go = threading.Event()
        self.threads: list[str] = []
        self.names: list[str] = []
        self._cost = cost

    def search(self, *_: Any) -> int:
        self.begun += 1
        assert self.go.wait(30)
        return self.begun

    def get_cached(self, _filter: Any) -> None:
        return None

    def evaluation_cost(self, _filter: Any) -> int:
        return self._cost

    def evaluate(self, filter_: str) -> str:
        self.names.append(filter_)
        self.threads.append(threading.current_thread().name)
        if self._cost == COSTLY:
            assert self.go.wait(30)
        if filter_ == "wrong":
            raise InvalidFilter("no such attribute")
        return f"what passes {filter_}"


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "searches") as pool:
        yield pool


@pytest.fixture
def masks() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "masks") as pool:
        yield pool


async def test_searches_that_nobody_waits_for_are_not_begun(executor: ThreadPoolExecutor) -> None:
    now_s = 100.0
    filtering = Filtering()
    snapshot: Any = SimpleNamespace(part=lambda _kind: filtering)
    filter_mask: Any = SimpleNamespace(passing_count=1 << 20)
    searches = [VectorSearch(VECTOR, np.empty(0, np.int64), 5, METRIC)] * 3
    filters: Any = FilterEvaluator(executor, monotonic_clock=lambda: now_s)

    results = await asyncio.gather(*(filters.search(snapshot, filter_mask, searches, now_s + 0.05) for _ in range(20)))
    assert results == [None] * 20 and filtering.begun == 1

    now_s += 1  # the one that is under way sees that it is late
    filtering.go.set()
    answered = await filters.search(snapshot, filter_mask, searches, now_s + 30)
    assert filtering.begun == 1 + 3
    assert answered == [2, 3, 4]


async def test_a_filter_is_worked_out_once_for_all_who_ask_for_it_at_once(
    executor: ThreadPoolExecutor, masks: ThreadPoolExecutor
) -> None:
    filtering = Filtering()
    snapshot: Any = SimpleNamespace(part=lambda _kind: filtering)
    filters: Any = FilterEvaluator(executor, monotonic_clock=lambda: 0.0, mask_executor=masks)

    asking = [asyncio.create_task(filters.evaluate(snapshot, "cheap", 30.0)) for _ in range(50)]
    asking += [asyncio.create_task(filters.evaluate(snapshot, "near", 30.0)) for _ in range(50)]
    await asyncio.sleep(0)
    filtering.go.set()
    filter_masks = await asyncio.gather(*asking)

    assert filter_masks == ["what passes cheap"] * 50 + ["what passes near"] * 50
    assert filtering.names == ["cheap", "near"]
    assert {name[:5] for name in filtering.threads} == {"masks"}


async def test_a_filter_that_does_not_fit_is_refused_for_each_who_asked(
    executor: ThreadPoolExecutor, masks: ThreadPoolExecutor
) -> None:
    filtering = Filtering()
    filtering.go.set()
    snapshot: Any = SimpleNamespace(part=lambda _kind: filtering)
    filters: Any = FilterEvaluator(executor, monotonic_clock=lambda: 0.0, mask_executor=masks)

    problems = await asyncio.gather(
        *(filters.evaluate(snapshot, "wrong", 30.0) for _ in range(3)), return_exceptions=True
    )

    assert [reason_of(problem) for problem in problems] == [(422, "invalid_filter")] * 3


async def test_a_filter_waits_no_longer_than_its_request_and_is_not_begun_for_nobody(
    executor: ThreadPoolExecutor, masks: ThreadPoolExecutor
) -> None:
    filtering = Filtering()
    snapshot: Any = SimpleNamespace(part=lambda _kind: filtering)
    filters: Any = FilterEvaluator(executor, monotonic_clock=lambda: 0.0, mask_executor=masks)

    first = asyncio.create_task(filters.evaluate(snapshot, "first", 30.0))
    assert await eventually(lambda: _truth(filtering.names == ["first"]))
    late = await asyncio.gather(
        *(filters.evaluate(snapshot, f"late {number}", 0.01) for number in range(20)), return_exceptions=True
    )
    cancelled_task = asyncio.create_task(filters.evaluate(snapshot, "left", 30.0))
    await asyncio.sleep(0)
    cancelled_task.cancel()
    await asyncio.wait({cancelled_task})
    filtering.go.set()

    assert [reason_of(problem) for problem in late] == [(503, "overloaded")] * 20
    assert await first == "what passes first"
    assert await filters.evaluate(snapshot, "last", 30.0) == "what passes last"
    assert filtering.names == ["first", "last"]


async def test_more_filters_than_may_wait_are_refused_at_once(
    executor: ThreadPoolExecutor, masks: ThreadPoolExecutor
) -> None:
    filtering = Filtering()
    snapshot: Any = SimpleNamespace(part=lambda _kind: filtering)
    filters: Any = FilterEvaluator(executor, monotonic_clock=lambda: 0.0, mask_executor=masks)
    waiting = [
        asyncio.create_task(filters.evaluate(snapshot, f"filter {number}", 30.0))
        for number in range(WAITING_FILTERS_MAX)
    ]
    await asyncio.sleep(0)

    with pytest.raises(Problem) as refused:
        await filters.evaluate(snapshot, "one more", 30.0)

    assert refused.value.status == 503
    filtering.go.set()
    assert await filters.evaluate(snapshot, "filter 0", 30.0) == "what passes filter 0"
    assert len(await asyncio.gather(*waiting)) == WAITING_FILTERS_MAX


async def test_under_overload_no_costly_filter_is_begun(
    executor: ThreadPoolExecutor, masks: ThreadPoolExecutor
) -> None:
    filtering = Filtering()
    snapshot: Any = SimpleNamespace(part=lambda _kind: filtering)
    filters: Any = FilterEvaluator(executor, lambda: False, lambda: 0.0, mask_executor=masks)

    with pytest.raises(Problem) as refused:
        await filters.evaluate(snapshot, "any", 30.0)

    assert refused.value.status == 503 and filtering.names == []


async def test_work_of_other_parts_in_threads_waits_behind_no_filter(executor: ThreadPoolExecutor) -> None:
    """Blocklists are put in force in asyncio's own threads, of which there are cores + 4."""
    filtering = Filtering()
    snapshot: Any = SimpleNamespace(part=lambda _kind: filtering)
    with ThreadPoolExecutor(2) as masks:
        filters: Any = FilterEvaluator(executor, monotonic_clock=lambda: 0.0, mask_executor=masks)
        asking = [asyncio.create_task(filters.evaluate(snapshot, f"filter {number}", 30.0)) for number in range(60)]
        assert await eventually(lambda: _truth(len(filtering.names) == 2))

        async with asyncio.timeout(10):
            assert await asyncio.to_thread(lambda: "in force") == "in force"

        filtering.go.set()
        await asyncio.gather(*asking)


@pytest.mark.parametrize(("cost", "is_inline"), [(1 << 16, True), (1 << 24, False)])
async def test_what_a_filter_costs_decides_where_it_is_worked_out(
    executor: ThreadPoolExecutor, masks: ThreadPoolExecutor, cost: int, *, is_inline: bool
) -> None:
    filtering = Filtering(cost)
    snapshot: Any = SimpleNamespace(part=lambda _kind: filtering)
    filters: Any = FilterEvaluator(executor, monotonic_clock=lambda: 0.0, mask_executor=masks)

    await filters.evaluate(snapshot, "any", 30.0)

    loop_thread_name = threading.current_thread().name
    assert [name == loop_thread_name for name in filtering.threads] == [is_inline]


def reason_of(answer: object) -> tuple[int, str]:
    assert isinstance(answer, Problem)
    return answer.status, answer.reason


async def _truth(is_so: bool) -> bool:
    return is_so
