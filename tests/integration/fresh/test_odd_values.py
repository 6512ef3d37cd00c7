"""Answers while events set what the user tower cannot take: its user alone is answered as stored, and told so."""

from pathlib import Path

import pytest

from cache.events.event import Event
from tests.integration.fresh.asking import ServedWorld
from tests.integration.fresh.events_world import EventWorld, same_list, until_counted
from tests.integration.fresh.test_equal import feature_world


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> tuple[EventWorld, str]:
    folder: Path = tmp_path_factory.mktemp("odd")
    world = feature_world(folder, redis_url, 40)
    return world, world.publish()


async def test_a_value_beyond_the_towers_table_costs_its_user_alone(served_world: ServedWorld) -> None:
    odd, *other_users = served_world.world.known_users[:8]
    stored_answer = await served_world.get_answer(odd)
    value = Event("odd", 0, odd.encode(), None, attributes={"country": 2**40})
    served_world.world.accept(
        [value, *(served_world.world.event(other_user, served_world.world.items[2]) for other_user in other_users)]
    )
    await until_counted(served_world.app, served_world.world)

    body = {"entities": [odd, *other_users]}
    first, *other_answers = (await served_world.app.post("/v1/lookup/user_topk", body))["answers"]

    assert first["items"] == stored_answer["items"] and first["approximate"] is True
    assert first["live"] == "failed" and first["events"] == 1
    for user, answer in zip(other_users, other_answers, strict=True):
        assert answer["source"] == "live" and "approximate" not in answer
        assert same_list(answer, *served_world.expected(user))

    # And the explanation agrees with the answer
    explanation = await served_world.app.get(f"/v1/explain/user_topk/{odd}")
    assert (explanation["answer"]["tier"], explanation["answer"]["live"]) == (first["source"], "failed")
    assert "live inference could not: failed" in explanation["sentence"]


@pytest.mark.parametrize("value", [None, "se"])
async def test_what_events_cleared_leaves_what_is_sent(served_world: ServedWorld, value: object) -> None:
    # Given events that set the country of one stranger to 3, and clear that of another, or make it a text
    strangers = [f"{name} of {value}" for name in ("first", "second")]
    served_world.world.accept(
        [
            Event(f"odd {stranger}", 0, stranger.encode(), None, attributes={"country": country})
            for stranger, country in zip(strangers, (3, value), strict=True)
        ]
    )
    await until_counted(served_world.app, served_world.world)

    # When both send the same history, and 3 as their country
    sent = {"history": served_world.world.items[:3], "features": {"country": 3}}
    body = {"entities": [{"id": stranger, **sent} for stranger in strangers]}
    first, second = (await served_world.app.post("/v1/lookup/user_topk", body))["answers"]

    # Then both get the same list, computed from it
    assert (first["source"], second["source"]) == ("live", "live") and first["items"] == second["items"]
    assert first["events"] == second["events"] == 1 and "live" not in second
