"""Ninety days of nights in seconds: the real release code over a real Redis, with hosts whose clocks disagree.

Nothing sleeps. Events (a step of a run, a look of a reader, a lost Redis) wait in a heap under the time at which they
happen; the clock is the time of the one that is being handled.
"""

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import redis

from cache.config.timetable import CLOCKS_APART_S, Schedule
from cache.control.control_keys import Control
from cache.control.states import GenerationState, demand_allowed
from cache.errors import Conflict, LarderError
from cache.format.manifest import Manifest
from cache.format.redis_keys import Keyspace
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from cache.store.releases import Pointer, all_releases
from precompute.bulk.reload import reload
from precompute.releases import moves
from precompute.releases.recovery import restore_redis
from precompute.releases.release_log import Releases
from precompute.releases.sweep import drop_old_rows, retire, unneeded_generations
from serving.generations.pointer_follower import judge_pointer
from tests.integration.release_world import World

MINUTE, HOUR, DAY = 60.0, 3_600.0, 86_400.0
KEEP, GRACE_S, ABANDON_S, OVERLAY_S = 2, 3 * HOUR, DAY, DAY
SKEW_S = 2 * MINUTE
SWEPT_AFTER_S = 3 * DAY
"""What was touched longer than this before a sweep is gone after it, unless it is kept for readers."""
WALL = (2, 30)
"""Skipped once and repeated once a year, in Berlin and (at half past one or two) in New York."""

Event = Callable[[], None]


def local_tick(day: datetime, zone: ZoneInfo, wall: tuple[int, int] = WALL) -> float:
    """Return when a daily cron is due on a day: a skipped time an hour later, a repeated one the second time."""
    naive = datetime(day.year, day.month, day.day, *wall)  # noqa: DTZ001  wall times have no zone
    late = naive.replace(tzinfo=zone, fold=1)
    back = late.astimezone(UTC).astimezone(zone).replace(tzinfo=None)
    is_skipped = back != naive
    return (naive.replace(tzinfo=zone, fold=0) if is_skipped else late).timestamp()


@dataclass
class Run:
    """One run of the DAG: its name never changes, its inputs may when it is cleared."""

    name: str
    cut: float
    inputs: int
    host: int


@dataclass
class Reader:
    """A replica that only follows; its clock is wrong by `skew_s`."""

    skew_s: float
    last_pointer: Pointer | None = None
    verdict: str = "vanished"


class QuickStore(ArtefactStore):
    """Reads each release record once, since they never change and all steps read them again."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._raw_by_path: dict[str, bytes] = {}

    def read(self, path: str) -> bytes | None:
        """Return a file's bytes, None if there is none."""
        if not path.startswith("releases/"):
            return super().read(path)
        if path not in self._raw_by_path and (raw := super().read(path)) is not None:
            self._raw_by_path[path] = raw
        return self._raw_by_path.get(path)


