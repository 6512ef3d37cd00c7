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
from serving.generations.store_watch import StoreWatch
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

CONNECT_AHEAD_MAX_S = 2.0
"""Seconds that the start waits for connections to Redis: a TLS handshake takes longer than a read may."""

_NUMBER_BY_BREAKER_STATE = {"closed": 0, "half_open": 1, "open": 2}


@contextlib.asynccontextmanager
async def running(
    config: ServingConfig,
    peers: WorkerPeers | None = None,
    loops: BackgroundLoops | None = None,
    features: Sequence[Feature] = FEATURES,
) -> AsyncIterator[Service]:
    """Open the parts of the service in order, yield it, and close them in reverse; `loops` run the background tasks."""
    replica_name = replica_id()
    loops = BackgroundLoops() if loops is None else loops
    service_components = ServiceComponents.of(config, replica_name, loops)
    metrics, components = service_components.metrics, service_components.namespace_components
    ladder, remote, tiers = components.ladder, components.remote, components.tiers
    staging_executor = ThreadPoolExecutor(
        1, "larder-next", initializer=lower_thread_priority, initargs=(config.live_nice,)
    )
    store_threads = StoreThreads()
    host_headroom = HostHeadroom(config.store().local(""), store_threads)
    open_held_namespace = partial(
        open_namespace, core_numbers=service_components.core_numbers, host_headroom=host_headroom,
        staging_executor=staging_executor,
        in_thread=store_threads,
        loops=loops,
    )  # fmt: skip
    own_namespace = open_held_namespace(
        config, replica_name, components, metrics=metrics, on_flip=service_components.local.eviction_history.note_flip
    )
    holder, follower, refresher = (own_namespace.holder, own_namespace.follower, own_namespace.refresher)
    releases, redis_memory = (ReleaseWatch(own_namespace.store, store_threads), RedisMemory(remote.control))
    store_watch = StoreWatch(own_namespace.store, remote.control, releases, store_threads)
    refresher.add_periodic("releases", config.figures_s, releases.refresh)
    refresher.add_periodic("store", config.figures_s, store_watch.refresh)
    refresher.add_periodic("redis_memory", config.figures_s, redis_memory.refresh)
    refresher.add_periodic("host_disk", HOST_MEASURE_INTERVAL_S, host_headroom.refresh)
    nights = Nights(config.nights(), follower)
    metrics.registry.register(LoopFailures(loops))

    def note_failing_loops() -> None:
        failing_loops_text = ", ".join(
            f"{loop_name}: {error}" for loop_name, error in loops.error_by_failing_loop.items()
        )
        follower.note_concern(
            "background", StaleReason.BACKGROUND_FAILING if failing_loops_text else None, failing_loops_text
        )

    loops.on_change = note_failing_loops
    metrics.registry.register(NightMetrics(lambda: holder.served, nights, releases, redis_memory))
    metric_sources = MetricSources(
        metrics, tiers, remote, service_components.batcher, service_components.admission, components.inferences,
        components.leases, refresher, nights, store_watch,
    )  # fmt: skip
    metric_sources.register()
    service = LookupService(
        follower=follower, ladder=ladder, metrics=metrics, limits=request_limits(config),
        body_bytes_max=config.body_bytes, body_timeout_s=config.body_timeout_s, tiers=tiers,
        l2_bound_s=remote.bound_s, admission=service_components.admission, observes_answers=config.observe,
    )  # fmt: skip

    def open_beside_namespace(namespace_name: str) -> ServedNamespace:
        # All namespaces follow the same event stream, each from the position of its own generation.
        followed_events = replace(config.events, namespace=config.of_events().namespace)
        namespace_config = replace(config, namespace=namespace_name, events=followed_events)
        beside_components = service_components.of_namespace(namespace_config, replica_name)
        # Own threads: if loads of this namespace hang, the service can still read its blocklist.
        in_thread = StoreThreads()
        staging_pool = ThreadPoolExecutor(
            1, "larder-next", initializer=lower_thread_priority, initargs=(config.live_nice,)
        )
        # A registry that is not scraped: gauges of generations describe the service's own namespace only.
        held_namespace = open_held_namespace(
            namespace_config,
            replica_name,
            beside_components,
            metrics=Metrics(),
            in_thread=in_thread,
            staging_executor=staging_pool,
        )
        for attach_namespace in replica.hooks.namespace_hooks:
            attach_namespace(held_namespace)
        beside_service = replace(
            service, follower=held_namespace.follower, ladder=beside_components.ladder, tiers=beside_components.tiers,
            l2_bound_s=beside_components.remote.bound_s,
        )  # fmt: skip
        return ServedNamespace(held_namespace, beside_service, in_thread, staging_pool)

    replica = Replica(
        config=config, replica_name=replica_name, fleet_name=replica_name if peers is None else peers.replica_name,
        metrics=metrics,
        loops=loops, in_thread=store_threads, own_namespace=own_namespace, l1_tier=service_components.local,
        inference_executor=service_components.executor,
        batcher=service_components.batcher, inference=service_components.inference,
        admission=service_components.admission, nights=nights,
        releases=releases, store_watch=store_watch, service=service, open_namespace=open_beside_namespace,
    )  # fmt: skip
    hooks = replica.hooks
    own_namespace.heartbeat.find_problems = lambda: {
        feature_name: problem
        for feature_name, find_problem in hooks.problem_by_name.items()
        if (problem := find_problem()) is not None
    }

    async def drain() -> None:
        await refresher.drain()
        for drain_feature in hooks.drain_steps:
            await drain_feature()

    try:
        for feature in features:
            hooks.attached_features.append(feature.attach(replica))
        full_service = Service(
            **{service_field.name: getattr(service, service_field.name) for service_field in fields(service)},
            has_tokens=config.has_tokens, drain=drain, nights=nights, hooks=hooks,
            expose_metrics=Exposition(metrics.exposition if peers is None else peers.exposition),
            operations=all_operations(service.limits, features),
        )  # fmt: skip
        await refresher.start()
        with contextlib.suppress(TimeoutError):  # if Redis is unreachable, the reads handle it
            async with asyncio.timeout(CONNECT_AHEAD_MAX_S):
                await remote.connect_ahead()
        for start_feature in hooks.start_steps:
            await start_feature()
        service_components.lag_sampler.start()
        if peers is not None:
            await peers.open(metrics.expose)
        yield full_service
    finally:
        service_components.lag_sampler.stop()
        if peers is not None:
            await peers.aclose()
        for stop_feature in hooks.stop_steps:
            await stop_feature()
        await refresher.aclose()  # first, since its polls would open namespaces again
        for close_feature in reversed(hooks.close_steps):
            await close_feature()
        await service_components.aclose()
        staging_executor.shutdown(wait=False, cancel_futures=True)
        store_threads.close()


