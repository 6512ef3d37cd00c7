"""A whole night in one process: the same steps that the DAG wires, in the same order."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from precompute import pipeline
from precompute.build import Progress, quiet
from precompute.config import NightConfig


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a night's table."""

    step: str
    what: str
    seconds: float


def run_night(
    config: NightConfig,
    *,
    data_until: str | None,
    run_after: str | None,
    attempt: str,
    progress: Progress = quiet,
) -> list[Line]:
    """Begin to retire; ends early when this very generation is live already."""
    lines: list[Line] = []

    def step(
        name: str, work: Callable[[], dict[str, Any]], tell: Callable[[dict[str, Any]], str]
    ) -> dict[str, Any]:
        started = time.perf_counter()
        found = work()
        lines.append(Line(name, tell(found), time.perf_counter() - started))
        return found

    build = step(
        "begin",
        lambda: pipeline.begin(
            config, data_until=data_until, run_after=run_after, progress=progress
        ),
        lambda found: found["generation"] + (" is live already" if found["already_live"] else ""),
    )
    if build["already_live"]:
        return lines
    step(
        "embed items",
        lambda: pipeline.embed_items(config, build, progress=progress),
        lambda found: f"{found['items']:,} items x {found['dims']}",
    )
    scored: list[dict[str, Any]] = []

    def score() -> dict[str, Any]:
        scored.extend(
            pipeline.score_shard(config, build, shard, progress=progress)
            for shard in build["shards"]
        )
        return {name: sum(each[name] for each in scored) for name in ("users", "items", "seconds")}

    step(
        "score",
        score,
        lambda found: (
            f"{found['users']:,} users, {found['items']:,} items in {len(scored)} shards, "
            f"{(found['users'] + found['items']) / max(found['seconds'], 1e-9):,.0f} entities/s"
        ),
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
    )
    step(
        "quantize",
        lambda: pipeline.quantize(config, build, progress=progress),
        lambda found: ", ".join(
            f"{name}: {each['agreement'].get('precision')}"
            + (
                f" overlap {each['agreement']['overlap_at_20']:.4f}"
                if "overlap_at_20" in each["agreement"]
                else ""
            )
            for name, each in found["models"].items()
        ),
    )
    step(
        "load",
        lambda: pipeline.load(config, build, progress=progress),
        lambda found: f"{_size(found['bytes'])} ({_size(found['loaded_bytes'])} moved)",
    )
    verified = step(
        "verify",
        lambda: pipeline.verify(config, build, attempt=attempt, progress=progress),
        lambda found: f"{found['gates']} gates passed",
    )
    step(
        "publish",
        lambda: pipeline.publish(config, verified, attempt=attempt),
        lambda found: f"epoch {found['epoch']}, previous {found['previous'] or 'none'}",
    )
    step(
        "warm",
        lambda: pipeline.warm(config, build),
        lambda found: (
            f"{found['replicas'] - len(found['waiting'])} of {found['replicas']} replicas follow"
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


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            return f"{size_bytes:,.1f} {unit}" if unit != "B" else f"{size_bytes:,.0f} B"
        size_bytes /= 1024
    raise AssertionError
