"""The shards of a night: item vectors, the hash ranges compared with them, and whether all are there."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from typing import Any

import numpy as np

from cache.errors import (
    Conflict,
    Refused,
)
from precompute.builds.build import Build, fetch_items, open_bundle
from precompute.builds.copies import on_this_host
from precompute.builds.step_times import timed
from precompute.bulk.headroom import writes_files
from precompute.config.devices import devices, least_busy
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.partitions import catalogue
from precompute.scoring.shard import (
    Scorers,
    embed_catalogue,
    score_items,
)
from precompute.scoring.tables import GrowingFile
from precompute.scoring.users import score_users

SHARDS_AT_ONCE = 2
"""Shards under way for each GPU: one compared with the items, one read, encoded or written meanwhile."""


@writes_files
@on_this_host
def embed_items(
    config: NightConfig, build: Mapping[str, Any], *, progress: Progress = quiet
) -> Step:
    """The item tower over the whole catalogue; every shard compares with these vectors."""
    made = Build.of(config, build)
    if (done := made.read_report("embed_items")) is not None:
        return done
    begun, bundle, started = made.need("begin"), open_bundle(made), time.perf_counter()
    fetch_items(made)
    items = catalogue.open_items(made.root, begun)
    with GrowingFile(made.path(catalogue.VECTORS)) as file:
        written = 0
        for vectors in embed_catalogue(made, bundle, items):
            if not (finite := np.isfinite(vectors).all(axis=1)).all():
                item = items.id_of(written + int(finite.argmin()))
                raise Refused(
                    f"the item tower gave a non-finite vector for item {item!r}",
                    rule="finite",
                    value="non-finite",
                )
            file.write(np.ascontiguousarray(vectors, "<f4").data.cast("B"))
            written += len(vectors)
            progress("embed items", written, items.count)
    made.finish(catalogue.VECTORS)
    report = {"items": items.count, "dims": bundle.dims, "seconds": time.perf_counter() - started}
    made.report("embed_items", report)
    return report


@writes_files
@on_this_host
def score_shard(
    config: NightConfig,
    build: Mapping[str, Any],
    shard: int,
    *,
    scorers: Scorers | None = None,
    progress: Progress = quiet,
) -> Step:
    """Score one hash range of users and items into pages; a finished shard is found, not done again.

    Who scores several shards of one build in one process hands the same `scorers` to all.
    """
    made = Build.of(config, build)
    name = f"shard-{shard:04d}"
    report = made.read_report(name)
    if report is None:
        began_at = time.time()
        fetch_items(made)
        with ExitStack() as taken:
            if scorers is None:
                device = taken.enter_context(least_busy(config.device, shard))
                scorers = Scorers(device or config.device)
            bundle = scorers.bundle(made)
            users = score_users(made, bundle, shard, scorers, progress)
            items = score_items(made, bundle, shard, scorers, progress)
        described = [*users["tables"].values(), *items["tables"].values()]
        made.finish(
            users["directory"]["path"],
            *(each[kind]["path"] for each in described for kind in ("file", "sums")),
        )
        report = {
            "shard": shard, "users": users, "items": items,
            "began_at": began_at, "ended_at": time.time(),
        }  # fmt: skip
        made.report(name, report)
    return {
        "shard": shard,
        "users": report["users"]["scored"],
        "items": report["items"]["scored"],
        "seconds": round(report["users"]["seconds"]["all"] + report["items"]["seconds"]["all"], 3),
    }


class _GivenUp(Exception):
    """Another shard failed, or whoever waits was interrupted."""


@writes_files
def score_shards(
    config: NightConfig,
    build: Mapping[str, Any],
    shards: Sequence[int],
    *,
    progress: Progress = quiet,
) -> list[Step]:
    """Runs `score_shard` for each shard in one process: while one is compared, the next reads, encodes and writes.

    What one raises ends the others at their next sign of progress; what was finished is found again.
    """
    scorers, given_up, telling = Scorers(config.device), threading.Event(), threading.Lock()
    failed: list[BaseException] = []

    def told(what: str, done: int, total: int) -> None:
        with telling:
            if given_up.is_set():
                raise _GivenUp
            try:
                progress(what, done, total)
            except BaseException:
                given_up.set()
                raise

    def score(shard: int) -> Step:
        try:
            return score_shard(config, build, shard, scorers=scorers, progress=told)
        except _GivenUp:
            raise
        except BaseException as error:
            given_up.set()
            failed.append(error)
            raise

    at_once = SHARDS_AT_ONCE * max(1, len(devices(config.device)))
    with ThreadPoolExecutor(at_once, "shard") as pool:
        scored = [pool.submit(score, shard) for shard in shards]
        try:
            for each in as_completed(scored):
                each.result()
        except BaseException as error:
            given_up.set()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, _GivenUp):  # it ended before the one that failed did
                raise failed[0] from None
            raise
    return [each.result() for each in scored]


@writes_files
@on_this_host
def assemble(
    config: NightConfig, build: Mapping[str, Any], scored: Sequence[Mapping[str, Any]]
) -> Step:
    """Check that every shard is there and number the pages; nothing is sorted or moved."""
    made = Build.of(config, build)
    missing = sorted(set(range(config.shards)) - {int(each["shard"]) for each in scored})
    if missing:
        raise Conflict(f"shards {missing} of {config.shards} were not scored")
    with timed(made, "assemble"):
        reports = [made.need(f"shard-{shard:04d}") for shard in range(config.shards)]
        users = sum(report["users"]["scored"] for report in reports)
        made.report("assemble", {"users_scored": users})
    return {"generation": made.generation, "users": users}
