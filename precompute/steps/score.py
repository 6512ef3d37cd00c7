"""Step `score`: compares users and items of hash ranges, the shards, with the catalogue and writes pages."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from typing import TypedDict

from precompute.builds.build import Build, fetch_catalogue, with_host_copies
from precompute.builds.reports import BuildId, shard_report_name
from precompute.bulk.headroom import writes_files
from precompute.config.devices import devices, least_busy
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.features import remarks_on_scores, scoring_hooks
from precompute.scoring.copies import reasons_path
from precompute.scoring.items import score_items
from precompute.scoring.programs import computed_by
from precompute.scoring.scorers import Scorers
from precompute.scoring.users import score_users
from precompute.steps.night import Night, StepRow

SHARDS_AT_ONCE = 2
"""Shards under way for each GPU: one compared with the items, one read, encoded or written meanwhile."""


class ShardResult(TypedDict):
    """Result of one shard."""

    shard: int
    users: int
    items: int
    seconds: float


@writes_files
@with_host_copies
def run_shard(
    config: NightConfig,
    build: BuildId,
    shard: int,
    *,
    scorers: Scorers | None = None,
    progress: Progress = quiet,
) -> ShardResult:
    """Score one hash range of users and items into pages; a finished shard is not repeated.

    A process that scores several shards of one build passes the same `scorers` to all.
    """
    generation_build = Build.of(config, build)
    report = generation_build.read_report(shard_report_name(shard))
    if report is None:
        began_at = time.time()
        fetch_catalogue(generation_build)
        with ExitStack() as stack:
            if scorers is None:
                device = stack.enter_context(least_busy(config.device, shard, config.device_tasks))
                scorers = Scorers(device or config.device, config.device_tasks, scoring_hooks())
            bundle = scorers.bundle(generation_build)
            users = score_users(generation_build, bundle, shard, scorers, progress)
            items = score_items(generation_build, bundle, shard, scorers, progress)
        described = [*users["tables"].values(), *items["tables"].values()]
        generation_build.finish(
            users["directory"]["path"],
            users["inputs"]["path"],
            *([] if users["reasons"] is None else [reasons_path(shard)]),
            *(seen_file["path"] for seen_file in users["seen"]),
            *(file["path"] for pages in described for file in (pages["file"], pages["sums"])),
        )
        report = {
            "shard": shard, "users": users, "items": items,
            "computed_by": computed_by(scorers.at(shard).device),
            "began_at": began_at, "ended_at": time.time(),
        }  # fmt: skip
        generation_build.report(shard_report_name(shard), report)
        scorers.mark_finished(shard)
    return {
        "shard": shard,
        "users": report["users"]["scored"],
        "items": report["items"]["scored"],
        "seconds": round(report["users"]["seconds"]["all"] + report["items"]["seconds"]["all"], 3),
    }


class _GivenUp(Exception):
    """Another shard failed, or the waiting thread was interrupted."""


@writes_files
def run(
    config: NightConfig,
    build: BuildId,
    shards: Sequence[int],
    *,
    progress: Progress = quiet,
) -> list[ShardResult]:
    """Run `run_shard` for each shard in one process: while one is compared, the next reads, encodes and writes.

    An exception in one ends the others at their next progress call; finished shards are found again.
    """
    scorers = Scorers(config.device, config.device_tasks, scoring_hooks())
    given_up, telling = threading.Event(), threading.Lock()
    failed: list[BaseException] = []

    def report_progress(activity: str, done_count: int, total: int) -> None:
        with telling:
            if given_up.is_set():
                raise _GivenUp
            try:
                progress(activity, done_count, total)
            except BaseException:
                given_up.set()
                raise

    def score(shard: int) -> ShardResult:
        try:
            return run_shard(config, build, shard, scorers=scorers, progress=report_progress)
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
            for future in as_completed(scored):
                future.result()
        except BaseException as error:
            given_up.set()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, _GivenUp):  # it ended before the one that failed did
                raise failed[0] from None
            raise
    return [future.result() for future in scored]


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    shards = range(night.config.shards)
    scored = run(night.config, night.build, shards, progress=night.progress)
    users = sum(shard_result["users"] for shard_result in scored)
    items = sum(shard_result["items"] for shard_result in scored)
    summary = f"{users:,} users, {items:,} items in {len(scored)} shards"
    build = Build.of(night.config, night.build)
    reports = [build.need_report(shard_report_name(shard)) for shard in shards]
    summary += "".join(remark(reports) for remark in remarks_on_scores())
    return StepRow({"users": users, "items": items}, summary, users + items, "entities")
