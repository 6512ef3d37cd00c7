"""Stages of a stream: in order, bounded, stopped and joined whatever happens."""

import threading
import weakref
from collections.abc import Iterator

import pytest

from precompute.partitions.stages import Stages

PATIENCE_S = 10


class Value:
    """Something whose life can be watched."""


def same(value: Value) -> Value:
    return value


def test_values_pass_all_stages_in_order() -> None:
    with Stages() as stages:
        doubled = stages.ahead(2 * each for each in stages.ahead(range(1000)))
        assert list(doubled) == [2 * each for each in range(1000)]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_stage_is_never_more_than_its_depth_ahead(depth: int) -> None:
    made = threading.Semaphore(0)
    count = 0

    def source() -> Iterator[int]:
        nonlocal count
        for count in range(1, 100):
            made.release()
            yield count

    with Stages() as stages:
        taken = stages.ahead(source(), depth=depth)
        for expected in range(1, 20):
            assert next(taken) == expected
            assert count <= expected + depth + 1  # those that wait, and one in the making
        for _ in range(19 + depth + 1):
            assert made.acquire(timeout=PATIENCE_S)
        assert count == 19 + depth + 1


def test_what_was_taken_is_not_held() -> None:
    with Stages() as stages:
        values = stages.ahead(map(same, stages.ahead(Value() for _ in range(3))))
        for value in values:
            held = weakref.ref(value)
            del value
            assert held() is None


def test_an_error_arrives_after_the_values_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("broken")

    seen: list[str] = []
    with Stages() as stages, pytest.raises(KeyError, match="broken"):
        seen.extend(stages.ahead(map(str, stages.ahead(source()))))
    assert seen == ["1", "2"]


def test_who_fails_further_on_stops_all_stages_and_closes_their_source() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from iter(int, 1)
        finally:
            closed.set()

    before = threading.active_count()

    def use() -> None:
        with Stages() as stages:
            for each in stages.ahead(map(str, stages.ahead(source()))):
                raise ZeroDivisionError(each)

    with pytest.raises(ZeroDivisionError):
        use()
    assert closed.is_set()
    assert threading.active_count() == before


def test_leaving_early_ends_a_stage_that_waits_for_room() -> None:
    before = threading.active_count()
    with Stages() as stages:
        values = stages.ahead(stages.ahead(iter(int, 1)))
        assert next(values) == 0
    assert threading.active_count() == before


@pytest.mark.parametrize("workers", [1, 4])
def test_values_that_several_threads_work_on_keep_their_order(workers: int) -> None:
    with Stages() as stages:
        doubled = stages.each(lambda value: 2 * value, stages.ahead(range(1000)), workers=workers)
        assert list(doubled) == [2 * value for value in range(1000)]


def test_several_threads_work_at_once_and_no_further_than_they_are_many() -> None:
    together = threading.Barrier(3, timeout=PATIENCE_S)
    begun: list[int] = []

    def work(value: int) -> int:
        begun.append(value)
        together.wait()  # ends only if two others work
        return value

    with Stages() as stages:
        for taken, value in enumerate(stages.each(work, range(30), workers=3), 1):
            assert value == taken - 1
            assert len(begun) <= taken + 3


def test_an_error_of_one_of_several_threads_arrives_in_its_place() -> None:
    def work(value: int) -> int:
        if value == 2:
            raise KeyError("broken")
        return value

    before = threading.active_count()
    seen: list[int] = []
    with Stages() as stages, pytest.raises(KeyError, match="broken"):
        seen.extend(stages.each(work, stages.ahead(iter(range(100))), workers=4))
    assert seen == [0, 1]
    assert threading.active_count() == before


def test_what_several_threads_worked_on_is_not_held() -> None:
    with Stages() as stages:
        for value in stages.each(same, (Value() for _ in range(5)), workers=2):
            held = weakref.ref(value)
            del value
            assert held() is None
