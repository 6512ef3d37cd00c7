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
from cache.tiers.tiered import Tiered
from serving.admission.controller import Admission
from serving.admission.loop_lag import Pulse
from serving.config.cpu_affinity import check_cores, place_thread
from serving.config.settings import ServingConfig
from serving.fresh.newer_events import NewerEvents
from serving.lookup.batch_inference import compute_of
from serving.lookup.inference import Inferences
from serving.lookup.ladder import Ladder
from serving.lookup.leases import Lead
from serving.lookup.micro_batcher import MicroBatcher
from serving.metrics.registry import Metrics
from serving.near.near_matches import NearMatches
from serving.usage.answer_sampling import Picks
from serving.usage.request_observer import UsageObserver

_LOOKS = 10
"""Looks at the queues per interval of the admission."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """The parts that read the keys of one namespace."""

    remote: DataPlane
    tiers: Tiered
    lead: Lead
    inferences: Inferences
    watch: UsageObserver
    ladder: Ladder

    async def aclose(self) -> None:
        """Stores what is still to be stored, and closes the connections."""
        await self.tiers.aclose()
        await self.remote.aclose()


@dataclass(frozen=True, slots=True)
class Answering:
    """The parts, those of the process and those of its own namespace (`keyed`); none knows which generation is live."""

    metrics: Metrics
    cores: Sequence[int]
    local: LocalTier
    batcher: MicroBatcher
    admission: Admission
    pulse: Pulse
    executor: ThreadPoolExecutor
    keyed: Keyed
    near: NearMatches | None
    loops: BackgroundLoops

    @classmethod
    def of(
        cls, config: ServingConfig, name: str, loops: BackgroundLoops | None = None
    ) -> "Answering":
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
        pulse = Pulse(
            admission.observe, batcher.waited, every_s=config.queue_interval_ms / 1000 / _LOOKS,
            loops=loops,
        )  # fmt: skip
        local = LocalTier(config.l1_bytes)
        watch = UsageObserver(metrics.l1_misses, local.absences, Picks(config.sampled_per_mille))
        keyed = _keyed(config, name, local, batcher, admission, metrics, watch, loops)
        return cls(metrics, cores, local, batcher, admission, pulse, executor, keyed, near, loops)

    def of_namespace(self, config: ServingConfig, name: str) -> Keyed:
        """The parts that read another namespace's keys; L1, processors, admission and counts are those of all."""
        watch = UsageObserver(self.metrics.l1_misses, self.local.absences)
        return _keyed(
            config, name, self.local, self.batcher, self.admission, self.metrics, watch, self.loops
        )

    async def aclose(self) -> None:
        """Closes what is connected, and lets go of who computes."""
        await self.keyed.aclose()
        self.executor.shutdown(wait=False, cancel_futures=True)


def _keyed(
    config: ServingConfig,
    name: str,
    local: LocalTier,
    batcher: MicroBatcher,
    admission: Admission,
    metrics: Metrics,
    watch: UsageObserver,
    loops: BackgroundLoops,
) -> Keyed:
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
    tiers = Tiered(local, absences, remote, loops=loops)
    lead = Lead(
        remote, tiers, remote.control.keyspace, wait_s=config.lease_wait_ms / 1000, name=name
    )
    inferences = Inferences(
        batcher,
        tiers,
        overlay_ttl_s=config.overlay_ttl_s,
        outage_ttl_s=config.outage_ttl_s,
        lead=lead if config.lease_wait_ms else None,
        admit=admission.admit_live,
        spares_reads=config.overlay_reads == "auto",
        changed=metrics.changed,
        reuses=frozenset(config.near),
    )
    newer_events = NewerEvents(items=NewItemEvents(config.events.new_items))
    ladder = Ladder(
        tiers, inferences, metrics, l2_deadline_s=config.l2_deadline_ms / 1000, watch=watch,
        newer_events=newer_events,
    )  # fmt: skip
    return Keyed(remote, tiers, lead, inferences, watch, ladder)
