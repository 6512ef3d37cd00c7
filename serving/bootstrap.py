"""Assembly of the running service: its parts, opened in order and closed in reverse, and its metrics."""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from cache.l2.data_plane import DataPlane
from cache.process.background_loops import BackgroundLoops
from cache.tiers.tiered import TieredCache
from serving.admission.controller import Admission
from serving.config.settings import ServingConfig, limits_of
from serving.dashboard.counters import Counts, EventOverview, collect_counts
from serving.dashboard.generation_history import GenerationHistory
from serving.dashboard.service import Dashboard
from serving.engine.inference import LiveInferences
from serving.engine.leases import LeaseManager
from serving.engine.micro_batcher import MicroBatcher
from serving.engine.service import LookupService
from serving.events.counts import EventCounts
from serving.events.follower import NewestPosition
from serving.events.intake import EventParts
from serving.explain.explainer import Explainer
from serving.filters.filtered_lookup import FILTER_THREADS, FilteredLookup, Filters
from serving.generations.heartbeat import HOST_LOOK_S, HostHeadroom
from serving.generations.nights import NightMetrics, Nights, RedisMemory, ReleaseWatch
from serving.generations.refresher import Refresher
from serving.http.routes import Service
from serving.metrics.collectors import InternalCounters, LoopFailures, OverloadCollector
from serving.metrics.exposition import Exposition, WorkerPeers
from serving.metrics.registry import Metrics
from serving.namespace import HeldNamespace, ServedArm, ServiceComponents
from serving.near.near_matches import NearMetrics
from serving.process.resources import StoreThreads, lower_thread_priority
from serving.quality.monitor import QualityMonitor
from serving.traffic.experiments.arms import Arms
from serving.traffic.experiments.exposures import FLUSH_S, ExposureLog
from serving.traffic.experiments.router import ExperimentRouter
from serving.usage.hot_keys import HotKeySketch
from serving.usage.l1_advisor import L1Advisor

log = logging.getLogger(__name__)

CONNECT_AHEAD_S = 2.0
"""Seconds that a start waits for connections to Redis: a handshake of TLS takes longer than a read may."""

_BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}


