"""Step `score`: compares users and items of hash ranges, the shards, with the catalogue and writes pages."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from typing import TypedDict

from precompute.builds.build import Build, fetch_catalogue, with_host_copies
from precompute.builds.reports import BuildId, shard_report_name
from precompute.bulk.headroom import convert_disk_errors
from precompute.config.devices import claim_least_busy_device, devices
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.features import remarks_on_scores, scoring_hooks
from precompute.scoring.copies import reasons_path
from precompute.scoring.items import score_items
from precompute.scoring.programs import computed_by
from precompute.scoring.scorers import Scorers
from precompute.scoring.users import score_users
from precompute.steps.night import Night, StepRow

SHARDS_PER_DEVICE = 2
"""Shards in progress per GPU: one is compared with the items while another is read, encoded or written."""


class ShardResult(TypedDict):
    """Result of one shard."""

    shard: int
    users: int
    items: int
    seconds: float


@convert_disk_errors
@with_host_copies
def run_shard(
    config: NightConfig, build: BuildId, shard: int, *, scorers: Scorers | None = None, progress: Progress = quiet
) -> ShardResult:
    """Score one shard's users and items into pages; a finished shard is not repeated.

    A process that scores several shards of one build passes the same `scorers` to all calls.
    """
    generation_build = Build.of(config, build)
    finished_report = generation_build.read_report(shard_report_name(shard))
    if finished_report is None:
        began_at = time.time()
        fetch_catalogue(generation_build)
        with ExitStack() as stack:
            if scorers is None:
                device = stack.enter_context(claim_least_busy_device(config.device, shard, config.device_tasks))
                scorers = Scorers(device or config.device, config.device_tasks, scoring_hooks())
            bundle = scorers.bundle(generation_build)
            user_report = score_users(generation_build, bundle, shard, scorers, progress)
            item_report = score_items(generation_build, bundle, shard, scorers, progress)
        table_reports = [*user_report["tables"].values(), *item_report["tables"].values()]
        generation_build.finish(
            user_report["directory"]["path"],
            user_report["inputs"]["path"],
            *([] if user_report["reasons"] is None else [reasons_path(shard)]),
            *(seen_file["path"] for seen_file in user_report["seen"]),
            *(
                artefact["path"]
                for table_report in table_reports
                for artefact in (table_report["file"], table_report["sums"])
            ),
        )
        finished_report = {
            "shard": shard, "users": user_report, "items": item_report,
            "computed_by": computed_by(scorers.device_of_shard(shard).device),
            "began_at": began_at, "ended_at": time.time(),
        }  # fmt: skip
        generation_build.report(shard_report_name(shard), finished_report)
        scorers.mark_finished(shard)
    return {
        "shard": shard,
        "users": finished_report["users"]["scored"],
        "items": finished_report["items"]["scored"],
        "seconds": round(finished_report["users"]["seconds"]["all"] + finished_report["items"]["seconds"]["all"], 3),
    }


class _ShardStopped(Exception):
    """Another shard failed, or the waiting thread was interrupted."""


@convert_disk_errors
def run(config: NightConfig, build: BuildId, shards: Sequence[int], *, progress: Progress = quiet) -> list[ShardResult]:
    """Run `run_shard` for each shard in one process: while one is compared, the next is read, encoded and written.

    An exception in one shard stops the others at their next progress call; a retry finds the finished shards.
    """
    scorers = Scorers(config.device, config.device_tasks, scoring_hooks())
    stop_event, progress_lock = threading.Event(), threading.Lock()
    shard_failures: list[BaseException] = []

    def report_progress(activity: str, done_count: int, total_count: int) -> None:
        with progress_lock:
            if stop_event.is_set():
                raise _ShardStopped
            try:
                progress(activity, done_count, total_count)
            except BaseException:
                stop_event.set()
                raise

    def score(shard: int) -> ShardResult:
        try:
            return run_shard(config, build, shard, scorers=scorers, progress=report_progress)
        except _ShardStopped:
            raise
        except BaseException as error:
            stop_event.set()
            shard_failures.append(error)
            raise

    shards_at_once = SHARDS_PER_DEVICE * max(1, len(devices(config.device)))
    with ThreadPoolExecutor(shards_at_once, "shard") as pool:
        shard_futures = [pool.submit(score, shard) for shard in shards]
        try:
            for future in as_completed(shard_futures):
                future.result()
        except BaseException as error:
            stop_event.set()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, _ShardStopped):  # the stopped shard ended before the failed one
                raise shard_failures[0] from None
            raise
    return [future.result() for future in shard_futures]


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    shards = range(night.config.shards)
    shard_results = run(night.config, night.build, shards, progress=night.progress)
    user_count = sum(shard_result["users"] for shard_result in shard_results)
    item_count = sum(shard_result["items"] for shard_result in shard_results)
    summary = f"{user_count:,} users, {item_count:,} items in {len(shard_results)} shards"
    build = Build.of(night.config, night.build)
    shard_reports = [build.need_report(shard_report_name(shard)) for shard in shards]
    summary += "".join(remark(shard_reports) for remark in remarks_on_scores())
    return StepRow({"users": user_count, "items": item_count}, summary, user_count + item_count, "entities")
