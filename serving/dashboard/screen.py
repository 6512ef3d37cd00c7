"""Terminal view of the dashboard's document. Needs rich."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}
_BLOCKS = "▁▂▃▄▅▆▇█"
_BINS = 30
_GENERATIONS = 6
_OLD_S = 20.0
"""Age from which the table of generations says how old it is."""

Body = Mapping[str, Any]


def screen(body: Body, trouble: str | None = None) -> Group:
    """Draw the document for a terminal of 100 columns; `trouble` says why it is outdated."""
    parts: list[RenderableType] = [_verdict(body), _sources(body), _replicas(body)]
    parts += [_generations(body), Text(_misses(body)), Text(_state(body))]
    if body.get("events") is not None:
        parts.append(Text(_events(body)))
    if trouble:
        parts.insert(0, Text(f"not of now: {trouble}", style="bold red"))
    return Group(*parts)


def _verdict(body: Body) -> Panel:
    verdict = body["verdict"]
    lines = [verdict["sentence"], *([verdict["advice"]] if verdict["advice"] else [])]
    lines += verdict.get("also", [])
    at = f"{datetime.fromtimestamp(body['now'], UTC):%H:%M:%S} UTC"
    title = f"Larder {at}" + ("" if body["whole"] else ", this worker alone")
    return Panel(Text("\n".join(lines)), title=title, border_style=_COLOURS[verdict["level"]])


def _sources(body: Body) -> Table:
    series, lately = body["series"], body["lately"]
    total = sum(lately["answers"].values())
    rate = lately["requests"] / lately["seconds"]
    table = Table(
        "source", "share", "p50 ms", "p99 ms", "p99.9 ms", "last five minutes", "total", expand=True,
        title=f"answers of the last {lately['seconds'] // 60} minutes, {rate:,.1f} requests/s",
    )  # fmt: skip
    for source, n in lately["answers"].items():
        times = lately["latency"].get(source, {})
        table.add_row(
            source, f"{n / total:.1%}" if total else "-",
            *(_ms(times.get(quantile)) for quantile in ("p50", "p99", "p999")),
            spark(series["answers"].get(source, [])[-_BINS:]),
            f"{body['totals']['answers'].get(source, 0):,}",
        )  # fmt: skip
    return table


def _replicas(body: Body) -> Table:
    table = Table("replica", "workers", "generation", "ready", "notes", "seen", expand=True)
    for replica in body["replicas"]:
        notes = [str(replica[name]) for name in ("failed", "stale", "degraded") if replica[name]]
        table.add_row(
            str(replica["replica"]), str(replica["workers"]), replica["generation"] or "-",
            "yes" if replica["ready"] else "NO", ", ".join(notes) or "-", f"{replica['seen_s']:.0f} s",
        )  # fmt: skip
    return table


def _generations(body: Body) -> Table:
    read_at = body.get("generations_at")
    age_s = 0.0 if read_at is None else body["now"] - read_at
    title = f"generations as of {age_s:,.0f} s ago" if age_s >= _OLD_S else None
    table = Table(
        "generation", "state", "role", "gates", "size", "records", expand=True, title=title
    )
    for generation in body["generations"][:_GENERATIONS]:
        failed = [gate["rule"] for gate in generation["gates"] if gate["verdict"] == "failed"]
        unjudged = sum(gate["value"] is None for gate in generation["gates"])  # nothing to judge by
        gates = f"{len(generation['gates']) - unjudged} passed" if generation["gates"] else "-"
        gates += f", {unjudged} not judged" if unjudged else ""
        table.add_row(
            generation["generation"], generation["state"] or "-", generation["role"] or "-",
            f"failed: {', '.join(failed)}" if failed else gates,
            size(generation["bytes"]), "-" if generation["records"] is None else f"{generation['records']:,}",
        )  # fmt: skip
    return table


def _misses(body: Body) -> str:
    top_misses = sorted(
        body["lately"]["misses"].items(), key=lambda name_and_count: -name_and_count[1]
    )[:6]
    return "misses: " + (", ".join(f"{name} {n:,}" for name, n in top_misses) or "none")


def _state(body: Body) -> str:
    redis, l1, queue = body["redis"], body["l1"], body["queue"]
    limit = f" of {size(redis['limit_bytes'])}" if redis["limit_bytes"] else ""
    breakers = ", ".join(f"{n} {state}" for state, n in body["breakers"].items() if n) or "none"
    age_s = body["schedule"]["age_s"]
    age = "-" if age_s is None else f"{age_s / 3600:.1f} h"
    return (
        f"Redis {size(redis['used_bytes'])}{limit} · L1 {size(l1['bytes'])} of {size(l1['budget_bytes'])} · "
        f"breakers {breakers} · under way {queue['under_way']}, "
        f"for live {queue['live_queued']}, shed {queue['shed']:,} · served age {age}"
    )


def _events(body: Body) -> str:
    events, seconds = body["events"], body["lately"]["seconds"]
    results = events["results"]
    accepted, repeated = results.get("accepted", 0), results.get("repeated", 0)
    share_text = "-" if events["answers_share"] is None else f"{events['answers_share']:.1%}"
    return (
        f"events {accepted / seconds:,.1f}/s, {sum(results.values()) - accepted - repeated:,} rejected, "
        f"in {share_text} of answers, lag {events['lag_s'] or 0:.1f} s · stream {size(events['stream_bytes'])} "
        f"of {size(events['stream_max_bytes'])}"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g}"


def size(size_bytes: float | None) -> str:
    """Format bytes with a unit."""
    if size_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:,.0f} {unit}" if unit == "B" else f"{size_bytes:,.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.1f} TiB"


def spark(values: Sequence[float]) -> str:
    """Draw a sparkline: one block per value, its height relative to the largest value."""
    greatest = max(values, default=0) or 1
    return "".join(_BLOCKS[round((len(_BLOCKS) - 1) * value / greatest)] for value in values)