def replica_id() -> str:
    """Return a replica name that is unique to this process, and differs after a restart."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class MetricSources:
    """Parts of the service whose metrics are exposed."""

    metrics: Metrics
    tiers: TieredCache
    remote: DataPlane
    batcher: MicroBatcher
    admission: Admission
    inferences: LiveInferences
    leases: LeaseManager
    refresher: Refresher
    nights: Nights
    store_watch: StoreWatch

    def register(self) -> None:
        """Register gauges and collectors with `/metrics`."""
        metrics, local, nights = self.metrics, self.tiers.local_tier, self.nights
        refresher, follower = self.refresher, self.refresher.follower

        def generation_age_s() -> float:
            age_s = nights.generation_age_s()
            return float("nan") if age_s is None else age_s

        metrics.generation_age.set_function(generation_age_s)
        metrics.generation_missing.set_function(lambda: float(nights.is_missing()))
        metrics.generation_due.set_function(nights.due_at)
        metrics.store_problem.set_function(lambda: float(self.store_watch.problem is not None))
        metrics.stale.set_function(lambda: float(follower.stale_reason is not None))
        metrics.ready.set_function(lambda: float(follower.health.is_ready))
        metrics.breaker.set_function(lambda: _NUMBER_BY_BREAKER_STATE[self.remote.stats.breaker_state])
        metrics.blocklist_age.set_function(lambda: time.monotonic() - refresher.blocklist_read_at)
        metrics.l1_bytes.set_function(lambda: local.size_bytes)
        metrics.l1_entries.set_function(lambda: len(local))
        metrics.live_queue.set_function(lambda: self.batcher.queued)
        metrics.registry.register(InternalCounters(self.internal_counters))
        metrics.registry.register(OverloadCollector(self.admission))

    def internal_counters(self) -> dict[str, float]:
        """Return counts by event of the tiers and the other parts, without counts of answers."""
        tiers, l2 = self.tiers, self.remote.stats
        return {
            "l2_reads": tiers.counters.l2_reads,
            "l2_batches": l2.sent_pipelines,
            "l2_shed": l2.shed_commands,
            "breaker_opened": l2.breaker_openings,
            "flights_shared": tiers.flights.shared_count,
            "inferences_shared": self.inferences.flights.shared_count,
            "inferences_hopeless": self.batcher.hopeless_count,
            "overlays_spared": self.inferences.repeat_rate.unread_count,
            "overlays_stored": tiers.write_behind.stored_count,
            "overlays_failed": tiers.write_behind.failed_count,
            "overlays_dropped": tiers.write_behind.dropped_count,
            **self.leases.counts.internal_counters(),
        }
