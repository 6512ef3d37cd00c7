"""Streams of keys to replay against caches, and what an exact LRU cache makes of them."""

import gzip
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.usage.miss_ratio_curve import MissRatioCurve
from tests.bench.tools.topk_cases import DATA

Keys = NDArray[np.int64]
"""The key of each read, numbered from 0."""

_AT_ONCE = 128


def trace_file() -> Path | None:
    """The trace `orm-busy`, if the environment names the folder that holds `traces/`."""
    path = Path(os.environ.get(DATA, ""), "traces/orm-busy.trace.txt.gz")
    return path if DATA in os.environ and path.exists() else None


def orm_busy(file: Path) -> Keys:
    """Five million reads of 76,349 objects by a web shop."""
    with gzip.open(file, "rb") as lines:
        return np.array(lines.read().split(), np.int64)


def zipf(keys: int, reads: int, *, skew: float = 1.0, seed: int = 0) -> Keys:
    """Independent reads; the popularity of a key is its rank to the power of -skew."""
    weights = np.arange(1, keys + 1) ** -skew
    return np.random.default_rng(seed).choice(keys, reads, p=weights / weights.sum())


def gowalla(file: Path, *, mean_session: float = 4.0, seed: int = 0) -> dict[str, Keys]:
    """Check-ins as requests for their user's list, and for their place's: who and where are real, when is drawn.

    The data has no times. A user's check-ins are cut into sessions, geometric in number; each begins at any moment, and
    its requests follow each other by a thousandth of the whole on average.
    """
    rng = np.random.default_rng(seed)
    with gzip.open(file, "rt") as lines:
        rows = [np.array(line.split(), np.int64) for line in lines]
    users = np.repeat([row[0] for row in rows], [len(row) - 1 for row in rows])
    locations = np.concatenate([rng.permutation(row[1:]) for row in rows])
    begins = rng.random(len(users)) < 1 / mean_session
    begins[np.flatnonzero(np.diff(users, prepend=-1))] = True
    session = np.cumsum(begins) - 1
    gaps = np.cumsum(rng.exponential(0.001, len(users)))
    when = rng.random(session[-1] + 1)[session] + gaps - gaps[begins][session]
    order = np.argsort(when)
    return {"users": users[order], "places": locations[order]}


def capacities_of(keys: Keys, key_shares: Sequence[float]) -> list[int]:
    """Cache sizes in keys, as shares of all keys of the stream."""
    count = int(keys.max()) + 1
    return [max(1, int(count * key_share)) for key_share in key_shares]


def lru_hit_ratio(keys: Sequence[int], sizes: Sequence[int] | None, capacity: int) -> float:
    """Of a cache that holds `capacity`, empty at first; `sizes` are by key, None: one each."""
    size_by_key: OrderedDict[int, int] = OrderedDict()
    used = hits = 0
    for key in keys:
        if key in size_by_key:
            hits += 1
            size_by_key.move_to_end(key)
            continue
        size = 1 if sizes is None else sizes[key]
        size_by_key[key] = size
        used += size
        while used > capacity:
            used -= size_by_key.popitem(last=False)[1]
    return hits / len(keys)


def spots_of(keys: Keys, seed: int) -> NDArray[np.uint64]:
    """A hash of each key, by key."""
    raws = (key.to_bytes(8, "little") for key in range(int(keys.max()) + 1))
    return np.array([xxhash.xxh3_64_intdigest(raw, seed) for raw in raws], np.uint64)


def sampled(keys: Keys, shards: MissRatioCurve, *, seed: int = 0) -> None:
    """Let the sample see a stream of keys of size 1 as a service does: only what is in the sample gets there."""
    spots = spots_of(keys, seed)
    for start in range(0, len(keys), 4_096):
        part = spots[keys[start : start + 4_096]]
        shards.count(len(part), len(part))
        touches = [(spot, 1) for spot in part[part <= np.uint64(shards.greatest_sampled_spot)].tolist()]
        for at in range(0, len(touches), _AT_ONCE):
            shards.record_touches(touches[at : at + _AT_ONCE])
