"""Nights as seen by a replica: missing nights, the state of the release records, and metrics."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cache.config.timetable import MISSED_TICKS_MAX, Schedule
from cache.errors import LarderError, TierUnavailable
from cache.format.manifest import Manifest
from cache.l2.control_plane import ControlPlane
from cache.reuse import Reuse
from cache.store.artefacts import ArtefactStore, read_manifest
from cache.store.night_failure import NightFailure, last_failure
from cache.store.releases import POINTER_ACTIONS, Release, all_releases
from serving.generations.pointer_follower import PointerFollower
from serving.generations.served_set import ServedGenerations
from serving.metrics.collectors import add_samples_by_label
from serving.process.resources import StoreThreads

log = logging.getLogger(__name__)

ValueByLabel = Mapping[str, float]

UNKNOWN_GATE = "unknown"
"""Name of the gate while the verdicts on a refused generation cannot be read."""


@dataclass(frozen=True, slots=True)
class Nights:
    """Comparison of the schedule with the served generation; times are Unix seconds of this host's clock."""

    schedule: Schedule
    follower: PointerFollower
    clock: Callable[[], float] = time.time

    def due_at(self) -> float:
        """Return the scheduled time for which a generation must exist by now."""
        return self.schedule.due_tick(self.clock())

    def is_missing(self) -> bool:
        """True if a night is missing; also after a rollback, which makes an older night live."""
        return self.schedule.is_generation_missing(self.clock(), self._created_at())

    def missed_night_count(self) -> int:
        """Return the number of nights that are due but not served."""
        return self.schedule.count_missed_ticks(self.clock(), self._created_at())

    def _created_at(self) -> float | None:
        served = self.follower.served
        return None if served is None else float(served.live.manifest.created_at)

    def generation_age_s(self) -> float | None:
        """Return the served generation's age in seconds since its `data_until`; None if none is served."""
        served = self.follower.served
        return None if served is None else self.clock() - served.live.manifest.data_until

    def readyz_body(self) -> dict[str, Any]:
        """Return the part of /readyz's body on nights; a missing night never makes a replica unready."""
        due_time = datetime.fromtimestamp(self.due_at(), UTC)
        return {
            "missing": self.is_missing(),
            "due": due_time.isoformat(timespec="seconds").replace("+00:00", "Z"),
            "age_seconds": self.generation_age_s(),
        }


class ReleaseWatch:
    """Reader of the release records and the last failure, off the event loop; an error leaves the last known state."""

    def __init__(self, store: ArtefactStore, in_thread: StoreThreads) -> None:
        self.last_time_by_action: dict[str, float] = {}
        self.failed_gate_rules: frozenset[str] = frozenset()
        self.failure: NightFailure | None = None
        self._store = store
        self._in_thread = in_thread
        self._release_by_number: dict[int, Release] = {}
        self._records_lock = threading.Lock()
        self._refusal_number_and_rules: tuple[int, frozenset[str]] = 0, frozenset()
        self._last_error_text: str | None = None

    def read_records(self) -> list[Release]:
        """Return every record, oldest first, reading each only once; blocking, for any thread.

        Raises LarderError, OSError or ValueError where they cannot be read.
        """
        with self._records_lock:
            return all_releases(self._store, self._release_by_number)

    def reread_records(self) -> list[Release]:
        """Forget the known records, which an older copy of the store may have replaced, and read all; blocking."""
        with self._records_lock:
            self._release_by_number.clear()
            return all_releases(self._store, self._release_by_number)

    async def refresh(self) -> None:
        """Read the new records; log a new error."""
        try:
            self.last_time_by_action, self.failed_gate_rules, self.failure = await self._in_thread(self._read_state)
            error_text = None
        except (LarderError, OSError, ValueError) as error:
            error_text = str(error)
        if error_text and error_text != self._last_error_text:
            log.warning("the release records cannot be read: %s", error_text)
        self._last_error_text = error_text

    def _read_state(self) -> tuple[dict[str, float], frozenset[str], NightFailure | None]:
        effective_releases = [
            release for release in self.read_records() if release.is_done or release.action not in POINTER_ACTIONS
        ]
        refusal = open_refusal(effective_releases)
        last_time_by_action: dict[str, float] = {release.action: release.at for release in effective_releases}
        return last_time_by_action, self._read_failed_rules(refusal), last_failure(self._store)

    def _read_failed_rules(self, refusal: Release | None) -> frozenset[str]:
        if refusal is None:
            return frozenset()
        # A refusal is recorded before its verdicts: an unknown gate is read again later.
        if (
            self._refusal_number_and_rules[0] != refusal.stored_number
            or UNKNOWN_GATE in self._refusal_number_and_rules[1]
        ):
            try:
                gates = read_manifest(self._store, refusal.generation).gates
            except LarderError:
                gates = ()
            failed_rules = frozenset(str(gate["rule"]) for gate in gates if not gate["passed"])
            self._refusal_number_and_rules = refusal.stored_number, failed_rules or frozenset({UNKNOWN_GATE})
        return self._refusal_number_and_rules[1]


def open_refusal(effective_releases: Iterable[Release]) -> Release | None:
    """Return the newest refusal, unless a publication or its verification or abandonment followed. Pure."""
    refusal: Release | None = None
    for release in effective_releases:
        if release.action == "refuse":
            refusal = release
        elif release.action == "publish":
            refusal = None
        elif release.action in ("verify", "abandon") and refusal is not None:
            refusal = None if release.generation == refusal.generation else refusal
    return refusal


