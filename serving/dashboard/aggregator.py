"""Figures of all workers: read from Redis, added up, and cached in the form that the page draws."""

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
    ANSWER_PREFIX,
    BIN_S,
    BINS_MAX,
    MISS_PREFIX,
    REQUESTS_FIELD,
    STAGE_PREFIX,
    Counts,
    MetricsPublisher,
    bin_start_of,
    buckets_of_sources,
    counts_of_kind,
    is_count,
    merged_counts,
    unpack_counts,
)
from serving.events.counts import ACCEPTED, REPEATED, RESULT_PREFIX
from serving.metrics.collectors import quantile
from serving.metrics.registry import STAGES as STAGE_NAMES
from serving.requests.answers import Source
from serving.usage.l1_advisor import merge_curves

FRACTION_BY_QUANTILE = {"p50": 0.5, "p99": 0.99, "p999": 0.999}

SHOWN_REASONS_MAX = 20
"""Miss reasons shown by name, the most frequent ones; the others are summed up as `other`."""

REJECTED = "rejected"

RECENT_BIN_COUNT = 30
"""Bins of the last five minutes, from which current figures are computed."""

_FRESH_BIN_COUNT = 6

_FULL_READ_INTERVAL_S = 60.0
"""Seconds between two readings of all bins: bins older than a minute rarely change, only by late publications."""

_BINS_PER_READ = 64

READ_TIMEOUT_S = 2.0

WORKER_SILENCE_MAX_S = 10.0
"""Seconds without a publication after which a worker is not shown."""

_ROW_TEXT_FIELDS = (
    "generation", "stale", "degraded", "failed", "tokens_stale", "tls_stale", "store_problem", "canary_problem",
)  # fmt: skip

_ROW_NUMBER_FIELDS = (
    "since", "epoch", "live_queued", "under_way", "requests_max", "queue_seconds",
    "l1_bytes", "l1_budget_bytes", "l1_entries",
)  # fmt: skip
"""Number fields of a worker's row."""

Quantiles = dict[str, float | None]


class DrawnBin(NamedTuple):
    """Bin in the form that the page draws; all times are in seconds."""

    request_count: int
    answer_count_by_source: dict[str, int]
    quantiles_by_source: dict[str, Quantiles]
    seconds_by_stage: dict[str, float]
    miss_count_by_reason: dict[str, int]
    event_count_by_result: dict[str, int]


EMPTY_BIN = DrawnBin(0, {}, {}, {}, {}, {})


@dataclass(frozen=True, slots=True)
class FleetReading:
    """Result of one reading; `trouble_text` says why it covers only this worker, None if it covers all.

    `recent_counts_by_start` has the raw counts of the newest bins.
    """

    read_at: float
    trouble_text: str | None
    worker_rows: Mapping[str, Mapping[str, Any]]
    bin_by_start: Mapping[int, DrawnBin]
    recent_counts_by_start: Mapping[int, Counts]
    registry_row_by_generation: Mapping[str, Mapping[str, Any]] | None = None
    redis_infos: Sequence[Mapping[str, Any]] = ()


