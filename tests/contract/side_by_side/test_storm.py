"""The frozen commit and this tree give the same answers to 100,000 requests, and these reach all that is documented."""

import os
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
import redis

from tests.contract.side_by_side.differences import difference
from tests.contract.side_by_side.exchange import Request
from tests.contract.side_by_side.runs import Met, Run
from tests.contract.side_by_side.stages import await_ready, begin_trials, end_trials
from tests.contract.side_by_side.twins import Checkouts, twins
from tests.contract.side_by_side.world import TOKENS, Shop
from tests.polling import poll_until

pytestmark = pytest.mark.storm

SCALE: Final = float(os.environ.get("LARDER_TEST_REQUESTS", "100000")) / 100_000
BEFORE_TRIALS, TRIALS, AFTER, SLOW = (int(SCALE * count) for count in (40_000, 40_000, 10_000, 10_000))
"""Requests before trials, while they go on, behind a roll back, and without the code that is there for speed."""
UNREACHED_CODES: Final = {
    "disconnected": "its caller is gone, and reads nothing",
    "body_timeout": "it depends on time",
    "overloaded": "it depends on time",
    "internal_error": "it is a defect",
    "events_full": "how full the stream is, is told by a sample of its entries",
}
UNREACHED_REASONS: Final = {
    "expired": "it depends on time",
    "l2_timeout": "it depends on time",
    "breaker_open": "it depends on time",
    "internal_error": "it is a defect",
}
UNREACHED_LIVE_REASONS: Final = {
    "overloaded": "it depends on time",
    "busy": "it depends on time",
    "timeout": "it depends on time",
    "no_model": "a model that cannot be loaded is a damaged generation",
    "failed": "the models of this shop raise no errors",
    "corrupt": "it is a defect",
}


@pytest.fixture(scope="module")
def met() -> Met:
    """What all runs of this module reached together."""
    return Met()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_90_000_requests_before_during_and_after_trials(
    checkouts: Checkouts, shop: Shop, seed: int, folder: Path, met: Met
) -> None:
    with twins(folder, shop, checkouts, token=TOKENS["all"]) as pair:
        run = Run(pair, seed, shop.facts, met)
        await_ready(pair)
        run.send_all(range(BEFORE_TRIALS))
        begin_trials(pair)
        run.send_all(range(BEFORE_TRIALS, BEFORE_TRIALS + TRIALS))
        end_trials(pair)
        run.send_all(range(BEFORE_TRIALS + TRIALS, BEFORE_TRIALS + TRIALS + AFTER))
        _lose_redis(run)

    print(f"{sum(met.kinds.values()):,} requests in {run.seconds:,.0f} s\n{met}")
    run.check()


def test_10_000_requests_on_the_way_without_what_is_there_for_speed(
    checkouts: Checkouts, shop: Shop, seed: int, folder: Path, met: Met
) -> None:
    with twins(folder, shop, checkouts, LARDER_FAST_HTTP="false") as pair:
        run = Run(pair, seed, shop.facts, met)
        await_ready(pair)
        run.send_all(range(SLOW))

    print(f"{SLOW:,} requests in {run.seconds:,.0f} s")
    run.check()


def test_a_service_without_a_generation_events_and_a_dashboard(
    checkouts: Checkouts, shop: Shop, folder: Path, met: Met
) -> None:
    bare = {"LARDER_NAMESPACE": "nothing", "LARDER_DASHBOARD_S": "0"}
    with twins(folder, shop, checkouts, settings="bare", **bare) as pair:
        for request in (
            pair.request("GET", "/v1/lookup/user_topk/u-00042"),
            pair.request("POST", "/v1/lookup/user_topk", {"entities": ["a"]}),
            pair.request("POST", "/v1/score", {"user": "a", "items": ["b"]}),
            pair.request("GET", "/v1/explain/user_topk/a"),
            pair.request("POST", "/v1/events", {"events": [{"id": "a", "user": "a", "item": "b"}]}),
            pair.request("POST", "/v1/feedback", {"event": "click", "canary_key": "a"}),
            *(pair.request("GET", path) for path in ("/v1/generations", "/dashboard/data", "/readyz", "/healthz")),
        ):
            answers = pair.send(request)
            met.note(request, answers[0])
            change = difference(*answers)
            assert change is None, f"{request.curl(pair.urls[0])}\n{change}"


def test_all_that_the_document_names_was_met(checkouts: Checkouts, met: Met) -> None:
    document = _document(checkouts)
    values_by_enum = {
        name: set(schema["enum"]) for name, schema in document["components"]["schemas"].items() if "enum" in schema
    }
    operations = {
        operation["operationId"]: {
            parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"
        }
        for path in document["paths"].values()
        for operation in path.values()
    }
    print(met)

    assert values_by_enum["KnownErrorCode"] - met.of("code") == UNREACHED_CODES.keys()
    assert values_by_enum["KnownReason"] - met.of("reason") == UNREACHED_REASONS.keys()
    assert values_by_enum["KnownLiveReason"] - met.of("live") == UNREACHED_LIVE_REASONS.keys()
    assert values_by_enum["Source"] <= met.of("source")
    assert operations.keys() - met.kinds.keys() == {"getMetrics"}  # compared by names
    assert operations["lookup"] | {"exclude"} == met.options.keys()
    assert met.forms["arrow"] and met.forms["json"]


def _document(checkouts: Checkouts) -> dict[str, Any]:
    completed_process = checkouts[0].run("serving.http.reference", "--document", environ={})
    assert completed_process.returncode == 0, completed_process.stderr
    document: dict[str, Any] = orjson.loads(completed_process.stdout)
    return document


def _lose_redis(run: Run) -> None:
    """End both Redis, and ask for what needs them."""
    pair = run.twins
    for url in pair.redis_urls:
        with redis.Redis.from_url(url, protocol=3) as client:
            client.shutdown(nosave=True)
    assert poll_until(lambda: all(health["stale"] for health in pair.fetch_from_both("/readyz")))
    strangers = [f"never-{number}" for number in range(3)]
    for kind, request in (
        ("lookup", pair.request("GET", f"/v1/lookup/user_vector/{strangers[0]}")),
        ("lookupBatch", pair.request("POST", "/v1/lookup/user_topk", {"entities": list(run.facts.users[30:90])})),
        ("explain", pair.request("GET", f"/v1/explain/user_topk/{run.facts.users[50]}")),
        ("sendEvents", pair.request("POST", "/v1/events", {"events": [{"id": "a", "user": "a", "item": "b"}]})),
    ):
        run.send(Request(kind, request.method, request.target, request.headers, request.body, settles=True))
