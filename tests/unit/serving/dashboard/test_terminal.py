"""The dashboard in a terminal: one line for events, where there are any."""

import io
from typing import Any

import pytest
from rich.console import Console

from serving.dashboard.terminal.layout import screen
from tests.dashboard.healthy import well

COLUMNS = 110


def lines(body: Any) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=COLUMNS, color_system=None).print(screen(body))
    return out.getvalue().splitlines()


@pytest.fixture
def body() -> Any:
    told: Any = well(bins=40)
    answers = told["totals"]["answers"]
    told["lately"] = {
        "seconds": 300,
        "requests": 9,
        "answers": answers,
        "misses": {},
        "latency": {},
    }
    told["verdict"]["also"] = []
    return told


def test_events_take_a_line_that_fits(body: Any) -> None:
    found = [line for line in lines(body) if line.startswith("events ")]

    assert found == [
        "events 204.0/s, 229 rejected, in 4.1% of answers, lag 0.0 s · stream 68.0 MiB of 256.0 MiB"
    ]


def test_events_that_nobody_looked_at_yet_are_told_all_the_same(body: Any) -> None:
    body["events"] = dict.fromkeys(body["events"]) | {"results": {}, "refused": {}}

    assert "events 0.0/s, 0 rejected, in - of answers, lag 0.0 s · stream - of -" in lines(body)


def test_without_events_there_is_no_line(body: Any) -> None:
    whole = len(lines(body))
    body["events"] = None

    assert len(lines(body)) == whole - 1
