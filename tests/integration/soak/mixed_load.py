"""Mixed requests in open loop for hours, each answer judged: hits, live, unknown users, filters, batches, events."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import orjson

from cache.tiers.reads import MissReason
from serving.requests.answers import STORED_SOURCES, Source
from tests.http_connection import HttpConnection
from tests.integration.ordeal import Lists

CONNECTIONS: Final = 32
BATCH: Final = 50
K: Final = 10
SHARE_BY_KIND: Final = {
    "single": 0.52, "batch": 0.06, "live": 0.10, "fresh": 0.03, "stranger": 0.08, "filtered": 0.08,
    "tables": 0.05, "events": 0.08,
}  # fmt: skip
"""Share of each kind of request."""
UNKNOWN: Final = ("live", "stranger")
"""Kinds of request that name nobody whom the night knows."""
DEFAULTED_MAX: Final = 0.05
"""Share of answers about what the night knows that may be `default`: none on a quiet machine."""


@dataclass
class MixedLoad:
    """Requests of all kinds at a rate, and the faults of their answers.

    `lists`: of each generation, from its page files; users are drawn by Zipf 1.0.
    """

    users: list[str]
    category: Mapping[str, str]
    rng: np.random.Generator
    lists: Lists
    newest_us: int = 0
    """Time of the next event, before the cut of the next night."""
    requests: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    known_entity_sources: Counter[str] = field(default_factory=Counter)
    """Sources of answers about what the night knows."""
    generations: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _event_count: int = 0

    def __post_init__(self) -> None:
        weights = np.cumsum(1 / np.arange(1, len(self.users) + 1))
        self._cumulated = weights / weights[-1]
        self._items = sorted(self.category)
        self._kinds = list(SHARE_BY_KIND)
        cumulated_shares = np.cumsum(list(SHARE_BY_KIND.values()))
        self._cumulated_shares = cumulated_shares / cumulated_shares[-1]

    async def drive(self, url: str, *, rate: float, is_over: Callable[[], bool]) -> None:
        """Send Poisson arrivals at `rate` per second; latencies count from when each was due."""
        arrivals = self._arrivals(rate)

        async def call() -> None:
            async with HttpConnection(url) as connection:
                while not is_over():
                    due = next(arrivals)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    await self._send_request(connection)
                    self.seconds.append(time.monotonic() - due)

        await asyncio.gather(*(call() for _ in range(CONNECTIONS)))

    def missing(self) -> list[str]:
        """Return what did not happen: a kind that was not requested, a source that never answered."""
        complaints = [f"no request of kind {kind}" for kind in SHARE_BY_KIND if not self.kinds[kind]]
        complaints += [
            f"no answer from {source}" for source in (*STORED_SOURCES, Source.LIVE) if not self.sources[source]
        ]
        defaulted, answers = (self.known_entity_sources[Source.DEFAULT], self.known_entity_sources.total())
        if defaulted > DEFAULTED_MAX * answers:
            complaints.append(f"{defaulted} of {answers} answers about what the night knows are `default`")
        return complaints

    def _arrivals(self, rate: float) -> Iterator[float]:
        due = time.monotonic()
        for _ in itertools.count():
            due += float(self.rng.exponential(1 / rate))
            yield due

    async def _send_request(self, connection: HttpConnection) -> None:
        kind = self._kinds[int(np.searchsorted(self._cumulated_shares, self.rng.random()))]
        path, body = getattr(self, f"_{kind}")()
        try:
            method, raw = ("POST", orjson.dumps(body)) if body else ("GET", b"")
            status, response_body = await connection.request(method, path, raw)
        except (OSError, EOFError, TimeoutError) as error:
            self.wrong.append(f"{kind} {path}: {type(error).__name__} {error}")
            return
        finally:
            self.requests += 1
            self.kinds[kind] += 1
        if status != (202 if kind == "events" else 200):
            self.wrong.append(f"{kind} {path}: {status} {response_body[:300]!r}")
        elif kind == "events":
            self._judge_events(orjson.loads(response_body))
        else:
            self.judge(kind, body, orjson.loads(response_body))

    def _judge_events(self, acknowledgement: Mapping[str, Any]) -> None:
        if acknowledgement["accepted"] != 1:
            self.wrong.append(f"events: {acknowledgement}")

    def judge(self, kind: str, body: Mapping[str, Any], response: Mapping[str, Any]) -> None:
        """Count the outcome of a lookup, and note its faults."""
        answers = response["answers"] if body else [response]
        # All answers of a batch are of one generation, also during a flip; only an answer marked `previous` is of
        # another.
        answering_generations = {answer["generation"] for answer in answers if answer["source"] != Source.PREVIOUS}
        if len(answering_generations) > 1:
            self.wrong.append(f"{kind}: an answer of {sorted(answering_generations)}")
        for answer in answers:
            self.sources[answer["source"]] += 1
            if kind not in UNKNOWN:
                self.known_entity_sources[answer["source"]] += 1
            self.generations[answer["generation"]] += 1
            if answer["generation"] not in self.lists:
                self.wrong.append(f"{kind} {answer['id']}: {answer['generation']} is no generation")
            elif answer["source"] not in STORED_SOURCES and not answer.get("reason"):
                self.wrong.append(f"{kind} {answer['id']}: {answer['source']} without a reason")
            elif answer.get("reason") == MissReason.INTERNAL_ERROR:
                self.wrong.append(f"{kind} {answer['id']}: {answer['source']} after an internal error")
            elif answer["table"] == "user_topk":
                self._judge_items(kind, body, answer)

    def _judge_items(self, kind: str, body: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        items = tuple(answer["items"])
        if answer["source"] in STORED_SOURCES and answer.get("producer") != "batch" and not answer.get("events"):
            self.wrong.append(f"{kind} {answer['id']}: {answer['source']} by {answer.get('producer')}")
        elif kind == "filtered":
            filtered_category = body["filter"]["=="][1]
            if any(self.category[item] != filtered_category for item in items):
                self.wrong.append(f"filtered {answer['id']}: not {filtered_category} alone")
        elif history := next((entity.get("history") for entity in body.get("entities", ())), None):
            if set(history).intersection(items):
                self.wrong.append(f"{kind} {answer['id']}: history came back")
        elif answer.get("producer") == "batch" and not answer.get("events"):
            # With newer events the items are the rest of the list, or a computed list.
            expected = self.lists[answer["generation"]].get(answer["id"], ())
            if items != expected[:K]:
                self.wrong.append(f"{kind} {answer['id']}: not the list of {answer['generation']}")

    def _user(self) -> str:
        return self.users[int(np.searchsorted(self._cumulated, self.rng.random()))]

    def _history(self) -> list[str]:
        return [str(item_id) for item_id in self.rng.choice(self._items, 6, replace=False)]

    def _single(self) -> tuple[str, dict[str, Any]]:
        return f"/v1/lookup/user_topk/{quote(self._user(), safe='')}?k={K}", {}

    def _batch(self) -> tuple[str, dict[str, Any]]:
        users = dict.fromkeys(self._user() for _ in range(BATCH))
        return "/v1/lookup/user_topk", {"entities": [{"id": user_id} for user_id in users], "k": K}

    def _live(self) -> tuple[str, dict[str, Any]]:
        entity = {"id": f"new-{self.rng.integers(1 << 40)}", "history": self._history()}
        return "/v1/lookup/user_topk", {"entities": [entity], "k": K}

    def _fresh(self) -> tuple[str, dict[str, Any]]:
        entity = {"id": self._user(), "history": self._history()}
        return "/v1/lookup/user_topk", {"entities": [entity], "k": K, "fresh": True}

    def _stranger(self) -> tuple[str, dict[str, Any]]:
        return f"/v1/lookup/user_topk/nobody-{self.rng.integers(1 << 40)}?k={K}", {}

    def _filtered(self) -> tuple[str, dict[str, Any]]:
        category = self.category[self._items[int(self.rng.integers(len(self._items)))]]
        filter_ = {"==": ["category", category]}
        return "/v1/lookup/user_topk", {
            "entities": [{"id": self._user()}], "k": K, "filter": filter_,
        }  # fmt: skip

    def _tables(self) -> tuple[str, dict[str, Any]]:
        user, item = self._user(), self._items[int(self.rng.integers(len(self._items)))]
        entities = [
            {"table": "user_vector", "id": user}, {"table": "user_affinity", "id": user},
            {"table": "item_similar", "id": item}, {"table": "item_vector", "id": item},
        ]  # fmt: skip
        return "/v1/lookup", {"entities": entities, "k": K}

    def _events(self) -> tuple[str, dict[str, Any]]:
        self._event_count += 1
        self.newest_us += 1
        item = self._items[int(self.rng.integers(len(self._items)))]
        # Take a user of the long tail, so that the users requested most still get the night's list.
        user = self.users[int(self.rng.integers(len(self.users) // 2, len(self.users)))]
        event = {"id": f"soak-{self._event_count}", "user": user, "item": item, "time": self.newest_us / 1e6}
        return "/v1/events", {"events": [event]}
