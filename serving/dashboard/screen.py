"""Terminal view of the dashboard's document. Needs rich."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_COLOUR_BY_LEVEL = {"ok": "green", "warn": "yellow", "bad": "red"}
_SPARK_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_BIN_COUNT = 30
_SHOWN_GENERATIONS_MAX = 6
_TABLE_OLD_S = 20.0
"""Age in seconds from which the table of generations shows its age."""

DashboardBody = Mapping[str, Any]


def draw_screen(body: DashboardBody, trouble_text: str | None = None) -> Group:
    """Draw the document for a terminal of 100 columns; `trouble_text` says why it is outdated."""
    screen_parts: list[RenderableType] = [_verdict_panel(body), _sources_table(body), _replicas_table(body)]
    screen_parts += [_generations_table(body), Text(_misses_line(body)), Text(_state_line(body))]
    if body.get("events") is not None:
        screen_parts.append(Text(_events_line(body)))
    if trouble_text:
        screen_parts.insert(0, Text(f"outdated: {trouble_text}", style="bold red"))
    return Group(*screen_parts)


def _verdict_panel(body: DashboardBody) -> Panel:
    verdict = body["verdict"]
    verdict_lines = [verdict["sentence"], *([verdict["advice"]] if verdict["advice"] else [])]
    verdict_lines += verdict.get("also", [])
    time_text = f"{datetime.fromtimestamp(body['now'], UTC):%H:%M:%S} UTC"
    title = f"Larder {time_text}" + ("" if body["whole"] else ", this worker only")
    return Panel(Text("\n".join(verdict_lines)), title=title, border_style=_COLOUR_BY_LEVEL[verdict["level"]])


def _sources_table(body: DashboardBody) -> Table:
    series, lately = body["series"], body["lately"]
    answer_count = sum(lately["answers"].values())
    requests_per_s = lately["requests"] / lately["seconds"]
    table = Table(
        "source", "share", "p50 ms", "p99 ms", "p99.9 ms", "last five minutes", "total", expand=True,
        title=f"answers of the last {lately['seconds'] // 60} minutes, {requests_per_s:,.1f} requests/s",
    )  # fmt: skip
    for source, source_answer_count in lately["answers"].items():
        seconds_by_quantile = lately["latency"].get(source, {})
        table.add_row(
            source, f"{source_answer_count / answer_count:.1%}" if answer_count else "-",
            *(_format_ms(seconds_by_quantile.get(quantile)) for quantile in ("p50", "p99", "p999")),
            draw_sparkline(series["answers"].get(source, [])[-_SPARK_BIN_COUNT:]),
            f"{body['totals']['answers'].get(source, 0):,}",
        )  # fmt: skip
    return table


def _replicas_table(body: DashboardBody) -> Table:
    table = Table("replica", "workers", "generation", "ready", "notes", "seen", expand=True)
    for replica in body["replicas"]:
        notes = [str(replica[field_name]) for field_name in ("failed", "stale", "degraded") if replica[field_name]]
        table.add_row(
            str(replica["replica"]), str(replica["workers"]), replica["generation"] or "-",
            "yes" if replica["ready"] else "NO", ", ".join(notes) or "-", f"{replica['seen_s']:.0f} s",
        )  # fmt: skip
    return table


def _generations_table(body: DashboardBody) -> Table:
    read_at = body.get("generations_at")
    age_s = 0.0 if read_at is None else body["now"] - read_at
    title = f"generations as of {age_s:,.0f} s ago" if age_s >= _TABLE_OLD_S else None
    table = Table("generation", "state", "role", "gates", "size", "records", expand=True, title=title)
    for generation in body["generations"][:_SHOWN_GENERATIONS_MAX]:
        failed_rules = [gate["rule"] for gate in generation["gates"] if gate["verdict"] == "failed"]
        unjudged_count = sum(gate["value"] is None for gate in generation["gates"])  # no threshold to judge by
        gates_text = f"{len(generation['gates']) - unjudged_count} passed" if generation["gates"] else "-"
        gates_text += f", {unjudged_count} not judged" if unjudged_count else ""
        table.add_row(
            generation["generation"], generation["state"] or "-", generation["role"] or "-",
            f"failed: {', '.join(failed_rules)}" if failed_rules else gates_text,
            format_bytes(generation["bytes"]), "-" if generation["records"] is None else f"{generation['records']:,}",
        )  # fmt: skip
    return table


def _misses_line(body: DashboardBody) -> str:
    top_misses = sorted(body["lately"]["misses"].items(), key=lambda name_and_count: -name_and_count[1])[:6]
    return "misses: " + (", ".join(f"{miss_reason} {n:,}" for miss_reason, n in top_misses) or "none")


def _state_line(body: DashboardBody) -> str:
    redis, l1, queue = body["redis"], body["l1"], body["queue"]
    limit_text = f" of {format_bytes(redis['limit_bytes'])}" if redis["limit_bytes"] else ""
    breakers = (
        ", ".join(
            f"{worker_count} {breaker_state}"
            for breaker_state, worker_count in body["breakers"].items()
            if worker_count
        )
        or "none"
    )
    age_s = body["schedule"]["age_s"]
    age_text = "-" if age_s is None else f"{age_s / 3600:.1f} h"
    return (
        f"Redis {format_bytes(redis['used_bytes'])}{limit_text} · L1 {format_bytes(l1['bytes'])} of "
        f"{format_bytes(l1['budget_bytes'])} · "
        f"breakers {breakers} · under way {queue['under_way']}, "
        f"for live {queue['live_queued']}, shed {queue['shed']:,} · served age {age_text}"
    )


def _events_line(body: DashboardBody) -> str:
    events, lately_s = body["events"], body["lately"]["seconds"]
    count_by_result = events["results"]
    accepted, repeated = count_by_result.get("accepted", 0), count_by_result.get("repeated", 0)
    share_text = "-" if events["answers_share"] is None else f"{events['answers_share']:.1%}"
    return (
        f"events {accepted / lately_s:,.1f}/s, {sum(count_by_result.values()) - accepted - repeated:,} rejected, "
        f"in {share_text} of answers, lag {events['lag_s'] or 0:.1f} s · stream {format_bytes(events['stream_bytes'])} "
        f"of {format_bytes(events['stream_max_bytes'])}"
    )


def _format_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g}"


def format_bytes(size_bytes: float | None) -> str:
    """Format bytes with a unit."""
    if size_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:,.0f} {unit}" if unit == "B" else f"{size_bytes:,.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.1f} TiB"


def draw_sparkline(series_values: Sequence[float]) -> str:
    """Draw a sparkline: one block per value, its height relative to the largest value."""
    largest_value = max(series_values, default=0) or 1
    return "".join(
        _SPARK_BLOCKS[round((len(_SPARK_BLOCKS) - 1) * series_value / largest_value)] for series_value in series_values
    )
