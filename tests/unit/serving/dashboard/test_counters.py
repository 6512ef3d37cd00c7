"""Counts as tables that add up: from the metrics, over bins, through Redis."""

import random
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache.format.redis_keys import Keyspace
from serving.dashboard.counters import (
    BIN_S,
    BINS_MAX,
    TimeBins,
    bin_start_of,
    collect_counts,
    count_difference,
    merged_counts,
    pack_counts,
    shown_totals,
    unpack_counts,
)
from serving.events.counts import ACCEPTED, REFUSAL_REASONS, REJECTION_REASONS, REPEATED, EventCounts, counts_by_field
from serving.metrics.registry import Metrics
from serving.requests.answers import Source

fields = st.one_of(
    st.sampled_from(["r", "e", "x", "a:l1", "m:not:plain", "s:parse"]),
    st.builds("h:{}:{}".format, st.sampled_from(["l1", "l2"]), st.integers(0, 180)),
)
tables = st.dictionaries(fields, st.integers(1, 1 << 40))


@given(tables)
def test_what_is_packed_is_read_again(table: dict[str, int]) -> None:
    assert unpack_counts(pack_counts(table)) == table


def test_what_another_version_wrote_counts_nothing() -> None:
    damaged = b"", b"{}", b"[1]", b"[{}, 3]", b'[{"r":"x"}, {}]', b'[{}, {"l1": []}]'
    misleading = b'[{"h:l1:x":1}, {}]', b'[{}, {"l1": [-900, 1]}]', b'[{"r":9007199254740992}, {}]'
    for blob in (*damaged, *misleading):
        assert unpack_counts(blob) == {}


@given(tables, tables)
def test_a_difference_is_what_has_to_be_added(before: dict[str, int], more: dict[str, int]) -> None:
    current_counts = merged_counts((before, more))

    assert count_difference(current_counts, before) == more
    assert merged_counts((before, count_difference(current_counts, before))) == current_counts


def test_counts_are_those_of_metrics_those_of_the_hot_route_included() -> None:
    metrics = Metrics()
    metrics.count_entities(["a", "b"])
    metrics.answered("a", Source.L2, 0.002)
    metrics.answered("b", Source.DEFAULT, 0.5)
    metrics.missed("b", "evicted")
    metrics.count_fast_answers("a", Source.L1, 0.00002, entity_count=3)
    metrics.tally.request_count_by_route["GET /v1/lookup/{table}"] += 3
    metrics.requested("POST /v1/lookup", 422)
    metrics.stage("parse", 0.25)
    counts = collect_counts(metrics, shed_count=2)

    assert shown_totals(counts) == {
        "r": 4, "e": 5, "x": 2, "a:l1": 3, "a:l2": 1, "a:default": 1, "m:evicted": 1,
    }  # fmt: skip
    assert counts["s:parse"] == 250_000
    assert sum(n for field, n in counts.items() if field.startswith("h:")) == 5
    assert count_difference(collect_counts(metrics, shed_count=2), counts) == {}


def test_events_are_counted_by_what_became_of_them_and_what_they_changed() -> None:
    metrics, taken_in = Metrics(), EventCounts(cast(Any, None), Keyspace("t"), 0)
    taken_in.count_by_result.update({"accepted": 3, "in_future": 1})
    taken_in.refusal_count_by_reason["events_full"] += 2
    metrics.changed_answers.answer_count_by_table["user_topk"] += 4
    metrics.changed_answers.compare("user_topk", np.array([1, 2, 3, 4], "u4"), np.array([4, 3, 9, 8], "u4"))
    counts = collect_counts(metrics) | counts_by_field(taken_in, metrics.changed_answers)

    assert counts == collect_counts(metrics) | {
        "v:accepted": 3, "v:in_future": 1, "y:events_full": 2, "w": 4, "c": 1, "d": 500_000,
    }  # fmt: skip
    assert unpack_counts(pack_counts(counts)) == counts
    assert shown_totals(counts) == shown_totals(collect_counts(metrics))


def test_reasons_of_events_begin_at_0_so_that_their_first_burst_is_an_increase() -> None:
    counts = EventCounts(cast(Any, None), Keyspace("t"), 0)
    results, refusals = list(counts.collect())[:2]

    assert {sample.labels["result"]: sample.value for sample in results.samples} == dict.fromkeys(
        (ACCEPTED, REPEATED, *REJECTION_REASONS), 0
    )
    assert {sample.labels["reason"]: sample.value for sample in refusals.samples} == dict.fromkeys(REFUSAL_REASONS, 0)


def test_bins_keep_an_hour_however_long_they_are_filled_and_add_up_within_one() -> None:
    bins, rng = TimeBins(), random.Random(1)
    bins.add(5.0, {"r": 1})
    bins.add(9.9, {"r": 2, "e": 1})
    assert unpack_counts(bins.packed_counts_by_start[0]) == {"r": 3, "e": 1}
    for number in range(3 * BINS_MAX):
        at = 1e6 + number * BIN_S
        bins.add(at, {f"h:l1:{rng.randrange(180)}": 1 for _ in range(400)})
        bins.add(at, {})

    assert len(bins.packed_counts_by_start) == BINS_MAX == len(bins.unpublished_starts)
    assert min(bins.packed_counts_by_start) == bin_start_of(1e6 + 2 * BINS_MAX * BIN_S)
    assert max(map(len, bins.packed_counts_by_start.values())) < 1_000
