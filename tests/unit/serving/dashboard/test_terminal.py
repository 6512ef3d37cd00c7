"""The dashboard in a terminal: one line for events, where there are any."""

import io
from typing import Any

import pytest
from rich.console import Console

from serving.dashboard.screen import draw_screen
from tests.dashboard.healthy import well

COLUMNS = 110


def lines(body: Any) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=COLUMNS, color_system=None).print(draw_screen(body))
    return output.getvalue().splitlines()


@pytest.fixture
def body() -> Any:
    document: Any = well(bins=40)
    answers = document["totals"]["answers"]
    document["lately"] = {"seconds": 300, "requests": 9, "answers": answers, "misses": {}, "latency": {}}
    document["verdict"]["also"] = []
    return document


def test_events_take_a_line_that_fits(body: Any) -> None:
    event_lines = [line for line in lines(body) if line.startswith("events ")]

    assert event_lines == ["events 204.0/s, 229 rejected, in 4.1% of answers, lag 0.0 s · stream 68.0 MiB of 256.0 MiB"]


def test_events_not_looked_at_yet_are_shown_all_the_same(body: Any) -> None:
    body["events"] = dict.fromkeys(body["events"]) | {"results": {}, "refused": {}}

    assert "events 0.0/s, 0 rejected, in - of answers, lag 0.0 s · stream - of -" in lines(body)


def test_without_events_there_is_no_line(body: Any) -> None:
    line_count = len(lines(body))
    body["events"] = None

    assert len(lines(body)) == line_count - 1


def test_an_old_table_of_generations_says_its_age(body: Any) -> None:
    assert not any("as of" in line for line in lines(body))
    body["generations_at"] = body["now"] - 312

    assert any("generations as of 312 s ago" in line for line in lines(body))
