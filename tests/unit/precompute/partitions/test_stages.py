"""Stages of a stream: in order, bounded, stopped and joined whatever happens."""

import threading
import weakref
from collections.abc import Iterator

import pytest

from precompute.partitions.stages import StreamStages

PATIENCE_S = 10


class Value:
    """Something whose life can be watched."""


def identity(value: Value) -> Value:
    return value


def test_values_pass_all_stages_in_order() -> None:
    with StreamStages() as stages:
        doubled = stages.run_ahead(2 * number for number in stages.run_ahead(range(1000)))
        assert list(doubled) == [2 * number for number in range(1000)]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_stage_is_never_more_than_its_depth_ahead(depth: int) -> None:
    produced_semaphore = threading.Semaphore(0)
    count = 0

    def source() -> Iterator[int]:
        nonlocal count
        for count in range(1, 100):
            produced_semaphore.release()
            yield count

    with StreamStages() as stages:
        staged_values = stages.run_ahead(source(), values_ahead_max=depth)
        for expected in range(1, 20):
            assert next(staged_values) == expected
            assert count <= expected + depth + 1  # those that wait, and one in the making
        for _ in range(19 + depth + 1):
            assert produced_semaphore.acquire(timeout=PATIENCE_S)
        assert count == 19 + depth + 1


def test_what_was_taken_is_not_held() -> None:
    with StreamStages() as stages:
        values = stages.run_ahead(map(identity, stages.run_ahead(Value() for _ in range(3))))
        for value in values:
            value_ref = weakref.ref(value)
            del value
            assert value_ref() is None


def test_an_error_arrives_after_the_values_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("broken")

    received_values: list[str] = []
    with StreamStages() as stages, pytest.raises(KeyError, match="broken"):
        received_values.extend(stages.run_ahead(map(str, stages.run_ahead(source()))))
    assert received_values == ["1", "2"]


def test_who_fails_further_on_stops_all_stages_and_closes_their_source() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from iter(int, 1)
        finally:
            closed.set()

    initial_thread_count = threading.active_count()

    def use() -> None:
        with StreamStages() as stages:
            for text in stages.run_ahead(map(str, stages.run_ahead(source()))):
                raise ZeroDivisionError(text)

    with pytest.raises(ZeroDivisionError):
        use()
    assert closed.is_set()
    assert threading.active_count() == initial_thread_count


def test_leaving_early_ends_a_stage_that_waits_for_room() -> None:
    initial_thread_count = threading.active_count()
    with StreamStages() as stages:
        values = stages.run_ahead(stages.run_ahead(iter(int, 1)))
        assert next(values) == 0
    assert threading.active_count() == initial_thread_count


@pytest.mark.parametrize("workers", [1, 4])
def test_values_that_several_threads_work_on_keep_their_order(workers: int) -> None:
    with StreamStages() as stages:
        doubled = stages.map_values(lambda value: 2 * value, stages.run_ahead(range(1000)), thread_count=workers)
        assert list(doubled) == [2 * value for value in range(1000)]


def test_several_threads_work_at_once_and_no_further_than_they_are_many() -> None:
    barrier = threading.Barrier(3, timeout=PATIENCE_S)
    started_values: list[int] = []

    def work(value: int) -> int:
        started_values.append(value)
        barrier.wait()  # ends only if two others work
        return value

    with StreamStages() as stages:
        for received_count, value in enumerate(stages.map_values(work, range(30), thread_count=3), 1):
            assert value == received_count - 1
            assert len(started_values) <= received_count + 3


def test_an_error_of_one_of_several_threads_arrives_in_its_place() -> None:
    def work(value: int) -> int:
        if value == 2:
            raise KeyError("broken")
        return value

    initial_thread_count = threading.active_count()
    received_values: list[int] = []
    with StreamStages() as stages, pytest.raises(KeyError, match="broken"):
        received_values.extend(stages.map_values(work, stages.run_ahead(iter(range(100))), thread_count=4))
    assert received_values == [0, 1]
    assert threading.active_count() == initial_thread_count


def test_what_several_threads_worked_on_is_not_held() -> None:
    with StreamStages() as stages:
        for value in stages.map_values(identity, (Value() for _ in range(5)), thread_count=2):
            value_ref = weakref.ref(value)
            del value
            assert value_ref() is None