class RedisMemory:
    """Redis' memory at the last refresh: used (None after an error) and allowed (0 if a server has no limit)."""

    def __init__(self, control: ControlPlane) -> None:
        self.redis_used_bytes: int | None = None
        self.redis_max_bytes = 0
        self._control = control

    async def refresh(self) -> None:
        """Read the memory of all servers as a sum: pages are spread evenly over a cluster's nodes."""
        try:
            server_infos = await self._control.infos()
        except TierUnavailable:
            self.redis_used_bytes = None
            return
        self.redis_used_bytes, self.redis_max_bytes = redis_used_and_max_bytes(server_infos)


def redis_used_and_max_bytes(redis_infos: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the bytes used and allowed on all servers together; the latter is 0 if a server has no limit."""
    used_and_max_pairs = [
        (int(redis_info.get("used_memory", 0)), int(redis_info.get("maxmemory", 0))) for redis_info in redis_infos
    ]
    server_max_bytes = [max_bytes for _, max_bytes in used_and_max_pairs]
    return sum(used_bytes for used_bytes, _ in used_and_max_pairs), sum(server_max_bytes) if all(
        server_max_bytes
    ) else 0


@dataclass(frozen=True, eq=False)
class NightMetrics(Collector):
    """Collector of metrics of the live generation's manifest, the release records, and Redis' memory.

    Labels are steps, tables, gate rules and actions, whose number is bounded by code and configuration.
    """

    get_served: Callable[[], ServedGenerations | None]
    nights: Nights
    releases: ReleaseWatch
    redis_memory: RedisMemory

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield all gauge families, also those without a sample yet."""
        served, releases, redis_memory = self.get_served(), self.releases, self.redis_memory
        live_manifest = None if served is None else served.live.manifest
        yield GaugeMetricFamily(
            "larder_nights_missed",
            f"Nights that are due but not served, {MISSED_TICKS_MAX} at most",
            self.nights.missed_night_count(),
        )
        yield GaugeMetricFamily(
            "larder_generation_data_until_timestamp_seconds",
            "Time up to which the live generation has data",
            None if live_manifest is None else live_manifest.data_until,
        )
        yield from _manifest_gauges(live_manifest)
        yield _labelled_gauge(
            "larder_last_release_timestamp_seconds",
            "When each action of the release records was last taken",
            "action",
            releases.last_time_by_action,
        )
        yield _labelled_gauge(
            "larder_gate_refused",
            "1 for each gate that refused the last night, until a generation is published",
            "rule",
            dict.fromkeys(sorted(releases.failed_gate_rules), 1.0),
        )
        failure = releases.failure
        yield _labelled_gauge(
            "larder_night_failed",
            "1 for the step in which the last night failed, until it succeeds or a night is done; not for refusals "
            "by gates",
            "step",
            # Without the shard's number, to bound the number of label values.
            {} if failure is None or failure.is_refused else {failure.step.partition(",")[0]: 1.0},
        )
        used_bytes = redis_memory.redis_used_bytes
        yield GaugeMetricFamily("larder_redis_memory_used_bytes", "Used memory of all nodes of Redis", used_bytes)
        yield GaugeMetricFamily(
            "larder_redis_memory_max_bytes",
            "maxmemory of all nodes of Redis, 0 if a node has no limit",
            None if used_bytes is None else redis_memory.redis_max_bytes,
        )


def _manifest_gauges(live_manifest: Manifest | None) -> Iterable[GaugeMetricFamily]:
    table_by_name = {} if live_manifest is None else live_manifest.tables
    gates = () if live_manifest is None else live_manifest.gates
    yield _labelled_gauge(
        "larder_night_step_seconds",
        "Duration of each step of the live generation's night; score: sum over all shards",
        "step",
        {} if live_manifest is None else live_manifest.timings,
    )
    yield _labelled_gauge(
        "larder_generation_size_bytes",
        "Pages of the live generation, by table",
        "table",
        {name: sum(part.file.size_bytes for part in table.parts) for name, table in table_by_name.items()},
    )
    yield _labelled_gauge(
        "larder_generation_records",
        "Records of the live generation, by table",
        "table",
        {name: sum(part.count for part in table.parts) for name, table in table_by_name.items()},
    )
    reuse = None if live_manifest is None else Reuse.of(live_manifest.facts)
    yield _labelled_gauge(
        "larder_generation_users",
        "Users of the live generation whose records were copied, or computed for this reason",
        "reason",
        {} if reuse is None else reuse.night.user_count_by_reason,
    )
    yield GaugeMetricFamily(
        "larder_night_spared_seconds",
        "Seconds of scoring that copied records saved in the live generation's night, sum over all shards",
        None if reuse is None else reuse.night.spared_s,
    )
    for name, help_text, gate_field in (
        ("value", "Value that each gate measured for the live generation", "value"),
        ("threshold", "Threshold of each gate for the live generation", "threshold"),
    ):
        figure_by_rule = {str(gate["rule"]): gate.get(gate_field) for gate in gates}
        number_by_rule = {
            rule: float(gate_figure)
            for rule, gate_figure in figure_by_rule.items()
            if isinstance(gate_figure, int | float)
        }
        yield _labelled_gauge(f"larder_gate_{name}", help_text, "rule", number_by_rule)
    overridden_rules = {str(gate["rule"]): 1.0 for gate in gates if gate.get("overridden") is not None}
    yield _labelled_gauge(
        "larder_gate_overridden",
        "1 for each gate that was overridden for the live generation",
        "rule",
        overridden_rules,
    )


def _labelled_gauge(
    metric_name: str, help_text: str, label_name: str, value_by_label: ValueByLabel
) -> GaugeMetricFamily:
    return add_samples_by_label(GaugeMetricFamily(metric_name, help_text, labels=[label_name]), value_by_label)
