"""Blocklists in force on a shelf: its own, and what another namespace blocks beside it, whichever changes when."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cache.store.blocklist import Blocklist, change_blocklist
from serving.generations.served_set import ServedGenerations
from serving.http.routes import generations_overview
from tests.unit.serving.scene import A, Scene, pointer


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def blocklist(version: int, *items: str) -> Blocklist:
    return Blocklist(version, frozenset(item.encode() for item in items))


def blocked(scene: Scene) -> set[str]:
    """Items that the live snapshot leaves out."""
    live = scene.shelf.live
    assert live is not None
    return {scene.world.items.id_of(ordinal) for ordinal in live.blocked_item_numbers}


async def test_blocks_of_another_namespace_are_in_force_with_the_own_ones(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    holder = scene.shelf
    await holder.put_own_blocklist_in_force(blocklist(3, "i1"))
    assert blocked(scene) == {"i1"}

    await holder.set_other_blocklist(blocklist(9, "i2"))
    assert blocked(scene) == {"i1", "i2"} and holder.blocklist.version == 3
    await holder.put_own_blocklist_in_force(blocklist(4))
    assert blocked(scene) == {"i2"} and holder.blocklist.version == 4
    await holder.set_other_blocklist(Blocklist())
    assert blocked(scene) == set() and holder.blocklist == blocklist(4)


async def test_both_may_change_at_once_and_what_changed_last_is_in_force(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    holder = scene.shelf

    async with asyncio.timeout(10):
        await asyncio.gather(
            *(holder.put_own_blocklist_in_force(blocklist(version, "i1")) for version in range(1, 6)),
            *(holder.set_other_blocklist(blocklist(version, f"i{version + 1}")) for version in range(1, 6)),
        )

    assert blocked(scene) == {"i1", "i6"}
    assert holder.live is not None and holder.live.blocklist is holder.blocklist and holder.blocklist.version == 5


async def test_what_is_blocked_is_passed_on(scene: Scene) -> None:
    passed: list[Blocklist] = []

    async def pass_on() -> None:
        passed.append(scene.shelf.blocklist)

    scene.shelf.pass_on_blocklist = pass_on
    await scene.shelf.put_own_blocklist_in_force(blocklist(1, "i1"))

    assert passed == [blocklist(1, "i1")]


class NoThreads:
    """Has nothing put in force while `lasts`, as under a limit of processes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lasts, self.tries = True, 0
        real = ServedGenerations.with_blocklist

        def with_blocklist(served: ServedGenerations, new_blocklist: Blocklist) -> ServedGenerations:
            self.tries += 1
            if self.lasts:
                raise RuntimeError("can't start new thread")
            return real(served, new_blocklist)

        patch.setattr(ServedGenerations, "with_blocklist", with_blocklist)


async def test_a_version_that_could_not_be_put_in_force_is_tried_again_at_every_look(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.release(A, 1)
    await scene.refresher.refresh_blocklist()
    await scene.publish(pointer(A, 1))
    assert scene.follower.health.is_ready and in_force(scene) == 0

    threads = NoThreads(monkeypatch)
    version = change_blocklist(scene.store, block_items=[b"i1"]).version
    for tries in (1, 2, 3):
        await scene.refresher.refresh_blocklist()
        assert threads.tries >= tries and blocked(scene) == set() and in_force(scene) == 0
        health = scene.follower.health
        assert not health.is_ready and health.stale_reason == "blocklist_not_enforced"
        assert health.public_failure == f"version {version} of the blocklist is not in force"
        assert scene.world.metrics.blocklist_version._value.get() == 0

    threads.lasts = False
    await scene.refresher.refresh_blocklist()
    assert blocked(scene) == {"i1"} and in_force(scene) == version
    assert scene.follower.health.is_ready and scene.follower.health.stale_reason is None
    assert scene.world.metrics.blocklist_version._value.get() == version
    tries = threads.tries
    await scene.refresher.refresh_blocklist()
    assert threads.tries == tries  # nothing is done again that is done


async def test_what_could_not_be_put_in_force_is_passed_on_and_a_store_that_fails_does_not_matter(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []

    async def pass_on() -> None:
        passed.append(scene.shelf.blocklist.version)

    await scene.publish(pointer(A, 1))
    scene.shelf.pass_on_blocklist = pass_on
    threads = NoThreads(monkeypatch)
    assert not await scene.shelf.put_own_blocklist_in_force(blocklist(1, "i1"))
    assert passed == [1]

    threads.lasts = False
    monkeypatch.setattr(scene.store, "names", lambda _folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await scene.refresher.refresh_blocklist()
    assert blocked(scene) == {"i1"}


async def test_what_another_namespace_blocks_is_tried_again_as_well(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.publish(pointer(A, 1))
    threads = NoThreads(monkeypatch)
    other_blocklist = blocklist(7, "i2")
    assert not await scene.shelf.set_other_blocklist(other_blocklist)

    threads.lasts = False
    assert await scene.shelf.set_other_blocklist(other_blocklist)
    assert blocked(scene) == {"i2"}


async def test_what_is_blocked_while_a_replica_loads_is_in_force_when_it_answers(scene: Scene) -> None:
    scene.redis.live_pointer = pointer(A, 1)

    def block() -> None:
        change_blocklist(scene.store, block_items=[b"i1"])

    scene.on_open = block
    await scene.refresher.start()

    assert blocked(scene) == {"i1"}
    await scene.refresher.aclose()


def in_force(scene: Scene) -> int:
    """Version that replicas say is in force."""
    served = scene.follower.served
    assert served is not None
    served_without_model = replace(served, live=replace(served.live, predictor=None))
    version: int = generations_overview(served_without_model, scene.follower.health, None)["blocklist"]["version"]
    return version
