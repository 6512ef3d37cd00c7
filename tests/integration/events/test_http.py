"""POST /v1/events over the real application: refusals of a whole request, quotas, metrics, and the client."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import redis

from cache.config.events import EventsConfig
from cache.format.redis_keys import Keyspace
from cache.store.blocklist import change_blocklist
from precompute.cli.status import read_state, report_status
from precompute.config.settings import NightConfig
from serving.client import AsyncClient, Client, InvalidRequest, NewEvent, Policy, Unavailable
from tests.integration.events.durable_redis import DurableRedis, stream_of
from tests.integration.events.intakes import event
from tests.integration.nights import build_night
from tests.integration.serving_app import BASE, Running, eventually, serving
from tests.integration.token_files import TokenPlace

SETTINGS = EventsConfig(enabled=True, durability="always", batch=100, of_one=50)


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url, users=50, items=40)


@pytest.fixture
def client(server: DurableRedis) -> Iterator[Any]:
    with server.client() as connection:
        connection.flushall()
        yield connection


@pytest.fixture
async def app(night: NightConfig, redis_url: str, server: DurableRedis, client: Any) -> AsyncIterator[Running]:
    # Remove the counts of earlier tests: the dashboard shows what any service of this night counted in the last
    # minutes.
    with redis.Redis.from_url(redis_url) as pages:
        for key in pages.scan_iter(Keyspace(night.namespace).dashboard_workers.replace("workers", "*")):
            pages.delete(key)
    async with serving(night, events=SETTINGS, events_url=server.url, figures_s=0.1) as running:
        yield running


async def post(app: Running, *events: Any, **headers: str) -> httpx.Response:
    return await app.http.post("/v1/events", json={"events": [*events]}, headers=headers)


async def test_events_are_accepted_reported_and_counted(app: Running, night: NightConfig, client: Any) -> None:
    response = await post(app, event(1), event(1), event(2), {"id": 1})

    assert response.status_code == 202
    receipt = response.json()
    assert (receipt["accepted"], receipt["repeated"], receipt["durability"]) == (2, 1, "always")
    assert [(rejection["index"], rejection["reason"]) for rejection in receipt["rejected"]] == [(3, "missing_field")]
    assert [stored_event["id"] for stored_event in stream_of(client, Keyspace(night.namespace))] == ["e-1", "e-2"]
    event_counts = await app.scrape_samples("larder_events_total")
    assert event_counts["accepted",] == 2 and event_counts["repeated",] == 1 and event_counts["missing_field",] == 1
    assert (await app.scrape_samples("larder_requests_total"))["POST /v1/events", "202"] == 1

    async def is_stream_counted() -> bool:
        return await app.scrape_samples("larder_events_stream_length") == {(): 2.0}

    assert await eventually(is_stream_counted)
    assert (await app.scrape_samples("larder_events_up")) == {(): 1.0}
    assert (await app.scrape_samples("larder_events_stream_bytes"))[()] > 0
    assert (await app.scrape_samples("larder_events_inbox_length")) == {(): 0.0}
    assert (await app.scrape_samples("larder_events_accept_seconds_count"))["http",] == 1


async def test_status_says_that_events_are_refused_and_why(
    app: Running, night: NightConfig, server: DurableRedis, client: Any
) -> None:
    async def problem_texts() -> list[str]:
        status_report = await asyncio.to_thread(lambda: report_status(night, read_state(night)))
        return [problem for problem in status_report["problems"] if " events" in problem]

    async def is_said(text: str) -> bool:
        return [text in problem for problem in await problem_texts()] == [True]

    client.config_set("appendonly", "no")
    try:
        assert await eventually(lambda: is_said("less durable than demanded (found: none, demanded: always)"))
    finally:
        client.config_set("appendonly", "yes")
    server.kill()
    try:
        assert await eventually(lambda: is_said("their Redis is unreachable"))
    finally:
        server.start()

    async def is_well() -> bool:
        return not await problem_texts()

    assert await eventually(is_well)


@pytest.mark.parametrize(
    "odd",
    [
        rb'{"id":"odd","user":"u","item":"\ud83d"}',
        rb'{"id":"odd","user":"u","item":"\udc00\""}',
        b'{"id":"odd","user":"u","item":"\xff, ]"}',
        b'{"id":"odd","user":"u","item":"a\nb"}',
        b'{"id":"odd","user":"u","item":"i","weight":NaN}',
        b'{"id":"odd","user":"u","item":"i","weight":1e999}',
        b'{"id":"odd","item":"i","attributes":{"a":[1,]}}',
        b"undefined",
    ],
    ids=["half a pair", "lone low half", "no UTF-8", "a raw break", "NaN", "1e999", "a comma too many", "no value"],
)
async def test_an_event_that_is_no_json_is_rejected_alone(
    app: Running, night: NightConfig, client: Any, odd: bytes
) -> None:
    """Sent again, a batch that was refused for one of its events would be refused for ever."""
    events = [*[orjson.dumps(event(number)) for number in (1, 2)], odd, orjson.dumps(event(3))]
    body = b' {"events" : [' + b", ".join(events) + b"]}\n"

    response = await app.http.post("/v1/events", content=body)

    assert response.status_code == 202
    receipt = response.json()
    assert receipt["accepted"] == 3
    assert [(rejection["index"], rejection["reason"]) for rejection in receipt["rejected"]] == [(2, "invalid_json")]
    assert receipt["rejected"][0]["detail"].startswith("events[2] is not JSON")
    accepted = [stored_event["id"] for stored_event in stream_of(client, Keyspace(night.namespace))]
    assert accepted == ["e-1", "e-2", "e-3"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"events":[{"id":"1","user":"u","item":"i"},',
        b'{"events":[{"id":"1","user":"u","item":"i}]}',
        b'{"events":[{"id":"1","user":"u","item":"i"},]}',
        b'{"events":[NaN],"more":1}',
        b'{"events":[' + b'"' + rb"\"" * 100_000,
    ],
    ids=["cut off", "an open text", "nothing behind a comma", "another field", "an open text of escapes"],
)
async def test_a_body_whose_events_cannot_be_separated_is_refused(app: Running, client: Any, body: bytes) -> None:
    response = await app.http.post("/v1/events", content=body)

    assert response.status_code == 422
    assert response.json()["error"]["code"] == "invalid_json"


async def test_a_list_that_is_not_sent_and_a_body_that_is_no_json_have_codes_of_their_own(app: Running) -> None:
    arrow = {"Content-Type": "application/vnd.apache.arrow.stream"}
    missing, other_type = await app.http.post("/v1/events", json={}), await app.http.post("/v1/events", headers=arrow)

    assert (missing.status_code, missing.json()["error"]["code"]) == (422, "missing_field")
    assert (other_type.status_code, other_type.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert other_type.json()["error"]["supported"] == ["application/json"]


async def test_the_dashboard_shows_what_was_taken_in_and_how_far_it_is_counted(app: Running) -> None:
    position = (await post(app, event(1), {"id": 1})).json()["position"]

    async def is_dashboard_updated() -> bool:
        events = (await app.get("/dashboard/data"))["events"]
        return bool(events["results"] == {"accepted": 1, "missing_field": 1} and events["up"])

    assert await eventually(is_dashboard_updated)
    events = (await app.get("/dashboard/data"))["events"]
    assert (events["durability"], events["demanded"]) == ("always", SETTINGS.durability)
    # This night began before events were enabled: none of its lists counts any, so nothing is followed.
    assert events["counted_until"] < position and events["published_until"] is None
    assert events["held_max_bytes"] == events["stream_max_bytes"] == SETTINGS.stream_bytes


async def test_the_inbox_is_emptied_by_a_service(app: Running, night: NightConfig, client: Any) -> None:
    keyspace = Keyspace(night.namespace)
    client.xadd(keyspace.inbox, {"user": "u", "item": "i", "id": "x"})

    async def is_inbox_empty() -> bool:
        return bool(client.xlen(keyspace.events) == 1 and client.xlen(keyspace.inbox) == 0)

    assert await eventually(is_inbox_empty)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"events": {}}, "invalid_field"),
        ({"event": []}, "unknown_field"),
        ({"events": []}, "batch_too_long"),
        ({"events": [{}] * 101}, "batch_too_long"),
        ([], "invalid_field"),
    ],
)
async def test_a_body_without_events_is_refused(app: Running, body: Any, code: str) -> None:
    response = await app.http.post("/v1/events", json=body)

    assert (response.status_code, response.json()["error"]["code"]) == (422, code)


async def test_events_of_who_is_blocked_are_rejected_within_a_second(app: Running, night: NightConfig) -> None:
    change_blocklist(night.store(), block_users=[b"erased"])
    numbers = iter(range(1_000))

    async def refused() -> bool:
        receipt = (await post(app, event(next(numbers), "erased"))).json()
        return [rejection["reason"] for rejection in receipt["rejected"]] == ["erased"]

    assert await eventually(refused, timeout_s=10)


async def test_a_service_without_events_says_so(night: NightConfig) -> None:
    async with serving(night) as without:
        response = await post(without, event(1))

    assert (response.status_code, response.json()["error"]["code"]) == (409, "events_disabled")


async def test_a_redis_that_is_away_costs_lookups_nothing(night: NightConfig, tmp_path: Path) -> None:
    async with serving(night, events=SETTINGS, events_url=f"unix://{tmp_path}/nobody") as running:
        response = await post(running, event(1))
        answer = await running.get("/v1/lookup/user_topk/nobody")

    assert (response.status_code, response.json()["error"]["code"]) == (503, "events_unavailable")
    assert response.headers["Retry-After"] == "1" and answer["source"] == "default"


async def test_it_needs_its_scope_and_counts_its_entities(
    night: NightConfig, server: DurableRedis, tmp_path: Path
) -> None:
    token_file = TokenPlace(tmp_path / "tokens.json")
    reader = token_file.add("reader", "read")
    sender = token_file.add("sender", "events", entities_per_s=5.0)
    settings: dict[str, Any] = {"events": SETTINGS, "events_url": server.url}
    async with serving(night, tokens_file=str(token_file.path), **settings) as running:
        stranger = await post(running, event(1))
        wrong = await post(running, event(1), **reader)
        first = await post(running, *(event(n) for n in range(5)), **sender)
        second = await post(running, *(event(n) for n in range(5)), **sender)

    assert [response.status_code for response in (stranger, wrong, first, second)] == [401, 403, 202, 429]
    assert second.json()["error"]["quota"] == "entities_per_s"


async def test_the_client_sends_any_number_and_tells_what_became_of_them(
    app: Running, night: NightConfig, client: Any
) -> None:
    events = [NewEvent(n, user=f"u-{n % 10}", item=f"i-{n}", time=1.7e9 + n) for n in range(25)]
    events[17] = NewEvent(17, user="u")
    transport = app.http._transport
    policy = Policy(deadline_ms=10_000, max_batch=10)
    async with AsyncClient(BASE, transport=transport, policy=policy) as larder:
        receipt = await larder.send_events(events)
        repeat_receipt = await larder.send_events(events)
        empty_receipt = await larder.send_events([])
        with pytest.raises(InvalidRequest):
            await AsyncClient(BASE, transport=transport, policy=replace(policy, max_batch=200)).send_events(events * 5)

    assert (receipt.accepted, receipt.repeated, receipt.durability) == (24, 0, "always")
    assert [(rejection.index, rejection.reason) for rejection in receipt.rejected] == [(17, "missing_field")]
    assert (repeat_receipt.accepted, repeat_receipt.repeated, repeat_receipt.position) == (0, 24, None)
    assert (empty_receipt.accepted, empty_receipt.position) == (0, None)
    stored_events = stream_of(client, Keyspace(night.namespace))
    assert [stored_event["id"] for stored_event in stored_events] == [str(n) for n in range(25) if n != 17]
    newest_id = client.xrevrange(Keyspace(night.namespace).events, count=1)[0][0].decode()
    assert receipt.position == newest_id


def test_the_blocking_client_has_the_same_method(tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/events"
        body = {"accepted": 1, "repeated": 0, "rejected": [], "durability": "none", "position": "1-0"}
        return httpx.Response(202, json=body)

    with Client(BASE, transport=httpx.MockTransport(answer)) as larder:
        assert larder.send_events([NewEvent("1", user="u", item="i")]).accepted == 1


async def test_a_full_stream_is_429_with_a_time_to_come_again(
    night: NightConfig, server: DurableRedis, client: Any
) -> None:
    small_stream = replace(SETTINGS, stream_bytes=1 << 20)
    async with serving(night, events=small_stream, events_url=server.url) as small:
        with client.pipeline(transaction=False) as pipeline:
            for _ in range(1_500):
                pipeline.xadd(Keyspace(night.namespace).events, {"e": b"x" * 1_000})
            pipeline.execute()
        response = await post(small, event(1))
        async with AsyncClient(BASE, transport=small.http._transport) as larder:
            with pytest.raises(Unavailable) as caught:
                await larder.send_events([NewEvent("1", user="u", item="i")])
        refused = await small.scrape_samples("larder_events_refused_total")
        bound = await small.scrape_samples("larder_events_stream_max_bytes")

    assert (response.status_code, response.json()["error"]["code"]) == (429, "events_full")
    assert refused["events_full",] >= 2 and refused["events_unavailable",] == 0
    assert bound == {(): 1 << 20}
    assert int(response.headers["Retry-After"]) == 30 and caught.value.code == "events_full"
