"""The host beside a device: what Python does for a shard does not grow with its users."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.devices import DEVICE

pytest.importorskip("torch", reason="scoring on a device needs torch: make torch-env")

from tests.bench.device.drawn import DrawnShards, DrawnSize

USERS = 1_000


def calls(folder: Path, users: int, redis_url: str) -> Counter[str]:
    """Calls of all functions, those of C among them, in the threads that score shards of so many users."""
    device = "cuda:0" if DEVICE == "cuda" else DEVICE
    size, programs = DrawnSize(users, 300, 8), DEVICE == "cuda"
    shards = DrawnShards(folder, size, device, redis_url, programs=programs)
    shards.run()
    seen: Counter[str] = Counter()

    def count(frame: Any, event: str, what: Any) -> None:
        if event in ("call", "c_call"):
            name = frame.f_code.co_name if event == "call" else getattr(what, "__name__", "")
            seen[f"{frame.f_code.co_filename}:{name}"] += 1

    threading.setprofile(count)
    try:
        shards.run()
    finally:
        threading.setprofile(None)
    return seen


def test_no_function_is_called_once_per_user(tmp_path: Path, redis_url: str) -> None:
    few = calls(tmp_path / "few", USERS, redis_url)
    many = calls(tmp_path / "many", 2 * USERS, redis_url)

    grown = {name: count - few[name] for name, count in many.items()}
    assert sum(many.values()) > 500
    assert {name: more for name, more in grown.items() if more > USERS / 10} == {}
