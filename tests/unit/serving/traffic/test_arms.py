"""Arms as a replica holds them: opened, kept in force, let go in time; and which keys are written down."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from cache.traffic.experiments import Experiments
from serving.engine.service import LookupService
from serving.process.resources import StoreThreads
from serving.traffic import arms as experiment_arms
from serving.traffic.arms import ArmHolder, Routing
from tests.unit.serving.traffic.scene import GRACE_S, KEYS, OTHER_EXPERIMENT, Scene, experiment


@pytest.fixture
async def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_a_namespace_is_held_while_an_experiment_names_it_and_a_while_longer(scene: Scene) -> None:
    await scene.refresh_and_settle()
    assert scene.arms.routing is None and not scene.own_service.follower.holder.divided

    held_ready = replace(experiment(), started_at=None)
    scene.write(held_ready)
    await scene.refresh_and_settle()
    assert scene.log == ["start second"] and not scene.own_service.follower.holder.divided
    assert scene.arms.service("second") is not None and scene.arms.service("third") is None
    assert {scene.arms.routing and scene.arms.routing.find_arm(key) for key in KEYS[:50]} == {None}

    scene.write(experiment())
    await scene.refresh_and_settle()
    assert scene.own_service.follower.holder.divided
    assert scene.arms.routing is not None
    assert {scene.arms.routing.find_arm(key) for key in KEYS[:50]} == {None, ("e", "a"), ("e", "b")}

    scene.write(replace(experiment(), stopped_at=3.0))
    await scene.refresh_and_settle()
    assert scene.arms.routing is None and not scene.own_service.follower.holder.divided
    scene.clock.tick(GRACE_S - 1)
    await scene.refresh_and_settle()
    assert scene.log == ["start second"] and scene.arms.service("second") is not None
    scene.clock.tick(1)
    await scene.refresh_and_settle()
    assert scene.log == ["start second", "close second"] and scene.states() == {}


async def test_one_that_is_named_again_in_time_is_not_let_go(scene: Scene) -> None:
    scene.write(experiment())
    await scene.refresh_and_settle()
    scene.write(replace(experiment(), stopped_at=3.0))
    await scene.refresh_and_settle()
    assert scene.states() == {"second": "draining"}
    scene.clock.tick(GRACE_S - 1)

    scene.write(replace(experiment(), stopped_at=3.0), experiment("f"))
    await scene.refresh_and_settle()
    scene.clock.tick(GRACE_S)
    await scene.refresh_and_settle()
    assert scene.states() == {"second": "held"}
    await scene.arms.drain()
    await scene.arms.aclose()

    assert scene.log == ["start second", "drain second", "close second"]


async def test_no_arm_serves_what_the_own_namespace_blocks(scene: Scene) -> None:
    blocklist_before = scene.block(1, b"i1")
    scene.write(experiment())
    await scene.refresh_and_settle()
    assert scene.get_other_blocklist("second") is blocklist_before

    after = scene.block(2, b"i2")
    await scene.arms.enforce()
    assert scene.get_other_blocklist("second") is after


async def test_what_is_blocked_while_an_arm_starts_is_in_force_before_it_answers(scene: Scene) -> None:
    scene.starts.clear()
    scene.write(experiment())
    await scene.arms.refresh()
    await scene.wait_for_start()
    assert scene.arms.service("second") is None

    announced_blocklist = scene.block(1, b"i1")
    await scene.arms.enforce()
    assert scene.get_other_blocklist("second") is announced_blocklist
    untold = scene.block(2, b"i2")  # nobody passes it on
    scene.starts.set()
    await scene.arms.settled()

    assert scene.arms.service("second") is not None
    assert scene.get_other_blocklist("second") is untold


async def test_an_arm_that_cannot_enforce_a_blocklist_is_left_out_and_does_not_hinder_others(scene: Scene) -> None:
    scene.write(experiment(), OTHER_EXPERIMENT)
    await scene.refresh_and_settle()
    holder = scene.opened["second"].service.follower.holder

    holder.has_threads = False
    blocklist = scene.block(1, b"i1")
    await scene.arms.enforce()
    assert scene.get_other_blocklist("third") is blocklist and scene.arms.service("third") is not None
    assert scene.arms.service("second") is None
    assert scene.arms.answering_services == (scene.opened["third"].service,)

    holder.has_threads = True
    await scene.arms.enforce()
    assert scene.arms.service("second") is not None and scene.get_other_blocklist("second") is blocklist


async def test_an_arm_whose_own_blocklist_could_not_be_read_is_left_out(scene: Scene) -> None:
    scene.write(experiment())
    await scene.refresh_and_settle()
    holder = scene.opened["second"].service.follower.holder

    holder.is_blocklist_known = False
    assert scene.arms.service("second") is None and scene.arms.answering_services == ()
    holder.is_blocklist_known = True
    assert scene.arms.service("second") is not None


async def test_a_look_waits_for_no_arm_that_loads(scene: Scene) -> None:
    scene.write(experiment())
    await scene.refresh_and_settle()
    assert scene.arms.routing is not None
    scene.starts.clear()

    scene.write(experiment(), OTHER_EXPERIMENT)
    async with asyncio.timeout(10):
        await scene.arms.refresh()
        assert scene.states() == {"second": "held", "third": "starting"}
        assert scene.arms.routing.experiments.keys() == {"e", "f"}
        scene.write(replace(experiment(), stopped_at=3.0), OTHER_EXPERIMENT)
        await scene.arms.refresh()

    assert {scene.arms.routing.find_arm(key) for key in KEYS[:50]} <= {None, ("f", "a"), ("f", "b")}
    assert scene.states() == {"second": "draining", "third": "starting"}
    await scene.arms.aclose()


async def test_simultaneous_refreshes_open_every_namespace_once(scene: Scene) -> None:
    scene.starts.clear()
    scene.write(experiment())

    await asyncio.gather(*(scene.arms.refresh() for _ in range(3)))
    scene.starts.set()
    await scene.arms.settled()
    await scene.refresh_and_settle()
    await scene.arms.aclose()

    assert scene.log == ["start second", "close second"]


async def test_of_looks_at_the_same_time_none_takes_an_older_version_back(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    has_read, is_slow = asyncio.Event(), asyncio.Event()

    async def in_thread(work: Any, *arguments: Any) -> Any:
        work_result = await asyncio.to_thread(work, *arguments)
        if not has_read.is_set():
            has_read.set()
            await is_slow.wait()
        return work_result

    arms = ArmHolder(
        cast(LookupService, scene.own_service), "own", scene.store, scene.open,
        in_thread=cast(StoreThreads, in_thread), grace_s=GRACE_S, monotonic_clock=scene.clock,
    )  # fmt: skip
    scene.write(experiment())
    first = asyncio.create_task(arms.refresh())
    await has_read.wait()
    scene.write(experiment(), OTHER_EXPERIMENT)
    second = asyncio.create_task(arms.refresh())
    await asyncio.wait({second}, timeout=0.5)  # as far as it goes beside the first
    is_slow.set()
    await asyncio.gather(first, second)

    assert arms.record.version == 2
    await arms.aclose()


async def test_nothing_is_opened_again_once_the_arms_are_let_go(scene: Scene) -> None:
    scene.write(experiment())
    await scene.refresh_and_settle()
    scene.ends.clear()
    closing = asyncio.create_task(scene.arms.aclose())
    await asyncio.sleep(0)

    await scene.arms.refresh()
    scene.ends.set()
    await closing
    await scene.refresh_and_settle()

    assert scene.log == ["start second", "close second"] and scene.states() == {}


async def test_a_namespace_is_opened_again_only_once_it_is_closed(scene: Scene) -> None:
    scene.write(experiment())
    await scene.refresh_and_settle()
    scene.write(replace(experiment(), stopped_at=3.0))
    await scene.refresh_and_settle()
    scene.clock.tick(GRACE_S)
    scene.ends.clear()
    await scene.arms.refresh()

    scene.write(replace(experiment(), stopped_at=3.0), experiment("f"))
    await scene.arms.refresh()
    await scene.arms.refresh()
    assert scene.states() == {"second": "closing"}
    scene.ends.set()
    await scene.arms.settled()
    await scene.refresh_and_settle()

    assert scene.log == ["start second", "close second", "start second"]
    assert scene.arms.service("second") is not None


async def test_a_start_that_is_no_longer_wanted_is_broken_off(scene: Scene) -> None:
    scene.starts.clear()
    scene.write(experiment())
    await scene.arms.refresh()
    await scene.wait_for_start()

    scene.write(replace(experiment(), stopped_at=3.0))
    async with asyncio.timeout(10):
        await scene.refresh_and_settle()

    assert scene.states() == {}
    assert scene.log == ["start second", "close second"]


async def test_what_drains_signs_on_nowhere_and_opens_nothing(scene: Scene) -> None:
    scene.write(experiment())
    await scene.arms.refresh()
    await scene.arms.drain()
    scene.write(experiment(), OTHER_EXPERIMENT)
    await scene.refresh_and_settle()

    assert "drain second" in scene.log and "start third" not in scene.log
    await scene.arms.aclose()


async def test_a_version_that_cannot_be_read_leaves_the_last_in_force_marked(scene: Scene) -> None:
    scene.write(experiment())
    await scene.refresh_and_settle()
    path = scene.folder / "experiments" / "000000000002.json"
    path.write_text("{")

    await scene.refresh_and_settle()

    assert scene.own_service.follower.concerns == {"experiments": "experiments_unreadable"}
    assert scene.own_service.follower.holder.divided and scene.arms.record.version == 1
    path.unlink()
    scene.write(experiment(), OTHER_EXPERIMENT)
    await scene.refresh_and_settle()
    assert not scene.own_service.follower.concerns


async def test_a_namespace_that_cannot_be_started_is_tried_again_ever_less_often(scene: Scene) -> None:
    scene.failing.add("second")
    scene.write(experiment())
    await scene.refresh_and_settle()
    assert scene.own_service.follower.holder.divided
    assert scene.arms.service("second") is None
    assert scene.log == ["start second", "close second"]

    waits, longest_s = [], experiment_arms.RETRY_MAX_S
    for _ in range(9):
        log_length, waited = len(scene.log), 0
        while len(scene.log) == log_length:
            scene.clock.tick(1.0)
            waited += 1
            await scene.refresh_and_settle()
        waits.append(waited)
    assert waits == [1, 2, 4, 8, 16, 32, longest_s, longest_s, longest_s]

    scene.failing.clear()
    scene.clock.tick(longest_s)
    await scene.refresh_and_settle()
    assert scene.arms.service("second") is not None


async def test_a_namespace_that_cannot_be_opened_touches_no_other(scene: Scene) -> None:
    scene.unconfigured.add("second")
    scene.write(experiment(), OTHER_EXPERIMENT)
    await scene.refresh_and_settle()

    assert scene.states() == {"second": "failed", "third": "held"}
    assert scene.arms.routing is not None and scene.own_service.follower.holder.divided
    scene.write(OTHER_EXPERIMENT)
    await scene.refresh_and_settle()
    assert scene.states() == {"third": "held"}


def test_an_arm_goes_only_where_its_state_leads() -> None:
    states = experiment_arms.ArmState
    arm = experiment_arms.Arm("second")
    arm.enter(states.CLOSING)
    arm.enter(states.CLOSED)

    for state in states:
        with pytest.raises(RuntimeError, match=f"second cannot become {state.value}: it is closed"):
            arm.enter(state)


@pytest.mark.parametrize("sample", [1.0, 0.25])
def test_a_key_is_written_down_always_or_never(sample: float) -> None:
    routing = Routing(Experiments(1, "own", experiments=(experiment(sample=sample),)))

    sampled_keys = [key for key in KEYS if routing.is_sampled("e", key)]

    count = len(KEYS)
    assert abs(len(sampled_keys) - sample * count) <= 5 * math.sqrt(count * sample * (1 - sample))
    # The sample is independent of the arms: each has its share in it.
    arms = [routing.find_arm(key) for key in sampled_keys]
    arm_b_share = arms.count(("e", "b")) / len(arms)
    assert abs(arm_b_share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / len(arms))
