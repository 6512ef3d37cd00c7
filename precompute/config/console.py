"""Console output: progress bars during work, tables of results."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from cache.process.command_line import printable, printable_lines
from cache.process.console import SafeConsole
from precompute.config.progress import Progress, quiet, size_text
from precompute.config.settings import NightConfig

PLAIN_WIDTH_COLUMNS = 1_000

LABELS_IN_BYTES = ("load pages", "restore pages")

out_console = SafeConsole()

err_console = SafeConsole(stderr=True, soft_wrap=True)

OutputContent = Mapping[str, Any] | Sequence[Table | str | Text]


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Output of a command, with its exit code; a text is written unchanged."""

    content: OutputContent | str
    exit_code: int = 0


Command = Callable[[NightConfig, argparse.Namespace, Progress], OutputContent | CommandOutput]
"""Function of a command, which returns its output."""


@dataclass(frozen=True, slots=True)
class CommandPlace:
    """Dotted name of a command's function below `precompute`, and of modules to import only when it runs.

    All commands together need every library, which takes a second or two to load; each alone needs few.
    """

    function_path: str
    imported_modules: tuple[str, ...] = ()

    def import_command(self) -> Command:
        """Import the command and all modules that it will need."""
        for dependency in self.imported_modules:
            import_module(f"precompute.{dependency}")
        module_name, _, function_name = self.function_path.rpartition(".")
        command: Command = getattr(import_module(f"precompute.{module_name}"), function_name)
        return command


def print_output(output: OutputContent | str, stdout_console: Console) -> None:
    """Print a command's output; if that is not a terminal, without colours, and lines are never wrapped."""
    if isinstance(output, str):
        stdout_console.file.write(f"{printable_lines(output)}\n")
        return
    if isinstance(output, Mapping):
        output = [field_table(output)]
    console = stdout_console if stdout_console.is_terminal else SafeConsole(width=PLAIN_WIDTH_COLUMNS, no_color=True)
    for renderable in output:
        if isinstance(renderable, Table) and not stdout_console.is_terminal:
            renderable.box = None
        console.print(renderable, highlight=False)


def field_table(field_values: Mapping[str, Any]) -> Table:
    """Build a table with a row for each field that has a value; nested fields become one row, or a row each."""
    table = Table(show_header=False, box=None)
    for row_name, row_text in _field_rows(field_values):
        table.add_row(row_name, Text(printable(row_text)))
    return table


def _field_rows(field_values: Mapping[str, Any], name_prefix: str = "") -> Iterator[tuple[str, str]]:
    for field_name, field_value in field_values.items():
        row_name = f"{name_prefix}{field_name}"
        if field_value is None or field_value in ([], {}):
            continue
        if not isinstance(field_value, Mapping):
            yield (row_name, ", ".join(map(str, field_value)) if isinstance(field_value, list) else str(field_value))
        elif any(isinstance(inner_value, Mapping | list) for inner_value in field_value.values()):
            yield from _field_rows(field_value, f"{row_name} ")
        else:
            yield (
                row_name,
                ", ".join(f"{inner_name} {inner_value}" for inner_name, inner_value in field_value.items()),
            )


@contextmanager
def progress_bars(stderr_console: Console, *, is_quiet: bool) -> Iterator[Progress]:
    """Show progress bars while the block runs, if on a terminal."""
    if is_quiet or not stderr_console.is_terminal:
        yield quiet
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        _AmountColumn(),
        _RateColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=stderr_console, transient=True, redirect_stdout=False) as bars:
        task_id_by_label: dict[str, TaskID] = {}

        def progress(label: str, completed: int, total: int) -> None:
            if label not in task_id_by_label:
                for task in task_id_by_label.values():
                    # Steps run one after another; bars of a thousand shards would not fit on a screen.
                    bars.update(task, visible=False)
                task_id_by_label[label] = bars.add_task(label, total=total or None)
            bars.update(task_id_by_label[label], completed=completed, total=total or None, visible=True)

        yield progress


class _AmountColumn(ProgressColumn):
    """Progress column with the amount done, and the total if known."""

    def render(self, task: Task) -> Text:
        format_amount = size_text if task.description in LABELS_IN_BYTES else "{:,.0f}".format
        total_text = "" if task.total is None else f"/{format_amount(task.total)}"
        return Text(f"{format_amount(task.completed)}{total_text}", style="progress.download")


class _RateColumn(ProgressColumn):
    """Progress column with the recent rate per second."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text("")
        rate_text = size_text(task.speed) if task.description in LABELS_IN_BYTES else f"{task.speed:,.0f}"
        return Text(f"{rate_text}/s", style="progress.data.speed")


def iso(unix_s: float) -> str:
    """Format Unix seconds as ISO 8601, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
