"""Services, their Redis of pages and their Redis of events, each killed at random points while events come."""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import orjson
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from infra.local.service import ServiceProcess
from precompute.config.settings import NightConfig
from tests.http_connection import HttpConnection, get
from tests.integration.events import claiming_service
from tests.integration.events.durable_redis import DurableRedis, stream_of
from tests.integration.events.intakes import rejected
from tests.integration.nights import environment, histories

KINDS: Final = ("service", "events", "pages")
SETTINGS: Final = '[events]\nenabled = true\ndurability = "always"\nof_one = 1000000\n'
GAP_S: Final = 0.02
ENDED_S: Final = 30.0
"""Seconds after which work that was cancelled again and again counts as hanging."""
BATCH: Final = 5
ITEMS: Final = 10
"""Items that events are of: few, so that every list has some left."""
_UNREACHABLE = (OSError, EOFError, TimeoutError, RedisError)


class KilledService(ServiceProcess):
    """A service that is ended by SIGKILL."""

    @property
    def log_tail(self) -> str:
        """End of the service's log, for a message."""
        return "" if self._process is None else self._process.log_tail(60)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the service."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self.__exit__()


@dataclass(slots=True, eq=False)
class KilledProcesses:
    """Two services over a published night, and both Redis servers; `rng` decides what happens when."""

    config: NightConfig
    pages: DurableRedis
    events: DurableRedis
    services: list[KilledService]
    rng: random.Random
    users: list[str] = field(init=False)
    items: list[str] = field(init=False)
    sent_counts: Counter[str] = field(default_factory=Counter)
    """Events that each user may have: those that were sent, whatever became of them."""
    acknowledged: set[str] = field(default_factory=set)
    """Ids of events that were accepted, or taken by the inbox."""
    killed: Counter[str] = field(default_factory=Counter)
    lookup_count: int = 0
    _number: int = 0

    def __post_init__(self) -> None:
        history_by_user = histories(self.config)
        self.users = sorted(history_by_user)[:40]
        self.items = sorted({item for history in history_by_user.values() for item in history})[:ITEMS]

    async def ordeal(self, kills: int) -> None:
        """Kill a process so many times, while events come both ways and answers are checked."""
        work = (self._over_http(), self._over_http(), self._into_inbox(), self._look_up_users())
        tasks = [asyncio.create_task(coroutine) for coroutine in work]
        order = [KINDS[number % len(KINDS)] for number in range(kills)]
        self.rng.shuffle(order)
        for kind in order:
            pause_s, number = self.rng.uniform(0, 0.3), self.rng.randrange(len(self.services))
            print(f"{kind} {number} killed after {pause_s * 1e3:.1f} ms", flush=True)
            await asyncio.sleep(pause_s)
            await asyncio.to_thread(self._kill, kind, number)
            for task in tasks:
                if task.done():
                    task.result()
        give_up, pending = asyncio.get_running_loop().time() + ENDED_S, {*tasks}
        while pending:
            assert asyncio.get_running_loop().time() < give_up, f"{pending} do not end"
            for task in pending:
                task.cancel()  # again and again: a client library may lose one that meets its reply
            _, pending = await asyncio.wait(pending, timeout=0.1)
        for task in tasks:
            assert task.cancelled(), task.exception()

    def _kill(self, kind: str, number: int) -> None:
        self.killed[kind] += 1
        if kind == "service":
            self.services[number].kill()
            self.services[number].__enter__()
        else:
            server = self.events if kind == "events" else self.pages
            server.kill()
            server.start()

    def _event(self) -> dict[str, Any]:
        self._number += 1
        user = self.rng.choice(self.users)
        self.sent_counts[user] += 1
        return {"user": user, "item": self.rng.choice(self.items), "id": f"e-{self._number}"}

    async def _over_http(self) -> None:
        """Send batches to either service, each until it is accepted."""
        while True:
            batch = [self._event() for _ in range(BATCH)]
            body = orjson.dumps({"events": batch})
            while True:
                service = self.rng.choice(self.services)
                try:
                    async with HttpConnection(service.url) as connection:
                        status, raw = await connection.request("POST", "/v1/events", body)
                except _UNREACHABLE:
                    status, raw = 0, b""
                if status == 202:
                    break
                assert status in (0, 503), f"{raw!r}\n{service.log_tail}"
                await asyncio.sleep(GAP_S)
            receipt = orjson.loads(raw)
            assert receipt["accepted"] + receipt["repeated"] == BATCH and receipt["durability"] == "always"
            self.acknowledged.update(event["id"] for event in batch)
            await asyncio.sleep(GAP_S)

    async def _into_inbox(self) -> None:
        """Write entries to the inbox: with an id, again until one is accepted; without one, once."""
        inbox = self.config.keyspace().inbox
        client: Any = redis.asyncio.Redis(
            port=self.events.port, protocol=2, socket_timeout=5, retry=Retry(NoBackoff(), 0)
        )
        async with client:
            while True:
                event = self._event()
                has_id = self.rng.random() < 0.5
                if not has_id:
                    del event["id"]
                while True:
                    try:
                        entry = await client.xadd(inbox, event)
                    except _UNREACHABLE:
                        await asyncio.sleep(GAP_S)
                        if has_id:
                            continue
                        break  # it may be there, and nobody knows its id
                    self.acknowledged.add(event["id"] if has_id else entry.decode())
                    break
                await asyncio.sleep(GAP_S)

    async def _look_up_users(self) -> None:
        """Look up users: no answer counts more events than were sent."""
        while True:
            user = self.rng.choice(self.users)
            with contextlib.suppress(*_UNREACHABLE):
                status, answer = await self.answer(self.rng.choice(self.services), user)
                assert status == 200, answer
                assert answer.get("events", 0) <= self.sent_counts[user], answer
                self.lookup_count += 1
            await asyncio.sleep(GAP_S)

    async def answer(self, service: ServiceProcess, user: str) -> tuple[int, dict[str, Any]]:
        """Return (status, answer) of a user's list."""
        status, raw = await get(service.url, f"/v1/lookup/user_topk/{quote(user, safe='')}")
        return status, orjson.loads(raw)

    async def check(self, timeout_s: float) -> None:
        """Check that all acknowledged events are in the stream once, and that all services count them."""
        keyspace = self.config.keyspace()
        with self.events.client() as client:
            give_up = asyncio.get_running_loop().time() + timeout_s
            while inbox_length := client.xlen(keyspace.inbox):
                assert asyncio.get_running_loop().time() < give_up, f"{inbox_length} are in the inbox"
                await asyncio.sleep(0.05)
            stream_events = stream_of(client, keyspace)
            assert rejected(client, keyspace) == []
        ids = [event["id"] for event in stream_events]
        assert len(ids) == len(set(ids)), "an event counts twice"
        assert self.acknowledged <= set(ids), "an acknowledged event is lost"
        counts = Counter(event["user"] for event in stream_events)
        for service in self.services:
            for user in self.users:
                while (answer := (await self.answer(service, user))[1]).get("events", 0) != counts[user]:
                    assert asyncio.get_running_loop().time() < give_up, (answer, counts[user])
                    await asyncio.sleep(0.05)


@contextlib.contextmanager
def _services(config: NightConfig, folder: Path, events: DurableRedis) -> Iterator[list[KilledService]]:
    (folder / "larder.toml").write_text(SETTINGS)
    environ = environment(config, LARDER_CONFIG=str(folder / "larder.toml"), LARDER_EVENTS_URL=events.url)
    services = [
        KilledService(folder / f"service-{number}.log", environ, module_name=claiming_service.__name__)
        for number in range(2)
    ]
    with contextlib.ExitStack() as stack:
        for service in services:
            stack.callback(service.__exit__)
        with ThreadPoolExecutor(len(services)) as pool:
            list(pool.map(ServiceProcess.__enter__, services))
        yield services


@contextlib.asynccontextmanager
async def killed_processes(
    config: NightConfig, folder: Path, pages: DurableRedis, events: DurableRedis, seed: int
) -> AsyncIterator[KilledProcesses]:
    """Run all processes, and end them afterwards."""
    with _services(config, folder, events) as services:
        yield KilledProcesses(config, pages, events, services, random.Random(seed))
