"""A day from one night to the next: events come over HTTP, answers count them, and the next night takes them over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.config.events import EventsConfig
from precompute.config.settings import NightConfig
from precompute.steps import take_events
from tests.integration.attributes.test_night import FIRST, SECOND, prepared
from tests.integration.nights import histories, publish_night
from tests.integration.serving_app import Running, eventually, serving

STRANGER = "somebody-new"


def events_of(config: NightConfig) -> list[dict[str, Any]]:
    """Clicks of known users on items new to them and known, an attribute of two, and a stranger with both."""
    history_by_user = histories(config, FIRST)
    items = sorted({item for history in history_by_user.values() for item in history})
    first, second, third, fourth = sorted(history_by_user)[:4]
    new = [item for item in items if item not in history_by_user[first]]
    events: list[dict[str, Any]] = [
        *({"user": first, "item": item} for item in new[:5]),
        {"user": first, "item": history_by_user[first][0]},  # again
        {"user": second, "item": history_by_user[second][-1], "time": 1_600_000_000},  # long ago, and known
        {"user": second, "attributes": {"country": 3}},
        {"user": third, "attributes": {"country": 1}},
        {"user": fourth, "item": new[7], "weight": 0},  # counts for nobody
        {"user": STRANGER, "attributes": {"country": 2}},
        {"user": STRANGER, "item": new[1]},
    ]
    return [{"id": f"e{number}", **event} for number, event in enumerate(events)]


async def lists_of(app: Running, users: list[str]) -> dict[str, dict[str, Any]]:
    """Answers of the table of lists, by user."""
    return {user: await app.get(f"/v1/lookup/user_topk/{user}") for user in users}


@pytest.fixture
def config(tmp_path: Path, redis_url: str) -> NightConfig:
    return replace(prepared(tmp_path, redis_url), events=EventsConfig(enabled=True))


async def test_an_answer_with_events_is_the_list_that_the_next_night_publishes(config: NightConfig) -> None:
    first = publish_night(config, FIRST)
    events = events_of(config)
    counted_events = [event for event in events if event.get("weight") != 0]
    users = sorted({event["user"] for event in counted_events})
    async with serving(config, events=config.events) as app:
        answers_before = await lists_of(app, users)
        response = await app.http.post("/v1/events", json={"events": events})
        assert response.status_code == 202 and response.json()["accepted"] == len(events), response.text

        async def all_count() -> bool:
            answers = await lists_of(app, users)
            event_counts: list[int] = [answer.get("events", 0) for answer in answers.values()]
            return sum(event_counts) == len(counted_events)

        assert await eventually(all_count)
        day = await lists_of(app, users)

        async def archived() -> bool:
            """True if the archive was read: the document waits a moment for it, and goes without it."""
            events_section = (await app.get("/dashboard/data"))["events"]
            return events_section["taken_until"] is not None

        assert await eventually(archived, 20.0)
        events_section = (await app.get("/dashboard/data"))["events"]
        assert events_section["counted_until"] == response.json()["position"] and events_section["lag_s"] == 0.0
        assert events_section["users"] == len(users)
        assert events_section["published_until"] == events_section["taken_until"] == "0-0"
        assert events_section["answers"] >= len(users) and events_section["list_change"] > 0
        assert all("approximate" not in answer for answer in day.values())
        assert all(day[user]["items"] != answers_before[user]["items"] for user in users)

        position = take_events.run(config)["events_until"]
        second = publish_night(config, SECOND)

        async def flipped() -> bool:
            generation: str = (await lists_of(app, users[:1]))[users[0]]["generation"]
            return generation == second

        assert await eventually(flipped)
        night = await lists_of(app, users)

        async def published() -> bool:
            events_section = (await app.get("/dashboard/data"))["events"]
            return bool(events_section["published_until"] == events_section["taken_until"] == position)

        assert await eventually(published, 20.0)

    assert second != first and position == response.json()["position"]
    for user in users:
        day_answer, theirs = day[user], night[user]
        assert day_answer["producer"] == "live" and theirs["producer"] == "batch", user
        assert "events" not in theirs and theirs["source"] in ("l1", "l2"), user
        assert day_answer["items"] == theirs["items"], user
        np.testing.assert_array_equal(day_answer["scores"], theirs["scores"], user)
