"""Blocklists in force on a shelf: its own, and what another namespace blocks beside it, whichever changes when."""

import asyncio
from pathlib import Path

import pytest

from cache.store.blocklist import Blocklist
from tests.unit.serving.scene import A, Scene, pointer


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def blocklist(version: int, *items: str) -> Blocklist:
    return Blocklist(version, frozenset(each.encode() for each in items))


def blocked(scene: Scene) -> set[str]:
    """Items that the live snapshot leaves out."""
    live = scene.shelf.live
    assert live is not None
    return {scene.world.items.id_of(each) for each in live.blocked}


async def test_what_another_namespace_blocks_is_in_force_beside_the_own(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    shelf = scene.shelf
    await shelf.block(blocklist(3, "i1"))
    assert blocked(scene) == {"i1"}

    await shelf.block_beside(blocklist(9, "i2"))
    assert blocked(scene) == {"i1", "i2"} and shelf.blocklist.version == 3
    await shelf.block(blocklist(4))
    assert blocked(scene) == {"i2"} and shelf.blocklist.version == 4
    await shelf.block_beside(Blocklist())
    assert blocked(scene) == set() and shelf.blocklist == blocklist(4)


async def test_both_may_change_at_once_and_what_changed_last_is_in_force(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    shelf = scene.shelf

    async with asyncio.timeout(10):
        await asyncio.gather(
            *(shelf.block(blocklist(each, "i1")) for each in range(1, 6)),
            *(shelf.block_beside(blocklist(each, f"i{each + 1}")) for each in range(1, 6)),
        )

    assert blocked(scene) == {"i1", "i6"}
    assert (
        shelf.live is not None
        and shelf.live.blocklist is shelf.blocklist
        and shelf.blocklist.version == 5
    )


async def test_what_is_in_force_is_passed_on(scene: Scene) -> None:
    told: list[Blocklist] = []

    async def pass_on(found: Blocklist) -> None:
        told.append(found)

    scene.shelf.pass_on = pass_on
    await scene.shelf.block(blocklist(1, "i1"))

    assert told == [blocklist(1, "i1")]
