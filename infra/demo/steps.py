"""Progress of the demo for whoever watches: each step with its seconds and notes, bars while it runs."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text


@dataclass(slots=True)
class Step:
    """The step that runs now; notes appear below it once it is done."""

    _bars: Progress
    notes: list[str] = field(default_factory=list)
    _bar: TaskID | None = None

    def note(self, text: str) -> None:
        """Something worth a few words."""
        self.notes.append(text)

    def bar(self, label: str, total: int | None) -> None:
        """A bar below the step; gone with it."""
        self._bar = self._bars.add_task(f"  {label}", total=total)

    def advance(self, count: int) -> None:
        """Advance the bar, if there is one, by `count`."""
        if self._bar is not None:
            self._bars.advance(self._bar, count)

    def say(self, description: str) -> None:
        """Change what stands beside the bar."""
        if self._bar is not None:
            self._bars.update(self._bar, description=f"  {escape(description)}")


class Steps:
    """Prints to `console`; remembers how long each step took."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started_at = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """A step; its line says whether it went well."""
        started = time.monotonic()
        columns = (
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=12),
            MofNCompleteColumn(), TimeElapsedColumn(),
        )  # fmt: skip
        status_symbol = "[red]x[/red]"
        quiet = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=quiet) as bars:
            bars.add_task(f"[bold]{escape(title)}", total=1)
            step = Step(bars)
            try:
                yield step
                status_symbol = "[green]✓[/green]"
            except KeyboardInterrupt:
                status_symbol = ""
                raise
            finally:
                self.seconds[title] = time.monotonic() - started
                if status_symbol:
                    self._print(status_symbol, title, step.notes)

    def _print(self, status_symbol: str, title: str, notes: Sequence[str]) -> None:
        """A step that is over; what does not fit a line goes on below, under where it began."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(
            f"{status_symbol} {self.seconds[title]:6.1f} s", f"[bold]{escape(title)}[/bold]"
        )
        for note in notes:
            grid.add_row("", Text(note, style="dim"))
        self.console.print(grid, highlight=False)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        figures: bool = True,
    ) -> None:
        """A table, 80 columns wide at most with short values; all but the first column are `figures`, or texts."""
        table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
        for number, name in enumerate(columns):
            justify: JustifyMethod = "right" if number and figures else "left"
            table.add_column(name, justify=justify, overflow="fold")
        for row in rows:
            table.add_row(*(escape(str(cell)) for cell in row))
        self.console.print(table)
