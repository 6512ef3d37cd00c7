"""The running service put together: what answers, what it answers from, and what keeps watch over both."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial

from cache.process.background_loops import BackgroundLoops
from serving.collectors import MetricSources
from serving.components import ServiceComponents
from serving.config.cpu_affinity import step_back
from serving.config.settings import ServingConfig, limits_of
from serving.dashboard.generation_history import GenerationHistory
from serving.dashboard.service import Dashboard
from serving.events.overview import EventOverview
from serving.events.parts import EventParts
from serving.experiments.arms import Arms
from serving.experiments.exposures import FLUSH_S, ExposureLog
from serving.experiments.router import ExperimentRouter
from serving.explain.explainer import Explainer
from serving.fresh.newest_position import NewestPosition
from serving.generations.store_threads import StoreThreads
from serving.http.exposition import Exposition
from serving.http.service import Service
from serving.lookup.service import LookupService
from serving.metrics.event_counters import InternalCounters
from serving.metrics.loop_failures import LoopFailures
from serving.metrics.registry import Metrics
from serving.namespace import HeldNamespace, ServedArm
from serving.near.near_metrics import NearMetrics
from serving.process.worker_metrics import WorkerPeers
from serving.quality.monitor import QualityMonitor
from serving.ranking.filtered_lookup import FilteredLookup
from serving.ranking.filters import THREADS as FILTER_THREADS
from serving.ranking.filters import Filters
from serving.replica.freshness import Nights
from serving.replica.host import LOOK_S, HostHeadroom
from serving.replica.night_metrics import NightMetrics
from serving.replica.redis_memory import RedisMemory
from serving.replica.release_watch import ReleaseWatch
from serving.usage.l1_advisor import L1Advisor

log = logging.getLogger(__name__)

CONNECT_S = 2.0
"""Seconds that a start waits for connections to Redis: a handshake of TLS takes longer than a read may."""


@contextlib.asynccontextmanager
async def running(
    config: ServingConfig, peers: WorkerPeers | None = None, loops: BackgroundLoops | None = None
) -> AsyncIterator[Service]:
    """Everything behind the routes, opened in order and closed in reverse; `loops` run the background."""
    name = replica_id()
    loops = BackgroundLoops() if loops is None else loops
    answering = ServiceComponents.of(config, name, loops)
    metrics, keyed = answering.metrics, answering.namespace_components
    ladder, remote, tiers = keyed.ladder, keyed.remote, keyed.tiers
    aside = ThreadPoolExecutor(
        1, "larder-next", initializer=step_back, initargs=(config.live_nice,)
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
    refresher.add_periodic("host_disk", LOOK_S, host.refresh)
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
        FILTER_THREADS, "larder-filters", initializer=step_back, initargs=(config.live_nice,)
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
            1, "larder-next", initializer=step_back, initargs=(config.live_nice,)
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
            async with asyncio.timeout(CONNECT_S):
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
    """A name that differs for every process, also after a restart."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"
