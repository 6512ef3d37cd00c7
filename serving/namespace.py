"""Assembly of a replica and its namespaces: tiers, live inference, ladder, and the follower of each pointer."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from cache.config.serving import parse_cores
from cache.format.redis_keys import Keyspace
from cache.l2.cluster import open_tier
from cache.l2.data_plane import Breaker
from cache.l2.tier import RemoteConfig
from cache.model.runtime import Accelerator
from cache.process.background_loops import BackgroundLoops
from cache.store.blocklist import Blocklist
from cache.store.releases import Pointer
from cache.tiers.l1 import LocalTier, NegativeCache
from cache.tiers.tiered import TieredCache
from serving.admission.controller import Admission, LoopLagSampler
from serving.config.settings import ServingConfig
from serving.engine.answer_observer import AnswerObserver
from serving.engine.batch_inference import BatchInference
from serving.engine.inference import LiveInferences
from serving.engine.l1_warmup import L1Warmup
from serving.engine.ladder import Ladder
from serving.engine.leases import LeaseManager
from serving.engine.micro_batcher import MicroBatcher
from serving.generations.heartbeat import Heartbeat, HostHeadroom, RedisClock
from serving.generations.holder import GenerationHolder
from serving.generations.pointer_follower import PointerFollower
from serving.generations.refresher import Refresher
from serving.generations.snapshot import Snapshot
from serving.metrics.registry import Metrics
from serving.process.resources import StoreThreads, check_cores, place_thread
from serving.replica.namespace import HeldNamespace, NamespaceComponents, SnapshotOpener

_SAMPLES_PER_INTERVAL = 10
"""Number of queue samples per interval of the admission control."""


@dataclass(frozen=True, slots=True)
class ServiceComponents:
    """Components of the process and of its own namespace; none of them depends on the live generation."""

    metrics: Metrics
    core_numbers: Sequence[int]
    local: LocalTier
    batcher: MicroBatcher
    admission: Admission
    lag_sampler: LoopLagSampler
    executor: ThreadPoolExecutor
    namespace_components: NamespaceComponents
    inference: BatchInference
    loops: BackgroundLoops

    @classmethod
    def of(cls, config: ServingConfig, replica_name: str, loops: BackgroundLoops | None = None) -> "ServiceComponents":
        """Create all components of the replica `replica_name`, without connecting; `loops` run the background tasks."""
        loops = BackgroundLoops() if loops is None else loops
        metrics = Metrics()
        metrics.namespace_info.labels(config.namespace).set(1)
        cores = parse_cores(config.live_cores)
        check_cores(cores)
        # FAISS searches in threads that a worker starts, so they inherit its cores and its priority.
        executor = ThreadPoolExecutor(
            config.live_workers, "larder-live", initializer=place_thread, initargs=(cores, config.live_nice)
        )
        inference = BatchInference()
        batcher = MicroBatcher(
            executor,
            worker_count=config.live_workers,
            batch_size_max=config.live_batch,
            queued_jobs_max=config.live_queue,
            queued_bytes_max=config.live_queue_bytes,
            compute_batch=inference,
            observe_batch=metrics.inferred,
        )
        admission = Admission(
            target_s=config.queue_target_ms / 1000,
            interval_s=config.queue_interval_ms / 1000,
            requests_max=config.requests_max,
        )
        lag_sampler = LoopLagSampler(
            admission.observe, batcher.longest_wait_share,
            sampling_interval_s=config.queue_interval_ms / 1000 / _SAMPLES_PER_INTERVAL,
            loops=loops,
        )  # fmt: skip
        l1_cache = LocalTier(config.l1_bytes)
        answer_observer = AnswerObserver(metrics.l1_misses, l1_cache.eviction_history)
        namespace_components = _build_namespace_components(
            config, replica_name, l1_cache, batcher, admission, metrics, answer_observer, loops
        )
        return cls(
            metrics, cores, l1_cache, batcher, admission, lag_sampler, executor, namespace_components, inference, loops
        )

    def of_namespace(self, config: ServingConfig, replica_name: str) -> NamespaceComponents:
        """Build the components of another namespace, which shares L1, executor, admission and metrics."""
        watch = AnswerObserver(self.metrics.l1_misses, self.local.eviction_history)
        return _build_namespace_components(
            config, replica_name, self.local, self.batcher, self.admission, self.metrics, watch, self.loops
        )

    async def aclose(self) -> None:
        """Close the connections, and shut the executor down."""
        await self.namespace_components.aclose()
        self.executor.shutdown(wait=False, cancel_futures=True)


def _build_namespace_components(
    config: ServingConfig,
    replica_name: str,
    local: LocalTier,
    batcher: MicroBatcher,
    admission: Admission,
    metrics: Metrics,
    answer_observer: AnswerObserver,
    loops: BackgroundLoops,
) -> NamespaceComponents:
    remote = open_tier(
        RemoteConfig(config.redis_url, deadline_s=config.l2_deadline_ms / 1000, connections_max=config.l2_connections),
        Keyspace(config.namespace),
        lambda: Breaker(config.breaker_threshold, config.breaker_cooldown_s),
    )
    negative_cache = NegativeCache(config.negative_entries, config.negative_ttl_s)
    tiers = TieredCache(local, negative_cache, remote, loops=loops)
    lease_manager = LeaseManager(
        remote, tiers, remote.control.keyspace, lease_wait_s=config.lease_wait_ms / 1000, process_name=replica_name
    )
    inferences = LiveInferences(
        batcher,
        tiers,
        overlay_ttl_s=config.overlay_ttl_s,
        outage_ttl_s=config.outage_ttl_s,
        leases=lease_manager if config.lease_wait_ms else None,
        admit_input=admission.admit_live,
        may_skip_overlay_reads=config.overlay_reads == "auto",
        changed_answers=metrics.changed_answers,
    )
    ladder = Ladder(tiers, inferences, metrics, l2_deadline_s=config.l2_deadline_ms / 1000, observer=answer_observer)
    return NamespaceComponents(remote, tiers, lease_manager, inferences, answer_observer, ladder)


def open_namespace(
    config: ServingConfig,
    replica_name: str,
    components: NamespaceComponents,
    core_numbers: Sequence[int],
    metrics: Metrics,
    *,
    host_headroom: HostHeadroom,
    staging_executor: Executor,
    in_thread: StoreThreads,
    loops: BackgroundLoops | None = None,
    on_flip: Callable[[str], None] = lambda _before: None,
) -> HeldNamespace:
    """Create a namespace's parts for this replica, without reading; `metrics` are for this namespace only."""
    store, control, ladder = config.store(), components.remote.control, components.ladder
    accelerator = None if config.live_provider == "cpu" else Accelerator(config.live_provider)
    openers: list[SnapshotOpener] = []

    def open_snapshot(pointer: Pointer, blocklist: Blocklist) -> Snapshot:
        snapshot = Snapshot.open(
            store,
            pointer.generation,
            epoch=pointer.epoch,
            published_at=pointer.published_at,
            blocklist=blocklist,
            precision=config.precision,
            thread_count=config.live_threads,
            core_numbers=core_numbers,
            accelerator=accelerator,
        )
        for opener in openers:
            snapshot = opener(snapshot)
        return snapshot

    clock = RedisClock()
    warmup = L1Warmup(components.tiers, ladder.recent_names.all_names, observe_warmup=metrics.warmed)
    holder = GenerationHolder(
        open_snapshot, metrics, warm=warmup, on_flip=on_flip, staging_executor=staging_executor, in_thread=in_thread
    )
    follower = PointerFollower(
        store, control, holder, metrics, load_bound_s=config.load_bound_s, poll_s=config.poll_s,
        clock=clock, in_thread=in_thread,
    )  # fmt: skip
    heartbeat = Heartbeat(
        replica_name, follower, clock, metrics, components.remote.p99_ms,
        overlay_ttl_s=config.overlay_ttl_s, host_headroom=host_headroom,
    )  # fmt: skip
    refresher = Refresher(
        follower, store, control, heartbeat, poll_s=config.poll_s,
        blocklist_poll_s=config.blocklist_poll_s, heartbeat_s=config.heartbeat_s, in_thread=in_thread,
        loops=loops,
    )  # fmt: skip
    return HeldNamespace(
        config, metrics, components, store, clock, warmup, holder, follower, heartbeat, refresher, openers
    )
