"""How long a batch may take: more when it is large, or behind others."""

import asyncio
from typing import Any

import pytest

from cache.errors import TierUnavailable
from cache.l2.connection import Batch
from cache.l2.pool import Lane, deadline_for

BASE_S = 5.0


class FakeWire:
    """Takes batches and answers none."""

    closing = False

    def __init__(self, commands: int = 0) -> None:
        self.commands = commands
        self.in_flight = 0
        self.aborted: list[TierUnavailable] = []

    def send(self, batch: Batch) -> None:
        batch.wire = self  # type: ignore[assignment]
        self.commands += batch.count

    def abort(self, why: TierUnavailable) -> None:
        self.aborted.append(why)


def lane_on(wire: FakeWire) -> Lane:
    pool: Any = None
    lane = Lane(pool, BASE_S, 1)
    lane._wires.append(wire)  # type: ignore[arg-type]
    return lane


def left_s(batch: Batch) -> float:
    assert batch.timer is not None
    return batch.timer.when() - asyncio.get_running_loop().time()


def sent(lane: Lane, count: int) -> Batch:
    batch = Batch(b"", count, lambda _outcome: None)
    lane.send(batch)
    return batch


def test_the_time_allowed_grows_with_the_commands() -> None:
    assert [deadline_for(0.05, count) for count in (0, 500, 1_000)] == pytest.approx(
        [0.05, 0.1, 0.15]
    )


async def test_a_large_batch_and_one_behind_it_have_more_time() -> None:
    lane = lane_on(FakeWire())

    large, behind = sent(lane, 1_000), sent(lane, 1)

    assert left_s(large) == pytest.approx(3 * BASE_S, abs=0.5)
    assert left_s(behind) == pytest.approx(3 * BASE_S, abs=0.5)
    for batch in (large, behind):
        batch.timer.cancel()  # type: ignore[union-attr]


async def test_the_second_look_waits_until_a_large_reply_can_have_been_read() -> None:
    lane = lane_on(wire := FakeWire())
    small, large = sent(lane, 1), sent(lane, 10_000)
    looks = []

    for batch in (small, large):
        batch.timer.cancel()  # type: ignore[union-attr]
        lane._expire(batch, 1.0, False)
        looks.append(left_s(batch))
        batch.timer.cancel()  # type: ignore[union-attr]

    assert looks[0] < 0.0011 and 0.015 < looks[1] < 0.0211
    assert not wire.aborted
    lane._expire(large, 1.0, True)
    assert len(wire.aborted) == lane.timed_out == 1
