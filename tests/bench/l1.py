"""A hit in memory, in one thread, beside the cache that Python programs take for it.

The baseline is `cachetools.LRUCache`, bounded by bytes as well (`getsizeof`), with the same keys, records and order of
requests (Zipf 1.0 over all keys), read by `[]`. Rates are of one call each, keys made before.

- `record_vs_cachetools`: hits/s of `LocalTier.get`, over it.
- `ready_vs_cachetools`: of `LocalTier.find_ready_answer`, which the hot route asks first, by the bytes of the request.
- `churn_vs_cachetools`: of `get`, and `put` where it found nothing, with room for a tenth of the keys.

Figures: nanoseconds of single calls by percentiles, those of reading the clock taken off, and what L1 said it held at
most under churn, of its bound. On the first core.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from cachetools import LRUCache

from cache.tiers.l1 import Entry, LocalKey, LocalTier, ReadyAnswer
from tests.bench.tools.harness import Options, Report, alternate, parse
from tests.bench.tools.place import pin

RECORD_BYTES = 616
KEYS, KEYS_QUICK = 200_000, 50_000
CALLS, CALLS_QUICK = 1_000_000, 200_000
TIMED = 50_000
ROOM = 10
"""Of the keys, one in so many finds room under churn."""

Key = TypeVar("Key")


class Bench:
    """The same keys, records and requests for all measurements."""

    def __init__(self, options: Options) -> None:
        count = KEYS_QUICK if options.quick else KEYS
        rng = np.random.default_rng(0)
        weights = 1 / np.arange(1, count + 1)
        drawn = rng.choice(count, CALLS_QUICK if options.quick else CALLS, p=weights / weights.sum())
        hashes = rng.integers(1 << 62, size=count).tolist()
        self.names = [LocalKey("20261123T000000Z-0", "user_topk", key_hash) for key_hash in hashes]
        self.requests = [b"/v1/lookup/user_topk/user-%d?k=20" % number for number in range(count)]
        self.records = [random.Random(number).randbytes(RECORD_BYTES) for number in range(count)]
        self.drawn_names = [self.names[key_index] for key_index in drawn.tolist()]
        self.asked_ready = [self.requests[key_index] for key_index in drawn.tolist()]
        self.entry_of = dict(zip(self.names, (Entry(record, 1) for record in self.records), strict=True))

    def full(self) -> tuple[LocalTier, "LRUCache[LocalKey, Entry]"]:
        """Return both caches with all records, L1 with ready answers, too."""
        local, lru_cache = LocalTier(1 << 40), lru(1 << 40)
        for name, entry in self.entry_of.items():
            local.put(name, entry)
            lru_cache[name] = entry
        for request, record in zip(self.requests, self.records, strict=True):
            local.keep_ready_answer(ReadyAnswer(1, record, b"}", 0, ("user_topk", b"u"), request))
        return local, lru_cache

    def churned(self) -> tuple[LocalTier, "LRUCache[LocalKey, Entry]"]:
        """Return both caches with room for a part of the records."""
        room = len(self.names) // ROOM * (RECORD_BYTES + 400)
        return LocalTier(room), lru(room)


def lru(room: int) -> "LRUCache[LocalKey, Entry]":
    """The baseline."""
    return LRUCache(room, getsizeof=lambda entry: len(entry.record) + 400)


def rate(get: Callable[[Key], object], keys: Sequence[Key]) -> float:
    """Calls per second."""
    started_at = time.perf_counter()
    for key in keys:
        get(key)
    return len(keys) / (time.perf_counter() - started_at)


def singly(get: Callable[[Key], object], keys: Sequence[Key]) -> str:
    """Return p50 / p99 / p99.9 of single calls in nanoseconds."""
    clock, durations_ns, empty = time.perf_counter_ns, [], []
    for key in keys[:TIMED]:
        start_ns = clock()
        get(key)
        durations_ns.append(clock() - start_ns)
        start_ns = clock()
        empty.append(clock() - start_ns)
    percentiles_ns = np.percentile(durations_ns, (50, 99, 99.9)) - np.median(empty)
    return " / ".join(f"{max(0.0, percentile_ns):.0f}" for percentile_ns in percentiles_ns)


def measure(report: Report, options: Options) -> None:
    """All rows."""
    bench = Bench(options)
    local, lru_cache = bench.full()
    base = partial(rate, lru_cache.__getitem__, bench.drawn_names)
    hits = {
        "record_vs_cachetools": partial(rate, local.get, bench.drawn_names),
        "ready_vs_cachetools": partial(rate, local.find_ready_answer, bench.asked_ready),
    }
    report.ratios |= alternate(base, hits, rounds=options.rounds)
    report.figures["cachetools: ns, p50 / p99 / p99.9"] = singly(lru_cache.__getitem__, bench.drawn_names)
    report.figures["record: ns, p50 / p99 / p99.9"] = singly(local.get, bench.drawn_names)
    report.figures["ready: ns, p50 / p99 / p99.9"] = singly(local.find_ready_answer, bench.asked_ready)

    small, base_small = bench.churned()
    peak_bytes = 0

    def through_local(name: LocalKey) -> None:
        nonlocal peak_bytes
        if small.get(name) is None:
            small.put(name, bench.entry_of[name])
            peak_bytes = max(peak_bytes, small.size_bytes)

    def through_other(name: LocalKey) -> None:
        if base_small.get(name) is None:
            base_small[name] = bench.entry_of[name]

    report.ratios["churn_vs_cachetools"] = alternate(
        partial(rate, through_other, bench.drawn_names),
        {"": partial(rate, through_local, bench.drawn_names)},
        rounds=options.rounds,
    )[""]
    report.figures["under churn: L1 held at most, of its bound"] = round(peak_bytes / small.max_bytes, 4)
    report.figures["under churn: records held, L1 / cachetools"] = f"{len(small):,} / {len(base_small):,}"


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("l1", ("cachetools",))
    pin(0, 0)
    report.figures["placement"] = "core 0"
    measure(report, options)
    report.show(options)


if __name__ == "__main__":
    main()
