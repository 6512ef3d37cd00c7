"""What the demo prints: steps, and one line for a failure or an interrupt."""

import io
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from infra.demo import __main__ as command
from infra.demo.checks import InvariantViolation
from infra.demo.run import Demo, run_demo_step

COLUMNS = 80


def printed(console_width: int = COLUMNS) -> tuple[Console, io.StringIO]:
    """A console that is no terminal, and what it printed."""
    buffer = io.StringIO()
    return Console(file=buffer, width=console_width), buffer


def test_a_step_is_a_line_with_its_notes_below() -> None:
    console, buffer = printed()

    with run_demo_step(console, "DAG nightly_precompute: a day later, under traffic") as notes:
        notes += ["tasks: 16; longest: score_shard, 116.6 s", "[1] generation 20261119T000000Z-dec9e804508a"]
    with pytest.raises(ValueError), run_demo_step(console, "Data"):
        raise ValueError

    step, *lines, failed = buffer.getvalue().splitlines()
    assert step.startswith("✓ ") and step.endswith(" s  DAG nightly_precompute: a day later, under traffic")
    assert [line.strip() for line in lines] == notes
    assert failed.startswith("x ") and failed.endswith(" s  Data")
    assert max(map(len, (step, *lines, failed))) <= COLUMNS


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of signals as they were, afterwards."""
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    original_handlers = [signal.getsignal(signal_number) for signal_number in names]
    yield
    for signal_number, handler in zip(names, original_handlers, strict=True):
        signal.signal(signal_number, handler)


@pytest.mark.usefixtures("handlers")
def test_an_interrupt_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(_args: object, console: Console) -> int:
        with run_demo_step(console, "Data") as notes:
            notes.append("half of it")
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run", run)

    code = command.main(["--state", str(tmp_path)])

    assert code == 130
    assert capsys.readouterr().out.splitlines() == ["stopped; nothing is left running"]


@pytest.mark.usefixtures("handlers")
def test_a_failure_is_reported_within_a_terminals_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(_self: Demo) -> None:
        raise InvariantViolation("word " * 40)

    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setattr(Demo, "run", run)

    code = command.main(["--state", str(tmp_path)])

    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert lines[0].startswith("demo failed: word")
    assert max(map(len, lines)) <= COLUMNS
