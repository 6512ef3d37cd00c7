"""A value that an event set is what filters see: in every way to an answer, also one that lay ready."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import orjson
import pytest
import redis

from cache.config.events import EventsConfig
from cache.events.event import Event
from cache.events.newer_events import AttributeEvents
from cache.events.stream import (
    ACCEPT_SCRIPT,
    StreamBounds,
    accept_script_arguments,
    event_of_entry,
    pack_event,
    read_outcomes,
)
from cache.format.redis_keys import Keyspace
from cache.format.stream_position import Position
from precompute.config.settings import FilterConfig
from serving.events.item_updates import VALUES_CHECK_INTERVAL_S, ItemUpdater
from serving.events.newer_events import NewerEvents
from tests.attached import newer_events_of
from tests.integration.http.hot_way import AsgiRequest, Ways, running
from tests.integration.http.shop import Shop, filter_of, make_shop, wanted_of
from tests.integration.serving_app import Running, eventually, serving

IN_STOCK: dict[str, Any] = {"==": ["stock", True]}
BOUNDS = StreamBounds(1 << 24, 60_000, 1_000)
K = 10


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Shop:
    filters = {"in_stock": FilterConfig(IN_STOCK, ("user_topk",))}
    return make_shop(tmp_path_factory.mktemp("attributes"), redis_url, filters=filters)


@pytest.fixture
def stream(redis_url: str, keyspace: Keyspace) -> Iterator["Stream"]:
    with redis.Redis.from_url(redis_url) as client:
        yield Stream(client, keyspace)


class Stream:
    """Stream of events, and what of it was given on to a service that follows it."""

    def __init__(self, client: "redis.Redis", keyspace: Keyspace) -> None:
        self.client, self.keyspace = client, keyspace
        self._last = "-"

    def accept(self, *events: Event) -> list[Position | None]:
        """Positions of events, as the script accepts them."""
        keys, args = accept_script_arguments(
            self.keyspace, BOUNDS, [pack_event(self.keyspace, event) for event in events]
        )
        replies: Any = self.client.eval(ACCEPT_SCRIPT, len(keys), *keys, *args)
        return [outcome.position for outcome in read_outcomes(replies)]

    def follow(self, attributes: AttributeEvents) -> None:
        """Deliver the new events of the stream."""
        entries: Any = self.client.xrange(self.keyspace.events, self._last)
        for id_, fields in entries:
            attributes.add(Position.parse(id_), event_of_entry(fields))
            self._last = f"({id_.decode()}"


def sets(number: int, item: str, **attributes: Any) -> Event:
    """An event that sets attributes of an item."""
    return Event(f"e{number}", 0, None, item.encode(), attributes=attributes)


def with_values(shop: Shop, values: dict[str, dict[str, Any]]) -> Shop:
    """The shop as a night would know it then."""
    attributes = [dict(item_attributes) for item_attributes in shop.attributes]
    for at, id_ in enumerate(shop.ids):
        for name, value in values.get(id_, {}).items():
            attributes[at].pop(name, None)
            if value is not None:
                attributes[at][name] = tuple(value) if isinstance(value, list) else value
    return replace(shop, attributes=attributes)


async def filtered(running: Running, users: list[str], filter_: Any) -> list[list[str]]:
    body = {"entities": users, "filter": filter_, "k": K}
    return [answer["items"] for answer in (await running.post("/v1/lookup/user_topk", body))["answers"]]


async def test_filters_see_what_events_set_as_a_night_would_have_it(shop: Shop, stream: Stream) -> None:
    rng = random.Random(11)
    values: dict[str, dict[str, Any]] = {
        id_: {
            "stock": rng.random() < 0.5, "price": rng.choice([1.5, 50, None]),
            "brand": rng.choice(["brand-0", "brand-new", None]), "tags": rng.choice([[], ["sale", "hot"]]),
        }
        for id_ in rng.sample(shop.ids, 200)
    }  # fmt: skip
    updated_shop = with_values(shop, values)
    users = sorted(shop.users)[:25]
    filters = [IN_STOCK, {"==": ["brand", "brand-new"]}, {"contains": ["tags", "hot"]}]
    filters += [filter_of(rng) for _ in range(15)]
    async with serving(shop.night, l2_deadline_ms=2_500.0, events=EventsConfig(enabled=True)) as running:
        assert await filtered(running, users, IN_STOCK) == expected(shop, users, IN_STOCK)
        accepted = stream.accept(
            *(sets(at, id_, **item_values) for at, (id_, item_values) in enumerate(values.items()))
        )
        assert None not in accepted
        stream.follow(newer_events_of(running.service).values)

        async def is_seen() -> bool:
            return await filtered(running, users, IN_STOCK) == expected(updated_shop, users, IN_STOCK)

        # Then it counts after the next background check
        assert await eventually(is_seen) and VALUES_CHECK_INTERVAL_S <= 0.25
        for filter_ in filters:
            assert await filtered(running, users, filter_) == expected(updated_shop, users, filter_), filter_
        # A filter's name means its expression, also where a night made the lists
        assert await filtered(running, users, "in_stock") == expected(updated_shop, users, IN_STOCK)
        answer = await running.get(f"/v1/lookup/user_topk/{users[0]}", filter="in_stock", k=K)
        assert answer["items"] == expected(updated_shop, users[:1], IN_STOCK)[0]
        scored = await running.post("/v1/score", {"user": users[0], "items": shop.ids, "filter": IN_STOCK})
        stocked = {
            id_
            for id_, item_attributes in zip(shop.ids, updated_shop.attributes, strict=True)
            if item_attributes.get("stock")
        }
        assert set(scored["items"]) <= stocked and set(scored["filtered"]) == {*shop.ids} - stocked
        value_counts = await running.scrape_samples("larder_event_values_total")
        assert value_counts["set",] == 4 * len(values)


def expected(shop: Shop, users: list[str], filter_: Any) -> list[list[str]]:
    return [wanted_of(shop, shop.users[user], shop.seen_ordinals[user], filter_, K)[0] for user in users]


@pytest.fixture
def ways(shop: Shop) -> Iterator[Ways]:
    yield from running(shop.night)


def test_an_answer_that_lay_ready_does_not_outlive_a_value(shop: Shop, stream: Stream, ways: Ways) -> None:
    unfiltered_request = AsgiRequest("GET", b"/v1/lookup/user_topk/%b" % quote(max(shop.users)).encode())
    under = replace(unfiltered_request, query=b"filter=in_stock&k=5")
    for request in (unfiltered_request, under):
        for _ in range(4):  # from Redis, from memory, and ready from then on
            ready_response = ways.send(request)
        assert ways.fast_lookups.answer(request.path + (b"?" + request.query if request.query else b""))
    sold_out_item = orjson.loads(ready_response.body)["items"][0]
    lay_ready = ways.send(unfiltered_request)

    stream.accept(sets(1, sold_out_item, stock=False))
    newer_events = NewerEvents()
    updater = ItemUpdater(ways.service.follower.holder, newer_events, ways.service.metrics)
    stream.follow(newer_events.values)
    ways.runner.run(updater.apply_new_values())

    # An answer that depends on no attribute is still ready; one that does is computed anew
    assert ways.fast_lookups.answer(unfiltered_request.path) and ways.send(unfiltered_request).body == lay_ready.body
    assert ways.fast_lookups.answer(under.path + b"?" + under.query) is None
    after = [ways.send(under) for _ in range(4)]
    assert sold_out_item not in orjson.loads(after[0].body)["items"]
    expected_items = orjson.loads(ways.send(under, is_fast=False).body)["items"]
    assert all(orjson.loads(response.body)["items"] == expected_items for response in after)
