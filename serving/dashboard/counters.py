"""Counters of a worker: a flat table of whole numbers that add up over time, workers and replicas. Pure.

Fields: `r` requests, `e` entities, `a:<source>` answers, `m:<reason>` misses, `s:<stage>` microseconds spent,
`h:<source>:<bucket>` answers whose time fell into a bucket (`serving.metrics.log_buckets`), `x` what was shed under
overload, `n:<experiment>=<arm>` requests of an arm, `f:<experiment>=<arm>=<event>` what was reported of it,
`v:<result>` events by what became of them, `y:<reason>` requests and pieces of the inbox refused whole, `w` answers
with newer events, `c` lists of these compared with the night's, and `d` how much of them was not in it, in millionths.
"""

from collections import Counter as Sum
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import cast

import orjson

from serving.events.counts import EventCounts
from serving.metrics.registry import Metrics, counts_of

Counts = dict[str, int]

REQUESTS, ENTITIES, SHED, ANSWERS, MISSES, STAGES, TIMES = "r", "e", "x", "a:", "m:", "s:", "h:"
ARMS, EVENTS = "n:", "f:"
TAKEN_IN, REFUSED, NEWER_EVENT_ANSWERS, COMPARED, CHANGED_PPM = "v:", "y:", "w", "c", "d"
_TOTALS = (REQUESTS, ENTITIES, SHED, ANSWERS, MISSES, ARMS, EVENTS)


_COUNTS = 2**53
"""Bound of a number: sums below it, of however many workers, are JSON that everybody can read."""


def is_count(value: object) -> bool:
    """Returns whether the value is a number that can be added to others and sent on."""
    return type(value) in (int, float) and -_COUNTS < cast(float, value) < _COUNTS


def collect_counts(metrics: Metrics, shed: int = 0, events: EventCounts | None = None) -> Counts:
    """All that `/metrics` tells of requests, entities, answers, misses, events, and the times of answers and stages."""
    metrics.settle()
    sums: Sum[str] = Sum({SHED: shed} if shed else {})
    for counter, field, label in (
        (metrics.requests, REQUESTS, None),
        (metrics.entities, ENTITIES, None),
        (metrics.answers, ANSWERS, "source"),
        (metrics.misses, MISSES, "reason"),
    ):
        for labels, count in counts_of(counter):
            sums[field + (labels[label] if label else "")] += int(count)
    for counter, field, names in (
        (metrics.experiment_requests, ARMS, ("experiment", "arm")),
        (metrics.experiment_feedback, EVENTS, ("experiment", "arm", "event")),
    ):
        for labels, count in counts_of(counter):
            sums[field + "=".join(labels[label_name] for label_name in names)] += int(count)
    if events is not None:
        for prefix, counts in ((TAKEN_IN, events.results), (REFUSED, events.refusals)):
            sums.update({prefix + name: n for name, n in counts.items() if n})
        answers, lists, changed_share_sum = metrics.changed_answers.totals()
        sums.update(
            {
                NEWER_EVENT_ANSWERS: answers,
                COMPARED: lists,
                CHANGED_PPM: round(changed_share_sum * 1e6),
            }
        )
    for stage, spent in metrics.stage_seconds.spent.items():
        sums[STAGES + stage] = round(spent.sum * 1e6)
    for source, spent in metrics.answer_seconds.spent.items():
        sums.update({f"{TIMES}{source}:{at}": n for at, n in enumerate(spent.counts) if n})
    return dict(sums)


def difference(current_counts: Mapping[str, int], earlier_counts: Mapping[str, int]) -> Counts:
    """The counts since `earlier_counts`; fields without news are left out."""
    return {
        field: n - earlier_counts.get(field, 0)
        for field, n in current_counts.items()
        if n != earlier_counts.get(field, 0)
    }


def merged(parts: Iterable[Mapping[str, int]]) -> Counts:
    """The sum of all parts, by field."""
    sums: dict[str, int] = {}
    for part in parts:
        for field, n in part.items():
            sums[field] = sums.get(field, 0) + n
    return sums


def totals(counts: Mapping[str, int]) -> Counts:
    """The fields that are shown as a total."""
    return {field: n for field, n in counts.items() if field.startswith(_TOTALS)}


def by(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    """Fields of one kind, by what follows the prefix."""
    return {field[len(prefix) :]: n for field, n in counts.items() if field.startswith(prefix)}


def histograms(counts: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Answers by source and bucket."""
    buckets_by_source: dict[str, dict[int, int]] = {}
    for name, n in by(counts, TIMES).items():
        source, _, bucket = name.rpartition(":")
        buckets_by_source.setdefault(source, {})[int(bucket)] = n
    return buckets_by_source


def pack(counts: Mapping[str, int]) -> bytes:
    """JSON in which a histogram is its first bucket and the counts from there on: a third of the plain fields."""
    plain_counts = {field: n for field, n in counts.items() if not field.startswith(TIMES)}
    runs = {}
    for source, buckets in histograms(counts).items():
        bucket_indexes = sorted(buckets)
        run = [bucket_indexes[0], buckets[bucket_indexes[0]]]
        for previous_index, bucket_index in pairwise(bucket_indexes):
            run += [0] * (bucket_index - previous_index - 1) + [buckets[bucket_index]]
        runs[source] = run
    return orjson.dumps([plain_counts, runs])


def unpack(blob: bytes) -> Counts:
    """Reads `pack`; empty for anything else, which another version may have written."""
    try:
        plain_counts, runs = orjson.loads(blob)
        counts = {str(field): int(n) for field, n in plain_counts.items()}
        for source, (first, *run) in runs.items():
            counts |= {
                f"{TIMES}{source}:{int(first) + at}": int(n) for at, n in enumerate(run) if n
            }
        buckets = [bucket_count for run in histograms(counts).values() for bucket_count in run]
    except (ValueError, TypeError, AttributeError):
        return {}
    return counts if min(buckets, default=0) >= 0 and all(map(is_count, counts.values())) else {}
