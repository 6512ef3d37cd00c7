"""Counters of a worker in bins of ten seconds, its report on events, and their publication in Redis."""

import asyncio
import logging
from collections import Counter as Sum
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, cast

import orjson

from cache.errors import TierUnavailable
from cache.format.stream_position import Position
from cache.l2.control_plane import CommandArgument, ControlPlane
from serving.events.counts import HELP_TEXT_BY_GAUGE
from serving.metrics.registry import Metrics, counts_of
from serving.traffic.router import ARM_FEEDBACK_PREFIX, ARM_REQUESTS_PREFIX

log = logging.getLogger(__name__)

Counts = dict[str, int]
"""Counts by field.

`r` requests, `e` entities, `a:<source>` answers, `m:<reason>` misses, `s:<stage>` microseconds spent,
`h:<source>:<bucket>` answers whose time fell into a bucket (`serving.metrics.collectors`), `x` work shed under
overload, `n:<experiment>=<arm>` requests of an arm, `f:<experiment>=<arm>=<event>` reported events of an arm,
`v:<result>` events by result, `y:<reason>` requests and pieces of the inbox refused whole, `w` answers with newer
events, `c` lists of these compared with the night's, and `d` the share of them not in the night's, in millionths.
"""

(REQUESTS_FIELD, ENTITIES_FIELD, SHED_FIELD, ANSWER_PREFIX, MISS_PREFIX, STAGE_PREFIX, TIME_PREFIX) = (
    "r",
    "e",
    "x",
    "a:",
    "m:",
    "s:",
    "h:",
)

_TOTAL_PREFIXES = (
    REQUESTS_FIELD,
    ENTITIES_FIELD,
    SHED_FIELD,
    ANSWER_PREFIX,
    MISS_PREFIX,
    ARM_REQUESTS_PREFIX,
    ARM_FEEDBACK_PREFIX,
)

_COUNT_BOUND = 2**53
"""Bound of accepted counts: integers up to 2**53 are exact in every JSON parser."""

BIN_S = 10

HISTORY_S = 3_600

BINS_MAX = HISTORY_S // BIN_S + 2
"""Number of bins kept: an hour of complete bins, the current bin, and one more for differing clocks."""

KEY_TTL_S = HISTORY_S + 300
"""Seconds that a key stays in Redis after its last change."""

WORKER_GONE_S = 60.0
"""Seconds without a report after which a worker is removed from the table of workers."""

BINS_AT_ONCE = 64
"""Largest number of bins in one publication; after Redis has lost its data all bins are published again."""

_PUBLICATIONS_PER_SWEEP = 30
"""Publications between two sweeps for dead workers."""

PUBLISH_TIMEOUT_S = 2.0

EVENT_TEXT_FIELDS: Final = ("durability", "demanded", "writes_refused", "counted_until", "published_until")
"""Text fields of the events in a worker's row; positions are Redis stream ids."""

EVENT_NUMBER_FIELDS: Final = (*HELP_TEXT_BY_GAUGE, "lag_s", "users", "held_bytes", "held_max_bytes")
"""Number fields of the events in a worker's row."""

_EventsRow = Mapping[str, Any]


def collect_counts(metrics: Metrics, shed_count: int = 0) -> Counts:
    """Return this worker's counts of requests, entities, answers and misses, as in `/metrics`, and times by stage."""
    metrics.settle()
    count_by_field: Sum[str] = Sum({SHED_FIELD: shed_count} if shed_count else {})
    for counter, field_or_prefix, label_name in (
        (metrics.requests, REQUESTS_FIELD, None),
        (metrics.entities, ENTITIES_FIELD, None),
        (metrics.answers, ANSWER_PREFIX, "source"),
        (metrics.misses, MISS_PREFIX, "reason"),
    ):
        for labels, count in counts_of(counter):
            count_by_field[field_or_prefix + (labels[label_name] if label_name else "")] += int(count)
    for stage, spent_time in metrics.stage_seconds.histogram_by_label_value.items():
        count_by_field[STAGE_PREFIX + stage] = round(spent_time.seconds_sum * 1e6)
    for source, spent_time in metrics.answer_seconds.histogram_by_label_value.items():
        count_by_field.update(
            {f"{TIME_PREFIX}{source}:{bucket_index}": n for bucket_index, n in enumerate(spent_time.bucket_counts) if n}
        )
    return dict(count_by_field)


def count_difference(current_counts: Mapping[str, int], earlier_counts: Mapping[str, int]) -> Counts:
    """Return the counts since `earlier_counts`; unchanged fields are left out."""
    return {
        field: n - earlier_counts.get(field, 0)
        for field, n in current_counts.items()
        if n != earlier_counts.get(field, 0)
    }


