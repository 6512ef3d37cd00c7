import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.l2.data_plane import Breaker
from tests.fakes import FakeClock


def test_opens_after_as_many_failures_in_a_row_as_the_threshold_says() -> None:
    breaker = Breaker(failure_threshold=3, monotonic_clock=FakeClock())

    for _ in range(2):
        breaker.note_failure()
    breaker.note_success()
    for _ in range(2):
        breaker.note_failure()
    assert breaker.allow_call()
    breaker.note_failure()

    assert breaker.state == "open" and not breaker.allow_call()
    assert breaker.opened == 1


def test_lets_one_probe_through_after_the_cooldown() -> None:
    clock = FakeClock()
    breaker = Breaker(failure_threshold=1, cooldown_s=2.0, monotonic_clock=clock)
    breaker.note_failure()

    clock.tick(1.9)
    assert not breaker.allow_call()
    clock.tick(0.1)

    assert [breaker.allow_call() for _ in range(4)] == [True, False, False, False]
    assert breaker.state == "half_open"


def test_closes_when_the_probe_succeeds_and_opens_again_when_it_fails() -> None:
    clock = FakeClock()
    breaker = Breaker(failure_threshold=1, cooldown_s=2.0, monotonic_clock=clock)
    breaker.note_failure()
    clock.tick(2.0)
    assert breaker.allow_call()

    breaker.note_failure()
    assert not breaker.allow_call() and breaker.opened == 2
    clock.tick(2.0)
    assert breaker.allow_call()
    breaker.note_success()

    assert breaker.state == "closed" and breaker.allow_call() and breaker.allow_call()


def test_a_probe_that_never_reports_does_not_block_the_next() -> None:
    clock = FakeClock()
    breaker = Breaker(failure_threshold=1, cooldown_s=2.0, monotonic_clock=clock)
    breaker.note_failure()
    clock.tick(2.0)
    assert breaker.allow_call()

    clock.tick(2.0)

    assert breaker.allow_call()


def test_stragglers_from_before_the_opening_do_not_postpone_the_probe() -> None:
    clock = FakeClock()
    breaker = Breaker(failure_threshold=1, cooldown_s=2.0, monotonic_clock=clock)
    breaker.note_failure()

    for _ in range(10):
        clock.tick(0.2)
        breaker.note_failure()

    assert breaker.allow_call()
    assert breaker.opened == 1


def test_a_threshold_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Breaker(failure_threshold=0)


@given(st.lists(st.sampled_from(["allow_call", "note_success", "note_failure", "tick"]), max_size=60))
def test_whatever_happens_a_call_is_allowed_within_one_cooldown(steps: list[str]) -> None:
    clock = FakeClock()
    breaker = Breaker(failure_threshold=2, cooldown_s=1.0, monotonic_clock=clock)

    for step in steps:
        match step:
            case "tick":
                clock.tick(0.3)
            case _:
                getattr(breaker, step)()
    clock.tick(1.0)

    assert breaker.allow_call()
