"""Arms of experiments in namespaces of their own: events are not counted there, and that is said."""

from dataclasses import replace
from pathlib import Path

import pytest

from cache.events.position import BEGINNING
from tests.integration.fresh.events_world import EVENTS, EventWorld
from tests.integration.nights import NEXT, prepare
from tests.integration.serving_app import serving


async def test_an_arm_in_a_namespace_of_its_own_counts_no_events_and_the_log_says_so_once(
    tmp_path: Path, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = EventWorld(prepare(tmp_path, redis_url, users=60, items=50))
    arm = EventWorld(replace(own.config, namespace=f"{own.config.namespace}-b"))
    own.publish(BEGINNING)
    generation = arm.publish(BEGINNING, NEXT)
    async with serving(own.config, events=EVENTS) as app:
        arms = app.service.experiments._arms
        for _ in range(2):  # let go, and held again
            held = arms._open(arm.config.namespace)
            await held.start()
            live = held.service.follower.shelf.live
            await held.aclose()

            assert live is not None and (live.generation, live.events) == (generation, None)

        serves = app.service.follower.shelf.live
        assert serves is not None and serves.events is not None
    warned = [each for each in caplog.messages if arm.config.namespace in each and "events" in each]
    assert len(warned) == 1
