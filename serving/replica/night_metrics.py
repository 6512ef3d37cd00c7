"""Metrics of the nights: a batch job cannot be scraped, so whoever reads its results tells Prometheus of it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cache.control.schedule import MISSED_MAX
from cache.format.manifest import Manifest
from cache.format.reuse import Reuse
from serving.generations.served_set import ServedGenerations
from serving.metrics.event_counters import by_label
from serving.replica.freshness import Nights
from serving.replica.redis_memory import RedisMemory
from serving.replica.release_watch import ReleaseWatch

Samples = Mapping[str, float]


@dataclass(frozen=True, eq=False)
class NightMetrics(Collector):
    """Collector of the live generation's manifest, of what the release records say of the nights, and of Redis' room.

    Labels are steps, tables, rules of the gates and actions: all bounded by the code and the configuration.
    """

    get_served: Callable[[], ServedGenerations | None]
    nights: Nights
    releases: ReleaseWatch
    room: RedisMemory

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """All gauge families, also those without a sample yet."""
        served, releases, room = self.get_served(), self.releases, self.room
        live = None if served is None else served.live.manifest
        yield GaugeMetricFamily(
            "larder_nights_missed",
            f"Nights that are due and not in what is served, {MISSED_MAX} at most",
            self.nights.missed(),
        )
        yield GaugeMetricFamily(
            "larder_generation_data_until_timestamp_seconds",
            "Up to when the live generation knows data",
            None if live is None else live.data_until,
        )
        yield from _of(live)
        yield _by(
            "larder_last_release_timestamp_seconds",
            "When each action of the release records was last taken",
            "action",
            releases.last,
        )
        yield _by(
            "larder_gate_refused",
            "1 for each gate that refused the last night, while nothing was published since",
            "rule",
            dict.fromkeys(sorted(releases.refused), 1.0),
        )
        used_bytes = room.used_bytes
        yield GaugeMetricFamily(
            "larder_redis_memory_used_bytes", "Of all nodes of Redis together", used_bytes
        )
        yield GaugeMetricFamily(
            "larder_redis_memory_max_bytes",
            "maxmemory of them together, 0 where one has no limit",
            None if used_bytes is None else room.max_bytes,
        )


def _of(live: Manifest | None) -> Iterable[GaugeMetricFamily]:
    tables = {} if live is None else live.tables
    gates = () if live is None else live.gates
    yield _by(
        "larder_night_step_seconds",
        "How long each step of the live generation's night took; score: of all shards together",
        "step",
        {} if live is None else live.timings,
    )
    yield _by(
        "larder_generation_size_bytes",
        "Pages of the live generation, by table",
        "table",
        {name: sum(part.file.size_bytes for part in table.parts) for name, table in tables.items()},
    )
    yield _by(
        "larder_generation_records",
        "Records of the live generation, by table",
        "table",
        {name: sum(part.count for part in table.parts) for name, table in tables.items()},
    )
    reuse = None if live is None else Reuse.of(live.facts)
    yield _by(
        "larder_generation_users",
        "Users of the live generation whose records were copied, or computed for this reason",
        "reason",
        {} if reuse is None else reuse.night.users,
    )
    yield GaugeMetricFamily(
        "larder_night_spared_seconds",
        "Seconds of scoring that copies spared the live generation's night, of all shards together",
        None if reuse is None else reuse.night.spared_s,
    )
    for name, text, field in (
        ("value", "What each gate measured of the live generation", "value"),
        ("threshold", "What each gate held that against", "threshold"),
    ):
        figure_by_rule = {str(gate["rule"]): gate.get(field) for gate in gates}
        numbers = {
            rule: float(n) for rule, n in figure_by_rule.items() if isinstance(n, int | float)
        }
        yield _by(f"larder_gate_{name}", text, "rule", numbers)
    overridden = {str(gate["rule"]): 1.0 for gate in gates if gate.get("overridden") is not None}
    yield _by(
        "larder_gate_overridden",
        "1 for each gate that a person let the live generation pass",
        "rule",
        overridden,
    )


def _by(name: str, text: str, label: str, samples: Samples) -> GaugeMetricFamily:
    return by_label(GaugeMetricFamily(name, text, labels=[label]), samples)
