"""Users with a history whom no model answers: their inputs are published, so that events are added to these."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.format.ids import hash_id
from cache.format.manifest import Manifest
from cache.format.records.layout import ABSENT
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
    nothing = {"country": None, "mood": None}
    rows = [row | nothing if row["user"] in users else row for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


def test_whoever_has_a_history_is_there_without_an_answer(featured: Month) -> None:
    month, lost = featured, featured.ids("user")[:3]
    without_features(month, lost)

    generation = month.publish()

    manifest: Manifest = read_manifest(month.config.store(), generation)
    table, found = inputs_of(month.config, generation)
    seed = manifest.entity_sets["user"].seed
    histories = nights.histories(month.config)
    for user in lost:
        published = found[hash_id(user.encode(), seed)]
        assert set(table.ids_of(published.items.astype("u4"))) == {*histories[user]}
        assert published.features == {}
    records = nights.raw_records(month.config, generation, lost, "user_topk")
    assert {each[14] for each in records.values()} == {ABSENT} and len(records) == 3
    # and: the next night, which copies, says the same
    month.night = 1
    full = scored(month.full, month.cut)
    assert month.differences(month.publish(), full) == []


@dataclass(frozen=True)
class Shop:
    """A service whose night has histories of some users, `lost`, and no features that its models take of them."""

    app: Running
    lost: list[str]
    items: list[str]
    had: dict[str, set[str]]

    async def ask(self, entity: Any, table: str = "user_topk", **options: Any) -> dict[str, Any]:
        """The answer for one entity."""
        body = {"entities": [entity], **options}
        (answer,) = (await self.app.post(f"/v1/lookup/{table}", body))["answers"]
        return dict(answer)

    async def click(self, user: str, item: str) -> None:
        """Send an event and wait until answers count it."""
        event = {"id": f"e-{user}-{item}", "user": user, "item": item}
        sent = await self.app.http.post("/v1/events", json={"events": [event]})
        assert sent.json()["accepted"] == 1, sent.text

        async def counts() -> bool:
            return (await self.ask(user)).get("events") == 1

        assert await eventually(counts)


@pytest.fixture
async def shop(featured: Month) -> AsyncIterator[Shop]:
    month, lost = featured, featured.ids("user")[:4]
    without_features(month, lost)
    items = pq.read_table(month.config.path("items.parquet"))["item"].to_pylist()
    add_columns(
        month.config, "items.parquet", title=items, half=[at % 2 for at in range(len(items))]
    )
    month.configure(sources=replace(month.config.sources, item_attributes=("title", "half")))
    month.publish()
    had = {user: {*history} for user, history in nights.histories(month.config).items()}
    config = month.config
    async with serving(config, events=config.events, events_url=config.events_url) as app:
        yield Shop(app, lost, items, had)


def only(item: str) -> dict[str, Any]:
    return {"==": ["title", item]}


@pytest.mark.parametrize("fresh", [False, True])
async def test_a_click_leaves_who_has_no_record_the_answer_that_is_computed_from_what_is_sent(
    shop: Shop, fresh: bool
) -> None:
    user, half = shop.lost[0], {"==": ["half", 1]}
    had = sorted(shop.had[user])
    new = [item for item in shop.items if item not in shop.had[user]]
    sent: dict[str, Any] = {"history": new[:2], "features": {"country": 3}}
    before = await shop.ask({"id": user, **sent})
    await shop.click(user, new[2])
    await shop.click("stranger", new[2])
    options: dict[str, Any] = {"k": 10} | ({"fresh": True} if fresh else {})

    asked: list[dict[str, Any]] = [options, options | {"filter": half}]
    for each in asked:
        mine = await shop.ask({"id": user, **sent}, **each)
        theirs = await shop.ask({"id": "stranger", **sent}, exclude=had, **each)
        assert (mine["source"], mine["events"]) == ("live", 1) and "approximate" not in mine
        kept = [item for item in mine["items"] if item in theirs["items"]]
        assert kept == theirs["items"][: len(kept)] and len(kept) >= len(theirs["items"])
        assert not {*had, *new[:3]} & {*mine["items"]}
    vectors = [
        await shop.ask({"id": each, **sent}, "user_vector", fresh=fresh)
        for each in (user, "stranger")
    ]
    assert before["source"] == "live" and before["reason"] == "not_in_generation"
    assert vectors[0]["events"] == 1 and np.array_equal(vectors[0]["vector"], vectors[1]["vector"])
    # What one caller sends is no answer for who sends something else, or nothing.
    other = await shop.ask({"id": user, "history": new[4:6], "features": {"country": 2}})
    assert other["source"] == "live" and new[4] not in other["items"]
    assert (await shop.ask(user))["source"] in ("default", "l1")


async def test_events_that_cannot_be_counted_leave_the_live_answer_less_their_items(
    shop: Shop,
) -> None:
    user = shop.lost[1]
    new = [item for item in shop.items if item not in shop.had[user]]
    sent: dict[str, Any] = {"history": new[:2], "features": {"country": 3}}
    before = await shop.ask({"id": None, **sent}, exclude=sorted(shop.had[user]))
    await shop.click(user, before["items"][0])
    shelf = shop.app.service.follower.shelf
    held = shelf.holding
    assert held is not None and held.live.events is not None
    lame = replace(held.live, events=replace(held.live.events, predictor=None))
    shelf.put(replace(held, live=lame))

    after = await shop.ask({"id": user, **sent})

    assert after["source"] == "live" and after["approximate"] is True
    assert before["items"][0] not in after["items"]
    kept = [item for item in after["items"] if item in before["items"]]
    assert kept == before["items"][1:]


@pytest.mark.parametrize("history", [None, 3], ids=["nothing sent", "sent"])
async def test_what_was_had_by_the_night_is_left_out_of_who_has_no_record(
    shop: Shop, history: int | None
) -> None:
    user = shop.lost[2]
    new = [item for item in shop.items if item not in shop.had[user]]
    sent = {} if history is None else {"history": new[:history], "features": {"country": 3}}
    entity = {"id": user, **sent}
    one_had = min(shop.had[user])

    of_had = await shop.ask(entity, k=1, filter=only(one_had))
    of_new = await shop.ask(entity, k=1, filter=only(new[-1]))
    whole = await shop.ask(entity, k=10)

    assert (of_had["items"], of_had["short"]) == ([], True)
    assert of_new["short"] is False
    assert not shop.had[user] & {*whole["items"], *of_new["items"]}
    assert whole["producer"] == ("defaults" if history is None else "live")
    explained = await shop.app.get(f"/v1/explain/user_topk/{user}")
    if history is None:
        assert explained["default"]["items"] == (await shop.ask(entity))["items"]


@dataclass(frozen=True)
class Moods:
    """A service with values of users by a feature that the user tower does not take, and a user of each kind.

    `brings` a vector along and has a record of values, as `clicks`, who brings none; `lacks` has no such record.
    """

    shop: Shop
    brings: str
    clicks: str
    lacks: str

    async def ask(self, user: str, mood: list[float] | None = None, **options: Any) -> Any:
        """The values of one user, who sends a mood or nothing."""
        sent = {} if mood is None else {"features": {"mood": mood}}
        return await self.shop.ask({"id": user, **sent}, "user_mood", **options)


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
    had = {user: {*history} for user, history in nights.histories(month.config).items()}
    config = month.config
    async with serving(config, events=config.events, events_url=config.events_url) as app:
        yield Moods(Shop(app, [lacks], items, had), brings, clicks, lacks)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("kind", ["brings", "clicks"])
async def test_a_click_leaves_who_has_a_record_of_values_that_record_whatever_is_sent(
    moods: Moods, kind: str, fresh: bool
) -> None:
    # Given a user with a record of values and a click
    user = str(getattr(moods, kind))
    before = await moods.ask(user)
    await moods.shop.click(user, moods.shop.items[0])

    # When values are asked for with another mood, and without one
    plain = await moods.ask(user, fresh=fresh)
    sent = await moods.ask(user, [9.0, -9.0], fresh=fresh)
    body = {"entities": [{"id": user, "features": {"mood": [9.0, -9.0]}}], "fresh": fresh}
    explained = await moods.shop.app.post("/v1/explain/user_mood", body)

    # Then both are what the night stored, and say so
    assert before["values"] == plain["values"] == sent["values"] != [9.0, -9.0]
    for answer in (plain, sent):
        assert (answer["producer"], answer["live"]) == ("batch", "no_usable_input")
        assert answer["approximate"] is True and answer["events"] == 1
    assert sent.get("reason") == plain.get("reason")
    # and: so does an explanation
    assert explained["answer"]["tier"] in ("l1", "l2")
    assert explained["record"]["values"] == before["values"]


async def test_a_click_leaves_who_has_no_record_of_values_those_of_what_is_sent(
    moods: Moods,
) -> None:
    # Given a user whom the night knows and has no values of, with a click
    user = moods.lacks
    await moods.shop.click(user, moods.shop.items[0])

    # When a mood is sent, then another one, then none
    first, second = await moods.ask(user, [9.0, -9.0]), await moods.ask(user, [1.0, 2.0])
    again = await moods.ask(user, [1.0, 2.0])
    body = {"entities": [{"id": user, "features": {"mood": [3.0, 2.0]}}]}
    explained = await moods.shop.app.post("/v1/explain/user_mood", body)
    nothing = await moods.ask(user)

    # Then values are those of the mood, and of nothing there are none
    assert (first["values"], first["source"]) == ([9.0, -9.0], "live")
    assert (second["values"], second["source"]) == ([1.0, 2.0], "live")
    assert (again["values"], again["source"]) == ([1.0, 2.0], "l1")
    assert not any("approximate" in answer for answer in (first, second, again))
    assert first["events"] == 1 and nothing["values"] is None
    # and: an explanation says that live would answer
    assert explained["answer"]["tier"] == "live"
    assert explained["model"]["values"] == [3.0, 2.0]
