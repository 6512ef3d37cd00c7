"""Callers hear that the Redis of events is away, and not where it is; the log names it."""

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from cache.store.blocklist import Blocklist
from serving.events.connection import EventsUnavailable, _translate_errors
from serving.events.counts import EventCounts
from serving.events.intake import EventIntake
from serving.requests.errors import Problem

WHERE = "Error 111 connecting to events.internal:6380. Connection refused."


def intake(error: Exception) -> EventIntake:
    """An intake whose every call of Redis ends with an error."""

    async def accept(_events: object) -> None:
        raise error

    no_events: Any = SimpleNamespace(packed_events=[], rejected_events=[], event_indices=[])
    parts: Any = SimpleNamespace(accept=accept, parse_body_events=lambda *_: no_events, found_durability=None)
    counts: Any = EventCounts(parts, SimpleNamespace(events="", inbox="", rejected=""), 1)  # type: ignore[arg-type]
    return EventIntake(parts, parts, parts, parts, parts, counts, Blocklist, time.time, time.monotonic)


async def test_a_refused_request_does_not_name_the_redis_of_events(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EventsUnavailable) as raised, _translate_errors():
        raise RedisConnectionError(WHERE)

    with pytest.raises(Problem) as refused, caplog.at_level(logging.WARNING):
        await intake(raised.value).accept_events([{}])

    problem = refused.value
    assert (problem.status, problem.reason) == (503, "events_unavailable")
    assert problem.message == ("the Redis of events cannot be reached: send the events again, with the same ids")
    assert "events.internal:6380" in caplog.text


async def test_a_durability_error_is_passed_to_the_caller() -> None:
    with pytest.raises(Problem, match="its disk in time: send the events again"):
        await intake(EventsUnavailable("the Redis of events did not write to its disk in time")).accept_events([{}])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NoPermissionError("this user has no permissions"), "refuses the user of this service or lacks a right of it"),
        (AuthenticationError("invalid username-password pair"), "refuses the user of this service"),
        (BusyLoadingError("Redis is loading the dataset in memory"), "is still loading its data"),
        (ResponseError("WRONGTYPE at events.internal"), "answers with an error"),
    ],
    ids=["a right", "a password", "loading", "another error"],
)
async def test_a_redis_that_answers_with_an_error_is_not_called_away(error: Exception, message: str) -> None:
    with pytest.raises(EventsUnavailable) as raised, _translate_errors():
        raise error

    assert message in raised.value.public_message and "events.internal" not in raised.value.public_message
