"""The running service put together: what answers, what it answers from, and what keeps watch over both."""

import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from cache.blocklist import Blocklist
from cache.releases import Pointer
from serving.advisor import Advisor
from serving.answering import Answering
from serving.chronicle import Chronicle
from serving.clock import RedisClock
from serving.config import ServingConfig
from serving.cores import step_back
from serving.dashboard.board import Dashboard
from serving.exposition import Exposition
from serving.figures import Figures
from serving.follower import Follower
from serving.gauges import Parts
from serving.heartbeat import Heartbeat
from serving.host import LOOK_S, Host
from serving.nights import Nights
from serving.peers import Peers
from serving.quality.quality import Quality
from serving.reading import StoreThreads
from serving.refresh import Refresher
from serving.room import Room
from serving.routes import Service
from serving.shelf import Shelf
from serving.sketch import Sketch
from serving.snapshot import Snapshot
from serving.trial import Trial
from serving.warming import Warming
from serving.why.explain import Explainer


@contextlib.asynccontextmanager
async def running(config: ServingConfig, peers: Peers | None = None) -> AsyncIterator[Service]:
    """Everything behind the routes, opened in order and closed in reverse."""
    name = replica_id()
    answering = Answering.of(config, name)
    metrics, ladder = answering.metrics, answering.ladder
    remote, tiers = answering.remote, answering.tiers
    store = config.store()

    def open_snapshot(pointer: Pointer, blocklist: Blocklist) -> Snapshot:
        return Snapshot.open(
            store,
            pointer.generation,
            epoch=pointer.epoch,
            published_at=pointer.published_at,
            blocklist=blocklist,
            precision=config.precision,
            threads=config.live_threads,
            cores=answering.cores,
        )

    aside = ThreadPoolExecutor(
        1, "larder-next", initializer=step_back, initargs=(config.live_nice,)
    )
    reading = StoreThreads()
    clock = RedisClock()
    sketch = Sketch(remote, ladder.recent, lambda: shelf.live, clock)
    hottest = sketch.hottest if config.sketch_s else None
    warming = Warming(tiers, ladder.recent.names, hottest, metrics.warmed)
    trial = Trial(lambda: shelf.canary, metrics)
    shelf = Shelf(open_snapshot, metrics, warm=warming, aside=aside, in_thread=reading)
    quality = Quality(
        config, answering.watch, metrics, answering.local, remote, shelf, ladder.recent,
        answering.batcher, answering.admission, clock, name,
    )  # fmt: skip
    follower = Follower(
        store, remote, shelf, metrics, load_bound_s=config.load_bound_s, poll_s=config.poll_s,
        clock=clock, in_thread=reading,
    )  # fmt: skip
    chronicle, room = Chronicle(store, reading), Room(remote)
    host = Host(store.local(""), reading)
    advisor = Advisor(tiers, lambda: shelf.live, config.sampled_keys)
    steps = (config.sketch_s, sketch.report), (advisor.step_s, advisor.step)
    refresher = Refresher(
        follower,
        store,
        remote,
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
        also=[
            *(each for each in steps if each[0]),
            (config.figures_s, chronicle.look),
            (config.figures_s, room.look),
            (LOOK_S, host.look),
            *quality.steps(),
        ],
        in_thread=reading,
    )
    nights = Nights(config.nights(), follower)
    metrics.registry.register(advisor)
    metrics.registry.register(Figures(lambda: shelf.holding, nights, chronicle, room))
    parts = Parts(
        metrics, tiers, remote, answering.batcher, answering.admission, answering.inferences,
        answering.lead, sketch, quality, refresher, nights,
    )  # fmt: skip
    parts.register()
    replica = name if peers is None else peers.replica
    dashboard = Dashboard(
        remote, store, remote.keyspace, name=name, is_on=config.observe and config.dashboard_s > 0,
        counted=parts.counted, about=lambda: parts.about(replica),
        bounds=metrics.answer_seconds.bounds, nights=nights, clock=clock,
        advisor=advisor.told, quality=quality.told, in_thread=reading,
    )  # fmt: skip
    if dashboard.is_on:
        refresher.also(config.dashboard_s, dashboard.tell)
    service = Service(
        follower,
        ladder,
        metrics,
        config.limits(),
        config.body_bytes,
        config.token,
        refresher.drain,
        nights,
        trial,
        tiers,
        remote.bound_s,
        Exposition(metrics.exposition if peers is None else peers.exposition),
        answering.admission,
        config.body_timeout_s,
        dashboard,
        Explainer(
            follower,
            tiers,
            remote,
            answering.batcher,
            answering.admission,
            store,
            in_thread=reading,
        ),
        quality,
        config.observe,
    )
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
    """Differs for every process, also after a restart."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"
