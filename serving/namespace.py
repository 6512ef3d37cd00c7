"""A namespace as a replica holds it: what follows its pointer, beats in it, and reads its keys."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Self

from cache.model.runtime import Accelerator
from cache.process.background_loops import BackgroundLoops
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist
from cache.store.releases import Pointer
from serving.components import NamespaceComponents
from serving.config.settings import ServingConfig
from serving.fresh.event_follower import EventFollower
from serving.fresh.event_metrics import EventMetrics
from serving.generations.holder import VALUES_S, GenerationHolder
from serving.generations.pointer_follower import PointerFollower
from serving.generations.redis_clock import RedisClock
from serving.generations.snapshot import Snapshot
from serving.generations.store_threads import InThread, StoreThreads
from serving.lookup.l1_warmup import L1Warmup
from serving.lookup.service import LookupService
from serving.metrics.registry import Metrics
from serving.near.near_matches import NearMatches
from serving.replica.background import Refresher
from serving.replica.canary_router import CanaryRouter
from serving.replica.heartbeat import Heartbeat
from serving.replica.host import HostHeadroom
from serving.usage.hot_keys import HotKeySketch

log = logging.getLogger(__name__)


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
        in_thread: InThread,
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
            refresher.add_periodic("attribute_values", VALUES_S, holder.take_values)
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
        """Loads what is live, beats, and goes on following."""
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
