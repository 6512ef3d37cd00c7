"""Whatever Redis says, each caller of a pipeline hears something."""

import asyncio
from typing import Any

import hiredis
import pytest

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.commands import OverlayRead, PageRead, PageReads, unpack
from cache.l2.pool import Pipeline
from cache.l2.tier import RemoteConfig, RemoteTier

RECORD = b"12345678"
PAGE, OVERLAY = PageRead("g", "t", 0, 0, len(RECORD)), OverlayRead("g", "t", "ab")


class FakePool:
    """Keeps what it is to send until the test says what comes back."""

    def __init__(self) -> None:
        self.sent_pipelines: list[Pipeline] = []

    def send(self, pipeline: Pipeline) -> None:
        self.sent_pipelines.append(pipeline)


@pytest.fixture
def tier() -> RemoteTier:
    tier = RemoteTier(RemoteConfig("redis://127.0.0.1:1"), Keyspace("test"))
    tier.pool = FakePool()  # type: ignore[assignment]
    return tier


async def answers(tier: RemoteTier, replies: list[Any]) -> list[list[Any]]:
    """Of a caller who reads a page, one who reads an overlay, and one more with a page."""
    waiting = [tier.submit(commands, list) for commands in ((PAGE,), (OVERLAY,), (PAGE,))]
    await asyncio.sleep(0)
    (pipeline,) = tier.pool.sent_pipelines  # type: ignore[attr-defined]
    pipeline.land(replies)
    async with asyncio.timeout(5):
        return await asyncio.gather(*waiting)


@pytest.mark.parametrize("odd", ["MOVED 1", "MOVED ² a:1", "ASK", "ASK 1", "MOVED 99999 a:1"])
async def test_an_odd_redirect_costs_only_its_own_caller_an_answer(tier: RemoteTier, odd: str) -> None:
    caller_answers = await answers(tier, [RECORD, hiredis.ReplyError(odd), None, RECORD])

    assert caller_answers[0] == caller_answers[2] == [RECORD] and type(caller_answers[1][0]) is TierUnavailable


async def test_a_reply_that_cannot_be_unpacked_costs_its_own_caller_an_answer(
    tier: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(commands: Any, replies: Any) -> Any:
        if commands == (OVERLAY,):
            raise ValueError("a defect")
        return unpack(commands, replies)

    monkeypatch.setattr("cache.l2.tier.unpack", breaks)
    caller_answers = await answers(tier, [RECORD, 5, b"x", RECORD])

    assert caller_answers[0] == caller_answers[2] == [RECORD] and type(caller_answers[1][0]) is TierUnavailable
    assert tier._commands_in_flight == 0


async def test_columns_of_strange_replies_have_an_end(tier: RemoteTier) -> None:
    waiting = tier.submit(PageReads("g", "t", [0, 1], [0, 8], 8), list)
    await asyncio.sleep(0)
    (pipeline,) = tier.pool.sent_pipelines  # type: ignore[attr-defined]
    pipeline.land([hiredis.ReplyError("MOVED 1"), {}])
    async with asyncio.timeout(5):
        first, second = await waiting

    assert type(first) is TierUnavailable and second is None
