"""What readers write down for the curve of L1: each sampled read once, whichever way it came."""

from collections.abc import Sequence

import numpy as np
import pytest

from cache.errors import TierUnavailable
from cache.mrc.shards import SPACE, Touch
from cache.tiers.access_sample import TRACE_MAX
from cache.tiers.batches import Wants
from cache.tiers.l1 import (
    LIVE_BYTES,
    OVERHEAD_BYTES,
    LocalTier,
    NegativeCache,
    Ready,
    size_of,
)
from cache.tiers.tiered import Tiered, Want
from tests.fakes import DIGEST_A, GENERATION, NEXT_GENERATION, FakeClock, FakeRemote, Night

NIGHT = Night()
VIEW = NIGHT.view()
BYTES = NIGHT.layout.size_bytes + OVERHEAD_BYTES
STRANGER = "nobody-the-night-knew"
READY = Ready(7, b"head", b"tail", 0, ("t", b"u"), b"/a/1")


class Bench:
    """A read path on fakes, all of it sampled."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.remote = FakeRemote(self.clock)
        NIGHT.load(self.remote)
        self.cache = Tiered(
            LocalTier(1 << 20, self.clock),
            NegativeCache(100, 5.0, self.clock),
            self.remote,
            timer=self.clock,
        )
        self.cache.trace.sample(SPACE - 1)

    def taken(self) -> list[Touch]:
        touches = list(self.cache.trace)
        self.cache.trace.clear()
        return touches

    async def many(self, *ids: str) -> list[Touch]:
        wants = [NIGHT.want(each) for each in ids]
        await self.cache.get_many(VIEW, wants, self.clock() + 60)
        return self.taken()

    async def rows(self, *ids: str) -> list[Touch]:
        await self.cache.get_rows(VIEW, columns([NIGHT.want(each) for each in ids]), None)
        return self.taken()


def columns(wants: Sequence[Want]) -> Wants:
    return Wants(
        wants[0].table,
        [int(each.key) for each in wants],
        np.array([each.fingerprint for each in wants], np.uint64),
        np.array([each.position for each in wants], np.int64),
        wants[0].digest,
    )


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_every_way_of_reading_writes_the_same(bench: Bench) -> None:
    known, want = NIGHT.ids[3], NIGHT.want(NIGHT.ids[3])

    written = [await bench.many(known), await bench.rows(known), await bench.many(known)]
    bench.cache.peek(VIEW, want)
    written.append(bench.taken())
    bench.cache.local.discard(next(iter(bench.cache.local._entries)))  # type: ignore[arg-type]
    bench.cache.peek(VIEW, want)
    await bench.cache.get(VIEW, want)
    written.append(bench.taken())
    await bench.cache.get(VIEW, want, bench.clock() + 60)
    written.append(bench.taken())

    ((spot, size),) = written[0]
    assert size == BYTES and spot >> 32 == want.fingerprint >> 32
    assert written == [[(spot, size)]] * 6
    assert bench.cache.counters.total == 6


async def test_a_batch_writes_each_of_its_reads(bench: Bench) -> None:
    ids = NIGHT.ids[:9]

    first, again, single = await bench.rows(*ids), await bench.rows(*ids), await bench.many(*ids)

    assert first == again == single and len({spot for spot, _ in first}) == 9


async def test_what_is_found_nowhere_is_not_written(bench: Bench) -> None:
    bench.remote.fails_with = TierUnavailable("no", reason="connection")

    written = await bench.rows(*NIGHT.ids[:3]), await bench.many(STRANGER, NIGHT.ids[4])

    assert written == ([], [])
    assert bench.cache.counters.total == 5


async def test_only_spots_in_the_sample_are_written(bench: Bench) -> None:
    prints = sorted(NIGHT.want(each).fingerprint for each in NIGHT.ids)
    bench.cache.trace.sample((prints[len(prints) // 2] >> 32 << 32) - 1)

    rows, many = await bench.rows(*NIGHT.ids), await bench.many(*NIGHT.ids)

    assert rows == many and len(rows) == len(prints) // 2
    assert all(spot <= bench.cache.trace.last for spot, _ in rows)


async def test_a_live_answer_is_written_as_a_store_and_then_as_reads(bench: Bench) -> None:
    want = NIGHT.want(STRANGER, DIGEST_A)
    bench.cache.put_live(VIEW, want, NIGHT.live_record(STRANGER), DIGEST_A, 10.0)
    ((spot, size),) = bench.taken()
    await bench.cache.get(VIEW, want, bench.clock() + 60)

    assert size == -(BYTES + LIVE_BYTES)
    assert bench.taken() == [(spot, -size)]
    await bench.cache.aclose()


async def test_a_ready_answer_is_written_as_a_store_and_says_how_it_is_read(bench: Bench) -> None:
    want = NIGHT.want(NIGHT.ids[0])
    bench.cache.keep(VIEW, want, READY)
    kept = bench.cache.local.ready(READY.request)

    assert kept is not None and kept.touch is not None
    assert kept.touch[1] == size_of(READY)
    assert bench.taken() == [(kept.touch[0], -size_of(READY))]


async def test_requests_and_generations_are_told_apart(bench: Bench) -> None:
    kept, other = bench.cache.trace.kept, READY._replace(request=b"/a/1?k=2")
    ready = [
        kept(GENERATION, 7 << 40, READY),
        kept(GENERATION, 7 << 40, other),
        kept(NEXT_GENERATION, 7 << 40, READY),
    ]
    spots = {each.touch[0] for each in ready if each.touch}

    assert len(spots) == 3 and {spot >> 32 for spot in spots} == {7 << 8}


def test_a_new_generation_is_sampled_from_its_first_answer_on() -> None:
    trace = Bench().cache.trace
    trace.begin(GENERATION)
    trace.sample((1 << 32) - 1)

    before = trace.kept(GENERATION, 1 << 40, READY)
    after = trace.kept(NEXT_GENERATION, 1 << 40, READY)

    assert before.touch is None and after.touch is not None
    assert trace.last == SPACE - 1


async def test_nothing_is_written_unless_somebody_samples(bench: Bench) -> None:
    bench.cache.trace.sample(-1)
    bench.cache.trace.begin(GENERATION)

    assert await bench.rows(*NIGHT.ids[:5]) == await bench.many(NIGHT.ids[1]) == []
    assert bench.cache.trace.kept(NEXT_GENERATION, 0, READY) is READY


async def test_what_nobody_takes_stays_bounded(bench: Bench) -> None:
    for _ in range(TRACE_MAX // len(NIGHT.ids) + 2):
        await bench.cache.get_rows(VIEW, columns([NIGHT.want(each) for each in NIGHT.ids]), None)

    assert len(bench.cache.trace) == TRACE_MAX
