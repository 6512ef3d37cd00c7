"""The generation to come: held ready beside live and previous, and dropped when nobody waits for it any more."""

import asyncio
import gc
import threading

import pytest

from cache.control.control_keys import Staging
from cache.store.blocklist import Blocklist, change_blocklist
from cache.store.releases import Canary, Pointer
from serving.generations.snapshot import Snapshot
from tests.unit.serving.scene import BOUND_S, REDIS_AHEAD_S, A, B, C, Scene, pointer


def note(scene: Scene, generation: str, *, for_s: float = 60.0) -> Staging:
    return Staging(generation, "attempt", scene.timer() + REDIS_AHEAD_S + for_s)


def expect(happened: bool) -> None:
    assert happened


async def stage(scene: Scene, generation: str, *, for_s: float = 60.0) -> None:
    """Another process writes the note; the replica looks, loads and beats."""
    await scene.refresher.send_heartbeat()  # from here on it knows Redis' clock
    scene.redis.note = note(scene, generation, for_s=for_s)
    await scene.follower.poll_pointer()
    await scene.follower.wait_until_settled()
    await scene.refresher.send_heartbeat()


async def test_what_is_staged_is_loaded_and_warmed_and_said_to_be_ready(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))

    await stage(scene, B)

    assert scene.held == [A, B] and scene.warmed == [A, B]
    beat = scene.redis.beats[-1]
    assert (beat["serving"], beat["ready"], beat["failed"]) == (A, [A, B], {})
    assert beat["holds"] == [A, B] and beat["warm_s"] == 0 and beat["swapped_at"] is None


