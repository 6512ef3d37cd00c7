"""Thirty days of experiments in seconds: real nights, releases, records and replicas over a real Redis.

Generations are tiny, and replicas answer from made-up pages; what decides who is answered by what, and what is written
down of it, is the code that runs in production. Nothing sleeps: one clock, which the days move, is everybody's.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import redis
import xxhash
from redis.asyncio import ConnectionPool

from cache.errors import StoreError
from cache.format.redis_keys import Keyspace
from cache.l2.control_plane import ServerControl
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist
from cache.store.releases import Pointer
from cache.traffic.experiments import Experiment, Experiments, latest_experiments
from cache.traffic.split import BUCKET_COUNT, BucketRanges
from precompute.config.settings import NightConfig
from precompute.releases import moves
from precompute.releases.sweep import retire, unneeded_generations
from precompute.traffic import experiments
from precompute.traffic.experiment_command import free_namespaces
from precompute.traffic.experiments import ArmOption, ExperimentOption
from precompute.traffic.exposures import gather_exposures
from serving.engine.service import LookupService
from serving.generations.heartbeat import Heartbeat, RedisClock
from serving.generations.holder import GenerationHolder
from serving.generations.pointer_follower import PointerFollower
from serving.generations.refresher import Refresher
from serving.generations.snapshot import Snapshot
from serving.metrics.registry import Metrics
from serving.requests.models import FeedbackReport
from serving.traffic.arms import ArmHolder
from serving.traffic.canary import CanaryMetrics, CanaryRouter, CanaryRouters
from serving.traffic.exposures import ExposureLog
from serving.traffic.router import ExperimentMetrics, ExperimentRouter
from tests.fakes import THREADS
from tests.integration.release_world import Clock
from tests.integration.release_world import World as Nights
from tests.unit.serving.world import LIMITS, USERS, World, ask, entity

HOUR_S, DAY_S = 3_600, 86_400
GRACE_S = 60.0
KEEP = 1
REPLICAS = 3
USERS_ASKED = 5
START = 500_000 * HOUR_S


Arm = tuple[str, str] | None
"""Experiment and arm of a key; None: of none."""

Moves = Collection[tuple[Arm, Arm]]
"""Arms that keys may move from and to."""

ARMS: Mapping[str, Mapping[str, str]] = {
    "first": {"control": "a", "b": "b"},
    "second": {"control": "a", "b": "c"},
    "third": {"control": "a", "b": "d", "c": "b"},
}
"""Namespace of each arm, by its letter."""


@dataclass
class Failures:
    """Random failures of writes of exposures."""

    rng: random.Random
    chance: float = 0.1


class FlakyStore(ArtefactStore):
    """A store in which some writes of the exposure log fail, or succeed and report a failure."""

    failures: Failures | None = None

    def write_once(self, path: str, data: bytes) -> bool:
        failures = self.failures
        is_failing = failures is not None and path.startswith("exposures/")
        luck = failures.rng.random() if failures is not None and is_failing else 1.0
        chance = 0.0 if failures is None else failures.chance
        if luck < chance / 2:
            raise StoreError("away")
        is_new = super().write_once(path, data)
        if luck < chance:
            raise StoreError("the reply was lost")
        return is_new


class DayControl(ServerControl):
    """A control plane whose Redis clock is the simulation's."""

    def __init__(self, namespace: str, pool: ConnectionPool, clock: Clock) -> None:
        super().__init__(Keyspace(namespace), pool, lambda: None)
        self._days = clock

    async def time(self) -> float:
        return self._days()


