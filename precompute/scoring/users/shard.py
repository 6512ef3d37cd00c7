"""Scoring the users of one shard: reading, encoding, scoring and writing overlap, a chunk of users at a time."""

import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from precompute.builds.build import Build
from precompute.builds.reuse_fact import REASONS
from precompute.bundles.bundle import Bundle
from precompute.config.progress import Progress
from precompute.partitions.catalogue import directory_file
from precompute.partitions.shard_files import PARTITION
from precompute.partitions.shard_input import scratch_folder
from precompute.partitions.stages import Stages
from precompute.reuse.base import BaseGeneration
from precompute.reuse.kept_shard import inputs_file, reasons_file
from precompute.scoring.shard import Scorers, described
from precompute.scoring.tables import GrowingFile, PageFile
from precompute.scoring.users.published import write_inputs
from precompute.scoring.users.reading import read_users, timed_reads
from precompute.scoring.users.records import add_records, write
from precompute.scoring.users.work import ShardWork


def score_users(
    build: Build,
    bundle: Bundle,
    shard: int,
    scorers: Scorers,
    progress: Progress,
    base: BaseGeneration | None = None,
) -> dict[str, Any]:
    """All user tables of one shard; returns the shard's report. Memory does not depend on the number of users."""
    started = time.perf_counter()
    work = ShardWork.of(build, bundle, shard, scorers, base)
    directory_path, inputs = directory_file("user", shard), inputs_file(shard)
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder(build.root / PARTITION))
        files = {
            name: stack.enter_context(
                PageFile(build.path(work.pages(name)), layout, build.config.page_bytes)
            )
            for name, layout in work.layouts.items()
        }
        directory = stack.enter_context(GrowingFile(build.path(directory_path)))
        pairs = stack.enter_context(GrowingFile(build.path(inputs)))
        seen_file_by_part = {
            name: stack.enter_context(GrowingFile(build.path(path)))
            for name, path in work.seen_files.items()
        }
        reasons = None
        if work.reuse is not None:
            reasons = stack.enter_context(GrowingFile(build.path(reasons_file(shard))))
        stages = stack.enter_context(Stages())  # last, so stopped before anything they use is gone
        read = stages.ahead(timed_reads(work, read_users(work, scratch, pairs)))
        encoded = stages.map_values(work.encode, work.opened(read), workers=work.workers)
        scored = stages.ahead(work.scored(encoded))
        for chunk in stages.map_values(partial(add_records, work), scored, workers=work.workers):
            with work.busy("write"):
                write(work, chunk, files, directory, reasons)
                if seen_file_by_part:
                    write_inputs(work, chunk, seen_file_by_part)
            progress(f"score shard {shard}", chunk.entities, chunk.total)
    count = work.counts["scored"]
    return {
        "entities": work.counts["entities"],
        "scored": count,
        "without_input": work.counts["entities"] - count,
        "short": work.counts["short"],
        "unusable": work.unusable.to_json(),
        "seconds": {**work.seconds, "all": time.perf_counter() - started},
        "reasons": None if work.reuse is None else {name: work.counts[name] for name in REASONS},
        "directory": asdict(build.describe(directory_path)),
        "inputs": asdict(build.describe(inputs)),
        "seen": [asdict(build.describe(path)) for path in work.seen_files.values()],
        "tables": {name: described(build, file) for name, file in files.items()},
    }
