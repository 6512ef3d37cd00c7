"""Bins as columns that can be drawn. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from serving.answers.sources import Source
from serving.dashboard.counters import (
    ANSWERS,
    MISSES,
    REQUESTS,
    STAGES,
    TAKEN_IN,
    by,
    histograms,
)
from serving.dashboard.time_bins import BIN_S
from serving.events.counts import ACCEPTED, REPEATED
from serving.metrics.log_buckets import quantile
from serving.metrics.registry import STAGES as STAGE_NAMES

QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
REASONS_MAX = 20
"""Miss reasons shown by name, the most frequent ones; the others are summed up as `other`."""

Quantiles = dict[str, float | None]


class DrawnBin(NamedTuple):
    """A bin as it is drawn: seconds by source and quantile, seconds spent by stage."""

    requests: int
    answers: dict[str, int]
    seconds: dict[str, Quantiles]
    stages: dict[str, float]
    misses: dict[str, int]
    events: dict[str, int]


EMPTY = DrawnBin(0, {}, {}, {}, {}, {})
REJECTED = "rejected"


def row(counts: Mapping[str, int], bounds: Sequence[float]) -> DrawnBin:
    """Draws a bin: its counts as requests, answers, seconds, stages and misses."""
    return DrawnBin(
        counts.get(REQUESTS, 0),
        by(counts, ANSWERS),
        quantiles(counts, bounds),
        {stage: micro / 1e6 for stage, micro in by(counts, STAGES).items()},
        by(counts, MISSES),
        events_in(counts),
    )


def events_in(counts: Mapping[str, int]) -> dict[str, int]:
    """Events accepted, repeated and rejected; nothing where none came."""
    results = by(counts, TAKEN_IN)
    if not results:
        return {}
    event_counts = {name: results.pop(name, 0) for name in (ACCEPTED, REPEATED)}
    return {**event_counts, REJECTED: sum(results.values())}


def quantiles(counts: Mapping[str, int], bounds: Sequence[float]) -> dict[str, Quantiles]:
    """Quantiles in seconds by source; only sources that answered."""
    return {
        source: {
            name: _short(quantile(bounds, buckets, fraction))
            for name, fraction in QUANTILES.items()
        }
        for source, buckets in histograms(counts).items()
    }


def _short(seconds: float | None) -> float | None:
    """Rounds to three digits: more than the error of a quantile leaves true would only be sent."""
    return None if seconds is None else float(f"{seconds:.3g}")


def series(rows: Mapping[int, DrawnBin], end_bin_start: int) -> dict[str, Any]:
    """Every bin from the oldest known up to, without, `end_bin_start`; a bin that was not written has zeros."""
    starts = range(min(rows, default=end_bin_start), end_bin_start, BIN_S)
    drawn_bins = [rows.get(start, EMPTY) for start in starts]
    reasons = _reasons(drawn_bins)
    misses = {
        reason: [drawn_bin.misses.get(reason, 0) for drawn_bin in drawn_bins] for reason in reasons
    }
    named = (
        (ACCEPTED, REPEATED, REJECTED) if any(drawn_bin.events for drawn_bin in drawn_bins) else ()
    )
    other_misses = [
        sum(n for name, n in drawn_bin.misses.items() if name not in misses)
        for drawn_bin in drawn_bins
    ]
    return {
        "step_s": BIN_S,
        "at": list(starts),
        "requests": [drawn_bin.requests for drawn_bin in drawn_bins],
        "answers": {
            source.value: [drawn_bin.answers.get(source, 0) for drawn_bin in drawn_bins]
            for source in Source
        },
        "seconds": {
            source.value: {
                name: [drawn_bin.seconds.get(source, {}).get(name) for drawn_bin in drawn_bins]
                for name in QUANTILES
            }
            for source in Source
        },
        "stages": {
            stage: [drawn_bin.stages.get(stage, 0.0) for drawn_bin in drawn_bins]
            for stage in STAGE_NAMES
        },
        "misses": misses | ({"other": other_misses} if any(other_misses) else {}),
        "events": {
            name: [drawn_bin.events.get(name, 0) for drawn_bin in drawn_bins] for name in named
        },
    }


def _reasons(rows: Sequence[DrawnBin]) -> list[str]:
    sums: dict[str, int] = {}
    for drawn_bin in rows:
        for reason, n in drawn_bin.misses.items():
            sums[reason] = sums.get(reason, 0) + n
    return sorted(sums, key=lambda reason: (-sums[reason], reason))[:REASONS_MAX]
