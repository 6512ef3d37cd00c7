"""Why L1 lacks a key: what it let go, what is over, what another generation had, or nothing that it remembers."""

import random
from collections import Counter
from typing import get_args

import pytest

from cache.tiers.l1 import ENTRY_OVERHEAD_BYTES, FLIPPED_WITHIN_S, Absence, Entry, EvictionHistory, LocalKey, LocalTier
from tests.fakes import FakeClock


def key(number: int, generation: str = "g1") -> LocalKey:
    return LocalKey(generation, "t", number)


def tier(entries: int, clock: FakeClock | None = None) -> LocalTier:
    return LocalTier(entries * (ENTRY_OVERHEAD_BYTES + 200), clock or FakeClock())


def find_reason(local: LocalTier, number: int, generation: str = "g1") -> str:
    return local.eviction_history.find_reason(generation, "t", number)


def test_what_was_never_here_is_cold_and_what_made_room_was_evicted() -> None:
    local = tier(20)
    for number in range(100):
        local.put(key(number), Entry(b"x" * 100, 1))

    evicted_numbers = [number for number in range(100) if local.get(key(number)) is None]
    assert evicted_numbers
    assert {find_reason(local, number) for number in evicted_numbers} == {"evicted"}
    assert find_reason(local, 1_000) == "cold_start"


def test_a_life_that_is_over_is_no_eviction() -> None:
    clock = FakeClock()
    local = tier(20, clock)
    local.put(key(1), Entry(b"x", 1, b"d" * 16, clock.now_s + 5))
    clock.tick(6)

    assert local.get(key(1)) is None and find_reason(local, 1) == "expired"


def test_what_the_generation_before_had_is_flipped_for_a_while() -> None:
    clock = FakeClock()
    local = tier(50, clock)
    local.put(key(1), Entry(b"x", 1))
    local.put(key(2, "g2"), Entry(b"x", 1))
    assert find_reason(local, 1, "g2") == "cold_start"

    local.eviction_history.note_flip("g1")

    assert (find_reason(local, 1, "g2"), find_reason(local, 3, "g2")) == ("flipped", "cold_start")
    clock.tick(FLIPPED_WITHIN_S)
    assert find_reason(local, 1, "g2") == "cold_start"


def test_what_was_evicted_before_the_flip_counts_as_flipped_too() -> None:
    local = tier(20)
    for number in range(100):
        local.put(key(number), Entry(b"x" * 100, 1))
    local.eviction_history.note_flip("g1")

    assert find_reason(local, 0, "g2") == "flipped"


@pytest.mark.parametrize("seed", range(5))
def test_every_key_has_one_reason_and_memory_is_bounded(seed: int) -> None:
    rng, absences = random.Random(seed), EvictionHistory(monotonic_clock=FakeClock(), slot_count=64)
    evicted_numbers: set[int] = set()
    for _ in range(2_000):
        number = rng.randrange(500)
        absences.evicted_keys.note(key(number))
        evicted_numbers.add(number)

    count_by_reason = absences.count_reasons("g1", "t", range(1_000))

    assert sum(count_by_reason.values()) == 1_000 and set(count_by_reason) <= set(get_args(Absence))
    # A forgotten eviction is counted as cold, never the other way round.
    assert 0 < count_by_reason["evicted"] <= 64
    assert not absences.count_reasons("g1", "t", sorted(set(range(1_000)) - evicted_numbers))["evicted"]


@pytest.mark.parametrize("seed", range(5))
def test_many_at_once_are_judged_as_one_by_one(seed: int) -> None:
    rng, absences = random.Random(seed), EvictionHistory(monotonic_clock=FakeClock(), slot_count=256)
    for _ in range(300):
        letting = rng.choice([absences.evicted_keys, absences.evicted_keys, absences.expired_keys][: 2 + seed % 2])
        letting.note(key(rng.randrange(400), rng.choice(["g0", "g1"])))
    if seed > 2:
        absences.note_flip("g0")

    for keys in (range(500), range(5)):
        one_by_one = Counter(absences.find_reason("g1", "t", number) for number in keys)
        assert Counter(absences.count_reasons("g1", "t", keys)) == one_by_one
