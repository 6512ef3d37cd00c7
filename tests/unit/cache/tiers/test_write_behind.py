"""Writes behind an answer end as stored, failed or dropped, whatever the write before them met."""

from collections.abc import Sequence

from cache.errors import TierUnavailable
from cache.l2.commands import OverlayWrite
from cache.tiers.tiered import WriteBehind
from tests.integration.serving_app import eventually


def write(number: int) -> OverlayWrite:
    return OverlayWrite("g1", "user_topk", f"{number:016x}", bytes(8), 60.0)


async def test_writes_behind_one_that_raises_are_stored() -> None:
    # given a first write that raises, and more writes than fit one batch
    calls = 0

    async def store(writes: Sequence[OverlayWrite]) -> list[TierUnavailable | None]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("planted")
        return [None] * len(writes)

    behind = WriteBehind(store, 1 << 20)

    # when
    for number in range(300):
        behind.put(write(number))

    async def is_empty() -> bool:
        return not len(behind)

    # then
    assert await eventually(is_empty)
    await behind.aclose(5.0)
    assert (behind.stored_count, behind.failed_count, behind.dropped_count) == (44, 256, 0)