class FleetView:
    """Reader of all workers' counts; each worker has one. `read` is for one caller at a time."""

    def __init__(
        self,
        control: ControlPlane,
        publisher: MetricsPublisher,
        bucket_bounds: Sequence[float],
        clock: Callable[[], float],
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control, self._keyspace, self._publisher = control, control.keyspace, publisher
        self._clock, self._monotonic_clock = clock, monotonic_clock
        self._fleet_bins = _DrawnBins(bucket_bounds)
        self._own_bins = _DrawnBins(bucket_bounds)
        self._full_read_at: float | None = None

    async def read(self) -> FleetReading:
        """Read the counts of all workers; without Redis only this worker's."""
        own_row = self._publisher.note_counts()
        now_s = own_row["at"]
        newest_bin_start = bin_start_of(now_s)
        oldest_bin_start = newest_bin_start - (BINS_MAX - 1) * BIN_S
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                workers, registry, worker_blobs_by_start = await self._read_tables_and_bins(
                    oldest_bin_start, newest_bin_start
                )
                infos = await self._control.infos()
        except (TierUnavailable, TimeoutError) as error:
            self._full_read_at = None
            own_blobs_by_start = {start: [blob] for start, blob in self._publisher.bins.packed_counts_by_start.items()}
            await asyncio.to_thread(self._own_bins.merge_bins, own_blobs_by_start, oldest_bin_start, newest_bin_start)
            trouble = str(error) or f"no reply within {READ_TIMEOUT_S} s"
            shown_workers = {self._publisher.name: own_row}
            return FleetReading(
                now_s,
                trouble,
                shown_workers,
                dict(self._own_bins.bin_by_start),
                dict(self._own_bins.recent_counts_by_start),
            )
        for bin_start in worker_blobs_by_start:
            if (blob := self._publisher.bins.packed_counts_by_start.get(bin_start)) is not None:
                worker_blobs_by_start[bin_start][self._publisher.name.encode()] = blob
        blobs_by_start = {
            start: list(blob_by_worker.values())
            for start, blob_by_worker in worker_blobs_by_start.items()
            if blob_by_worker
        }
        await asyncio.to_thread(self._fleet_bins.merge_bins, blobs_by_start, oldest_bin_start, newest_bin_start)
        # Another version may publish fewer fields.
        unknown_row = dict.fromkeys(own_row)
        shown_workers = {
            worker_name: unknown_row | worker_row
            for worker_name, worker_row in _parse_rows(workers).items()
            if now_s - worker_row["at"] < WORKER_SILENCE_MAX_S and _can_be_shown(worker_row)
        } | {self._publisher.name: own_row}
        return FleetReading(
            now_s, self._publisher.trouble_text, shown_workers, dict(self._fleet_bins.bin_by_start),
            dict(self._fleet_bins.recent_counts_by_start),
            _parse_rows(registry), infos,
        )  # fmt: skip

    async def _read_tables_and_bins(
        self, oldest_bin_start: int, newest_bin_start: int
    ) -> tuple[dict[bytes, bytes], dict[bytes, bytes], dict[int, dict[bytes, bytes]]]:
        """Read the workers' table, the registry, and the bins that may have changed."""
        chunk_index = self._monotonic_clock()
        is_full_read = self._full_read_at is None or chunk_index - self._full_read_at >= _FULL_READ_INTERVAL_S
        first_start = oldest_bin_start if is_full_read else newest_bin_start - _FRESH_BIN_COUNT * BIN_S
        bin_starts = range(first_start, newest_bin_start + 1, BIN_S)
        table_commands = [("HGETALL", self._keyspace.dashboard_workers), ("HGETALL", self._keyspace.generations)]
        workers, registry = await self._control.execute_all(table_commands)
        worker_blobs_by_start: dict[int, dict[bytes, bytes]] = {}
        for start_chunk in (bin_starts[at : at + _BINS_PER_READ] for at in range(0, len(bin_starts), _BINS_PER_READ)):
            commands = [("HGETALL", self._keyspace.dashboard_bin(bin_start)) for bin_start in start_chunk]
            worker_blobs_by_start |= zip(start_chunk, await self._control.execute_all(commands), strict=True)
        if is_full_read:
            self._full_read_at = chunk_index
        return workers, registry, worker_blobs_by_start


@dataclass(slots=True)
class _DrawnBins:
    """Cache of drawn bins; `blobs_digest_by_start` shows whether their blobs are unchanged."""

    bucket_bounds: Sequence[float]
    blobs_digest_by_start: dict[int, int] = field(default_factory=dict)
    bin_by_start: dict[int, DrawnBin] = field(default_factory=dict)
    recent_counts_by_start: dict[int, Counts] = field(default_factory=dict)

    def merge_bins(
        self, packed_counts_by_start: Mapping[int, Sequence[bytes]], oldest_bin_start: int, newest_bin_start: int
    ) -> None:
        """Add up the workers' counts of each bin that changed, and drop bins outside the range."""
        for start, blobs in packed_counts_by_start.items():
            is_recent = start > newest_bin_start - RECENT_BIN_COUNT * BIN_S
            blobs_digest = xxhash.xxh3_64_intdigest(b"".join(sorted(blobs)))
            if self.blobs_digest_by_start.get(start) == blobs_digest and (
                start in self.recent_counts_by_start or not is_recent
            ):
                continue
            count_by_field = merged_counts(map(unpack_counts, blobs))
            self.blobs_digest_by_start[start], self.bin_by_start[start] = (
                blobs_digest,
                draw_bin(count_by_field, self.bucket_bounds),
            )
            if is_recent:
                self.recent_counts_by_start[start] = count_by_field
        for entries_by_start, first_start in (
            (self.blobs_digest_by_start, oldest_bin_start),
            (self.bin_by_start, oldest_bin_start),
            (self.recent_counts_by_start, newest_bin_start - RECENT_BIN_COUNT * BIN_S + 1),
        ):
            for start in [
                bin_start for bin_start in entries_by_start if not first_start <= bin_start <= newest_bin_start
            ]:
                del entries_by_start[start]


def _parse_rows(raw_row_by_name: Mapping[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """Return the JSON objects by name, without entries in the format of another version."""
    row_by_name = {}
    for row_name, raw_row in raw_row_by_name.items():
        try:
            parsed_row = orjson.loads(raw_row)
            if isinstance(parsed_row["at"], int | float):
                row_by_name[row_name.decode(errors="replace")] = parsed_row
        except (ValueError, TypeError, KeyError):
            continue
    return row_by_name


def _can_be_shown(worker_row: Mapping[str, Any]) -> bool:
    """Return whether a row's fields have the expected types: a wrong type would break the whole page."""
    count_by_field, event_fields = worker_row.get("counts") or {}, worker_row.get("events") or {}
    return (
        _has_field_types(worker_row, _ROW_TEXT_FIELDS, _ROW_NUMBER_FIELDS)
        and isinstance(count_by_field, dict)
        and all(map(is_count, count_by_field.values()))
        and isinstance(event_fields, dict)
        and _has_field_types(event_fields, counters.EVENT_TEXT_FIELDS, counters.EVENT_NUMBER_FIELDS)
        and _can_be_added(counters.merge_event_rows, event_fields)
        and _can_be_added(merge_curves, worker_row.get("advisor"))
    )


def _has_field_types(table_row: Mapping[str, Any], text_fields: Sequence[str], number_fields: Sequence[str]) -> bool:
    return all(isinstance(table_row.get(field_name), str | None) for field_name in text_fields) and all(
        table_row.get(field_name) is None or is_count(table_row[field_name]) for field_name in number_fields
    )


def _can_be_added(add_up_parts: Callable[[Sequence[Any]], object], row_part: Any) -> bool:
    try:
        add_up_parts([row_part])
    except Exception:  # data of another version, of any form
        return False
    return True


def build_series(bin_by_start: Mapping[int, DrawnBin], end_bin_start: int) -> dict[str, Any]:
    """Return the series of all bins from the oldest to `end_bin_start` (exclusive); missing bins have zeros."""
    bin_starts = range(min(bin_by_start, default=end_bin_start), end_bin_start, BIN_S)
    drawn_bins = [bin_by_start.get(bin_start, EMPTY_BIN) for bin_start in bin_starts]
    shown_reasons = _most_frequent_reasons(drawn_bins)
    misses_by_reason = {
        miss_reason: [drawn_bin.miss_count_by_reason.get(miss_reason, 0) for drawn_bin in drawn_bins]
        for miss_reason in shown_reasons
    }
    event_results = (
        (ACCEPTED, REPEATED, REJECTED) if any(drawn_bin.event_count_by_result for drawn_bin in drawn_bins) else ()
    )
    other_misses = [
        sum(
            n
            for quantile_or_event, n in drawn_bin.miss_count_by_reason.items()
            if quantile_or_event not in misses_by_reason
        )
        for drawn_bin in drawn_bins
    ]
    return {
        "step_s": BIN_S,
        "at": list(bin_starts),
        "requests": [drawn_bin.request_count for drawn_bin in drawn_bins],
        "answers": {
            source.value: [drawn_bin.answer_count_by_source.get(source, 0) for drawn_bin in drawn_bins]
            for source in Source
        },
        "seconds": {
            source.value: {
                quantile_or_event: [
                    drawn_bin.quantiles_by_source.get(source, {}).get(quantile_or_event) for drawn_bin in drawn_bins
                ]
                for quantile_or_event in FRACTION_BY_QUANTILE
            }
            for source in Source
        },
        "stages": {
            stage: [drawn_bin.seconds_by_stage.get(stage, 0.0) for drawn_bin in drawn_bins] for stage in STAGE_NAMES
        },
        "misses": misses_by_reason | ({"other": other_misses} if any(other_misses) else {}),
        "events": {
            quantile_or_event: [drawn_bin.event_count_by_result.get(quantile_or_event, 0) for drawn_bin in drawn_bins]
            for quantile_or_event in event_results
        },
    }


def _most_frequent_reasons(drawn_bins: Sequence[DrawnBin]) -> list[str]:
    miss_count_by_reason: dict[str, int] = {}
    for drawn_bin in drawn_bins:
        for reason, n in drawn_bin.miss_count_by_reason.items():
            miss_count_by_reason[reason] = miss_count_by_reason.get(reason, 0) + n
    return sorted(miss_count_by_reason, key=lambda reason: (-miss_count_by_reason[reason], reason))[:SHOWN_REASONS_MAX]


def draw_bin(count_by_field: Mapping[str, int], bucket_bounds: Sequence[float]) -> DrawnBin:
    """Convert a bin's counts to requests, answers, seconds, stages, misses and events."""
    return DrawnBin(
        count_by_field.get(REQUESTS_FIELD, 0),
        counts_of_kind(count_by_field, ANSWER_PREFIX),
        quantiles_by_source(count_by_field, bucket_bounds),
        {stage: microseconds / 1e6 for stage, microseconds in counts_of_kind(count_by_field, STAGE_PREFIX).items()},
        counts_of_kind(count_by_field, MISS_PREFIX),
        event_counts_in(count_by_field),
    )


def event_counts_in(count_by_field: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of events accepted, repeated and rejected; empty if no event was sent."""
    count_by_result = counts_of_kind(count_by_field, RESULT_PREFIX)
    if not count_by_result:
        return {}
    event_counts = {name: count_by_result.pop(name, 0) for name in (ACCEPTED, REPEATED)}
    return {**event_counts, REJECTED: sum(count_by_result.values())}


def quantiles_by_source(count_by_field: Mapping[str, int], bucket_bounds: Sequence[float]) -> dict[str, Quantiles]:
    """Return quantiles in seconds by source, for sources that answered."""
    return {
        source: {
            quantile_name: _round_seconds(quantile(bucket_bounds, count_by_bucket, fraction))
            for quantile_name, fraction in FRACTION_BY_QUANTILE.items()
        }
        for source, count_by_bucket in buckets_of_sources(count_by_field).items()
    }


def _round_seconds(seconds: float | None) -> float | None:
    """Round to three digits, which is more precise than the quantiles are."""
    return None if seconds is None else float(f"{seconds:.3g}")
