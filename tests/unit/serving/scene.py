"""A replica over a fake Redis, a fake clock and a small store, to which tests publish."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from cache.control.control_keys import Staging
from cache.errors import CorruptArtefact, TierUnavailable
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist
from cache.store.releases import Canary, Pointer, Release, done_path, intent_path
from serving.generations.heartbeat import Heartbeat, HostHeadroom, RedisClock
from serving.generations.holder import GenerationHolder
from serving.generations.pointer_follower import PointerFollower
from serving.generations.refresher import Refresher
from serving.generations.snapshot import Snapshot
from serving.process.resources import StoreThreads
from tests.fakes import THREADS, FakeClock, FakeControl
from tests.unit.serving.world import World

BOUND_S = 60.0
REDIS_AHEAD_S = 3_600.0
A, B, C = (f"2026112{day}T000000Z-00000000000{day}" for day in range(3))


def pointer(generation: str, epoch: int, previous: str | None = None, canary: Canary | None = None) -> Pointer:
    """Return a pointer whose attempt and time follow from its epoch."""
    return Pointer(generation, epoch, previous, f"attempt-{epoch}", float(epoch), canary)


@dataclass
class FakeRedis(FakeControl):
    """A pointer that tests set, outages that they cause, and the received heartbeats."""

    timer: FakeClock
    live_pointer: Pointer | bytes | None = None
    note: Staging | bytes | None = None
    down: bool = False
    policy: str | Exception = "volatile-lru"
    beats: list[dict[str, object]] = field(default_factory=list)

    async def watch(self) -> tuple[bytes | None, bytes | None]:
        if self.down:
            raise TierUnavailable("gone", reason="connection")
        pointer = self.live_pointer.to_bytes() if isinstance(self.live_pointer, Pointer) else self.live_pointer
        return pointer, self.note.to_bytes() if isinstance(self.note, Staging) else self.note

    async def time(self) -> float:
        if self.down:
            raise TierUnavailable("gone", reason="connection")
        return self.timer() + REDIS_AHEAD_S

    async def heartbeat(self, payload: bytes, at: float, previous_payload: bytes | None = None) -> None:
        if self.down:
            raise TierUnavailable("gone", reason="connection")
        self.beats.append(orjson.loads(payload))

    async def sign_off(self, payload: bytes) -> None:
        self.beats.clear()

    async def eviction_policy(self) -> str:
        if isinstance(self.policy, Exception):
            raise TierUnavailable("Redis", reason="connection") from self.policy
        return self.policy


class Scene:
    """A refresher, its inputs, and the generations that it opened."""

    def __init__(self, folder: Path, in_thread: StoreThreads = THREADS) -> None:
        self.world = World()
        self.timer = FakeClock()
        self.redis = FakeRedis(self.timer)
        self.store = ArtefactStore(str(folder))
        self.clock = RedisClock(self.timer, self.timer)
        self.opened: list[str] = []
        self.broken: set[str] = set()
        self.degraded: str | None = None
        self.on_open: Callable[[], None] = lambda: None
        self.warmed: list[str] = []
        self.shelf = GenerationHolder(
            self.open, self.world.metrics, warm=self.warm, in_thread=in_thread, monotonic_clock=self.timer
        )
        self.follower = PointerFollower(
            self.store, self.redis, self.shelf, self.world.metrics,
            load_bound_s=BOUND_S, poll_s=0.01, clock=self.clock, in_thread=in_thread,
            monotonic_clock=self.timer,
        )  # fmt: skip
        self.host = HostHeadroom(folder, in_thread)
        heartbeat = Heartbeat("replica-1", self.follower, self.clock, self.world.metrics, host_headroom=self.host)
        self.refresher = Refresher(
            self.follower, self.store, self.redis, heartbeat,
            poll_s=1, blocklist_poll_s=1, heartbeat_s=1, in_thread=in_thread, monotonic_clock=self.timer,
        )  # fmt: skip

    def open(self, to: Pointer, blocklist: Blocklist) -> Snapshot:
        self.opened.append(to.generation)
        self.on_open()
        if to.generation in self.broken:
            raise CorruptArtefact("items.bin has 3 bytes")
        changes = {"epoch": to.epoch, "blocklist": blocklist, "degraded_reason": self.degraded}
        return self.world.snapshot(to.generation, **changes)

    async def warm(self, coming: Snapshot, _current: Snapshot | None) -> None:
        self.warmed.append(coming.generation)

    async def publish(self, to: Pointer | bytes | None) -> None:
        self.redis.live_pointer = to
        await self.follower.poll_pointer()
        await self.follower.wait_until_settled()

    def release(self, generation: str, epoch: int, previous: str | None = None) -> None:
        release = Release(epoch, "publish", generation, previous, "a", float(epoch))
        self.store.write_once(intent_path(epoch), release.to_bytes())
        self.store.write_once(done_path(epoch), b"")

    @property
    def held(self) -> list[str]:
        served = self.follower.served
        return [] if served is None else list(served.generations)
