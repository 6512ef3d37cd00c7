"""The guard of a route tells callers what they may know, and the log the rest."""

import logging
import time
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from cache.errors import TierUnavailable
from serving.access.callers import ANYBODY
from serving.http.routes import Guard
from serving.metrics.registry import Metrics
from serving.requests.request_record import CALLER_KEY


async def test_an_outage_of_redis_does_not_tell_callers_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    async def explain(_request: Any, _started: float) -> object:
        where = "Redis: Error 111 connecting to redis.internal:6379. Connection refused."
        raise TierUnavailable(where, reason="connection")

    request: Any = SimpleNamespace(scope={CALLER_KEY: ANYBODY})
    answer = Guard(Metrics(), time.monotonic).wrap_handler("GET /v1/explain", explain, required_scope="explain")

    with caplog.at_level(logging.WARNING):
        response = await answer(request)

    assert response.status_code == 503
    error = orjson.loads(response.body)["error"]
    assert error == {"code": TierUnavailable.code, "message": "Redis does not answer"}
    assert "redis.internal:6379" in caplog.text
