"""Results of compared samples: sums with confidence intervals, drift, and one report of all replicas."""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cache.errors import TierUnavailable
from cache.l2.control_plane import ControlPlane
from cache.model.agreement import SKEW_COSINE_RULE, SKEW_RULE
from cache.usage.hot_keys import COLD_WINDOW, EntityName, SharedHotKeys, window_number_of
from serving.generations.snapshot import Snapshot
from serving.metrics.collectors import add_samples_by_label
from serving.metrics.sequential import DRIFT_ALPHA, Drift
from serving.quality.comparison import AnswerComparison
from serving.usage.table_usage import GIGABYTE, TableUsage

CellKey = tuple[str, str, str, str]
"""Table, source, producer, band."""

ERROR_BOUNDS = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds of the score error's buckets; a further bucket is for larger errors."""

_Z_OF_95_PERCENT = 1.959964  # of a 95 % interval

OVERLAP_FLOOR = 0.5
"""Required overlap if the night has measured none."""

THRESHOLD_LENIENCE = 0.05
"""Margin below the gate's threshold, because requested entities differ from those that the gate sampled."""

CELL_LABELS = ("table", "source", "producer", "band")

REPORT_TTL_S = 120
"""Life in seconds of the hash in Redis after the last report of any replica."""

REPORT_FRESH_MAX_S = 30.0
"""Age in seconds (plus two report intervals) beyond which a replica's part is ignored."""

_REPORTS_PER_COUNT = 6
"""Number of reports per count of the worklist, which takes the event loop at least 10 ms."""


@dataclass(slots=True)
class SampleTotals:
    """Sums over the samples of a cell."""

    sample_count: int = 0
    exact_count: int = 0
    overlap_sum: float = 0.0
    overlap_squares_sum: float = 0.0
    score_error_sum: float = 0.0
    age_seconds_sum: float = 0.0
    error_bucket_counts: list[int] = field(default_factory=lambda: [0] * (len(ERROR_BOUNDS) + 1))

    def add_sample(self, sample: AnswerComparison) -> None:
        """Add a sample to the sums."""
        self.sample_count += 1
        self.exact_count += sample.is_exact
        self.overlap_sum += sample.overlap
        self.overlap_squares_sum += sample.overlap**2
        self.score_error_sum += sample.score_error
        self.age_seconds_sum += sample.age_s
        self.error_bucket_counts[bisect_left(ERROR_BOUNDS, sample.score_error)] += 1

    def to_json(self) -> list[Any]:
        """Return the JSON list of the sums and the error buckets, for Redis."""
        sums = (
            self.sample_count,
            self.exact_count,
            self.overlap_sum,
            self.overlap_squares_sum,
            self.score_error_sum,
            self.age_seconds_sum,
        )
        return [*sums, self.error_bucket_counts]

    @classmethod
    def of(cls, packed_cells: Iterable[Sequence[Any]]) -> "SampleTotals":
        """Return the sum of cells in the form of `to_json`."""
        total_cell = cls()
        for samples, exact, overlap, squares, error, age, errors in packed_cells:
            total_cell.sample_count += samples
            total_cell.exact_count += exact
            total_cell.overlap_sum += overlap
            total_cell.overlap_squares_sum += squares
            total_cell.score_error_sum += error
            total_cell.age_seconds_sum += age
            total_cell.error_bucket_counts = [
                a + b for a, b in zip(total_cell.error_bucket_counts, errors, strict=True)
            ]
        return total_cell

    def exact_rate(self) -> dict[str, float]:
        """Return the rate of exact samples, and the bounds of its 95 % interval."""
        low, high = wilson_interval(self.exact_count, self.sample_count)
        return {"rate": self.exact_count / max(1, self.sample_count), "low": low, "high": high}

    def mean_overlap(self) -> dict[str, float]:
        """Return the mean overlap, and the bounds of its 95 % interval."""
        mean = self.overlap_sum / max(1, self.sample_count)
        interval_half_width = half_width(self.overlap_sum, self.overlap_squares_sum, self.sample_count)
        return {"mean": mean, "low": max(0.0, mean - interval_half_width), "high": min(1.0, mean + interval_half_width)}

    def mean_error(self) -> dict[str, float]:
        """Return the mean score error, and the upper bound of the bucket with the 99th percentile."""
        rank, cumulative_count = math.ceil(0.99 * self.sample_count), 0
        p99 = ERROR_BOUNDS[-1]
        for bound, count in zip(ERROR_BOUNDS, self.error_bucket_counts, strict=False):
            cumulative_count += count
            if cumulative_count >= rank:
                p99 = bound
                break
        return {"mean": self.score_error_sum / max(1, self.sample_count), "p99": p99}