class HeldByReplica:
    """A namespace in a replica: the real follower, holder and heartbeat over made-up snapshots."""

    def __init__(self, days: "ThirtyDays", replica: str, namespace: str) -> None:
        self.namespace, self.world, clock = namespace, World(), days.clock
        store, metrics = days.store_of(namespace), Metrics()
        control = DayControl(namespace, days.pool, clock)
        redis_clock = RedisClock(clock, clock)
        holder = GenerationHolder(self._open, metrics, warm=self._warm, in_thread=THREADS, monotonic_clock=clock)
        self.follower = PointerFollower(
            store, control, holder, metrics, load_bound_s=60.0, poll_s=0.01, clock=redis_clock,
            in_thread=THREADS, monotonic_clock=clock,
        )  # fmt: skip
        beat = Heartbeat(replica, self.follower, redis_clock, metrics)
        self.refresher = Refresher(
            self.follower, store, control, beat, poll_s=1, blocklist_poll_s=1, heartbeat_s=1,
            in_thread=THREADS, monotonic_clock=clock,
        )  # fmt: skip
        days.canaries.add(holder, CanaryRouter(holder, CanaryMetrics(metrics.registry)))
        self.service = LookupService(
            follower=self.follower, ladder=self.world.ladder,
            metrics=metrics, limits=LIMITS, body_bytes_max=1, body_timeout_s=1.0,
            tiers=self.world.tiers, l2_bound_s=lambda: 1.0, admission=cast(Any, None),
        )  # fmt: skip

    def _open(self, to: Pointer, blocklist: Blocklist) -> Snapshot:
        return self.world.snapshot(to.generation, epoch=to.epoch, blocklist=blocklist)

    async def _warm(self, _coming: Snapshot, _current: Snapshot | None) -> None:
        return None

    async def start(self) -> None:
        await self.refresher.refresh_blocklist()
        await self.poll()

    async def poll(self) -> None:
        """Do what the background does every second."""
        await self.follower.poll_pointer()
        await self.follower.wait_until_settled()
        await self.refresher.send_heartbeat()

    async def drain(self) -> None:
        await self.refresher.drain()

    async def aclose(self) -> None:
        await self.drain()
        await self.follower.aclose()


class SimReplica:
    """A replica with the arms that the record names."""

    def __init__(self, days: "ThirtyDays", number: int, life: int) -> None:
        self.name = f"replica-{number}-{life}"
        self.held_namespaces: dict[str, HeldByReplica] = {}
        self._days = days
        own_namespace = days.namespaces[0]
        self.own_held_namespace = HeldByReplica(days, self.name, own_namespace)
        self.exposures = ExposureLog(days.store_of(own_namespace), self.name, clock=days.clock, in_thread=THREADS)
        self.arms = ArmHolder(
            self.own_held_namespace.service, own_namespace, days.store_of(own_namespace), self._hold_namespace,
            in_thread=THREADS, grace_s=GRACE_S, monotonic_clock=days.clock,
        )  # fmt: skip
        self.router = ExperimentRouter(
            self.arms, self.exposures, ExperimentMetrics(Metrics().registry), days.canaries.of
        )

    def _hold_namespace(self, namespace: str) -> HeldByReplica:
        replica_namespace = self.held_namespaces[namespace] = HeldByReplica(self._days, self.name, namespace)
        return replica_namespace

    async def poll(self) -> None:
        """Do once all that the background does."""
        await self.own_held_namespace.poll()
        await self.arms.refresh()
        await self.arms.settled()
        needed = self.arms.record.namespaces(self._days.namespaces[0])
        for namespace, replica_namespace in self.held_namespaces.items():
            if namespace in needed:
                await replica_namespace.poll()

    async def stop(self) -> None:
        """End as a service does: its counts are written."""
        await self.arms.aclose()
        await self.own_held_namespace.aclose()
        while self.exposures._waiting_parts or self.exposures._arm_hours:
            await self.exposures.flush()


def owner(salt: str, ranges_by_name: Mapping[str, BucketRanges], key: bytes) -> str | None:
    """Return the owner of a key's bucket by the simplest method, with which the router is compared."""
    seed = xxhash.xxh3_64_intdigest(salt.encode())
    bucket = xxhash.xxh3_64_intdigest(key, seed) * BUCKET_COUNT >> 64
    owners = [name for name, ranges in ranges_by_name.items() for a, b in ranges if a <= bucket < b]
    assert len(owners) <= 1
    return owners[0] if owners else None


