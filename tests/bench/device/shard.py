"""Shards of a drawn night from partition to pages beside the kernel alone: a million users by a million items.

Scored are two shards of one build in one process, as `score` does it: users read from the partition, put through the
bundle's program, compared with all items on the device (history excluded, best 100) and written as pages. The baseline
is the same scorer for the same vectors and histories, in one piece. The stage that was busy longest is named, and what
torch keeps of the device's memory is told before and after. LARDER_DEVICE chooses another device than the first GPU
(`cpu`: torch's processor device, in a size for it); without any nothing is measured.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cache.model.tower import Histories
from cache.process.redis_server import join_or_start_server
from precompute.builds.build import Build, open_bundle
from precompute.config.devices import devices
from precompute.scoring.shard_work import ShardWork
from precompute.scoring.user_reading import read_users
from tests.bench.device.drawn import SHARDS, STAGES, DrawnShards, DrawnSize, K
from tests.bench.tools.harness import Promise, Report, alternate, parse

SIZES = {
    "gpu": DrawnSize(1_000_000, 1_000_000),
    "gpu quick": DrawnSize(262_144, 262_144),
    "processor": DrawnSize(2_048, 4_096, 32),
}


def kernel_of(shards: DrawnShards) -> tuple[int, Callable[[], float]]:
    """(users, the run): what the shards' own stages gave the kernel."""
    build = Build.of(shards.config, shards.build)
    works = [ShardWork.of(build, open_bundle(build), shard, shards.scorers) for shard in range(SHARDS)]
    chunks = [
        shard_work.add_tower_outputs(chunk)
        for shard_work in works
        for chunk in read_users(shard_work, build.root / "scratch")
    ]
    users = np.concatenate([encoded_chunk.outputs_by_model["user_tower"] for encoded_chunk in chunks])
    ends = np.cumsum(np.concatenate([np.diff(encoded_chunk.seen_items.indptr) for encoded_chunk in chunks]))
    seen_items = Histories(
        np.concatenate([[0], ends]), np.concatenate([encoded_chunk.seen_items.indices for encoded_chunk in chunks])
    )
    scoring_device = shards.scorers.device_of_shard(0)
    scorer = scoring_device.of(works[0].items, "inner_product")

    def run() -> float:
        started = time.perf_counter()
        scorer.top(users, K, seen_items)
        return len(users) / (time.perf_counter() - started)

    return len(users), run


def reserved_bytes(device: str) -> int:
    """Bytes of a device's memory that torch keeps for this process."""
    if not device.startswith("cuda"):
        return 0
    import torch

    return int(torch.cuda.memory_reserved(device))


def main() -> None:
    """Measure and report; without a device only say so."""
    options = parse(__doc__.splitlines()[0])
    report = Report("shard", ("torch", "onnxruntime", "pyarrow"))
    device_names = devices(os.environ.get("LARDER_DEVICE", "auto"))
    report.figures["device"] = device_names[0] if device_names else "none: nothing is measured"
    if not device_names:
        report.show(options)
        return
    kind = "processor" if device_names[0] == "cpu" else "gpu quick" if options.quick else "gpu"
    with (
        TemporaryDirectory(prefix="larder-bench-") as shards_folder,
        TemporaryDirectory(prefix="larder-redis-") as redis_folder,
        join_or_start_server(Path(redis_folder)) as running,
    ):
        shards = DrawnShards(Path(shards_folder), SIZES[kind], device_names[0], running.url)
        users, kernel = kernel_of(shards)
        shards.run()
        reserved_before_bytes = reserved_bytes(device_names[0])
        ratios = alternate(kernel, {"shard": shards.run}, rounds=options.rounds, rounds_max=options.rounds + 1)
        report.figures |= {
            "users": users,
            "items": SIZES[kind].items,
            "dims": SIZES[kind].dims,
            "begin_s": round(shards.begin_s, 2),
            "embed_s": round(shards.embed_s, 2),
            **{f"{stage}_busy_s": round(shards.busy_s[stage], 3) for stage in STAGES},
            "limiting_stage": shards.limiting_stage,
            "reserved_before_bytes": reserved_before_bytes,
            "reserved_after_bytes": reserved_bytes(device_names[0]),
        }
        report.ratios["from_partition_to_pages_vs_kernel"] = ratios["shard"]
    quick_reason = "fixed costs weigh more on so few users"
    report.promises["from_partition_to_pages_vs_kernel"] = Promise(0.5, quick=quick_reason)
    report.show(options)


if __name__ == "__main__":
    main()
