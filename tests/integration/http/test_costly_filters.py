"""Filters that take long, asked for over HTTP: each is worked out once, and nothing else waits behind them."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cache.filters.filtering import Filtering
from tests.integration.http.shop import BRANDS, Shop, make_shop
from tests.integration.serving_app import Running, eventually, serving

CROWD = 60
"""More requests than the default pool of asyncio has threads."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Shop:
    return make_shop(tmp_path_factory.mktemp("costly"), redis_url)


class Gate:
    """Lets no filter end before it is opened, and notes which were begun."""

    def __init__(self) -> None:
        self.started_filters: list[Any] = []
        self._may_end = threading.Event()

    def open(self) -> None:
        self._may_end.set()

    def wait(self, filter_: Any) -> None:
        self.started_filters.append(filter_)
        assert self._may_end.wait(30)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every filter is such as is worked out in a thread, and takes until the gate is opened."""
    filter_gate = Gate()
    evaluate = Filtering.evaluate

    def waiting(filtering: Filtering, filter_: Any) -> Any:
        filter_gate.wait(filter_)
        return evaluate(filtering, filter_)

    monkeypatch.setattr(Filtering, "evaluate", waiting)
    for limit in ("_INLINE_COMPARISONS_MAX", "_INLINE_ITEMS"):  # by what a release decides where a filter is worked out
        monkeypatch.setattr(f"serving.filters.filtered_lookup.{limit}", -1, raising=False)
    yield filter_gate
    filter_gate.open()


def start_lookup(running: Running, user: str, filter_: Any) -> asyncio.Task[Any]:
    body = {"entities": [user], "k": 3, "filter": filter_}
    return asyncio.create_task(running.http.post("/v1/lookup/user_topk", json=body))


async def test_a_filter_is_worked_out_once_for_all_who_ask_for_it_at_once(shop: Shop, gate: Gate) -> None:
    user = min(shop.users)
    async with serving(shop.night) as running:
        tasks = [start_lookup(running, user, {"==": ["brand", BRANDS[0]]}) for _ in range(20)]
        assert await eventually(_is(lambda: bool(gate.started_filters)))
        for _ in range(50):  # the others come as far as they do
            await asyncio.sleep(0)
        gate.open()
        answers = await asyncio.gather(*tasks)

    assert {answer.status_code for answer in answers} == {200}
    assert len(gate.started_filters) == 1


async def test_other_work_in_threads_waits_behind_no_filter(shop: Shop, gate: Gate) -> None:
    user = min(shop.users)
    async with serving(shop.night) as running:
        tasks = [start_lookup(running, user, {"==": ["brand", f"brand-{row}"]}) for row in range(CROWD)]
        assert await eventually(_is(lambda: bool(gate.started_filters)))
        for _ in range(50):
            await asyncio.sleep(0)
        thread_task = asyncio.create_task(asyncio.to_thread(threading.get_ident))
        completed_tasks, _ = await asyncio.wait({thread_task}, timeout=5)
        gate.open()
        await asyncio.gather(*tasks)

    assert completed_tasks == {thread_task}


def _is(condition: Any) -> Any:
    async def is_so() -> bool:
        return bool(condition())

    return is_so
