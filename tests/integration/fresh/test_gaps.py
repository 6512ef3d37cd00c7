"""Answers while some events are yet to be read again: stored ones, marked, and nothing that is found again later."""

from pathlib import Path
from typing import Any

import pytest

from serving.events import attach
from serving.events.follower import EventFollower
from tests.attached import newer_events_of
from tests.integration.fresh.asking import ServedWorld
from tests.integration.fresh.events_world import EVENTS, EventWorld, same_list
from tests.integration.nights import prepare
from tests.integration.serving_app import serving


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> tuple[EventWorld, str]:
    folder: Path = tmp_path_factory.mktemp("gaps")
    world = EventWorld(prepare(folder, redis_url, users=120, items=100))
    return world, world.publish()


async def test_who_may_lack_events_is_answered_as_stored_and_marked(served_world: ServedWorld) -> None:
    user, newer_events = (served_world.world.known_users[0], newer_events_of(served_world.app.service))
    stored_answer = await served_world.get_answer(user)
    await served_world.clicks(user, stored_answer["items"][0], stored_answer["items"][1])
    first = served_world.world.accepted[-2][0].number
    newer_events.users.drop_until(first)  # as under a later generation, before one that lacks it comes back

    answer = await served_world.get_answer(user)

    assert answer["approximate"] is True and answer["producer"] == "batch"
    assert answer["items"] == [item for item in stored_answer["items"] if item != stored_answer["items"][1]]


async def test_an_answer_that_lacked_an_event_is_never_taken_for_the_whole_one(served_world: ServedWorld) -> None:
    user, newer_events = (served_world.world.known_users[1], newer_events_of(served_world.app.service))
    await served_world.clicks(user, *served_world.world.items[:3])
    snapshot, raw = served_world.app.service.follower.holder.live, user.encode()
    assert snapshot is not None
    table, all_packed_events = (snapshot.manifest.tables["user_topk"], newer_events.users.packed_events_by_user[raw])
    digests, answers = set(), []
    for lacks in range(3):
        newer_events.users.packed_events_by_user[raw] = all_packed_events
        newer_events.users.drop_until(served_world.world.accepted[lacks - 4][0].number if lacks else 0, [raw])
        newer_events.users.complete_after_number = 0  # one that does not know that something lacks
        counted_events = newer_events.find_counted_events(snapshot, table, raw, -1)
        assert counted_events is not None and counted_events.event_count == 3 - lacks
        digests.add(counted_events.inputs_digest)
        answers.append(await served_world.get_answer(user))

    assert len(digests) == 3 and [answer["source"] for answer in answers] == ["live"] * 3
    expected_list = served_world.world.expected(served_world.generation, [user])[user]
    assert same_list(answers[0], *expected_list)


async def test_as_many_bytes_are_held_as_the_stream_may_have(
    published: tuple[EventWorld, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[int] = []

    def recorded(*args: Any, held_bytes_max: int, **more: Any) -> EventFollower:
        bounds.append(held_bytes_max)
        return EventFollower(*args, held_bytes_max=held_bytes_max, **more)

    monkeypatch.setattr(attach, "EventFollower", recorded)
    async with serving(published[0].config, events=EVENTS):
        assert bounds == [EVENTS.stream_bytes]


async def test_what_is_asked_as_of_then_is_computed_and_not_kept(served_world: ServedWorld) -> None:
    user = served_world.world.known_users[2]
    await served_world.clicks(user, *served_world.world.items[:2])
    then, newest_position = (str(position) for position, _ in served_world.world.accepted[-2:])

    answers = [await served_world.get_answer(user, as_of=then) for _ in range(3)]
    newest_answers = [await served_world.get_answer(user, as_of=newest_position) for _ in range(2)]
    undated_answers = [await served_world.get_answer(user) for _ in range(2)]

    assert [answer["source"] for answer in answers + newest_answers] == ["live"] * 5
    assert {answer["events"] for answer in answers} == {1} and "approximate" not in answers[0]
    assert [answer["source"] for answer in undated_answers] == ["live", "l1"]  # nobody had left it there
    assert newest_answers[0]["items"] == undated_answers[0]["items"]
    assert (await served_world.get_answer(user, as_of=newest_position))[
        "source"
    ] == "live"  # nor is it taken from there
