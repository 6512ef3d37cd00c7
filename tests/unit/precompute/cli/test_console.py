"""What a command found, as people read it."""

from typing import Any

from rich.console import Console

from precompute.config.console import print_output


def lines(command_result: dict[str, Any]) -> list[str]:
    """The lines that a command prints of it."""
    console = Console(width=100, no_color=True, force_terminal=True)
    with console.capture() as captured:
        print_output(command_result, console)
    return [" ".join(line.split()) for line in captured.get().splitlines()]


def test_counts_by_name_are_words_and_no_dictionaries() -> None:
    command_result = {
        "requests": {"live": 44, "canary": 16},
        "sources": {"live": {"l1": 40, "l2": 4}, "canary": {"l2": 16}},
        "against": [],
        "generation": "G",
    }

    assert lines(command_result) == [
        "requests live 44, canary 16",
        "sources live l1 40, l2 4",
        "sources canary l2 16",
        "generation G",
    ]
