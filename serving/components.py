"""The answering parts put together: tiers, live path and ladder."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cache.config.serving import parse_cores
from cache.events.new_items import NewItemEvents
from cache.format.redis_keys import Keyspace
from cache.l2.circuit_breaker import Breaker
from cache.l2.cluster.tier import open_tier
from cache.l2.data_plane import DataPlane
from cache.l2.tier import RemoteConfig
from cache.process.background_loops import BackgroundLoops
from cache.tiers.l1 import LocalTier, NegativeCache
from cache.tiers.tiered import TieredCache
from serving.admission.controller import Admission
from serving.admission.loop_lag import LoopLagSampler
from serving.config.cpu_affinity import check_cores, place_thread
from serving.config.settings import ServingConfig
from serving.fresh.newer_events import NewerEvents
from serving.lookup.batch_inference import compute_of
from serving.lookup.inference import LiveInferences
from serving.lookup.ladder import Ladder
from serving.lookup.leases import LeaseManager
from serving.lookup.micro_batcher import MicroBatcher
from serving.metrics.registry import Metrics
from serving.near.near_matches import NearMatches
from serving.usage.answer_sampling import AnswerSampler
from serving.usage.request_observer import UsageObserver

_SAMPLES_PER_INTERVAL = 10
"""Looks at the queues per interval of the admission."""


@dataclass(frozen=True, slots=True)
class NamespaceComponents:
    """The parts that read the keys of one namespace."""

    remote: DataPlane
    tiers: TieredCache
    leases: LeaseManager
    inferences: LiveInferences
    watch: UsageObserver
    ladder: Ladder

    async def aclose(self) -> None:
        """Stores what is still to be stored, and closes the connections."""
        await self.tiers.aclose()
        await self.remote.aclose()


@dataclass(frozen=True, slots=True)
class ServiceComponents:
    """Parts of the process and of its own namespace (`namespace_components`); none knows which generation is live."""

    metrics: Metrics
    cores: Sequence[int]
    local: LocalTier
    batcher: MicroBatcher
    admission: Admission
    pulse: LoopLagSampler
    executor: ThreadPoolExecutor
    namespace_components: NamespaceComponents
    near: NearMatches | None
    loops: BackgroundLoops

    @classmethod
    def of(
        cls, config: ServingConfig, name: str, loops: BackgroundLoops | None = None
    ) -> "ServiceComponents":
        """All parts, `name` for a replica; nothing is connected yet. `loops` run the background."""
        loops = BackgroundLoops() if loops is None else loops
        metrics = Metrics()
        metrics.namespace_info.labels(config.namespace).set(1)
        cores = parse_cores(config.live_cores)
        check_cores(cores)
        # FAISS searches in threads that a worker starts, so they inherit its cores and its place in line.
        executor = ThreadPoolExecutor(
            config.live_workers,
            "larder-live",
            initializer=place_thread,
            initargs=(cores, config.live_nice),
        )
        near = NearMatches(config.near) if config.near else None
        batcher = MicroBatcher(
            executor,
            workers=config.live_workers,
            max_batch=config.live_batch,
            max_queue=config.live_queue,
            max_queue_bytes=config.live_queue_bytes,
            compute=compute_of(near),
            observe=metrics.inferred,
        )
        admission = Admission(
            target_s=config.queue_target_ms / 1000,
            interval_s=config.queue_interval_ms / 1000,
            requests_max=config.requests_max,
        )
        pulse = LoopLagSampler(
            admission.observe, batcher.waited, every_s=config.queue_interval_ms / 1000 / _SAMPLES_PER_INTERVAL,
            loops=loops,
        )  # fmt: skip
        local = LocalTier(config.l1_bytes)
        watch = UsageObserver(
            metrics.l1_misses, local.eviction_history, AnswerSampler(config.sampled_per_mille)
        )
        keyed = _build_namespace_components(
            config, name, local, batcher, admission, metrics, watch, loops
        )
        return cls(metrics, cores, local, batcher, admission, pulse, executor, keyed, near, loops)

    def of_namespace(self, config: ServingConfig, name: str) -> NamespaceComponents:
        """The parts that read another namespace's keys; L1, processors, admission and counts are those of all."""
        watch = UsageObserver(self.metrics.l1_misses, self.local.eviction_history)
        return _build_namespace_components(
            config, name, self.local, self.batcher, self.admission, self.metrics, watch, self.loops
        )

    async def aclose(self) -> None:
        """Closes what is connected, and lets go of who computes."""
        await self.namespace_components.aclose()
        self.executor.shutdown(wait=False, cancel_futures=True)


def _build_namespace_components(
    config: ServingConfig,
    name: str,
    local: LocalTier,
    batcher: MicroBatcher,
    admission: Admission,
    metrics: Metrics,
    watch: UsageObserver,
    loops: BackgroundLoops,
) -> NamespaceComponents:
    remote = open_tier(
        RemoteConfig(
            config.redis_url,
            deadline_s=config.l2_deadline_ms / 1000,
            connections_max=config.l2_connections,
        ),
        Keyspace(config.namespace),
        lambda: Breaker(config.breaker_threshold, config.breaker_cooldown_s),
    )
    absences = NegativeCache(config.negative_entries, config.negative_ttl_s)
    tiers = TieredCache(local, absences, remote, loops=loops)
    lead = LeaseManager(
        remote, tiers, remote.control.keyspace, wait_s=config.lease_wait_ms / 1000, name=name
    )
    inferences = LiveInferences(
        batcher,
        tiers,
        overlay_ttl_s=config.overlay_ttl_s,
        outage_ttl_s=config.outage_ttl_s,
        leases=lead if config.lease_wait_ms else None,
        admit=admission.admit_live,
        spares_reads=config.overlay_reads == "auto",
        changed_answers=metrics.changed_answers,
        reuses=frozenset(config.near),
    )
    newer_events = NewerEvents(items=NewItemEvents(config.events.new_items))
    ladder = Ladder(
        tiers, inferences, metrics, l2_deadline_s=config.l2_deadline_ms / 1000, watch=watch,
        newer_events=newer_events,
    )  # fmt: skip
    return NamespaceComponents(remote, tiers, lead, inferences, watch, ladder)
