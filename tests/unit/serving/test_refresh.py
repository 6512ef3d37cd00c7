"""Following the pointer: only forwards, as one object, and never down with what it follows."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest

from cache.artefacts import ArtefactStore
from cache.blocklist import Blocklist, change_blocklist
from cache.errors import CorruptArtefact, TierUnavailable
from cache.releases import Pointer, Release, done_path, intent_path
from serving.refresh import Refresher, judge
from serving.snapshot import Snapshot
from tests.fakes import FakeClock
from tests.unit.serving.world import World, config

A, B, C = (f"2026112{day}T000000Z-00000000000{day}" for day in range(3))


def pointer(generation: str, epoch: int, previous: str | None = None) -> Pointer:
    return Pointer(generation, epoch, previous, f"attempt-{epoch}", float(epoch))


@dataclass
class FakeRedis:
    """A pointer that tests set, an outage that they cause, and the beats it was sent."""

    now: Pointer | bytes | None = None
    down: bool = False
    beats: list[dict[str, object]] = field(default_factory=list)

    async def pointer(self) -> bytes | None:
        if self.down:
            raise TierUnavailable("gone", reason="connection")
        return self.now.to_bytes() if isinstance(self.now, Pointer) else self.now

    async def subscribe(self) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def heartbeat(self, replica_id: str, payload: bytes, at: float) -> None:
        self.beats.append(orjson.loads(payload))

    async def sign_off(self, replica_id: str) -> None:
        self.beats.clear()


class Scene:
    """A refresher, what it reads from, and what it opened."""

    def __init__(self, folder: Path) -> None:
        self.world = World()
        self.redis = FakeRedis()
        self.store = ArtefactStore(str(folder))
        self.timer = FakeClock()
        self.opened: list[str] = []
        self.broken: set[str] = set()
        self.on_open: Callable[[], None] = lambda: None
        self.refresher = Refresher(
            config(), self.store, self.redis, self.open, self.world.metrics,
            replica_id="replica-1", timer=self.timer,
        )  # fmt: skip

    def open(self, to: Pointer, generation: str, blocklist: Blocklist) -> Snapshot:
        self.opened.append(generation)
        self.on_open()
        if generation in self.broken:
            raise CorruptArtefact("items.bin has 3 bytes")
        return self.world.snapshot(generation, epoch=to.epoch, blocklist=blocklist)

    async def publish(self, to: Pointer | bytes | None) -> None:
        self.redis.now = to
        await self.refresher.look()

    def release(self, generation: str, epoch: int, previous: str | None = None) -> None:
        release = Release(epoch, "publish", generation, previous, "a", float(epoch))
        self.store.write_once(intent_path(epoch), release.to_bytes())
        self.store.write_once(done_path(epoch), b"")

    @property
    def held(self) -> tuple[str, ...]:
        holding = self.refresher.holding
        return () if holding is None else holding.generations


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_only_a_greater_epoch_is_followed() -> None:
    seen = pointer(A, 5)

    assert judge(pointer(B, 6), seen) == "newer" and judge(pointer(B, 1), None) == "newer"
    assert judge(None, seen) == "vanished" and judge(None, None) == "vanished"
    assert judge(pointer(B, 4), seen) == "backwards"
    assert judge(pointer(B, 5), seen) == "conflicting" and judge(pointer(A, 5), seen) == "same"


async def test_a_publish_swaps_one_object_and_keeps_the_previous(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    before = scene.refresher.holding

    await scene.publish(pointer(B, 2, A))

    assert scene.held == (B, A) and before is not None and before.generations == (A,)
    assert scene.opened == [A, B] and scene.refresher.health.ready
    assert scene.redis.beats[-1]["serving"] == B and scene.redis.beats[-1]["holds"] == [B, A]


async def test_after_a_rollback_the_bad_generation_is_held_no_more(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    await scene.publish(pointer(B, 2, A))

    await scene.publish(pointer(A, 3, None))

    # P21: previous is what the pointer says, not what happened to be live before.
    assert scene.held == (A,) and scene.opened == [A, B]
    assert scene.refresher.holding is not None and scene.refresher.holding.live.epoch == 3


async def test_a_previous_that_is_not_held_is_fetched_after_the_swap(scene: Scene) -> None:
    await scene.publish(pointer(C, 9, A))

    assert scene.held == (C, A) and scene.opened == [C, A]
    scene.broken.add(A)
    await scene.publish(pointer(B, 10, A))
    assert scene.held == (B, A)


async def test_a_previous_that_cannot_be_loaded_costs_nothing(scene: Scene) -> None:
    scene.broken.add(A)

    await scene.publish(pointer(B, 2, A))

    assert scene.held == (B,) and scene.refresher.health.ready


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (None, "pointer_vanished"),
        (pointer(B, 4), "pointer_backwards"),
        (pointer(B, 5), "pointer_conflicting"),
        (b"nonsense", "pointer_corrupt"),
    ],
)
async def test_a_pointer_that_vanished_or_went_back_is_ignored_and_marked(
    scene: Scene, now: Pointer | bytes | None, why: str
) -> None:
    await scene.publish(pointer(A, 5))

    await scene.publish(now)

    # P22, P23: nothing is followed, nothing drained; it is only said.
    assert scene.held == (A,) and scene.refresher.stale == why and scene.refresher.health.ready
    await scene.publish(pointer(C, 6, A))
    assert scene.held == (C, A) and scene.refresher.stale is None


async def test_a_lost_redis_leaves_the_replica_ready_and_marked(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    scene.redis.down = True

    await scene.refresher.look()

    assert scene.refresher.stale == "redis_unreachable" and scene.refresher.health.ready
    scene.redis.down = False
    await scene.refresher.look()
    assert scene.refresher.stale is None


async def test_without_redis_a_replica_starts_from_the_newest_completed_release(
    scene: Scene,
) -> None:
    scene.release(A, 1)
    scene.release(B, 2, A)
    intent = Release(3, "publish", C, B, "a", 3.0)
    scene.store.write_once(intent_path(3), intent.to_bytes())
    scene.redis.down = True

    await scene.refresher.look()

    assert scene.held == (B, A) and scene.refresher.health.ready
    assert scene.refresher.stale == "redis_unreachable"


async def test_a_redis_restored_from_an_old_copy_is_not_believed(scene: Scene) -> None:
    scene.release(A, 1)
    scene.release(B, 2, A)

    await scene.publish(pointer(A, 1))

    assert scene.held[0] == B and scene.refresher.stale == "pointer_backwards"


async def test_nothing_published_yet_is_not_ready_and_not_an_error(scene: Scene) -> None:
    await scene.refresher.look()

    assert not scene.refresher.health.ready and scene.refresher.holding is None
    await scene.publish(pointer(A, 1))
    assert scene.refresher.health.ready


async def test_only_an_epoch_that_was_seen_and_cannot_be_loaded_drains(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    scene.broken.add(B)

    await scene.publish(pointer(B, 2, A))

    assert scene.held == (A,) and not scene.refresher.health.ready
    assert "items.bin" in (scene.refresher.health.failed or "")
    await scene.refresher.look()
    assert scene.opened == [A, B]  # not at every look: each try reads and checks every file
    scene.broken.clear()
    scene.timer.tick(60)
    await scene.refresher.look()
    assert scene.held == (B, A) and scene.refresher.health.ready


async def test_a_blocklist_is_effective_on_all_that_is_held_and_on_what_is_loading(
    scene: Scene,
) -> None:
    await scene.publish(pointer(A, 1))
    change_blocklist(scene.store, block_items=[b"i3"], block_entities=[b"u1"])

    await scene.refresher.look_at_blocklist()

    held = scene.refresher.holding
    ordinal = scene.world.items.ordinal_of(b"i3")
    assert held is not None and held.live.blocked == {ordinal}
    assert held.live.blocklist.entities == {b"u1"}

    def block_meanwhile() -> None:
        scene.refresher.blocklist = change_blocklist(scene.store, block_items=[b"i4"])

    scene.on_open = block_meanwhile
    await scene.publish(pointer(B, 2, A))
    held = scene.refresher.holding
    assert held is not None
    assert all(len(each.blocked) == 2 for each in held.snapshots)


async def test_a_blocklist_that_cannot_be_read_leaves_the_last_one_in_force(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    change_blocklist(scene.store, block_items=[b"i3"])
    await scene.refresher.look_at_blocklist()
    read_at = scene.refresher.blocklist_read_at
    scene.store.write_once("blocklist/000000000002.json", b"broken")
    scene.timer.tick(5)

    await scene.refresher.look_at_blocklist()

    held = scene.refresher.holding
    assert held is not None and len(held.live.blocked) == 1
    assert scene.refresher.blocklist_read_at == read_at
