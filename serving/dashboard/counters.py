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
from serving.events.counts import TEXTS as GAUGES
from serving.metrics.registry import Metrics, counts_of
from serving.traffic.router import FEEDBACK_OF_ARM, REQUESTS_OF_ARM

log = logging.getLogger(__name__)

Counts = dict[str, int]
"""Counts by field.

`r` requests, `e` entities, `a:<source>` answers, `m:<reason>` misses, `s:<stage>` microseconds spent,
`h:<source>:<bucket>` answers whose time fell into a bucket (`serving.metrics.collectors`), `x` work shed under
overload, `n:<experiment>=<arm>` requests of an arm, `f:<experiment>=<arm>=<event>` reported events of an arm,
`v:<result>` events by result, `y:<reason>` requests and pieces of the inbox refused whole, `w` answers with newer
events, `c` lists of these compared with the night's, and `d` the share of them not in the night's, in millionths.
"""

REQUESTS, ENTITIES, SHED, ANSWERS, MISSES, STAGES, TIMES = "r", "e", "x", "a:", "m:", "s:", "h:"

_TOTALS = (REQUESTS, ENTITIES, SHED, ANSWERS, MISSES, REQUESTS_OF_ARM, FEEDBACK_OF_ARM)

_COUNT_BOUND = 2**53
"""Bound of a number: sums below it, over any number of workers, are exact in every JSON parser."""

BIN_S = 10

HISTORY_S = 3_600

BINS_MAX = HISTORY_S // BIN_S + 2
"""Bins kept: an hour of complete ones, the current one, and one more for differing clocks."""

KEY_LIFE_S = HISTORY_S + 300
"""Seconds that a key stays in Redis after its last change."""

GONE_S = 60.0
"""Seconds without a report after which a worker is removed from the table of workers."""

BINS_AT_ONCE = 64
"""Bins published at once: all of them are published again after Redis came back empty."""

_SWEEP_EVERY = 30
"""Publications between two sweeps for dead workers."""

TIMEOUT_S = 2.0

EVENT_TEXTS: Final = ("durability", "demanded", "counted_until", "published_until")
"""Text fields of a worker's row; positions are those of Redis."""

EVENT_NUMBERS: Final = (*GAUGES, "lag_s", "users", "held_bytes", "held_max_bytes")
"""Number fields of a worker's row."""

_Row = Mapping[str, Any]


def collect_counts(metrics: Metrics, shed: int = 0) -> Counts:
    """Collect the counts in `/metrics` of requests, entities, answers and misses, and times by stage."""
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
    for stage, spent in metrics.stage_seconds.spent.items():
        sums[STAGES + stage] = round(spent.sum * 1e6)
    for source, spent in metrics.answer_seconds.spent.items():
        sums.update({f"{TIMES}{source}:{at}": n for at, n in enumerate(spent.counts) if n})
    return dict(sums)


def difference(current_counts: Mapping[str, int], earlier_counts: Mapping[str, int]) -> Counts:
    """Return the counts since `earlier_counts`; unchanged fields are left out."""
    return {
        field: n - earlier_counts.get(field, 0)
        for field, n in current_counts.items()
        if n != earlier_counts.get(field, 0)
    }


def merged_counts(parts: Iterable[Mapping[str, int]]) -> Counts:
    """Return the sum of all parts, by field."""
    sums: dict[str, int] = {}
    for part in parts:
        for field, n in part.items():
            sums[field] = sums.get(field, 0) + n
    return sums


def totals(counts: Mapping[str, int]) -> Counts:
    """Return the fields that are shown as a total."""
    return {field: n for field, n in counts.items() if field.startswith(_TOTALS)}


