"""Which events count, decided by positions alone: at flips, after rollbacks, and after a restart."""

from pathlib import Path
from typing import Any

from cache.format.stream_position import STREAM_BEGINNING
from tests.attached import newer_events_of
from tests.integration.fresh.events_world import EVENTS, EventWorld, same_list, until_counted
from tests.integration.nights import DATA_UNTIL, NEXT, build_verified, prepare, publish, roll_back
from tests.integration.serving_app import Running, eventually, serving


async def live(app: Running, generation: str) -> bool:
    """Waits until a generation is live."""

    async def is_live() -> bool:
        served = app.service.follower.served
        return served is not None and served.live.generation == generation

    return await eventually(is_live)


async def get_answer(app: Running, user: str, **query: Any) -> dict[str, Any]:
    return await app.get(f"/v1/lookup/user_topk/{user}", **query)


async def test_an_event_counts_once_before_and_after_flips_and_again_after_a_rollback(
    tmp_path: Path, redis_url: str
) -> None:
    world = EventWorld(prepare(tmp_path, redis_url, users=120, items=100))
    user, other_user = world.known_users[:2]
    first = world.publish(STREAM_BEGINNING)
    async with serving(world.config, events=EVENTS) as app:
        ((taken_position, _),) = world.accept([world.event(user, world.items[0])])
        second = world.build(taken_position, NEXT)
        # These are accepted after the night took its events and before it is published; the first one's own time is
        # early.
        world.accept([world.event(user, world.items[1], at_us=1), world.event(other_user, world.items[2])])
        await until_counted(app, world)
        answer_before = await get_answer(app, user)
        assert (answer_before["generation"], answer_before["events"]) == (first, 3 - 1)

        publish(world.config, second)
        assert await live(app, second)
        after, other_answer = await get_answer(app, user), await get_answer(app, other_user)
        assert (after["generation"], after["events"]) == (second, 1)
        assert same_list(after, *world.expected(second, [user], data_until=NEXT)[user])
        assert other_answer["events"] == 1
        pinned = await get_answer(app, user, generation=first)
        assert pinned["events"] == 2 and pinned["items"] == answer_before["items"]

        roll_back(world.config)
        assert await live(app, first)
        back = await get_answer(app, user)
        assert back["events"] == 2 and back["items"] == answer_before["items"]
        assert back["as_of"] == answer_before["as_of"]

    # A service that starts reads the stream again.
    async with serving(world.config, events=EVENTS) as app:
        await until_counted(app, world)
        restarted_answer = await get_answer(app, user)
        assert restarted_answer["events"] == 2 and restarted_answer["items"] == answer_before["items"]


async def test_users_whose_events_the_night_has_are_answered_as_stored_again(tmp_path: Path, redis_url: str) -> None:
    world = EventWorld(prepare(tmp_path, redis_url, users=120, items=100))
    user = world.known_users[0]
    world.publish(STREAM_BEGINNING)
    async with serving(world.config, events=EVENTS) as app:
        ((taken_position, _),) = world.accept([world.event(user, world.items[0])])
        await until_counted(app, world)
        assert (await get_answer(app, user))["events"] == 1

        second = world.publish(taken_position, NEXT)
        assert await live(app, second)
        answers = [await get_answer(app, user) for _ in range(4)]

        assert [answer["source"] for answer in answers[1:]] == ["l1"] * 3
        assert all(answer["producer"] == "batch" and "events" not in answer for answer in answers)
        # The previous generation is still held and lacks the event: a rollback must find it.
        assert user.encode() in newer_events_of(app.service).packed_input_by_id


async def test_where_no_generation_tells_of_events_none_are_followed(tmp_path: Path, redis_url: str) -> None:
    world = EventWorld(prepare(tmp_path, redis_url, users=120, items=100))
    user = world.known_users[0]
    world.accept([world.event(user, world.items[0])])
    generation_without_events = build_verified(world.config, DATA_UNTIL)
    publish(world.config, generation_without_events)
    async with serving(world.config, events=EVENTS) as app:
        assert await live(app, generation_without_events)
        answer = await get_answer(app, user)
        assert answer["producer"] == "batch" and "events" not in answer
        assert "stale" not in answer
    async with serving(world.config) as app:  # switched off
        assert not app.service.ladder.newer_inputs.packed_input_by_id
