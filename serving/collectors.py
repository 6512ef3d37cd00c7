"""Collectors of what a running service tells `/metrics` when it is scraped, and the dashboard every few seconds."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cache.l2.data_plane import DataPlane
from cache.tiers.tiered import TieredCache
from serving.admission.controller import Admission
from serving.dashboard.counters import Counts, collect_counts
from serving.events.counts import EventCounts
from serving.lookup.inference import LiveInferences
from serving.lookup.leases import LeaseManager
from serving.lookup.micro_batcher import MicroBatcher
from serving.metrics.event_counters import InternalCounters
from serving.metrics.fast_counters import OverloadCollector
from serving.metrics.registry import Metrics
from serving.quality.monitor import QualityMonitor
from serving.replica.background import Refresher
from serving.replica.freshness import Nights
from serving.usage.hot_keys import HotKeySketch

_BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}


@dataclass(frozen=True, slots=True)
class MetricSources:
    """Whatever keeps numbers of its own."""

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
        """Registers gauges and collectors: all of it is in `/metrics` from now on."""
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
        """Counts by event: what the tiers and the parts around them did besides answering."""
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
        """The counts that the dashboard adds up."""
        return collect_counts(self.metrics, sum(self.admission.shed.values()), self.event_counts)

    def about(self, replica: str) -> Mapping[str, Any]:
        """The state of this worker of `replica`, as the dashboard tells it."""
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