def counts_of_kind(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    """Return the fields that begin with the prefix, without it."""
    return {field[len(prefix) :]: n for field, n in counts.items() if field.startswith(prefix)}


def histograms(counts: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Return answers by source and bucket."""
    buckets_by_source: dict[str, dict[int, int]] = {}
    for name, n in counts_of_kind(counts, TIMES).items():
        source, _, bucket = name.rpartition(":")
        buckets_by_source.setdefault(source, {})[int(bucket)] = n
    return buckets_by_source


def pack(counts: Mapping[str, int]) -> bytes:
    """Encode counts as JSON; a histogram is its first bucket and a run of counts: a third of the size."""
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
    """Decode `pack`; return no counts for anything else, such as another version's format."""
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


def is_count(value: object) -> bool:
    """True if the value is a number that can be added to others and published."""
    return type(value) in (int, float) and -_COUNT_BOUND < cast(float, value) < _COUNT_BOUND


def start_of(at: float) -> int:
    """Return the start of the bin that contains a moment, both in Unix seconds."""
    return int(at // BIN_S) * BIN_S


class TimeBins:
    """Bins of one worker, `BINS_MAX` at most, each packed (some hundred bytes); Redis may lack `unpublished_starts`."""

    def __init__(self) -> None:
        self.packed: dict[int, bytes] = {}
        self.unpublished_starts: set[int] = set()

    def add(self, at: float, delta: Mapping[str, int]) -> None:
        """Add counts to the bin of a moment of Redis' clock; drop the oldest bin if there are too many."""
        if not delta:
            return
        start = start_of(at)
        earlier_counts: Counts = unpack(self.packed[start]) if start in self.packed else {}
        self.packed[start] = pack(merged_counts((earlier_counts, delta)))
        self.unpublished_starts.add(start)
        while len(self.packed) > BINS_MAX:
            oldest = min(self.packed)
            del self.packed[oldest]
            self.unpublished_starts.discard(oldest)

    def mark_unpublished(self) -> None:
        """Mark all bins as unpublished: Redis may have lost all of them."""
        self.unpublished_starts = set(self.packed)


class MetricsPublisher:
    """Publisher of one worker. It writes absolute values under the worker's name, so a repeated write changes nothing.

    `about` returns the worker's state besides its counts, JSON-able.
    """

    def __init__(
        self,
        control: ControlPlane,
        name: str,
        clock: Callable[[], float],
        read_counts: Callable[[], Counts],
        about: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.name = name
        self.bins = TimeBins()
        self.trouble: str | None = None
        self._control, self._keys, self._clock = control, control.keyspace, clock
        self._collect_counts, self._about = read_counts, about
        self._noted_at = self._started_at = clock()
        self._noted_counts: Counts = read_counts()
        self._is_known = False
        self._publish_count = 0

    def note(self) -> dict[str, Any]:
        """Add the counts since the last call to the bin of the time between; return this worker's current row."""
        now_s, counts = self._clock(), self._collect_counts()
        self.bins.add((self._noted_at + now_s) / 2, difference(counts, self._noted_counts))
        self._noted_at, self._noted_counts = now_s, counts
        return {"at": now_s, "since": self._started_at, **self._about(), "counts": totals(counts)}

    async def publish(self) -> None:
        """Count, and write all unpublished values to Redis; if Redis is away, a later call writes them."""
        row, bins = self.note(), self.bins
        # A copy: what is noted while Redis answers is not told yet.
        starts = {
            start: bins.packed[start]
            for start in sorted(bins.unpublished_starts, reverse=True)[:BINS_AT_ONCE]
        }
        commands: list[tuple[CommandArgument, ...]] = [
            ("HSET", self._keys.workers, self.name, orjson.dumps(row)),
            ("EXPIRE", self._keys.workers, KEY_LIFE_S),
        ]
        for start, blob in starts.items():
            key = self._keys.bin(start)
            commands += ("HSET", key, self.name, blob), ("EXPIRE", key, KEY_LIFE_S)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                is_new = (await self._control.execute_all(commands))[0]
                await self._sweep(row["at"])
        except (TierUnavailable, TimeoutError) as error:
            self._failed(str(error) or f"no reply within {TIMEOUT_S} s")
            return
        bins.unpublished_starts -= {
            start for start, blob in starts.items() if bins.packed.get(start) is blob
        }
        if self.trouble is not None or (is_new and self._is_known):
            bins.mark_unpublished()  # it may be another Redis, or an emptied one
        self.trouble, self._is_known = None, True

    def _failed(self, trouble: str) -> None:
        if self.trouble is None:
            log.warning("the dashboard shows this worker alone: %s", trouble)
        self.trouble = trouble

    async def _sweep(self, now_s: float) -> None:
        self._publish_count += 1
        if self._publish_count % _SWEEP_EVERY:
            return
        (rows,) = await self._control.execute_all([("HGETALL", self._keys.workers)])
        gone_workers = [name for name, raw in rows.items() if published_at(raw) < now_s - GONE_S]
        if gone_workers:
            await self._control.execute_all([("HDEL", self._keys.workers, *gone_workers)])

    async def sign_off(self) -> None:
        """Remove this worker's row from the table: its counts leave `/metrics` as well."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._control.execute_all([("HDEL", self._keys.workers, self.name)])
        except (TierUnavailable, TimeoutError):
            log.debug("not signed off: readers leave out who tells nothing")


def published_at(raw: bytes) -> float:
    """Return the Unix seconds at which a worker's row was published; 0 for a malformed row."""
    try:
        return float(orjson.loads(raw)["at"])
    except (ValueError, TypeError, KeyError):
        return 0.0


def merge_rows(worker_rows: Sequence[_Row | None]) -> dict[str, Any] | None:
    """Merge the event fields of all workers' rows: the worst value of each field; None if no row has events."""
    rows = [row for row in worker_rows if row]
    if not rows:
        return None
    worst = min(rows, key=lambda row: 1.0 if row.get("up") is None else float(row["up"]))
    numbers = {name: max(_present_values(rows, name), default=None) for name in EVENT_NUMBERS}
    return numbers | {
        "up": None if worst.get("up") is None else bool(worst["up"]),
        "durability": worst.get("durability"),
        "demanded": worst.get("demanded"),
        **{
            name: min(_present_values(rows, name), key=Position.parse, default=None)
            for name in ("counted_until", "published_until")
        },
    }


def _present_values(rows: Sequence[_Row], name: str) -> list[Any]:
    return [row[name] for row in rows if row.get(name) is not None]
