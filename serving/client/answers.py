"""Results that a caller of the client gets: frozen, read from JSON, numbers as read-only float32 arrays. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from serving.client.errors import Garbled

Numbers = NDArray[np.float32]
_ARRAYS = frozenset({"scores", "vector", "values"})
_NO_NUMBERS = np.zeros(0, np.float32)
_NO_NUMBERS.setflags(write=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origin:
    """Origin of an answer: its table, source and generation, and reasons for anything unusual."""

    id: str | None
    table: str
    source: Literal["l1", "l2", "live", "previous", "default"]
    generation: str
    age_seconds: float
    """Seconds, now minus the generation's data_until."""
    published_at: str
    """Time of publication, RFC 3339, UTC."""
    producer: str | None = None
    reason: str | None = None
    """Reason why this is not a plain hit."""
    live: str | None = None
    """Reason why live did not answer although it was asked."""
    dropped_history: int = 0
    stale: str | None = None
    """Reason why the replica may lag behind."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Reads a result from JSON; fields of a newer service are left out. Raises Garbled."""
        known = cls.__dataclass_fields__
        try:
            sent: dict[str, Any] = {
                name: _value(name, value) for name, value in body.items() if name in known
            }
            return cls(**sent)
        except (TypeError, ValueError, AttributeError) as error:
            raise Garbled(f"this is no answer of the service: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer(Origin):
    """Answer for one entity; which of items with scores, vector and values is set depends on the table."""

    items: tuple[str, ...] | None = None
    scores: Numbers | None = None
    short: bool = False
    """True if fewer than k items remain."""
    vector: Numbers | None = None
    values: Numbers | None = None
    labels: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranking(Origin):
    """Candidates of one user in rank order, and those that could not be ranked."""

    items: tuple[str, ...] = ()
    scores: Numbers = field(default_factory=lambda: _NO_NUMBERS)
    score_tolerance: float | None = None
    """Largest error of scores, relative to the vector's largest part."""
    unknown: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    unscored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """A generation as a replica holds it; `details` has its tables, models and indexes as sent."""

    generation: str
    epoch: int
    published_at: str
    data_until: int
    """End of the generation's data, Unix seconds."""
    details: Mapping[str, Any]

    @classmethod
    def of(cls, body: Mapping[str, Any] | None) -> Self | None:
        """Reads a held generation from JSON; null stays None."""
        if body is None:
            return None
        return cls(
            body["generation"], body["epoch"], body["published_at"], body["data_until"], body
        )


@dataclass(frozen=True, slots=True)
class Generations:
    """Generations and state of the replica that answered."""

    live: Held
    previous: Held | None
    next: Held | None
    canary: Mapping[str, Any] | None
    blocklist: Mapping[str, int]
    ready: bool
    stale: str | None
    degraded: str | None


def read_answers(raw: bytes, count: int) -> list[Answer]:
    """The answers of one batch of `count` entities, in their order. Raises Garbled."""
    body = _json(raw).get("answers")
    if not isinstance(body, list) or len(body) != count:
        found = f"{len(body)} answers" if isinstance(body, list) else "no list of answers"
        raise Garbled(f"{count} entities were asked, and {found} came")
    return [Answer.of(each) for each in body]


def read_answer(raw: bytes) -> Answer:
    """The answer of a single lookup. Raises Garbled."""
    return Answer.of(_json(raw))


def read_ranking(raw: bytes) -> Ranking:
    """The answer of a score request. Raises Garbled."""
    return Ranking.of(_json(raw))


def read_arm(raw: bytes) -> str | None:
    """The arm that feedback was counted for, if any. Raises Garbled."""
    arm = _json(raw).get("arm")
    if arm is not None and not isinstance(arm, str):
        raise Garbled(f"an arm is live, canary or null, not {arm!r}")
    return arm


def read_generations(raw: bytes) -> Generations:
    """The generations and state of a replica. Raises Garbled."""
    body = _json(raw)
    try:
        live, previous, next_ = (Held.of(body[name]) for name in ("live", "previous", "next"))
        if live is None:
            raise Garbled("a service that answers holds a live generation, and this one names none")
        return Generations(
            live,
            previous,
            next_,
            *(body[name] for name in ("canary", "blocklist", "ready", "stale", "degraded")),
        )
    except (KeyError, TypeError) as error:
        raise Garbled(f"this is no overview of generations: {error!r}") from error


def _json(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Garbled(f"the body is not JSON: {error}; it begins {raw[:80]!r}") from error
    if not isinstance(body, dict):
        raise Garbled(f"the body is a JSON object, not {type(body).__name__}")
    return body


def _value(name: str, value: object) -> object:
    if not isinstance(value, list):
        return value
    if name not in _ARRAYS:
        return tuple(value)
    numbers = np.array(value, np.float32)
    numbers.setflags(write=False)
    return numbers
