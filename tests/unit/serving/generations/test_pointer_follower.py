"""Following the pointer: only forwards, as one object, and never down with what it follows."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import orjson
import pytest
from redis.exceptions import NoPermissionError

from cache.control.control_keys import Replica, Staging
from cache.errors import StoreError
from cache.store.blocklist import Blocklist, change_blocklist
from cache.store.releases import Pointer, Release, intent_path
from serving.generations.pointer_follower import judge_pointer
from serving.generations.snapshot import Snapshot
from tests.fakes import FakeClock
from tests.unit.serving.scene import BOUND_S, A, B, C, Scene, pointer


def test_only_a_greater_epoch_is_followed() -> None:
    seen_pointer = pointer(A, 5)

    assert judge_pointer(pointer(B, 6), seen_pointer) == "newer" and judge_pointer(pointer(B, 1), None) == "newer"
    assert judge_pointer(None, seen_pointer) == "vanished" and judge_pointer(None, None) == "vanished"
    assert judge_pointer(pointer(B, 4), seen_pointer) == "backwards"
    assert (
        judge_pointer(pointer(B, 5), seen_pointer) == "conflicting"
        and judge_pointer(pointer(A, 5), seen_pointer) == "same"
    )


async def test_a_publish_swaps_one_object_and_keeps_the_previous(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    served_before = scene.follower.served

    await scene.publish(pointer(B, 2, A))

    assert scene.held == [B, A] and served_before is not None and served_before.generations == (A,)
    assert scene.opened == [A, B] and scene.follower.health.is_ready
    await scene.refresher.send_heartbeat()
    assert scene.redis.beats[-1]["serving"] == B and scene.redis.beats[-1]["holds"] == [B, A]


async def test_after_a_rollback_the_bad_generation_is_held_no_more(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    await scene.publish(pointer(B, 2, A))

    await scene.publish(pointer(A, 3, None))

    # The previous generation is the one that the pointer names, not the one that was live before.
    assert scene.held == [A] and scene.opened == [A, B]
    assert scene.follower.served is not None and scene.follower.served.live.epoch == 3


async def test_a_previous_that_is_not_held_is_fetched_after_the_swap(scene: Scene) -> None:
    scene.release(A, 1)

    await scene.publish(pointer(C, 9, A))

    assert scene.held == [C, A] and scene.opened == [C, A]
    assert scene.follower.served is not None and scene.follower.served.previous is not None
    assert scene.follower.served.previous.epoch == 1
    scene.broken.add(A)
    await scene.publish(pointer(B, 10, A))
    assert scene.held == [B, A]


async def test_a_generation_rolled_back_while_it_loads_is_never_served(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    live = []
    scene.shelf.on_change = lambda: live.append(scene.held[0])

    def roll_back_meanwhile() -> None:
        scene.redis.live_pointer = pointer(A, 3)

    scene.on_open = roll_back_meanwhile
    await scene.publish(pointer(B, 2, A))

    # The load of the bad generation was under way when it was rolled back.
    assert scene.opened == [A, B] and live == [A] and scene.follower.epoch == 3


async def test_a_previous_that_cannot_be_loaded_costs_nothing(scene: Scene) -> None:
    scene.release(A, 1)
    scene.broken.add(A)

    await scene.publish(pointer(B, 2, A))

    assert scene.held == [B] and scene.follower.health.is_ready


@pytest.mark.parametrize(
    ("next_pointer", "stale_reason"),
    [
        (None, "pointer_vanished"),
        (pointer(B, 4), "pointer_backwards"),
        (pointer(B, 5), "pointer_conflicting"),
        (b"nonsense", "pointer_corrupt"),
    ],
)
async def test_a_pointer_that_vanished_or_went_back_is_ignored_and_marked(
    scene: Scene, next_pointer: Pointer | bytes | None, stale_reason: str
) -> None:
    await scene.publish(pointer(A, 5))

    await scene.publish(next_pointer)

    # The replica follows nothing and drains nothing; it only reports the fault.
    assert scene.held == [A] and scene.follower.stale_reason == stale_reason and scene.follower.health.is_ready
    await scene.publish(pointer(C, 6, A))
    assert scene.held == [C, A] and scene.follower.stale_reason is None


_CANARY = {"generation": C, "percent": 5.0, "since": 1.0, "event": ""}


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": "../../etc"},
        {"generation": 7},
        {"epoch": "6"},
        {"epoch": 6.0},
        {"epoch": True},
        {"epoch": 2**53},
        {"previous": 5},
        {"previous": "no generation"},
        {"attempt": None},
        {"published_at": "soon"},
        {"published_at": 1e300},
        {"published_at": -1},
        {"canary": "half"},
        {"canary": {**_CANARY, "percent": "5"}},
        {"canary": {**_CANARY, "percent": 101}},
        {"canary": {**_CANARY, "since": None}},
        {"canary": {**_CANARY, "generation": "x"}},
        {"canary": {**_CANARY, "event": 3}},
        {"more": 1},
    ],
    ids=str,
)
async def test_a_malformed_pointer_is_ignored_marked_and_no_reason_to_drain(
    scene: Scene, changes: dict[str, object]
) -> None:
    await scene.publish(pointer(A, 5))
    sound = orjson.loads(pointer(A, 6).to_bytes())

    await scene.publish(orjson.dumps({**sound, **changes}))

    scene.timer.tick(2 * BOUND_S)
    await scene.follower.poll_pointer()
    assert scene.follower.epoch == 5 and scene.follower.stale_reason == "pointer_corrupt"
    assert scene.follower.health.is_ready
    await scene.publish(pointer(B, 6, A))
    assert scene.held == [B, A] and scene.follower.stale_reason is None


async def test_a_pointer_that_cannot_be_served_is_one_that_cannot_be_loaded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.publish(pointer(A, 5))

    def broken(_live: Snapshot, _pointer: Pointer) -> None:
        raise ValueError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(scene.shelf, "serve", broken)
        await scene.publish(pointer(B, 6, A))
    assert scene.held == [A] and scene.follower.stale_reason == "load_failed"
    scene.timer.tick(BOUND_S)
    await scene.follower.poll_pointer()
    assert scene.held == [B, A] and scene.follower.stale_reason is None


async def test_a_lost_redis_leaves_the_replica_ready_and_marked(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    scene.redis.down = True

    await scene.follower.poll_pointer()

    assert scene.follower.stale_reason == "redis_unreachable" and scene.follower.health.is_ready
    scene.redis.down = False
    await scene.follower.poll_pointer()
    assert scene.follower.stale_reason is None


async def test_a_redis_that_goes_away_while_a_generation_loads_is_said_when_it_is_served(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))

    def lose_redis() -> None:
        scene.redis.down = True

    scene.on_open = lose_redis
    await scene.publish(pointer(B, 2, A))

    assert scene.held[0] == B and scene.follower.stale_reason == "redis_unreachable"
    scene.redis.down = False
    await scene.follower.poll_pointer()
    assert scene.follower.stale_reason is None


async def test_without_redis_a_replica_starts_from_the_newest_completed_release(scene: Scene) -> None:
    scene.release(A, 1)
    scene.release(B, 2, A)
    intent = Release(3, "publish", C, B, "a", 3.0)
    scene.store.write_once(intent_path(3), intent.to_bytes())
    scene.redis.down = True

    await scene.follower.poll_pointer()
    await scene.follower.wait_until_settled()

    assert scene.held == [B, A] and scene.follower.health.is_ready
    assert scene.follower.stale_reason == "redis_unreachable"


async def test_a_redis_restored_from_an_old_copy_is_not_believed(scene: Scene) -> None:
    scene.release(A, 1)
    scene.release(B, 2, A)

    await scene.publish(pointer(A, 1))

    assert scene.held[0] == B and scene.follower.stale_reason == "pointer_backwards"


async def test_nothing_published_yet_is_not_ready_and_not_an_error(scene: Scene) -> None:
    await scene.follower.poll_pointer()

    assert not scene.follower.health.is_ready and scene.follower.served is None
    await scene.publish(pointer(A, 1))
    assert scene.follower.health.is_ready


async def test_only_an_epoch_that_was_seen_and_cannot_be_loaded_drains(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    scene.broken.add(B)

    await scene.publish(pointer(B, 2, A))

    assert scene.held == [A] and scene.follower.health.is_ready
    assert "items.bin" in (scene.follower.health.failure_reason or "")
    assert scene.follower.stale_reason == "load_failed"
    await scene.follower.poll_pointer()
    assert scene.opened == [A, B]  # not at every look: each try reads and checks every file
    scene.timer.tick(BOUND_S)
    assert not scene.follower.health.is_ready
    scene.broken.clear()
    await scene.follower.poll_pointer()
    assert scene.held == [B, A] and scene.follower.health.is_ready


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(StoreError("no items.ids"), False), (KeyError("x"), True), (TimeoutError(), True)]
)
async def test_a_load_that_fails_has_a_traceback_only_if_its_text_does_not_explain_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    error: Exception, has_traceback: bool,
) -> None:  # fmt: skip
    def fails() -> None:
        raise error

    monkeypatch.setattr(scene, "on_open", fails)
    await scene.publish(pointer(B, 1))

    (record,) = [record for record in caplog.records if "cannot be loaded" in record.getMessage()]
    assert str(error) in record.getMessage() and bool(record.exc_info) is has_traceback


async def test_strangers_hear_no_detail_and_passwords_are_never_shown(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.publish(pointer(A, 1))
    url = "sftp://larder:s3cret@store.example/larder"

    def fails() -> None:
        raise StoreError(f"generations/{B}/items.ids is not in {url}: ssh://larder:s3cret@there")

    monkeypatch.setattr(scene, "on_open", fails)
    scene.redis.note = Staging(C, "night", scene.clock() + 60)
    await scene.publish(pointer(B, 2, A))
    scene.timer.tick(2 * BOUND_S)
    await scene.refresher.send_heartbeat()

    health = scene.follower.health
    assert health.to_public_json()["failed"] == f"generation {B} cannot be loaded"
    # For callers with a token, in Redis and in the log, only the password is hidden.
    beat = scene.redis.beats[-1]["failed"]
    assert isinstance(beat, dict) and "sftp://larder:***@store.example" in beat[B]
    assert "items.ids is not in sftp://larder:***@store.example" in (health.failure_reason or "")
    assert "s3cret" not in f"{health}{scene.redis.beats}"


async def test_strangers_hear_of_a_model_that_does_not_open_by_one_word(scene: Scene) -> None:
    scene.degraded = "models/tower.onnx has SHA-256 d34d, the manifest says b33f"
    await scene.publish(pointer(A, 1))

    assert scene.follower.health.degraded_reason == scene.degraded
    assert scene.follower.health.to_public_json()["degraded"] == "no_model"


async def test_a_blocklist_is_effective_on_all_that_is_held_and_on_what_is_loading(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    change_blocklist(scene.store, block_items=[b"i3"], block_entities=[b"u1"])

    await scene.refresher.refresh_blocklist()

    served = scene.follower.served
    ordinal = scene.world.items.ordinal_of(b"i3")
    assert served is not None and served.live.blocked_item_numbers == {ordinal}
    assert served.live.blocklist.entities == {b"u1"}

    def block_meanwhile() -> None:
        scene.shelf.blocklist = change_blocklist(scene.store, block_items=[b"i4"])

    scene.on_open = block_meanwhile
    await scene.publish(pointer(B, 2, A))
    served = scene.follower.served
    assert served is not None
    assert all(len(snapshot.blocked_item_numbers) == 2 for snapshot in served.snapshots)


async def test_an_announcement_at_the_very_end_keeps_nothing_running(scene: Scene) -> None:
    await scene.refresher.start()
    await asyncio.sleep(0)  # the loops wait for their events

    scene.refresher._pointer_event.set()
    scene.refresher._heartbeat_event.set()
    async with asyncio.timeout(5):
        await scene.refresher.aclose()

    assert all(task.done() for task in scene.refresher._background_tasks) and not scene.redis.beats


async def test_a_cancellation_lost_in_a_client_library_does_not_stop_the_stop(scene: Scene) -> None:
    async def forgetful() -> tuple[bytes | None, bytes | None]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return None, None

    await scene.refresher.start()
    scene.redis.watch = forgetful  # type: ignore[method-assign]
    scene.refresher._pointer_event.set()
    await asyncio.sleep(0.01)

    async with asyncio.timeout(5):
        await scene.refresher.aclose()

    assert all(task.done() for task in scene.refresher._background_tasks)


async def test_a_blocklist_that_cannot_be_read_leaves_the_last_one_in_force(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    change_blocklist(scene.store, block_items=[b"i3"])
    await scene.refresher.refresh_blocklist()
    read_at = scene.refresher.blocklist_read_at
    scene.store.write_once("blocklist/000000000002.json", b"broken")
    scene.timer.tick(5)

    await scene.refresher.refresh_blocklist()

    served = scene.follower.served
    assert served is not None and len(served.live.blocked_item_numbers) == 1
    assert scene.refresher.blocklist_read_at == read_at
    assert scene.follower.stale_reason == "blocklist_unreadable" and scene.follower.health.is_ready


async def test_a_start_with_a_damaged_blocklist_falls_back_to_the_newest_readable_one(
    scene: Scene, tmp_path: Path
) -> None:
    change_blocklist(scene.store, block_items=[b"i3"])
    scene.store.write("blocklist/000000000002.json", b'{"version": 2, "items": ["i3"')
    started = Scene(tmp_path)

    await started.refresher.refresh_blocklist()
    await started.publish(pointer(A, 1))

    served = started.follower.served
    assert served is not None and served.live.blocklist.items == {b"i3"}
    assert started.follower.health.is_ready and started.follower.stale_reason == "blocklist_unreadable"


@pytest.mark.parametrize("damage", ["unreadable", "misnamed", "not a folder", "not mounted"])
async def test_without_any_blocklist_that_can_be_read_a_replica_is_not_ready(tmp_path: Path, damage: str) -> None:
    scene = Scene(tmp_path / "store")
    match damage:
        case "unreadable":
            scene.store.write("blocklist/000000000001.json", b"broken")
        case "misnamed":
            renamed = Blocklist(7, frozenset({b"i3"})).to_bytes()
            scene.store.write("blocklist/000000000001.json", renamed)
        case "not a folder":
            scene.store.write("blocklist", b"")
    checked_at = scene.refresher.blocklist_read_at
    scene.timer.tick(5)

    await scene.refresher.refresh_blocklist()
    await scene.publish(pointer(A, 1))

    assert scene.held == [A] and not scene.follower.health.is_ready
    assert scene.follower.stale_reason == "blocklist_unreadable"
    assert scene.refresher.blocklist_read_at == checked_at
    (tmp_path / "store/blocklist").unlink() if damage == "not a folder" else None
    scene.store.write("blocklist/000000000001.json", Blocklist(1).to_bytes())
    await scene.refresher.refresh_blocklist()
    assert scene.follower.health.is_ready and scene.follower.stale_reason is None


async def test_a_store_that_goes_away_takes_no_block_back(scene: Scene) -> None:
    change_blocklist(scene.store, block_items=[b"i3"])
    await scene.refresher.refresh_blocklist()
    await scene.publish(pointer(A, 1))
    read_at = scene.refresher.blocklist_read_at
    scene.timer.tick(5)
    scene.store.delete("blocklist")

    await scene.refresher.refresh_blocklist()

    served = scene.follower.served
    assert served is not None and served.live.blocklist.items == {b"i3"}
    assert scene.follower.stale_reason == "blocklist_unreadable"
    assert scene.refresher.blocklist_read_at == read_at


async def test_a_first_generation_that_cannot_be_loaded_leaves_the_previous_answering(scene: Scene) -> None:
    scene.release(A, 1)
    scene.broken.add(B)

    await scene.publish(pointer(B, 2, A))

    # The replica is not ready, because it cannot load the newest epoch; it still answers from the previous night,
    # marked.
    assert scene.held == [A] and scene.follower.epoch == 1
    assert scene.follower.stale_reason == "load_failed" and not scene.follower.health.is_ready
    await scene.follower.poll_pointer()
    assert scene.opened == [B, A]
    scene.broken.clear()
    scene.timer.tick(60)
    await scene.follower.poll_pointer()
    assert scene.held == [B, A] and scene.follower.health.is_ready and scene.follower.stale_reason is None


async def test_what_cannot_be_loaded_without_redis_is_not_read_again_at_every_look(scene: Scene) -> None:
    scene.release(A, 1)
    scene.broken.add(A)
    scene.redis.down = True

    for _ in range(5):
        await scene.follower.poll_pointer()

    assert scene.opened == [A]
    scene.broken.clear()
    scene.timer.tick(60)
    await scene.follower.poll_pointer()
    assert scene.held == [A] and scene.follower.health.is_ready


async def test_a_degraded_generation_is_mended_once_its_models_can_be_read(scene: Scene) -> None:
    scene.degraded = "the index is out of reach"
    await scene.publish(pointer(A, 1))
    assert scene.follower.health.is_ready and scene.follower.health.degraded_reason

    await scene.follower.poll_pointer()
    assert scene.opened == [A]  # not at every look
    for _ in range(2):
        scene.timer.tick(11)
        await scene.follower.poll_pointer()
        await scene.follower.wait_until_settled()
    assert scene.opened == [A, A]  # and ever more rarely
    scene.degraded = None
    scene.timer.tick(60)
    await scene.follower.poll_pointer()
    await scene.follower.wait_until_settled()

    assert scene.held == [A] and scene.follower.health.degraded_reason is None


@pytest.mark.parametrize("slow", ["mending", "a newer one"])
async def test_a_roll_back_waits_for_no_load(scene: Scene, slow: str) -> None:
    """Whoever rolls back does so for a generation that is bad: it may be the very one that loads, or is mended."""
    go_on, opening, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
    await scene.publish(pointer(A, 1))
    if slow == "mending":
        scene.degraded = "the index is out of reach"
        await scene.publish(pointer(B, 2, A))
        scene.timer.tick(11)

    def hang() -> None:
        loop.call_soon_threadsafe(opening.set)
        go_on.wait(10)

    scene.on_open, scene.degraded = hang, None
    scene.redis.live_pointer = pointer(B, 2, A) if slow == "mending" else pointer(C, 2, A)

    looking = asyncio.create_task(scene.follower.poll_pointer())
    await opening.wait()
    scene.redis.live_pointer = pointer(A, 3)
    try:
        async with asyncio.timeout(5):
            await looking
            await scene.follower.poll_pointer()
        assert scene.held == [A] and scene.follower.epoch == 3
    finally:
        go_on.set()
    await scene.follower.wait_until_settled()
    assert scene.held == [A] and scene.follower.epoch == 3 and scene.follower.stale_reason is None


async def test_a_policy_that_changes_under_a_running_service_is_noticed_within_half_a_minute(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(scene.refresher, "_monotonic_clock", clock)
    await scene.publish(pointer(A, 1))
    await scene.refresher.send_heartbeat()
    scene.redis.policy = "allkeys-lru"

    reasons = []
    for _ in range(2):
        await scene.refresher.send_heartbeat()
        reasons.append(scene.follower.stale_reason)
        clock.tick(30)

    assert reasons == [None, "eviction_policy"]


async def test_a_redis_that_may_evict_pages_is_noticed_whenever_it_comes_back(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    await scene.publish(pointer(A, 1))
    scene.redis.down = True
    await scene.refresher.send_heartbeat()
    scene.redis.policy = "allkeys-lru"
    scene.redis.down = False

    await scene.refresher.send_heartbeat()

    assert scene.follower.stale_reason == "eviction_policy" and "volatile-lru" in caplog.text
    scene.redis.policy = "volatile-lru"
    await scene.refresher.send_heartbeat()
    assert scene.follower.stale_reason is None


async def test_a_policy_that_may_not_be_asked_is_said_once_and_one_from_a_lost_redis_asked_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    await scene.publish(pointer(A, 1))
    scene.redis.policy = ConnectionError("reset")
    await scene.refresher.send_heartbeat()
    assert "maxmemory-policy" not in caplog.text
    scene.redis.policy = NoPermissionError("no permissions to run the 'info' command")

    for down in (False, True, False):
        scene.redis.down = down
        await scene.refresher.send_heartbeat()

    assert caplog.text.count("maxmemory-policy") == 1 and scene.follower.stale_reason is None


async def test_a_beat_says_what_the_host_has_left_once_it_was_looked_at(scene: Scene) -> None:
    await scene.refresher.send_heartbeat()
    replica_before = Replica.from_beat(orjson.dumps(scene.redis.beats[-1]), 0.0)
    await scene.host.refresh()
    await scene.refresher.send_heartbeat()
    after = Replica.from_beat(orjson.dumps(scene.redis.beats[-1]), 0.0)

    assert (replica_before.memory_available_bytes, replica_before.disk_free_bytes) == (None, None)
    assert after.memory_available_bytes and after.disk_free_bytes


async def test_a_draining_replica_is_not_ready_signs_off_and_beats_no_more(scene: Scene) -> None:
    await scene.publish(pointer(A, 1))
    await scene.refresher.send_heartbeat()

    await scene.refresher.drain()
    await scene.refresher.send_heartbeat()

    assert not scene.follower.health.is_ready and not scene.redis.beats and scene.held == [A]


async def test_a_subscription_is_closed_with_its_replica(scene: Scene) -> None:
    closed = []

    async def subscribe(channel: str | None = None) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"pointer"
                await asyncio.Event().wait()
        finally:
            closed.append(True)

    scene.redis.subscribe = subscribe  # type: ignore[method-assign]
    tasks_before = asyncio.all_tasks()
    await scene.refresher.start()
    await asyncio.sleep(0)

    await scene.refresher.aclose()

    assert closed and asyncio.all_tasks() == tasks_before
