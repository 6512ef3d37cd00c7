"""Skewed stream of requests, which is replayed against the running service while every answer is judged."""

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

TOPK_TABLE = "user_topk"
SHARE_BY_REQUEST_KIND = {"known_user": 0.68, "batch": 0.05, "exclude": 0.06, "fresh": 0.02, "similar": 0.03,
         "tables": 0.02, "stranger": 0.05, "newcomer": 0.09}  # fmt: skip
"""Kind of request -> its share of all requests."""


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """Request of one kind, with its questions and options."""

    request_kind: str
    questions: tuple[Question, ...]
    options: Options

    async def send(self, larder: AsyncClient) -> list[Answer]:
        """Send the request and return the answers; raise Unanswered."""
        if self.request_kind in ("known_user", "similar", "stranger"):
            (question,) = self.questions
            return [await larder.lookup(question.table_name, question.entity_id, self.options)]
        return await larder.lookup_tables([asked.entity for asked in self.questions], self.options)


class RequestStream:
    """Endless stream of requests; users are requested by Zipf's law (1 / rank)."""

    def __init__(self, dataset: Dataset, seed: int = 0) -> None:
        self._random_generator = np.random.default_rng(seed)
        self._users_by_rank = self._random_generator.permutation(np.array(sorted(dataset.histories), object))
        items = set(itertools.chain(*dataset.histories.values()))
        self._items = np.array(sorted(items), object)
        self._histories = dataset.histories
        self._newcomers = sorted(dataset.newcomers.items())
        self._features_by_user = dataset.profiles.users if dataset.profiles is not None else {}
        rank_weights = 1.0 / np.arange(1, len(self._users_by_rank) + 1)
        self._cumulative_user_shares = np.cumsum(rank_weights) / rank_weights.sum()
        self._cumulative_kind_shares = np.cumsum(list(SHARE_BY_REQUEST_KIND.values()))

    def __iter__(self) -> Iterator[TrafficRequest]:
        request_kinds = list(SHARE_BY_REQUEST_KIND)
        while True:
            kind = request_kinds[
                int(np.searchsorted(self._cumulative_kind_shares[:-1], self._random_generator.random()))
            ]
            questions, options = self._draw_request(kind)
            yield TrafficRequest(kind, tuple(questions), replace(options, k=questions[0].k))

    def _draw_request(self, kind: str) -> tuple[list[Question], Options]:
        if kind == "similar":
            return [Question("item_similar", self._draw_items(1)[0], 10)], Options()
        if kind == "stranger":
            return [Question(TOPK_TABLE, f"nobody-{self._random_generator.integers(1 << 40)}", 20)], Options()
        if kind == "newcomer":
            user, items = self._newcomers[int(len(self._newcomers) * self._random_generator.random() ** 2)]
            # Some newcomers return with a longer history, so that their answer differs.
            known_items = items[: max(1, len(items) - int(self._random_generator.integers(3)))]
            return [self._question_with_input(user, known_items)], Options()
        user = self._draw_user()
        match kind:
            case "known_user":
                return [Question(TOPK_TABLE, user, int(self._random_generator.choice((10, 20, 50))))], Options()
            case "batch":
                users = dict.fromkeys([user, *(self._draw_user() for _ in range(19))])
                return [Question(TOPK_TABLE, user, 20) for user in users], Options()
            case "exclude":
                excluded_items = self._draw_items(30)
                return [Question(TOPK_TABLE, user, 20, frozenset(excluded_items))], Options(exclude=excluded_items)
            case "fresh":
                history = [*self._histories[user][-30:], *self._draw_items(1)]
                return [self._question_with_input(user, history)], Options(fresh=True)
        tables = [Question(table, user) for table in (TOPK_TABLE, "user_vector", "user_affinity")]
        return [*tables, Question("item_vector", self._draw_items(1)[0])], Options()

    def _draw_user(self) -> str:
        position = int(np.searchsorted(self._cumulative_user_shares, self._random_generator.random()))
        return str(self._users_by_rank[min(position, len(self._users_by_rank) - 1)])

    def _draw_items(self, item_count: int) -> list[str]:
        return [str(item) for item in self._items[self._random_generator.integers(len(self._items), size=item_count)]]

    def _question_with_input(self, user_id: str, history_items: Sequence[str]) -> Question:
        """Return a question with history and, if there are any, all features of the user."""
        items, features = tuple(history_items), self._features_by_user.get(user_id)
        return Question(TOPK_TABLE, user_id, 20, frozenset(items), items, features)


async def replay(
    service_url: str, requests: Iterable[TrafficRequest], judge: Judge, *, requests_per_s: float
) -> list[float]:
    """Send requests, at most `requests_per_s`, and judge the answers; return the latencies in milliseconds."""
    latencies_ms: list[float] = []
    numbered_requests = enumerate(requests)
    started_at = time.perf_counter()

    async def send_requests(larder: AsyncClient) -> None:
        for number, request in numbered_requests:
            await asyncio.sleep(max(0.0, started_at + number / requests_per_s - time.perf_counter()))
            rolled_back_generations = frozenset(judge.rolled_back_generations)
            sent_at = time.perf_counter()
            try:
                answers = await request.send(larder)
            except (Unanswered, ValueError) as error:
                judge.violations.append(f"{request.request_kind}: no answer: {error!r}")
                continue
            latencies_ms.append((time.perf_counter() - sent_at) * 1000)
            judge.request(request.questions, answers, rolled_back_generations)

    async with AsyncClient(service_url, policy=POLICY) as larder, asyncio.TaskGroup() as task_group:
        for _ in range(8):
            task_group.create_task(send_requests(larder))
    return latencies_ms


@contextmanager
def replay_in_background(
    service_url: str, request_stream: RequestStream, judge: Judge, *, requests_per_s: float
) -> Iterator[Future[list[float]]]:
    """Replay requests in a thread during the block; then the future has the latencies, or its error is raised."""
    stop_event = threading.Event()
    requests = itertools.takewhile(lambda _request: not stop_event.is_set(), request_stream)
    with ThreadPoolExecutor(1, "traffic") as pool:
        replay_future = pool.submit(asyncio.run, replay(service_url, requests, judge, requests_per_s=requests_per_s))
        try:
            yield replay_future
        finally:
            stop_event.set()
    replay_future.result()
