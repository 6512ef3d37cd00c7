"""The running service put together: tiers, model, ladder and routes, for as long as the application lives."""

import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from cache.blocklist import Blocklist
from cache.breaker import Breaker
from cache.cluster import open_tier
from cache.keys import Keyspace
from cache.local import LocalTier, NegativeCache
from cache.releases import Pointer
from cache.remote import RemoteConfig
from cache.tiered import Tiered
from serving import openapi
from serving.admission import Admission
from serving.advisor import Advisor
from serving.chronicle import Chronicle
from serving.clock import RedisClock
from serving.config import ServingConfig, check_token
from serving.cores import check_cores, parse_cores, pin_thread
from serving.dashboard.board import Dashboard
from serving.figures import Figures
from serving.follower import Follower
from serving.front import Front
from serving.gauges import Parts
from serving.heartbeat import Heartbeat
from serving.http import refused
from serving.infer import Inferences
from serving.ladder import Ladder
from serving.lead import Lead
from serving.live import MicroBatcher, compute
from serving.metrics import Metrics
from serving.nights import Nights
from serving.peers import Peers
from serving.problem import Problem
from serving.pulse import Pulse
from serving.quality.picks import Picks
from serving.quality.quality import Quality
from serving.quality.watch import Watch
from serving.refresh import Refresher
from serving.room import Room
from serving.routes import Service, routes
from serving.shelf import Shelf
from serving.sketch import Sketch
from serving.snapshot import Snapshot
from serving.trial import Trial
from serving.warming import Warming
from serving.why.explain import Explainer
from serving.why.watching import watched

