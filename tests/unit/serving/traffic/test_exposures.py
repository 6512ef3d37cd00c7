"""The exposure log of a process: each key once an hour, nothing lost by a store that fails, nothing counted twice."""

from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from cache.errors import StoreError
from cache.store.artefacts import ArtefactStore
from serving.traffic import exposures
from serving.traffic.exposures import ExposureLog
from tests.fakes import THREADS, FakeClock

HOUR = 500_000
START = HOUR * 3_600.0


class FailingStore(ArtefactStore):
    """Says that a write failed, as often as told: before it happened, or after."""

    failures_before_write = after = 0

    def write_once(self, path: str, data: bytes) -> bool:
        if self.failures_before_write:
            self.failures_before_write -= 1
            raise StoreError("away")
        is_new = super().write_once(path, data)
        if self.after:
            self.after -= 1
            raise StoreError("the reply was lost")
        return is_new


def log_of(folder: Path, clock: FakeClock | None = None) -> tuple[ExposureLog, FailingStore, FakeClock]:
    clock = clock or FakeClock(START)
    store = FailingStore(str(folder))
    return ExposureLog(store, "r1", clock=clock, in_thread=THREADS), store, clock


def lines(store: ArtefactStore) -> list[tuple[str, dict[str, Any]]]:
    named_lines = []
    for name in store.names("exposures/parts"):
        raw = store.read(f"exposures/parts/{name}")
        assert raw is not None
        named_lines += [(name, arm_line) for arm_line in orjson.loads(raw)["arms"]]
    return named_lines


def keys_of(arm_line: dict[str, Any]) -> list[str]:
    return [key for key, _ in arm_line["exposures"]]


async def test_a_key_is_written_once_an_hour_per_arm_and_every_request_is_counted(tmp_path: Path) -> None:
    log, store, clock = log_of(tmp_path)

    for key in (b"a", b"b", b"a"):
        log.count_request("e", "x", key)
    log.count_request("e", "y", b"a")
    log.count_request("e", "x", None)
    await log.flush()
    log.count_request("e", "x", b"a")
    log.count_feedback("e", "x", "click", 3)
    await log.flush()
    clock.tick(3_600)
    log.count_request("e", "x", b"a")
    await log.flush()

    assert [
        (name, arm_line["arm"], arm_line["requests"], arm_line["feedback"], keys_of(arm_line))
        for name, arm_line in lines(store)
    ] == [
        (f"{HOUR}.r1-1.json", "x", 4, {}, ["a", "b"]),
        (f"{HOUR}.r1-1.json", "y", 1, {}, ["a"]),
        (f"{HOUR}.r1-2.json", "x", 1, {"click": 3}, []),
        (f"{HOUR + 1}.r1-3.json", "x", 1, {}, ["a"]),
    ]  # fmt: skip
    assert log.internal_counters() == {
        "exposures_written": 4, "exposures_dropped": 0, "exposure_writes_failed": 0,
    }  # fmt: skip


async def test_a_store_that_fails_delays_and_repeats_nothing(tmp_path: Path) -> None:
    log, store, _ = log_of(tmp_path)
    log.count_request("e", "x", b"a")
    store.failures_before_write = 1
    await log.flush()
    assert not lines(store)

    log.count_request("e", "x", b"b")
    store.after = 1
    await log.flush()
    await log.flush()

    named_lines = lines(store)
    assert sum(arm_line["requests"] for _, arm_line in named_lines) == 2
    assert sorted(key for _, arm_line in named_lines for key, _ in arm_line["exposures"]) == ["a", "b"]
    assert log.internal_counters()["exposure_writes_failed"] == 2


async def test_what_waits_is_bounded_and_what_is_dropped_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposures, "WAITING_EXPOSURES_MAX", 5)
    monkeypatch.setattr(exposures, "PART_EXPOSURES_MAX", 2)
    log, store, _ = log_of(tmp_path)

    for number in range(8):
        log.count_request("e", "xy"[number % 2], f"k{number}".encode())
    await log.flush()

    named_lines = lines(store)
    assert sum(arm_line["requests"] for _, arm_line in named_lines) == 8
    assert sorted(key for _, arm_line in named_lines for key, _ in arm_line["exposures"]) == [
        f"k{number}" for number in range(5)
    ]
    parts = Counter(name for name, arm_line in named_lines for _ in arm_line["exposures"])
    assert max(parts.values()) == 2 and log.internal_counters()["exposures_dropped"] == 3
    # After that there is room again.
    log.count_request("e", "x", b"later")
    await log.flush()
    assert log.internal_counters()["exposures_written"] == 6
