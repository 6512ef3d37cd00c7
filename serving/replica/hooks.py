"""Hooks of a replica, which features fill at the start, and the replica that is passed to each `attach`."""

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from cache.process.background_loops import BackgroundLoops
from cache.tiers.l1 import LocalTier
from serving.admission.controller import Admission
from serving.config.settings import ServingConfig
from serving.engine.batch_inference import BatchInference
from serving.engine.micro_batcher import MicroBatcher
from serving.engine.service import LookupService, Router
from serving.generations.nights import Nights, ReleaseWatch
from serving.generations.store_watch import StoreWatch
from serving.metrics.registry import Metrics
from serving.process.resources import StoreThreads
from serving.replica.namespace import HeldNamespace, ServedNamespace

Handler = Callable[[Request, float], Awaitable[object]]
"""Handler of a route: takes the request and its start time; returns a response, or a value to send as JSON."""

Report = Callable[[], Any]
"""Callable that returns a feature's state as JSON-able values, without waiting."""

LifecycleStep = Callable[[], Awaitable[object]]

TraceJudge = Callable[[Scope], bool]
"""Predicate for traced requests."""

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequestWatch(Protocol):
    """Observer of requests without a ready answer."""

    def leaves_unobserved(self, scope: Scope) -> bool:
        """True if a single lookup with these headers need not be observed."""

    async def __call__(self, below: Application, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request by `below`, under observation."""


@dataclass(slots=True, eq=False)
class Hooks:
    """Extensions that features add to a replica; filled at the start, then only read."""

    namespace_hooks: list[Callable[[HeldNamespace], object]] = field(default_factory=list)
    """Called with each namespace that is opened in addition to the replica's own, before it starts."""
    routers: list[Router] = field(default_factory=list)
    """Routers of requests, called in order."""
    handlers: dict[str, Handler] = field(default_factory=dict)
    """Handlers of the features' operations, by `operation_id`."""
    page_routes: list[BaseRoute] = field(default_factory=list)
    """Routes of static files, which contain no data and need no token."""
    request_watch: RequestWatch | None = None
    is_traced: TraceJudge | None = None
    count_readers: list[Callable[[], Mapping[str, int]]] = field(default_factory=list)
    """Functions that return counts by field, which the dashboard adds up."""
    report_by_name: dict[str, Report] = field(default_factory=dict)
    """Reports of features, by name."""
    problem_by_name: dict[str, Callable[[], str | None]] = field(default_factory=dict)
    """What is wrong with a feature, by name; None if nothing is. Heartbeats carry it to `larder status`."""
    start_steps: list[LifecycleStep] = field(default_factory=list)
    """Called in order once the background tasks run."""
    drain_steps: list[LifecycleStep] = field(default_factory=list)
    """Called after the replica has signed off, while it still answers."""
    stop_steps: list[LifecycleStep] = field(default_factory=list)
    """Called in order at the end, before the background tasks are stopped."""
    close_steps: list[LifecycleStep] = field(default_factory=list)
    """Called last, in reverse order."""
    attached_features: list[object] = field(default_factory=list)
    """Return values of all `attach` functions, for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Core of a service, assembled but not started yet. `own_namespace` is the configured namespace."""

    config: ServingConfig
    replica_name: str
    fleet_name: str
    """Name shared by the workers of one parent."""
    metrics: Metrics
    loops: BackgroundLoops
    in_thread: StoreThreads
    """Threads that read the store."""
    own_namespace: HeldNamespace
    l1_tier: LocalTier
    inference_executor: Executor
    """Threads of live inference."""
    batcher: MicroBatcher
    inference: BatchInference
    """Inference that `batcher` runs; the hook `compute`."""
    admission: Admission
    nights: Nights
    releases: ReleaseWatch
    store_watch: StoreWatch
    service: LookupService
    open_namespace: Callable[[str], ServedNamespace]
    """Opens another namespace by its name; its caller starts it."""
    hooks: Hooks = field(default_factory=Hooks)
