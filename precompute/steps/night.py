"""A whole night in one process: the same steps that the DAG wires, in the same order."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from precompute.config.devices import devices
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.steps import pipeline


@dataclass(frozen=True, slots=True)
class Line:
    """Row of a night's table: what, how many, how long, and how fast and how big where that has a meaning."""

    step: str
    what: str
    seconds: float
    rate: str = ""
    size: str = ""


def run_night(
    config: NightConfig,
    *,
    data_until: str | None,
    run_after: str | None = None,
    named: str | None = None,
    attempt: str,
    progress: Progress = quiet,
) -> list[Line]:
    """Begin to retire; ends early when this very generation is live already."""
    devices(config.device)  # what is not there is said before anything is read
    lines: list[Line] = []

    def step(
        name: str,
        work: Callable[[], dict[str, Any]],
        tell: Callable[[dict[str, Any]], str],
        *,
        count: Callable[[dict[str, Any]], int] = lambda _found: 0,
        unit: str = "",
        size: Callable[[dict[str, Any]], int] = lambda _found: 0,
    ) -> dict[str, Any]:
        started = time.perf_counter()
        found = work()
        seconds = time.perf_counter() - started
        rate = "" if not count(found) else _rate(count(found), seconds, unit)
        size_bytes = size(found)
        lines.append(
            Line(name, tell(found), seconds, rate, size_text(size_bytes) if size_bytes else "")
        )
        return found

    build = step(
        "begin",
        lambda: pipeline.begin(
            config, data_until=data_until, run_after=run_after, named=named, progress=progress
        ),
        lambda found: found["generation"] + (" is live already" if found["already_live"] else ""),
    )
    if build["already_live"]:
        return lines
    step(
        "embed items",
        lambda: pipeline.embed_items(config, build, progress=progress),
        lambda found: f"{found['items']:,} items x {found['dims']}",
        count=lambda found: int(found["items"]),
        unit="items",
        size=lambda found: int(found["items"] * found["dims"] * 4),
    )
    scored: list[dict[str, Any]] = []

    def score() -> dict[str, Any]:
        scored.extend(pipeline.score_shards(config, build, build["shards"], progress=progress))
        return {name: sum(each[name] for each in scored) for name in ("users", "items")}

    step(
        "score",
        score,
        lambda found: f"{found['users']:,} users, {found['items']:,} items in {len(scored)} shards",
        count=lambda found: int(found["users"] + found["items"]),
        unit="entities",
    )
    step(
        "assemble",
        lambda: pipeline.assemble(config, build, scored),
        lambda found: f"{found['users']:,} users",
    )
    step(
        "index",
        lambda: pipeline.build_index(config, build, progress=progress),
        lambda found: ", ".join(
            f"{each['metric']}: {each['kind']}, recall {each['recall']:.4f}"
            for each in found["indexes"].values()
        ),
        size=lambda found: sum(each["file"]["size_bytes"] for each in found["indexes"].values()),
    )
    step(
        "quantize",
        lambda: pipeline.quantize(config, build, progress=progress),
        lambda found: ", ".join(
            f"{name}: {_agreement(each['agreement'])}" for name, each in found["models"].items()
        ),
        size=lambda found: sum(
            file["size_bytes"]
            for each in found["models"].values()
            for file in (each["fp32"], each["int8"])
            if file
        ),
    )
    step(
        "load",
        lambda: pipeline.load(config, build, progress=progress),
        lambda found: (
            "all pages"
            if found["loaded_bytes"] == found["bytes"]
            else f"{size_text(found['loaded_bytes'])} moved, the rest was there"
        ),
        count=lambda found: int(found["loaded_bytes"]),
        unit="B",
        size=lambda found: int(found["bytes"]),
    )
    verified = step(
        "verify",
        lambda: pipeline.verify(config, build, attempt=attempt, progress=progress),
        lambda found: f"{found['gates']} gates passed",
    )
    step(
        "publish",
        lambda: pipeline.publish(config, verified, attempt=attempt, progress=progress),
        lambda found: f"epoch {found['epoch']}, previous {found['previous'] or 'none'}",
    )
    step(
        "warm",
        lambda: pipeline.warm(config, build),
        lambda found: (
            f"{found['replicas'] - len(found['waiting'])} of {found['replicas']} replicas follow"
            + ("" if found["skew_ms"] is None else f", {found['skew_ms']:.0f} ms apart")
            if found["replicas"]
            else "no replica is listening"
        ),
    )
    step(
        "retire",
        lambda: pipeline.retire(config, attempt=attempt, progress=progress),
        lambda found: f"{len(found['retired'])} generations, {found['keys']:,} keys",
    )
    return lines


def _agreement(found: Mapping[str, Any]) -> str:
    overlap = f" overlap {found['overlap_at_20']:.4f}" if "overlap_at_20" in found else ""
    return f"{found.get('precision')}{overlap}"


def _rate(count: int, seconds: float, unit: str) -> str:
    each = count / max(seconds, 1e-9)
    return f"{size_text(each)}/s" if unit == "B" else f"{each:,.0f} {unit}/s"


def size_text(size_bytes: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            return f"{size_bytes:,.1f} {unit}" if unit != "B" else f"{size_bytes:,.0f} B"
        size_bytes /= 1024
    raise AssertionError
