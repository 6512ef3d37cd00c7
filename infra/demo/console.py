"""Console of the demo: each step as it runs, a summary, and commands to try while it serves."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

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

from infra.demo.dataset import Dataset
from infra.demo.evaluate import TOP, RankingQuality
from infra.demo.features import ColdStart
from infra.demo.http import ServiceCounts
from infra.demo.traffic import Latencies
from serving.requests.answers import Source

ENTITY_COLUMNS = 70

LATENCY_SCOPE = """\
The dashboard's latencies are inside the service: from the start of a request
there, without network and client."""


@dataclass(slots=True)
class Step:
    """Running step; its notes appear below it once it is done."""

    _bars: Progress
    notes: list[str] = field(default_factory=list)
    _bar: TaskID | None = None

    def note(self, text: str) -> None:
        """Add a note to the step."""
        self.notes.append(text)

    def bar(self, label: str, total: int | None) -> None:
        """Show a bar below the step until it is done."""
        self._bar = self._bars.add_task(f"  {label}", total=total)

    def advance(self, count: int) -> None:
        """Advance the bar, if there is one, by `count`."""
        if self._bar is not None:
            self._bars.advance(self._bar, count)

    def say(self, description: str) -> None:
        """Change the text next to the bar."""
        if self._bar is not None:
            self._bars.update(self._bar, description=f"  {escape(description)}")


class Steps:
    """Steps printed to `console`, with the duration of each."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started_at = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Run the block as a step, whose line shows success or failure."""
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
        """Print a finished step; long notes are folded below their start."""
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
        """Print a table, at most 80 columns wide for short values; all but the first column are `figures`, or texts."""
        table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
        for number, name in enumerate(columns):
            justify: JustifyMethod = "right" if number and figures else "left"
            table.add_column(name, justify=justify, overflow="fold")
        for row in rows:
            table.add_row(*(escape(str(cell)) for cell in row))
        self.console.print(table)


@dataclass(slots=True)
class Findings:
    """Figures for the summary."""

    first: str = ""
    second: str = ""
    served: RankingQuality | None = None
    offline: RankingQuality | None = None
    cold: Sequence[ColdStart] = ()
    quiet: Latencies = field(default_factory=Latencies)
    busy: Latencies = field(default_factory=Latencies)
    counted_ms: float | None = None
    """Milliseconds from the 202 of a click until its user's list counted it."""


def summarize(
    steps: Steps, findings: Findings, data: str, counts: ServiceCounts, requests: int
) -> None:
    """Print sources and times of answers, and the run's result; `requests` were checked."""
    total = sum(counts.sources.values())
    rows = [
        (name, f"{counts.sources.get(name, 0):,}", f"{counts.sources.get(name, 0) / total:.2%}")
        for name in Source
    ]
    steps.table("Where answers came from", ("source", "entities", "share"), rows)
    if findings.cold:
        columns = ("asked for", "table", "source", "producer", "best")
        steps.table(
            "Features for want of a history (quiet, unseen: no click; new: in no table)",
            columns,
            findings.cold,
            figures=False,
        )
    for title, latencies in (
        ("Latency in ms as a caller sees it, over HTTP: quiet", findings.quiet),
        ("The same under a night, a swap and a rollback", findings.busy),
    ):
        latency_rows = [
            (name, f"{count:,}", *(f"{latency_ms:.2f}" for latency_ms in times))
            for name, count, *times in latencies.rows()
        ]
        steps.table(title, ("source", "requests", "p50", "p99", "p99.9", "max"), latency_rows)
    summary_rows: list[tuple[str, str]] = [
        ("data", data),
        ("live", findings.first),
        ("rolled back", findings.second),
        ("checked", f"{requests:,} requests: 0 failed, 0 mixed, 0 after the rollback"),
    ]
    if findings.counted_ms is not None:
        summary_rows.append(
            ("a click", f"in its user's list {findings.counted_ms:.0f} ms after its 202")
        )
    if findings.served is not None and findings.offline is not None:
        for name, served, offline in (
            (f"Recall@{TOP}", findings.served.recall, findings.offline.recall),
            (f"NDCG@{TOP}", findings.served.ndcg, findings.offline.ndcg),
        ):
            summary_rows.append((name, f"{served:.4f} through HTTP, {offline:.4f} offline"))
    summary_rows.append(("seconds", f"{time.monotonic() - steps.started_at:.0f}"))
    steps.table("Summary", ("what", "result"), summary_rows, figures=False)
    steps.console.print(LATENCY_SCOPE, highlight=False)


def invite(console: Console, url: str, airflow: str, home: Path, data: Dataset) -> None:
    """Print the addresses of the service at `url`, its pages and Airflow, and commands to try."""
    say = console.print
    user = next(iter(data.histories))
    history = list(next(iter(data.newcomers.values()), data.histories[user]))[:3]
    profiles = data.profiles
    features = {} if profiles is None else {"features": dict(profiles.new_user)}
    say("\n[bold]Serving[/bold] until Ctrl-C. Everything lies in")
    say(f"  {home}", markup=False, highlight=False, soft_wrap=True)
    for name, address in (
        ("service", url), ("dashboard", f"{url}/dashboard"), ("API documentation", f"{url}/docs"),
        ("metrics", f"{url}/metrics"), ("Airflow", airflow),
    ):  # fmt: skip
        say(f"  {name:18} {address}", highlight=False)
    new = {"id": "somebody-new", "history": history, **features}
    calls = [
        f"curl -s '{url}/v1/lookup/user_topk/{quote(user, safe='')}?k=5'",
        _post(url, "user_topk", [new], k=5),
        _post(
            url,
            "",
            [{"table": table_name, "id": user} for table_name in ("user_topk", "user_affinity")],
        ),
    ]
    if profiles is not None:
        item = {"id": profiles.new_item["item"], "features": dict(profiles.new_item)}
        calls.append(_post(url, "item_similar", [item], k=5))
    say("\nTry:")
    for call in calls:
        # Plain, so that it can be copied as it is.
        say(call, markup=False, highlight=False, soft_wrap=True)


def _post(url: str, table: str, entities: Sequence[Mapping[str, object]], **options: object) -> str:
    """Return a call of curl for a shell, on several lines; a long entity takes one for each field."""
    entity_texts = [_fields(entity, ", ") for entity in entities]
    if max(map(len, entity_texts)) > ENTITY_COLUMNS:
        entity_texts = [_fields(entity, ",\n    ") for entity in entities]
    options_text = "".join(f"{_json(name)}: {_json(value)}, " for name, value in options.items())
    entities_text = ",\n   ".join(f"{{{entity_text}}}" for entity_text in entity_texts)
    path = "/".join(filter(None, ("/v1/lookup", table)))
    return f"curl -s {url}{path} -d '\n {{{options_text}\"entities\": [\n   {entities_text}]}}'"


def _fields(of: Mapping[str, object], between: str) -> str:
    return between.join(f"{_json(name)}: {_json(value)}" for name, value in of.items())


def _json(value: object) -> str:
    """Return the JSON of a value, escaped for single quotes of a shell command."""
    return json.dumps(value, ensure_ascii=False).replace("'", "'\\''")
