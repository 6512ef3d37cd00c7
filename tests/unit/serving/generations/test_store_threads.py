"""A store that hangs keeps its own threads, and none that anything else waits for."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving.dashboard.generation_history import GenerationHistory
from serving.generations.nights import ReleaseWatch
from serving.process.resources import STORE_THREAD_COUNT, StoreThreads
from tests.unit.serving.scene import A, B, Scene, pointer


async def test_reads_that_hang_hold_up_no_other_work() -> None:
    reading, gate = StoreThreads(), threading.Event()
    hung = [asyncio.create_task(reading(gate.wait, 30)) for _ in range(STORE_THREAD_COUNT + 8)]
    await asyncio.sleep(0)

    try:
        async with asyncio.timeout(5):
            assert await asyncio.to_thread(lambda: "composed") == "composed"
    finally:
        gate.set()
        await asyncio.gather(*hung)
        reading.close()


class Forbidden(ThreadPoolExecutor):
    """Asyncio's own threads, which nobody who reads the store may take."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{fn} ran among asyncio's own threads")


async def test_all_reads_of_the_store_run_in_its_own_threads(tmp_path: Path) -> None:
    reading = StoreThreads()
    scene = Scene(tmp_path, reading)
    scene.release(A, 1)
    scene.store.write("generations/some", b"")
    asyncio.get_running_loop().set_default_executor(Forbidden())

    await scene.refresher.refresh_blocklist()
    await scene.refresher.sweep_copies()
    await scene.publish(pointer(B, 2, A))
    watch = ReleaseWatch(scene.store, reading)
    await watch.refresh()
    await reading(GenerationHistory(scene.store, watch.read_records).read_generations_and_nights, None)

    assert scene.shelf.is_blocklist_known and scene.held == [B, A] and watch.last_time_by_action
    await scene.follower.aclose()
    reading.close()
