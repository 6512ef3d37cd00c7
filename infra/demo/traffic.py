"""A skewed stream of requests, replayed against the running service, each answer judged."""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from infra.demo.checks import POLICY, Judge, Question
from infra.demo.dataset import Dataset
from serving.client import Answer, AsyncClient, Options, Unanswered

TOPK = "user_topk"
KINDS = {"known_user": 0.68, "batch": 0.05, "exclude": 0.06, "fresh": 0.02, "similar": 0.03,
         "tables": 0.02, "stranger": 0.05, "newcomer": 0.09}  # fmt: skip
"""Share of each kind of request."""


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """Request with its questions."""

    kind: str
    questions: tuple[Question, ...]
    options: Options

    async def send(self, larder: AsyncClient) -> list[Answer]:
        """Ask the service; raise Unanswered."""
        if self.kind in ("known_user", "similar", "stranger"):
            (question,) = self.questions
            return [await larder.lookup(question.table, question.id, self.options)]
        return await larder.lookup_tables([asked.entity for asked in self.questions], self.options)


class Stream:
    """Endless stream of requests; users are requested by Zipf's law (1 / rank)."""

    def __init__(self, dataset: Dataset, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._users = self._rng.permutation(np.array(sorted(dataset.histories), object))
        items = set(itertools.chain(*dataset.histories.values()))
        self._items = np.array(sorted(items), object)
        self._histories = dataset.histories
        self._newcomers = sorted(dataset.newcomers.items())
        self._features = dataset.profiles.users if dataset.profiles is not None else {}
        weights = 1.0 / np.arange(1, len(self._users) + 1)
        self._user_shares = np.cumsum(weights) / weights.sum()
        self._kind_shares = np.cumsum(list(KINDS.values())) / sum(KINDS.values())

    def __iter__(self) -> Iterator[TrafficRequest]:
        kinds = list(KINDS)
        while True:
            kind = kinds[int(np.searchsorted(self._kind_shares, self._rng.random()))]
            questions, options = self._draw(kind)
            yield TrafficRequest(kind, tuple(questions), replace(options, k=questions[0].k))

    def _draw(self, kind: str) -> tuple[list[Question], Options]:
        if kind == "similar":
            return [Question("item_similar", self._some_items(1)[0], 10)], Options()
        if kind == "stranger":
            return [Question(TOPK, f"nobody-{self._rng.integers(1 << 40)}", 20)], Options()
        if kind == "newcomer":
            user, items = self._newcomers[int(len(self._newcomers) * self._rng.random() ** 2)]
            # Some come back having done one thing more: another input, so another answer.
            known = items[: max(1, len(items) - int(self._rng.integers(3)))]
            return [self._question_with_input(user, known)], Options()
        user = self._user()
        match kind:
            case "known_user":
                return [Question(TOPK, user, int(self._rng.choice((10, 20, 50))))], Options()
            case "batch":
                users = dict.fromkeys([user, *(self._user() for _ in range(19))])
                return [Question(TOPK, user, 20) for user in users], Options()
            case "exclude":
                excluded_items = self._some_items(30)
                question = Question(TOPK, user, 20, frozenset(excluded_items))
                return [question], Options(exclude=excluded_items)
            case "fresh":
                history = [*self._histories[user][-30:], *self._some_items(1)]
                return [self._question_with_input(user, history)], Options(fresh=True)
        tables = [Question(table, user) for table in (TOPK, "user_vector", "user_affinity")]
        return [*tables, Question("item_vector", self._some_items(1)[0])], Options()

    def _user(self) -> str:
        position = int(np.searchsorted(self._user_shares, self._rng.random()))
        return str(self._users[min(position, len(self._users) - 1)])

    def _some_items(self, count: int) -> list[str]:
        return [str(item) for item in self._items[self._rng.integers(len(self._items), size=count)]]

    def _question_with_input(self, user: str, history: Sequence[str]) -> Question:
        """Question with everything to compute from; a model that takes features wants them all."""
        items, features = tuple(history), self._features.get(user)
        return Question(TOPK, user, 20, frozenset(items), items, features)


async def replay(
    url: str, requests: Iterable[TrafficRequest], judge: Judge, *, rate: float
) -> list[float]:
    """Send requests, at most `rate` per second, and judge the answers; return their milliseconds."""
    latencies_ms: list[float] = []
    numbered_requests = enumerate(requests)
    started_at = time.perf_counter()

    async def send_requests(larder: AsyncClient) -> None:
        for number, request in numbered_requests:
            await asyncio.sleep(max(0.0, started_at + number / rate - time.perf_counter()))
            rolled_back_generations = frozenset(judge.rolled_back_generations)
            sent_at = time.perf_counter()
            try:
                answers = await request.send(larder)
            except (Unanswered, ValueError) as error:
                judge.violations.append(f"{request.kind}: no answer: {error!r}")
                continue
            latencies_ms.append((time.perf_counter() - sent_at) * 1000)
            judge.request(request.questions, answers, rolled_back_generations)

    async with AsyncClient(url, policy=POLICY) as larder, asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(send_requests(larder))
    return latencies_ms


@contextmanager
def background(
    url: str, stream: Stream, judge: Judge, *, rate: float
) -> Iterator[Future[list[float]]]:
    """Replay requests in a thread while the block runs; the result is there, or raised, after it."""
    stop = threading.Event()
    requests = itertools.takewhile(lambda _request: not stop.is_set(), stream)
    with ThreadPoolExecutor(1, "traffic") as pool:
        traffic = pool.submit(asyncio.run, replay(url, requests, judge, rate=rate))
        try:
            yield traffic
        finally:
            stop.set()
    traffic.result()
