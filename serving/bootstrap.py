"""Assembly of the running service: its parts and features, opened in order and closed in reverse, and its metrics."""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial

from cache.l2.data_plane import DataPlane
from cache.process.background_loops import BackgroundLoops
from cache.tiers.tiered import TieredCache
from serving.admission.controller import Admission, OverloadCollector
from serving.config.settings import ServingConfig, request_limits
from serving.engine.inference import LiveInferences
from serving.engine.leases import LeaseManager
from serving.engine.micro_batcher import MicroBatcher
from serving.engine.service import LookupService
from serving.features import FEATURES, Feature, all_operations
from serving.generations.heartbeat import HOST_MEASURE_INTERVAL_S, HostHeadroom
from serving.generations.nights import NightMetrics, Nights, RedisMemory, ReleaseWatch
from serving.generations.refresher import Refresher
from serving.http.routes import Service
from serving.metrics.collectors import InternalCounters, LoopFailures
from serving.metrics.exposition import Exposition, WorkerPeers
from serving.metrics.registry import Metrics
from serving.namespace import ServiceComponents, open_namespace
from serving.process.resources import StoreThreads, lower_thread_priority
from serving.replica.hooks import Replica
from serving.replica.namespace import ServedNamespace
from serving.requests.reasons import StaleReason

log = logging.getLogger(__name__)

CONNECT_AHEAD_S = 2.0
"""Seconds that a start waits for connections to Redis: a handshake of TLS takes longer than a read may."""

_BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}


@contextlib.asynccontextmanager
async def running(
    config: ServingConfig,
    peers: WorkerPeers | None = None,
    loops: BackgroundLoops | None = None,
    features: Sequence[Feature] = FEATURES,
) -> AsyncIterator[Service]:
    """Open all parts behind the routes in order, and close them in reverse; `loops` run the background tasks."""
    name = replica_id()
    loops = BackgroundLoops() if loops is None else loops
    answering = ServiceComponents.of(config, name, loops)
    metrics, components = answering.metrics, answering.namespace_components
    ladder, remote, tiers = components.ladder, components.remote, components.tiers
    aside = ThreadPoolExecutor(
        1, "larder-next", initializer=lower_thread_priority, initargs=(config.live_nice,)
    )
    reading = StoreThreads()
    host = HostHeadroom(config.store().local(""), reading)
    open_held = partial(
        open_namespace, cores=answering.cores, host=host, aside=aside, in_thread=reading,
        loops=loops,
    )  # fmt: skip
    own = open_held(
        config, name, components, metrics=metrics, flipped=answering.local.eviction_history.note_flip
    )
    holder, follower, refresher = own.holder, own.follower, own.refresher
    releases, room = ReleaseWatch(own.store, reading), RedisMemory(remote.control)
    refresher.add_periodic("releases", config.figures_s, releases.refresh)
    refresher.add_periodic("redis_memory", config.figures_s, room.refresh)
    refresher.add_periodic("host_disk", HOST_MEASURE_INTERVAL_S, host.refresh)
    nights = Nights(config.nights(), follower)
    metrics.registry.register(LoopFailures(loops))

    def note_failing() -> None:
        failing = ", ".join(f"{name}: {error}" for name, error in loops.error_by_failing_loop.items())
        follower.note_concern(
            "background", StaleReason.BACKGROUND_FAILING if failing else None, failing
        )

    loops.on_change = note_failing
    metrics.registry.register(NightMetrics(lambda: holder.served, nights, releases, room))
    parts = MetricSources(
        metrics, tiers, remote, answering.batcher, answering.admission, components.inferences,
        components.leases, refresher, nights,
    )  # fmt: skip
    parts.register()
    service = LookupService(
        follower=follower, ladder=ladder, metrics=metrics, limits=request_limits(config),
        body_bytes_max=config.body_bytes, body_timeout_s=config.body_timeout_s, tiers=tiers,
        l2_bound_s=remote.bound_s, admission=answering.admission, observes=config.observe,
    )  # fmt: skip

    def open_beside(namespace: str) -> ServedNamespace:
        # The same stream for all namespaces, and of each the generation's own position in it.
        followed_events = replace(config.events, namespace=config.of_events().namespace)
        of = replace(config, namespace=namespace, events=followed_events)
        beside = answering.of_namespace(of, name)
        # Its own threads: a namespace whose loads hang must not keep the service from reading its blocklist.
        in_thread = StoreThreads()
        staging = ThreadPoolExecutor(
            1, "larder-next", initializer=lower_thread_priority, initargs=(config.live_nice,)
        )
        # Its own registry, which nobody scrapes: gauges of what is followed are of the own namespace.
        held = open_held(of, name, beside, metrics=Metrics(), in_thread=in_thread, aside=staging)
        for attach_namespace in replica.hooks.namespaces:
            attach_namespace(held)
        beside_service = replace(
            service, follower=held.follower, ladder=beside.ladder, tiers=beside.tiers,
            l2_bound_s=beside.remote.bound_s,
        )  # fmt: skip
        return ServedNamespace(held, beside_service, in_thread, staging)

    replica = Replica(
        config=config, name=name, fleet_name=name if peers is None else peers.replica, metrics=metrics,
        loops=loops, in_thread=reading, own=own, local=answering.local, executor=answering.executor,
        batcher=answering.batcher, inference=answering.inference, admission=answering.admission, nights=nights,
        releases=releases, service=service, open_namespace=open_beside,
    )  # fmt: skip
    hooks = replica.hooks

    async def drain() -> None:
        await refresher.drain()
        for drain_feature in hooks.drain:
            await drain_feature()

    try:
        for feature in features:
            hooks.attached.append(feature.attach(replica))
        full_service = Service(
            **{service_field.name: getattr(service, service_field.name) for service_field in fields(service)},
            has_tokens=config.has_tokens, drain=drain, nights=nights, hooks=hooks,
            expose_metrics=Exposition(metrics.exposition if peers is None else peers.exposition),
            operations=all_operations(service.limits, features),
        )  # fmt: skip
        await refresher.start()
        with contextlib.suppress(TimeoutError):  # a Redis that is away is for the reads to find
            async with asyncio.timeout(CONNECT_AHEAD_S):
                await remote.connect_ahead()
        for start in hooks.start:
            await start()
        answering.pulse.start()
        if peers is not None:
            await peers.open(metrics.expose)
        yield full_service
    finally:
        answering.pulse.stop()
        if peers is not None:
            await peers.aclose()
        for stop in hooks.stop:
            await stop()
        await refresher.aclose()  # first: its looks would open namespaces again
        for close in reversed(hooks.close):
            await close()
        await answering.aclose()
        aside.shutdown(wait=False, cancel_futures=True)
        reading.close()


