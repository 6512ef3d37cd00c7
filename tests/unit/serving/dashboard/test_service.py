"""Any number of viewers cost one reading a second, and no part of the document costs the others."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from cache.config.timetable import Schedule
from cache.format.redis_keys import Keyspace
from cache.store.artefacts import ArtefactStore
from serving.dashboard.generation_history import GenerationHistory
from serving.dashboard.service import ARCHIVE_INTERVAL_S, READ_INTERVAL_S, Dashboard
from serving.generations.nights import Nights, ReleaseWatch
from serving.metrics.collectors import refine_bounds
from serving.requests.errors import Problem
from tests.fakes import THREADS, FakeClock
from tests.unit.serving.dashboard.hashes import FakeRedis


class Board:
    """A dashboard over fakes and a real, empty store."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.redis, self.clock = FakeRedis(), FakeClock(1_000_000.0)
        about = {
            "replica": "a", "generation": None, "epoch": None, "ready": False, "stale": None,
            "degraded": None, "failed": None, "tokens_stale": None, "tls_stale": None,
            "store_problem": None, "canary_problem": None, "breaker": "closed",
            "live_queued": 0,
            "under_way": 0, "requests_max": 1, "queue_seconds": 0.0, "l1_bytes": 0,
            "l1_budget_bytes": 0, "l1_entries": 0,
        }  # fmt: skip
        follower: Any = SimpleNamespace(served=None)
        self.store = ArtefactStore(str(folder))
        history = GenerationHistory(self.store, ReleaseWatch(self.store, THREADS).read_records)
        self.dashboard = Dashboard(
            self.redis, history, worker_name="a", read_counts=lambda: {"r": 1},
            read_worker_state=lambda: about, bucket_bounds=refine_bounds((0.1,)),
            nights=Nights(Schedule(), follower, self.clock),
            clock=self.clock, monotonic_clock=self.clock, **{"in_thread": THREADS} | more,
        )  # fmt: skip

    async def data(self) -> dict[str, Any]:
        document: dict[str, Any] = orjson.loads(await self.dashboard.document_json())
        return document


async def test_many_viewers_cost_one_reading_a_second(tmp_path: Path) -> None:
    board = Board(tmp_path)
    bodies = await asyncio.gather(*(board.dashboard.document_json() for _ in range(50)))
    call_count = board.redis.call_count
    board.clock.tick(READ_INTERVAL_S / 2)
    await board.dashboard.document_json()

    assert len(set(bodies)) == 1 and board.redis.call_count == call_count
    board.clock.tick(READ_INTERVAL_S / 2)
    await board.dashboard.document_json()
    assert board.redis.call_count > call_count


async def test_providers_fill_their_parts_and_one_that_fails_costs_only_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise ValueError("no curve")

    events_row = {"up": 1.0, "counted_until": "7-0"}
    board = Board(tmp_path, advisor=fails, quality=lambda: {"samples": 3}, events=lambda: events_row)
    body = await board.data()

    assert (body["advisor"], body["quality"]) == (None, {"samples": 3})
    assert (body["events"]["up"], body["events"]["counted_until"]) == (True, "7-0")
    assert "a part of the dashboard cannot be shown" in caplog.text


async def test_a_store_that_hangs_holds_up_only_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, gate, listed_paths = Board(tmp_path), threading.Event(), []
    await board.data()

    def names(path: str) -> list[str]:
        listed_paths.append(path)
        gate.wait(30)
        return []

    monkeypatch.setattr(board.store, "names", names)
    for _ in range(3):
        board.clock.tick(ARCHIVE_INTERVAL_S)
        assert (await board.data())["whole"]
    at_once = len(listed_paths)
    gate.set()
    await board.dashboard.aclose()

    assert at_once <= 1


async def test_the_first_look_after_a_pause_shows_the_generations_of_now(tmp_path: Path) -> None:
    board = Board(tmp_path)
    await board.data()
    generation = "20261121T000000Z-9aa01b77c0de"
    row = {"at": board.clock(), "state": "loaded"}
    board.redis.hashes[Keyspace("test").generations] = {generation.encode(): orjson.dumps(row)}
    board.clock.tick(600)

    body = await board.data()

    assert [row["state"] for row in body["generations"]] == ["loaded"]
    assert body["generations_at"] == body["now"]


async def test_a_table_that_a_slow_store_leaves_old_carries_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, gate = Board(tmp_path), threading.Event()
    read_at = (await board.data())["now"]

    def names(_path: str) -> list[str]:
        gate.wait(30)
        return []

    monkeypatch.setattr(board.store, "names", names)
    monkeypatch.setattr("serving.dashboard.service._ARCHIVE_WAIT_MAX_S", 0.01)
    board.clock.tick(600)
    body = await board.data()
    gate.set()
    await board.dashboard.aclose()

    assert (body["now"], body["generations_at"]) == (read_at + 600, read_at)


async def test_a_viewer_waits_for_a_bounded_time_and_two_readings_never_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, gate, readings = Board(tmp_path), asyncio.Event(), []
    await board.data()
    ask_all = board.redis.execute_all

    async def hangs(commands: Any) -> list[Any]:
        readings.append(commands)
        await gate.wait()
        return await ask_all(commands)

    monkeypatch.setattr(board.redis, "execute_all", hangs)
    monkeypatch.setattr("serving.dashboard.service.DATA_WAIT_MAX_S", 0.01)
    board.clock.tick(READ_INTERVAL_S)
    for _ in range(3):
        with pytest.raises(Problem, match=r"within 0.01 s"):
            await board.dashboard.document_json()
    assert len(readings) == 1
    gate.set()
    monkeypatch.setattr("serving.dashboard.service.DATA_WAIT_MAX_S", 5.0)
    assert (await board.data())["whole"]


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": {"r": "many"}},
        {"counts": {"r": None}},
        {"counts": [1]},
        {"counts": {"r": 2**63}},
        {"epoch": "5"},
        {"l1_bytes": [1]},
        {"queue_seconds": {}},
        {"degraded": ["a"]},
        {"stale": {"a": 1}},
        {"advisor": 7},
        {"advisor": {"budget_bytes": 1}},
        {"events": 7},
        {"events": {"lag_s": "1"}},
        {"events": {"demanded": 3}},
        {"events": {"counted_until": "noon"}},
    ],
    ids=str,
)
async def test_a_row_of_another_kind_is_left_out_and_does_not_break_the_page(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    board = Board(tmp_path)
    await board.data()
    row = {"at": board.clock(), "replica": "b", "counts": {"r": 2}, "epoch": 1}
    row_by_worker = {b"sound": row, b"strange": row | {"replica": "c"} | changes}
    board.redis.hashes[Keyspace("test").dashboard_workers] |= {
        name: orjson.dumps(worker_row) for name, worker_row in row_by_worker.items()
    }
    board.clock.tick(READ_INTERVAL_S)

    body = await board.data()

    assert [replica["replica"] for replica in body["replicas"]] == ["a", "b"]


async def test_switched_off_it_says_so(tmp_path: Path) -> None:
    board = Board(tmp_path, is_dashboard_on=False)

    with pytest.raises(Problem, match="LARDER_DASHBOARD_S"):
        await board.dashboard.document_json()
