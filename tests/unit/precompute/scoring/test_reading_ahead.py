"""Slices of a shard on a host of many cores: read by several, and given in their order."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from precompute.scoring import shard_work, user_reading
from precompute.scoring.shard_work import ShardWork


@pytest.mark.parametrize("per_reader", [1, 3])
@pytest.mark.parametrize("cores", [2, 16, 64])
def test_slices_come_in_their_order_and_few_are_read_ahead(monkeypatch, cores, per_reader):
    monkeypatch.setattr(user_reading, "usable_cores", lambda: cores)
    started_numbers, lock, ahead = [], threading.Lock(), []

    def read(number):
        with lock:
            started_numbers.append(number)
        return number * 10

    received_values = []
    for value in user_reading._read_in_order(read, range(3, 23), per_reader):
        received_values.append(value)
        ahead.append(len(started_numbers) - len(received_values))

    assert received_values == [number * 10 for number in range(3, 23)]
    assert max(ahead) <= (per_reader * user_reading.READERS_MAX if cores >= 8 else 0)


def test_several_slices_are_read_at_once(monkeypatch):
    monkeypatch.setattr(user_reading, "usable_cores", lambda: 16)
    barrier = threading.Barrier(user_reading.READERS_MAX, timeout=30)

    def read(number):
        barrier.wait()  # ends only if as many others read
        return number

    numbers = range(2 * user_reading.READERS_MAX)
    assert [*user_reading._read_in_order(read, numbers)] == [*numbers]


@pytest.mark.parametrize("cores", [2, 16])
def test_what_a_slice_raises_comes_in_its_place(monkeypatch, cores):
    monkeypatch.setattr(user_reading, "usable_cores", lambda: cores)

    def read(number):
        if number == 2:
            raise OSError("the disk is gone")
        return number

    slices = user_reading._read_in_order(read, range(6))

    assert [next(slices), next(slices)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(slices)


def test_a_stage_is_busy_while_a_chunk_is_made_and_not_while_it_is_used(monkeypatch):
    clock_s = 100.0
    monkeypatch.setattr(shard_work, "time", SimpleNamespace(perf_counter=lambda: clock_s))
    shard: Any = object.__new__(ShardWork)
    object.__setattr__(shard, "seconds_by_stage", {"read": 0.5})
    object.__setattr__(shard, "seconds_lock", threading.Lock())

    chunks: list[Any] = [object(), object(), object()]

    def make_chunks():
        nonlocal clock_s
        for chunk in chunks:
            clock_s += 2.0
            yield chunk
        clock_s += 1.0

    received_chunks = []
    for chunk in user_reading.time_reads(shard, make_chunks()):
        clock_s += 50.0
        received_chunks.append(chunk)

    assert received_chunks == chunks
    assert shard.seconds_by_stage == {"read": 0.5 + 3 * 2.0 + 1.0}
