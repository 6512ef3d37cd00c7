"""Events that a caller of the client sends, and what became of them. Pure but for the sending."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

import orjson

from serving.client.answers import read_json
from serving.client.calls import Call, Id, as_id
from serving.client.errors import Garbled
from serving.client.sender import Sender

BODY_BYTES: Final = 4 << 20
"""Bytes of events in one request: the service takes 8 MiB unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class NewEvent:
    """Event to send: a user did something with an item, or values are set for a user alone or an item alone.

    `id` makes a repetition none: the same one when it is sent again. `time` is ISO 8601, a datetime or Unix seconds.
    """

    id: Id
    user: Id | None = None
    item: Id | None = None
    time: str | float | datetime | None = None
    type: str | None = None
    weight: float | None = None
    attributes: Mapping[str, Any] | None = None
    features: Mapping[str, Any] | None = None
    vector: Sequence[float] | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON object of the fields that are set."""
        body: dict[str, Any] = {
            name: as_id(value)
            for name in ("id", "user", "item")
            if (value := getattr(self, name)) is not None
        }
        for name in ("time", "type", "weight", "attributes", "features", "vector"):
            if (value := getattr(self, name)) is not None:
                body[name] = value
        return body


@dataclass(frozen=True, slots=True)
class EventRejection:
    """Event that was not accepted: its place among those sent, why, and in words."""

    index: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class EventReceipt:
    """Numbers of events that were accepted and that were there before; those rejected, how the others are kept
    (`always`, `everysec`, `none`, `unknown`), and the position of the newest."""

    accepted: int
    repeated: int
    rejected: tuple[EventRejection, ...]
    durability: str
    position: str | None


class EventsCall(NamedTuple):
    """Request with some of the events, the first of them the `at`-th of all."""

    at: int
    call: Call


def event_calls(events: Sequence[NewEvent], max_batch: int) -> list[EventsCall]:
    """Requests with all events in their order, each of at most `max_batch` events and `BODY_BYTES`.

    Raises TypeError, with its place, for an event that JSON cannot hold: nothing is sent.
    """
    calls: list[EventsCall] = []
    bodies: list[bytes] = []
    size_bytes = 0
    for index, event in enumerate(events):
        try:
            body = orjson.dumps(event.to_json(), option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError as error:
            raise TypeError(f"events[{index}] cannot be written as JSON: {error}") from error
        if bodies and (len(bodies) == max_batch or size_bytes + len(body) > BODY_BYTES):
            calls.append(_call(index, bodies))
            bodies, size_bytes = [], 0
        bodies.append(body)
        size_bytes += len(body) + 1
    if bodies:
        calls.append(_call(len(events), bodies))
    return calls


def _call(end: int, bodies: Sequence[bytes]) -> EventsCall:
    body = b'{"events":[' + b",".join(bodies) + b"]}"
    return EventsCall(end - len(bodies), Call("POST", "/v1/events", None, body))


async def send_events(
    sender: Sender, calls: Sequence[EventsCall], get_deadline: Callable[[], float]
) -> EventReceipt:
    """Sends events, one request behind the other; `get_deadline` is the deadline of one that goes out now.

    Raises Unanswered, after which some may have been accepted: send all of them again.
    """
    receipt = EventReceipt(0, 0, (), "unknown", None)
    for at, call in calls:
        part_receipt = read_receipt(await sender.send(call, get_deadline()))
        moved = tuple(
            replace(rejection, index=rejection.index + at) for rejection in part_receipt.rejected
        )
        receipt = EventReceipt(
            receipt.accepted + part_receipt.accepted,
            receipt.repeated + part_receipt.repeated,
            receipt.rejected + moved,
            part_receipt.durability,
            part_receipt.position or receipt.position,
        )
    return receipt


def read_receipt(raw: bytes) -> EventReceipt:
    """Outcome of the events of one request. Raises Garbled."""
    body = read_json(raw)
    try:
        rejected = tuple(
            EventRejection(rejection["index"], rejection["reason"], rejection["detail"])
            for rejection in body["rejected"]
        )
        return EventReceipt(
            int(body["accepted"]),
            int(body["repeated"]),
            rejected,
            str(body["durability"]),
            body["position"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Garbled(f"this is no answer to events: {error!r}") from error
