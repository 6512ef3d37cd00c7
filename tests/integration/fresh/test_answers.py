"""Answers of users with newer events, whoever asks and however, and what is told where they cannot be computed."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.config.events import EventsConfig
from cache.events.event import Event
from cache.events.position import Position
from precompute.config.settings import TableConfig
from serving.client import AsyncClient
from serving.client.arrow import read_arrow_answers
from tests.integration.fresh.asking import Told
from tests.integration.fresh.events_world import EventWorld, same_list, until_counted
from tests.integration.nights import prepare
from tests.integration.serving_app import BASE, serving


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> tuple[EventWorld, str]:
    folder: Path = tmp_path_factory.mktemp("events")
    config = prepare(folder, redis_url, users=150, items=120)
    vectors = {
        "user_vector": TableConfig("user_vector", precision="f4")
    }  # what scores are exact by
    sources = replace(config.sources, item_attributes=("category",))
    world = EventWorld(replace(config, tables={**config.tables, **vectors}, sources=sources))
    return world, world.publish()


async def test_an_event_changes_the_answers_of_its_user_and_of_nobody_else(told: Told) -> None:
    user, other = told.world.known[:2]
    before, others = await told.one(user), await told.one(other)
    await told.one(user)  # ready in L1 from here on
    item = before["items"][0]

    await told.clicks(user, item)
    answers = [await told.one(user) for _ in range(4)]

    assert [each["source"] for each in answers] == ["live", "l1", "l1", "l1"]
    for each in answers:
        assert item not in each["items"] and (each["events"], each["producer"]) == (1, "live")
        assert same_list(each, *told.expected(user)) and "approximate" not in each
    ready = told.app.service.tiers.local.ready(b"/v1/lookup/user_topk/" + user.encode())
    assert ready is not None and ready.is_newer
    assert ready.events is told.app.service.ladder.newer.packed[user.encode()]
    # The next event ends the ready answer, and nobody else noticed anything.
    await told.clicks(user, answers[0]["items"][0])
    again = await told.one(user)
    assert again["source"] == "live" and again["events"] == 2
    assert same_list(again, *told.expected(user))
    unchanged = await told.one(other)
    assert unchanged["items"] == others["items"] and "events" not in unchanged
    assert (await told.one(user, max_events=0))["items"] == before["items"]


async def test_every_way_of_asking_gets_the_same_answer(told: Told) -> None:
    user, other = told.world.known[2:4]
    await told.clicks(user, told.world.items[3], told.world.items[4])
    items, scores = told.expected(user)
    http = told.app.http
    body = {"entities": [other, user]}

    one = await told.one(user)
    batch = (await told.app.post("/v1/lookup/user_topk", body))["answers"]
    tables = {
        "entities": [{"id": user, "table": "user_topk"}, {"id": user, "table": "user_vector"}]
    }
    many = (await told.app.post("/v1/lookup", tables))["answers"]
    arrow = await http.post(
        "/v1/lookup/user_topk", json=body, headers={"accept": "application/vnd.apache.arrow.stream"}
    )
    rows = read_arrow_answers(arrow.content, 2)
    client = AsyncClient(BASE, transport=http._transport)
    own = await client.lookup("user_topk", user)

    for answer in (one, batch[1], many[0]):
        assert answer["events"] == 2 and same_list(answer, items, scores)
    assert "events" not in batch[0] and batch[0]["producer"] == "batch"
    assert rows[1].events == 2 and list(rows[1].items or ()) == one["items"]
    assert rows[1].approximate is False and rows[1].as_of == one["as_of"]
    assert own.events == 2 and list(own.items or ()) == one["items"]
    # The vector is that of the same history: it ranks candidates as the list is ranked.
    assert many[1]["events"] == 2
    ranked = await told.app.post("/v1/score", {"user": user, "items": items[::-1]})
    assert same_list(ranked, items, scores) and ranked["events"] == 2


async def test_what_passes_a_filter_says_as_well_that_newer_events_are_why_it_is_live(
    told: Told,
) -> None:
    user = told.world.known[30]
    await told.clicks(user, told.world.items[5])
    body = {"entities": [user], "k": 50, "filter": {"==": ["category", "bags"]}}

    (answer,) = (await told.app.post("/v1/lookup/user_topk", body))["answers"]

    assert (answer["source"], answer["reason"], answer["events"]) == ("live", "newer_events", 1)
    counted = await told.app.counted("larder_misses_total")
    assert counted["newer_events", "user_topk"] and ("internal_error", "user_topk") not in counted


async def test_what_callers_send_of_known_users_is_left_out_and_changes_nothing_else(
    told: Told,
) -> None:
    user = told.world.known[4]
    await told.clicks(user, told.world.items[5])
    items, _ = told.expected(user)

    sent = {"id": user, "history": [items[0], items[2]]}
    answer = (await told.app.post("/v1/lookup/user_topk", {"entities": [sent]}))["answers"][0]

    wanted = [each for each in items if each not in (items[0], items[2])]
    assert answer["items"] == wanted and answer["events"] == 1


async def test_strangers_are_answered_from_what_they_sent_and_then_their_events(
    told: Told,
) -> None:
    clicks = told.world.items[6:9]
    await told.clicks("a-stranger", *clicks)

    alone = await told.one("a-stranger")
    sent = {"id": "a-stranger", "history": told.world.items[20:22]}
    both = (await told.app.post("/v1/lookup/user_topk", {"entities": [sent]}))["answers"][0]

    assert alone["source"] == "live" and same_list(alone, *told.expected("a-stranger"))
    again = (await told.app.post("/v1/lookup/user_topk", {"entities": [sent]}))["answers"][0]
    assert both["source"] == "live" and again["source"] == "l1" and both["events"] == 3
    assert not {*clicks, *sent["history"]} & {*both["items"]}
    # Nobody gets what was computed from what another one sent.
    assert (await told.one("a-stranger"))["items"] == alone["items"]
    as_if = {"id": None, "history": [*sent["history"], *clicks]}
    plain = (await told.app.post("/v1/lookup/user_topk", {"entities": [as_if]}))["answers"][0]
    assert len({*plain["items"][:10]} & {*both["items"][:10]}) >= 8  # int8 here, fp32 there


async def test_under_overload_the_stored_list_less_the_events_items_is_told_as_what_it_is(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, stranger = told.world.known[5], "nobody-else"
    stored = await told.one(user)
    await told.clicks(user, stored["items"][1])
    await told.clicks(stranger, stored["items"][1])
    monkeypatch.setattr(told.app.service.ladder._inferences, "admit", lambda: False)

    answer, other = await told.one(user), await told.one(stranger)

    left = [each for each in stored["items"] if each != stored["items"][1]]
    assert answer["items"] == left and answer["source"] in ("l1", "l2")
    assert (answer["live"], answer["approximate"], answer["events"]) == ("overloaded", True, 1)
    assert other["source"] == "default" and other["reason"] == "not_in_generation"
    assert stored["items"][1] not in other["items"] and other["approximate"] is True


async def test_without_a_model_for_events_the_stored_list_answers(told: Told) -> None:
    user = told.world.known[6]
    stored = await told.one(user)
    await told.clicks(user, stored["items"][0])
    shelf = told.app.service.follower.shelf
    held = shelf.holding
    assert held is not None and held.live.events is not None
    lame = replace(held.live, events=replace(held.live.events, predictor=None))
    shelf.put(dataclasses.replace(held, live=lame))

    answer = await told.one(user)

    assert answer["items"] == stored["items"][1:] and answer["approximate"] is True
    assert answer["source"] in ("l1", "l2") and answer["events"] == 1


async def test_lists_found_by_the_index_say_so_also_in_l1_and_to_other_replicas(
    told: Told,
) -> None:
    user = told.world.known[7]
    by_index = EventsConfig(enabled=True, exact_bytes=0)
    async with serving(told.world.config, events=by_index) as one:
        found = told._replace(app=one)
        await found.clicks(user, told.world.items[9])
        answers = [await found.one(user) for _ in range(3)]
    async with serving(told.world.config, events=by_index) as other:
        await until_counted(other, told.world)
        answers.append(await told._replace(app=other).one(user))

    assert [each["source"] for each in answers] == ["live", "l1", "l1", "l2"]
    assert all(each["approximate"] for each in answers)
    assert all(each["items"] == answers[0]["items"] for each in answers)


async def test_each_entity_is_counted_once_by_source_and_those_with_events_by_table(
    told: Told,
) -> None:
    users = told.world.known[10:20]
    for user in users[:5]:
        await told.clicks(user, told.world.items[10])
    for _ in range(3):
        await told.app.post("/v1/lookup/user_topk", {"entities": users})
        for user in users:
            await told.one(user)

    entities = await told.app.counted("larder_entities_total")
    answers = await told.app.counted("larder_answers_total")
    changed = await told.app.counted("larder_event_answers_total")
    misses = await told.app.counted("larder_misses_total")

    assert entities["user_topk",] == 60
    assert sum(count for (_, table), count in answers.items() if table == "user_topk") == 60
    assert answers["live", "user_topk"] == 5 == misses["newer_events", "user_topk"]
    assert changed["user_topk",] == 30
    held = await told.app.counted("larder_events_users")
    assert held[()] == len({event.user for _, event in told.world.accepted})


async def test_blocked_users_and_items_stay_out(told: Told) -> None:
    user, friend = told.world.known[20:22]
    item = (await told.one(friend))["items"][0]
    await told.clicks(user, item)
    await told.clicks(friend, told.world.items[11])
    shelf = told.app.service.follower.shelf
    blocklist = replace(
        shelf.blocklist,
        version=9,
        users=frozenset([user.encode()]),
        items=frozenset([item.encode()]),
    )
    await shelf.block(blocklist)

    answer, other = await told.one(user), await told.one(friend)

    assert answer["reason"] == "entity_blocked" and "events" not in answer
    items, _ = told.expected(friend)
    assert other["items"] == [each for each in items if each != item]


async def test_an_explanation_tells_the_events_and_makes_an_earlier_answer_again(
    told: Told,
) -> None:
    user = told.world.known[22]
    await told.clicks(user, told.world.items[12])
    first = await told.one(user)
    position = told.world.accepted[-1][0]
    await told.clicks(user, first["items"][0])
    newest = await told.one(user)

    now = await told.app.get(f"/v1/explain/user_topk/{user}")
    then = await told.app.get(f"/v1/explain/user_topk/{user}", as_of=str(position))

    assert [each["item"] for each in now["events"]["counted"]] == [
        told.world.items[12], first["items"][0],
    ]  # fmt: skip
    assert now["model"]["computed_from"] == "events" and now["model"]["items"] == newest["items"]
    assert then["model"]["items"] == first["items"] and then["answer"]["tier"] == "l1"
    assert then["events"]["counted"][-1]["position"] == str(position)
    assert np.allclose(then["model"]["scores"], first["scores"])
    refused = await told.app.http.get(f"/v1/explain/user_topk/{user}", params={"as_of": "noon"})
    assert refused.status_code == 422 and refused.json()["error"]["field"] == "as_of"


async def test_a_search_under_a_filter_counts_once_for_the_table_that_was_asked(told: Told) -> None:
    known, clicked = told.world.known[40:42]
    await told.clicks(clicked, told.world.items[5])
    entities = [known, clicked, {"id": "new", "history": told.world.items[:2]}, "nobody"]
    body = {"entities": entities, "k": 50, "filter": {"==": ["category", "bags"]}}

    answers = (await told.app.post("/v1/lookup/user_topk", body))["answers"]

    names = ("entities", "answers", "misses", "event_answers", "l1_misses")
    counted = {name: await told.app.counted(f"larder_{name}_total") for name in names}
    assert {labels[-1] for found in counted.values() for labels in found} == {"user_topk"}
    assert counted["entities"]["user_topk",] == 4 and counted["event_answers"]["user_topk",] == 1
    for source in ("l2", "live", "default"):
        of_source = sum(each["source"] == source for each in answers)
        assert counted["answers"].get((source, "user_topk"), 0) == of_source > 0
    reasons = [each["reason"] for each in answers if each["source"] in ("live", "default")]
    for reason in reasons:
        assert counted["misses"][reason, "user_topk"] == reasons.count(reason)


async def test_an_event_between_the_list_and_its_vector_is_counted_by_neither(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, filter_ = told.world.known[43], {"==": ["category", "bags"]}
    body = {"entities": [user], "k": 50, "filter": filter_}
    await told.clicks(user, told.world.items[5])
    (before,) = (await told.app.post("/v1/lookup/user_topk", body))["answers"]
    resolve = told.app.service.ladder.resolve
    late = Event("late", 1_790_000_000_000_000, user.encode(), before["items"][0].encode())

    async def resolved(*args: Any) -> list[dict[str, Any]]:
        answers = await resolve(*args)
        position = Position(told.world.accepted[-1][0].ms + 1, 0)
        told.app.service.ladder.newer.users.add(position, late)
        return answers

    monkeypatch.setattr(told.app.service.ladder, "resolve", resolved)
    (during,) = (await told.app.post("/v1/lookup/user_topk", body))["answers"]
    (after,) = (await told.app.post("/v1/lookup/user_topk", body))["answers"]

    assert (during["events"], during["items"], during["scores"]) == (
        1, before["items"], before["scores"],
    )  # fmt: skip
    assert after["events"] == 2 and before["items"][0] not in after["items"]
