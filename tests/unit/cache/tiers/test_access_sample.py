"""What readers write down for the curve of L1: each sampled read once, whichever way it came."""

from collections.abc import Sequence

import numpy as np
import pytest

from cache.errors import TierUnavailable
from cache.format.ids import HASH_SPACE
from cache.tiers.access_sample import TRACED_READS_MAX, Access
from cache.tiers.l1 import (
    ENTRY_OVERHEAD_BYTES,
    LIVE_OVERHEAD_BYTES,
    LocalTier,
    NegativeCache,
    ReadyAnswer,
    entry_size_bytes,
)
from cache.tiers.reads import RecordKey, RecordKeys
from cache.tiers.tiered import TieredCache
from tests.fakes import DIGEST_A, GENERATION, NEXT_GENERATION, FakeClock, FakeRemote, Night

NIGHT = Night()
VIEW = NIGHT.view()
BYTES = NIGHT.layout.size_bytes + ENTRY_OVERHEAD_BYTES
STRANGER = "nobody-the-night-knew"
READY = ReadyAnswer(7, b"head", b"tail", 0, ("t", b"u"), b"/a/1")


class Bench:
    """A read path on fakes, all of it sampled."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.remote = FakeRemote(self.clock)
        NIGHT.load(self.remote)
        self.cache = TieredCache(
            LocalTier(1 << 20, self.clock), NegativeCache(100, 5.0, self.clock), self.remote, monotonic_clock=self.clock
        )
        self.cache.access_trace.sample_up_to(HASH_SPACE - 1)

    def drain_trace(self) -> list[Access]:
        touches = list(self.cache.access_trace)
        self.cache.access_trace.clear()
        return touches

    async def read_many(self, *ids: str) -> list[Access]:
        record_keys = [NIGHT.record_key(entity_id) for entity_id in ids]
        await self.cache.get_many(VIEW, record_keys, self.clock() + 60)
        return self.drain_trace()

    async def rows(self, *ids: str) -> list[Access]:
        await self.cache.get_rows(VIEW, columns([NIGHT.record_key(entity_id) for entity_id in ids]), None)
        return self.drain_trace()


def columns(record_keys: Sequence[RecordKey]) -> RecordKeys:
    return RecordKeys(
        record_keys[0].table,
        [int(record_key.hash_or_digest) for record_key in record_keys],
        np.array([record_key.fingerprint for record_key in record_keys], np.uint64),
        np.array([record_key.directory_position for record_key in record_keys], np.int64),
        record_keys[0].input_digest,
    )


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_every_way_of_reading_writes_the_same(bench: Bench) -> None:
    known_id, record_key = NIGHT.ids[3], NIGHT.record_key(NIGHT.ids[3])

    written = [await bench.read_many(known_id), await bench.rows(known_id), await bench.read_many(known_id)]
    bench.cache.peek(VIEW, record_key)
    written.append(bench.drain_trace())
    bench.cache.local_tier.discard(next(iter(bench.cache.local_tier._entries)))  # type: ignore[arg-type]
    bench.cache.peek(VIEW, record_key)
    await bench.cache.get(VIEW, record_key)
    written.append(bench.drain_trace())
    await bench.cache.get(VIEW, record_key, bench.clock() + 60)
    written.append(bench.drain_trace())

    ((spot, size),) = written[0]
    assert size == BYTES and spot >> 32 == record_key.fingerprint >> 32
    assert written == [[(spot, size)]] * 6
    assert bench.cache.counters.result_total == 6


async def test_a_batch_writes_all_of_its_reads(bench: Bench) -> None:
    ids = NIGHT.ids[:9]

    first, repeat_touches, single = (await bench.rows(*ids), await bench.rows(*ids), await bench.read_many(*ids))

    assert first == repeat_touches == single and len({spot for spot, _ in first}) == 9


async def test_what_is_found_nowhere_is_not_written(bench: Bench) -> None:
    bench.remote.fails_with = TierUnavailable("no", reason="connection")

    written = await bench.rows(*NIGHT.ids[:3]), await bench.read_many(STRANGER, NIGHT.ids[4])

    assert written == ([], [])
    assert bench.cache.counters.result_total == 5


async def test_only_spots_in_the_sample_are_written(bench: Bench) -> None:
    prints = sorted(NIGHT.record_key(entity_id).fingerprint for entity_id in NIGHT.ids)
    bench.cache.access_trace.sample_up_to((prints[len(prints) // 2] >> 32 << 32) - 1)

    rows, touches_of_many = await bench.rows(*NIGHT.ids), await bench.read_many(*NIGHT.ids)

    assert rows == touches_of_many and len(rows) == len(prints) // 2
    assert all(spot <= bench.cache.access_trace.greatest_sampled_spot for spot, _ in rows)


async def test_a_live_answer_is_written_as_a_store_and_then_as_reads(bench: Bench) -> None:
    record_key = NIGHT.record_key(STRANGER, DIGEST_A)
    bench.cache.put_live(VIEW, record_key, NIGHT.live_record(STRANGER), DIGEST_A, 10.0)
    ((spot, size),) = bench.drain_trace()
    await bench.cache.get(VIEW, record_key, bench.clock() + 60)

    assert size == -(BYTES + LIVE_OVERHEAD_BYTES)
    assert bench.drain_trace() == [(spot, -size)]
    await bench.cache.aclose()


async def test_a_ready_answer_is_written_as_a_store_and_says_how_it_is_read(bench: Bench) -> None:
    record_key = NIGHT.record_key(NIGHT.ids[0])
    bench.cache.keep(VIEW, record_key, READY)
    ready_answer = bench.cache.local_tier.find_ready_answer(READY.request_bytes)

    assert ready_answer is not None and ready_answer.sampled_access is not None
    assert ready_answer.sampled_access[1] == entry_size_bytes(READY)
    assert bench.drain_trace() == [(ready_answer.sampled_access[0], -entry_size_bytes(READY))]


async def test_requests_and_generations_are_distinguished(bench: Bench) -> None:
    sample_ready, other_ready = (bench.cache.access_trace.attach_access, READY._replace(request_bytes=b"/a/1?k=2"))
    ready = [
        sample_ready(GENERATION, 7 << 40, READY),
        sample_ready(GENERATION, 7 << 40, other_ready),
        sample_ready(NEXT_GENERATION, 7 << 40, READY),
    ]
    spots = {ready_answer.sampled_access[0] for ready_answer in ready if ready_answer.sampled_access}

    assert len(spots) == 3 and {spot >> 32 for spot in spots} == {7 << 8}


def test_a_new_generation_is_sampled_from_its_first_answer_on() -> None:
    trace = Bench().cache.access_trace
    trace.begin_generation(GENERATION)
    trace.sample_up_to((1 << 32) - 1)

    unsampled_ready = trace.attach_access(GENERATION, 1 << 40, READY)
    after = trace.attach_access(NEXT_GENERATION, 1 << 40, READY)

    assert unsampled_ready.sampled_access is None and after.sampled_access is not None
    assert trace.greatest_sampled_spot == HASH_SPACE - 1


async def test_nothing_is_written_without_sampling(bench: Bench) -> None:
    bench.cache.access_trace.sample_up_to(-1)
    bench.cache.access_trace.begin_generation(GENERATION)

    assert await bench.rows(*NIGHT.ids[:5]) == await bench.read_many(NIGHT.ids[1]) == []
    assert bench.cache.access_trace.attach_access(NEXT_GENERATION, 0, READY) is READY


async def test_a_trace_that_is_not_drained_stays_bounded(bench: Bench) -> None:
    for _ in range(TRACED_READS_MAX // len(NIGHT.ids) + 2):
        await bench.cache.get_rows(VIEW, columns([NIGHT.record_key(entity_id) for entity_id in NIGHT.ids]), None)

    assert len(bench.cache.access_trace) == TRACED_READS_MAX
