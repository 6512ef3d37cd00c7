"""Users with a history whom no model answers: their inputs are published, so that events are added to these."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.events.event_predictor import GenerationEvents
from cache.format.ids import hash_id
from cache.format.manifest import Manifest
from cache.records import ABSENT_FLAGS
from cache.store.artefacts import read_manifest
from tests.integration import nights
from tests.integration.changed.month import Month, scored
from tests.integration.changed.worlds import add_columns
from tests.integration.feature_towers import vectors_column
from tests.integration.serving_app import Running, eventually, serving
from tests.integration.taking.test_inputs import inputs_of


def without_features(month: Month, users: list[str]) -> None:
    """Clears what every model wants of some users."""
    path = month.config.path("users.parquet")
    table = pq.read_table(path)
    empty_features = {"country": None, "mood": None}
    rows = [row | empty_features if row["user"] in users else row for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


def test_users_with_a_history_are_published_without_an_answer(featured: Month) -> None:
    month, users_without_features = featured, featured.ids("user")[:3]
    without_features(month, users_without_features)

    generation = month.publish()

    manifest: Manifest = read_manifest(month.config.store(), generation)
    table, input_by_hash = inputs_of(month.config, generation)
    seed = manifest.entity_sets["user"].seed
    histories = nights.histories(month.config)
    for user in users_without_features:
        published = input_by_hash[hash_id(user.encode(), seed)]
        assert set(table.ids_of(published.item_ordinals.astype("u4"))) == {*histories[user]}
        assert published.features == {}
    records = nights.raw_records(month.config, generation, users_without_features, "user_topk")
    assert {raw_record[14] for raw_record in records.values()} == {ABSENT_FLAGS} and len(records) == 3
    # and: the next night, which copies, has the same users without an answer
    month.night = 1
    full = scored(month.full, month.cut)
    assert month.differences(month.publish(), full) == []


@dataclass(frozen=True)
class Shop:
    """A service whose night has histories of some users, `lost`, and no features that its models take of them."""

    app: Running
    users_without_features: list[str]
    items: list[str]
    history_items_by_user: dict[str, set[str]]

    async def look_up(self, entity: Any, table: str = "user_topk", **options: Any) -> dict[str, Any]:
        """The answer for one entity."""
        body = {"entities": [entity], **options}
        (answer,) = (await self.app.post(f"/v1/lookup/{table}", body))["answers"]
        return dict(answer)

    async def click(self, user: str, item: str) -> None:
        """Send an event and wait until answers count it."""
        event = {"id": f"e-{user}-{item}", "user": user, "item": item}
        response = await self.app.http.post("/v1/events", json={"events": [event]})
        assert response.json()["accepted"] == 1, response.text

        async def counts() -> bool:
            return (await self.look_up(user)).get("events") == 1

        assert await eventually(counts)


@pytest.fixture
async def shop(featured: Month) -> AsyncIterator[Shop]:
    month, users_without_features = featured, featured.ids("user")[:4]
    without_features(month, users_without_features)
    items = pq.read_table(month.config.path("items.parquet"))["item"].to_pylist()
    add_columns(month.config, "items.parquet", title=items, half=[at % 2 for at in range(len(items))])
    month.configure(sources=replace(month.config.sources, item_attributes=("title", "half")))
    month.publish()
    history_items_by_user = {user: {*history} for user, history in nights.histories(month.config).items()}
    config = month.config
    async with serving(config, events=config.events, events_url=config.events_url) as app:
        yield Shop(app, users_without_features, items, history_items_by_user)


def only(item: str) -> dict[str, Any]:
    return {"==": ["title", item]}


@pytest.mark.parametrize("fresh", [False, True])
async def test_a_click_leaves_who_has_no_record_the_answer_that_is_computed_from_what_is_sent(
    shop: Shop, fresh: bool
) -> None:
    user, half = shop.users_without_features[0], {"==": ["half", 1]}
    had_items = sorted(shop.history_items_by_user[user])
    new = [item for item in shop.items if item not in shop.history_items_by_user[user]]
    caller_input: dict[str, Any] = {"history": new[:2], "features": {"country": 3}}
    answer_before = await shop.look_up({"id": user, **caller_input})
    await shop.click(user, new[2])
    await shop.click("stranger", new[2])
    options: dict[str, Any] = {"k": 10} | ({"fresh": True} if fresh else {})

    option_sets: list[dict[str, Any]] = [options, options | {"filter": half}]
    for option_set in option_sets:
        mine = await shop.look_up({"id": user, **caller_input}, **option_set)
        theirs = await shop.look_up({"id": "stranger", **caller_input}, exclude=had_items, **option_set)
        assert (mine["source"], mine["events"]) == ("live", 1) and "approximate" not in mine
        common_items = [item for item in mine["items"] if item in theirs["items"]]
        assert common_items == theirs["items"][: len(common_items)] and len(common_items) >= len(theirs["items"])
        assert not {*had_items, *new[:3]} & {*mine["items"]}
    vectors = [
        await shop.look_up({"id": entity_id, **caller_input}, "user_vector", fresh=fresh)
        for entity_id in (user, "stranger")
    ]
    assert answer_before["source"] == "live" and answer_before["reason"] == "not_in_generation"
    assert vectors[0]["events"] == 1 and np.array_equal(vectors[0]["vector"], vectors[1]["vector"])
    # A caller who sends another input, or none, does not get what was computed from this one.
    answer_to_other_input = await shop.look_up({"id": user, "history": new[4:6], "features": {"country": 2}})
    assert answer_to_other_input["source"] == "live" and new[4] not in answer_to_other_input["items"]
    assert (await shop.look_up(user))["source"] in ("default", "l1")


async def test_events_that_cannot_be_counted_leave_the_live_answer_less_their_items(shop: Shop) -> None:
    user = shop.users_without_features[1]
    new = [item for item in shop.items if item not in shop.history_items_by_user[user]]
    caller_input: dict[str, Any] = {"history": new[:2], "features": {"country": 3}}
    answer_before = await shop.look_up({"id": None, **caller_input}, exclude=sorted(shop.history_items_by_user[user]))
    await shop.click(user, answer_before["items"][0])
    holder = shop.app.service.follower.holder
    served = holder.served
    events = None if served is None else served.live.part(GenerationEvents)
    assert served is not None and events is not None
    lame = served.live.with_part(replace(events, predictor=None))
    holder.replace_served(replace(served, live=lame))

    after = await shop.look_up({"id": user, **caller_input})

    assert after["source"] == "live" and after["approximate"] is True
    assert answer_before["items"][0] not in after["items"]
    common_items = [item for item in after["items"] if item in answer_before["items"]]
    assert common_items == answer_before["items"][1:]


@pytest.mark.parametrize("history", [None, 3], ids=["nothing sent", "sent"])
async def test_what_was_had_by_the_night_is_left_out_of_who_has_no_record(shop: Shop, history: int | None) -> None:
    user = shop.users_without_features[2]
    new = [item for item in shop.items if item not in shop.history_items_by_user[user]]
    caller_input = {} if history is None else {"history": new[:history], "features": {"country": 3}}
    entity = {"id": user, **caller_input}
    one_had = min(shop.history_items_by_user[user])

    of_had = await shop.look_up(entity, k=1, filter=only(one_had))
    of_new = await shop.look_up(entity, k=1, filter=only(new[-1]))
    full_answer = await shop.look_up(entity, k=10)

    assert (of_had["items"], of_had["short"]) == ([], True)
    assert of_new["short"] is False
    assert not shop.history_items_by_user[user] & {*full_answer["items"], *of_new["items"]}
    assert full_answer["producer"] == ("defaults" if history is None else "live")
    explained = await shop.app.get(f"/v1/explain/user_topk/{user}")
    if history is None:
        assert explained["default"]["items"] == (await shop.look_up(entity))["items"]


@dataclass(frozen=True)
class Moods:
    """A service with values of users by a feature that the user tower does not take, and a user of each kind.

    `brings` a vector along and has a record of values, as `clicks`, who brings none; `lacks` has no such record.
    """

    shop: Shop
    brings: str
    clicks: str
    lacks: str

    async def look_up_mood(self, user: str, mood: list[float] | None = None, **options: Any) -> Any:
        """The values of one user, who sends a mood or nothing."""
        caller_input = {} if mood is None else {"features": {"mood": mood}}
        return await self.shop.look_up({"id": user, **caller_input}, "user_mood", **options)


@pytest.fixture
async def moods(featured: Month) -> AsyncIterator[Moods]:
    month, config = featured, featured.config
    rows = pq.read_table(config.path("users.parquet")).to_pylist()
    lacks, *_ = [row["user"] for row in rows if row["mood"] is None]
    brings, clicks, *_ = [row["user"] for row in rows if row["mood"] is not None]
    vector = pa.table({"user": [brings], "vector": vectors_column(1, 4)})
    pq.write_table(vector, config.path("user_vectors.parquet"))
    month.configure(sources=replace(config.sources, user_vectors="user_vectors.parquet"))
    month.publish()
    items = pq.read_table(config.path("items.parquet"))["item"].to_pylist()
    history_items_by_user = {user: {*history} for user, history in nights.histories(month.config).items()}
    config = month.config
    async with serving(config, events=config.events, events_url=config.events_url) as app:
        yield Moods(Shop(app, [lacks], items, history_items_by_user), brings, clicks, lacks)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("kind", ["brings", "clicks"])
async def test_a_click_leaves_who_has_a_record_of_values_that_record_whatever_is_sent(
    moods: Moods, kind: str, fresh: bool
) -> None:
    # Given a user with a record of values and a click
    user = str(getattr(moods, kind))
    answer_before = await moods.look_up_mood(user)
    await moods.shop.click(user, moods.shop.items[0])

    # When values are requested with another mood, and without one
    answer_without_mood = await moods.look_up_mood(user, fresh=fresh)
    answer_with_mood = await moods.look_up_mood(user, [9.0, -9.0], fresh=fresh)
    body = {"entities": [{"id": user, "features": {"mood": [9.0, -9.0]}}], "fresh": fresh}
    explained = await moods.shop.app.post("/v1/explain/user_mood", body)

    # Then both answers are the record that the night stored, and say so
    assert answer_before["values"] == answer_without_mood["values"] == answer_with_mood["values"] != [9.0, -9.0]
    for answer in (answer_without_mood, answer_with_mood):
        assert (answer["producer"], answer["live"]) == ("batch", "no_usable_input")
        assert answer["approximate"] is True and answer["events"] == 1
    assert answer_with_mood.get("reason") == answer_without_mood.get("reason")
    # and: the explanation agrees
    assert explained["answer"]["tier"] in ("l1", "l2")
    assert explained["record"]["values"] == answer_before["values"]


async def test_a_click_leaves_who_has_no_record_of_values_those_of_what_is_sent(moods: Moods) -> None:
    # Given a user whom the night knows and has no values for, with a click
    user = moods.lacks
    await moods.shop.click(user, moods.shop.items[0])

    # When a mood is sent, then another one, then none
    first, second = (await moods.look_up_mood(user, [9.0, -9.0]), await moods.look_up_mood(user, [1.0, 2.0]))
    repeated_answer = await moods.look_up_mood(user, [1.0, 2.0])
    body = {"entities": [{"id": user, "features": {"mood": [3.0, 2.0]}}]}
    explained = await moods.shop.app.post("/v1/explain/user_mood", body)
    answer_without_mood = await moods.look_up_mood(user)

    # Then the values are computed from the mood that was sent, and there are none if none was sent
    assert (first["values"], first["source"]) == ([9.0, -9.0], "live")
    assert (second["values"], second["source"]) == ([1.0, 2.0], "live")
    assert (repeated_answer["values"], repeated_answer["source"]) == ([1.0, 2.0], "l1")
    assert not any("approximate" in answer for answer in (first, second, repeated_answer))
    assert first["events"] == 1 and answer_without_mood["values"] is None
    # and: an explanation says that the live model would answer
    assert explained["answer"]["tier"] == "live"
    assert explained["model"]["values"] == [3.0, 2.0]
