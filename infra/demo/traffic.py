"""A skewed stream of requests, replayed against the running service, each answer judged."""

import asyncio
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote

import numpy as np
import orjson

from infra.demo.checks import Judge, Question
from infra.demo.dataset import Dataset
from infra.demo.http import HttpConnection
from serving.requests.answers import Source

TOPK = "user_topk"
KINDS = {"known_user": 0.68, "batch": 0.05, "exclude": 0.06, "fresh": 0.02, "similar": 0.03,
         "tables": 0.02, "stranger": 0.05, "newcomer": 0.09}  # fmt: skip
"""Share of each kind of request."""


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """HTTP request and its question."""

    kind: str
    method: str
    path: str
    body: bytes
    questions: tuple[Question, ...]


class Stream:
    """Endless stream of requests; users are requested by Zipf's law (1 / rank)."""

    def __init__(self, dataset: Dataset, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._rng = rng
        self._users = rng.permutation(np.array(sorted(dataset.histories), object))
        self._items = np.array(
            sorted({item for history in dataset.histories.values() for item in history}), object
        )
        self._histories = dataset.histories
        self._newcomers = sorted(dataset.newcomers.items())
        self._features = dataset.profiles.users if dataset.profiles is not None else {}
        weights = 1.0 / np.arange(1, len(self._users) + 1)
        self._cumulated = np.cumsum(weights / weights.sum())
        self._kinds = list(KINDS)
        self._cumulative_kind_shares = np.cumsum(list(KINDS.values()))
        self._cumulative_kind_shares /= self._cumulative_kind_shares[-1]

    def __iter__(self) -> Iterator[TrafficRequest]:
        while True:
            yield getattr(
                self,
                f"_{self._kinds[int(np.searchsorted(self._cumulative_kind_shares, self._rng.random()))]}",
            )()

    def _user(self) -> str:
        position = int(np.searchsorted(self._cumulated, self._rng.random()))
        return str(self._users[min(position, len(self._users) - 1)])

    def _some_items(self, count: int) -> list[str]:
        return [str(item) for item in self._items[self._rng.integers(len(self._items), size=count)]]

    def _known_user(self) -> TrafficRequest:
        return _get("known_user", Question(TOPK, self._user(), int(self._rng.choice((10, 20, 50)))))

    def _batch(self) -> TrafficRequest:
        users = dict.fromkeys(self._user() for _ in range(20))
        return _post("batch", [(Question(TOPK, user, 20), {}) for user in users], k=20)

    def _exclude(self) -> TrafficRequest:
        user, excluded_items = self._user(), self._some_items(30)
        question = Question(TOPK, user, 20, frozenset(excluded_items))
        return _post("exclude", [(question, {})], k=20, exclude=excluded_items)

    def _fresh(self) -> TrafficRequest:
        user = self._user()
        history = [*self._histories[user][-30:], *self._some_items(1)]
        question = Question(TOPK, user, 20, frozenset(history))
        return _post("fresh", [(question, self._input(user, history))], k=20, fresh=True)

    def _similar(self) -> TrafficRequest:
        return _get("similar", Question("item_similar", self._some_items(1)[0], 10))

    def _tables(self) -> TrafficRequest:
        user, item = self._user(), self._some_items(1)[0]
        questions = [
            Question(TOPK, user), Question("user_vector", user), Question("user_affinity", user),
            Question("item_vector", item),
        ]  # fmt: skip
        return _post(
            "tables", [(question, {"table": question.table}) for question in questions], table=None
        )

    def _stranger(self) -> TrafficRequest:
        return _get("stranger", Question(TOPK, f"nobody-{self._rng.integers(1 << 40)}", 20))

    def _newcomer(self) -> TrafficRequest:
        user, history = self._newcomers[int(len(self._newcomers) * self._rng.random() ** 2)]
        # Some come back having done one thing more: another input, so another answer.
        sent_history = list(history[: max(1, len(history) - int(self._rng.integers(3)))])
        question = Question(TOPK, user, 20, frozenset(sent_history))
        return _post("newcomer", [(question, self._input(user, sent_history))], k=20)

    def _input(self, user: str, history: list[str]) -> dict[str, Any]:
        """Everything to compute from; a model that takes features wants them all."""
        features = self._features.get(user)
        return {"history": history, **({"features": features} if features else {})}


def _get(kind: str, question: Question) -> TrafficRequest:
    path = f"/v1/lookup/{question.table}/{quote(str(question.id), safe='')}?k={question.k}"
    return TrafficRequest(kind, "GET", path, b"", (question,))


def _post(
    kind: str,
    questions_with_fields: Sequence[tuple[Question, dict[str, Any]]],
    *,
    table: str | None = TOPK,
    **options: Any,
) -> TrafficRequest:
    entities = [{"id": question.id, **more} for question, more in questions_with_fields]
    body = orjson.dumps({"entities": entities, **options})
    path = "/v1/lookup" if table is None else f"/v1/lookup/{table}"
    return TrafficRequest(
        kind, "POST", path, body, tuple(question for question, _ in questions_with_fields)
    )


@dataclass(slots=True)
class Latencies:
    """Milliseconds of single lookups by source, and of requests with several entities as "batch"."""

    of: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def rows(self) -> list[tuple[str, int, float, float, float, float]]:
        """(source, requests, p50, p99, p99.9, max), in the ladder's order."""
        order = (*map(str, Source), "batch")
        latency_rows = []
        for name in order:
            if latencies_ms := self.of.get(name):
                p50, p99, p999 = np.percentile(latencies_ms, [50, 99, 99.9]).tolist()
                latency_rows.append((name, len(latencies_ms), p50, p99, p999, max(latencies_ms)))
        return latency_rows


async def replay(
    url: str,
    stream: Stream,
    judge: Judge,
    *,
    requests: int | None,
    concurrency: int = 16,
    rate: float | None = None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda _count: None,
) -> Latencies:
    """Send `requests` (None: until `stop`), at most `rate` per second, over `concurrency` connections."""
    latencies, source = Latencies(), iter(stream)
    request_numbers = itertools.count()
    started_at = time.perf_counter()

    async def worker() -> None:
        async with HttpConnection(url) as connection:
            while not stop():
                number = next(request_numbers)
                if requests is not None and number >= requests:
                    return
                if rate is not None:
                    await asyncio.sleep(max(0.0, started_at + number / rate - time.perf_counter()))
                await _send_and_judge(connection, next(source), judge, latencies)
                progress(1)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return latencies


async def _send_and_judge(
    connection: HttpConnection, request: TrafficRequest, judge: Judge, latencies: Latencies
) -> None:
    rolled_back_generations = set(judge.rolled_back_generations)
    started_at = time.perf_counter()
    try:
        status, raw = await connection.request(request.method, request.path, request.body)
    except (OSError, TimeoutError, EOFError) as error:
        judge.complain(
            f"{request.method} {request.path}: no answer ({type(error).__name__}: {error})"
        )
        return
    took_ms = (time.perf_counter() - started_at) * 1000
    if status != 200:
        judge.complain(f"{request.method} {request.path}: {status} {raw[:300]!r}")
        return
    body = orjson.loads(raw)
    answers = [body] if request.method == "GET" else body["answers"]
    judge.request(request.questions, answers, rolled_back_generations)
    name = answers[0].get("source", "?") if len(request.questions) == 1 else "batch"
    latencies.of[name].append(took_ms)


class Background:
    """Traffic that goes on in a thread while something else happens, for as long as the `with` block lasts."""

    def __init__(self, url: str, stream: Stream, judge: Judge, *, rate: float) -> None:
        self.latencies = Latencies()
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._work = replay(
            url, stream, judge, requests=None, concurrency=8, rate=rate, stop=self._stop.is_set
        )
        # A daemon: Ctrl-C must not wait for an answer that never comes.
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def _run(self) -> None:
        try:
            self.latencies = asyncio.run(self._work)
        except BaseException as error:
            self._failed = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0 if kind is not None else 60.0)
        if kind is None and (self._failed is not None or self._thread.is_alive()):
            raise RuntimeError(f"the traffic ended badly: {self._failed}") from self._failed
