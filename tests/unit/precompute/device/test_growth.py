"""Shard after shard on one device: nothing of its memory is held longer than it is used."""

import os
import resource
import time
from pathlib import Path

import pytest

from tests.devices import DEVICE

torch = pytest.importorskip("torch", reason="scoring on a device needs torch: make torch-env")

from tests.bench.device.drawn import DrawnShards, DrawnSize  # noqa: E402

IS_GPU = DEVICE.startswith("cuda")
SECONDS = float(os.environ.get("LARDER_GROWTH_S", "300" if IS_GPU else "20"))
SIZE = DrawnSize(65_536, 262_144) if IS_GPU else DrawnSize(1_024, 2_048, 16)
WARM = 5
SLACK_BYTES = 0 if IS_GPU else 32 << 20
"""Of the process's memory, all of which is counted without a GPU."""


def held_bytes() -> int:
    """Bytes of the device that torch keeps; without a GPU those of the process that are resident."""
    if IS_GPU:
        return int(torch.cuda.memory_reserved("cuda:0"))
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.storm
def test_minutes_of_shards_do_not_let_reserved_memory_grow(tmp_path: Path, redis_url: str) -> None:
    if IS_GPU:
        torch.cuda.empty_cache()  # what tests before this one kept would hide what grows
    shards = DrawnShards(tmp_path, SIZE, "cuda:0" if IS_GPU else DEVICE, redis_url)
    for _ in range(WARM):
        shards.run()
    initial_bytes, deadline, runs = held_bytes(), time.monotonic() + SECONDS, 0

    while time.monotonic() < deadline:
        shards.run()
        runs += 1

    assert runs > 3 and held_bytes() <= initial_bytes + SLACK_BYTES
