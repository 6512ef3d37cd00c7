"""Callers of a real service with faults of its Redis, by a proxy, and of its model."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson

from infra.local.service import ServiceProcess
from precompute.config.settings import NightConfig
from serving.requests.answers import STORED_SOURCES, Source
from tests.http_connection import HttpConnection, ServiceCounts, get
from tests.integration import troubled_service
from tests.integration.fault_proxy import Fault, FaultProxy
from tests.integration.nights import environment

DEADLINE_MS = 150
CALLERS = 12
PAUSE_S = 0.04
"""A caller's between two requests, on average: what is measured is the trouble, not a machine at its limit."""
BATCH = 8
K = 10
_TICK_S = 0.01

Lists = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Generation -> user -> what the night recommends, from the page files themselves."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault of Redis and of the model."""

    redis: Fault = "none"
    model: str = "ok"


TROUBLES = (
    Trouble(),
    Trouble("slow"),
    Trouble("flapping"),
    Trouble("silent"),
    Trouble("gone"),
    Trouble(model="slow 0.4"),
    Trouble(model="broken"),
    Trouble("gone", "broken"),
    Trouble("slow", "slow 0.4"),
    Trouble("flapping", "slow 0.4"),
)


@dataclass
class AnswerJudge:
    """Judges what callers got; `wrong` lists the faulty answers."""

    lists: Lists
    users: list[str]
    items: list[str]
    rng: np.random.Generator
    sources: Counter[str] = field(default_factory=Counter)
    entities: int = 0
    requests: int = 0
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def send_request(self, connection: HttpConnection) -> None:
        """Send one request: a known user, a batch of them, or unknown users with or without a history."""
        kind = self.rng.choice(("one", "batch", "live", "stranger"), p=(0.5, 0.2, 0.2, 0.1))
        entities: list[dict[str, Any]] = [{"id": f"new-{self.rng.integers(1 << 40)}"}]
        if kind in ("one", "batch"):
            user_ids = self.rng.choice(self.users, BATCH if kind == "batch" else 1, replace=False)
            entities = [{"id": str(user_id)} for user_id in user_ids]
        if kind == "live":
            entities[0]["history"] = [str(item_id) for item_id in self.rng.choice(self.items, 4)]
        started_at = time.perf_counter()
        if kind == "one":
            path = f"/v1/lookup/user_topk/{quote(entities[0]['id'], safe='')}?k={K}"
            status, raw = await connection.request("GET", path)
        else:
            body = orjson.dumps({"entities": entities, "k": K, "deadline_ms": DEADLINE_MS})
            status, raw = await connection.request("POST", "/v1/lookup/user_topk", body)
        self.seconds.append(time.perf_counter() - started_at)
        self.requests += 1
        self.entities += len(entities)
        if status != 200:
            self.wrong.append(f"{status} {raw[:200]!r}")
            return
        response_json = orjson.loads(raw)
        answers = [response_json] if kind == "one" else response_json["answers"]
        if [json_object["id"] for json_object in answers] != [json_object["id"] for json_object in entities]:
            self.wrong.append(f"{len(answers)} answers to {len(entities)} entities")
        for entity, answer in zip(entities, answers, strict=False):
            self._judge(entity, answer)

    def _judge(self, entity: dict[str, Any], answer: dict[str, Any]) -> None:
        source, items = answer["source"], tuple(answer["items"])
        self.sources[source] += 1
        if source not in set(Source) or answer["generation"] not in self.lists:
            self.wrong.append(f"{entity['id']}: {source} of {answer['generation']}")
        elif source not in STORED_SOURCES and not answer.get("reason"):
            self.wrong.append(f"{entity['id']}: {source} without a reason")
        elif set(entity.get("history", ())).intersection(items):
            self.wrong.append(f"{entity['id']}: history came back")
        elif answer.get("producer") == "batch" and items != self._list(entity, answer):
            self.wrong.append(f"{entity['id']}: not the list of {answer['generation']}")

    def _list(self, entity: dict[str, Any], answer: dict[str, Any]) -> tuple[str, ...]:
        return self.lists[answer["generation"]].get(entity["id"], ())[:K]


