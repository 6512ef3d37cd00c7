import random
import tracemalloc
from sys import getsizeof

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.tiers.l1 import Entry, LocalKey, LocalTier, LossyKeySet, NegativeCache, ReadyAnswer, entry_size_bytes
from tests.fakes import FakeClock, room_for


def key(number: int, generation: str = "g", table: str = "t") -> LocalKey:
    return LocalKey(generation, table, number)


def test_returns_the_very_record_that_was_put() -> None:
    """Immutable bytes, never a copy that a caller could edit."""
    local = LocalTier(100_000)
    entry = Entry(b"record", 1)

    local.put(key(1), entry)

    assert local.get(key(1)) is entry
    assert isinstance(entry.record, bytes)
    with pytest.raises(AttributeError):
        entry.record = b"other"  # type: ignore[misc]


def test_generation_and_table_are_part_of_the_key() -> None:
    """A record of another generation is another record, so nothing is ever invalidated."""
    local = LocalTier(100_000)
    local.put(key(1), Entry(b"a", 1))

    assert local.get(key(1, generation="g2")) is None
    assert local.get(key(1, table="t2")) is None


def test_the_least_recently_used_record_goes_first() -> None:
    local = LocalTier(room_for(3, 10))
    for number in range(3):
        local.put(key(number), Entry(bytes(10), number))

    local.get(key(0))
    local.put(key(3), Entry(bytes(10), 3))

    assert local.get(key(1)) is None
    assert all(local.get(key(number)) is not None for number in (0, 2, 3))


def test_an_entry_is_gone_at_the_very_end_of_its_life() -> None:
    clock = FakeClock()
    local = LocalTier(100_000, clock)
    local.put(key(1), Entry(b"a", 1, b"digest", clock() + 5))

    clock.tick(4.9)
    assert local.get(key(1)) is not None
    clock.tick(0.1)

    assert local.get(key(1)) is None
    assert len(local) == local.size_bytes == 0


def test_a_record_of_the_night_has_no_end() -> None:
    clock = FakeClock()
    local = LocalTier(100_000, clock)
    local.put(key(1), Entry(b"a", 1))

    clock.tick(1e9)

    assert local.get(key(1)) is not None


def test_overwriting_with_a_larger_record_stays_within_the_bound() -> None:
    local = LocalTier(room_for(4, 100))
    for number in range(4):
        local.put(key(number), Entry(bytes(100), number))

    local.put(key(0), Entry(bytes(900), 0))

    assert local.size_bytes <= local.max_bytes
    assert local.get(key(0)) is not None


def test_a_record_larger_than_the_tier_is_left_out_and_takes_its_predecessor_along() -> None:
    """After a refused overwrite the old value must not be served as if it were the new one."""
    local = LocalTier(room_for(1, 100))
    local.put(key(1), Entry(b"old", 1))

    local.put(key(1), Entry(bytes(10_000), 1))

    assert local.get(key(1)) is None
    assert local.too_large_count == 1
    assert local.size_bytes == 0


steps = st.lists(
    st.tuples(st.sampled_from(["put", "get", "discard", "tick"]), st.integers(0, 8), st.integers(0, 3000)), max_size=80
)


@given(steps, st.integers(0, 12_000))
def test_the_accounted_bytes_are_those_of_the_entries_whatever_happens(
    script: list[tuple[str, int, int]], max_bytes: int
) -> None:
    clock = FakeClock()
    local = LocalTier(max_bytes, clock)

    for step, number, size in script:
        match step:
            case "put":
                life = None if size % 2 else clock() + size / 100
                local.put(key(number), Entry(bytes(size), number, None, life))
            case "get":
                local.get(key(number))
            case "discard":
                local.discard(key(number))
            case "tick":
                clock.tick(size / 100)
        entry_bytes = sum(map(entry_size_bytes, local._entries.values()))
        assert local.size_bytes == (entry_bytes + getsizeof(local._entries) if entry_bytes else 0)
        if step == "put":
            assert local.size_bytes <= max_bytes


@pytest.mark.parametrize("count", [20_000, 44_000])
def test_resident_bytes_exceed_the_accounted_ones_by_five_percent_at_most(count: int) -> None:
    """The constant per entry covers what the interpreter really spends, also just after dictionaries grew."""
    local = LocalTier(1 << 30)
    tracemalloc.start()
    for number in range(count):
        # Make keys and records as the read path does: a new tuple, a 64-bit hash, bytes from a socket.
        local.put(key(number | 1 << 62), Entry(number.to_bytes(616, "big"), number | 1 << 61))
    spent, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert 0.85 <= spent / local.size_bytes <= 1.05


@pytest.mark.parametrize("count", [10_000, 22_000])
def test_ready_answers_are_accounted_for_like_records(count: int) -> None:
    """With a record and its ready answer for each id."""
    local = LocalTier(1 << 30)
    tracemalloc.start()
    for number in range(count):
        local.put(key(number | 1 << 62), Entry(number.to_bytes(616, "big"), number | 1 << 61))
        path, raw = b"/v1/lookup/user_topk/u-%08d?k=20" % number, b"u-%08d" % number
        local.keep_ready_answer(ReadyAnswer(7, bytes(300), bytes(90), 1_700_000_000, ("t", raw), path))
    spent, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert 0.85 <= spent / local.size_bytes <= 1.05