def replica_id() -> str:
    """Return a replica name that differs for every process, also after a restart."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class MetricSources:
    """Parts of the service that have metrics."""

    metrics: Metrics
    tiers: TieredCache
    remote: DataPlane
    batcher: MicroBatcher
    admission: Admission
    inferences: LiveInferences
    leases: LeaseManager
    refresher: Refresher
    nights: Nights

    def register(self) -> None:
        """Register gauges and collectors with `/metrics`."""
        metrics, local, nights = self.metrics, self.tiers.local_tier, self.nights
        refresher, follower = self.refresher, self.refresher.follower

        def age() -> float:
            age_s = nights.age_s()
            return float("nan") if age_s is None else age_s

        metrics.generation_age.set_function(age)
        metrics.generation_missing.set_function(lambda: float(nights.is_missing()))
        metrics.generation_due.set_function(nights.due_at)
        metrics.stale.set_function(lambda: float(follower.stale is not None))
        metrics.ready.set_function(lambda: float(follower.health.ready))
        metrics.breaker.set_function(lambda: _BREAKER_STATES[self.remote.stats.breaker])
        metrics.blocklist_age.set_function(lambda: time.monotonic() - refresher.blocklist_read_at)
        metrics.l1_bytes.set_function(lambda: local.size_bytes)
        metrics.l1_entries.set_function(lambda: len(local))
        metrics.live_queue.set_function(lambda: self.batcher.queued)
        metrics.registry.register(InternalCounters(self.internal_counters))
        metrics.registry.register(OverloadCollector(self.admission))

    def internal_counters(self) -> dict[str, float]:
        """Return counts by event of the tiers and the other parts, besides answers."""
        tiers, l2 = self.tiers, self.remote.stats
        return {
            "l2_reads": tiers.counters.l2_reads,
            "l2_batches": l2.batches,
            "l2_shed": l2.shed,
            "breaker_opened": l2.breaker_opened,
            "flights_shared": tiers.flights.shared_count,
            "inferences_shared": self.inferences.flights.shared_count,
            "inferences_hopeless": self.batcher.hopeless_count,
            "overlays_spared": self.inferences.repeat_rate.unread_count,
            "overlays_stored": tiers.write_behind.stored_count,
            "overlays_failed": tiers.write_behind.failed_count,
            "overlays_dropped": tiers.write_behind.dropped_count,
            **self.leases.counts.internal_counters(),
        }
