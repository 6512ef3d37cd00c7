"""Fine buckets: the stated error, and the same figures for Prometheus as coarse ones give."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram

from serving.metrics.collectors import BUCKET_RATIO, LOWEST_BOUND_S, SecondsHistogram, quantile, refine_bounds

COARSE = (0.0001, 0.00025, 0.001, 0.05, 2.5, 10)
BOUNDS = refine_bounds(COARSE)


def test_finer_bounds_hold_the_coarse_ones_and_are_nowhere_further_apart_than_stated() -> None:
    steps = np.array(BOUNDS[1:]) / np.array(BOUNDS[:-1])

    assert set(COARSE) <= set(BOUNDS) and BOUNDS[0] == LOWEST_BOUND_S and BOUNDS[-1] == 10
    assert steps.min() > 1 and steps.max() <= BUCKET_RATIO * (1 + 1e-9)
    assert len(BOUNDS) < 200


@pytest.mark.parametrize("quantile_level", [0.5, 0.99, 0.999])
def test_a_quantile_is_off_by_five_percent_at_most(quantile_level: float) -> None:
    times = np.random.default_rng(5).lognormal(-7, 1.5, 20_000)
    seconds = SecondsHistogram("t", "", "source", ["l1"], COARSE)
    for time_s in times:
        seconds.observe("l1", time_s)
    counts = {at: n for at, n in enumerate(seconds.histogram_by_label_value["l1"].bucket_counts) if n}

    estimate_s = quantile(seconds.bounds, counts, quantile_level)
    exact = float(np.quantile(times, quantile_level, method="inverted_cdf"))
    assert estimate_s == pytest.approx(exact, rel=0.05)


def test_quantiles_of_few_and_of_what_lies_outside_the_bounds() -> None:
    last = len(BOUNDS)

    assert quantile(BOUNDS, {}, 0.5) is None
    assert quantile(BOUNDS, {3: 1}, 0.999) == quantile(BOUNDS, {3: 1}, 0.5)
    assert quantile(BOUNDS, {0: 1}, 0.5) == LOWEST_BOUND_S
    assert quantile(BOUNDS, {last: 1}, 0.5) == 10
    assert quantile(BOUNDS, {1: 999, last: 1}, 0.999) == quantile(BOUNDS, {1: 1}, 0.5)
    assert quantile(BOUNDS, {1: 998, last: 2}, 0.999) == 10


def test_prometheus_gets_the_buckets_of_a_coarse_histogram() -> None:
    registry = CollectorRegistry()
    coarse = Histogram("t", "", ["source"], buckets=COARSE, registry=registry).labels("l1")
    fine = SecondsHistogram("t", "", "source", ["l1"], COARSE)
    times = [*np.random.default_rng(6).lognormal(-5, 3, 500), *COARSE, 11.0, 0.0]
    for time_s in times:
        coarse.observe(time_s)
        fine.observe("l1", time_s)

    def index_samples(samples):
        return {
            (sample.name, sample.labels.get("le")): pytest.approx(sample.value)
            for sample in samples
            if not sample.name.endswith("_created")
        }

    (expected,), (fine_family,) = registry.collect(), fine.collect()
    assert index_samples(fine_family.samples) == index_samples(expected.samples)