class Ordeal:
    """The service, its faults, and its callers."""

    def __init__(
        self, service: ServiceProcess, proxy: FaultProxy, model: Path, answer_judge: AnswerJudge, callers: int = CALLERS
    ) -> None:
        self.service = service
        self.proxy = proxy
        self.answer_judge = answer_judge
        self._model = model
        self._late: list[float] = []
        self._callers = callers

    async def endure(self, trouble: Trouble, *, seconds: float = 0.0, requests: int = 0) -> str:
        """Let callers send requests under a fault, for so many seconds and requests; return a line of figures."""
        self._model.write_text(trouble.model)
        self.proxy.set(trouble.redis)
        first, ends_at = self.answer_judge.requests, time.monotonic() + seconds
        self.answer_judge.seconds.clear()

        async def call() -> None:
            async with HttpConnection(self.service.url) as connection:
                while time.monotonic() < ends_at or self.answer_judge.requests - first < requests:
                    await self.answer_judge.send_request(connection)
                    await asyncio.sleep(self.answer_judge.rng.exponential(PAUSE_S))

        sources_before = Counter(self.answer_judge.sources)
        self._late.clear()
        witness = asyncio.create_task(self._witness())
        await asyncio.gather(*(call() for _ in range(self._callers)))
        witness.cancel()
        p50, p99 = np.quantile(self.answer_judge.seconds, (0.5, 0.99)) * 1000
        source_counts_text = ", ".join(
            f"{name} {n}" for name, n in (self.answer_judge.sources - sources_before).items()
        )
        return (
            f"Redis {trouble.redis:8} model {trouble.model:8} {len(self.answer_judge.seconds):6} requests, "
            f"p50 {p50:6.1f} ms, p99 {p99:6.1f} ms of {DEADLINE_MS} "
            f"(this machine's own {self.lateness_ms:.1f}): {source_counts_text}"
        )

    async def _witness(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._late.append(loop.time() - due)

    @property
    def lateness_ms(self) -> float:
        """p99 of how late the callers' timer was under the last fault: what the machine alone costs a request."""
        return float(np.quantile(self._late, 0.99)) * 1000 if self._late else 0.0

    @property
    def p99_ms(self) -> float:
        """p99 of the answers under the last fault."""
        return float(np.quantile(self.answer_judge.seconds, 0.99)) * 1000

    async def recovered(self) -> bool:
        """Return whether the service, without a fault, reaches Redis again, for the pointer and for records."""
        for _ in range(200):
            l2_count_before = self.answer_judge.sources["l2"]
            await self.endure(Trouble(), requests=1)
            status, raw = await get(self.service.url, "/readyz")
            is_reading = self.answer_judge.sources["l2"] > l2_count_before
            if status == 200 and orjson.loads(raw)["stale"] is None and is_reading:
                return True
            await asyncio.sleep(0.05)
        return False

    async def stale(self) -> bool:
        """Return whether the service, while ready, says that it may lag behind."""
        for _ in range(200):
            status, raw = await get(self.service.url, "/readyz")
            if status != 200 or orjson.loads(raw)["stale"] is not None:
                return status == 200
            await asyncio.sleep(0.05)
        return False

    async def counts(self) -> ServiceCounts:
        """Return the service's counters."""
        return ServiceCounts.read((await get(self.service.url, "/metrics"))[1].decode())

    async def read_resource_usage(self) -> dict[str, float]:
        """Return what the process holds: tasks, descriptors, threads and private memory in kB."""
        return troubled_service.held_of((await get(self.service.url, "/metrics"))[1].decode())


@contextlib.asynccontextmanager
async def ordeal(config: NightConfig, folder: Path, answer_judge: AnswerJudge) -> AsyncIterator[Ordeal]:
    """Run a service with a small L1, so that most requests need Redis."""
    model = folder / "model"
    model.write_text("ok")
    async with FaultProxy(str(config.redis_url)) as proxy:
        environ = environment(
            config,
            REDIS_URL=proxy.url,
            LARDER_DEADLINE_MS=str(DEADLINE_MS),
            LARDER_L2_DEADLINE_MS="75",
            LARDER_L1_BYTES="16384",
            LARDER_SKETCH_S="0.5",
            LARDER_OVERLAY_TTL_S="5",
            **{troubled_service.FAULT_FILE: str(model)},
        )
        service = ServiceProcess(folder / "log", environ, module_name=troubled_service.__name__)
        await asyncio.to_thread(service.__enter__)
        try:
            yield Ordeal(service, proxy, model, answer_judge)
        finally:
            await asyncio.to_thread(service.__exit__, None, None, None)
