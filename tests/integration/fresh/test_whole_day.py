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
    had = histories(config, FIRST)
    items = sorted({item for each in had.values() for item in each})
    first, second, third, fourth = sorted(had)[:4]
    new = [item for item in items if item not in had[first]]
    found: list[dict[str, Any]] = [
        *({"user": first, "item": item} for item in new[:5]),
        {"user": first, "item": had[first][0]},  # again
        {"user": second, "item": had[second][-1], "time": 1_600_000_000},  # long ago, and known
        {"user": second, "attributes": {"country": 3}},
        {"user": third, "attributes": {"country": 1}},
        {"user": fourth, "item": new[7], "weight": 0},  # counts for nobody
        {"user": STRANGER, "attributes": {"country": 2}},
        {"user": STRANGER, "item": new[1]},
    ]
    return [{"id": f"e{number}", **each} for number, each in enumerate(found)]


async def lists_of(app: Running, users: list[str]) -> dict[str, dict[str, Any]]:
    """Answers of the table of lists, by user."""
    return {each: await app.get(f"/v1/lookup/user_topk/{each}") for each in users}


@pytest.fixture
def config(tmp_path: Path, redis_url: str) -> NightConfig:
    return replace(prepared(tmp_path, redis_url), events=EventsConfig(enabled=True))


async def test_an_answer_with_events_is_the_list_that_the_next_night_publishes(
    config: NightConfig,
) -> None:
    first = publish_night(config, FIRST)
    events = events_of(config)
    counted = [each for each in events if each.get("weight") != 0]
    users = sorted({each["user"] for each in counted})
    async with serving(config, events=config.events) as app:
        before = await lists_of(app, users)
        sent = await app.http.post("/v1/events", json={"events": events})
        assert sent.status_code == 202 and sent.json()["accepted"] == len(events), sent.text

        async def all_count() -> bool:
            told = await lists_of(app, users)
            seen: list[int] = [each.get("events", 0) for each in told.values()]
            return sum(seen) == len(counted)

        assert await eventually(all_count)
        day = await lists_of(app, users)

        async def archived() -> bool:
            """True if the archive was read: the document waits a moment for it, and goes without it."""
            shown = (await app.get("/dashboard/data"))["events"]
            return shown["taken_until"] is not None

        assert await eventually(archived, 20.0)
        shown = (await app.get("/dashboard/data"))["events"]
        assert shown["counted_until"] == sent.json()["position"] and shown["lag_s"] == 0.0
        assert shown["users"] == len(users)
        assert shown["published_until"] == shown["taken_until"] == "0-0"
        assert shown["answers"] >= len(users) and shown["list_change"] > 0
        assert all("approximate" not in each for each in day.values())
        assert all(day[each]["items"] != before[each]["items"] for each in users)

        position = take_events.run(config)["events_until"]
        second = publish_night(config, SECOND)

        async def flipped() -> bool:
            generation: str = (await lists_of(app, users[:1]))[users[0]]["generation"]
            return generation == second

        assert await eventually(flipped)
        night = await lists_of(app, users)

        async def published() -> bool:
            shown = (await app.get("/dashboard/data"))["events"]
            return bool(shown["published_until"] == shown["taken_until"] == position)

        assert await eventually(published, 20.0)

    assert second != first and position == sent.json()["position"]
    for user in users:
        ours, theirs = day[user], night[user]
        assert ours["producer"] == "live" and theirs["producer"] == "batch", user
        assert "events" not in theirs and theirs["source"] in ("l1", "l2"), user
        assert ours["items"] == theirs["items"], user
        np.testing.assert_array_equal(ours["scores"], theirs["scores"], user)