_LOOKS = 10
"""At the queues, per interval of the admission."""
_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(config: ServingConfig, peers: Peers | None = None) -> Front:
    """The application; nothing is opened before it starts. Raises ConfigError for a token nobody could send.

    `peers`: the workers of the same parent, if there are any.
    """
    check_token(config.token)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            running(config, peers) as service,
            watched(config, service, replica_id()) as (hot, front.watch),
        ):
            app.state.service = service
            # Routes are tried in order: what is asked most comes before the documentation.
            documentation = list(app.router.routes)
            app.router.routes.clear()
            app.include_router(routes(service))
            app.router.routes.extend(documentation)
            front.hot = hot
            yield
            front.hot = None

    front = app = Front(
        title="Larder",
        description="Precomputed predictions, each marked with where it came from.",
        lifespan=lifespan,
        redirect_slashes=False,
    )

    async def refuse(_request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = str(error.detail) if isinstance(error, HTTPException) else "internal error"
        return refused(Problem(status, _CODES.get(status, "http_error"), detail))

    app.add_exception_handler(HTTPException, refuse)
    if config.token:
        _document_token(app)
    return app


def _document_token(app: FastAPI) -> None:
    undocumented = app.openapi

    def documented() -> dict[str, Any]:
        document = undocumented()
        schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes[openapi.BEARER] = {"type": "http", "scheme": "bearer"}
        return document

    app.openapi = documented  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def running(config: ServingConfig, peers: Peers | None = None) -> AsyncIterator[Service]:
    """Everything behind the routes, opened in order and closed in reverse."""
    metrics = Metrics()
    cores = parse_cores(config.live_cores)
    check_cores(cores)
    remote = open_tier(
        RemoteConfig(
            config.redis_url,
            deadline_s=config.l2_deadline_ms / 1000,
            wires_max=config.l2_connections,
        ),
        Keyspace(config.namespace),
        lambda: Breaker(config.breaker_threshold, config.breaker_cooldown_s),
    )
    local = LocalTier(config.l1_bytes)
    tiers = Tiered(local, NegativeCache(config.negative_entries, config.negative_ttl_s), remote)
    # FAISS searches in threads that a worker starts, so they inherit its cores.
    executor = ThreadPoolExecutor(
        config.live_workers, "larder-live", initializer=pin_thread, initargs=(cores,)
    )
    batcher = MicroBatcher(
        executor,
        workers=config.live_workers,
        max_batch=config.live_batch,
        max_queue=config.live_queue,
        max_queue_bytes=config.live_queue_bytes,
        compute=compute,
        observe=metrics.inferred,
    )
    admission = Admission(
        target_s=config.queue_target_ms / 1000,
        interval_s=config.queue_interval_ms / 1000,
        requests_max=config.requests_max,
    )
    pulse = Pulse(
        admission.observe, batcher.waited, every_s=config.queue_interval_ms / 1000 / _LOOKS
    )
    name = replica_id()
    lead = Lead(remote, tiers, remote.keyspace, wait_s=config.lease_wait_ms / 1000, name=name)
    inferences = Inferences(
        batcher,
        tiers,
        overlay_ttl_s=config.overlay_ttl_s,
        outage_ttl_s=config.outage_ttl_s,
        lead=lead if config.lease_wait_ms else None,
        admit=admission.admit_live,
    )
    watch = Watch(metrics.l1_misses, local.absences, Picks(config.sampled_per_mille))
    ladder = Ladder(
        tiers, inferences, metrics, l2_deadline_s=config.l2_deadline_ms / 1000, watch=watch
    )
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
            cores=cores,
        )

    aside = ThreadPoolExecutor(1, thread_name_prefix="larder-next")
    clock = RedisClock()
    sketch = Sketch(remote, ladder.recent, lambda: shelf.live, clock)
    hottest = sketch.hottest if config.sketch_s else None
    warming = Warming(tiers, lambda: ladder.recent, hottest, metrics.warmed)
    trial = Trial(lambda: shelf.canary, metrics)
    shelf = Shelf(open_snapshot, metrics, warm=warming, aside=aside)
    quality = Quality(
        config, watch, metrics, local, remote, shelf, ladder.recent, batcher, admission, clock, name
    )
    follower = Follower(
        store, remote, shelf, metrics, load_bound_s=config.load_bound_s, clock=clock
    )
    chronicle, room = Chronicle(store), Room(remote)
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
        ),
        poll_s=config.poll_s,
        blocklist_poll_s=config.blocklist_poll_s,
        heartbeat_s=config.heartbeat_s,
        also=[
            *(each for each in steps if each[0]),
            (config.figures_s, chronicle.look),
            (config.figures_s, room.look),
            *quality.steps(),
        ],
    )
    nights = Nights(config.nights(), follower)
    metrics.registry.register(advisor)
    metrics.registry.register(Figures(lambda: shelf.holding, nights, chronicle, room))
    parts = Parts(
        metrics,
        tiers,
        remote,
        batcher,
        admission,
        inferences,
        lead,
        sketch,
        quality,
        refresher,
        nights,
    )
    parts.register()
    replica = name if peers is None else peers.replica
    dashboard = Dashboard(
        remote, store, remote.keyspace, name=name, is_on=config.observe and config.dashboard_s > 0,
        counted=parts.counted, about=lambda: parts.about(replica),
        bounds=metrics.answer_seconds.bounds, nights=nights, clock=clock,
        advisor=advisor.told, quality=quality.told,
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
        metrics.exposition if peers is None else peers.exposition,
        admission,
        config.body_timeout_s,
        dashboard,
        Explainer(follower, tiers, remote, batcher, admission, store),
        quality,
        config.observe,
    )
    try:
        await refresher.start()
        pulse.start()
        quality.start()
        if peers is not None:
            await peers.open(metrics.expose)
        yield service
    finally:
        pulse.stop()
        if peers is not None:
            await peers.aclose()
        await refresher.aclose()
        await dashboard.aclose()
        await quality.aclose()
        await tiers.aclose()
        await remote.aclose()
        executor.shutdown(wait=False, cancel_futures=True)
        aside.shutdown(wait=False, cancel_futures=True)


def replica_id() -> str:
    """Differs for every process, also after a restart."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"