async def test_the_swap_to_what_is_ready_loads_nothing(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    await stage(scene, B)

    scene.timer.tick(5)
    await scene.publish(pointer(B, 2, A))

    assert scene.opened == [A, B] and scene.held == [B, A] and scene.warmed == [A, B]
    served = scene.follower.served
    assert served is not None and served.next is None and served.live.epoch == 2
    await scene.refresher.send_heartbeat()
    assert scene.redis.beats[-1]["swapped_at"] == scene.timer() + REDIS_AHEAD_S


async def test_a_replica_looks_ten_times_a_second_only_while_something_is_staged(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    assert scene.refresher.pointer_poll_s() == 1

    await stage(scene, B)
    assert scene.refresher.pointer_poll_s() == 0.1

    await scene.publish(pointer(B, 2, A))
    assert scene.refresher.pointer_poll_s() == 1


async def test_a_publisher_that_died_strands_no_replica(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    await stage(scene, B, for_s=30)

    scene.timer.tick(31)
    await scene.follower.poll_pointer()

    assert scene.held == [A] and scene.refresher.pointer_poll_s() == 1


async def test_the_note_runs_out_by_redis_clock_even_when_redis_is_gone(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    await stage(scene, B, for_s=30)
    scene.redis.down = True

    await scene.follower.poll_pointer()
    assert scene.held == [A, B] and scene.follower.health.is_ready
    scene.timer.tick(31)
    await scene.follower.poll_pointer()

    assert scene.held == [A] and scene.follower.stale_reason == "redis_unreachable"


@pytest.mark.parametrize("raw_note", [None, b"nonsense", b'{"generation": 3}'])
async def test_a_note_that_is_gone_or_unreadable_drops_what_was_staged(scene: Scene, raw_note: bytes | None) -> None:
    await scene.publish(pointer(A, 1))
    await stage(scene, B)

    scene.redis.note = raw_note
    await scene.follower.poll_pointer()

    assert scene.held == [A]


def snapshots() -> list[Snapshot]:
    return [candidate for candidate in gc.get_objects() if type(candidate) is Snapshot]


async def test_never_more_than_previous_live_and_one_more(scene: Scene) -> None:
    opening, alive_count_max = scene.open, 0
    gc.collect()
    earlier_snapshots = snapshots()  # what earlier tests left alive, kept so that nothing takes its place

    def open_and_count(to: Pointer, blocklist: Blocklist) -> Snapshot:
        nonlocal alive_count_max
        gc.collect()
        snapshot = opening(to, blocklist)
        earlier_object_ids = set(map(id, earlier_snapshots))
        alive = {
            alive_snapshot.generation for alive_snapshot in snapshots() if id(alive_snapshot) not in earlier_object_ids
        }
        alive_count_max = max(alive_count_max, len(alive))
        return snapshot

    scene.shelf._open_snapshot = open_and_count
    await scene.publish(pointer(A, 1))
    await stage(scene, B)
    await scene.publish(pointer(B, 2, A))
    for number, generation in enumerate((C, f"{C}x", f"{C}y"), start=3):
        await stage(scene, generation)
        # A generation that is published without being staged makes room first.
        await scene.publish(pointer(f"{generation}z", number, B))
        assert len(scene.held) <= 3

    assert alive_count_max == 3


async def test_what_cannot_be_made_ready_is_said_with_its_reason_and_tried_again(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    scene.broken.add(B)

    await stage(scene, B)

    beat = scene.redis.beats[-1]
    assert beat["ready"] == [A] and "items.bin" in beat["failed"][B]  # type: ignore[index]
    assert scene.held == [A] and scene.follower.health.is_ready
    await scene.follower.poll_pointer()
    assert scene.opened == [A, B]  # not at every look
    scene.broken.clear()
    scene.timer.tick(6)
    await scene.follower.poll_pointer()
    await scene.follower.wait_until_settled()
    await scene.refresher.send_heartbeat()
    assert scene.redis.beats[-1]["ready"] == [A, B] and scene.redis.beats[-1]["failed"] == {}


async def test_a_generation_whose_models_do_not_open_here_is_not_ready(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    scene.degraded = "the index is damaged"

    await stage(scene, B)

    failed = scene.redis.beats[-1]["failed"]
    assert "the index is damaged" in failed[B] and scene.held == [A]  # type: ignore[index]


async def test_before_anything_is_live_what_is_staged_is_held_all_the_same(scene: Scene) -> None:
    await stage(scene, A)
    assert scene.redis.beats[-1]["ready"] == [A] and scene.redis.beats[-1]["serving"] is None

    await scene.publish(pointer(A, 1))

    assert scene.opened == [A] and scene.held == [A]


async def test_a_pointer_that_moves_while_the_next_is_loading_waits_for_that_load(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    await scene.refresher.send_heartbeat()
    gate = threading.Event()
    scene.on_open = lambda: expect(gate.wait(10))
    scene.redis.note = note(scene, B)
    await scene.follower.poll_pointer()

    scene.redis.live_pointer = pointer(B, 2, A)
    looking = asyncio.create_task(scene.follower.poll_pointer())
    await asyncio.sleep(0)
    assert scene.held == [A] and scene.follower.health.is_ready
    gate.set()
    await looking

    assert scene.held == [B, A] and scene.opened == [A, B]


async def test_a_pointer_waits_for_no_staged_load_that_hangs(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    go_on, hung, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

    def hangs_once() -> None:
        scene.on_open = lambda: None
        loop.call_soon_threadsafe(hung.set)
        go_on.wait(30)

    scene.on_open = hangs_once
    scene.follower._load_bound_s = 0.01
    await scene.refresher.send_heartbeat()
    scene.redis.note = note(scene, B)
    await scene.follower.poll_pointer()
    await hung.wait()
    try:
        async with asyncio.timeout(5):
            scene.redis.live_pointer = pointer(B, 2, A)
            await scene.follower.poll_pointer()
        assert scene.held == [B, A] and scene.follower.stale_reason is None
    finally:
        go_on.set()


async def test_a_blocklist_reaches_what_is_staged(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    await stage(scene, B)
    change_blocklist(scene.store, block_items=[b"i3"])

    await scene.refresher.refresh_blocklist()
    await scene.publish(pointer(B, 2, A))

    served = scene.follower.served
    assert served is not None and all(len(snapshot.blocked_item_numbers) == 1 for snapshot in served.snapshots)


async def test_a_load_that_outlasts_the_bound_drains_and_a_retry_in_time_does_not(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    scene.broken.add(B)
    await scene.publish(pointer(B, 2, A))
    scene.timer.tick(BOUND_S / 2)

    await scene.follower.poll_pointer()
    assert scene.follower.health.is_ready and scene.follower.stale_reason == "load_failed"
    # Another publish does not restart the bound.
    scene.broken.add(C)
    await scene.publish(pointer(C, 3, A))
    scene.timer.tick(BOUND_S / 2)

    assert not scene.follower.health.is_ready and scene.held == [A]
    scene.broken.clear()
    await scene.follower.poll_pointer()
    assert scene.follower.health.is_ready and scene.held[0] == C


async def test_a_canary_is_held_for_as_long_as_the_pointer_names_it(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    await stage(scene, B)

    await scene.publish(pointer(A, 2, None, Canary(B, 10.0, 5.0)))
    scene.redis.note = None
    await scene.follower.poll_pointer()

    served = scene.follower.served
    assert scene.held == [A, B] and scene.opened == [A, B]
    assert served is not None and served.canary is not None and served.next is not None
    assert served.pin_generation(B).live is served.next
    await scene.publish(pointer(A, 3))
    assert scene.held == [A]
    assert scene.follower.served is not None and scene.follower.served.canary is None
