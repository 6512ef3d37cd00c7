"""Parts of a namespace that a replica holds: its own, or an additional one."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from cache.l2.data_plane import DataPlane
from cache.store.artefacts import ArtefactStore
from cache.tiers.tiered import TieredCache
from serving.config.settings import ServingConfig
from serving.engine.answer_observer import AnswerObserver
from serving.engine.inference import LiveInferences
from serving.engine.l1_warmup import L1Warmup
from serving.engine.ladder import Ladder
from serving.engine.leases import LeaseManager
from serving.engine.service import LookupService
from serving.generations.heartbeat import Heartbeat, RedisClock
from serving.generations.holder import GenerationHolder
from serving.generations.pointer_follower import PointerFollower
from serving.generations.refresher import Refresher
from serving.generations.snapshot import Snapshot
from serving.metrics.registry import Metrics
from serving.process.resources import StoreThreads

SnapshotOpener = Callable[[Snapshot], Snapshot]
"""Completes a newly opened snapshot, in a thread; raises if it cannot be loaded."""


@dataclass(frozen=True, slots=True)
class NamespaceComponents:
    """Parts that read the keys of one namespace."""

    remote: DataPlane
    tiers: TieredCache
    leases: LeaseManager
    inferences: LiveInferences
    answer_observer: AnswerObserver
    ladder: Ladder

    async def aclose(self) -> None:
        """Store pending overlays, and close the connections."""
        await self.tiers.aclose()
        await self.remote.aclose()


@dataclass(frozen=True, slots=True)
class HeldNamespace:
    """Parts of one namespace, without access to others; `metrics` are for this namespace only."""

    config: ServingConfig
    metrics: Metrics
    components: NamespaceComponents
    store: ArtefactStore
    clock: RedisClock
    warmup: L1Warmup
    holder: GenerationHolder
    follower: PointerFollower
    heartbeat: Heartbeat
    refresher: Refresher
    openers: list[SnapshotOpener]
    """Called in order with each newly opened snapshot, before it answers; features append to it at the start."""


@dataclass(frozen=True, slots=True)
class ServedNamespace:
    """Namespace that answers in addition to the replica's own."""

    held_namespace: HeldNamespace
    service: LookupService
    in_thread: StoreThreads
    staging: Executor

    async def start(self) -> None:
        """Load the live generation, send heartbeats, and keep following."""
        await self.held_namespace.refresher.start()

    async def drain(self) -> None:
        """Sign off, while answers go on."""
        await self.held_namespace.refresher.drain()

    async def aclose(self) -> None:
        """Sign off, close the connections, and shut down the threads."""
        try:
            await self.held_namespace.refresher.aclose()
        finally:
            self.staging.shutdown(wait=False, cancel_futures=True)
            self.in_thread.close()
            await self.held_namespace.components.aclose()
