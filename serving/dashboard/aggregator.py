"""Figures of all workers: read from Redis, added up, and cached in the form that is drawn."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
import xxhash

from cache.errors import TierUnavailable
from cache.l2.control_plane import ControlPlane
from serving.dashboard import counters
from serving.dashboard.counters import (
    ANSWERS,
    BIN_S,
    BINS_MAX,
    MISSES,
    REQUESTS,
    STAGES,
    TAKEN_IN,
    Counts,
    MetricsPublisher,
    counts_of_kind,
    histograms,
    is_count,
    merged_counts,
    start_of,
    unpack,
)
from serving.events.counts import ACCEPTED, REPEATED
from serving.metrics.collectors import quantile
from serving.metrics.registry import STAGES as STAGE_NAMES
from serving.requests.answers import Source
from serving.usage.l1_advisor import merge_curves

QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}

REASONS_MAX = 20
"""Miss reasons shown by name, the most frequent ones; the others are summed up as `other`."""

REJECTED = "rejected"

LATELY_BINS = 30
"""Bins of the last five minutes, on which figures of the present are based."""

_FRESH_BINS = 6

_ALL_AGAIN_S = 60.0
"""Seconds between two readings of all bins: older than a minute they hardly change, and late tellings are seen then."""

_BINS_PER_READ = 64

TIMEOUT_S = 2.0

SILENT_S = 10.0
"""Seconds without a telling after which a worker is not shown."""

_TEXT_FIELDS = ("generation", "stale", "degraded", "failed")

_NUMBER_FIELDS = (
    "since", "epoch", "live_queued", "under_way", "requests_max", "queue_seconds",
    "l1_bytes", "l1_budget_bytes", "l1_entries",
)  # fmt: skip
"""Fields of a worker's row, by kind."""

Quantiles = dict[str, float | None]


class DrawnBin(NamedTuple):
    """A bin as it is drawn: seconds by source and quantile, seconds spent by stage."""

    requests: int
    answers: dict[str, int]
    seconds: dict[str, Quantiles]
    stages: dict[str, float]
    misses: dict[str, int]
    events: dict[str, int]


EMPTY_BIN = DrawnBin(0, {}, {}, {}, {}, {})


@dataclass(frozen=True, slots=True)
class FleetReading:
    """All that is known now; `trouble`: why it is this worker alone. `lately` has the newest bins undrawn."""

    read_at: float
    trouble: str | None
    workers: Mapping[str, Mapping[str, Any]]
    rows: Mapping[int, DrawnBin]
    lately: Mapping[int, Counts]
    registry: Mapping[str, Mapping[str, Any]] | None = None
    infos: Sequence[Mapping[str, Any]] = ()


