"""Hit rates of L1, foretold by Che's approximation. Pure but for a small L1 that is driven to see its table grow.

A least-recently-used cache behaves as if each entry stayed for one characteristic time T after its last use, T being
what makes the expected contents fill the cache (Che, Tung, Wang: Hierarchical Web Caching Systems, IEEE JSAC 2002; why
it is so exact: Fricker, Robert, Roberts, ITC 2012). Times are counted in requests, which are independent of each other.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from cache.tiers.l1 import OVERHEAD_BYTES, READY_BYTES, Entry, LocalKey, LocalTier, size_of

EXACT_RANKS = 10_000
BIN_GROWTH = 1.002
_CHURNED = (24_000, 28_000, 34_000, 40_000)
"""Entries of the small L1: over one octave, since tables double, and large enough for four-byte places."""


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """`keys[i]` keys are asked for with probability `shares[i]` each; all together 1."""

    probabilities: NDArray[np.float64]
    keys: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HitRates:
    """Rates, 0 to 1: in the long run, and over the first `requests` of an empty L1; `entries` once it is full."""

    max_bytes: int
    entries: float
    steady: float
    from_cold: float | None


def zipf(users: int, exponent: float) -> Popularity:
    """The user of rank r is asked for in proportion to r ** -exponent; far ranks share bins of 0.2 %."""
    exact = min(users, EXACT_RANKS)
    edges = [exact]
    while edges[-1] < users:
        edges.append(min(users, max(edges[-1] + 1, int(edges[-1] * BIN_GROWTH))))
    # The midpoint rule: the sum over ranks a+1..b is the integral from a+1/2 to b+1/2.
    low, high = np.array(edges[:-1], np.float64) + 0.5, np.array(edges[1:], np.float64) + 0.5
    power = 1 - exponent
    sums = np.log(high / low) if power == 0 else (high**power - low**power) / power
    keys = np.concatenate([np.ones(exact), high - low])
    mass = np.concatenate([np.arange(1, exact + 1, dtype=np.float64) ** -exponent, sums])
    return Popularity(mass / mass.sum() / keys, keys)


def popularity_of(counts: NDArray[np.int64], users: int) -> Popularity:
    """Popularity from how often each user seen in a log was asked for, of `users` in all.

    Those never seen have together about the share of the log that users seen once have (Good, Biometrika 1953); each
    user seen gives up the same part of a request for it.
    """
    times, keys = np.unique(counts, return_counts=True)
    requests, seen_count = int(counts.sum()), len(counts)
    seen_once_count, unseen = int(keys[0]) if times[0] == 1 else 0, max(0, users - seen_count)
    if not seen_once_count or not unseen:
        return Popularity(times / requests, keys.astype(np.float64))
    discount = min(seen_once_count / seen_count, 0.9)
    request_shares = np.concatenate([times - discount, [discount * seen_count / unseen]]) / requests
    return Popularity(request_shares, np.concatenate([keys, [unseen]]).astype(np.float64))


def hits(
    popularity: Popularity,
    max_bytes: int,
    *,
    record_bytes: int,
    answer_bytes: int = 0,
    requests: float | None = None,
) -> HitRates:
    """Hit rates of an L1 of `max_bytes` for one table of records.

    `answer_bytes`: what the finished answer of a single lookup takes that is kept beside its record from the second
    request on (0: none is, as for batches).
    """
    table = table_bytes()
    record = record_bytes + OVERHEAD_BYTES + table
    answer = answer_bytes + READY_BYTES + table if answer_bytes else 0.0

    def contents(time: float) -> tuple[float, float]:
        """(entries, bytes) expected."""
        x = popularity.probabilities * time
        absent_probability = np.exp(-x)
        if not answer:
            entries = float(popularity.keys @ (1 - absent_probability))
            return entries, record * entries
        # The record is used when it comes and when the answer is made of it; then only the answer is.
        records = float(popularity.keys @ ((1 + x) * absent_probability * (1 - absent_probability)))
        answers = float(popularity.keys @ (1 - absent_probability) ** 2)
        return records + answers, record * records + answer * answers

    time = _characteristic(lambda time: contents(time)[1], max_bytes)
    everything = float(popularity.keys.sum()) * (2 if answer else 1)
    entries = everything if math.isinf(time) else contents(time)[0]
    return HitRates(
        max_bytes, entries, _steady(popularity, time), _from_cold(popularity, time, requests)
    )


def _characteristic(bytes_at: Callable[[float], float], max_bytes: int) -> float:
    low, high = 0.0, 60.0  # log2 of requests
    if bytes_at(2**high) <= max_bytes:
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if bytes_at(2**middle) <= max_bytes else (low, middle)
    return float(2**low)


def _steady(popularity: Popularity, time: float) -> float:
    if math.isinf(time):
        return 1.0
    mass = popularity.probabilities * popularity.keys
    return float(mass @ -np.expm1(-popularity.probabilities * time))


def _from_cold(popularity: Popularity, time: float, requests: float | None) -> float | None:
    """The mean over the first requests: until T the cache has seen as much as it was asked for, then it is full."""
    if requests is None or requests < 1:
        return None
    filling = min(time, requests)
    first = filling - float(popularity.keys @ -np.expm1(-popularity.probabilities * filling))
    return (first + (requests - filling) * _steady(popularity, filling)) / requests


@functools.cache
def table_bytes() -> float:
    """Bytes of an entry in the table of an L1 under churn, beside what `size_of` counts; measured on small ones."""
    return fmean(_table_bytes(entries) for entries in _CHURNED)


def _table_bytes(entries: int) -> float:
    entry = Entry(b"", 0)
    tier = LocalTier(entries * (size_of(entry) + 150))
    for key in range(4 * entries):
        tier.put(LocalKey("", "", key), entry)
    return tier.size_bytes / len(tier) - size_of(entry)
