"""One namespace as a replica holds it: tiers, live inference and ladder, and what follows its pointer."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Self

from cache.config.serving import parse_cores
from cache.events.new_items import NewItemEvents
from cache.format.redis_keys import Keyspace
from cache.l2.cluster import open_tier
from cache.l2.data_plane import Breaker, DataPlane
from cache.l2.tier import RemoteConfig
from cache.model.runtime import Accelerator
from cache.process.background_loops import BackgroundLoops
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist
from cache.store.releases import Pointer
from cache.tiers.l1 import LocalTier, NegativeCache
from cache.tiers.tiered import TieredCache
from serving.admission.controller import Admission, LoopLagSampler
from serving.config.settings import ServingConfig
from serving.engine.batch_inference import compute_of
from serving.engine.inference import LiveInferences
from serving.engine.l1_warmup import L1Warmup
from serving.engine.ladder import Ladder
from serving.engine.leases import LeaseManager
from serving.engine.micro_batcher import MicroBatcher
from serving.engine.service import LookupService
from serving.events.follower import EventFollower, EventMetrics
from serving.events.newer_events import NewerEvents
from serving.generations.heartbeat import Heartbeat, HostHeadroom, RedisClock
from serving.generations.holder import VALUES_LOOK_S, GenerationHolder
from serving.generations.pointer_follower import PointerFollower
from serving.generations.refresher import Refresher
from serving.generations.snapshot import Snapshot
from serving.metrics.registry import Metrics
from serving.near.near_matches import NearMatches
from serving.process.resources import StoreThreads, check_cores, place_thread
from serving.traffic.canary import CanaryRouter
from serving.usage.hot_keys import HotKeySketch
from serving.usage.request_observer import AnswerSampler, UsageObserver

log = logging.getLogger(__name__)

_SAMPLES_PER_INTERVAL = 10
"""Samples of the queues per interval of the admission."""


@dataclass(frozen=True, slots=True)
class NamespaceComponents:
    """The parts that read the keys of one namespace."""

    remote: DataPlane
    tiers: TieredCache
    leases: LeaseManager
    inferences: LiveInferences
    watch: UsageObserver
    ladder: Ladder

    async def aclose(self) -> None:
        """Store pending overlays, and close the connections."""
        await self.tiers.aclose()
        await self.remote.aclose()


@dataclass(frozen=True, slots=True)
class ServiceComponents:
    """Components of the process and of its own namespace; none of them depends on the live generation."""

    metrics: Metrics
    cores: Sequence[int]
    local: LocalTier
    batcher: MicroBatcher
    admission: Admission
    pulse: LoopLagSampler
    executor: ThreadPoolExecutor
    namespace_components: NamespaceComponents
    near: NearMatches | None
    loops: BackgroundLoops

    @classmethod
    def of(
        cls, config: ServingConfig, name: str, loops: BackgroundLoops | None = None
    ) -> "ServiceComponents":
        """All parts, `name` for a replica; nothing is connected yet. `loops` run the background."""
        loops = BackgroundLoops() if loops is None else loops
        metrics = Metrics()
        metrics.namespace_info.labels(config.namespace).set(1)
        cores = parse_cores(config.live_cores)
        check_cores(cores)
        # FAISS searches in threads that a worker starts, so they inherit its cores and its place in line.
        executor = ThreadPoolExecutor(
            config.live_workers,
            "larder-live",
            initializer=place_thread,
            initargs=(cores, config.live_nice),
        )
        near = NearMatches(config.near) if config.near else None
        batcher = MicroBatcher(
            executor,
            workers=config.live_workers,
            max_batch=config.live_batch,
            max_queue=config.live_queue,
            max_queue_bytes=config.live_queue_bytes,
            compute=compute_of(near),
            observe=metrics.inferred,
        )
        admission = Admission(
            target_s=config.queue_target_ms / 1000,
            interval_s=config.queue_interval_ms / 1000,
            requests_max=config.requests_max,
        )
        pulse = LoopLagSampler(
            admission.observe, batcher.waited, every_s=config.queue_interval_ms / 1000 / _SAMPLES_PER_INTERVAL,
            loops=loops,
        )  # fmt: skip
        local = LocalTier(config.l1_bytes)
        watch = UsageObserver(
            metrics.l1_misses, local.eviction_history, AnswerSampler(config.sampled_per_mille)
        )
        keyed = _build_namespace_components(
            config, name, local, batcher, admission, metrics, watch, loops
        )
        return cls(metrics, cores, local, batcher, admission, pulse, executor, keyed, near, loops)

    def of_namespace(self, config: ServingConfig, name: str) -> NamespaceComponents:
        """Build the components that read another namespace's keys; it shares L1, processors, admission and metrics."""
        watch = UsageObserver(self.metrics.l1_misses, self.local.eviction_history)
        return _build_namespace_components(
            config, name, self.local, self.batcher, self.admission, self.metrics, watch, self.loops
        )

    async def aclose(self) -> None:
        """Close the connections, and shut the executor down."""
        await self.namespace_components.aclose()
        self.executor.shutdown(wait=False, cancel_futures=True)


