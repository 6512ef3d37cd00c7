"""A process that answers unknown users by live inference over a real Redis, controlled by lines on its input.

`ask USER ITEM` starts one request, `take N` prints the next N answers once they are there, and the
process' counts so far.
Every inference is noted in the list `<namespace>:loads` before it starts and waits for a turn from `<namespace>:go`.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

from redis.asyncio import Redis

from cache.format.redis_keys import Keyspace
from cache.l2.tier import RemoteConfig, RemoteTier
from cache.tiers.l1 import LocalTier, NegativeCache
from cache.tiers.tiered import TieredCache
from serving.engine.batch_inference import compute
from serving.engine.inference import LiveInferences
from serving.engine.ladder import Ladder
from serving.engine.leases import LeaseManager
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, MicroBatcher
from serving.generations.served_set import ServedGenerations
from tests.unit.serving.world import World, ask, entity, ids


@dataclass
class Gated:
    """A model that notes each inference and waits for permission to run it."""

    control: Redis
    namespace: str
    name: str

    async def infer(self, job: InferenceJob) -> ComputedRecord:
        """Wait for permission, then compute."""
        await self.control.rpush(f"{self.namespace}:loads", self.name)
        await self.control.blpop([f"{self.namespace}:go"], timeout=60)
        outcome = compute([job])[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def run(url: str, namespace: str, name: str, wait_ms: str) -> None:
    """Read commands until standard input ends."""
    # Let a blocking command wait as long as it says: redis-py's default time-out is 5 s.
    control = Redis.from_url(url, protocol=2, socket_timeout=None)
    remote = RemoteTier(RemoteConfig(url, deadline_s=5.0), Keyspace(namespace))
    tiers = TieredCache(LocalTier(1 << 20), NegativeCache(1_000, 5.0), remote)
    lead = LeaseManager(remote, tiers, remote.control.keyspace, lease_wait_s=float(wait_ms) / 1000, process_name=name)
    inferences = LiveInferences(
        cast(MicroBatcher, Gated(control, namespace, name)), tiers, overlay_ttl_s=60.0, outage_ttl_s=1.0, leases=lead
    )
    world = World()
    ladder = Ladder(tiers, inferences, world.metrics, l2_deadline_s=5.0)
    served = ServedGenerations(world.snapshot())
    await remote.control.execute("PING")
    answers: list[asyncio.Task[list[Any]]] = []
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *arguments = line.split()
        if command == "ask":
            lookup = ask(entity(arguments[0], history=ids(arguments[1])), deadline_s=120.0)
            answers.append(asyncio.create_task(ladder.lookup(served, lookup, time.monotonic())))
        else:
            awaited_tasks, answers = answers[: int(arguments[0])], answers[int(arguments[0]) :]
            first_answers = [(await task)[0] for task in awaited_tasks]
            sources_and_items = [[answer["source"], answer["items"]] for answer in first_answers]
            print(json.dumps({"answers": sources_and_items, **lead.counts.internal_counters()}), flush=True)


class Process:
    """A process of this module that runs until the block ends."""

    def __init__(self, url: str, namespace: str, name: str, wait_ms: float) -> None:
        self._arguments = (url, namespace, name, str(wait_ms))

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.integration.tiers.leading", *self._arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert await self._line() == b"ready\n"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            return await self._process.stdout.readline()

    def start_request(self, user: str, item: str = "i1") -> None:
        """Start a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"ask {user} {item}\n".encode())

    async def take_answers(self, count: int = 1) -> dict[str, Any]:
        """Return the oldest answers not yet taken, and the process' counts so far."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"take {count}\n".encode())
        reply: dict[str, Any] = json.loads(await self._line())
        return reply

    async def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        await self._process.wait()


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