@pytest.mark.parametrize("max_bytes", [2 << 20, 3_300_000])
@pytest.mark.parametrize("record_bytes", [8, 616, 4_096, 65_536])
@pytest.mark.parametrize("has_ready", [False, True])
def test_under_churn_real_memory_stays_within_five_percent_of_the_budget(
    record_bytes: int, max_bytes: int, has_ready: bool
) -> None:
    """Tables that Python grows for keys which come and go are part of the budget."""
    rng = random.Random(record_bytes)
    rounds = 5 * max_bytes // (record_bytes + 400) + 100
    tracemalloc.start()
    local, worst, budget_fraction = LocalTier(max_bytes), 0.0, 0.0
    baseline_bytes, _ = tracemalloc.get_traced_memory()
    for number in range(rounds):
        entity = rng.randrange(1 << 61) if rng.random() < 0.7 else int(rng.paretovariate(1.0))
        name = key(entity | 1 << 61, f"g{3 * number // rounds}")
        live = (rng.randbytes(16), 1e12 + number) if rng.random() < 0.2 else (None, None)
        if local.get(name) is None:
            local.put(name, Entry(rng.randbytes(record_bytes), entity | 1 << 60, *live))
        if has_ready:
            raw = b"u-%016x" % entity
            path = b"/v1/lookup/user_topk/%b?k=20" % raw
            head, tail = rng.randbytes(record_bytes // 2), rng.randbytes(90)
            local.keep_ready_answer(ReadyAnswer(7, head, tail, 1_700_000_000, ("t", raw), path))
        if rng.random() < 0.02:
            local.discard(name)
        if number > rounds // 2:
            budget_fraction = (tracemalloc.get_traced_memory()[0] - baseline_bytes) / max_bytes
            worst = max(worst, budget_fraction)
    tracemalloc.stop()

    assert worst <= 1.05
    assert budget_fraction >= 0.8


def test_a_ready_answer_is_found_under_its_request_only() -> None:
    local = LocalTier(100_000)
    ready = ReadyAnswer(7, b"head", b"tail", 0, ("t", b"u"), b"/v1/lookup/t/u?k=5")

    local.keep_ready_answer(ready)

    assert local.find_ready_answer(b"/v1/lookup/t/u?k=5") is ready
    assert local.find_ready_answer(b"/v1/lookup/t/u") is None and local.get(key(1)) is None


def test_a_negative_entry_lives_for_its_time_and_no_longer() -> None:
    clock = FakeClock()
    negative = NegativeCache(10, 5.0, clock)
    negative.add(key(1))

    assert key(1) in negative and key(2) not in negative
    clock.tick(5.0)

    assert key(1) not in negative
    assert len(negative) == 0


def test_negative_entries_are_bounded_and_the_oldest_goes() -> None:
    negative = NegativeCache(3, 5.0, FakeClock())

    for number in range(5):
        negative.add(key(number))

    assert len(negative) == 3
    assert key(1) not in negative and key(4) in negative


def test_adding_a_negative_entry_again_renews_it() -> None:
    clock = FakeClock()
    negative = NegativeCache(2, 5.0, clock)
    negative.add(key(1))
    clock.tick(1)
    negative.add(key(2))
    clock.tick(1)
    negative.add(key(1))
    negative.add(key(3))

    assert key(1) in negative and key(2) not in negative
    clock.tick(4.5)
    assert key(1) in negative


@given(
    numbers=st.lists(st.integers(0, 90), max_size=150),
    earlier_numbers=st.lists(st.integers(0, 90), max_size=10),
    room=st.integers(0, 60_000),
)
def test_filling_is_putting_one_by_one(numbers: list[int], earlier_numbers: list[int], room: int) -> None:
    """But for a table that grew: what is held is as new, in the same order, and never too much."""
    put_tier, filled_tier = LocalTier(room), LocalTier(room)
    for tier in (put_tier, filled_tier):
        for number in earlier_numbers:
            tier.put(LocalKey("g", "t", number), Entry(b"old", number, b"d" * 16, 1e12))
    keys = [LocalKey("g", "t", number) for number in numbers]
    if put_tier.can_fit(300):
        filled_tier.fill(keys, [bytes(300)] * len(keys), numbers)
        for key, number in zip(keys, numbers, strict=True):
            put_tier.put(key, Entry(bytes(300), number))

    assert filled_tier.size_bytes <= room
    filled_keys, theirs = list(filled_tier._entries), list(put_tier._entries)
    assert (
        filled_keys == theirs[len(theirs) - len(filled_keys) :]
        or filled_keys[len(filled_keys) - len(theirs) :] == theirs
    )
    assert abs(len(filled_keys) - len(theirs)) <= 33
    assert all(filled_tier._entries[key] == put_tier._entries[key] for key in {*filled_keys} & {*theirs})
    entry_bytes = sum(entry_size_bytes(entry) for entry in filled_tier._entries.values())
    assert not filled_tier._entries or filled_tier.size_bytes == entry_bytes + getsizeof(filled_tier._entries)


@given(numbers=st.lists(st.integers(0, 10_000), max_size=60))
def test_what_is_let_go_together_is_let_go_one_by_one(numbers: list[int]) -> None:
    single_log, batch_log = LossyKeySet(64), LossyKeySet(64)
    batch_log.note_all(numbers)
    for number in numbers:
        single_log.note(number)

    assert single_log._hash_slots == batch_log._hash_slots and single_log.is_empty == batch_log.is_empty
