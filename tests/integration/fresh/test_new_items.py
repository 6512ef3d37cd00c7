"""New items come over HTTP, answers name them, and the next night has them with the same lists."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from cache.config.events import EventsConfig
from cache.events.event import Event
from cache.format.stream_position import STREAM_BEGINNING
from cache.store.blocklist import Blocklist
from precompute.config.settings import NightConfig
from precompute.steps import take_events
from serving.generations.snapshot import Snapshot
from tests.attached import newer_events_of
from tests.integration.attributes.test_night import FIRST, SECOND, prepared
from tests.integration.feature_towers import DIMS
from tests.integration.fresh.followed_stream import Stream
from tests.integration.nights import histories, prepare, publish_night
from tests.integration.serving_app import Running, eventually, serving

IN_STOCK: dict[str, Any] = {"==": ["stock", True]}
STRANGER = "somebody-new"


def new_item_events(count: int, *, size: float = 3.0) -> list[dict[str, Any]]:
    """Events of new items, whose vectors are long: each stands first in many lists."""
    rng = np.random.default_rng(8)
    item_vectors = (size * rng.standard_normal((count, DIMS))).astype(np.float32)
    return [
        {
            "id": f"n{at}", "item": f"new-{at}", "features": {"looks": row.tolist(), "brand": "acme"},
            "attributes": {"stock": at % 2 == 0},
        }
        for at, row in enumerate(item_vectors)
    ]  # fmt: skip


async def send(app: Running, events: list[dict[str, Any]]) -> dict[str, Any]:
    response = await app.http.post("/v1/events", json={"events": events})
    assert response.status_code == 202, response.text
    receipt: dict[str, Any] = response.json()
    return receipt


async def lists(app: Running, entities: list[Any], **options: Any) -> list[dict[str, Any]]:
    """Answers of the table of lists."""
    batch = await app.post("/v1/lookup/user_topk", {"entities": entities, **options})
    answers: list[dict[str, Any]] = batch["answers"]
    return answers


def new_in(answer: dict[str, Any]) -> set[str]:
    return {item for item in answer["items"] if item.startswith("new-")}


def live_of(app: Running) -> Snapshot:
    """The live snapshot."""
    live_snapshot = app.service.follower.holder.live
    assert live_snapshot is not None
    return live_snapshot


async def wait_for_live(app: Running, condition: Callable[[Any], bool]) -> None:
    """Waits for what the live snapshot is."""

    async def is_fulfilled() -> bool:
        return condition(live_of(app))

    assert await eventually(is_fulfilled)


def sent_by(config: NightConfig) -> list[dict[str, Any]]:
    """Entities that bring along what to compute from."""
    items = sorted({item for history in histories(config, FIRST).values() for item in history})
    return [
        {"history": items[at : at + 3], "features": {"country": at % 5}, **named}
        for at, named in enumerate([{}, {"id": STRANGER}, {}, {"id": "somebody-else"}])
    ]


@pytest.fixture
def config(tmp_path: Path, redis_url: str) -> NightConfig:
    return replace(prepared(tmp_path, redis_url), events=EventsConfig(enabled=True))


async def test_new_items_are_answered_with_and_the_next_night_has_the_same_lists(config: NightConfig) -> None:
    publish_night(config, FIRST)
    history_by_user = histories(config, FIRST)
    users, items = (
        sorted(history_by_user)[:40],
        sorted({item for history in history_by_user.values() for item in history}),
    )
    quiet_users, clicking = users[20:], users[:20]
    clicks = [
        {"id": f"c{at}", "user": user, "item": "new-0" if at % 5 == 0 else items[at]}
        for at, user in enumerate(clicking)
    ]
    new, strangers = new_item_events(6), sent_by(config)
    async with serving(config, events=config.events, precision="fp32") as app:
        answers_before = await lists(app, quiet_users)
        assert (await send(app, new))["accepted"] == 6
        await wait_for_live(app, lambda live: len(live.new_items) == 6)
        assert (await send(app, clicks))["accepted"] == 20

        async def all_count() -> bool:
            return all("events" in answer for answer in await lists(app, clicking))

        assert await eventually(all_count)
        day, repeated_answers = await lists(app, clicking), await lists(app, clicking)
        # Users without newer events get the night's list, and filters that need more items than it has search for them.
        assert [answer["items"] for answer in await lists(app, quiet_users)] == [
            answer["items"] for answer in answers_before
        ]
        filtered = await lists(app, [*quiet_users, *clicking], filter=IN_STOCK)
        live = await lists(app, strangers)
        cached_answers = await lists(app, strangers)
        by_id = (await lists(app, [STRANGER]))[0]

        take_events.run(config)
        second = publish_night(config, SECOND)
        await wait_for_live(app, lambda live: live.generation == second)
        assert len(live_of(app).new_items) == 0
        night = await lists(app, clicking)
        night_filtered = await lists(app, [*quiet_users, *clicking], filter=IN_STOCK)
        night_live = await lists(app, strangers)

    assert sum(bool(new_in(answer)) for answer in day) > 10
    for at, (day_answer, theirs) in enumerate(zip(day, night, strict=True)):
        assert "new-0" not in day_answer["items"] or at % 5
        assert day_answer["producer"] == "live" and theirs["producer"] == "batch"
        assert day_answer["items"] == theirs["items"] and day_answer["scores"] == theirs["scores"]
    assert [answer["source"] for answer in repeated_answers] == ["l1"] * 20
    assert [answer["items"] for answer in repeated_answers] == [answer["items"] for answer in day]
    assert sum(bool(new_in(answer)) for answer in filtered) > 20
    assert not {"new-1", "new-3", "new-5"} & set().union(*map(new_in, filtered))
    searched = [
        (day_answer["items"], theirs["items"])
        for day_answer, theirs in zip(filtered, night_filtered, strict=True)
        if new_in(day_answer)
    ]
    assert all(day_items == theirs for day_items, theirs in searched)
    assert any(map(new_in, live))
    for day_answer, theirs, cached_answer in zip(live, night_live, cached_answers, strict=True):
        assert day_answer["source"] == "live" and cached_answer["source"] == "l1"
        assert day_answer["items"] == theirs["items"] == cached_answer["items"]
    # A lookup by id alone sends no input, so it gets no new items.
    assert by_id["producer"] == "live" and not new_in(by_id)
    assert [item for item in live[1]["items"] if item not in new_in(live[1])] == by_id["items"][
        : len(live[1]["items"]) - len(new_in(live[1]))
    ]


async def test_a_new_item_in_a_full_history_takes_the_place_that_the_next_night_gives_it(config: NightConfig) -> None:
    # int8 is not calibrated for histories this short.
    gates = replace(config.gates, skew_overlap=0.0, skew_cosine=0.0)
    config = replace(config, history_limit=4, gates=gates)
    publish_night(config, FIRST)
    history_by_user = histories(config, FIRST)
    users = [user for user in sorted(history_by_user) if len(history_by_user[user]) > 5][:10]
    clicks = [{"id": f"c{at}", "user": user, "item": "new-0"} for at, user in enumerate(users)]
    tables = ("user_topk", "user_vector")
    async with serving(config, events=config.events, precision="fp32") as app:

        async def answers(table: str) -> list[dict[str, Any]]:
            batch = await app.post(f"/v1/lookup/{table}", {"entities": users})
            table_answers: list[dict[str, Any]] = batch["answers"]
            return table_answers

        await send(app, clicks)

        async def all_count() -> bool:
            return all("events" in answer for answer in await answers("user_vector"))

        assert await eventually(all_count)
        unheard = await answers("user_vector")
        await send(app, new_item_events(2))
        await wait_for_live(app, lambda live: len(live.new_items) == 2)
        day = {table: await answers(table) for table in tables}
        take_events.run(config)
        second = publish_night(config, SECOND)
        await wait_for_live(app, lambda live: live.generation == second)
        night = {table: await answers(table) for table in tables}

    for unheard_answer, day_answer, theirs in zip(unheard, day["user_vector"], night["user_vector"], strict=True):
        assert day_answer["producer"] == "live" and theirs["producer"] == "batch"
        assert day_answer["vector"] == theirs["vector"] != unheard_answer["vector"]
    for day_answer, theirs in zip(day["user_topk"], night["user_topk"], strict=True):
        assert "approximate" not in day_answer and "new-0" not in day_answer["items"]
        assert day_answer["items"] == theirs["items"] and day_answer["scores"] == theirs["scores"]


async def test_answers_that_name_no_new_items(config: NightConfig) -> None:
    publish_night(config, FIRST)
    user = min(histories(config, FIRST))
    async with serving(config, events=config.events) as app:
        await send(app, new_item_events(6))
        await wait_for_live(app, lambda live: len(live.new_items) == 6)
        entity = sent_by(config)[0]
        (named,) = await lists(app, [entity])
        assert new_in(named)
        new_items = sorted(new_in(named))
        (without,) = await lists(app, [entity], exclude=new_items[:1])
        assert new_items[0] not in without["items"] and new_in(without) == set(new_items[1:])
        (history_answer,) = await lists(app, [{**entity, "history": [*entity["history"], new_items[0]]}])
        assert new_items[0] not in history_answer["items"] and history_answer["dropped_history"] == 1
        for options in (
            {"max_events": 0}, {"rerank": {"diversify": {"attribute": "brand", "most": 3}}},
            {"rerank": {"diversify": {"attribute": "brand", "most": 3}}, "filter": IN_STOCK},
        ):  # fmt: skip
            (answer,) = await lists(app, [entity], **options)
            assert answer["items"] and not new_in(answer), options
        (stored_answer,) = await lists(app, [user])
        assert stored_answer["producer"] == "batch" and not new_in(stored_answer)
        items = sorted({item for history in histories(config, FIRST).values() for item in history})
        similar = await app.post("/v1/lookup/item_similar", {"entities": items[:20], "filter": IN_STOCK})
        assert not any(map(new_in, similar["answers"]))
        scored = await app.post("/v1/score", {"user": user, "items": ["new-0", items[0]]})
        assert scored["unknown"] == ["new-0"]

        explanation = await app.post("/v1/explain/user_topk", {"entities": [entity]})
        assert [new_item["item"] for new_item in explanation["new_items"]] == [
            item for item in named["items"] if item in new_in(named)
        ]

        holder = app.service.follower.holder
        blocklist = Blocklist(9, items=frozenset([new_items[0].encode()]))
        await holder.put_own_blocklist_in_force(blocklist)
        assert new_items[0] not in (await lists(app, [entity]))[0]["items"]
        await wait_for_live(app, lambda live: len(live.new_items) == 5)
        (answer,) = await lists(app, [entity])
        assert new_in(answer) == set(new_items[1:]) and not answer["short"]
        newer_events = newer_events_of(app.service)
        assert new_items[0].encode() not in newer_events.items
        raw = new_items[0].encode()
        assert not newer_events.values.values_of_items([raw], 0).values_of_item(raw)


async def test_the_oldest_goes_and_what_changes_an_item_changes_its_lists(config: NightConfig) -> None:
    config = replace(config, events=replace(config.events, new_items=2))
    publish_night(config, FIRST)
    entities = [
        {**entity, "features": {"country": country}}
        for entity in sent_by(config) if "id" not in entity
        for country in range(5)
    ]  # fmt: skip
    async with serving(config, events=config.events) as app:
        await send(app, new_item_events(3))
        await wait_for_live(app, lambda live: len(live.new_items) == 2)
        ids = [new_item.raw_id for new_item in live_of(app).new_items.items]
        assert ids == [b"new-1", b"new-2"]
        assert (await app.scrape_samples("larder_event_new_items_evicted_total"))[()] == 1
        assert (await app.scrape_samples("larder_events_new_items"))[()] == 2
        first = await lists(app, entities)

        # Change the vector, and a value that filters see
        negated_looks = [-number for number in new_item_events(3)[2]["features"]["looks"]]
        change = {
            "id": "x", "item": "new-2", "features": {"looks": negated_looks}, "attributes": {"stock": False},
        }  # fmt: skip
        digest_before = live_of(app).new_items.digest
        await send(app, [change])
        await wait_for_live(app, lambda live: live.new_items.digest != digest_before)
        second = await lists(app, entities)
        named, named_after = (
            {at for at, answer in enumerate(answers) if "new-2" in answer["items"]} for answers in (first, second)
        )
        assert named and named_after and not named & named_after  # its scores have the other sign
        assert not any(map(new_in, await lists(app, entities, filter=IN_STOCK)))


async def test_what_the_model_cannot_take_is_refused_at_once(
    config: NightConfig, tmp_path: Path, redis_url: str
) -> None:
    publish_night(config, FIRST)
    unfit_events: list[dict[str, Any]] = [
        {"id": "1", "item": "new", "vector": [1.0, 2.0]},
        {"id": "2", "item": "new", "features": {"brand": "acme"}},
        {"id": "3", "item": "new", "features": {"looks": [1.0]}},
    ]
    async with serving(config, events=config.events) as app:
        receipt = await send(app, unfit_events)
        assert receipt["accepted"] == 0
        assert [rejection["reason"] for rejection in receipt["rejected"]] == ["unfit_item"] * 3
        assert "send these as features" in receipt["rejected"][0]["detail"]
        event_counts = await app.scrape_samples("larder_events_total")
        assert event_counts["unfit_item",] == 3

        with redis.Redis.from_url(redis_url) as client:
            client.xadd(config.keyspace().inbox, {"e": b'{"id":"4","item":"new","vector":[1]}'})

            async def is_rejected() -> bool:
                newest_rejections: Any = client.xrevrange(config.keyspace().rejected_events, count=1)
                return (
                    bool(newest_rejections)
                    and newest_rejections[0][1][b"reason"] == b"unfit_item"
                    and b"vector" in str(newest_rejections).encode()
                )

            assert await eventually(is_rejected)

            async def four() -> bool:
                return (await app.scrape_samples("larder_events_total"))["unfit_item",] == 4

            assert await eventually(four)

    other_config = replace(prepare(tmp_path / "other", redis_url, users=60, items=40), events=config.events)
    publish_night(other_config, FIRST)
    async with serving(other_config, events=other_config.events) as app:
        receipt = await send(app, [{"id": "1", "item": "new", "vector": [0.5] * 16}])
        assert [rejection["reason"] for rejection in receipt["rejected"]] == ["fixed_items"]
        assert "import the bundle again with the item" in receipt["rejected"][0]["detail"]


async def test_a_blocked_item_has_no_value_and_gets_none_from_any_source(stream: Stream) -> None:
    stream.hold_generations(STREAM_BEGINNING)
    stream.accept(Event("n1", 0, item=b"known", attributes={"price": 3}))
    stream.accept(Event("n2", 0, item=b"other", attributes={"price": 5}))
    await stream.steps()
    newer_values = stream.newer_events.values
    assert newer_values.values_set_after("item", 0).keys() == {b"known", b"other"}

    stream.holder.blocklist = Blocklist(1, items=frozenset([b"known"]))
    stream.accept(Event("n3", 0, item=b"known", features={"looks": (1.0,)}))
    stream.accept(Event("n4", 0, item=b"other", attributes={"stock": True}))
    await stream.steps()
    assert newer_values.values_set_after("item", 0) == {b"other": {"price": 5, "stock": True}}
    assert len(stream.newer_events.items) == 0 and stream.recheck_count == 0

    stream.holder.blocklist = Blocklist(2)
    await stream.steps()
    assert newer_values.values_set_after("item", 0)[b"known"] == {"price": 3, "looks": [1.0]}
    assert stream.recheck_count == 1


async def test_a_blocked_item_is_forgotten_and_read_again(stream: Stream) -> None:
    stream.hold_generations(STREAM_BEGINNING)
    for at in range(3):
        stream.accept(Event(f"n{at}", 0, item=b"i%d" % at, features={"size": at}, attributes={"stock": True}))
    await stream.steps()
    assert [new_item.raw_id for new_item in stream.newer_events.items.list_items_after(0)] == [b"i0", b"i1", b"i2"]

    stream.holder.blocklist = Blocklist(1, items=frozenset([b"i1"]))
    await stream.steps()
    stream.accept(Event("again", 0, item=b"i1", features={"size": 9}))
    await stream.steps()
    assert [new_item.raw_id for new_item in stream.newer_events.items.list_items_after(0)] == [b"i0", b"i2"]

    stream.holder.blocklist = Blocklist(2)
    await stream.steps()
    assert [new_item.raw_id for new_item in stream.newer_events.items.list_items_after(0)] == [b"i0", b"i2", b"i1"]
    assert stream.newer_events.values.values_of_items([b"i1"], 0).values_of_item(b"i1") == {"size": 9, "stock": True}
