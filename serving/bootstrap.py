"""The running service put together: what answers, what it answers from, and what keeps watch over both."""

import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from cache.store.blocklist import Blocklist
from cache.store.releases import Pointer
from serving.collectors import Parts
from serving.components import Answering
from serving.config.cpu_affinity import step_back
from serving.config.settings import ServingConfig, limits_of
from serving.dashboard.generation_history import GenerationHistory
from serving.dashboard.service import Dashboard
from serving.explain.explainer import Explainer
from serving.generations.holder import Shelf
from serving.generations.pointer_follower import Follower
from serving.generations.redis_clock import RedisClock
from serving.generations.snapshot import Snapshot
from serving.generations.store_threads import StoreThreads
from serving.http.exposition import Exposition
from serving.http.service import Service
from serving.lookup.l1_warmup import Warming
from serving.near.near_metrics import NearMetrics
from serving.process.worker_metrics import Peers
from serving.quality.monitor import QualityMonitor
from serving.ranking.filtered_lookup import FilteredLookup
from serving.ranking.filters import Filters
from serving.replica.background import Refresher
from serving.replica.canary_router import CanaryRouter
from serving.replica.freshness import Nights
from serving.replica.heartbeat import Heartbeat
from serving.replica.host import LOOK_S, Host
from serving.replica.night_metrics import Figures
from serving.replica.redis_memory import Room
from serving.replica.release_watch import ReleaseWatch
from serving.usage.hot_keys import Sketch
from serving.usage.l1_advisor import Advisor


@contextlib.asynccontextmanager
async def running(config: ServingConfig, peers: Peers | None = None) -> AsyncIterator[Service]:
    """Everything behind the routes, opened in order and closed in reverse."""
    name = replica_id()
    answering = Answering.of(config, name)
    metrics, ladder = answering.metrics, answering.ladder
    remote, tiers = answering.remote, answering.tiers
    store = config.store()

    def open_snapshot(pointer: Pointer, blocklist: Blocklist) -> Snapshot:
        snapshot = Snapshot.open(
            store,
            pointer.generation,
            epoch=pointer.epoch,
            published_at=pointer.published_at,
            blocklist=blocklist,
            precision=config.precision,
            threads=config.live_threads,
            cores=answering.cores,
        )
        if answering.near is not None:
            answering.near.check(snapshot)
        return snapshot

    aside = ThreadPoolExecutor(
        1, "larder-next", initializer=step_back, initargs=(config.live_nice,)
    )
    reading = StoreThreads()
    clock = RedisClock()
    sketch = Sketch(remote.control, ladder.recent, lambda: shelf.live, clock)
    hottest = sketch.hottest if config.sketch_s else None
    warming = Warming(tiers, ladder.recent.names, hottest, metrics.warmed)
    shelf = Shelf(
        open_snapshot, metrics, warm=warming, flipped=answering.local.absences.flipped, aside=aside,
        in_thread=reading,
    )  # fmt: skip
    trial = CanaryRouter(shelf, metrics)
    quality = QualityMonitor(
        config, answering.watch, metrics, answering.local, remote.control, shelf, ladder.recent,
        answering.batcher, answering.admission, clock, name,
    )  # fmt: skip
    follower = Follower(
        store, remote.control, shelf, metrics, load_bound_s=config.load_bound_s, poll_s=config.poll_s,
        clock=clock, in_thread=reading,
    )  # fmt: skip
    releases, room = ReleaseWatch(store, reading), Room(remote.control)
    host = Host(store.local(""), reading)
    advisor = Advisor(tiers, lambda: shelf.live, config.sampled_keys)
    refresher = Refresher(
        follower,
        store,
        remote.control,
        Heartbeat(
            name,
            follower,
            clock,
            metrics,
            remote.p99_ms,
            trial.report,
            overlay_ttl_s=config.overlay_ttl_s,
            host=host,
        ),
        poll_s=config.poll_s,
        blocklist_poll_s=config.blocklist_poll_s,
        heartbeat_s=config.heartbeat_s,
        in_thread=reading,
    )
    refresher.also(config.figures_s, releases.look)
    refresher.also(config.figures_s, room.look)
    refresher.also(LOOK_S, host.look)
    for every_s, step in (
        (config.sketch_s, sketch.report),
        (advisor.step_s, advisor.step),
        *quality.steps(),
    ):
        if every_s:
            refresher.also(every_s, step)
    nights = Nights(config.nights(), follower)
    metrics.registry.register(advisor)
    metrics.registry.register(Figures(lambda: shelf.holding, nights, releases, room))
    parts = Parts(
        metrics, tiers, remote, answering.batcher, answering.admission, answering.inferences,
        answering.lead, sketch, quality, refresher, nights,
    )  # fmt: skip
    parts.register()
    if answering.near is not None:
        metrics.registry.register(NearMetrics(answering.near))
    replica = name if peers is None else peers.replica
    dashboard = Dashboard(
        remote.control, GenerationHistory(store, releases.records), name=name,
        is_on=config.observe and config.dashboard_s > 0,
        counted=parts.counted, about=lambda: parts.about(replica),
        bounds=metrics.answer_seconds.bounds, nights=nights, clock=clock,
        advisor=advisor.told, quality=quality.told, in_thread=reading,
    )  # fmt: skip
    if dashboard.is_on:
        refresher.also(config.dashboard_s, dashboard.tell)
    exposed = metrics.exposition if peers is None else peers.exposition
    filters = Filters(answering.executor)
    explainer = Explainer(
        follower, tiers, remote, answering.batcher, answering.admission, store, filters,
        in_thread=reading,
    )  # fmt: skip
    service = Service(
        follower=follower, ladder=ladder, metrics=metrics, limits=limits_of(config),
        body_bytes=config.body_bytes, body_timeout_s=config.body_timeout_s, tiers=tiers,
        l2_bound_s=remote.bound_s, admission=answering.admission, observes=config.observe,
        has_tokens=config.has_tokens, drain=refresher.drain, nights=nights, trial=trial, expose=Exposition(exposed),
        dashboard=dashboard, explainer=explainer, quality=quality,
        filters=filters, filtered=FilteredLookup(ladder, filters).lookup,
    )  # fmt: skip
    try:
        await refresher.start()
        answering.pulse.start()
        quality.start()
        if peers is not None:
            await peers.open(metrics.expose)
        yield service
    finally:
        answering.pulse.stop()
        if peers is not None:
            await peers.aclose()
        await refresher.aclose()
        await dashboard.aclose()
        await quality.aclose()
        await answering.aclose()
        aside.shutdown(wait=False, cancel_futures=True)
        reading.close()


def replica_id() -> str:
    """A name that differs for every process, also after a restart."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"