def wilson_interval(hit_count: int, sample_count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a rate (Wilson, JASA 22, 1927): valid at 0, at 1 and for few samples."""
    if not sample_count:
        return 0.0, 1.0
    rate, z2 = hit_count / sample_count, _Z_OF_95_PERCENT * _Z_OF_95_PERCENT
    interval_middle = rate + z2 / (2 * sample_count)
    interval_half_width = _Z_OF_95_PERCENT * math.sqrt(
        rate * (1 - rate) / sample_count + z2 / (4 * sample_count * sample_count)
    )
    # At 0 and 1 the bound equals the rate, except for rounding of floats.
    low = (interval_middle - interval_half_width) / (1 + z2 / sample_count) if hit_count else 0.0
    high = (interval_middle + interval_half_width) / (1 + z2 / sample_count) if hit_count < sample_count else 1.0
    return low, high


def half_width(value_sum: float, squares_sum: float, sample_count: int) -> float:
    """Return the half-width of a mean's 95 % interval by the normal approximation; 1 for fewer than two samples.

    Samples of one entity are not independent: if a few entities are requested very often, the interval is too narrow.
    """
    if sample_count < 2:
        return 1.0
    variance = max(0.0, squares_sum - value_sum * value_sum / sample_count) / (sample_count - 1)
    return _Z_OF_95_PERCENT * math.sqrt(variance / sample_count)


def pack_cells(totals_by_cell: Mapping[CellKey, SampleTotals]) -> dict[str, list[Any]]:
    """Encode cells as JSON; parts of a key contain no tabs."""
    return {"\t".join(cell_key): cell.to_json() for cell_key, cell in totals_by_cell.items()}


def merge_cells(packed_replica_cells: Iterable[Mapping[str, Sequence[Any]]]) -> dict[CellKey, SampleTotals]:
    """Return the sums of the cells of all parts."""
    cells_by_packed_key: dict[str, list[Sequence[Any]]] = {}
    for cells_of_replica in packed_replica_cells:
        for packed_key, cell in cells_of_replica.items():
            cells_by_packed_key.setdefault(packed_key, []).append(cell)
    cell_by_key = {}
    for packed_key, cells in cells_by_packed_key.items():
        table, source, producer, band = packed_key.split("\t")
        cell_by_key[table, source, producer, band] = SampleTotals.of(cells)
    return cell_by_key


class QualityResults(Collector):
    """Sums of all samples, and of those of the live release, the only one tested for drift. For the event loop only."""

    def __init__(self) -> None:
        self.skipped_by_reason: Counter[str] = Counter()
        self.cpu_s = 0.0
        self.judged_since = 0.0
        self._totals_by_cell: defaultdict[CellKey, SampleTotals] = defaultdict(SampleTotals)
        self._live_totals_by_cell: defaultdict[CellKey, SampleTotals] = defaultdict(SampleTotals)
        self.judged_release: tuple[str, int] | None = None
        """Generation and epoch of the judged release."""
        self._drift_by_table: dict[str, Drift] = {}

    def begin_release(self, live_snapshot: Snapshot, now_s: float) -> None:
        """Start to judge this release, unless it is already judged."""
        if (release := (live_snapshot.generation, live_snapshot.epoch)) == self.judged_release:
            return
        tables = live_snapshot.manifest.tables
        self.judged_release, self.judged_since = release, now_s
        self._live_totals_by_cell.clear()
        self._drift_by_table = {
            table_name: Drift(_overlap_floor(live_snapshot, table.kind == "topk"), DRIFT_ALPHA / len(tables))
            for table_name, table in tables.items()
        }

    def add(self, sample: AnswerComparison, generation: str) -> None:
        """Add the comparison of an answer from this generation."""
        cell_key: CellKey = sample.table, sample.source, sample.producer, sample.band
        self._totals_by_cell[cell_key].add_sample(sample)
        if self.judged_release is None or self.judged_release[0] != generation:
            return
        self._live_totals_by_cell[cell_key].add_sample(sample)
        if sample.producer == "batch" and sample.record_overlap is not None:
            self._drift_by_table[sample.table].add_overlap(sample.record_overlap)

    def to_json(self) -> dict[str, Any]:
        """Return this replica's part, which other replicas merge with theirs."""
        return {
            "generation": None if self.judged_release is None else self.judged_release[0],
            "since": self.judged_since,
            "cells": pack_cells(self._live_totals_by_cell),
            "drift": {
                table_name: drift.alarm_after_samples
                for table_name, drift in self._drift_by_table.items()
                if drift.is_drift_found
            },
        }

    def collect(self) -> Iterable[Metric]:
        """Yield metric families of the samples, skipped answers, processor time and drift."""
        samples_family = CounterMetricFamily(
            "larder_quality_samples", "Served answers that were computed again", labels=CELL_LABELS
        )
        exact_family = CounterMetricFamily(
            "larder_quality_exact", "Answers that were the same when computed again", labels=CELL_LABELS
        )
        overlap_family, error_family, age_family = (
            SummaryMetricFamily(f"larder_quality_{table_name}", help_text, labels=CELL_LABELS)
            for table_name, help_text in (
                ("overlap_ratio", "Share of the served list that is in the model's list, too"),
                ("score_error_ratio", "Difference of the numbers, relative to the largest"),
                ("age_seconds", "Age of the data when the answer was served"),
            )
        )
        for cell_key, cell in self._totals_by_cell.items():
            samples_family.add_metric(cell_key, cell.sample_count)
            exact_family.add_metric(cell_key, cell.exact_count)
            overlap_family.add_metric(cell_key, cell.sample_count, cell.overlap_sum)
            error_family.add_metric(cell_key, cell.sample_count, cell.score_error_sum)
            age_family.add_metric(cell_key, cell.sample_count, cell.age_seconds_sum)
        yield from (samples_family, exact_family, overlap_family, error_family, age_family)
        skipped_family = CounterMetricFamily(
            "larder_quality_skipped", "Sampled answers that were not compared", labels=["reason"]
        )
        yield add_samples_by_label(skipped_family, self.skipped_by_reason)
        yield CounterMetricFamily("larder_quality_cpu_seconds", "Processor time spent on comparisons", value=self.cpu_s)
        drift_family = GaugeMetricFamily(
            "larder_quality_drift",
            "1 once the live release's answers have been shown to differ from the model's",
            labels=["table"],
        )
        yield add_samples_by_label(
            drift_family,
            {table_name: float(drift.is_drift_found) for table_name, drift in self._drift_by_table.items()},
        )
        evidence_family = GaugeMetricFamily(
            "larder_quality_drift_evidence_ratio",
            "Evidence of drift, as a share of the alarm's threshold",
            labels=["table"],
        )
        evidence_ratio_by_table = {
            table_name: drift.evidence * drift.alpha for table_name, drift in self._drift_by_table.items()
        }
        yield add_samples_by_label(evidence_family, evidence_ratio_by_table)


def _overlap_floor(live: Snapshot, is_list: bool) -> float:
    rule = SKEW_RULE if is_list else SKEW_COSINE_RULE
    gates: Iterable[Mapping[str, Any]] = live.manifest.gates
    threshold = next((gate.get("threshold") for gate in gates if gate.get("rule") == rule), None)
    return float(threshold) - THRESHOLD_LENIENCE if isinstance(threshold, int | float) else OVERLAP_FLOOR


class SharedReport:
    """Shared report; `clock` is Redis' clock, so that reports of several hosts are comparable."""

    def __init__(
        self,
        control: ControlPlane,
        replica_name: str,
        results: QualityResults,
        table_usage: TableUsage,
        get_live_snapshot: Callable[[], Snapshot | None],
        clock: Callable[[], float],
        report_interval_s: float,
    ) -> None:
        self._control, self._hot_keys = control, SharedHotKeys(control)
        self._replica_name = replica_name
        self._results = results
        self._table_usage = table_usage
        self._get_live_snapshot = get_live_snapshot
        self._clock = clock
        self._part_fresh_s = REPORT_FRESH_MAX_S + 2 * report_interval_s
        self._other_parts: list[dict[str, Any]] = []
        self._worklist_size: int | None = None
        self._reports_until_count = 0
        """Reports until the worklist is counted again."""

    async def report(self) -> None:
        """Write this replica's part and read the others; without Redis forget them and report only this part."""
        await self._table_usage.report()
        now_s, send_command, report_key = (self._clock(), self._control.execute, self._control.keyspace.quality_figures)
        own_part = self._build_own_part(now_s)
        try:
            await send_command("HSET", report_key, self._replica_name, orjson.dumps(own_part))
            await send_command("EXPIRE", report_key, REPORT_TTL_S)
            parts = {
                replica_name: _parse_part(raw)
                for replica_name, raw in dict(await send_command("HGETALL", report_key)).items()
            }
            sound_parts = {replica_name: part for replica_name, part in parts.items() if part is not None}
            expired_replicas = [
                replica_name for replica_name, part in sound_parts.items() if now_s - part["at"] > self._part_fresh_s
            ]
            if expired_replicas:
                await send_command("HDEL", report_key, *expired_replicas)
            fresh_parts = [part for replica_name, part in sound_parts.items() if replica_name not in expired_replicas]
            await self._count_worklist(now_s)
        except TierUnavailable:
            fresh_parts, self._worklist_size, self._reports_until_count = [], None, 0
        self._other_parts = [
            replica_part for replica_part in fresh_parts if replica_part["replica"] != self._replica_name
        ]

    async def sign_off(self) -> None:
        """Withdraw this replica's part."""
        try:
            await self._control.execute("HDEL", self._control.keyspace.quality_figures, self._replica_name)
        except TierUnavailable:
            return

    def to_json(self) -> dict[str, Any] | None:
        """Return the quality for the dashboard, from this generation's parts; None without a generation."""
        if self._results.judged_release is None:
            return None
        parts = [
            replica_part
            for replica_part in self._other_parts
            if replica_part["generation"] == self._results.judged_release[0]
        ]
        own_part = self._build_own_part(self._clock())
        return summarise_parts(
            [own_part, *parts],
            worklist_size=self._worklist_size,
            read_share=self._table_usage.read_share(),
            size_bytes=self._table_usage.pages_size_bytes(),
        )

    def _build_own_part(self, now_s: float) -> dict[str, Any]:
        hits = sum(self._table_usage.hits_by_table().values())
        return {"replica": self._replica_name, "at": now_s, "hits": hits, **self._results.to_json()}

    async def _count_worklist(self, now_s: float) -> None:
        live_snapshot = self._get_live_snapshot()
        if live_snapshot is None:
            self._worklist_size = None
            return
        if self._reports_until_count:
            self._reports_until_count -= 1
            return
        self._worklist_size = len(
            still_unknown_names(
                live_snapshot, await self._hot_keys.fetch_names(window_number_of(now_s, COLD_WINDOW), COLD_WINDOW)
            )
        )
        self._reports_until_count = _REPORTS_PER_COUNT - 1


def _parse_part(raw_part: bytes) -> dict[str, Any] | None:
    """Parse a replica's part; None if it cannot be added to others, such as another version's."""
    try:
        part: dict[str, Any] = orjson.loads(raw_part)
        summarise_parts([part], worklist_size=None, read_share=None, size_bytes=1)
        is_sound = isinstance(part["at"], int | float) and {"replica", "generation"} <= part.keys()
        return part if is_sound else None
    except Exception:  # any malformed part would break this part of the page on all replicas
        return None


def still_unknown_names(live: Snapshot, entity_names: Sequence[EntityName]) -> list[EntityName]:
    """Return the names, of tables that this generation has, that it does not know either."""
    tables = live.manifest.tables
    return [
        (table_name, entity_id)
        for table_name, entity_id in entity_names
        if table_name in tables and not live.knows_entity(tables[table_name], entity_id)
    ]


def summarise_parts(
    replica_parts: Sequence[dict[str, Any]], *, worklist_size: int | None, read_share: float | None, size_bytes: int
) -> dict[str, Any]:
    """Return the summary of the replicas' parts: `quality` in `GET /dashboard/data`."""
    totals_by_cell = merge_cells(replica_part["cells"] for replica_part in replica_parts)
    total_cell = SampleTotals.of(cell_totals.to_json() for cell_totals in totals_by_cell.values())
    drifted_tables = sorted({table for replica_part in replica_parts for table in replica_part["drift"]})
    gigabytes = size_bytes / GIGABYTE
    return {
        "since": min(replica_part["since"] for replica_part in replica_parts),
        **_cell_figures(total_cell),
        "drift": bool(drifted_tables),
        "drifted": drifted_tables,
        "sentence": _quality_sentence(total_cell, drifted_tables),
        "by": [_cell_row(cell_key, cell_totals) for cell_key, cell_totals in sorted(totals_by_cell.items())],
        "worklist": worklist_size,
        "read_share": read_share,
        "hits_per_gb": sum(replica_part["hits"] for replica_part in replica_parts) / gigabytes if gigabytes else None,
    }


def _cell_row(cell_key: CellKey, cell_totals: SampleTotals) -> dict[str, Any]:
    table, source, producer, band = cell_key
    return {"table": table, "source": source, "producer": producer, "band": band, **_cell_figures(cell_totals)}


def _cell_figures(cell_totals: SampleTotals) -> dict[str, Any]:
    """Return the figures of a cell; None without samples, since a rate of 0 would look like an alarm."""
    is_known = cell_totals.sample_count > 0
    return {
        "samples": cell_totals.sample_count,
        "exact": cell_totals.exact_rate() if is_known else None,
        "overlap": cell_totals.mean_overlap() if is_known else None,
        "score_error": cell_totals.mean_error() if is_known else None,
        "age_s": cell_totals.age_seconds_sum / cell_totals.sample_count if is_known else None,
    }


def _quality_sentence(total_cell: SampleTotals, drifted_tables: Sequence[str]) -> str:
    if drifted_tables:
        return (
            f"Answers of {', '.join(drifted_tables)} differ from the model's: roll back, or restore the pages (`larder "
            "restore`) and restart the service."
        )
    if not total_cell.sample_count:
        return "No served answer has been computed again yet."
    exact, overlap = total_cell.exact_rate(), total_cell.mean_overlap()
    return (
        f"Of {total_cell.sample_count} served answers computed again {100 * exact['rate']:.1f} % were the same "
        f"({100 * exact['low']:.1f} to {100 * exact['high']:.1f} %), with {100 * overlap['mean']:.1f} % of the items."
    )
