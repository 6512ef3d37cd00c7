"""Users who brought a vector along are told apart: the lists of all others are computed from newer events."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from cache.format.directory import Directory
from cache.format.ids import hash_id
from cache.format.seen_items import SeenItems
from precompute.config.settings import NightConfig
from tests.integration.changed.month import Month, scored
from tests.integration.changed.worlds import WORLDS, add_columns
from tests.integration.serving_app import Running, eventually, serving
from tests.integration.taking.clicking import click, draw_mixed_events, take_all_events, with_events
from tests.opened import open_generation


@pytest.fixture
def month(tmp_path: Path, redis_url: str, seed: int) -> Month:
    """Month in which every other user brings a vector."""
    drawn_month = WORLDS["vectors"](tmp_path / "night", redis_url, seed, users=120, items=90)
    return with_events(drawn_month, redis_url)


def with_vector(config: NightConfig) -> set[str]:
    return set(pq.read_table(config.path("user_vectors.parquet"))["user"].to_pylist())


def find_brought_vectors(config: NightConfig, generation: str, users: list[str]) -> dict[str, bool]:
    """Users whom the generation knows, and of whom it says that they brought one."""
    manifest, root = open_generation(config.store(), generation)
    directory = Directory.open(root, manifest.entity_sets["user"])
    seen_items = SeenItems.open(root, manifest, directory)
    assert seen_items is not None
    position_by_user = {user: directory.find_position(hash_id(user.encode(), directory.seed)) for user in users}
    return {
        user: seen_items.has_brought_vector(position) for user, position in position_by_user.items() if position >= 0
    }


def test_nights_say_who_brought_a_vector_and_copies_say_the_same(month: Month) -> None:
    for number in range(2):
        month.night = number
        click(month.config, draw_mixed_events(month, f"n{number}", 12))
        full = take_all_events(month.full)
        generation = month.publish()

        assert month.differences(generation, scored(full, month.cut)) == []
        has_vector_by_user = find_brought_vectors(month.config, generation, month.ids("user"))
        users_with_vector = with_vector(month.config)
        assert has_vector_by_user == {user: user in users_with_vector for user in has_vector_by_user} and {
            *has_vector_by_user.values()
        } == {True, False}
    assert month.reasons(generation)["copied"] > 0


async def test_lists_of_those_without_are_those_of_the_next_night(month: Month) -> None:
    generation = month.publish()
    users = month.ids("user")
    users_with_vector = with_vector(month.config)
    has_vector_by_user = find_brought_vectors(month.config, generation, users)
    users_without_vector = [user for user in has_vector_by_user if user not in users_with_vector][:5]
    theirs = [user for user in has_vector_by_user if user in users_with_vector][:5]
    async with serving(month.config, events=month.config.events, events_url=month.config.events_url) as app:
        path = "/v1/lookup/user_topk"
        answers_before = (await app.post(path, {"entities": theirs}))["answers"]
        events = [
            {"id": f"e-{user}", "user": user, "item": month.ids("item")[number]}
            for number, user in enumerate([*users_without_vector, *theirs])
        ]
        response = await app.http.post("/v1/events", json={"events": events})
        assert response.json()["accepted"] == len(events), response.text

        async def all_count() -> bool:
            answers = (await app.post(path, {"entities": [*users_without_vector, *theirs]}))["answers"]
            return all(answer.get("events") == 1 for answer in answers)

        assert await eventually(all_count)
        day = (await app.post(path, {"entities": [*users_without_vector, *theirs]}))["answers"]
    month.night = 1
    take_all_events(month.config)
    month.publish()
    async with serving(month.config) as app:
        night = (await app.post(path, {"entities": users_without_vector}))["answers"]

    assert users_without_vector and theirs
    for mine, next_ in zip(day[: len(users_without_vector)], night, strict=True):
        assert mine["producer"] == "live" and "approximate" not in mine
        assert mine["items"] == next_["items"]
    for mine, stored_answer, event in zip(
        day[len(users_without_vector) :], answers_before, events[len(users_without_vector) :], strict=True
    ):
        assert mine["approximate"] is True and mine["producer"] == "batch"
        assert mine["items"] == [item for item in stored_answer["items"] if item != event["item"]]


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


async def look_up(app: Running, users: list[Any], **options: Any) -> list[dict[str, Any]]:
    """Answers of user_topk, as many items as a list has."""
    body = {"entities": users, "k": 10, **options}
    answers: list[dict[str, Any]] = (await app.post("/v1/lookup/user_topk", body))["answers"]
    return answers


async def send_clicks(app: Running, clicks: dict[str, str]) -> None:
    """Send an event of each user and wait until answers count them."""
    events = [{"id": f"e-{user}", "user": user, "item": item} for user, item in clicks.items()]
    response = await app.http.post("/v1/events", json={"events": events})
    assert response.json()["accepted"] == len(events), response.text

    async def all_count() -> bool:
        answers = await look_up(app, [*clicks])
        return all(answer.get("events") == 1 for answer in answers)

    assert await eventually(all_count)


def assert_same(day: dict[str, Any], night: dict[str, Any]) -> None:
    """The night publishes what the day answered: items and scores."""
    assert day["items"] == night["items"]
    assert np.allclose(day["scores"], night["scores"], rtol=1e-3)


@pytest.mark.parametrize("rerank", [None, RERANK], ids=["plain", "reranked"])
async def test_searches_under_a_filter_count_the_events_that_the_answer_tells_of(filtered: Month, rerank: Any) -> None:
    month = filtered
    generation = month.publish()
    users = month.ids("user")
    users_with_vector = with_vector(month.config)
    has_vector_by_user = find_brought_vectors(month.config, generation, users)
    users_without_vector = [user for user in has_vector_by_user if user not in users_with_vector][:5]
    theirs = [user for user in has_vector_by_user if user in users_with_vector][:5]
    options = {"filter": IN_STOCK} | ({} if rerank is None else {"rerank": rerank})
    async with serving(month.config, events=month.config.events, events_url=month.config.events_url) as app:
        answers_before = await look_up(app, [*users_without_vector, *theirs], **options)
        clicks = {answer["id"]: answer["items"][0] for answer in answers_before}
        await send_clicks(app, clicks)
        day = await look_up(app, [*users_without_vector, *theirs], **options)
        scored = [
            await app.post("/v1/score", {"user": user, "items": answer["items"]})
            for user, answer in zip(users_without_vector, day, strict=False)
        ]
    month.night = 1
    take_all_events(month.config)
    month.publish()
    async with serving(month.config) as app:
        night = await look_up(app, [*users_without_vector, *theirs], **options)

    for user, mine, next_, old in zip([*users_without_vector, *theirs], day, night, answers_before, strict=True):
        assert mine["events"] == 1, user
        assert_same(mine, next_)
        if user in users_without_vector:
            assert mine["producer"] == "live" and "approximate" not in mine
            assert mine["scores"][0] != old["scores"][1]
    for user, answer, candidates in zip(users_without_vector, day, scored, strict=False):
        assert candidates["events"] == 1, user
        assert np.allclose(sorted(candidates["scores"]), sorted(answer["scores"]), rtol=1e-3)


async def test_a_strangers_search_under_a_filter_counts_what_was_sent_and_then_the_events(filtered: Month) -> None:
    month = filtered
    month.publish()
    items = month.ids("item")
    stranger_entity = {"id": "a-stranger", "history": items[10:13]}
    async with serving(month.config, events=month.config.events, events_url=month.config.events_url) as app:
        answer_before = (await look_up(app, [stranger_entity], filter=IN_STOCK))[0]
        await send_clicks(app, {"a-stranger": items[20]})
        (answer_with_event,) = await look_up(app, [stranger_entity], filter=IN_STOCK)
        equivalent_entity = {"id": None, "history": [*items[10:13], items[20]]}
        (equivalent_answer,) = await look_up(app, [equivalent_entity], filter=IN_STOCK)

    assert answer_with_event["events"] == 1 and items[20] not in answer_with_event["items"]
    assert np.allclose(answer_with_event["scores"], equivalent_answer["scores"], rtol=0.05)
    assert not np.allclose(answer_with_event["scores"], answer_before["scores"], rtol=0.05)
