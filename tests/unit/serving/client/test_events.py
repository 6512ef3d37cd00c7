"""Events of any number on their way into requests, each with a deadline of its own."""

import itertools
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.client import Client, Policy
from serving.client import calls as events_module
from serving.client.calls import Call, NewEvent, event_calls
from serving.client.clients import LoopThread, send_events

BODY = {"accepted": 1, "repeated": 0, "rejected": [], "durability": "none", "position": "1-0"}


class FakeSender:
    """Keeps the deadline of each request, and answers."""

    def __init__(self) -> None:
        self.deadlines: list[float] = []

    async def send(self, call: Call, deadline: float) -> bytes:
        self.deadlines.append(deadline)
        return orjson.dumps(BODY)


def sizes(count: int, max_batch: int, text_bytes: int = 1) -> list[int]:
    events = [NewEvent(n, user="u", item="x" * text_bytes) for n in range(count)]
    calls = event_calls(events, max_batch)
    event_batches = [orjson.loads(events_call.call.request_body or b"")["events"] for events_call in calls]
    assert [int(event["id"]) for events in event_batches for event in events] == [*range(count)]
    batch_sizes = [len(event_batch) for event_batch in event_batches]
    assert [events_call.first_event_index for events_call in calls] == [0, *itertools.accumulate(batch_sizes)][
        : len(calls)
    ]
    return batch_sizes


@given(st.integers(0, 40), st.integers(1, 10))
def test_requests_have_all_events_in_their_order(count: int, max_batch: int) -> None:
    assert all(0 < size <= max_batch for size in sizes(count, max_batch))


def test_a_request_has_as_many_bytes_as_the_service_takes() -> None:
    assert sizes(10, 1_000, text_bytes=1 << 20) == [3, 3, 3, 1]
    # An event that is too large is sent alone, and the service refuses it.
    assert sizes(2, 1_000, text_bytes=events_module.EVENT_BODY_BYTES + 1) == [1, 1]


async def test_every_request_has_its_own_deadline() -> None:
    sender, clock = FakeSender(), itertools.count(10.0, 5.0)
    calls = event_calls([NewEvent(n, user="u", item="i") for n in range(3)], 1)

    receipt = await send_events(sender, calls, lambda: next(clock))  # type: ignore[arg-type]

    assert sender.deadlines == [10.0, 15.0, 20.0] and receipt.accepted == 3


def test_the_blocking_client_waits_as_long_as_all_requests_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    run = LoopThread.run

    def watched(thread: LoopThread, work: Any, within_s: float) -> Any:
        waits.append(within_s)
        return run(thread, work, within_s)

    monkeypatch.setattr(LoopThread, "run", watched)
    transport = httpx.MockTransport(lambda _: httpx.Response(202, json=BODY))
    policy = Policy(deadline_ms=2_000, max_batch=10)
    with Client("http://larder", policy=policy, transport=transport) as larder:
        receipt = larder.send_events([NewEvent(n, user="u", item="i") for n in range(25)])

    assert waits == [6.0] and receipt.accepted == 3


def test_an_event_that_json_cannot_hold_is_named_by_its_place() -> None:
    events = [NewEvent(n, user="u", item="i") for n in range(3)]
    events[1] = NewEvent(1, user="u", item="i", type="half an emoji: \ud83d")

    with pytest.raises(TypeError, match=r"events\[1\]\.type is no valid Unicode"):
        event_calls(events, 2)
