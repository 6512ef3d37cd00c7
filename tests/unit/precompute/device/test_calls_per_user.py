"""The host beside a device: what Python does for a shard does not grow with its users."""

import gc
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.devices import DEVICE

pytest.importorskip("torch", reason="scoring on a device needs torch: make torch-env")

from precompute.builds.build import Build, open_bundle
from precompute.scoring.shard_work import ShardWork
from precompute.scoring.user_reading import read_users
from tests.bench.device.drawn import SHARDS, DrawnShards, DrawnSize

USERS = 1_000


def drawn(folder: Path, users: int, redis_url: str) -> DrawnShards:
    device = "cuda:0" if DEVICE == "cuda" else DEVICE
    size, programs = DrawnSize(users, 300, 8), DEVICE == "cuda"
    return DrawnShards(folder, size, device, redis_url, programs=programs)


def calls(folder: Path, users: int, redis_url: str) -> Counter[str]:
    """Calls of all functions, those of C among them, in the threads that score shards of so many users."""
    shards = drawn(folder, users, redis_url)
    shards.run()
    call_counts: Counter[str] = Counter()

    def count(frame: Any, event: str, callee: Any) -> None:
        if event in ("call", "c_call"):
            name = frame.f_code.co_name if event == "call" else getattr(callee, "__name__", "")
            call_counts[f"{frame.f_code.co_filename}:{name}"] += 1

    threading.setprofile(count)
    try:
        shards.run()
    finally:
        threading.setprofile(None)
    return call_counts


def test_no_function_is_called_once_per_user(tmp_path: Path, redis_url: str) -> None:
    base_call_counts = calls(tmp_path / "few", USERS, redis_url)
    doubled_call_counts = calls(tmp_path / "many", 2 * USERS, redis_url)

    grown = {name: count - base_call_counts[name] for name, count in doubled_call_counts.items()}
    assert sum(doubled_call_counts.values()) > 500
    assert {name: more for name, more in grown.items() if more > USERS / 10} == {}


def objects(folder: Path, users: int, redis_url: str) -> int:
    """Python's objects that the chunks of so many users are made of, their outputs among them."""
    shards = drawn(folder, users, redis_url)
    build = Build.of(shards.config, shards.build)
    works = [ShardWork.of(build, open_bundle(build), shard, shards.scorers) for shard in range(SHARDS)]

    def chunks() -> list[Any]:
        return [work.add_tower_outputs(chunk) for work in works for chunk in read_users(work, build.root / "scratch")]

    assert sum(len(encoded_chunk.user_ids) for encoded_chunk in chunks()) == users
    gc.collect()
    blocks_before = sys.getallocatedblocks()
    encoded_chunks = chunks()
    gc.collect()
    new_block_count = sys.getallocatedblocks() - blocks_before
    encoded_chunks.clear()
    return new_block_count


def test_no_object_is_held_per_user(tmp_path: Path, redis_url: str) -> None:
    base_object_count = objects(tmp_path / "few", USERS, redis_url)
    fourfold_object_count = objects(tmp_path / "many", 4 * USERS, redis_url)

    assert base_object_count > 0
    assert fourfold_object_count - base_object_count < USERS / 10
