"""Callers that send requests to a running service all the time, and compare every answer with the expected one."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np
import orjson

from tests.http_connection import HttpConnection
from tests.polling import poll_until

BATCH, K = 8, 10
PAUSE_S = 0.01
STORED_SOURCES = frozenset({"l1", "l2"})
SLOWEST_S = 5.0


class Watch:
    """Two callers in the background; `expected` has each generation's list of each user.

    Known users get their stored list, whole batches one generation, and no caller goes back to an earlier move.
    """

    def __init__(self, url: str, users: Sequence[str], items: Sequence[str], *, seed: int) -> None:
        self.expected: dict[str, Mapping[str, tuple[str, ...]]] = {}
        self.canaries: set[str] = set()
        """Generations that are tried out: they answer beside the live one, and in no order."""
        self.sources: Counter[str] = Counter()
        self.answers = 0
        self.wrong: list[str] = []
        self._url, self._users, self._items = url, list(users), list(items)
        self._generations_by_caller: list[list[str]] = [[], []]
        self._rng = np.random.default_rng(seed)
        self._allowed_sources = STORED_SOURCES
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask_all()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.beat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(60.0)

    @contextmanager
    def pages_lost(self) -> Iterator[None]:
        """Within the block pages are missing, so answers may come from lower rungs of the ladder."""
        self._allowed_sources = STORED_SOURCES | {"previous", "default"}
        yield
        self.beat(2 * len(self._generations_by_caller))  # what was asked meanwhile is answered
        self._allowed_sources = STORED_SOURCES

    def beat(self, answers: int = 2) -> None:
        """Raise AssertionError unless more answers come and all so far are right."""
        goal = self.answers + answers
        came = poll_until(lambda: bool(self.wrong) or self.answers >= goal, 60.0)
        assert not self.wrong, "\n".join(self.wrong[:10])
        assert came, "callers get no answers"

    @property
    def seen_last(self) -> set[str]:
        """The generations from which callers were last answered."""
        return {generations[-1] for generations in self._generations_by_caller if generations}

    def check_order(self, moves: Sequence[str]) -> None:
        """Raise AssertionError unless every caller saw the generations in the order of `moves`."""
        for generations in self._generations_by_caller:
            remaining_moves = iter(moves)
            generation_order = list(generations)
            assert all(generation in remaining_moves for generation in generation_order), (
                f"{generation_order} is not in the order {moves}"
            )

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._run_caller(number) for number in range(len(self._generations_by_caller))))

    async def _run_caller(self, number: int) -> None:
        async with HttpConnection(self._url, SLOWEST_S) as connection:
            for request_number in range(1 << 60):
                if self._over.is_set():
                    return
                try:
                    await self._ask_once(connection, number, request_number)
                except Exception as error:
                    self.wrong.append(f"no answer: {error!r}")
                await asyncio.sleep(PAUSE_S)

    async def _ask_once(self, connection: HttpConnection, number: int, request_number: int) -> None:
        allowed_sources = self._allowed_sources
        history = [str(item_id) for item_id in self._rng.choice(self._items, 5, replace=False)]
        if request_number % 16 == 15:
            entities: list[dict[str, Any]] = [{"id": f"new-{request_number % 64}", "history": history}]
        else:
            user_ids = self._rng.choice(self._users, BATCH, replace=False)
            entities = [{"id": str(user_id)} for user_id in user_ids]
        body = orjson.dumps({"entities": entities, "k": K})
        status, raw = await connection.request("POST", "/v1/lookup/user_topk", body)
        if status != 200:
            self.wrong.append(f"{status} {raw[:200]!r}")
            return
        answers = orjson.loads(raw)["answers"]
        answering_generations = {answer["generation"] for answer in answers if answer["source"] != "previous"}
        if len(answers) != len(entities) or len(answering_generations) > 1:
            self.wrong.append(f"{len(answers)} of {len(entities)} answers, from {answering_generations}")
        for generation in answering_generations - self.canaries:
            if self._generations_by_caller[number][-1:] != [generation]:
                self._generations_by_caller[number].append(generation)
        for entity, answer in zip(entities, answers, strict=False):
            self._judge(entity, answer, allowed_sources | self._allowed_sources)
        self.answers += 1

    def _judge(self, entity: dict[str, Any], answer: dict[str, Any], allowed_sources: frozenset[str]) -> None:
        source, items = answer["source"], tuple(answer["items"])
        self.sources[source] += 1
        if "history" in entity:
            if set(entity["history"]).intersection(items):
                self.wrong.append(f"{entity['id']}: history came back")
        elif source not in allowed_sources:
            self.wrong.append(f"{entity['id']}: {source}, {answer.get('reason')}")
        elif source != "default":
            expected = self.expected[answer["generation"]].get(entity["id"], ())[:K]
            if items != expected:
                self.wrong.append(f"{entity['id']}: not the list of {answer['generation']}")
