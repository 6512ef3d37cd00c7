"""Texts for a terminal, ids above all: nothing in them steers it."""

import io

import orjson
import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cache.process.command_line import printable, printable_lines
from cache.process.console import SafeConsole

HOSTILE = "a\x1b[31mred\x1b]0;title\x07\r\x9b2J\u202egnp\ud83d"
ESCAPED = r"a\u001b[31mred\u001b]0;title\u0007\u000d\u009b2J\u202egnp\ud83d"


@pytest.mark.parametrize("text", ["", "u-1", "日本　語", "é\u0301", "👩‍👧", "a\\b", "naïve [bold]x[/bold]"])
def test_what_steers_nothing_stays_as_it_is(text: str) -> None:
    assert printable(text) == printable_lines(text) == text


def test_what_steers_a_terminal_is_shown_as_json_writes_it() -> None:
    assert printable(HOSTILE) == printable_lines(HOSTILE) == ESCAPED
    assert printable("a\n\tb") == r"a\u000a\u0009b"
    assert printable_lines("a\n\tb") == "a\n\tb"


def test_json_for_a_program_stays_the_same_json() -> None:
    document = {"id": "\x9b2J\x7f\u2028"}

    assert orjson.loads(printable_lines(orjson.dumps(document).decode())) == document


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("cell", [HOSTILE, Text(HOSTILE, "bold")], ids=["str", "Text"])
def test_no_text_steers_a_terminal_through_rich(cell: str | Text, is_terminal: bool) -> None:
    file = io.StringIO()
    console: Console = SafeConsole(file=file, width=200, force_terminal=is_terminal)
    table = Table("id", "reads")
    table.add_row(cell, "[red]7[/red]")

    console.print(table, highlight=False)
    console.print(HOSTILE, markup=False, highlight=False, soft_wrap=True)

    printed = file.getvalue()
    # rich measures a `TextFormatter` before it is escaped, so its column may cut the text.
    assert printed.count(ESCAPED) == (2 if isinstance(cell, str) else 1)
    assert not {"\x07", "\r", "\x9b", "\u202e", "\ud83d"} & set(printed)
    assert "\x1b[31mred" not in printed and ("\x1b[31m7" in printed) == is_terminal
