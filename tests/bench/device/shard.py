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
from cache.process.redis_server import server
from precompute.builds.build import Build, open_bundle
from precompute.config.devices import devices
from precompute.scoring.users.reading import read_users
from precompute.scoring.users.work import ShardWork
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
    works = [
        ShardWork.of(build, open_bundle(build), shard, shards.scorers) for shard in range(SHARDS)
    ]
    chunks = [
        each.encode(chunk) for each in works for chunk in read_users(each, build.root / "scratch")
    ]
    users = np.concatenate([each.outputs["user_tower"] for each in chunks])
    ends = np.cumsum(np.concatenate([np.diff(each.seen.indptr) for each in chunks]))
    seen = Histories(
        np.concatenate([[0], ends]), np.concatenate([each.seen.indices for each in chunks])
    )
    place = shards.scorers.at(0)
    scorer = place.of(works[0].items, "inner_product")

    def run() -> float:
        started = time.perf_counter()
        scorer.top(users, K, seen)
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
    found = devices(os.environ.get("LARDER_DEVICE", "auto"))
    report.figures["device"] = found[0] if found else "none: nothing is measured"
    if not found:
        report.show(options)
        return
    kind = "processor" if found[0] == "cpu" else "gpu quick" if options.quick else "gpu"
    with (
        TemporaryDirectory(prefix="larder-bench-") as place,
        TemporaryDirectory(prefix="larder-redis-") as beside,
        server(Path(beside)) as running,
    ):
        shards = DrawnShards(Path(place), SIZES[kind], found[0], running.url)
        users, kernel = kernel_of(shards)
        shards.run()
        before = reserved_bytes(found[0])
        ratios = alternate(
            kernel, {"shard": shards.run}, rounds=options.rounds, rounds_max=options.rounds + 1
        )
        report.figures |= {
            "users": users,
            "items": SIZES[kind].items,
            "dims": SIZES[kind].dims,
            "begin_s": round(shards.begin_s, 2),
            "embed_s": round(shards.embed_s, 2),
            **{f"{stage}_busy_s": round(shards.busy_s[stage], 3) for stage in STAGES},
            "limiting_stage": shards.limiting_stage,
            "reserved_before_bytes": before,
            "reserved_after_bytes": reserved_bytes(found[0]),
        }
        report.ratios["from_partition_to_pages_vs_kernel"] = ratios["shard"]
    why = "fixed costs weigh more on so few users"
    report.promises["from_partition_to_pages_vs_kernel"] = Promise(0.5, quick=why)
    report.show(options)


if __name__ == "__main__":
    main()
