"""Results of this process's samples: for Prometheus since its start, for the dashboard of the live release."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cache.format.gate_rules import SKEW, SKEW_COSINE
from serving.generations.snapshot import Snapshot
from serving.metrics.event_counters import by_label
from serving.quality.aggregates import Key, SampleTotals, packed
from serving.quality.comparison import AnswerComparison
from serving.sequential.drift import ALPHA, Drift

FLOOR = 0.5
"""Overlap that must be reached where the night has measured none."""

LENIENCE = 0.05
"""Margin below the gate's threshold: whom callers ask for is not whom the gate drew."""

LABELS = ("table", "source", "producer", "band")


class QualityResults(Collector):
    """Sums of all samples, and of the live release's, which alone is judged for drift. For the event loop only."""

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()
        self.cpu_s = 0.0
        self.judged_since = 0.0
        self._all: defaultdict[Key, SampleTotals] = defaultdict(SampleTotals)
        self._live: defaultdict[Key, SampleTotals] = defaultdict(SampleTotals)
        self.release: tuple[str, int] | None = None
        """Generation and epoch that are judged."""
        self._drifts: dict[str, Drift] = {}

    def begin(self, live: Snapshot, now_s: float) -> None:
        """Judges this release from now on, unless it does so already."""
        if (release := (live.generation, live.epoch)) == self.release:
            return
        tables = live.manifest.tables
        self.release, self.judged_since = release, now_s
        self._live.clear()
        self._drifts = {
            name: Drift(_floor(live, table.kind == "topk"), ALPHA / len(tables))
            for name, table in tables.items()
        }

    def add(self, sample: AnswerComparison, generation: str) -> None:
        """Adds the comparison of an answer from this generation."""
        key: Key = sample.table, sample.source, sample.producer, sample.band
        self._all[key].saw(sample)
        if self.release is None or self.release[0] != generation:
            return
        self._live[key].saw(sample)
        if sample.producer == "batch" and sample.record_overlap is not None:
            self._drifts[sample.table].saw(sample.record_overlap)

    def to_json(self) -> dict[str, Any]:
        """Part of this replica, which other replicas merge with their own."""
        return {
            "generation": None if self.release is None else self.release[0],
            "since": self.judged_since,
            "cells": packed(self._live),
            "drift": {
                name: drift.found_after for name, drift in self._drifts.items() if drift.is_found
            },
        }

    def collect(self) -> Iterable[Metric]:
        """Metric families of the samples, skipped answers, processor time and drift."""
        samples = CounterMetricFamily(
            "larder_quality_samples", "Served answers that were computed once more", labels=LABELS
        )
        exact = CounterMetricFamily(
            "larder_quality_exact", "Of these, those that came out the same", labels=LABELS
        )
        overlap, error, age = (
            SummaryMetricFamily(f"larder_quality_{name}", text, labels=LABELS)
            for name, text in (
                ("overlap_ratio", "Share of the served list that the model gives too"),
                ("score_error_ratio", "Difference of the numbers, as a share of the largest"),
                ("age_seconds", "Age of the data when the answer was served"),
            )
        )
        for key, cell in self._all.items():
            samples.add_metric(key, cell.samples)
            exact.add_metric(key, cell.exact)
            overlap.add_metric(key, cell.samples, cell.overlap)
            error.add_metric(key, cell.samples, cell.error)
            age.add_metric(key, cell.samples, cell.age)
        yield from (samples, exact, overlap, error, age)
        skipped = CounterMetricFamily(
            "larder_quality_skipped", "Answers drawn and not compared", labels=["reason"]
        )
        yield by_label(skipped, self.skipped)
        yield CounterMetricFamily(
            "larder_quality_cpu_seconds", "Processor time spent on it", value=self.cpu_s
        )
        drift_family = GaugeMetricFamily(
            "larder_quality_drift",
            "1 once the live release's answers have been shown to differ from the model's",
            labels=["table"],
        )
        yield by_label(
            drift_family, {name: float(drift.is_found) for name, drift in self._drifts.items()}
        )
        evidence = GaugeMetricFamily(
            "larder_quality_drift_evidence_ratio",
            "Evidence of that, as a share of what raises the alarm",
            labels=["table"],
        )
        evidence_ratio_by_table = {
            name: drift.evidence * drift.alpha for name, drift in self._drifts.items()
        }
        yield by_label(evidence, evidence_ratio_by_table)


def _floor(live: Snapshot, is_list: bool) -> float:
    rule = SKEW if is_list else SKEW_COSINE
    gates: Iterable[Mapping[str, Any]] = live.manifest.gates
    threshold = next((gate.get("threshold") for gate in gates if gate.get("rule") == rule), None)
    return float(threshold) - LENIENCE if isinstance(threshold, int | float) else FLOOR
