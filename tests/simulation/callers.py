"""Calls over HTTP and the judgement of their answers, by the answer alone and by what has happened."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from cache.store.blocklist import Blocklist
from serving.http.routes import Service
from tests.simulation import nights
from tests.simulation.nights import COUNT, ITEMS, LIVE, TABLE, WIDTH, generation_of, number_of
from tests.simulation.virtual_loop import Host

JSON = b"content-type: application/json\r\n"
STORED_SOURCES = ("l1", "l2")


@dataclass(frozen=True, slots=True)
class Question:
    """The requested entity and its input."""

    id: str
    history: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One request to `replica`."""

    replica: int
    questions: tuple[Question, ...]
    deadline_ms: int = 600
    k: int | None = None
    exclude: tuple[str, ...] = ()
    fresh: bool = False
    generation: str | None = None
    is_post: bool = False
    leaves_after_s: float | None = None

    def request(self) -> bytes:
        """The bytes of the request."""
        deadline = b"x-deadline-ms: %d\r\n" % self.deadline_ms
        if not self.is_post:
            query = "" if self.k is None else f"?k={self.k}"
            path = f"/v1/lookup/{TABLE}/{self.questions[0].id}{query}".encode()
            return b"GET %b HTTP/1.1\r\nhost: larder\r\n%b\r\n" % (path, deadline)
        entities = [
            {"id": question.id, **({"history": question.history} if question.history else {})}
            for question in self.questions
        ]
        has_no_history = all(not question.history for question in self.questions)
        body: dict[str, Any] = {
            "entities": [question.id for question in self.questions] if has_no_history else entities
        }
        if self.k is not None:
            body["k"] = self.k
        if self.exclude:
            body["exclude"] = self.exclude
        if self.fresh:
            body["fresh"] = True
        if self.generation is not None:
            body["generation"] = self.generation
        raw = orjson.dumps(body)
        return b"POST /v1/lookup/%b HTTP/1.1\r\nhost: larder\r\n%bcontent-length: %d\r\n%b\r\n%b" % (
            TABLE.encode(),
            JSON,
            len(raw),
            deadline,
            raw,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """A response; status 0: the connection broke before it."""

    status: int
    body: Any


class Client(asyncio.Protocol):
    """A connection for one call at a time."""

    def __init__(self) -> None:
        self.is_lost = False
        self.answers = 0
        self._received = b""
        self._waiting: asyncio.Future[Reply] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that the connection may be used."""
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait for a response."""
        self.is_lost = True
        self._resolve(Reply(0, None))

    def data_received(self, data: bytes) -> None:
        """Collect a response until it is complete."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        lines = head.split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line.lower().startswith(b"content-length"))
        if len(body) >= length:
            assert len(body) == length, "more was answered than asked"
            self._received = b""
            self.answers += 1
            self._resolve(Reply(int(lines[0].split()[1]), orjson.loads(body)))

    async def send_request(self, request: bytes) -> Reply:
        """Send the request and wait for the response."""
        self._waiting = asyncio.get_running_loop().create_future()
        if self.is_lost:
            return Reply(0, None)
        self._transport.write(request)
        return await self._waiting

    def leave(self) -> None:
        """Close the connection."""
        self._transport.abort()

    def _resolve(self, reply: Reply) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(reply)


class ServedState(NamedTuple):
    """The generations that a replica served from a namespace at some moment."""

    epoch: int
    live: str
    blocklist: Blocklist


@dataclass(frozen=True, slots=True)
class CallContext:
    """The state known when a call began."""

    call: Call
    at: float
    host: Host
    service: Service | None
    served_by_namespace: Mapping[str, ServedState]
    """By namespace that the replica answered from."""
    stalled_s: float
    redis_away_s: float
    loaded: frozenset[str]
    """Generations whose pages were in Redis."""

    @property
    def blocklist(self) -> Blocklist:
        """Blocklist of the service's own namespace."""
        return (
            self.served_by_namespace[nights.OWN_NAMESPACE].blocklist
            if nights.OWN_NAMESPACE in self.served_by_namespace
            else Blocklist()
        )


class Wrong(AssertionError):
    """An answer that no sequence of events allows."""


def judge(
    call: Call, question: Question, answer: Any, blocked: frozenset[str], sent_histories: Collection[tuple[str, ...]]
) -> None:
    """Raise Wrong unless the answer is one that its generation and source can give.

    `blocked`: items that the replica knew to be blocked when it was asked; `sent_histories`: histories that anybody
    sent with this id.
    """

    def demand(is_so: bool, complaint: str) -> None:
        if not is_so:
            raise Wrong(f"{complaint}: {question} of {call} got {answer}")

    generation, source = answer["generation"], answer["source"]
    number, k = number_of(generation), call.k or WIDTH
    items, scores = answer["items"], answer["scores"]
    demand(answer["id"] == question.id and answer["table"] == TABLE, "another's answer")
    demand(len(items) == len(scores) <= k, "items and scores")
    demand(not set(items) & {*question.history, *call.exclude}, "an item that was not wanted")
    demand(not set(items) & blocked, "a blocked item")
    offset = 100.0 * number
    if source == "default":
        demand(answer["producer"] == "defaults", "a default of another producer")
        ranks = nights.default_list()
        top = [round(offset + 10 + 1 - ranks.index(item) / (COUNT - 1), 2) for item in items]
        demand([round(score, 2) for score in scores] == top, "scores of another night's defaults")
        return
    if answer["producer"] == "live":
        demand(source != "previous", "another night's live answer")
        # A caller without input may get what was computed from another one's, if the id is the same and unknown to the
        # night.
        inputs = [question.history] if question.history else sorted(sent_histories)
        demand(bool(question.history) or not nights.knows(number, question.id), "not the night's")
        demand(any(_follows(input_history, items) for input_history in inputs), f"computed from none of {inputs}")
        demand(all(0 < score - offset - LIVE <= WIDTH for score in scores), "scores of another model")
    else:
        demand(answer["producer"] == "batch", "of nobody")
        demand(nights.knows(number, question.id), "a record of somebody whom the night did not know")
        ranked = nights.night_list(number, question.id)
        demand(all(item in ranked for item in items), "items of another night")
        expected = [offset + WIDTH - ranked.index(item) for item in items]
        demand(scores == expected, "scores of another night")
    demand(generation == generation_of(number), "no generation")


def _follows(history: Sequence[str], items: Sequence[str]) -> bool:
    """Return whether the model can have computed the list from that history."""
    known_items = [item for item in history if item in ITEMS]
    if not known_items or set(items) & set(history):
        return False
    steps = [(ITEMS.index(item) - ITEMS.index(known_items[-1])) % COUNT for item in items]
    # Blocked or excluded items are missing, and later ones take their place.
    return steps == sorted(steps) and all(step <= 4 * WIDTH for step in steps)