class TinyWorld(World):
    """Generations of `World` that record their cut and time of creation."""

    made_at: float = 0.0

    def make(self, generation: str, records: int = 20) -> Manifest:
        """Write the same few pages, with a cut and a time of creation by the maker's clock."""
        cut = datetime.strptime(generation[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        manifest = replace(
            super().make(generation, records),
            data_until=int(cut.timestamp()), created_at=int(self.made_at),
        )  # fmt: skip
        self.store.write(generation_path(generation, "manifest.json"), manifest.to_bytes())
        return manifest


class Simulation:
    """All events of the simulation, and what is true about them."""

    def __init__(
        self, seed: int, store: ArtefactStore, client: "redis.Redis", keys: Keyspace, *,
        zone: str, first_day: str, days: int = 90,
    ) -> None:  # fmt: skip
        self.rng, self.now_s = random.Random(seed), 0.0
        self.store, self.client, self.keys = store, client, keys
        self.world = TinyWorld(store, client, keys)
        self.control = Control(client, keys)
        self.schedule = Schedule(f"{WALL[1]} {WALL[0]} * * *", zone, GRACE_S)
        first = datetime.fromisoformat(first_day)
        self.ticks = [local_tick(first + timedelta(n), ZoneInfo(zone)) for n in range(-3, days + 3)]
        self.start, self.end = self.ticks[3], self.ticks[3 + days]
        self.hosts = [self._host(self.rng.uniform(-SKEW_S, SKEW_S)) for _ in range(3)]
        self.readers = [Reader(self.rng.uniform(-SKEW_S, SKEW_S)) for _ in range(3)]
        self.created: dict[str, float] = {}
        self.restored: dict[str, float] = {}
        self.swept_at = self.start
        self.counts: dict[str, int] = {}
        self.snapshot: dict[bytes, bytes] = {}
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()

    def _host(self, skew_s: float) -> Releases:
        return Releases(self.store, Control(self.client, self.keys), lambda: self.now_s + skew_s)

    def count(self, counter_name: str) -> None:
        """Count one occurrence."""
        self.counts[counter_name] = self.counts.get(counter_name, 0) + 1

    def at(self, when: float, event: Event) -> None:
        """Schedule an event."""
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def run(self) -> None:
        """Run all events in order of time."""
        self._plan()
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            for reader in self.readers:  # they look every second, so between any two events
                self._follow(reader)

    def pass_quiet_days(self) -> None:
        """Pass two quiet days with a retire each, after which generations kept for their overlays may go."""
        self._restore()
        for _ in range(2):
            self.now_s += OVERLAY_S + HOUR
            self._retire(Run(f"rest-{self.now_s:.0f}", self.now_s, 0, 0), [])

    def _plan(self) -> None:
        rng = self.rng
        down = {rng.randrange(len(self.ticks)) + more for _ in range(3) for more in range(rng.randint(1, 4))}
        for number, tick in enumerate(self.ticks[3:-3], 3):
            if number in down:
                self.count("night that never ran")
                continue
            run = Run(f"scheduled-{tick:.0f}", tick, 0, rng.randrange(3))
            late = rng.choice([0.0, 0.0, 0.0, 20 * MINUTE, 5 * HOUR, 30 * HOUR])
            self._schedule(run, tick + late)
            if rng.random() < 0.15:
                self.at(tick + rng.uniform(4 * HOUR, 3 * DAY), lambda run=run: self._clear(run))  # type: ignore[misc]
            if rng.random() < 0.1:
                old = self.ticks[number - rng.randint(1, 3)] - rng.choice([0, 6 * HOUR])
                backfill = Run(f"backfill-{tick:.0f}", old, 1, rng.randrange(3))
                self._schedule(backfill, tick + rng.uniform(0, 20 * HOUR))
            if rng.random() < 0.08:
                self.at(tick + rng.uniform(8 * HOUR, 20 * HOUR), self._roll_back)
            if rng.random() < 0.2:
                self.at(tick + rng.uniform(0, DAY), self._publish_by_hand)
            if rng.random() < 0.06:
                self.at(tick + rng.uniform(0, DAY), self._lose_redis)
            if rng.random() < 0.3:
                self.at(tick + rng.uniform(0, DAY), self._keep_snapshot)
            if rng.random() < 0.04:
                self.at(tick + rng.uniform(0, DAY), self._old_redis)
            for reader in self.readers:
                for _ in range(3):
                    when = self._clear_of_edges(tick + rng.uniform(0, DAY))
                    self.at(when, lambda reader=reader: self.compare_with_truth(reader))  # type: ignore[misc]

    def _clear_of_edges(self, when: float) -> float:
        """Move a moment at which clocks that differ could disagree about what is due to a little later."""
        edges = [*self.ticks, *(tick + GRACE_S for tick in self.ticks)]
        near = next((edge for edge in edges if abs(when - edge) < 10 * MINUTE), None)
        return when if near is None else near + 11 * MINUTE

    def _schedule(self, run: Run, when: float) -> None:
        """Schedule the steps from begin to retire, minutes apart; they are retried by the same host or another."""
        rng, when = self.rng, self._clear_of_edges(when + MINUTE)
        generation: list[str] = []
        steps: list[Callable[[Run, list[str]], None]] = [
            self._begin, self._load, self._verify, self._publish, self._retire,
        ]  # fmt: skip
        for step in steps:
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                self.at(when, lambda step=step: self._run_step(step, run, generation))  # type: ignore[misc]
                when += rng.uniform(1, 8 * MINUTE)
            when += rng.choice([MINUTE, MINUTE, MINUTE, 10 * MINUTE, 26 * HOUR])

    def _run_step(self, step: Callable[[Run, list[str]], None], run: Run, generation: list[str]) -> None:
        if self.rng.random() < 0.2:
            run.host = self.rng.randrange(3)
        try:
            step(run, generation)
        except Conflict as error:
            self.count("refused as a conflict")
            if "restore" in error.message:
                self.at(self.now_s + self.rng.uniform(MINUTE, 3 * HOUR), self._restore)
        self.check()

    def _clear(self, run: Run) -> None:
        self.count("cleared run")
        if self.rng.random() < 0.5:
            self.count("late data")
            run.inputs += 1
        self._schedule(run, self.now_s)

    def _begin(self, run: Run, generation: list[str]) -> None:
        releases = self.hosts[run.host]
        digest = hashlib.sha256(f"{run.cut}-{run.inputs}".encode()).hexdigest()[:12]
        name = f"{datetime.fromtimestamp(run.cut, UTC):%Y%m%dT%H%M%SZ}-{digest}"
        generation[:] = [name]
        state = releases.state(name)
        if state is GenerationState.LIVE:
            return
        demand_allowed("begin", name, state)
        if state is None:
            releases.note(name, GenerationState.BEGUN)

    def _load(self, run: Run, generation: list[str]) -> None:
        releases, (name,) = self.hosts[run.host], generation
        state = releases.state(name)
        if state in (GenerationState.LIVE, GenerationState.SUPERSEDED):
            return
        demand_allowed("load", name, state)
        if state is None:
            releases.note(name, GenerationState.BEGUN)
        if self.store.read(generation_path(name, "manifest.json")) is None:
            self.world.made_at = releases.clock()
            self.world.make(name)
            self.created[name] = self.now_s
        reload(releases.control, self.store, name)
        if state in (None, GenerationState.BEGUN):
            releases.note(name, GenerationState.LOADED)

    def _verify(self, run: Run, generation: list[str]) -> None:
        releases, (name,) = self.hosts[run.host], generation
        state = releases.state(name)
        if state in (GenerationState.LIVE, GenerationState.SUPERSEDED):
            return
        demand_allowed("verify", name, state)
        if int(name[-4:], 16) % 12 == 0:
            self.count("refused by a gate")
            moves.refuse(releases, name, reason="the dice say so", attempt=run.name)
        else:
            releases.mark_verified(name, attempt=run.name)

    def _publish(self, run: Run, generation: list[str]) -> None:
        moved = moves.publish(self.hosts[run.host], generation[0], attempt=run.name)
        self.count("publish" if moved.has_moved else "publish found done")

    def _retire(self, run: Run, _generation: list[str]) -> None:
        releases = self.hosts[run.host]
        sweepable_generations = unneeded_generations(
            releases, kept_generations=KEEP, grace_s=MINUTE, abandon_after_s=ABANDON_S
        )
        for generation_id in sweepable_generations:
            retire(releases, generation_id, attempt=run.name, abandon_after_s=ABANDON_S)
            self.count("retired")
        drop_old_rows(releases, overlay_ttl_s=OVERLAY_S)
        self.swept_at = self.now_s

    def _roll_back(self) -> None:
        name, left_pointer = f"roll-back-{self.now_s:.0f}", self.control.read_pointer()
        try:
            moves.roll_back(self.hosts[0], target_generation=None, reason="the dice say so", attempt=name)
            self.count("roll back")
            if left_pointer is not None and self.rng.random() < 0.5:
                self.at(self.now_s + 10 * MINUTE, lambda: self._publish_by_hand(left_pointer.generation))
        except Conflict:
            self.count("refused as a conflict")

    def _publish_by_hand(self, generation: str | None = None) -> None:
        """Try to publish a recent generation in any state; only a verified one may go live."""
        candidates = sorted(name for name, at in self.created.items() if self.now_s - at < 4 * DAY)
        candidates = candidates if generation is None else [generation]
        if not candidates:
            return
        try:
            moves.publish(self.hosts[1], self.rng.choice(candidates), attempt=f"by-hand-{self.now_s:.0f}")
            self.count("publish by hand")
        except LarderError:
            self.count("refused as a conflict")

    def _restore(self) -> None:
        try:
            restore_redis(self.hosts[0], attempt=f"restore-{self.now_s:.0f}", chunk_bytes=1 << 20)
            self.count("restore")
        except Conflict:
            self.count("refused as a conflict")
        self.restored |= {
            name: row.at
            for name, row in self.control.rows().items()
            if row.state is GenerationState.BEGUN and row.reason == "restored"
        }

    def stored_keys(self) -> list[bytes]:
        key_names: list[bytes] = []
        for pattern in (f"larder:1:{self.keys.namespace}:*", f"larder:1:{{{self.keys.namespace}}}:*"):
            key_names += self.client.scan_iter(pattern, count=1000)
        return key_names

    def _lose_redis(self) -> None:
        self.count("Redis lost")
        if names := self.stored_keys():
            self.client.delete(*names)
        self.at(self.now_s + self.rng.uniform(MINUTE, 12 * HOUR), self._restore)

    def _keep_snapshot(self) -> None:
        names: list[bytes] = self.stored_keys()
        dumped: Any = [self.client.dump(name) for name in names]
        self.snapshot = {n: raw for n, raw in zip(names, dumped, strict=True) if raw is not None}

    def _old_redis(self) -> None:
        if not self.snapshot:
            return
        self.count("Redis of an older day")
        self.client.delete(*self.stored_keys() or [b"nothing"])
        for name, raw in self.snapshot.items():
            self.client.restore(name, 0, raw)
        self.at(self.now_s + self.rng.uniform(MINUTE, 12 * HOUR), self._restore)

    def _follow(self, reader: Reader) -> None:
        pointer = self.control.read_pointer()
        verdict, previous_pointer = judge_pointer(pointer, reader.last_pointer), reader.last_pointer
        reader.verdict = verdict
        self.count(f"reader: {verdict}")
        if verdict == "newer" and pointer is not None:
            assert previous_pointer is None or pointer.epoch > previous_pointer.epoch
            if previous_pointer is not None and pointer.generation[:16] < previous_pointer.generation[:16]:
                self._explained(pointer)
            reader.last_pointer = pointer
        assert verdict != "conflicting"

    def _explained(self, pointer: Pointer) -> None:
        """Check that older data went live after newer only because of a roll back in between."""
        back = [release for release in all_releases(self.store) if release.is_done and release.action == "roll_back"]
        assert any(rollback.epoch <= pointer.epoch for rollback in back), pointer

    def compare_with_truth(self, reader: Reader) -> None:
        """Compare whether a generation is missing by the reader's clock and in truth."""
        created_at = None
        if reader.last_pointer is not None:
            try:
                created_at = float(read_manifest(self.store, reader.last_pointer.generation).created_at)
            except LarderError:
                assert reader.verdict not in ("same", "newer"), "what is live has lost its files"
                created_at = self.created[reader.last_pointer.generation]
        due = max(tick for tick in self.ticks if tick + GRACE_S <= self.now_s)
        live = None if reader.last_pointer is None else self.created[reader.last_pointer.generation]
        if live is not None and abs(live - due) < CLOCKS_APART_S + SKEW_S:
            self.count("made at a tick, so of this one or the one before")
            return
        truth = live is None or live < due
        is_missing = self.schedule.is_generation_missing(self.now_s + reader.skew_s, created_at)
        self.count("missing" if truth else "not missing")
        assert is_missing == truth, (self.now_s, due, live, created_at)

    def check(self) -> None:
        """Check after every step that nothing leaks and that no key belongs to an unknown generation."""
        pointer = self.control.read_pointer()
        if pointer is not None:
            assert pointer.epoch <= max(release.epoch for release in all_releases(self.store))
        # Only a sweep removes generations, so an age counts at the time of the last sweep: days may pass without a run.
        looked_from = self.swept_at - SWEPT_AFTER_S
        recent_generations = {name for name, at in self.created.items() if at > looked_from}
        # A restore that finds an unfinished night counts as its last change: its loader may still run.
        recent_generations |= {name for name, at in self.restored.items() if at > looked_from}
        stored_generations = set(self.store.names("generations"))
        assert len(stored_generations - recent_generations) <= KEEP + 2, stored_generations

    def published(self) -> list[str]:
        """Generations in the order of their publication."""
        return [
            release.generation
            for release in all_releases(self.store)
            if release.action == "publish" and release.is_done
        ]
