"""Arms of experiments in namespaces of their own count the control's events, from their own generations' positions."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache.config.events import EventsConfig
from cache.events.event_predictor import GenerationEvents
from cache.format.stream_position import STREAM_BEGINNING
from serving.engine.service import LookupService
from serving.requests.models import LookupRequest, RequestedEntity
from serving.requests.options import RequestOptions
from serving.traffic.router import ExperimentRouter
from tests.attached import attached
from tests.integration.fresh.events_world import EVENTS, EventWorld
from tests.integration.nights import NEXT, prepare
from tests.integration.serving_app import Running, eventually, serving

TABLE = "user_topk"


@pytest.fixture
def control_world(tmp_path: Path, redis_url: str) -> EventWorld:
    return EventWorld(prepare(tmp_path, redis_url, users=60, items=50))


def arm_of(control_world: EventWorld, namespace: str) -> EventWorld:
    """An arm whose nights name the namespace of the events, if any; it has what was accepted."""
    config = replace(
        control_world.config, namespace=f"{control_world.config.namespace}-b", events=EventsConfig(namespace=namespace)
    )
    return EventWorld(config, accepted=control_world.accepted)


@asynccontextmanager
async def open_arm(app: Running, arm: EventWorld) -> AsyncIterator[LookupService]:
    """The arm as a replica holds it."""
    opened = attached(app.service, ExperimentRouter)._arm_holder._open_namespace(arm.config.namespace)
    await opened.start()
    try:
        yield opened.service
    finally:
        await opened.aclose()


async def get_answer(service: LookupService, user: str) -> dict[str, Any]:
    """The answer of a namespace."""
    entity = RequestedEntity(TABLE, user, user.encode(), "id")
    lookup = LookupRequest((entity,), RequestOptions(5.0))
    (answer,) = await service.ladder.lookup(service.capture_served(), lookup, time.monotonic())
    return dict(answer)


async def test_an_arm_counts_the_events_behind_its_own_generation_as_the_control_does(
    control_world: EventWorld,
) -> None:
    # given: the control's night has no event, the arm's night has the first of two
    user = control_world.known_users[0]
    generation = control_world.publish(STREAM_BEGINNING)
    ((first, _),) = control_world.accept([control_world.event(user, control_world.items[3])])
    arm = arm_of(control_world, control_world.config.namespace)
    of_arm = arm.publish(first, NEXT)
    ((second, _),) = control_world.accept([control_world.event(user, control_world.items[7])])
    async with serving(control_world.config, events=EVENTS) as app, open_arm(app, arm) as service:
        # when
        async def has_counted_events() -> bool:
            arm_answers = [await get_answer(namespace_service, user) for namespace_service in (app.service, service)]
            return [arm_answer.get("events") for arm_answer in arm_answers] == [2, 1]

        assert await eventually(has_counted_events)
        own_answer, theirs = await get_answer(app.service, user), await get_answer(service, user)

    # then
    assert (own_answer["generation"], theirs["generation"]) == (generation, of_arm)
    assert own_answer["as_of"] == theirs["as_of"]
    for answer, world, generation_id, cut in (
        (own_answer, control_world, generation, None),
        (theirs, arm, of_arm, NEXT),
    ):
        expected_list = world.expected(generation_id, [user], second, *([cut] if cut else []))[user]
        assert answer["items"] == expected_list[0] and answer["source"] != "default"
        assert not {control_world.items[3], control_world.items[7]} & {*answer["items"]}


@pytest.mark.parametrize("namespace", ["", "another"])
async def test_an_arm_whose_night_read_another_stream_counts_no_events_and_the_log_says_what_to_set(
    control_world: EventWorld, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    control_world.publish(STREAM_BEGINNING)
    arm = arm_of(control_world, namespace)
    generation = arm.publish(STREAM_BEGINNING, NEXT)
    user = control_world.known_users[0]
    control_world.accept([control_world.event(user, control_world.items[3])])
    async with serving(control_world.config, events=EVENTS) as app, open_arm(app, arm) as service:

        async def has_counted_events() -> bool:
            return "events" in await get_answer(app.service, user)

        assert await eventually(has_counted_events)
        live = service.follower.holder.live
        assert live is not None and (live.generation, live.part(GenerationEvents)) == (generation, None)
        assert "events" not in await get_answer(service, user)

    (log_message,) = [message for message in caplog.messages if arm.config.namespace in message and "events" in message]
    assert "set [events] enabled and namespace" in log_message and generation in log_message


async def test_where_no_events_are_taken_in_nothing_is_said_of_arms(
    control_world: EventWorld, caplog: pytest.LogCaptureFixture
) -> None:
    control_world.publish(STREAM_BEGINNING)
    arm = arm_of(control_world, "")
    generation = arm.publish(STREAM_BEGINNING, NEXT)

    async with serving(control_world.config) as app, open_arm(app, arm) as service:
        assert service.capture_served().live.generation == generation

    assert not [message for message in caplog.messages if arm.config.namespace in message and "events" in message]