class FleetView:
    """Reader of all workers' counts, one per worker; `read` is for one caller at a time."""

    def __init__(
        self,
        control: ControlPlane,
        teller: MetricsPublisher,
        bounds: Sequence[float],
        clock: Callable[[], float],
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control, self._keys, self._publisher = control, control.keyspace, teller
        self._clock, self._timer = clock, timer
        self._drawn = _DrawnBins(bounds)
        self._alone = _DrawnBins(bounds)
        self._all_at: float | None = None

    async def read(self) -> FleetReading:
        """All that Redis has, with this worker's own as it is now; without Redis this worker's own."""
        own_row = self._publisher.note()
        now_s = own_row["at"]
        newest_start = start_of(now_s)
        oldest = newest_start - (BINS_MAX - 1) * BIN_S
        try:
            async with asyncio.timeout(TIMEOUT_S):
                workers, registry, bins = await self._read(oldest, newest_start)
                infos = await self._control.infos()
        except (TierUnavailable, TimeoutError) as error:
            self._all_at = None
            mine = {start: [blob] for start, blob in self._publisher.bins.packed.items()}
            await asyncio.to_thread(self._alone.merge_bins, mine, oldest, newest_start)
            trouble = str(error) or f"no reply within {TIMEOUT_S} s"
            shown_workers = {self._publisher.name: own_row}
            return FleetReading(
                now_s, trouble, shown_workers, dict(self._alone.rows), dict(self._alone.lately)
            )
        for start in bins:
            if (blob := self._publisher.bins.packed.get(start)) is not None:
                bins[start][self._publisher.name.encode()] = blob
        blobs = {
            start: list(blob_by_worker.values())
            for start, blob_by_worker in bins.items()
            if blob_by_worker
        }
        await asyncio.to_thread(self._drawn.merge_bins, blobs, oldest, newest_start)
        # Another version may tell less of itself.
        unknown = dict.fromkeys(own_row)
        shown_workers = {
            name: unknown | worker_row
            for name, worker_row in _rows(workers).items()
            if now_s - worker_row["at"] < SILENT_S and _can_be_shown(worker_row)
        } | {self._publisher.name: own_row}
        return FleetReading(
            now_s, self._publisher.trouble, shown_workers, dict(self._drawn.rows), dict(self._drawn.lately),
            _rows(registry), infos,
        )  # fmt: skip

    async def _read(
        self, oldest: int, newest_start: int
    ) -> tuple[dict[bytes, bytes], dict[bytes, bytes], dict[int, dict[bytes, bytes]]]:
        """The workers' table, the registry, and the bins that may have changed."""
        at = self._timer()
        is_all = self._all_at is None or at - self._all_at >= _ALL_AGAIN_S
        first = oldest if is_all else newest_start - _FRESH_BINS * BIN_S
        starts = range(first, newest_start + 1, BIN_S)
        tables = [("HGETALL", self._keys.workers), ("HGETALL", self._keys.generations)]
        workers, registry = await self._control.execute_all(tables)
        bins: dict[int, dict[bytes, bytes]] = {}
        for piece in (
            starts[at : at + _BINS_PER_READ] for at in range(0, len(starts), _BINS_PER_READ)
        ):
            commands = [("HGETALL", self._keys.bin(start)) for start in piece]
            bins |= zip(piece, await self._control.execute_all(commands), strict=True)
        if is_all:
            self._all_at = at
        return workers, registry, bins


@dataclass(slots=True)
class _DrawnBins:
    """Bins as last drawn; `tokens` show whether their blobs are unchanged."""

    bounds: Sequence[float]
    tokens: dict[int, int] = field(default_factory=dict)
    rows: dict[int, DrawnBin] = field(default_factory=dict)
    lately: dict[int, Counts] = field(default_factory=dict)

    def merge_bins(
        self, bins: Mapping[int, Sequence[bytes]], oldest: int, newest_start: int
    ) -> None:
        """Adds up what each bin holds, unless it is as before."""
        for start, blobs in bins.items():
            is_late = start > newest_start - LATELY_BINS * BIN_S
            token = xxhash.xxh3_64_intdigest(b"".join(sorted(blobs)))
            if self.tokens.get(start) == token and (start in self.lately or not is_late):
                continue
            counts = merged_counts(map(unpack, blobs))
            self.tokens[start], self.rows[start] = token, draw_bin(counts, self.bounds)
            if is_late:
                self.lately[start] = counts
        for entries_by_start, first_start in (
            (self.tokens, oldest),
            (self.rows, oldest),
            (self.lately, newest_start - LATELY_BINS * BIN_S + 1),
        ):
            for start in [
                bin_start
                for bin_start in entries_by_start
                if not first_start <= bin_start <= newest_start
            ]:
                del entries_by_start[start]


def _rows(table: Mapping[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """Return the JSON objects by name, without entries that another version wrote in another form."""
    row_by_name = {}
    for name, raw in table.items():
        try:
            parsed_row = orjson.loads(raw)
            if isinstance(parsed_row["at"], int | float):
                row_by_name[name.decode(errors="replace")] = parsed_row
        except (ValueError, TypeError, KeyError):
            continue
    return row_by_name


def _can_be_shown(row: Mapping[str, Any]) -> bool:
    """Returns whether the fields that a row has are of their kinds: one of another kind would cost the whole page."""
    counts, events = row.get("counts") or {}, row.get("events") or {}
    return (
        _has_kinds(row, _TEXT_FIELDS, _NUMBER_FIELDS)
        and isinstance(counts, dict)
        and all(map(is_count, counts.values()))
        and isinstance(events, dict)
        and _has_kinds(events, counters.EVENT_TEXTS, counters.EVENT_NUMBERS)
        and _adds_up(counters.merge_rows, events)
        and _adds_up(merge_curves, row.get("advisor"))
    )


def _has_kinds(row: Mapping[str, Any], texts: Sequence[str], numbers: Sequence[str]) -> bool:
    return all(isinstance(row.get(name), str | None) for name in texts) and all(
        row.get(name) is None or is_count(row[name]) for name in numbers
    )


def _adds_up(add: Callable[[Sequence[Any]], object], row_part: Any) -> bool:
    try:
        add([row_part])
    except Exception:  # whatever it is, nothing can be made of it
        return False
    return True


def series(rows: Mapping[int, DrawnBin], end_bin_start: int) -> dict[str, Any]:
    """Every bin from the oldest known up to, without, `end_bin_start`; a bin that was not written has zeros."""
    starts = range(min(rows, default=end_bin_start), end_bin_start, BIN_S)
    drawn_bins = [rows.get(start, EMPTY_BIN) for start in starts]
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


def draw_bin(counts: Mapping[str, int], bounds: Sequence[float]) -> DrawnBin:
    """Draws a bin: its counts as requests, answers, seconds, stages and misses."""
    return DrawnBin(
        counts.get(REQUESTS, 0),
        counts_of_kind(counts, ANSWERS),
        quantiles(counts, bounds),
        {stage: micro / 1e6 for stage, micro in counts_of_kind(counts, STAGES).items()},
        counts_of_kind(counts, MISSES),
        events_in(counts),
    )


def events_in(counts: Mapping[str, int]) -> dict[str, int]:
    """Events accepted, repeated and rejected; nothing where none came."""
    results = counts_of_kind(counts, TAKEN_IN)
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
