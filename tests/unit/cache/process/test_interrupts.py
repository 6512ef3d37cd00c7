"""An interrupt that arrives while a destructor runs."""

import signal
import sys
import time
from collections.abc import Iterator

import pytest

from cache.process.command_line import interrupts_never_swallowed


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A shell that starts this in the background has the signal ignored."""
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous_handler)


class Interrupted:
    """Its destructor is where the signal arrives."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


class Broken:
    """Its destructor fails."""

    def __del__(self) -> None:
        raise ZeroDivisionError


def be_interrupted() -> None:
    Interrupted()
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        pass


def test_an_interrupt_inside_a_destructor_arrives_after_it(capsys):
    with pytest.raises(KeyboardInterrupt), interrupts_never_swallowed():
        be_interrupted()
    assert capsys.readouterr().err == ""


def test_without_it_that_interrupt_is_swallowed(monkeypatch):
    exception_types = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: exception_types.append(ignored.exc_type))
    Interrupted()
    assert exception_types == [KeyboardInterrupt]


def test_another_failure_of_a_destructor_is_reported_as_ever(monkeypatch):
    exception_types = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: exception_types.append(ignored.exc_type))
    with interrupts_never_swallowed():
        Broken()
    assert exception_types == [ZeroDivisionError]


def test_everything_is_as_it_was_afterwards():
    previous_handlers = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    with interrupts_never_swallowed():
        assert sys.unraisablehook is not previous_handlers[0]
        signal.setitimer(signal.ITIMER_REAL, 60.0)
    assert (sys.unraisablehook, signal.getsignal(signal.SIGALRM)) == previous_handlers
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
