import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import TierUnavailable
from cache.format.redis_keys import hash_hex
from cache.records import absent_records, pack_overlay
from cache.tiers.l1 import LocalTier, NegativeCache
from cache.tiers.reads import Hit, Miss, MissReason, RecordKey
from cache.tiers.tiered import TieredCache
from tests.fakes import DIGEST_A, DIGEST_B, GENERATION, NEXT_GENERATION, FakeClock, FakeRemote, Night, room_for

NIGHT = Night()
VIEW = NIGHT.view()
KNOWN_ID = NIGHT.ids[3]
STRANGER = "nobody-the-night-knew"


class Bench:
    """A read path on fakes, with a clock that only ticks."""

    def __init__(self, max_bytes: int = 1 << 20, writes_max_bytes: int = 1 << 20) -> None:
        self.clock = FakeClock()
        self.remote = FakeRemote(self.clock)
        NIGHT.load(self.remote)
        self.cache = TieredCache(
            LocalTier(max_bytes, self.clock),
            NegativeCache(100, 5.0, self.clock),
            self.remote,
            queued_writes_bytes_max=writes_max_bytes,
            monotonic_clock=self.clock,
        )

    async def get(self, record_key: RecordKey, generation: str = GENERATION) -> Hit | Miss:
        return await self.cache.get(NIGHT.view(generation), record_key, self.clock() + 60)

    def store_overlay(self, id_: str, digest: bytes, ttl_s: float, value: float = 0.5) -> None:
        name = (GENERATION, NIGHT.table.name, hash_hex(NIGHT.record_key(id_).hash_or_digest))
        payload = pack_overlay(NIGHT.live_record(id_, value), digest)
        self.remote.overlays[name] = payload, self.clock() + ttl_s


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def run_loop_iterations(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_known_entity_comes_from_l2_and_then_from_l1(bench: Bench) -> None:
    first = await bench.get(NIGHT.record_key(KNOWN_ID))
    second = await bench.get(NIGHT.record_key(KNOWN_ID))

    assert isinstance(first, Hit) and isinstance(second, Hit)
    assert (first.tier, second.tier) == ("l2", "l1")
    assert first.record is second.record and not first.is_live and first.expires_at is None
    assert len(bench.remote.reads) == 1
    assert bench.cache.counters.l1_total == 1 and bench.cache.counters.l2_records == 1


async def test_a_lone_read_shares_the_flight_of_other_readers_and_is_counted(bench: Bench) -> None:
    record_key, view = NIGHT.record_key(KNOWN_ID), NIGHT.view(GENERATION)
    bench.remote.gate = asyncio.Event()
    callers = [
        asyncio.create_task(bench.cache.get(view, record_key)),
        asyncio.create_task(bench.get(record_key)),
        asyncio.create_task(bench.cache.get(view, record_key)),
    ]
    await run_loop_iterations()
    callers[0].cancel()  # takes nobody along
    await run_loop_iterations()
    bench.remote.gate.set()

    results = [await caller for caller in callers[1:]]

    assert all(isinstance(result, Hit) and result.tier == "l2" for result in results)
    assert len(bench.remote.reads) == 1 and len(bench.cache.flights) == 0
    assert bench.cache.counters.l2_records == 2 and bench.cache.flights.shared_count == 2
    assert isinstance(bench.cache.peek(view, record_key), Hit)


async def test_every_known_entity_gets_its_own_record(bench: Bench) -> None:
    record_keys = [NIGHT.record_key(entity_id) for entity_id in NIGHT.ids]

    outcomes = await bench.cache.get_many(VIEW, record_keys, bench.clock() + 60)

    for record_key, outcome in zip(record_keys, outcomes, strict=True):
        assert isinstance(outcome, Hit)
        assert outcome.record[:8] == record_key.fingerprint.to_bytes(8, "little")
    assert len(bench.remote.calls) == 1, "one call for the whole batch"


async def test_peek_finds_what_l1_holds_and_counts_only_hits(bench: Bench) -> None:
    assert bench.cache.peek(VIEW, NIGHT.record_key(KNOWN_ID)) is None
    await bench.get(NIGHT.record_key(KNOWN_ID))

    hit = bench.cache.peek(VIEW, NIGHT.record_key(KNOWN_ID))

    assert hit is not None and hit.tier == "l1"
    assert bench.cache.counters.result_total == 2


async def test_a_page_that_is_not_there_is_a_miss_of_its_own_kind(bench: Bench) -> None:
    bench.remote.pages.clear()

    assert await bench.get(NIGHT.record_key(KNOWN_ID)) == Miss(MissReason.PAGE_MISSING)
    assert bench.cache.local_tier.size_bytes == 0


async def test_another_entitys_record_is_a_counted_corrupt_miss_and_is_not_kept(bench: Bench) -> None:
    """A reply that belongs to somebody else is never an answer."""
    record_key = NIGHT.record_key(KNOWN_ID)
    wrong = record_key._replace(directory_position=NIGHT.record_key(NIGHT.ids[4]).directory_position)

    assert await bench.get(wrong) == Miss(MissReason.CORRUPT)
    assert bench.cache.counters.misses_by_reason[MissReason.CORRUPT] == 1
    assert await bench.get(record_key) != Miss(MissReason.CORRUPT)


async def test_an_id_whose_hash_collides_with_a_known_one_gets_no_answer_even_from_l1(bench: Bench) -> None:
    """The hash is not the identity; the fingerprint inside the record is compared on every read."""
    known_key = NIGHT.record_key(KNOWN_ID)
    await bench.get(known_key)

    impostor = known_key._replace(fingerprint=known_key.fingerprint ^ 1)

    assert await bench.get(impostor) == Miss(MissReason.CORRUPT)


async def test_a_record_of_another_format_is_not_read(bench: Bench) -> None:
    """During a rolling deploy two formats may meet; the number in the record decides."""
    pages = bench.remote.pages
    for name, page in pages.items():
        size = NIGHT.layout.size_bytes
        records = [bytearray(page[at : at + size]) for at in range(0, len(page), size)]
        for record in records:
            record[14] = 2 << 4
        pages[name] = b"".join(bytes(record) for record in records)

    assert await bench.get(NIGHT.record_key(KNOWN_ID)) == Miss(MissReason.CORRUPT)


def without_answers(bench: Bench) -> None:
    for name, page in bench.remote.pages.items():
        records = np.frombuffer(page, NIGHT.layout.dtype)
        blank_records = absent_records(NIGHT.layout, records["fingerprint"], 0)
        bench.remote.pages[name] = blank_records.tobytes()


async def test_a_record_without_an_answer_is_of_an_entity_that_the_night_did_not_know(bench: Bench) -> None:
    """The night could answer for it in other tables of the same entities only."""
    without_answers(bench)

    assert await bench.get(NIGHT.record_key(KNOWN_ID)) == Miss(MissReason.NOT_IN_GENERATION)
    misses = await bench.cache.get_many(
        VIEW, [NIGHT.record_key(entity_id) for entity_id in NIGHT.ids[:3]], bench.clock() + 60
    )
    assert {miss.reason for miss in misses} == {MissReason.NOT_IN_GENERATION}
    assert bench.cache.local_tier.size_bytes == 0
    misplaced_key = NIGHT.record_key(KNOWN_ID)._replace(
        directory_position=NIGHT.record_key(NIGHT.ids[4]).directory_position
    )
    assert await bench.get(misplaced_key) == Miss(MissReason.CORRUPT)


async def test_a_live_answer_stands_in_where_the_night_has_none(bench: Bench) -> None:
    without_answers(bench)
    record_key = NIGHT.record_key(KNOWN_ID)._replace(input_digest=DIGEST_A)
    bench.cache.put_live(VIEW, record_key, NIGHT.live_record(KNOWN_ID), DIGEST_A, 60)

    hit = await bench.get(record_key)

    assert isinstance(hit, Hit) and hit.is_live and hit.reason is None
    assert await bench.get(NIGHT.record_key(KNOWN_ID)) == Miss(MissReason.NOT_IN_GENERATION)


async def test_format_and_generation_are_part_of_every_key(bench: Bench) -> None:
    """What a late write leaves under an old generation is never seen under a new one."""
    stranger = NIGHT.record_key(STRANGER)
    bench.cache.put_live(VIEW, stranger, NIGHT.live_record(STRANGER), DIGEST_A, 60)
    await bench.cache.aclose()

    assert isinstance(await bench.get(stranger), Hit)
    assert await bench.get(stranger, NEXT_GENERATION) == Miss(MissReason.NOT_IN_GENERATION)
    assert {write.generation for write in bench.remote.writes} == {GENERATION}


@pytest.mark.parametrize(
    ("reason", "missed"),
    [("timeout", MissReason.L2_TIMEOUT), ("connection", MissReason.L2_DOWN), ("breaker_open", MissReason.BREAKER_OPEN)],
)
async def test_why_redis_did_not_answer_is_the_reason_of_the_miss(
    bench: Bench, reason: str, missed: MissReason
) -> None:
    """And nothing is remembered of it."""
    bench.remote.fails_with = TierUnavailable("no", reason=reason)

    known_key, stranger = NIGHT.record_key(KNOWN_ID), NIGHT.record_key(STRANGER)
    assert await bench.get(known_key) == Miss(missed) == await bench.get(stranger)

    bench.remote.fails_with = None
    assert isinstance(await bench.get(known_key), Hit)
    assert await bench.get(stranger) == Miss(MissReason.NOT_IN_GENERATION)


async def test_a_caller_whose_deadline_is_over_does_not_read(bench: Bench) -> None:
    outcome = await bench.cache.get(VIEW, NIGHT.record_key(KNOWN_ID), bench.clock() - 1)

    assert outcome == Miss(MissReason.L2_TIMEOUT)
    assert bench.remote.calls == []


async def test_a_callers_deadline_ends_only_its_own_waiting(bench: Bench) -> None:
    bench.remote.gate = asyncio.Event()
    patient = asyncio.create_task(bench.get(NIGHT.record_key(KNOWN_ID)))
    await run_loop_iterations()

    hasty = await bench.cache.get(VIEW, NIGHT.record_key(KNOWN_ID), bench.clock() + 0.01)
    bench.remote.gate.set()

    assert hasty == Miss(MissReason.L2_TIMEOUT)
    assert isinstance(await patient, Hit)
    assert len(bench.remote.reads) == 1


async def test_ten_thousand_callers_of_one_cold_key_cost_one_read(bench: Bench) -> None:
    """Each is counted once, as answered from L2; that they shared a read is counted apart."""
    bench.remote.gate = asyncio.Event()
    callers = [asyncio.create_task(bench.get(NIGHT.record_key(KNOWN_ID))) for _ in range(10_000)]
    await run_loop_iterations()

    bench.remote.gate.set()
    outcomes = await asyncio.gather(*callers)

    assert all(isinstance(outcome, Hit) and outcome.tier == "l2" for outcome in outcomes)
    counters = bench.cache.counters
    assert counters.l2_records == counters.result_total == 10_000 and counters.l2_reads == 1
    assert bench.cache.flights.shared_count == 9_999


async def test_a_cancelled_caller_cancels_no_other(bench: Bench) -> None:
    bench.remote.gate = asyncio.Event()
    callers = [asyncio.create_task(bench.get(NIGHT.record_key(KNOWN_ID))) for _ in range(3)]
    await run_loop_iterations()

    callers[0].cancel()
    await run_loop_iterations()
    bench.remote.gate.set()
    outcomes = await asyncio.gather(*callers, return_exceptions=True)

    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert all(isinstance(outcome, Hit) for outcome in outcomes[1:])


async def test_the_same_entity_twice_in_a_batch_is_read_once_and_answered_twice(bench: Bench) -> None:
    record_keys = [NIGHT.record_key(KNOWN_ID), NIGHT.record_key(STRANGER), NIGHT.record_key(KNOWN_ID)]

    outcomes = await bench.cache.get_many(VIEW, record_keys, bench.clock() + 60)

    assert outcomes[0] == outcomes[2] and isinstance(outcomes[0], Hit)
    assert outcomes[1] == Miss(MissReason.NOT_IN_GENERATION)
    assert len(bench.remote.reads) == 2 and bench.cache.counters.result_total == 3


async def test_a_flood_of_one_unknown_id_costs_one_read_per_negative_life(bench: Bench) -> None:
    record_key = NIGHT.record_key(STRANGER)

    outcomes = [await bench.get(record_key) for _ in range(50)]
    assert outcomes[0] == Miss(MissReason.NOT_IN_GENERATION)
    assert set(outcomes[1:]) == {Miss(MissReason.NEGATIVE)}
    assert len(bench.remote.reads) == 1

    bench.clock.tick(5.0)
    assert await bench.get(record_key) == Miss(MissReason.NOT_IN_GENERATION)
    assert len(bench.remote.reads) == 2


async def test_unknown_ids_evict_nothing_from_l1(bench: Bench) -> None:
    await bench.get(NIGHT.record_key(KNOWN_ID))

    for number in range(500):
        await bench.get(NIGHT.record_key(f"stranger-{number}"))

    assert isinstance(bench.cache.peek(VIEW, NIGHT.record_key(KNOWN_ID)), Hit)
    assert len(bench.cache.negative_cache) == 100


async def test_an_overlay_lives_here_no_longer_than_in_redis(bench: Bench) -> None:
    bench.store_overlay(STRANGER, DIGEST_A, ttl_s=10)
    bench.clock.tick(7)

    hit = await bench.get(NIGHT.record_key(STRANGER))
    assert isinstance(hit, Hit) and hit.is_live
    assert hit.expires_at == bench.clock() + 3
    bench.clock.tick(3)

    assert await bench.get(NIGHT.record_key(STRANGER)) == Miss(MissReason.NOT_IN_GENERATION)


async def test_an_overlay_whose_reply_came_late_lives_no_longer_for_that(bench: Bench) -> None:
    """What was left of its life was left when Redis was asked."""
    bench.store_overlay(STRANGER, DIGEST_A, ttl_s=10)
    bench.remote.gate = asyncio.Event()
    reading = asyncio.create_task(bench.get(NIGHT.record_key(STRANGER)))
    await run_loop_iterations()
    ends_at = bench.clock() + 10
    bench.clock.tick(4)
    bench.remote.gate.set()

    hit = await reading
    assert isinstance(hit, Hit) and hit.expires_at == ends_at


async def test_a_write_that_waited_does_not_outlive_its_answer(bench: Bench) -> None:
    """256 travel at a time, the rest waits for its turn; what has no life left by then is dropped."""
    bench.remote.gate = asyncio.Event()
    for number in range(257):
        id_ = f"stranger-{number}"
        bench.cache.put_live(VIEW, NIGHT.record_key(id_), NIGHT.live_record(id_), DIGEST_A, 30)
    bench.cache.put_live(VIEW, NIGHT.record_key(STRANGER), NIGHT.live_record(STRANGER), DIGEST_A, 3)
    await run_loop_iterations()
    bench.clock.tick(4)
    bench.remote.gate.set()
    await bench.cache.aclose()

    assert len(bench.remote.writes) == 257 and bench.remote.writes[-1].overlay_ttl_s == 26
    assert bench.cache.write_behind.dropped_count == 1


async def test_an_overlay_without_life_left_is_expired_and_not_kept(bench: Bench) -> None:
    bench.store_overlay(STRANGER, DIGEST_A, ttl_s=10)
    bench.remote.left_at_most_s = 0.0

    assert await bench.get(NIGHT.record_key(STRANGER)) == Miss(MissReason.EXPIRED)
    assert len(bench.cache.local_tier) == 0


@pytest.mark.parametrize("tier", ["l1", "l2"])
async def test_an_answer_computed_from_another_input_is_a_miss(bench: Bench, tier: str) -> None:
    bench.store_overlay(STRANGER, DIGEST_A, ttl_s=10)
    if tier == "l1":
        await bench.get(NIGHT.record_key(STRANGER))

    assert await bench.get(NIGHT.record_key(STRANGER, DIGEST_B)) == Miss(MissReason.INPUT_CHANGED)
    assert isinstance(await bench.get(NIGHT.record_key(STRANGER, DIGEST_A)), Hit)
    assert isinstance(await bench.get(NIGHT.record_key(STRANGER)), Hit)


async def test_callers_with_different_inputs_share_a_read_and_not_an_answer(bench: Bench) -> None:
    """The read of the stored record is one, what each may take from it is judged for each."""
    bench.store_overlay(STRANGER, DIGEST_A, ttl_s=10)

    hit, miss = await asyncio.gather(
        bench.get(NIGHT.record_key(STRANGER, DIGEST_A)), bench.get(NIGHT.record_key(STRANGER, DIGEST_B))
    )

    assert isinstance(hit, Hit) and miss == Miss(MissReason.INPUT_CHANGED)
    assert len(bench.remote.reads) == 1


async def test_a_live_answer_for_an_unknown_entity_is_kept_in_both_tiers_with_an_end(bench: Bench) -> None:
    record_key = NIGHT.record_key(STRANGER, DIGEST_A)
    await bench.get(record_key)

    bench.cache.put_live(VIEW, record_key, NIGHT.live_record(STRANGER), DIGEST_A, 30)
    hit = await bench.get(record_key)
    await bench.cache.aclose()

    assert isinstance(hit, Hit) and hit.tier == "l1" and hit.is_live
    assert [write.overlay_ttl_s for write in bench.remote.writes] == [30]
    assert bench.cache.write_behind.stored_count == 1


async def test_a_live_answer_ends_the_negative_life_of_its_key() -> None:
    bench = Bench(max_bytes=0)
    record_key = NIGHT.record_key(STRANGER, DIGEST_A)
    await bench.get(record_key)
    assert await bench.get(record_key) == Miss(MissReason.NEGATIVE)

    bench.cache.put_live(VIEW, record_key, NIGHT.live_record(STRANGER), DIGEST_A, 30)
    await bench.cache.aclose()

    hit = await bench.get(record_key)
    assert isinstance(hit, Hit) and hit.tier == "l2"


async def test_a_new_input_replaces_the_answer_to_the_old_one(bench: Bench) -> None:
    record_key = NIGHT.record_key(STRANGER, DIGEST_A)
    bench.cache.put_live(VIEW, record_key, NIGHT.live_record(STRANGER, 1.0), DIGEST_A, 30)
    bench.cache.put_live(VIEW, record_key, NIGHT.live_record(STRANGER, 2.0), DIGEST_B, 30)
    await bench.cache.aclose()

    hit = await bench.get(NIGHT.record_key(STRANGER, DIGEST_B))
    payload, _ = next(iter(bench.remote.overlays.values()))

    assert isinstance(hit, Hit) and hit.record == NIGHT.live_record(STRANGER, 2.0)
    assert payload.endswith(DIGEST_B)


async def test_a_live_answer_never_takes_the_place_of_the_nights(bench: Bench) -> None:
    """A fresh answer for a known entity is kept beside its batch record and written to no other tier."""
    known_key = NIGHT.record_key(KNOWN_ID)
    batch = await bench.get(known_key)

    bench.cache.put_live(VIEW, known_key, NIGHT.live_record(KNOWN_ID), DIGEST_A, 30)
    await bench.cache.aclose()

    assert (await bench.get(known_key))[0] == batch[0]
    assert (await bench.get(NIGHT.record_key(KNOWN_ID, DIGEST_A)))[0] == batch[0]
    assert bench.remote.writes == []


async def test_a_live_answer_of_an_outage_does_not_outlive_the_outage(bench: Bench) -> None:
    record_key = NIGHT.record_key(KNOWN_ID, DIGEST_A)
    bench.remote.fails_with = TierUnavailable("no", reason="connection")
    bench.cache.put_live(VIEW, record_key, NIGHT.live_record(KNOWN_ID), DIGEST_A, 30)

    meanwhile = await bench.get(record_key)
    bench.remote.fails_with = None
    after = await bench.get(record_key)

    assert isinstance(meanwhile, Hit) and isinstance(after, Hit)
    assert (meanwhile.is_live, meanwhile.reason) == (True, MissReason.L2_DOWN)
    assert (after.is_live, after.reason, after.tier) == (False, None, "l2")


async def test_a_damaged_record_can_be_forgotten(bench: Bench) -> None:
    record_key = NIGHT.record_key(KNOWN_ID, DIGEST_A)
    await bench.get(record_key)
    bench.cache.put_live(VIEW, record_key, NIGHT.live_record(KNOWN_ID), DIGEST_A, 30)

    bench.cache.discard(VIEW, record_key)

    assert len(bench.cache.local_tier) == 0


async def test_while_a_page_is_missing_a_live_answer_serves_only_those_who_sent_its_input(bench: Bench) -> None:
    bench.remote.pages.clear()
    record_key = NIGHT.record_key(KNOWN_ID, DIGEST_A)

    bench.cache.put_live(VIEW, record_key, NIGHT.live_record(KNOWN_ID), DIGEST_A, 30)

    hit = await bench.get(record_key)
    assert isinstance(hit, Hit) and hit.is_live and hit.reason == MissReason.PAGE_MISSING
    assert (await bench.cache.get_many(VIEW, [record_key], bench.clock() + 60)) == [hit]
    assert await bench.get(NIGHT.record_key(KNOWN_ID, DIGEST_B)) == Miss(MissReason.PAGE_MISSING)
    assert await bench.get(NIGHT.record_key(KNOWN_ID)) == Miss(MissReason.PAGE_MISSING)


async def test_an_older_overlay_that_arrives_late_does_not_replace_a_newer_answer(bench: Bench) -> None:
    bench.store_overlay(STRANGER, DIGEST_A, ttl_s=100, value=1.0)
    bench.remote.gate = asyncio.Event()
    reading = asyncio.create_task(bench.get(NIGHT.record_key(STRANGER)))
    await run_loop_iterations()

    bench.cache.put_live(VIEW, NIGHT.record_key(STRANGER), NIGHT.live_record(STRANGER, 2.0), DIGEST_B, 30)
    bench.remote.gate.set()
    await reading

    hit = await bench.get(NIGHT.record_key(STRANGER))
    assert isinstance(hit, Hit) and hit.record == NIGHT.live_record(STRANGER, 2.0)


async def test_an_empty_look_up_that_arrives_late_does_not_hide_a_newer_answer(bench: Bench) -> None:
    bench.remote.gate = asyncio.Event()
    reading = asyncio.create_task(bench.get(NIGHT.record_key(STRANGER)))
    await run_loop_iterations()
    bench.cache.put_live(VIEW, NIGHT.record_key(STRANGER), NIGHT.live_record(STRANGER), DIGEST_A, 30)

    bench.remote.gate.set()

    assert isinstance(await reading, Hit)
    assert len(bench.cache.negative_cache) == 0


async def test_only_whole_live_records_of_the_entity_itself_are_kept(bench: Bench) -> None:
    """No default, no partial answer and nobody else's is ever stored."""
    record_key = NIGHT.record_key(STRANGER)
    good = NIGHT.live_record(STRANGER)
    batch = await bench.get(NIGHT.record_key(KNOWN_ID))
    assert isinstance(batch, Hit)

    for invalid_record in (good[:-1], good + b"x", NIGHT.live_record("somebody else"), batch.record, b""):
        with pytest.raises(ValueError, match="record"):
            bench.cache.put_live(VIEW, record_key, invalid_record, DIGEST_A, 30)

    assert await bench.get(record_key) == Miss(MissReason.NOT_IN_GENERATION)


async def test_an_overlay_of_another_layout_is_corrupt(bench: Bench) -> None:
    bench.store_overlay(STRANGER, DIGEST_A, ttl_s=10)
    name, (payload, expires_at) = next(iter(bench.remote.overlays.items()))
    bench.remote.overlays[name] = payload[4:], expires_at

    assert await bench.get(NIGHT.record_key(STRANGER)) == Miss(MissReason.CORRUPT)


async def test_feature_keys_are_compared_in_all_their_128_bits(bench: Bench) -> None:
    """The key of an id-less request is the digest of its input."""
    record_key = NIGHT.record_key(STRANGER, DIGEST_A)._replace(hash_or_digest=DIGEST_A)
    bench.cache.put_live(VIEW, record_key, NIGHT.live_record(STRANGER), DIGEST_A, 30)
    await bench.cache.aclose()

    assert isinstance(await bench.get(record_key), Hit)
    other_digest = bytes([*DIGEST_A[:15], 0])
    assert await bench.get(record_key._replace(hash_or_digest=other_digest, input_digest=other_digest)) == Miss(
        MissReason.NOT_IN_GENERATION
    )
    assert bench.remote.writes[0].hash_hex == DIGEST_A.hex()


async def test_overlay_writes_are_bounded_and_what_is_dropped_is_counted() -> None:
    size = NIGHT.layout.size_bytes + 16
    bench = Bench(writes_max_bytes=3 * size)
    bench.remote.gate = asyncio.Event()

    for number in range(5):
        id_ = f"stranger-{number}"
        bench.cache.put_live(VIEW, NIGHT.record_key(id_), NIGHT.live_record(id_), DIGEST_A, 30)

    assert bench.cache.write_behind.dropped_count == 2
    bench.remote.gate.set()
    await bench.cache.aclose()
    assert bench.cache.write_behind.stored_count == 3 == len(bench.remote.writes)


async def test_closing_stores_what_is_queued_and_counts_what_it_cannot(bench: Bench) -> None:
    bench.remote.gate = asyncio.Event()
    for number in range(600):
        id_ = f"stranger-{number}"
        bench.cache.put_live(VIEW, NIGHT.record_key(id_), NIGHT.live_record(id_), DIGEST_A, 30)
    await run_loop_iterations()

    await bench.cache.aclose(timeout_s=0.01)

    writes = bench.cache.write_behind
    assert writes.failed_count == 256 and writes.dropped_count == 344 and writes.stored_count == 0


async def test_a_failed_write_is_counted_and_not_tried_again(bench: Bench) -> None:
    bench.remote.fails_with = TierUnavailable("no", reason="connection")
    bench.cache.put_live(VIEW, NIGHT.record_key(STRANGER), NIGHT.live_record(STRANGER), DIGEST_A, 30)

    await bench.cache.aclose()

    assert bench.cache.write_behind.failed_count == 1 and bench.remote.writes == []
    assert isinstance(await bench.get(NIGHT.record_key(STRANGER)), Hit), "L1 has it"


async def test_warming_fills_l1_and_counts_no_request(bench: Bench) -> None:
    hits = await bench.cache.get_many(
        VIEW, [NIGHT.record_key(entity_id) for entity_id in NIGHT.ids], bench.clock() + 60, is_counted=False
    )

    assert all(isinstance(hit, Hit) for hit in hits) and bench.cache.counters.result_total == 0
    assert bench.cache.peek(VIEW, NIGHT.record_key(KNOWN_ID)) is not None


async def test_l1_stays_within_its_bytes_when_everybody_comes_by() -> None:
    bench = Bench(max_bytes=room_for(5, NIGHT.layout.size_bytes))

    for id_ in NIGHT.ids * 2:
        assert isinstance(await bench.get(NIGHT.record_key(id_)), Hit)
        assert bench.cache.local_tier.size_bytes <= bench.cache.local_tier.max_bytes

    assert 3 <= len(bench.cache.local_tier) <= 5  # the table has grown with those that came and went


actions = st.lists(
    st.tuples(
        st.sampled_from(["get", "many", "peek", "put", "tick", "fail", "heal", "lose", "warm"]),
        st.integers(0, 9),
        st.sampled_from([None, DIGEST_A, DIGEST_B]),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(actions)
def test_every_request_has_one_outcome_and_no_answer_belongs_to_another_input(
    script: list[tuple[str, int, bytes | None]],
) -> None:
    """Whatever happens, outcomes sum to requests and an answer is the asker's own."""

    async def run() -> None:
        bench = Bench(max_bytes=room_for(4, NIGHT.layout.size_bytes))
        ids = [*NIGHT.ids[:5], *(f"stranger-{number}" for number in range(5))]
        request_count = 0
        computed_from: dict[bytes, bytes] = {}

        def check(record_key: RecordKey, outcome: Hit | Miss) -> None:
            if isinstance(outcome, Hit):
                assert outcome.record[:8] == record_key.fingerprint.to_bytes(8, "little")
                if outcome.is_live and record_key.input_digest is not None:
                    assert computed_from[outcome.record] == record_key.input_digest

        for value, (action, number, digest) in enumerate(script):
            record_key = NIGHT.record_key(ids[number], digest)
            match action:
                case "get":
                    request_count += 1
                    check(record_key, await bench.get(record_key))
                case "many":
                    record_keys = [NIGHT.record_key(entity_id, digest) for entity_id in ids[: number + 1]]
                    request_count += len(record_keys)
                    outcomes = await bench.cache.get_many(VIEW, record_keys, bench.clock() + 60)
                    for requested_key, outcome in zip(record_keys, outcomes, strict=True):
                        check(requested_key, outcome)
                case "peek":
                    hit = bench.cache.peek(VIEW, record_key)
                    request_count += hit is not None
                    check(record_key, hit or Miss(MissReason.NEGATIVE))
                case "put" if digest is not None:
                    record = NIGHT.live_record(ids[number], value + 1.0)
                    computed_from[record] = digest
                    bench.cache.put_live(VIEW, record_key, record, digest, 10)
                case "tick":
                    bench.clock.tick(number)
                case "fail":
                    bench.remote.fails_with = TierUnavailable("no", reason="timeout")
                case "heal":
                    bench.remote.fails_with = None
                case "lose":
                    bench.remote.overlays.clear()
                case "warm":
                    await bench.cache.get_many(VIEW, [record_key], bench.clock() + 60, is_counted=False)
            await asyncio.sleep(0)
        assert bench.cache.counters.result_total == request_count
        await bench.cache.aclose()

    asyncio.run(run())


def test_a_want_of_a_table_names_its_page_and_offset() -> None:
    """Pages of later shards begin where the manifest says."""
    table = replace(NIGHT.table, parts=(replace(NIGHT.table.parts[0], first_page=100),))

    page, offset = table.locate_record(*NIGHT.directory.locate_in_part(17))

    assert (page, offset) == (100 + 17 // 8, 17 % 8 * NIGHT.layout.size_bytes)