@dataclass
class ThirtyDays:
    """The simulation; `counts` says how often each thing happened."""

    seed: int
    folder: Path
    redis_url: str
    client: "redis.Redis"
    namespaces: tuple[str, ...]
    keys: int
    requests: int
    nightly: float
    """Chance of each namespace's night each day."""
    counts: Counter[str] = field(default_factory=Counter)
    exposed: set[tuple[str, int, str, str]] = field(default_factory=set)
    """Experiment, hour, arm and key of every exposure there should be."""
    request_counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    clicked: Counter[tuple[str, str]] = field(default_factory=Counter)
    assigned: dict[bytes, Arm] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng, self.clock = random.Random(self.seed), Clock()
        self.canaries = CanaryRouters()
        self.clock.now_s = float(START)
        self.pool = ConnectionPool.from_url(self.redis_url, protocol=3)
        self.nights = {name: self._night_of(name) for name in self.namespaces}
        self.config = NightConfig(
            namespace=self.namespaces[0], artifacts="artifacts", redis_url=self.redis_url, base=str(self.folder),
        )  # fmt: skip
        self.generation_count = 0
        self.of_generation: dict[str, str] = {}
        self.replicas: list[SimReplica] = []
        self.all_keys = [f"key-{number}".encode() for number in range(self.keys)]

    def _night_of(self, namespace: str) -> Nights:
        night = Nights(self.store_of(namespace), self.client, Keyspace(namespace))
        night.clock = self.clock
        night.control.time = self.clock  # type: ignore[method-assign]
        night.releases.clock = self.clock
        return night

    def store_of(self, namespace: str) -> FlakyStore:
        """Return the namespace's part of the store."""
        store = FlakyStore(str(self.folder / "artifacts" / namespace))
        store.failures = Failures(self.rng)
        return store

    @property
    def record(self) -> Experiments:
        """The record of experiments in force."""
        return latest_experiments(self.store_of(self.namespaces[0]))

    # -- what happens

    async def run(self) -> None:
        """Run all thirty days."""
        for name in self.namespaces:
            self.publish(name)
        self.replicas = [SimReplica(self, number, 0) for number in range(REPLICAS)]
        for replica in self.replicas:
            await replica.own_held_namespace.start()
        events = self._events()
        for day in range(30):
            event = events.get(day)
            if event is not None:
                event[0]()
                self.counts[event[0].__name__] += 1
            await self.follow()
            self.check_assignment(event[1] if event is not None else ())
            for hour in sorted(self.rng.sample(range(24), 2)):
                self.clock.now_s = float(START + day * DAY_S + hour * HOUR_S + self.rng.random() * 600)
                await self.traffic()
            self.clock.now_s = float(START + day * DAY_S + 24 * HOUR_S - 60)
            await self.night(day)
        await self.end()

    def _events(self) -> dict[int, tuple[Callable[[], None], Moves]]:
        """Return the changes by day, each with the arms that it may move keys from and to."""
        _, second_namespace, two, _ = self.namespaces

        def first() -> None:
            self.start("first", 0.3, holdout=0.05)

        def second() -> None:
            self.start("second", 0.25)

        def third() -> None:
            self.start("third", 0.3)

        def shares_grow() -> None:
            experiments.change_shares(self.config, "second", key_share=0.3)

        def arms_change() -> None:
            experiments.change_shares(self.config, "first", share_by_arm={"control": 0.2, "b": 0.8})

        def shares_shrink() -> None:
            experiments.change_shares(
                self.config, "third", key_share=0.2, share_by_arm={"control": 0.5, "b": 0.3, "c": 0.2}
            )

        def roll_back() -> None:
            night = self.nights[second_namespace]
            generation_before = night.live().generation
            moves.roll_back(night.releases, target_generation=None, reason="a test", attempt=night.attempt())
            assert night.live().generation != generation_before

        def stop() -> None:
            experiments.stop(self.config, "second")

        def freed() -> None:
            free_report = free_namespaces(self.config, "second")
            assert free_report["freed"] == [two] and self.pages(two) == 0 and self.pages(second_namespace) > 0

        begin = {name: [(None, (name, arm)) for arm in arms] for name, arms in ARMS.items()}
        moves_to_none = [(("third", arm), None) for arm in ARMS["third"]]
        return {
            0: (first, begin["first"]),
            2: (second, begin["second"]),
            4: (third, begin["third"]),
            8: (shares_grow, begin["second"]),
            12: (roll_back, ()),
            16: (arms_change, [(("first", "control"), ("first", "b"))]),
            21: (shares_shrink, [*moves_to_none, *((("third", arm), ("third", "control")) for arm in "bc")]),
            25: (stop, [(("second", arm), None) for arm in ARMS["second"]]),
            27: (freed, ()),
        }

    def start(self, name: str, key_share: float, holdout: float | None = None) -> None:
        """Start an experiment with equal arms."""
        arms = ARMS[name]
        named = tuple(
            ArmOption(arm, self.namespaces["abcd".index(letter)], 1 / len(arms)) for arm, letter in arms.items()
        )
        experiments.start(
            self.config, ExperimentOption(self.namespaces[0], name, named, key_share), holdout_share=holdout
        )

    def publish(self, namespace: str) -> None:
        """Publish another generation."""
        self.generation_count += 1
        day = datetime(2027, 1, 1, tzinfo=UTC) + timedelta(hours=self.generation_count)
        generation = f"{day:%Y%m%dT%H%M%SZ}-{self.generation_count:012x}"
        night = self.nights[namespace]
        night.load(generation)
        moves.publish(night.releases, generation, attempt=night.attempt())
        self.of_generation[generation] = namespace

    async def follow(self) -> None:
        """Let every replica poll everything."""
        for replica in self.replicas:
            await replica.poll()
            assert replica.arms.record == self.record
            assert replica.own_held_namespace.follower.stale_reason in (None, "blocklist_unreadable")

    async def night(self, day: int) -> None:
        """Run nights of all namespaces, sweeps and exposures; sometimes replace a replica."""
        for namespace in self.namespaces:
            is_freed = self.nights[namespace].control.read_pointer() is None
            if not is_freed and self.rng.random() < self.nightly:
                self.publish(namespace)
        await self.follow()
        self.clock.now_s += 30.0
        await self.follow()  # beats of now: what replicas hold is known to the sweeps
        for namespace, night in self.nights.items():
            for generation in unneeded_generations(night.releases, kept_generations=KEEP, grace_s=0.0):
                retire(night.releases, generation, attempt=night.attempt(), grace_s=0.0)
                self.counts["retired"] += 1
            assert self.pages_by_generation(namespace).keys() <= self.allowed_generations(namespace)
        for replica in self.replicas:
            await replica.exposures.flush()
        at = self.rng.randrange(REPLICAS)
        if self.rng.random() < 0.3:
            await self.replicas[at].stop()
            self.replicas[at] = SimReplica(self, at, day + 1)
            await self.replicas[at].own_held_namespace.start()
            self.counts["replaced"] += 1
        self.gather()

    def gather(self) -> None:
        """Gather the exposure log as a night does; sometimes die before it is done."""
        store = self.store_of(self.namespaces[0])
        self.counts["parts"] += gather_exposures(store, gathered_at=self.clock())["parts"]

    async def traffic(self) -> None:
        """Send requests of random keys to random replicas, and clicks on some of the answers."""
        hour = int(self.clock.now_s // HOUR_S)
        self.live = {
            name: pointer.generation
            for name, night in self.nights.items()
            if (pointer := night.control.read_pointer()) is not None
        }
        for _ in range(self.requests):
            replica, key = self.rng.choice(self.replicas), self.rng.choice(self.all_keys)
            users = self.rng.sample(USERS, USERS_ASKED)
            lookup = ask(*(entity(user) for user in users), canary_key=key)
            service, assigned = replica.router.route(lookup.entities, lookup.options)
            served, _ = self.canaries.of(service).route(service.capture_served(), lookup.entities, lookup.options)
            answers = replica.router.attach_arm(assigned, await service.ladder.lookup(served, lookup, self.clock()))
            self.check_answers(key, answers)
            if (assigned_arm := self.assigned[key]) is not None:
                name, arm = assigned_arm
                self.exposed.add((name, hour, arm, key.decode()))
                self.request_counts[assigned_arm] += 1
                if self.rng.random() < 0.2:
                    feedback_report = FeedbackReport(None, key, None, "click", 1)
                    assert replica.router.feedback(feedback_report)["experiment"] == f"{name}={arm}"
                    self.clicked[assigned_arm] += 1
        for flushed_replica in self.replicas:
            if self.rng.random() < 0.5:
                await flushed_replica.exposures.flush()

    async def end(self) -> None:
        """End all experiments: no replica holds an arm, and freed data is gone."""
        for experiment_name in ("first", "third"):
            experiments.stop(self.config, experiment_name)
        await self.follow()
        self.clock.now_s += GRACE_S
        await self.follow()
        for namespace in self.namespaces[1:]:
            assert self.nights[namespace].control.replicas() == []
        for replica in self.replicas:
            await replica.stop()
        for experiment_name in ("first", "third"):
            free_namespaces(self.config, experiment_name)
        for namespace in self.namespaces:
            assert (self.pages(namespace) > 0) == (namespace == self.namespaces[0])
        self.clock.now_s += 2 * HOUR_S
        self.gather()
        await self.pool.disconnect()

    # -- what must be so

    def expected(self, record: Experiments, key: bytes) -> Arm:
        """Return experiment and arm of a key by the record alone."""
        name = owner(
            record.salt,
            {current_experiment.name: current_experiment.buckets for current_experiment in record.current},
            key,
        )
        experiment: Experiment | None = None if name is None else record.find(name)
        if experiment is None:
            return None
        arm = owner(
            experiment.salt, {experiment_arm.name: experiment_arm.buckets for experiment_arm in experiment.arms}, key
        )
        assert arm is not None
        return experiment.name, arm

    def check_assignment(self, may_move: Moves) -> None:
        """Check that keys change arms only with shares, and that replicas agree with the record."""
        record = self.record
        arm_by_key = {key: self.expected(record, key) for key in self.all_keys}
        arm_by_key_before = self.assigned or dict.fromkeys(arm_by_key)
        changed_arms = [
            (previous_arm, arm_by_key[key])
            for key, previous_arm in arm_by_key_before.items()
            if arm_by_key[key] != previous_arm
        ]
        assert set(changed_arms) <= set(may_move)
        assert all(
            arm_by_key[key] is None for key in self.all_keys if owner(record.salt, {"": record.holdout}, key) == ""
        )
        self.counts["moved"] += len(changed_arms)
        for replica in self.replicas:
            routing = replica.arms.routing
            assert {key: routing.find_arm(key) if routing else None for key in self.all_keys} == arm_by_key
        self.assigned = arm_by_key

    def check_answers(self, key: bytes, answers: list[dict[str, Any]]) -> None:
        """Check that all answers are of the arm's live generation and name it."""
        assigned_arm, namespace = self.assigned[key], self.namespaces[0]
        if assigned_arm is not None:
            namespace = self.namespaces["abcd".index(ARMS[assigned_arm[0]][assigned_arm[1]])]
        (generation,) = {answer["generation"] for answer in answers}
        assert generation == self.live[namespace]
        assert self.of_generation[generation] == namespace
        answer_arms = {(answer.get("experiment"), answer.get("arm")) for answer in answers}
        assert answer_arms == {assigned_arm or (None, None)}
        assert {answer["source"] for answer in answers} <= {"l1", "l2"}
        self.counts[f"answered by {namespace[-1]}"] += len(answers)

    def pages_by_generation(self, namespace: str) -> Counter[str]:
        """Return the page keys in Redis by generation."""
        return Counter(page_key.split(":")[4] for page_key in self.nights[namespace].pages())

    def pages(self, namespace: str) -> int:
        """Number of page keys in Redis."""
        return self.pages_by_generation(namespace).total()

    def allowed_generations(self, namespace: str) -> set[str]:
        """Return generations that may have pages: live, kept by a sweep, or held by replicas."""
        night = self.nights[namespace]
        held_generations = {
            generation_id for replica in night.control.replicas() for generation_id in replica.held_generations
        }
        ledger = night.releases.ledger()
        return (
            {generation_id for generation_id in (ledger.live_generation, ledger.previous_generation) if generation_id}
            | held_generations
            | self._spared_generations(night)
        )

    def _spared_generations(self, night: Nights) -> set[str]:
        states = night.releases.ledger().state_by_generation
        superseded = sorted(
            (generation_id for generation_id, state in states.items() if state == "superseded"),
            key=lambda generation_id: night.releases.ledger().left_epoch_by_generation.get(generation_id, 0),
        )
        return set(superseded[-KEEP:])