def _build_namespace_components(
    config: ServingConfig,
    name: str,
    local: LocalTier,
    batcher: MicroBatcher,
    admission: Admission,
    metrics: Metrics,
    watch: UsageObserver,
    loops: BackgroundLoops,
) -> NamespaceComponents:
    remote = open_tier(
        RemoteConfig(
            config.redis_url,
            deadline_s=config.l2_deadline_ms / 1000,
            connections_max=config.l2_connections,
        ),
        Keyspace(config.namespace),
        lambda: Breaker(config.breaker_threshold, config.breaker_cooldown_s),
    )
    absences = NegativeCache(config.negative_entries, config.negative_ttl_s)
    tiers = TieredCache(local, absences, remote, loops=loops)
    lead = LeaseManager(
        remote, tiers, remote.control.keyspace, wait_s=config.lease_wait_ms / 1000, name=name
    )
    inferences = LiveInferences(
        batcher,
        tiers,
        overlay_ttl_s=config.overlay_ttl_s,
        outage_ttl_s=config.outage_ttl_s,
        leases=lead if config.lease_wait_ms else None,
        admit=admission.admit_live,
        spares_reads=config.overlay_reads == "auto",
        changed_answers=metrics.changed_answers,
        reuses=frozenset(config.near),
    )
    newer_events = NewerEvents(items=NewItemEvents(config.events.new_items))
    ladder = Ladder(
        tiers, inferences, metrics, l2_deadline_s=config.l2_deadline_ms / 1000, watch=watch,
        newer_events=newer_events,
    )  # fmt: skip
    return NamespaceComponents(remote, tiers, lead, inferences, watch, ladder)


@dataclass(frozen=True, slots=True)
class HeldNamespace:
    """Parts of one namespace: nothing of another can be reached through them."""

    namespace_components: NamespaceComponents
    store: ArtefactStore
    clock: RedisClock
    sketch: HotKeySketch
    holder: GenerationHolder
    follower: PointerFollower
    trial: CanaryRouter
    refresher: Refresher
    events: EventFollower | None = None

    @classmethod
    def of(
        cls,
        config: ServingConfig,
        name: str,
        keyed: NamespaceComponents,
        cores: Sequence[int],
        metrics: Metrics,
        *,
        host: HostHeadroom,
        aside: Executor,
        in_thread: StoreThreads,
        near: NearMatches | None,
        loops: BackgroundLoops | None = None,
        flipped: Callable[[str], None] = lambda _before: None,
    ) -> Self:
        """All parts, `name` for a replica; nothing is read yet. `metrics` are those of this namespace alone."""
        store, control, ladder = config.store(), keyed.remote.control, keyed.ladder
        accelerator = None if config.live_provider == "cpu" else Accelerator(config.live_provider)

        def open_snapshot(pointer: Pointer, blocklist: Blocklist) -> Snapshot:
            snapshot = Snapshot.open(
                store,
                pointer.generation,
                epoch=pointer.epoch,
                published_at=pointer.published_at,
                blocklist=blocklist,
                precision=config.precision,
                threads=config.live_threads,
                cores=cores,
                accelerator=accelerator,
                events=config.events if config.events.enabled else None,
            )
            if near is not None:
                near.check(snapshot)
            if config.events.enabled and config.events.namespace and snapshot.events is None:
                log.warning(
                    "generation %s of namespace %s was made without the events of %s, and its answers count none: set "
                    "[events] enabled and namespace in the settings of its nights",
                    snapshot.generation, config.namespace, config.events.namespace,
                )  # fmt: skip
            return snapshot

        clock = RedisClock()
        sketch = HotKeySketch(control, ladder.recent, lambda: holder.live, clock)
        hottest = sketch.hottest if config.sketch_s else None
        holder = GenerationHolder(
            open_snapshot,
            metrics,
            warm=L1Warmup(keyed.tiers, ladder.recent.names, hottest, metrics.warmed),
            flipped=flipped,
            aside=aside,
            in_thread=in_thread,
            attributes=ladder.newer_events.values,
            new_items=ladder.newer_events.items,
        )
        trial = CanaryRouter(holder, metrics)
        follower = PointerFollower(
            store, control, holder, metrics, load_bound_s=config.load_bound_s, poll_s=config.poll_s,
            clock=clock, in_thread=in_thread,
        )  # fmt: skip
        beat = Heartbeat(
            name, follower, clock, metrics, keyed.remote.p99_ms, trial.report,
            overlay_ttl_s=config.overlay_ttl_s, host=host,
        )  # fmt: skip
        refresher = Refresher(
            follower, store, control, beat, poll_s=config.poll_s,
            blocklist_poll_s=config.blocklist_poll_s, heartbeat_s=config.heartbeat_s, in_thread=in_thread,
            loops=loops,
        )  # fmt: skip
        if config.events.enabled:
            refresher.add_periodic("attribute_values", VALUES_LOOK_S, holder.take_values)
        if config.sketch_s:
            refresher.add_periodic("hot_ids", config.sketch_s, sketch.report)
        events = None
        if config.events.enabled:
            events = EventFollower(
                config.events_redis, config.of_events().keyspace(), ladder.newer_events, holder,
                partial(follower.note, "events"), limit_bytes=config.events.stream_bytes,
            )  # fmt: skip
            refresher.add_loop("events", events.run)
            metrics.registry.register(EventMetrics(events))
        return cls(keyed, store, clock, sketch, holder, follower, trial, refresher, events)


@dataclass(frozen=True, slots=True)
class ServedArm:
    """Namespace of an arm, from which requests of an experiment are answered."""

    held_namespace: HeldNamespace
    service: LookupService
    in_thread: StoreThreads
    staging: Executor

    async def start(self) -> None:
        """Load the live generation, send heartbeats, and keep following."""
        await self.held_namespace.refresher.start()

    async def drain(self) -> None:
        """Signs off, while answers go on."""
        await self.held_namespace.refresher.drain()

    async def aclose(self) -> None:
        """Sign off, close the connections, and let go of the threads."""
        try:
            await self.held_namespace.refresher.aclose()
        finally:
            self.staging.shutdown(wait=False, cancel_futures=True)
            self.in_thread.close()
            await self.held_namespace.namespace_components.aclose()
