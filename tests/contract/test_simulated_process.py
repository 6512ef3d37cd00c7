"""What stands for event loop, thread pool, connections and store in simulations does as they do."""

import asyncio
import random
import selectors
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cache.store.artefacts import ArtefactStore
from tests.memory import MemoryStore
from tests.simulation.threads import Pool, Threads
from tests.simulation.virtual_loop import VirtualLoop, context_of
from tests.simulation.wires import Wires

STEP_S = 0.004
"""Seconds between two moments of the random programs."""


class InstantSelector(selectors.SelectSelector):
    """A selector without any socket events, whose time-outs end at once."""

    waited_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Counts the time-out."""
        self.waited_s += timeout or 0.0
        return []


class Punctual(asyncio.SelectorEventLoop):
    """asyncio's own loop with a clock in which only waiting takes time.

    By the machine's clock timers come in one turn wherever it is busy, and tasks in another order.
    """

    def __init__(self) -> None:
        self.waits = InstantSelector()
        super().__init__(self.waits)

    def time(self) -> float:
        """Seconds waited so far."""
        return self.waits.waited_s


def virtual(seed: int = 0) -> VirtualLoop:
    wires = Wires(random.Random(seed))
    loop = VirtualLoop(wires, 1_000.0)
    wires.loop = loop
    return loop


def in_both(program: Callable[[], Any]) -> None:
    """Run a coroutine function on asyncio's loop and on a virtual one, which must give the same result."""
    loop, real_loop = virtual(), Punctual()
    try:
        assert loop.run_until_complete(program()) == real_loop.run_until_complete(program())
    finally:
        loop.close()
        real_loop.close()


@pytest.mark.parametrize("seed", range(50))
def test_callbacks_timers_tasks_and_time_outs_come_in_the_same_order(seed: int) -> None:
    async def program() -> list[str]:
        rng, happened = random.Random(seed), list[str]()
        loop, gate = asyncio.get_running_loop(), asyncio.Event()
        moments = rng.sample(range(1, 16), 10)  # no two at once: those come in any order

        async def task(name: str, moment: int, limit: int) -> None:
            try:
                async with asyncio.timeout(STEP_S * limit):
                    await asyncio.sleep(STEP_S * moment)
                    happened.append(f"{name} slept")
                    await gate.wait()
                    happened.append(f"{name} went")
            except TimeoutError:
                happened.append(f"{name} late")

        limits = (moments[0], moments[7], moments[8])
        tasks = [
            asyncio.create_task(task(str(moment), moment, limit))
            for moment, limit in zip(moments[1:4], limits, strict=True)
        ]
        loop.call_later(STEP_S * moments[4], gate.set)
        loop.call_later(STEP_S * moments[5], tasks[0].cancel)
        cancelled = loop.call_later(STEP_S * moments[6], happened.append, "never")
        loop.call_later(STEP_S * (moments[6] - 0.5), cancelled.cancel)
        for number in range(3):
            loop.call_soon(happened.append, f"soon {number}")
        await asyncio.wait(tasks)
        await asyncio.sleep(STEP_S * 17)
        return happened

    in_both(program)


async def pooled(pool: Executor) -> list[Any]:
    loop, outputs = asyncio.get_running_loop(), list[Any]()

    def fails() -> None:
        raise ValueError("no")

    outputs.append(await loop.run_in_executor(pool, sum, [1, 2]))
    with pytest.raises(ValueError, match="no"):
        await loop.run_in_executor(pool, fails)
    power_futures = [loop.run_in_executor(pool, pow, 2, exponent) for exponent in range(6)]
    outputs += await asyncio.gather(*power_futures)
    pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(RuntimeError):
        pool.submit(sum, [1])
    return outputs


def test_a_pool_gives_back_what_work_returns_or_raises() -> None:
    loop = virtual()
    threads = Threads(loop, random.Random(1))
    real_loop = asyncio.new_event_loop()
    try:
        simulated_outputs = loop.run_until_complete(pooled(Pool(threads, 2)))
        assert simulated_outputs == real_loop.run_until_complete(pooled(ThreadPoolExecutor(2)))
    finally:
        threads.stop()
        loop.close()
        real_loop.close()


def test_bytes_arrive_in_order_and_end_with_the_connection() -> None:
    chunks = [bytes([number]) * (number + 1) for number in range(50)]

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(data)

    async def talk(port: int) -> bytes:
        loop, received, closed_event = asyncio.get_running_loop(), bytearray(), asyncio.Event()

        class Caller(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                received.extend(data)
                if len(received) == sum(map(len, chunks)):
                    transport.close()

            def connection_lost(self, exc: Exception | None) -> None:
                closed_event.set()

        transport, _ = await loop.create_connection(Caller, "127.0.0.1", port)
        for chunk in chunks:
            transport.write(chunk)
        await closed_event.wait()
        return bytes(received)

    async def talk_over_sockets() -> bytes:
        server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
        echoed = await talk(server.sockets[0].getsockname()[1])
        server.close()
        return echoed

    wires = Wires(random.Random(3))
    loop = VirtualLoop(wires, 1_000.0)
    wires.loop, wires.torn = loop, 0.5
    wires.listening[7] = Echo, context_of(None)
    try:
        assert loop.run_until_complete(talk(7)) == asyncio.run(talk_over_sockets()) == b"".join(chunks)
    finally:
        loop.close()


@pytest.mark.parametrize("seed", range(5))
def test_the_store_in_memory_is_one_of_files(tmp_path: Path, seed: int) -> None:
    rng, stores = random.Random(seed), (MemoryStore(), ArtefactStore(str(tmp_path)))
    paths = ["a/1.json", "a/2.json", "b/c/1.json", "b/2.json"]
    for _ in range(120):
        path, data = rng.choice(paths), rng.randbytes(3)
        folder = rng.choice(["a", "b", "b/c", "none"])
        operation = rng.choice(["read", "write", "write_once", "names", "read_many", "delete"])
        arguments: dict[str, tuple[Any, ...]] = {
            "read": (path,), "write": (path, data), "write_once": (path, data), "names": (folder,),
            "read_many": (paths,), "delete": (rng.choice([path, folder]),),
        }  # fmt: skip
        store_results = []
        for store in stores:
            store_result = getattr(store, operation)(*arguments[operation])
            # In a store of files an emptied folder still exists; ignore it, since listing it finds nothing in either
            # store.
            store_results.append(
                [entry_name for entry_name in store_result if "." in entry_name]
                if operation == "names"
                else store_result
            )
        assert store_results[0] == store_results[1], (operation, arguments[operation])
