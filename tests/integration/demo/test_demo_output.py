"""What the demo prints fits a terminal of 80 columns, and Ctrl-C ends it with one line."""

import io
import json
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infra.demo import __main__ as command
from infra.demo.checks import InvariantViolation
from infra.demo.console import Findings, Steps, invite, summarize
from infra.demo.dataset import synthetic
from infra.demo.evaluate import RankingQuality
from infra.demo.features import ColdStart
from infra.demo.http import ServiceCounts
from infra.demo.run import Demo
from infra.demo.synthetic import CATEGORIES, World, profiles_of, synthesize
from infra.demo.traffic import Latencies

COLUMNS = 80
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Sequences that move the cursor and colour."""
GENERATION = "20261119T000000Z-dec9e804508a"
SMALL = World(users=300, items=120, seed=5)
LONGEST = max(CATEGORIES, key=len)
FIGURES = {"l1": 9_999_999, "l2": 1_234_567, "live": 99_999, "previous": 0, "default": 12_345}


def printed(print_section: Callable[[Steps], None], *, is_terminal: bool) -> list[str]:
    """Lines on a terminal, or in a file, of 80 columns."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=COLUMNS, force_terminal=is_terminal, color_system=None)
    print_section(Steps(console))
    return CONTROL.sub("", buffer.getvalue()).splitlines()


def a_step(steps: Steps) -> None:
    with steps.step("DAG nightly_precompute: a day later, under traffic") as step:
        step.note("15 tasks, longest score_shard 116.6 s, embed_items 105.5 s")
        step.note(f"http://127.0.0.1:65535, generation {GENERATION}")


def the_summary(steps: Steps) -> None:
    slow = Latencies({name: [123_456.789] * 10 for name in (*FIGURES, "batch")})
    quality = RankingQuality(0.123456, 0.123456, 15_000)
    cold = [
        ColdStart("unseen item", "item_similar", "previous", "defaults", f"{LONGEST}, {LONGEST}"),
        ColdStart("known user", "user_affinity", "live", "batch", f"{LONGEST} 0.99"),
    ]
    findings = Findings(GENERATION, GENERATION, quality, quality, cold, slow, slow, 123_456.7)
    counts = ServiceCounts(sum(FIGURES.values()), FIGURES, {}, 0)
    summarize(steps, findings, "train-and-test-of-gowalla", counts, 12_345_678)


def an_invitation(steps: Steps) -> None:
    data = synthetic(SMALL)
    invite(
        steps.console, "http://127.0.0.1:65535", "http://127.0.0.1:65535", Path("/a/place"), data
    )


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("print_section", [a_step, the_summary, an_invitation])
def test_no_line_is_longer_than_a_terminal(
    print_section: Callable[[Steps], None], is_terminal: bool
) -> None:
    lines = printed(print_section, is_terminal=is_terminal)

    assert [line for line in lines if len(line) > COLUMNS] == []


def test_no_value_of_the_summary_is_wrapped() -> None:
    # given, when
    lines = printed(the_summary, is_terminal=True)

    # then: each row of a table begins with its name, and none goes on below it
    rows = [line for line in lines if line.startswith("│")]
    assert [row for row in rows if row.startswith("│  ")] == []
    for value in (
        GENERATION,
        "12,345,678 requests: 0 failed",
        f"{LONGEST}, {LONGEST}",
        "123456.79",
    ):
        assert any(value in row for row in rows), value


def test_a_value_too_long_for_a_line_is_folded_not_cut() -> None:
    name = "a" * 200

    lines = printed(
        lambda steps: steps.table("t", ("what", "result"), [("data", name)]), is_terminal=True
    )

    assert sum(line.count("a") for line in lines if line.startswith("│")) >= len(name)
    assert max(map(len, lines)) <= COLUMNS


def test_what_to_try_is_json_within_a_shells_quotes() -> None:
    # given
    data = replace(synthetic(SMALL), profiles=profiles_of(synthesize(SMALL)))
    buffer = io.StringIO()

    # when
    invite(Console(file=buffer, width=COLUMNS), "http://host:1", "http://host:2", Path("/p"), data)

    # then
    bodies = posted(buffer.getvalue())
    assert len(bodies) == 3
    assert [sorted(body) for body in bodies] == [["entities", "k"], ["entities"], ["entities", "k"]]
    assert bodies[2]["entities"][0]["features"]["item"] == "new-item"


def posted(text: str) -> list[Any]:
    """Bodies of the calls in a text, as a shell would hand them over."""
    calls = text[text.index("curl ") :].split("curl ")[1:]
    command_argvs = [shlex.split(f"curl {call_text}") for call_text in calls]
    return [json.loads(argv[-1]) for argv in command_argvs if "-d" in argv]


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
        with Steps(console).step("Data") as step:
            step.note("half of it")
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
