"""Metrics of the service. Counts by source sum to the requested entities, misses to those no stored tier answered.

The entities that Redis answered sum to `larder_l1_misses`: each entity that L1 did not answer has exactly one reason.
"""

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from serving.metrics.collectors import ChangedAnswers, FastTally, L1Misses, SecondsHistogram
from serving.requests.answers import Source
from serving.requests.request_record import note_stage

STAGES = ("parse", "stored", "live", "previous", "render", "inference")
CONTENT_TYPE = CONTENT_TYPE_LATEST

POINTER_LOOK_OUTCOMES = (
    "in_step", "load_failed", "redis_unreachable",
    "pointer_corrupt", "pointer_vanished", "pointer_backwards", "pointer_conflicting",
)  # fmt: skip
"""Outcomes of a poll of the pointer."""

AROUND_FLIP_S = 1.0
"""Seconds after a swap in which answers count as around the flip."""

_SECONDS_BOUNDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10,
)  # fmt: skip
_BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Metrics with one registry per service, so that several services in a process (as in tests) count separately."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)
        counter = functools.partial(Counter, registry=registry)
        gauge = functools.partial(Gauge, registry=registry)
        histogram = functools.partial(Histogram, registry=registry)
        # The label is not called `namespace`, which Prometheus adds to its targets in Kubernetes.
        self.namespace_info = gauge("larder_namespace_info", "1 for the namespace that is served", ["served_namespace"])
        self.entities = counter("larder_entities", "Entities asked for", ["table"])
        self.answers = counter("larder_answers", "Entities answered, by source", ["table", "source"])
        self.misses = counter("larder_misses", "Entities that no stored tier answered", ["table", "reason"])
        self.l1_misses = L1Misses()
        registry.register(self.l1_misses)
        self.changed_answers = ChangedAnswers()
        registry.register(self.changed_answers)
        self.live_failures = counter("larder_live_failures", "Inputs that live did not answer", ["table", "reason"])
        self.requests = counter("larder_requests", "HTTP requests", ["route", "status"])
        self.refreshes = counter("larder_refreshes", "Polls of the pointer, by outcome", ["outcome"])
        for outcome in POINTER_LOOK_OUTCOMES:  # start at 0, so that alerts see the first increase
            self.refreshes.labels(outcome)
        self.answer_seconds = SecondsHistogram(
            "larder_answer_seconds", "Request start to answer", "source", tuple(Source), _SECONDS_BOUNDS
        )
        registry.register(self.answer_seconds)
        self.tally = FastTally()
        self.stage_seconds = SecondsHistogram(
            "larder_stage_seconds", "Time in one stage of a request", "stage", STAGES, _SECONDS_BOUNDS
        )
        registry.register(self.stage_seconds)
        self.live_batch = histogram("larder_live_batch_size", "Inputs per inference", buckets=_BATCH_SIZE_BOUNDS)
        self.generation_info = gauge("larder_generation_info", "1 for each generation held", ["generation", "role"])
        self.generation_age = gauge("larder_generation_age_seconds", "Now minus data_until of the live generation")
        self.generation_missing = gauge(
            "larder_generation_missing", "1 while the live generation is older than the newest due night"
        )
        self.generation_due = gauge(
            "larder_generation_due_timestamp_seconds", "Scheduled time for which a generation must exist by now"
        )
        self.store_problem = gauge(
            "larder_store_problem",
            "1 while the artefact store contradicts the pointer, or lacks records, files or room",
        )
        self.stale = gauge("larder_stale", "1 while the pointer cannot be trusted or followed")
        self.ready = gauge("larder_ready", "1 while /readyz says yes")
        self.degraded = gauge("larder_degraded", "1 while the live path has no model")
        self.fallback = gauge(
            "larder_live_fallback", "1 while live models run on the CPU although live_provider names another provider"
        )
        self.breaker = gauge("larder_breaker_state", "0 closed, 1 half open, 2 open")
        self.blocklist_version = gauge("larder_blocklist_version", "The blocklist in force here")
        self.event_values = counter(
            "larder_event_values",
            "Item values set by events, by whether the live generation's filters know them",
            ["result"],
        )
        self.blocklist_age = gauge("larder_blocklist_age_seconds", "Seconds since the blocklist was last read")
        self.l1_bytes = gauge("larder_l1_bytes", "Bytes in L1")
        self.l1_entries = gauge("larder_l1_entries", "Records in L1")
        self.live_queue = gauge("larder_live_queue", "Inputs waiting for the model")
        self.flip_skew = gauge(
            "larder_flip_skew_seconds",
            "From the pointer's published_at to the swap here, both in Redis' time, at the last flip",
        )
        self.warm_seconds = gauge("larder_warm_seconds", "From staged to ready, at the last staging")
        self.warmed_records = counter("larder_warmed_records", "Records read into L1 before they were requested")
        self.warming_seconds = counter("larder_warming_seconds", "Time spent on reading ahead")
        self.flip_answer_seconds = histogram(
            "larder_flip_answer_seconds", "Request start to answer, in the second after a flip", buckets=_SECONDS_BOUNDS
        )
        self._flip_count, self.is_flipping = 0, False
        self.flip_callbacks: list[Callable[[], None]] = []
        self._child_by_key: dict[tuple[Counter, tuple[str, ...]], Counter] = {}

    def answered(self, table_name: str, source: Source, answer_seconds: float) -> None:
        """Count one entity's answer, given after `answer_seconds`."""
        self._labelled_counter(self.answers, table_name, source).inc()
        self.answer_seconds.observe(source, answer_seconds)
        if self.is_flipping:
            self.flip_answer_seconds.observe(answer_seconds)

    def count_fast_answers(self, table_name: str, source: Source, answer_seconds: float, entity_count: int = 1) -> None:
        """Count `entity_count` entities of a table that the fast path answered, each after `answer_seconds`."""
        self.tally.answer_counts[table_name, source] += entity_count
        self.answer_seconds.observe(source, answer_seconds, entity_count)
        if self.is_flipping:
            for _ in range(entity_count):
                self.flip_answer_seconds.observe(answer_seconds)

    def set_by_events(self, value_count_by_result: Mapping[str, int]) -> None:
        """Count the values set by events, by result."""
        for result, count in value_count_by_result.items():
            self._labelled_counter(self.event_values, result).inc(count)

    def live_failed(self, table_name: str, failure_reason: str) -> None:
        """Count one input that live did not answer."""
        self._labelled_counter(self.live_failures, table_name, failure_reason).inc()

    def missed(self, table_name: str, miss_reason: str) -> None:
        """Count one entity that no stored tier answered."""
        self._labelled_counter(self.misses, table_name, miss_reason).inc()

    def count_entities(self, table_names: Iterable[str]) -> None:
        """Count entities that passed validation, each of which will be answered exactly once."""
        for table_name in table_names:
            self._labelled_counter(self.entities, table_name).inc()

    def requested(self, route: str, http_status: int) -> None:
        """Count one HTTP request with its response."""
        self._labelled_counter(self.requests, route, str(http_status)).inc()

    def _labelled_counter(self, counter: Counter, *labels: str) -> Counter:
        """Return the cached child: prometheus_client checks labels and locks at every look-up, too slow for a hit."""
        key = (counter, labels)
        child = self._child_by_key.get(key)
        if child is None:
            child = self._child_by_key[key] = counter.labels(*labels)
        return child

    def stage(self, stage_name: str, stage_seconds: float, entity_count: int = 0) -> None:
        """Record that one stage of the current request has ended."""
        self.stage_seconds.observe(stage_name, stage_seconds)
        note_stage(stage_name, stage_seconds, entity_count)

    def inferred(self, input_count: int, inference_seconds: float) -> None:
        """Record one inference for `input_count` inputs."""
        self.live_batch.observe(input_count)
        self.stage("inference", inference_seconds)

    def warmed(self, record_count: int, warming_seconds: float) -> None:
        """Count records that were read ahead, and the seconds that it took."""
        self.warmed_records.inc(record_count)
        self.warming_seconds.inc(warming_seconds)

    def set_generations(self, generation_by_role: Mapping[str, str], *, is_degraded: bool) -> None:
        """Set the held generations, by role."""
        self.generation_info.clear()
        for role, generation in generation_by_role.items():
            self.generation_info.labels(generation, role).set(1)
        self.degraded.set(is_degraded)

    def flipped(self) -> None:
        """Record a flip: answers in the next `AROUND_FLIP_S` are also counted as around a flip."""
        self._flip_count += 1
        self.is_flipping = True
        for flip_callback in self.flip_callbacks:
            flip_callback()
        asyncio.get_running_loop().call_later(AROUND_FLIP_S, self._settle, self._flip_count)

    def _settle(self, flip_number: int) -> None:
        self.is_flipping = self._flip_count != flip_number

    async def exposition(self) -> bytes:
        """Return the response body for a scrape of a service of one process."""
        return self.expose()

    def settle(self) -> None:
        """Add the fast path's counts since the last call."""
        answers, requests = self.tally.drain()
        for (table, source), count in answers.items():
            self._labelled_counter(self.entities, table).inc(count)
            self._labelled_counter(self.answers, table, source).inc(count)
        for route, count in requests.items():
            self._labelled_counter(self.requests, route, "200").inc(count)

    def expose(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self.settle()
        return generate_latest(self.registry)


def counts_of(counter: Counter) -> Iterator[tuple[Mapping[str, str], float]]:
    """Yield labels and count of every child, without pending counts of the fast path (see `Metrics.settle`)."""
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield sample.labels, sample.value
