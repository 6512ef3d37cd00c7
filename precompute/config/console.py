"""Console of the shell: bars during work, tables of results."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from cache.process.command_line import printable, printable_lines
from cache.process.console import SafeConsole
from precompute.config.progress import Progress, quiet, size_text
from precompute.config.settings import NightConfig

PLAIN_COLUMNS = 1_000

BYTES = ("load pages", "restore pages")

out_console = SafeConsole()

err_console = SafeConsole(stderr=True, soft_wrap=True)

OutputContent = Mapping[str, Any] | Sequence[Table | str | Text]


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Output of a command, with an exit code of its own; a text is written unchanged."""

    content: OutputContent | str
    code: int = 0


Command = Callable[[NightConfig, argparse.Namespace, Progress], OutputContent | CommandOutput]
"""Command of the shell: runs and returns its output."""


@dataclass(frozen=True, slots=True)
class CommandPlace:
    """Dotted name of a command below `precompute`, and of modules that it imports only when it runs.

    All commands together need every library there is, which takes a second or two to load; each alone needs few.
    """

    name: str
    loads: tuple[str, ...] = ()

    def load(self) -> Command:
        """Import the command and all that it will need."""
        for dependency in self.loads:
            import_module(f"precompute.{dependency}")
        module, _, name = self.name.rpartition(".")
        command: Command = getattr(import_module(f"precompute.{module}"), name)
        return command


def show(output: OutputContent | str, stdout_console: Console) -> None:
    """Print a command's output; off a terminal plain and never wrapped."""
    if isinstance(output, str):
        stdout_console.file.write(f"{printable_lines(output)}\n")
        return
    if isinstance(output, Mapping):
        output = [table_of(output)]
    console = (
        stdout_console
        if stdout_console.is_terminal
        else SafeConsole(width=PLAIN_COLUMNS, no_color=True)
    )
    for renderable in output:
        if isinstance(renderable, Table) and not stdout_console.is_terminal:
            renderable.box = None
        console.print(renderable, highlight=False)


def table_of(report: Mapping[str, Any]) -> Table:
    """Build a table with a row for each field that has a value; nested fields become one row, or a row each."""
    table = Table(show_header=False, box=None)
    for name, text in _rows(report):
        table.add_row(name, Text(printable(text)))
    return table


def _rows(report: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in report.items():
        name = f"{prefix}{key}"
        if value is None or value in ([], {}):
            continue
        if not isinstance(value, Mapping):
            yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        elif any(isinstance(inner_value, Mapping | list) for inner_value in value.values()):
            yield from _rows(value, f"{name} ")
        else:
            yield name, ", ".join(f"{inner} {inner_value}" for inner, inner_value in value.items())


@contextmanager
def bars_on(err: Console, *, is_quiet: bool) -> Iterator[Progress]:
    """Show bars while the block runs, on a terminal only."""
    if is_quiet or not err.is_terminal:
        yield quiet
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        _Count(),
        _Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=err, transient=True, redirect_stdout=False) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(label: str, completed: int, total: int) -> None:
            if label not in tasks:
                for task in tasks.values():
                    # Steps follow one another; a thousand shards would fill more than a screen.
                    bars.update(task, visible=False)
                tasks[label] = bars.add_task(label, total=total or None)
            bars.update(tasks[label], completed=completed, total=total or None, visible=True)

        yield progress


class _Count(ProgressColumn):
    """Progress column with the amount done, and the total if known."""

    def render(self, task: Task) -> Text:
        show = size_text if task.description in BYTES else "{:,.0f}".format
        total = "" if task.total is None else f"/{show(task.total)}"
        return Text(f"{show(task.completed)}{total}", style="progress.download")


class _Rate(ProgressColumn):
    """Progress column with the recent rate per second."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text("")
        rate = size_text(task.speed) if task.description in BYTES else f"{task.speed:,.0f}"
        return Text(f"{rate}/s", style="progress.data.speed")


def iso(at: float) -> str:
    """Format Unix seconds as ISO 8601, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