def merged_counts(counts_to_add: Iterable[Mapping[str, int]]) -> Counts:
    """Return the sum of all parts, by field."""
    count_by_field: dict[str, int] = {}
    for count_by_field_to_add in counts_to_add:
        for field, n in count_by_field_to_add.items():
            count_by_field[field] = count_by_field.get(field, 0) + n
    return count_by_field


def shown_totals(count_by_field: Mapping[str, int]) -> Counts:
    """Return the fields that are shown as a total."""
    return {field: n for field, n in count_by_field.items() if field.startswith(_TOTAL_PREFIXES)}


def counts_of_kind(count_by_field: Mapping[str, int], field_prefix: str) -> dict[str, int]:
    """Return the fields that begin with the prefix, without it."""
    return {field[len(field_prefix) :]: n for field, n in count_by_field.items() if field.startswith(field_prefix)}


def buckets_of_sources(count_by_field: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Return answers by source and bucket."""
    count_by_bucket_by_source: dict[str, dict[int, int]] = {}
    for source_and_bucket, n in counts_of_kind(count_by_field, TIME_PREFIX).items():
        source, _, bucket = source_and_bucket.rpartition(":")
        count_by_bucket_by_source.setdefault(source, {})[int(bucket)] = n
    return count_by_bucket_by_source


def pack_counts(count_by_field: Mapping[str, int]) -> bytes:
    """Encode counts as JSON; a histogram is encoded as its first bucket and a list of counts, a third of the size."""
    plain_counts = {field: n for field, n in count_by_field.items() if not field.startswith(TIME_PREFIX)}
    run_by_source = {}
    for source, count_by_bucket in buckets_of_sources(count_by_field).items():
        bucket_indexes = sorted(count_by_bucket)
        bucket_run = [bucket_indexes[0], count_by_bucket[bucket_indexes[0]]]
        for previous_index, bucket_index in pairwise(bucket_indexes):
            bucket_run += [0] * (bucket_index - previous_index - 1) + [count_by_bucket[bucket_index]]
        run_by_source[source] = bucket_run
    return orjson.dumps([plain_counts, run_by_source])


def unpack_counts(packed_counts: bytes) -> Counts:
    """Decode `pack_counts`; return no counts for anything else, such as another version's format."""
    try:
        plain_counts, run_by_source = orjson.loads(packed_counts)
        count_by_field = {str(field): int(n) for field, n in plain_counts.items()}
        for source, (first_bucket, *bucket_run) in run_by_source.items():
            count_by_field |= {
                f"{TIME_PREFIX}{source}:{int(first_bucket) + bucket_offset}": int(n)
                for bucket_offset, n in enumerate(bucket_run)
                if n
            }
        bucket_counts = [bucket_count for run in buckets_of_sources(count_by_field).values() for bucket_count in run]
    except (ValueError, TypeError, AttributeError):
        return {}
    return count_by_field if min(bucket_counts, default=0) >= 0 and all(map(is_count, count_by_field.values())) else {}


def is_count(field_value: object) -> bool:
    """True if the value is a number that can be added to others and published."""
    return type(field_value) in (int, float) and -_COUNT_BOUND < cast(float, field_value) < _COUNT_BOUND


def bin_start_of(moment_s: float) -> int:
    """Return the start of the bin that contains a moment, both in Unix seconds."""
    return int(moment_s // BIN_S) * BIN_S


class TimeBins:
    """Packed bins of one worker, at most `BINS_MAX`; `unpublished_starts` are the bins that Redis may lack."""

    def __init__(self) -> None:
        self.packed_counts_by_start: dict[int, bytes] = {}
        self.unpublished_starts: set[int] = set()

    def add(self, moment_s: float, new_counts: Mapping[str, int]) -> None:
        """Add counts to the bin of a moment of Redis' clock; drop the oldest bin if there are too many."""
        if not new_counts:
            return
        bin_start = bin_start_of(moment_s)
        earlier_counts: Counts = (
            unpack_counts(self.packed_counts_by_start[bin_start]) if bin_start in self.packed_counts_by_start else {}
        )
        self.packed_counts_by_start[bin_start] = pack_counts(merged_counts((earlier_counts, new_counts)))
        self.unpublished_starts.add(bin_start)
        while len(self.packed_counts_by_start) > BINS_MAX:
            oldest_start = min(self.packed_counts_by_start)
            del self.packed_counts_by_start[oldest_start]
            self.unpublished_starts.discard(oldest_start)

    def mark_unpublished(self) -> None:
        """Mark all bins as unpublished: Redis may have lost all of them."""
        self.unpublished_starts = set(self.packed_counts_by_start)


class MetricsPublisher:
    """Publisher of one worker. It writes absolute values under the worker's name, so a repeated write changes nothing.

    `read_worker_state` returns the worker's state besides its counts, JSON-able.
    """

    def __init__(
        self,
        control: ControlPlane,
        worker_name: str,
        clock: Callable[[], float],
        read_counts: Callable[[], Counts],
        read_worker_state: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.name = worker_name
        self.bins = TimeBins()
        self.trouble_text: str | None = None
        self._control, self._keyspace, self._clock = control, control.keyspace, clock
        self._collect_counts, self._read_worker_state = read_counts, read_worker_state
        self._noted_at = self._started_at = clock()
        self._noted_counts: Counts = read_counts()
        self._has_published = False
        self._publish_count = 0

    def note_counts(self) -> dict[str, Any]:
        """Add the counts since the last call to the bin of the interval's middle; return this worker's current row."""
        now_s, count_by_field = self._clock(), self._collect_counts()
        self.bins.add((self._noted_at + now_s) / 2, count_difference(count_by_field, self._noted_counts))
        self._noted_at, self._noted_counts = now_s, count_by_field
        return {
            "at": now_s,
            "since": self._started_at,
            **self._read_worker_state(),
            "counts": shown_totals(count_by_field),
        }

    async def publish(self) -> None:
        """Note the counts, and write unpublished values to Redis; if Redis is unreachable, a later call writes them."""
        worker_row, bins = self.note_counts(), self.bins
        # A copy: counts that are noted while Redis replies stay unpublished.
        blob_by_start = {
            start: bins.packed_counts_by_start[start]
            for start in sorted(bins.unpublished_starts, reverse=True)[:BINS_AT_ONCE]
        }
        commands: list[tuple[CommandArgument, ...]] = [
            ("HSET", self._keyspace.dashboard_workers, self.name, orjson.dumps(worker_row)),
            ("EXPIRE", self._keyspace.dashboard_workers, KEY_TTL_S),
        ]
        for bin_start, blob in blob_by_start.items():
            bin_key = self._keyspace.dashboard_bin(bin_start)
            commands += ("HSET", bin_key, self.name, blob), ("EXPIRE", bin_key, KEY_TTL_S)
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                is_new = (await self._control.execute_all(commands))[0]
                await self._sweep(worker_row["at"])
        except (TierUnavailable, TimeoutError) as error:
            self._note_trouble(str(error) or f"no reply within {PUBLISH_TIMEOUT_S} s")
            return
        bins.unpublished_starts -= {
            start for start, blob in blob_by_start.items() if bins.packed_counts_by_start.get(start) is blob
        }
        if self.trouble_text is not None or (is_new and self._has_published):
            bins.mark_unpublished()  # Redis may have been replaced or emptied
        self.trouble_text, self._has_published = None, True

    def _note_trouble(self, trouble_text: str) -> None:
        if self.trouble_text is None:
            log.warning("the dashboard shows only this worker: %s", trouble_text)
        self.trouble_text = trouble_text

    async def _sweep(self, now_s: float) -> None:
        self._publish_count += 1
        if self._publish_count % _PUBLICATIONS_PER_SWEEP:
            return
        (raw_row_by_worker,) = await self._control.execute_all([("HGETALL", self._keyspace.dashboard_workers)])
        gone_workers = [
            worker_name
            for worker_name, raw_row in raw_row_by_worker.items()
            if published_at(raw_row) < now_s - WORKER_GONE_S
        ]
        if gone_workers:
            await self._control.execute_all([("HDEL", self._keyspace.dashboard_workers, *gone_workers)])

    async def sign_off(self) -> None:
        """Remove this worker's row from the table: its counts leave `/metrics` as well."""
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                await self._control.execute_all([("HDEL", self._keyspace.dashboard_workers, self.name)])
        except (TierUnavailable, TimeoutError):
            log.debug("not signed off; readers ignore workers without recent publications")


def published_at(raw_row: bytes) -> float:
    """Return the Unix seconds at which a worker's row was published; 0 for a malformed row."""
    try:
        return float(orjson.loads(raw_row)["at"])
    except (ValueError, TypeError, KeyError):
        return 0.0


def merge_event_rows(worker_rows: Sequence[_EventsRow | None]) -> dict[str, Any] | None:
    """Merge the event fields of all workers' rows: the worst value of each field; None if no row has events."""
    rows = [row for row in worker_rows if row]
    if not rows:
        return None
    worst_row = min(rows, key=lambda row: 1.0 if row.get("up") is None else float(row["up"]))
    number_fields = {
        field_name: max(_present_values(rows, field_name), default=None) for field_name in EVENT_NUMBER_FIELDS
    }
    return number_fields | {
        "up": None if worst_row.get("up") is None else bool(worst_row["up"]),
        "durability": worst_row.get("durability"),
        "demanded": worst_row.get("demanded"),
        "writes_refused": worst_row.get("writes_refused"),
        **{
            field_name: min(_present_values(rows, field_name), key=Position.parse, default=None)
            for field_name in ("counted_until", "published_until")
        },
    }


def _present_values(event_rows: Sequence[_EventsRow], field_name: str) -> list[Any]:
    return [row[field_name] for row in event_rows if row.get(field_name) is not None]
