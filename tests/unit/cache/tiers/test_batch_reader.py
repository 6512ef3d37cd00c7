"""A batch as columns comes to what its entities come to one by one."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache.errors import TierUnavailable
from cache.format.directory import Directory
from cache.format.redis_keys import Keyspace
from cache.l2.commands import Packer, PageReads
from cache.native import loader, pure
from cache.records import absent_records
from cache.tiers.l1 import ENTRY_OVERHEAD_BYTES, LocalTier, NegativeCache
from cache.tiers.reads import (
    Hit,
    Miss,
    MissReason,
    ReadResult,
    RecordKey,
    RecordKeys,
    Rows,
    SnapshotView,
    page_reads,
    reads_of,
)
from cache.tiers.singleflight import SingleFlight
from cache.tiers.tiered import TieredCache
from tests.fakes import DIGEST_A, GENERATION, FakeClock, FakeRemote, Night

NIGHT = Night()
VIEW = NIGHT.view()
RECORD_BYTES = NIGHT.layout.size_bytes


class Bench:
    """A read path on fakes."""

    def __init__(self, entries_max: int = 100) -> None:
        self.clock = FakeClock()
        self.remote = FakeRemote(self.clock)
        NIGHT.load(self.remote)
        self.cache = TieredCache(
            LocalTier(entries_max * (ENTRY_OVERHEAD_BYTES + RECORD_BYTES), self.clock),
            NegativeCache(100, 5.0, self.clock),
            self.remote,
            monotonic_clock=self.clock,
        )

    async def rows(self, record_keys: Sequence[RecordKey], left_s: float = 60.0) -> list[ReadResult]:
        return outcomes(await self.cache.get_rows(VIEW, columns(record_keys), self.clock() + left_s))


def columns(record_keys: Sequence[RecordKey]) -> RecordKeys:
    return RecordKeys(
        record_keys[0].table,
        [int(record_key.hash_or_digest) for record_key in record_keys],
        np.array([record_key.fingerprint for record_key in record_keys], np.uint64),
        np.array([record_key.directory_position for record_key in record_keys], np.int64),
        record_keys[0].input_digest,
    )


def outcomes(rows: Rows) -> list[ReadResult]:
    return [
        rows.result_by_index.get(index) or Hit(record.tobytes(), "l2" if is_l2 else "l1", False, None)
        for index, (record, is_l2) in enumerate(zip(rows.records, rows.l2_row_mask, strict=True))
    ]


async def test_records_that_l1_can_never_hold_are_counted_and_missing_ones_are_not() -> None:
    # Given an L1 that is smaller than a record, and a batch with one missing page
    bench = Bench(entries_max=0)
    of_pages = {record_key.directory_position // 8: record_key for record_key in map(NIGHT.record_key, NIGHT.ids)}
    record_keys = [of_pages[page] for page in range(3)]
    del bench.remote.pages[GENERATION, NIGHT.table.name, 2]

    answers = await bench.rows(record_keys)

    assert [isinstance(answer, Hit) for answer in answers] == [True, True, False]
    assert bench.cache.local_tier.too_large_count == 2


async def run_loop_iterations(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "spoil", "lose", "fail", "heal", "discard"]),
            st.lists(st.integers(0, 9), min_size=1, max_size=12),
        ),
        max_size=12,
    ),
    st.sampled_from([0, 3, 100]),
    st.sampled_from([None, DIGEST_A]),
)
@example([("ask", [0, 3]), ("ask", [1, 2, 4, 0]), ("ask", [1, 2, 3, 4, 5, 6])], 3, None)
def test_whatever_happened_rows_and_single_reads_agree(
    script: list[tuple[str, list[int]]], entries_max: int, digest: bytes | None
) -> None:
    async def run() -> None:
        benches = Bench(entries_max), Bench(entries_max)
        requested_count = 0
        for action, numbers in script:
            record_keys = [NIGHT.record_key(NIGHT.ids[number], digest) for number in numbers]
            if action == "ask":
                requested_count += len(record_keys)
                columnar_results = await benches[0].rows(record_keys)
                single_results = await benches[1].cache.get_many(VIEW, record_keys, benches[1].clock() + 60)
                assert columnar_results == single_results
            for bench in benches:
                pages = bench.remote.pages
                if action == "spoil":
                    for name, page in pages.items():
                        cut = numbers[0] * RECORD_BYTES
                        pages[name] = page[:cut] + b"\xff" * 8 + page[cut + 8 :]
                elif action == "lose":
                    pages.pop((GENERATION, NIGHT.table.name, numbers[0] % 5), None)
                elif action == "fail":
                    bench.remote.fails_with = TierUnavailable("no", reason="connection")
                elif action == "heal":
                    bench.remote.fails_with = None
                    NIGHT.load(bench.remote)
                elif action == "discard":
                    bench.cache.discard(VIEW, record_keys[0])
        assert benches[0].cache.counters == benches[1].cache.counters
        assert benches[0].cache.counters.result_total == requested_count
        assert benches[0].cache.local_tier.size_bytes == benches[1].cache.local_tier.size_bytes
        assert benches[0].remote.calls == benches[1].remote.calls

    asyncio.run(run())


async def test_a_batch_and_concurrent_reads_of_the_same_records_share_its_flight() -> None:
    bench = Bench(entries_max=0)
    record_keys = [NIGHT.record_key(entity_id) for entity_id in NIGHT.ids[:6]]
    bench.remote.gate = asyncio.Event()

    tasks = [
        asyncio.create_task(bench.rows(record_keys[:4])),
        asyncio.create_task(bench.rows([*record_keys[2:], record_keys[5]])),
        asyncio.create_task(bench.cache.get_many(VIEW, record_keys[3:5], bench.clock() + 60)),
        asyncio.create_task(bench.rows(record_keys[:1])),
    ]
    await run_loop_iterations()
    tasks[0].cancel()  # leaves alone: others have boarded
    await run_loop_iterations()
    bench.remote.gate.set()
    await asyncio.wait(tasks)

    assert [len(call) for call in bench.remote.calls] == [4, 2]
    for task, expected in zip(
        tasks[1:], ([*record_keys[2:], record_keys[5]], record_keys[3:5], record_keys[:1]), strict=True
    ):
        for record_key, outcome in zip(expected, task.result(), strict=True):
            assert isinstance(outcome, Hit) and outcome.tier == "l2"
            assert outcome.record[:8] == record_key.fingerprint.to_bytes(8, "little")
    assert len(bench.cache.flights) == 0 and bench.cache.flights.shared_count == 6


async def test_a_batch_that_has_less_time_than_l2_leaves_alone_and_keeps_what_l1_had() -> None:
    bench = Bench()
    record_keys = [NIGHT.record_key(entity_id) for entity_id in NIGHT.ids[:3]]
    await bench.rows(record_keys[:1])
    bench.remote.gate = asyncio.Event()
    patient = asyncio.create_task(bench.rows(record_keys, left_s=60.0))
    await run_loop_iterations()

    assert await bench.rows(record_keys, left_s=0.0) == await bench.rows(record_keys, left_s=0.001)
    late = await bench.rows(record_keys, left_s=0.001)
    bench.remote.gate.set()

    assert late[1:] == [Miss(MissReason.L2_TIMEOUT)] * 2
    assert isinstance(late[0], Hit) and late[0].tier == "l1"
    assert [type(read_result) for read_result in await patient] == [Hit] * 3


async def test_a_live_answer_stands_in_for_a_missing_page() -> None:
    bench = Bench()
    bench.remote.pages.clear()
    record_keys = [NIGHT.record_key(entity_id, DIGEST_A) for entity_id in NIGHT.ids[:2]]
    bench.cache.put_live(VIEW, record_keys[1], NIGHT.live_record(NIGHT.ids[1]), DIGEST_A, 30)

    missed, stands_in = await bench.rows(record_keys)

    assert missed == Miss(MissReason.PAGE_MISSING)
    assert isinstance(stands_in, Hit) and stands_in.is_live
    assert stands_in.reason == MissReason.PAGE_MISSING


def test_reads_of_many_equal_the_single_reads() -> None:
    """Over parts, each with pages of its own."""
    hashes = NIGHT.directory.hashes()
    directory = Directory(7, [0, int(hashes[9])], [hashes[:9], hashes[9:]])
    first = replace(NIGHT.table.parts[0], count=9, first_page=3)
    table = replace(NIGHT.table, parts=(first, replace(first, count=31, first_page=70)))
    record_keys = [
        RecordKey(table, int(hashes[at]), at, directory.find_position(int(hashes[at]))) for at in (39, 0, 8, 9, 20)
    ]
    view = SnapshotView(GENERATION, {"user": directory})

    batch_reads = page_reads(view, columns(record_keys))

    assert list(batch_reads) == reads_of(view, record_keys)
    packer = Packer(Keyspace("a"))
    for _ in range(2):  # made, then remembered
        assert packer.pack_page_reads(batch_reads) == packer.pack(list(batch_reads))[0]


def test_what_is_remembered_of_commands_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "kernels", pure)
    packer = Packer(Keyspace("a"))
    for number in range(30):
        numbers = [number % 7, number]
        reads = PageReads(f"g{number % 5}", "t", numbers, numbers, 16)
        assert packer.pack_page_reads(reads) == packer.pack(list(reads))[0]
    for cache in (pure._getrange_head, pure._getrange_tail):
        assert 0 < cache.cache_info().currsize <= (cache.cache_info().maxsize or 0) <= 1 << 14


async def test_work_for_several_keys_fails_for_all_who_wait_for_it() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    go = asyncio.Event()

    async def fails(indexes: Sequence[int]) -> Sequence[int]:
        await go.wait()
        raise ValueError(str(list(indexes)))

    tasks = [
        asyncio.create_task(flights.do_batch(["a", "b", "a"], fails)),
        asyncio.create_task(flights.do_batch(["c", "b"], fails)),
    ]
    await run_loop_iterations()
    go.set()
    failed = await asyncio.gather(*tasks, return_exceptions=True)

    assert str(failed[0]) == "[0, 1]" and isinstance(failed[1], ValueError)
    assert len(flights) == 0 and flights.shared_count == 2


async def test_records_without_an_answer_are_of_entities_that_the_night_did_not_know() -> None:
    bench = Bench()
    for name, page in bench.remote.pages.items():
        records = np.frombuffer(page, NIGHT.layout.dtype).copy()
        records[::2] = absent_records(NIGHT.layout, records["fingerprint"][::2], 0)
        bench.remote.pages[name] = records.tobytes()
    record_keys = [NIGHT.record_key(entity_id) for entity_id in NIGHT.ids]

    rows = await bench.rows(record_keys)

    missed = {read_result.reason for read_result in rows if isinstance(read_result, Miss)}
    assert missed == {MissReason.NOT_IN_GENERATION}
    assert await bench.cache.get_many(VIEW, record_keys, bench.clock() + 60) == [
        read_result if isinstance(read_result, Miss) else read_result._replace(tier="l1") for read_result in rows
    ]