@contextlib.asynccontextmanager
async def running(
    config: ServingConfig, peers: WorkerPeers | None = None, loops: BackgroundLoops | None = None
) -> AsyncIterator[Service]:
    """Open all parts behind the routes in order, and close them in reverse; `loops` run the background tasks."""
    name = replica_id()
    loops = BackgroundLoops() if loops is None else loops
    answering = ServiceComponents.of(config, name, loops)
    metrics, keyed = answering.metrics, answering.namespace_components
    ladder, remote, tiers = keyed.ladder, keyed.remote, keyed.tiers
    aside = ThreadPoolExecutor(
        1, "larder-next", initializer=lower_thread_priority, initargs=(config.live_nice,)
    )
    reading = StoreThreads()
    host = HostHeadroom(config.store().local(""), reading)
    open_namespace = partial(
        HeldNamespace.of, cores=answering.cores, host=host, aside=aside, in_thread=reading,
        near=answering.near, loops=loops,
    )  # fmt: skip
    own_namespace = open_namespace(
        config, name, keyed, metrics=metrics, flipped=answering.local.eviction_history.flipped
    )
    store, clock, holder, follower = (
        own_namespace.store,
        own_namespace.clock,
        own_namespace.holder,
        own_namespace.follower,
    )
    refresher = own_namespace.refresher
    quality = QualityMonitor(
        config, keyed.watch, metrics, answering.local, remote.control, holder, ladder.recent,
        answering.batcher, answering.admission, clock, name, loops,
    )  # fmt: skip
    releases, room = ReleaseWatch(store, reading), RedisMemory(remote.control)
    advisor = L1Advisor(tiers, lambda: holder.live, config.sampled_keys)
    refresher.add_periodic("releases", config.figures_s, releases.refresh)
    refresher.add_periodic("redis_memory", config.figures_s, room.refresh)
    refresher.add_periodic("host_disk", HOST_LOOK_S, host.refresh)
    for loop_name, every_s, step in (
        ("l1_advisor", advisor.step_s, advisor.step),
        *quality.steps(),
    ):
        if every_s:
            refresher.add_periodic(loop_name, every_s, step)
    nights = Nights(config.nights(), follower)
    metrics.registry.register(advisor)
    metrics.registry.register(LoopFailures(loops))

    def note_failing() -> None:
        failing = ", ".join(f"{name}: {error}" for name, error in loops.failing.items())
        follower.note("background", "background_failing" if failing else None, failing)

    loops.on_change = note_failing
    metrics.registry.register(NightMetrics(lambda: holder.served, nights, releases, room))
    events = None
    if config.events.enabled:
        newest_position = NewestPosition(ladder.newer_events, holder, config.of_events().store())
        events = EventParts.of(
            config, name, lambda: holder.blocklist, newest_position,
            lambda: None if holder.live is None else holder.live.new_item_inputs, loops,
        )  # fmt: skip
        events.also(refresher, config.figures_s)
    parts = MetricSources(
        metrics, tiers, remote, answering.batcher, answering.admission, keyed.inferences,
        keyed.leases, own_namespace.sketch, quality, refresher, nights,
        None if events is None else events.intake.counts,
    )  # fmt: skip
    parts.register()
    if answering.near is not None:
        metrics.registry.register(NearMetrics(answering.near))
    overview = None
    if events is not None and own_namespace.events is not None:
        overview = EventOverview(events.intake, own_namespace.events, holder)
    replica = name if peers is None else peers.replica
    dashboard = Dashboard(
        remote.control, GenerationHistory(store, releases.records), name=name,
        is_on=config.observe and config.dashboard_s > 0,
        read_counts=parts.collect_counts, about=lambda: parts.about(replica),
        bounds=metrics.answer_seconds.bounds, nights=nights, clock=clock,
        advisor=advisor.to_json, quality=quality.to_json, arms=lambda: arms.to_json(), in_thread=reading,
        events=lambda: None if overview is None else overview.to_json(),
    )  # fmt: skip
    if dashboard.is_on:
        refresher.add_periodic("dashboard", config.dashboard_s, dashboard.publish)
    exposed = metrics.exposition if peers is None else peers.exposition
    masking = ThreadPoolExecutor(
        FILTER_THREADS,
        "larder-filters",
        initializer=lower_thread_priority,
        initargs=(config.live_nice,),
    )
    filters = Filters(answering.executor, answering.admission.admit_live, mask_executor=masking)
    explainer = Explainer(
        follower, tiers, remote, answering.batcher, answering.admission, store, filters,
        ladder.newer_events, in_thread=reading,
    )  # fmt: skip
    service = LookupService(
        follower=follower, trial=own_namespace.trial, ladder=ladder, metrics=metrics, limits=limits_of(config),
        body_bytes=config.body_bytes, body_timeout_s=config.body_timeout_s, tiers=tiers,
        l2_bound_s=remote.bound_s, admission=answering.admission, observes=config.observe,
        reshaped=FilteredLookup(ladder, filters).lookup,
    )  # fmt: skip

    def open_arm(namespace: str) -> ServedArm:
        # The same stream for all arms, and of each the generation's own position in it.
        arm_events = replace(config.events, namespace=config.of_events().namespace)
        of = replace(config, namespace=namespace, events=arm_events)
        parts = answering.of_namespace(of, name)
        # Its own threads: an arm whose loads hang must not keep the service from reading its blocklist.
        in_thread = StoreThreads()
        staging = ThreadPoolExecutor(
            1, "larder-next", initializer=lower_thread_priority, initargs=(config.live_nice,)
        )
        # Its own registry, which nobody scrapes: gauges of what is followed are of the own namespace.
        arm_namespace = open_namespace(
            of, name, parts, metrics=Metrics(), in_thread=in_thread, aside=staging
        )
        arm_service = replace(
            service, follower=arm_namespace.follower, trial=arm_namespace.trial, ladder=parts.ladder, tiers=parts.tiers,
            l2_bound_s=parts.remote.bound_s, reshaped=FilteredLookup(parts.ladder, filters).lookup,
        )  # fmt: skip
        return ServedArm(arm_namespace, arm_service, in_thread, staging)

    arms = Arms(
        service, config.namespace, store, open_arm, in_thread=reading,
        grace_s=config.deadline_max_ms / 1000,
    )  # fmt: skip
    refresher.add_periodic("experiments", config.blocklist_poll_s, arms.refresh, b"experiments")
    refresher.add_periodic("arms_blocklist", config.blocklist_poll_s, arms.enforce)
    holder.pass_on = arms.enforce

    exposures = ExposureLog(store, name, clock=clock, in_thread=reading)
    refresher.add_periodic("exposures", FLUSH_S, exposures.flush)
    metrics.registry.register(InternalCounters(exposures.internal_counters))

    async def drain() -> None:
        await refresher.drain()
        await arms.drain()

    full_service = Service(
        **{service_field.name: getattr(service, service_field.name) for service_field in fields(service)},
        has_tokens=config.has_tokens, drain=drain, nights=nights, expose=Exposition(exposed),
        dashboard=dashboard, explainer=explainer, quality=quality, filters=filters,
        experiments=ExperimentRouter(arms, exposures, metrics), events=None if events is None else events.intake,
    )  # fmt: skip
    try:
        await refresher.start()
        with contextlib.suppress(TimeoutError):  # a Redis that is away is for the reads to find
            async with asyncio.timeout(CONNECT_AHEAD_S):
                await remote.connect_ahead()
        await arms.refresh()
        answering.pulse.start()
        quality.start()
        if events is not None:
            await newest_position.load_taken_position(reading)
            await events.start()
        if peers is not None:
            await peers.open(metrics.expose)
        yield full_service
    finally:
        answering.pulse.stop()
        if peers is not None:
            await peers.aclose()
        if events is not None:
            await events.aclose()
        await refresher.aclose()  # first: its looks would open arms again
        await arms.aclose()
        await exposures.flush()
        await dashboard.aclose()
        await quality.aclose()
        await answering.aclose()
        for executor in (aside, masking):
            executor.shutdown(wait=False, cancel_futures=True)
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
    sketch: HotKeySketch
    quality: QualityMonitor
    refresher: Refresher
    nights: Nights
    event_counts: EventCounts | None = None

    def register(self) -> None:
        """Register gauges and collectors with `/metrics`."""
        metrics, local, nights = self.metrics, self.tiers.local, self.nights
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
        if self.event_counts is not None:
            metrics.registry.register(self.event_counts)

    def internal_counters(self) -> dict[str, float]:
        """Return counts by event of the tiers and the other parts, besides answers."""
        tiers, l2, sketch = self.tiers, self.remote.stats, self.sketch
        return {
            "l2_reads": tiers.counters.l2_reads,
            "l2_batches": l2.batches,
            "l2_shed": l2.shed,
            "breaker_opened": l2.breaker_opened,
            "flights_shared": tiers.flights.shared,
            "inferences_shared": self.inferences.flights.shared,
            "inferences_hopeless": self.batcher.hopeless,
            "overlays_spared": self.inferences.repeats.spared,
            "overlays_stored": tiers.writes.stored_count,
            "overlays_failed": tiers.writes.failed_count,
            "overlays_dropped": tiers.writes.dropped_count,
            "hot_reported": sketch.reported,
            "hot_reports_failed": sketch.failed,
            **self.leases.counts.internal_counters(),
            **self.quality.internal_counters(),
        }

    def collect_counts(self) -> Counts:
        """Return the counts that the dashboard adds up."""
        return collect_counts(self.metrics, sum(self.admission.shed.values()), self.event_counts)

    def about(self, replica: str) -> Mapping[str, Any]:
        """Return this worker's state for the dashboard; `replica` is its replica's name."""
        served, health = self.refresher.follower.served, self.refresher.follower.health
        local, admission = self.tiers.local, self.admission
        return {
            "replica": replica,
            "generation": None if served is None else served.live.generation,
            "epoch": None if served is None else served.live.epoch,
            "ready": health.ready,
            "stale": health.stale,
            "degraded": health.degraded,
            "failed": health.failed,
            "breaker": self.remote.stats.breaker,
            "live_queued": self.batcher.queued,
            "under_way": admission.under_way,
            "requests_max": admission.requests_max,
            "queue_seconds": round(admission.loop.wait, 4),
            "l1_bytes": local.size_bytes,
            "l1_budget_bytes": local.max_bytes,
            "l1_entries": len(local),
        }
