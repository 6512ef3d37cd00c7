"""Users who brought a vector along are told apart: the lists of all others are computed from newer events."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from cache.events.seen import SeenItems
from cache.format.directory import Directory
from cache.format.ids import hash_id
from precompute.config.settings import NightConfig
from tests.integration.changed.month import Month, scored
from tests.integration.changed.worlds import WORLDS, add_columns
from tests.integration.serving_app import Running, eventually, serving
from tests.integration.taking.clicking import click, some, taken, with_events
from tests.opened import open_generation


@pytest.fixture
def month(tmp_path: Path, redis_url: str, seed: int) -> Month:
    """Month in which every other user brings a vector."""
    made = WORLDS["vectors"](tmp_path / "night", redis_url, seed, users=120, items=90)
    return with_events(made, redis_url)


def with_vector(config: NightConfig) -> set[str]:
    return set(pq.read_table(config.path("user_vectors.parquet"))["user"].to_pylist())


def told_apart(config: NightConfig, generation: str, users: list[str]) -> dict[str, bool]:
    """Users whom the generation knows, and of whom it says that they brought one."""
    manifest, root = open_generation(config.store(), generation)
    directory = Directory.open(root, manifest.entity_sets["user"])
    seen = SeenItems.open(root, manifest, directory)
    assert seen is not None
    places = {each: directory.find(hash_id(each.encode(), directory.seed)) for each in users}
    return {each: seen.brought_vector(place) for each, place in places.items() if place >= 0}


def test_nights_say_who_brought_a_vector_and_copies_say_the_same(month: Month) -> None:
    for number in range(2):
        month.night = number
        click(month.config, some(month, f"n{number}", 12))
        full = taken(month.full)
        generation = month.publish()

        assert month.differences(generation, scored(full, month.cut)) == []
        found = told_apart(month.config, generation, month.ids("user"))
        brought = with_vector(month.config)
        assert found == {each: each in brought for each in found} and {*found.values()} == {
            True,
            False,
        }
    assert month.reasons(generation)["copied"] > 0


async def test_lists_of_those_without_are_those_of_the_next_night(month: Month) -> None:
    generation = month.publish()
    users = month.ids("user")
    brought = with_vector(month.config)
    known = told_apart(month.config, generation, users)
    ours = [each for each in known if each not in brought][:5]
    theirs = [each for each in known if each in brought][:5]
    async with serving(
        month.config, events=month.config.events, events_url=month.config.events_url
    ) as app:
        path = "/v1/lookup/user_topk"
        before = (await app.post(path, {"entities": theirs}))["answers"]
        events = [
            {"id": f"e-{user}", "user": user, "item": month.ids("item")[number]}
            for number, user in enumerate([*ours, *theirs])
        ]
        sent = await app.http.post("/v1/events", json={"events": events})
        assert sent.json()["accepted"] == len(events), sent.text

        async def all_count() -> bool:
            told = (await app.post(path, {"entities": [*ours, *theirs]}))["answers"]
            return all(each.get("events") == 1 for each in told)

        assert await eventually(all_count)
        day = (await app.post(path, {"entities": [*ours, *theirs]}))["answers"]
    month.night = 1
    taken(month.config)
    month.publish()
    async with serving(month.config) as app:
        night = (await app.post(path, {"entities": ours}))["answers"]

    assert ours and theirs
    for mine, next_ in zip(day[: len(ours)], night, strict=True):
        assert mine["producer"] == "live" and "approximate" not in mine
        assert mine["items"] == next_["items"]
    for mine, stored, event in zip(day[len(ours) :], before, events[len(ours) :], strict=True):
        assert mine["approximate"] is True and mine["producer"] == "batch"
        assert mine["items"] == [each for each in stored["items"] if each != event["item"]]


IN_STOCK: dict[str, Any] = {"==": ["stock", True]}
RERANK: dict[str, Any] = {"boost": [{"filter": IN_STOCK, "factor": 2.0}]}


@pytest.fixture
def filtered(month: Month) -> Month:
    """The same month, whose items can be filtered by whether they are in stock."""
    count = len(month.ids("item"))
    add_columns(month.config, "items.parquet", stock=[number % 2 == 0 for number in range(count)])
    sources = replace(month.config.sources, item_attributes=("stock",))
    month.configure(sources=sources)
    return month


async def asked(app: Running, users: list[Any], **options: Any) -> list[dict[str, Any]]:
    """Answers of user_topk, as many items as a list has."""
    body = {"entities": users, "k": 10, **options}
    found: list[dict[str, Any]] = (await app.post("/v1/lookup/user_topk", body))["answers"]
    return found


async def send_clicks(app: Running, clicks: dict[str, str]) -> None:
    """Send an event of each user and wait until answers count them."""
    events = [{"id": f"e-{user}", "user": user, "item": item} for user, item in clicks.items()]
    sent = await app.http.post("/v1/events", json={"events": events})
    assert sent.json()["accepted"] == len(events), sent.text

    async def all_count() -> bool:
        told = await asked(app, [*clicks])
        return all(each.get("events") == 1 for each in told)

    assert await eventually(all_count)


def assert_same(day: dict[str, Any], night: dict[str, Any]) -> None:
    """The night publishes what the day answered: items and scores."""
    assert day["items"] == night["items"]
    assert np.allclose(day["scores"], night["scores"], rtol=1e-3)


@pytest.mark.parametrize("rerank", [None, RERANK], ids=["plain", "reranked"])
async def test_searches_under_a_filter_count_the_events_that_the_answer_tells_of(
    filtered: Month, rerank: Any
) -> None:
    month = filtered
    generation = month.publish()
    users = month.ids("user")
    brought = with_vector(month.config)
    known = told_apart(month.config, generation, users)
    ours = [user for user in known if user not in brought][:5]
    theirs = [user for user in known if user in brought][:5]
    options = {"filter": IN_STOCK} | ({} if rerank is None else {"rerank": rerank})
    async with serving(
        month.config, events=month.config.events, events_url=month.config.events_url
    ) as app:
        before = await asked(app, [*ours, *theirs], **options)
        clicks = {answer["id"]: answer["items"][0] for answer in before}
        await send_clicks(app, clicks)
        day = await asked(app, [*ours, *theirs], **options)
        scored = [
            await app.post("/v1/score", {"user": user, "items": answer["items"]})
            for user, answer in zip(ours, day, strict=False)
        ]
    month.night = 1
    taken(month.config)
    month.publish()
    async with serving(month.config) as app:
        night = await asked(app, [*ours, *theirs], **options)

    for user, mine, next_, old in zip([*ours, *theirs], day, night, before, strict=True):
        assert mine["events"] == 1, user
        assert_same(mine, next_)
        if user in ours:
            assert mine["producer"] == "live" and "approximate" not in mine
            assert mine["scores"][0] != old["scores"][1]
    for user, answer, candidates in zip(ours, day, scored, strict=False):
        assert candidates["events"] == 1, user
        assert np.allclose(sorted(candidates["scores"]), sorted(answer["scores"]), rtol=1e-3)


async def test_a_strangers_search_under_a_filter_counts_what_was_sent_and_then_the_events(
    filtered: Month,
) -> None:
    month = filtered
    month.publish()
    items = month.ids("item")
    sent = {"id": "a-stranger", "history": items[10:13]}
    async with serving(
        month.config, events=month.config.events, events_url=month.config.events_url
    ) as app:
        before = (await asked(app, [sent], filter=IN_STOCK))[0]
        await send_clicks(app, {"a-stranger": items[20]})
        (counted,) = await asked(app, [sent], filter=IN_STOCK)
        same = {"id": None, "history": [*items[10:13], items[20]]}
        (plain,) = await asked(app, [same], filter=IN_STOCK)

    assert counted["events"] == 1 and items[20] not in counted["items"]
    assert np.allclose(counted["scores"], plain["scores"], rtol=0.05)
    assert not np.allclose(counted["scores"], before["scores"], rtol=0.05)
