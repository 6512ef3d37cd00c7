"""A flood of scrapes costs what a few of them cost."""

from serving.metrics.exposition import BURST_EXPOSITIONS, EXPOSITIONS_PER_S, Exposition
from tests.fakes import FakeClock


async def test_a_flood_of_scrapes_is_answered_with_what_was_made_last() -> None:
    timer, exposition_count = FakeClock(), 0

    async def make() -> bytes:
        nonlocal exposition_count
        exposition_count += 1
        return b"%d" % exposition_count

    exposition = Exposition(make, timer)
    bodies = [await exposition() for _ in range(1_000)]
    assert exposition_count == BURST_EXPOSITIONS and bodies[-1] == b"%d" % exposition_count

    for _ in range(100):
        timer.tick(0.01)
        for _ in range(10):
            await exposition()
    assert BURST_EXPOSITIONS + EXPOSITIONS_PER_S - 1 <= exposition_count <= BURST_EXPOSITIONS + EXPOSITIONS_PER_S + 1


async def test_who_scrapes_now_and_then_hears_what_is() -> None:
    timer, exposition_count = FakeClock(), 0

    async def make() -> bytes:
        nonlocal exposition_count
        exposition_count += 1
        return b"%d" % exposition_count

    exposition = Exposition(make, timer)
    for at in range(100):
        timer.tick(1.0)
        assert await exposition() == b"%d" % (at + 1)
