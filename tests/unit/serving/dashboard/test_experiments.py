"""Arms on the dashboard: what all workers counted of each, held against the control."""

import pytest
from prometheus_client import CollectorRegistry

from cache.traffic.experiments import rate_ratio
from serving.dashboard.counters import pack_counts, shown_totals, unpack_counts
from serving.dashboard.document import experiments_with_counts
from serving.traffic.router import ExperimentMetrics

EXPERIMENT_ENTRIES = [
    {
        "experiment": "e", "share": 0.5, "started_at": 1.0,
        "arms": [{"arm": "a", "share": 0.5}, {"arm": "b", "share": 0.5}],
    },
]  # fmt: skip


def test_counts_of_arms_are_packed_by_workers_and_compared_with_the_control() -> None:
    metrics = ExperimentMetrics(CollectorRegistry())
    metrics.requests.labels("e", "a").inc(1_000)
    metrics.requests.labels("e", "b").inc(2_000)
    metrics.feedback.labels("e", "a", "click").inc(100)
    metrics.feedback.labels("e", "b", "click").inc(300)
    metrics.feedback.labels("e", "b", "buy").inc(2)

    total_counts = shown_totals(unpack_counts(pack_counts(metrics.counts_by_field())))
    (experiment,) = experiments_with_counts(EXPERIMENT_ENTRIES, total_counts)

    assert (experiment["experiment"], experiment["share"]) == ("e", 0.5)
    control, arm = experiment["arms"]
    assert (control["requests"], arm["requests"]) == (1_000, 2_000)
    assert control["events"]["click"] == {"count": 100, "rate": 0.1, "ratio": None}
    expected = rate_ratio(300, 2_000, 100, 1_000)
    assert expected is not None and expected.ratio == pytest.approx(1.5)
    assert arm["events"]["click"] == {"count": 300, "rate": 0.15, "ratio": expected._asdict()}
    # If the control never had an event, there is no ratio to bound.
    assert arm["events"]["buy"] == {"count": 2, "rate": 0.001, "ratio": None}


def test_an_experiment_of_which_nothing_was_counted_is_shown_all_the_same() -> None:
    (experiment,) = experiments_with_counts(EXPERIMENT_ENTRIES, {})

    assert [(arm["requests"], arm["events"]) for arm in experiment["arms"]] == [(0, {})] * 2
    assert experiments_with_counts((), {"n:e=a": 3}) == []
