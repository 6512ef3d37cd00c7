"""Publishes and rollbacks under concurrent requests: nothing mixed, lost, or from the past."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from infra.local.service import ServiceProcess
from tests.http_connection import HttpConnection, get, scrape
from tests.integration.nights import (
    DATA_UNTIL,
    NEXT,
    PATIENT_ENVIRON,
    build_verified,
    environment,
    histories,
    prepare,
    publish,
    publish_night,
    roll_back,
    top_lists,
)

SEED = 4_242
BATCH = 8


@dataclass
class Callers:
    """What concurrent callers saw, held against the page files of every generation."""

    expected: Mapping[str, Mapping[str, tuple[str, ...]]]
    users: list[str]
    items: list[str]
    rng: np.random.Generator
    sources: Counter[str] = field(default_factory=Counter)
    generations: Counter[str] = field(default_factory=Counter)
    forbidden_generations: set[str] = field(default_factory=set)
    answered_requests: int = 0
    entities: int = 0
    wrong: list[str] = field(default_factory=list)
    _progress: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def send_request(self, connection: HttpConnection, number: int) -> None:
        """One request: mostly a batch of known users, now and then a stranger with a history."""
        forbidden_generations = set(self.forbidden_generations)
        history = [str(item_id) for item_id in self.rng.choice(self.items, 5)]
        if number % 10 == 0:
            entities: list[dict[str, Any]] = [{"id": f"new-{number % 50}", "history": history}]
        else:
            entities = [{"id": str(user_id)} for user_id in self.rng.choice(self.users, BATCH, replace=False)]
        body = orjson.dumps({"entities": entities, "k": 20})
        status, raw = await connection.request("POST", "/v1/lookup/user_topk", body)
        async with self._progress:
            self.answered_requests += 1
            self._progress.notify_all()
        if status != 200:
            self.wrong.append(f"{status} {raw[:200]!r}")
            return
        answers = orjson.loads(raw)["answers"]
        self.entities += len(entities)
        answering_generations = {answer["generation"] for answer in answers if answer["source"] != "previous"}
        if len(answering_generations) > 1 or len(answers) != len(entities):
            self.wrong.append(f"{len(answers)} answers from {answering_generations}")
        for entity, answer in zip(entities, answers, strict=False):
            self._judge(entity, answer, forbidden_generations)

    async def reach(self, request_count: int) -> None:
        """Wait until so many requests were answered."""
        async with self._progress:
            await self._progress.wait_for(lambda: self.answered_requests >= request_count)

    def _judge(self, entity: dict[str, Any], answer: dict[str, Any], forbidden_generations: set[str]) -> None:
        generation, items = answer["generation"], tuple(answer["items"])
        self.sources[answer["source"]] += 1
        self.generations[generation] += 1
        if generation in forbidden_generations:
            self.wrong.append(f"{entity['id']} answered from {generation}, which was rolled back")
        if "history" in entity:
            if set(entity["history"]).intersection(items):
                self.wrong.append(f"{entity['id']}: history came back")
        elif answer["source"] in ("live", "default"):
            self.wrong.append(f"{entity['id']}: {answer['source']}, {answer.get('reason')}")
        elif items != self.expected[generation].get(entity["id"], ())[:20]:
            self.wrong.append(f"{entity['id']}: not the list of {generation}")


def cuts(count: int) -> list[str]:
    """So many moments after the first night's, in order."""
    first, last = datetime.fromisoformat(DATA_UNTIL), datetime.fromisoformat(NEXT)
    return [
        (first + timedelta(seconds=(last - first).total_seconds() * step / count)).isoformat()
        for step in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("requests", "moves"), [(1_000, "PRPPR"), pytest.param(10_000, "PRPPRPPPRPRPPRPPRPPR", marks=pytest.mark.storm)]
)
async def test_swaps_and_rollbacks_under_traffic_mix_nothing_and_lose_nothing(
    tmp_path: Path, redis_url: str, requests: int, moves: str
) -> None:
    # given: one live generation, one verified generation for each publish to come, and a running service
    print(f"seed {SEED}")
    config = prepare(tmp_path / "night", redis_url, seed=SEED, users=300)
    live = publish_night(config, DATA_UNTIL)
    coming = [build_verified(config, cut, pinned=True) for cut in cuts(moves.count("P"))]
    users = sorted(histories(config))
    expected = {generation: top_lists(config, generation, users) for generation in (live, *coming)}
    assert all(
        previous_lists != two
        for previous_lists, two in itertools.pairwise(expected[generation] for generation in (live, *coming))
    )
    rng = np.random.default_rng(SEED)
    items = sorted({item for history in histories(config).values() for item in history})
    callers = Callers(expected, users, items, rng)
    service = ServiceProcess(tmp_path / "service.log", environment(config, **PATIENT_ENVIRON))
    with service:
        finished = asyncio.Event()

        async def caller(numbers: "itertools.count[int]") -> None:
            async with HttpConnection(service.url) as connection:
                while not finished.is_set():
                    await callers.send_request(connection, next(numbers))

        # when: moves of the pointer happen at moments spread over the requests
        numbers = itertools.count()
        callings = [asyncio.create_task(caller(numbers)) for _ in range(8)]
        followed = []
        queue = iter(coming)
        for number, move in enumerate(moves, start=1):
            if move == "P":
                previous_live, live = live, next(queue)
                await asyncio.to_thread(publish, config, live, verify_again=True)
            else:
                previous_live, live = live, await asyncio.to_thread(roll_back, config)
            followed.append(await follows(service.url, live))
            if move == "R":
                callers.forbidden_generations.add(previous_live)
            await callers.reach(requests * number // len(moves))
        finished.set()
        await asyncio.gather(*callings)
        counts = await scrape(service.url)

    # then
    assert all(followed)
    assert callers.wrong == []
    assert callers.answered_requests >= requests
    assert set(callers.generations) == {*expected}
    assert counts.disagreements(callers.sources, callers.entities) == []


async def follows(url: str, generation: str) -> bool:
    """Whether readers answer from `generation` within five seconds."""
    for _ in range(500):
        _, raw = await get(url, "/v1/generations")
        if orjson.loads(raw)["live"]["generation"] == generation:
            return True
        await asyncio.sleep(0.01)
    return False
