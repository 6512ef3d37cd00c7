"""Checksums of a page: what a store that does not answer costs whoever asks for an explanation."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cache.format.redis_keys import Keyspace
from cache.tiers.results import Missed, MissReason
from serving.explain import page_check
from serving.explain.page_check import PageChecks
from serving.lookup.entity import want_in
from tests.unit.serving.world import World

NOWHERE: Any = None


async def test_checksums_that_do_not_come_keep_no_caller_and_few_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_check, "_SUMS_S", 0.0)
    snapshot = World().snapshot()
    table = snapshot.manifest.tables["user_topk"]
    comes, begun = asyncio.Event(), []

    async def hangs(*given: Any) -> Any:
        begun.append(given)
        await comes.wait()
        return "0123"

    async def page(_: object) -> Missed:
        return Missed(MissReason.PAGE_MISSING)

    looking: Any = SimpleNamespace(page=page)
    aside: Any = hangs
    checks = PageChecks(looking, Keyspace("test"), NOWHERE, aside)

    told = [await checks.told(snapshot, table, want_in(snapshot, table, b"u3")) for _ in range(9)]

    assert all(each["expected"] is None and each["state"] == "page_missing" for each in told)
    assert len(begun) == 2

    comes.set()
    for _ in range(3):
        await asyncio.sleep(0)
    await checks.told(snapshot, table, want_in(snapshot, table, b"u3"))
    assert len(begun) == 3
    await asyncio.sleep(0)
