"""Answers of users with newer events, whoever asks and however, and what is told where they cannot be computed."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.config.events import EventsConfig
from cache.events.event import Event
from cache.events.event_predictor import GenerationEvents
from cache.format.stream_position import Position
from precompute.config.settings import TableConfig
from serving.client import AsyncClient
from serving.client.answers import read_arrow_answers
from tests.attached import newer_events_of
from tests.integration.fresh.asking import ServedWorld
from tests.integration.fresh.events_world import EventWorld, same_list, until_counted
from tests.integration.nights import prepare
from tests.integration.serving_app import BASE, serving


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> tuple[EventWorld, str]:
    folder: Path = tmp_path_factory.mktemp("events")
    config = prepare(folder, redis_url, users=150, items=120)
    vectors = {"user_vector": TableConfig("user_vector", precision="f4")}  # what scores are exact by
    sources = replace(config.sources, item_attributes=("category",))
    world = EventWorld(replace(config, tables={**config.tables, **vectors}, sources=sources))
    return world, world.publish()


async def test_an_event_changes_the_answers_of_its_user_and_no_others(served_world: ServedWorld) -> None:
    user, other_user = served_world.world.known_users[:2]
    answer_before, other_answer = (await served_world.get_answer(user), await served_world.get_answer(other_user))
    await served_world.get_answer(user)  # ready in L1 from here on
    item = answer_before["items"][0]

    await served_world.clicks(user, item)
    answers = [await served_world.get_answer(user) for _ in range(4)]

    assert [answer["source"] for answer in answers] == ["live", "l1", "l1", "l1"]
    for answer in answers:
        assert item not in answer["items"] and (answer["events"], answer["producer"]) == (1, "live")
        assert same_list(answer, *served_world.expected(user)) and "approximate" not in answer
    ready = served_world.app.service.tiers.local_tier.find_ready_answer(b"/v1/lookup/user_topk/" + user.encode())
    assert ready is not None and ready.has_newer_events
    assert ready.user_events is newer_events_of(served_world.app.service).packed_input_by_id[user.encode()]
    # The next event makes the ready answer outdated, and no other user's answer changes.
    await served_world.clicks(user, answers[0]["items"][0])
    later_answer = await served_world.get_answer(user)
    assert later_answer["source"] == "live" and later_answer["events"] == 2
    assert same_list(later_answer, *served_world.expected(user))
    unchanged = await served_world.get_answer(other_user)
    assert unchanged["items"] == other_answer["items"] and "events" not in unchanged
    assert (await served_world.get_answer(user, max_events=0))["items"] == answer_before["items"]


async def test_every_way_of_asking_gets_the_same_answer(served_world: ServedWorld) -> None:
    user, other_user = served_world.world.known_users[2:4]
    await served_world.clicks(user, served_world.world.items[3], served_world.world.items[4])
    items, scores = served_world.expected(user)
    http = served_world.app.http
    body = {"entities": [other_user, user]}

    single_answer = await served_world.get_answer(user)
    batch = (await served_world.app.post("/v1/lookup/user_topk", body))["answers"]
    tables = {"entities": [{"id": user, "table": "user_topk"}, {"id": user, "table": "user_vector"}]}
    table_answers = (await served_world.app.post("/v1/lookup", tables))["answers"]
    arrow = await http.post(
        "/v1/lookup/user_topk", json=body, headers={"accept": "application/vnd.apache.arrow.stream"}
    )
    rows = read_arrow_answers(arrow.content, 2)
    client = AsyncClient(BASE, transport=http._transport)
    client_answer = await client.lookup("user_topk", user)

    for answer in (single_answer, batch[1], table_answers[0]):
        assert answer["events"] == 2 and same_list(answer, items, scores)
    assert "events" not in batch[0] and batch[0]["producer"] == "batch"
    assert rows[1].events == 2 and list(rows[1].items or ()) == single_answer["items"]
    assert rows[1].approximate is False and rows[1].as_of == single_answer["as_of"]
    assert client_answer.events == 2 and list(client_answer.items or ()) == single_answer["items"]
    # The vector is computed from the same history: it ranks candidates as the list is ranked.
    assert table_answers[1]["events"] == 2
    ranked = await served_world.app.post("/v1/score", {"user": user, "items": items[::-1]})
    assert same_list(ranked, items, scores) and ranked["events"] == 2


async def test_what_passes_a_filter_says_as_well_that_newer_events_are_why_it_is_live(
    served_world: ServedWorld,
) -> None:
    user = served_world.world.known_users[30]
    await served_world.clicks(user, served_world.world.items[5])
    body = {"entities": [user], "k": 50, "filter": {"==": ["category", "bags"]}}

    (answer,) = (await served_world.app.post("/v1/lookup/user_topk", body))["answers"]

    assert (answer["source"], answer["reason"], answer["events"]) == ("live", "newer_events", 1)
    miss_counts = await served_world.app.scrape_samples("larder_misses_total")
    assert miss_counts["newer_events", "user_topk"] and ("internal_error", "user_topk") not in miss_counts


async def test_what_callers_send_of_known_users_is_left_out_and_changes_nothing_else(served_world: ServedWorld) -> None:
    user = served_world.world.known_users[4]
    await served_world.clicks(user, served_world.world.items[5])
    items, _ = served_world.expected(user)

    sent_entity = {"id": user, "history": [items[0], items[2]]}
    answer = (await served_world.app.post("/v1/lookup/user_topk", {"entities": [sent_entity]}))["answers"][0]

    expected_items = [item for item in items if item not in (items[0], items[2])]
    assert answer["items"] == expected_items and answer["events"] == 1


async def test_strangers_are_answered_from_what_they_sent_and_then_their_events(served_world: ServedWorld) -> None:
    clicks = served_world.world.items[6:9]
    await served_world.clicks("a-stranger", *clicks)

    alone = await served_world.get_answer("a-stranger")
    sent_entity = {"id": "a-stranger", "history": served_world.world.items[20:22]}
    combined_answer = (await served_world.app.post("/v1/lookup/user_topk", {"entities": [sent_entity]}))["answers"][0]

    assert alone["source"] == "live" and same_list(alone, *served_world.expected("a-stranger"))
    repeated_answer = (await served_world.app.post("/v1/lookup/user_topk", {"entities": [sent_entity]}))["answers"][0]
    assert combined_answer["source"] == "live" and repeated_answer["source"] == "l1" and combined_answer["events"] == 3
    assert not {*clicks, *sent_entity["history"]} & {*combined_answer["items"]}
    # No caller gets what was computed from another caller's input.
    assert (await served_world.get_answer("a-stranger"))["items"] == alone["items"]
    as_if = {"id": None, "history": [*sent_entity["history"], *clicks]}
    anonymous_answer = (await served_world.app.post("/v1/lookup/user_topk", {"entities": [as_if]}))["answers"][0]
    assert len({*anonymous_answer["items"][:10]} & {*combined_answer["items"][:10]}) >= 8  # int8 here, fp32 there


async def test_under_overload_the_stored_list_less_the_events_items_is_marked_as_such(
    served_world: ServedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, stranger = served_world.world.known_users[5], "nobody-else"
    stored_answer = await served_world.get_answer(user)
    await served_world.clicks(user, stored_answer["items"][1])
    await served_world.clicks(stranger, stored_answer["items"][1])
    monkeypatch.setattr(served_world.app.service.ladder._inferences, "admit_input", lambda: False)

    answer, stranger_answer = (await served_world.get_answer(user), await served_world.get_answer(stranger))

    remaining_items = [item for item in stored_answer["items"] if item != stored_answer["items"][1]]
    assert answer["items"] == remaining_items and answer["source"] in ("l1", "l2")
    assert (answer["live"], answer["approximate"], answer["events"]) == ("overloaded", True, 1)
    assert stranger_answer["source"] == "default" and stranger_answer["reason"] == "not_in_generation"
    assert stored_answer["items"][1] not in stranger_answer["items"] and stranger_answer["approximate"] is True


async def test_without_a_model_for_events_the_stored_list_answers(served_world: ServedWorld) -> None:
    user = served_world.world.known_users[6]
    stored_answer = await served_world.get_answer(user)
    await served_world.clicks(user, stored_answer["items"][0])
    holder = served_world.app.service.follower.holder
    served = holder.served
    events = None if served is None else served.live.part(GenerationEvents)
    assert served is not None and events is not None
    lame = served.live.with_part(replace(events, predictor=None))
    holder.replace_served(dataclasses.replace(served, live=lame))

    answer = await served_world.get_answer(user)

    assert answer["items"] == stored_answer["items"][1:] and answer["approximate"] is True
    assert answer["source"] in ("l1", "l2") and answer["events"] == 1


async def test_lists_found_by_the_index_say_so_also_in_l1_and_to_other_replicas(served_world: ServedWorld) -> None:
    user = served_world.world.known_users[7]
    by_index = EventsConfig(enabled=True, exact_bytes=0)
    async with serving(served_world.world.config, events=by_index) as first_app:
        asker = served_world._replace(app=first_app)
        await asker.clicks(user, served_world.world.items[9])
        answers = [await asker.get_answer(user) for _ in range(3)]
    async with serving(served_world.world.config, events=by_index) as other_app:
        await until_counted(other_app, served_world.world)
        answers.append(await served_world._replace(app=other_app).get_answer(user))

    assert [answer["source"] for answer in answers] == ["live", "l1", "l1", "l2"]
    assert all(answer["approximate"] for answer in answers)
    assert all(answer["items"] == answers[0]["items"] for answer in answers)


async def test_every_entity_is_counted_once_by_source_and_those_with_events_by_table(served_world: ServedWorld) -> None:
    users = served_world.world.known_users[10:20]
    for user in users[:5]:
        await served_world.clicks(user, served_world.world.items[10])
    for _ in range(3):
        await served_world.app.post("/v1/lookup/user_topk", {"entities": users})
        for user in users:
            await served_world.get_answer(user)

    entities = await served_world.app.scrape_samples("larder_entities_total")
    answers = await served_world.app.scrape_samples("larder_answers_total")
    event_answer_counts = await served_world.app.scrape_samples("larder_event_answers_total")
    misses = await served_world.app.scrape_samples("larder_misses_total")

    assert entities["user_topk",] == 60
    assert sum(count for (_, table), count in answers.items() if table == "user_topk") == 60
    assert answers["live", "user_topk"] == 5 == misses["newer_events", "user_topk"]
    assert event_answer_counts["user_topk",] == 30
    event_user_counts = await served_world.app.scrape_samples("larder_events_users")
    assert event_user_counts[()] == len({event.user for _, event in served_world.world.accepted})


async def test_blocked_users_and_items_stay_out(served_world: ServedWorld) -> None:
    user, friend = served_world.world.known_users[20:22]
    item = (await served_world.get_answer(friend))["items"][0]
    await served_world.clicks(user, item)
    await served_world.clicks(friend, served_world.world.items[11])
    holder = served_world.app.service.follower.holder
    blocklist = replace(holder.blocklist, version=9, users=frozenset([user.encode()]), items=frozenset([item.encode()]))
    await holder.put_own_blocklist_in_force(blocklist)

    answer, friend_answer = (await served_world.get_answer(user), await served_world.get_answer(friend))

    assert answer["reason"] == "entity_blocked" and "events" not in answer
    items, _ = served_world.expected(friend)
    assert friend_answer["items"] == [listed_item for listed_item in items if listed_item != item]


async def test_events_on_an_erased_item_do_not_count(served_world: ServedWorld) -> None:
    user = served_world.world.known_users[23]
    await served_world.clicks(user, served_world.world.items[13])
    answer_before = await served_world.get_answer(user)
    item = answer_before["items"][0]
    await served_world.clicks(user, item)
    assert (await served_world.get_answer(user))["events"] == 2
    holder = served_world.app.service.follower.holder
    erased_items = frozenset([item.encode()])
    await holder.put_own_blocklist_in_force(
        replace(holder.blocklist, version=9, items=erased_items, erased_items=erased_items)
    )

    answer = await served_world.get_answer(user)
    explanation = await served_world.app.get(f"/v1/explain/user_topk/{user}")

    assert (answer["events"], answer["as_of"]) == (1, answer_before["as_of"])
    assert answer["items"] == answer_before["items"][1:]
    assert [event["item"] for event in explanation["events"]["counted"]] == [served_world.world.items[13]]


async def test_an_explanation_tells_the_events_and_makes_an_earlier_answer_again(served_world: ServedWorld) -> None:
    user = served_world.world.known_users[22]
    await served_world.clicks(user, served_world.world.items[12])
    first = await served_world.get_answer(user)
    position = served_world.world.accepted[-1][0]
    await served_world.clicks(user, first["items"][0])
    newest_answer = await served_world.get_answer(user)

    newest_explanation = await served_world.app.get(f"/v1/explain/user_topk/{user}")
    then = await served_world.app.get(f"/v1/explain/user_topk/{user}", as_of=str(position))

    assert [event["item"] for event in newest_explanation["events"]["counted"]] == [
        served_world.world.items[12], first["items"][0],
    ]  # fmt: skip
    assert (
        newest_explanation["model"]["computed_from"] == "events"
        and newest_explanation["model"]["items"] == newest_answer["items"]
    )
    assert then["model"]["items"] == first["items"] and then["answer"]["tier"] == "l1"
    assert then["events"]["counted"][-1]["position"] == str(position)
    assert np.allclose(then["model"]["scores"], first["scores"])
    refused = await served_world.app.http.get(f"/v1/explain/user_topk/{user}", params={"as_of": "noon"})
    assert refused.status_code == 422 and refused.json()["error"]["field"] == "as_of"


async def test_a_search_under_a_filter_counts_once_for_the_table_that_was_asked(served_world: ServedWorld) -> None:
    quiet_user, clicked = served_world.world.known_users[40:42]
    await served_world.clicks(clicked, served_world.world.items[5])
    entities = [quiet_user, clicked, {"id": "new", "history": served_world.world.items[:2]}, "nobody"]
    body = {"entities": entities, "k": 50, "filter": {"==": ["category", "bags"]}}

    answers = (await served_world.app.post("/v1/lookup/user_topk", body))["answers"]

    names = ("entities", "answers", "misses", "event_answers", "l1_misses")
    counts_by_metric = {name: await served_world.app.scrape_samples(f"larder_{name}_total") for name in names}
    assert {labels[-1] for counts in counts_by_metric.values() for labels in counts} == {"user_topk"}
    assert counts_by_metric["entities"]["user_topk",] == 4 and counts_by_metric["event_answers"]["user_topk",] == 1
    for source in ("l2", "live", "default"):
        of_source = sum(answer["source"] == source for answer in answers)
        assert counts_by_metric["answers"].get((source, "user_topk"), 0) == of_source > 0
    reasons = [answer["reason"] for answer in answers if answer["source"] in ("live", "default")]
    for reason in reasons:
        assert counts_by_metric["misses"][reason, "user_topk"] == reasons.count(reason)


async def test_an_event_between_the_list_and_its_vector_is_counted_by_neither(
    served_world: ServedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, filter_ = served_world.world.known_users[43], {"==": ["category", "bags"]}
    body = {"entities": [user], "k": 50, "filter": filter_}
    await served_world.clicks(user, served_world.world.items[5])
    (answer_before,) = (await served_world.app.post("/v1/lookup/user_topk", body))["answers"]
    resolve = served_world.app.service.ladder.resolve
    late = Event("late", 1_790_000_000_000_000, user.encode(), answer_before["items"][0].encode())

    async def resolved(*args: Any) -> list[dict[str, Any]]:
        answers = await resolve(*args)
        position = Position(served_world.world.accepted[-1][0].ms + 1, 0)
        newer_events_of(served_world.app.service).users.add(position, late)
        return answers

    monkeypatch.setattr(served_world.app.service.ladder, "resolve", resolved)
    (during,) = (await served_world.app.post("/v1/lookup/user_topk", body))["answers"]
    (after,) = (await served_world.app.post("/v1/lookup/user_topk", body))["answers"]

    assert (during["events"], during["items"], during["scores"]) == (
        1, answer_before["items"], answer_before["scores"],
    )  # fmt: skip
    assert after["events"] == 2 and answer_before["items"][0] not in after["items"]
