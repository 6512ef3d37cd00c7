"""Checksums of a page: what a store that does not answer costs whoever asks for an explanation."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cache.format.redis_keys import Keyspace
from cache.tiers.reads import Miss, MissReason
from serving.engine.entity import find_record_key
from serving.explain import explainer
from serving.explain.explainer import PageChecks
from tests.unit.serving.world import World

NOWHERE: Any = None


async def test_checksums_that_do_not_come_keep_no_caller_and_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explainer, "_CHECKSUMS_TIMEOUT_S", 0.0)
    snapshot = World().snapshot()
    table = snapshot.manifest.tables["user_topk"]
    reply_gate, calls = asyncio.Event(), []

    async def hangs(*arguments: Any) -> Any:
        calls.append(arguments)
        await reply_gate.wait()
        return "0123"

    async def page(_: object) -> Miss:
        return Miss(MissReason.PAGE_MISSING)

    looking: Any = SimpleNamespace(read_page=page)
    aside: Any = hangs
    checks = PageChecks(looking, Keyspace("test"), NOWHERE, aside)

    page_reports = [await checks.check_page(snapshot, table, find_record_key(snapshot, table, b"u3")) for _ in range(9)]

    assert all(
        page_report["expected"] is None and page_report["state"] == "page_missing" for page_report in page_reports
    )
    assert len(calls) == 2

    reply_gate.set()
    for _ in range(3):
        await asyncio.sleep(0)
    await checks.check_page(snapshot, table, find_record_key(snapshot, table, b"u3"))
    assert len(calls) == 3
    await asyncio.sleep(0)
