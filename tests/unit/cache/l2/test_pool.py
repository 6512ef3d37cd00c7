"""How long a pipeline may take: more when it is large, or behind others."""

import asyncio
from typing import Any

import pytest

from cache.errors import TierUnavailable
from cache.l2.commands import deadline_s_for
from cache.l2.pool import Pipeline, PipelinePool

BASE_S = 5.0


class FakeConnection:
    """Takes batches and answers none."""

    is_closing = False

    def __init__(self, commands: int = 0) -> None:
        self.commands_in_flight = commands
        self.pipelines_in_flight = 0
        self.aborted: list[TierUnavailable] = []

    def send(self, pipeline: Pipeline) -> None:
        pipeline.connection = self  # type: ignore[assignment]
        self.commands_in_flight += pipeline.reply_count

    def abort(self, error: TierUnavailable) -> None:
        self.aborted.append(error)


def pool_on(connection: FakeConnection) -> PipelinePool:
    opens_none: Any = None
    pool = PipelinePool(opens_none, BASE_S, 1)
    pool._connections.append(connection)  # type: ignore[arg-type]
    return pool


def left_s(pipeline: Pipeline) -> float:
    assert pipeline.deadline_timer is not None
    return pipeline.deadline_timer.when() - asyncio.get_running_loop().time()


def send_pipeline(pool: PipelinePool, count: int) -> Pipeline:
    pipeline = Pipeline(b"", count, lambda _outcome: None)
    pool.send(pipeline)
    return pipeline


def test_the_time_allowed_grows_with_the_commands() -> None:
    assert [deadline_s_for(0.05, count) for count in (0, 500, 1_000)] == pytest.approx([0.05, 0.1, 0.15])


async def test_a_large_batch_and_one_behind_it_have_more_time() -> None:
    pool = pool_on(FakeConnection())

    large, behind = send_pipeline(pool, 1_000), send_pipeline(pool, 1)

    assert left_s(large) == pytest.approx(3 * BASE_S, abs=0.5)
    assert left_s(behind) == pytest.approx(3 * BASE_S, abs=0.5)
    for pipeline in (large, behind):
        pipeline.deadline_timer.cancel()  # type: ignore[union-attr]


async def test_the_second_look_waits_until_a_large_reply_can_have_been_read() -> None:
    pool = pool_on(connection := FakeConnection())
    small, large = send_pipeline(pool, 1), send_pipeline(pool, 10_000)
    remaining_s = []

    for pipeline in (small, large):
        pipeline.deadline_timer.cancel()  # type: ignore[union-attr]
        pool._expire(pipeline, 1.0, False)
        remaining_s.append(left_s(pipeline))
        pipeline.deadline_timer.cancel()  # type: ignore[union-attr]

    assert remaining_s[0] < 0.0011 and 0.015 < remaining_s[1] < 0.0211
    assert not connection.aborted
    pool._expire(large, 1.0, True)
    assert len(connection.aborted) == pool.timed_out == 1
