"""Words of the demo at its end: what it found, and what to try while it goes on serving."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

from infra.demo.dataset import Dataset
from infra.demo.evaluate import TOP, RankingQuality
from infra.demo.scrape import ServiceCounts
from infra.demo.steps import Steps
from infra.demo.traffic import Latencies
from serving.answers.sources import Source


@dataclass(slots=True)
class Findings:
    """Findings that the summary tells."""

    first: str = ""
    second: str = ""
    served: RankingQuality | None = None
    offline: RankingQuality | None = None
    quiet: Latencies = field(default_factory=Latencies)
    busy: Latencies = field(default_factory=Latencies)


def summarize(
    steps: Steps, found: Findings, data: str, counts: ServiceCounts, requests: int
) -> None:
    """Print where answers came from, their times, and what came of the run; `requests` were checked."""
    total = sum(counts.sources.values())
    rows = [
        (name, f"{counts.sources.get(name, 0):,}", f"{counts.sources.get(name, 0) / total:.2%}")
        for name in Source
    ]
    steps.table("Where answers came from", ("source", "entities", "share"), rows)
    for title, taken in (
        ("Latency, quiet (ms)", found.quiet), ("Latency, under a night, a swap and a rollback (ms)", found.busy),
    ):  # fmt: skip
        shown = [
            (name, f"{count:,}", *(f"{each:.2f}" for each in times))
            for name, count, *times in taken.rows()
        ]
        steps.table(title, ("source", "requests", "p50", "p99", "p99.9", "max"), shown)
    told: list[tuple[str, str]] = [
        ("data", data),
        ("generations", f"{found.first} (live), {found.second} (rolled back)"),
        (
            "requests checked",
            f"{requests:,}, of them 0 failed, 0 mixed, 0 after the rollback",
        ),
    ]
    if found.served is not None and found.offline is not None:
        for name, served, offline in (
            (f"Recall@{TOP}", found.served.recall, found.offline.recall),
            (f"NDCG@{TOP}", found.served.ndcg, found.offline.ndcg),
        ):
            told.append((name, f"{served:.4f} through HTTP, {offline:.4f} offline"))
    told.append(("seconds", f"{time.monotonic() - steps.began:.0f}"))
    steps.table("Summary", ("what", "result"), told)


def invite(console: Console, url: str, airflow: str, home: Path, data: Dataset) -> None:
    """Print where the service at `url`, its pages and Airflow are, and lines to try."""
    say = console.print
    user = next(iter(data.histories))
    history = list(next(iter(data.newcomers.values()), data.histories[user]))[:3]
    body = _quoted({"entities": [{"id": "somebody-new", "history": history}], "k": 5})
    both = _quoted(
        {
            "entities": [
                {"table": "user_topk", "id": user},
                {"table": "user_affinity", "id": user},
            ]
        }
    )
    say(f"\n[bold]Serving[/bold] until Ctrl-C. Everything lies in {home}")
    for name, address in (
        ("service", url), ("dashboard", f"{url}/dashboard"), ("API documentation", f"{url}/docs"),
        ("metrics", f"{url}/metrics"), ("Airflow", airflow),
    ):  # fmt: skip
        say(f"  {name:18} {address}", highlight=False)
    say("\nTry:")
    for line in (
        f"curl -s '{url}/v1/lookup/user_topk/{quote(user, safe='')}?k=5'",
        f"curl -s {url}/v1/lookup/user_topk -d '{body}'",
        f"curl -s {url}/v1/lookup -d '{both}'",
    ):
        # Plain, so that a long line can be copied as a whole.
        say(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _quoted(value: object) -> str:
    """JSON of a value as it may stand within single quotes of a shell command."""
    return json.dumps(value, ensure_ascii=False).replace("'", "'\\''")
