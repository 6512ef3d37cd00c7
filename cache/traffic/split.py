"""Split of requests by a salted hash of the caller's key: by percentage, or by ranges of buckets per owner. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import xxhash

BUCKETS = 10_000
"""Number of buckets that all keys are spread over: a share is a whole number of them, 0.01 % each."""

Ranges = tuple[tuple[int, int], ...]
"""Ascending ranges of buckets as (first, one past the last)."""

_HASH_SPACE = 2**64


@dataclass(frozen=True, slots=True)
class KeySplit:
    """Share of `percent` of all keys, drawn anew for every canary generation: no caller is always in the canary."""

    seed: int
    limit: int

    @classmethod
    def of(cls, salt: str, percent: float) -> "KeySplit":
        """Return the split for a salt; a canary's salt is the id of its generation."""
        return cls(split_seed(salt), round(_HASH_SPACE * (percent / 100.0)))

    def has_key(self, key: bytes) -> bool:
        """True if the key is in the share. A larger percentage keeps all keys of a smaller one."""
        return key_hash(key, self.seed) < self.limit


class Owners:
    """Owners of the `BUCKETS` buckets of keys; None for a bucket without owner."""

    __slots__ = ("_names", "_owners", "_seed")

    def __init__(self, salt: str, ranges_by_name: Mapping[str, Ranges]) -> None:
        self._seed = split_seed(salt)
        self._names = (None, *ranges_by_name)
        self._owners = bytearray(BUCKETS)
        for number, ranges in enumerate(ranges_by_name.values(), 1):
            for start, stop in ranges:
                self._owners[start:stop] = bytes([number]) * (stop - start)

    def of(self, key: bytes) -> str | None:
        """Return the name of the owner of the key's bucket, None without owner."""
        return self._names[self._owners[key_hash(key, self._seed) * BUCKETS // _HASH_SPACE]]


def split_seed(salt: str) -> int:
    """Return the seed of a split: the 64-bit xxh3 (seed 0) of its salt."""
    return xxhash.xxh3_64_intdigest(salt.encode())


def key_hash(key: bytes, seed: int) -> int:
    """Return the key's hash for splits of this seed, uniform in 0 to 2**64 - 1."""
    return xxhash.xxh3_64_intdigest(key, seed)


def bucket_count(ranges: Ranges) -> int:
    """Return the number of buckets in the ranges."""
    return sum(stop - start for start, stop in ranges)


def whole_bucket_counts(fraction_by_name: Mapping[str, float]) -> dict[str, int]:
    """Convert fractions to whole numbers of buckets with the same sum; those rounded down most get one more."""
    exact = {name: fraction * BUCKETS for name, fraction in fraction_by_name.items()}
    # Sums of floats: 0.1 * 3 is no whole number of buckets but for its last digits.
    count_by_name = {name: int(exact_count + 1e-6) for name, exact_count in exact.items()}
    remaining_count = round(sum(exact.values())) - sum(count_by_name.values())
    for name in sorted(exact, key=lambda name: count_by_name[name] - exact[name])[:remaining_count]:
        count_by_name[name] += 1
    return count_by_name


def allot_buckets(
    ranges_by_name: Mapping[str, Ranges], fraction_by_name: Mapping[str, float]
) -> dict[str, Ranges]:
    """Return each name's buckets for its new share, in the order of `fraction_by_name`; other names lose all of theirs.

    A shrinking owner gives up its last buckets; a growing one takes the first free ones: a bucket moves only if a share
    does. Raises ValueError when the shares are more than 1.
    """
    counts = whole_bucket_counts(fraction_by_name)
    if sum(counts.values()) > BUCKETS:
        raise ValueError(f"shares sum to {sum(fraction_by_name.values()):g}, more than 1")
    buckets_by_name = {
        name: _buckets_of(ranges_by_name.get(name, ()))[:count] for name, count in counts.items()
    }
    used_buckets = {bucket for buckets in buckets_by_name.values() for bucket in buckets}
    free = (bucket for bucket in range(BUCKETS) if bucket not in used_buckets)
    for name, count in counts.items():
        buckets_by_name[name] += [next(free) for _ in range(count - len(buckets_by_name[name]))]
    return {name: _ranges_of(sorted(buckets)) for name, buckets in buckets_by_name.items()}


def _buckets_of(ranges: Ranges) -> list[int]:
    return [bucket for start, stop in ranges for bucket in range(start, stop)]


def _ranges_of(buckets: Iterable[int]) -> Ranges:
    runs = groupby(enumerate(buckets), lambda placed: placed[1] - placed[0])
    ranges = []
    for _, run in runs:
        run_buckets = [bucket for _, bucket in run]
        ranges.append((run_buckets[0], run_buckets[-1] + 1))
    return tuple(ranges)
